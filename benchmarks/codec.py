"""What do packing and padding cost, in copies of the bytes that they write?

Against `clone` of the same bytes, per-row slicing with `torch.nested.as_nested_tensor`,
`torch.nested.to_padded_tensor` of the tensors so made, and a NumPy loop over the rows. Copies of packing are copies
of the ragged bytes, copies of padding are copies of the padded bytes. Before each way runs, the caches are filled with
other bytes, as they are between the stages of a training step.

Below 32 MiB all ways write to memory that the process has used before; a buffer above it is fresh from the system for
every way, `clone` included, and then page faults are part of what a copy costs (`page_faults`). `notes` says
whether the compiled kernel was there.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from columns import Batch, lognormal, make_batch, uniform
from run import Bench, main
from tensordict import TensorDict

from headrace.data_plane import materialize, pack_columns
from headrace.distributed.ragged_kernel import load_kernel

PACK_RAGGED_COPIES, PACK_PADDED_COPIES, PAD_COPIES = 1.5, 2.5, 2.0


def cases(quick: bool) -> dict[str, Batch]:
    """The batches: a usual one, very long rows, very short rows, and a usual one with routes."""
    if quick:
        return {"64x200": make_batch(lognormal(64, 80, 200, shortest=20))}
    return {
        "512x1500": make_batch(lognormal(512, 600, 1500, shortest=200)),
        "64x32k": make_batch(uniform(64, 8192, 32_768)),
        "8192x256": make_batch(uniform(8192, 32, 256)),
        "512x1500+routes": make_batch(lognormal(512, 600, 1500, shortest=200), routes=True),
    }


def numpy_pack(batch: Batch) -> dict[str, np.ndarray[Any, Any]]:
    """Copy row by row into one buffer per column."""
    total, packed = int(batch.lengths.sum()), {}
    for name, column in batch.padded.items():
        array = column.numpy()
        out = np.empty((total, *array.shape[2:]), array.dtype)
        start = 0
        for row, length in enumerate(batch.lengths.tolist()):
            out[start : start + length] = array[row, :length]
            start += length
        packed[name] = out
    return packed


def numpy_pad(values: dict[str, np.ndarray[Any, Any]], batch: Batch) -> dict[str, np.ndarray[Any, Any]]:
    """Copy row by row into zeros."""
    padded = {}
    for name, array in values.items():
        out = np.zeros(batch.padded[name].shape, array.dtype)
        start = 0
        for row, length in enumerate(batch.lengths.tolist()):
            out[row, :length] = array[start : start + length]
            start += length
        padded[name] = out
    return padded


def slice_and_nest(batch: Batch) -> dict[str, torch.Tensor]:
    """Pack as one would with torch alone."""
    lengths = batch.lengths.tolist()
    return {
        name: torch.nested.as_nested_tensor(
            [column[row, :length] for row, length in enumerate(lengths)], layout=torch.jagged
        )
        for name, column in batch.padded.items()
    }


def check(batch: Batch, wire: TensorDict) -> None:
    """Every way gives the same rows, from every form, before anything is timed."""
    sources = {"padded": batch.padded, "ragged": dict(wire.items()), "rows": batch.ragged()}
    plain, nested = numpy_pack(batch), slice_and_nest(batch)
    for form, source in sources.items():
        packed = pack_columns(source, lengths=batch.lengths)
        for name in batch.padded:
            values = packed[name].values()
            assert torch.equal(values, nested[name].values()), (form, name)
            assert np.array_equal(values.numpy(), plain[name]), (form, name)
    back = materialize(wire)
    for name, array in numpy_pad(plain, batch).items():
        assert torch.equal(back[name], batch.padded[name]), name
        assert torch.equal(torch.nested.to_padded_tensor(nested[name], 0), batch.padded[name]), name
        assert np.array_equal(array, batch.padded[name].numpy()), name


def measure_case(bench: Bench, case: str, batch: Batch) -> None:
    """Time one batch, all ways in one run."""
    wire = pack_columns(batch.padded, lengths=batch.lengths)
    check(batch, wire)
    values = {name: wire[name].values() for name in batch.padded}
    arrays = {name: value.numpy() for name, value in values.items()}
    nested, rows = dict(wire.items()), batch.ragged()
    # Tensors that torch made: they know their longest row, without which torch pads to the sum of all lengths.
    made_by_torch = slice_and_nest(batch)
    packing: dict[str, Callable[[], object]] = {
        "one copy": lambda: [value.clone() for value in values.values()],
        "from ragged": lambda: pack_columns(nested, lengths=batch.lengths),
        "from a list of rows": lambda: pack_columns(rows, lengths=batch.lengths),
        "from padded": lambda: pack_columns(batch.padded, lengths=batch.lengths),
        "as_nested_tensor of slices": lambda: slice_and_nest(batch),
        "NumPy loop": lambda: numpy_pack(batch),
    }
    padding: dict[str, Callable[[], object]] = {
        "one copy": lambda: [column.clone() for column in batch.padded.values()],
        "materialize": lambda: materialize(wire),
        "to_padded_tensor": lambda: [
            torch.nested.to_padded_tensor(column, 0) for column in made_by_torch.values()
        ],
        "NumPy loop": lambda: numpy_pad(arrays, batch),
    }
    packed = bench.race(f"{case}: pack", packing, between=bench.evict_caches)
    padded = bench.race(f"{case}: pad", padding, between=bench.evict_caches)
    nbytes = sum(value.nbytes for value in values.values())
    bench.notes[case] = {
        "ragged_bytes": nbytes,
        "padded_bytes": sum(column.nbytes for column in batch.padded.values()),
    }
    bench.figure(f"pack_ragged.{case}", packed["from ragged"].ratio, "copies", at_most=PACK_RAGGED_COPIES)
    bench.figure(f"pack_rows.{case}", packed["from a list of rows"].ratio, "copies")
    bench.figure(f"pack_padded.{case}", packed["from padded"].ratio, "copies", at_most=PACK_PADDED_COPIES)
    bench.figure(f"pad.{case}", padded["materialize"].ratio, "copies", at_most=PAD_COPIES)


def measure(bench: Bench) -> None:
    """Time every batch."""
    bench.notes["compiled_kernel"] = load_kernel() is not None
    for case, batch in cases(bench.quick).items():
        measure_case(bench, case, batch)


if __name__ == "__main__":
    main(measure, __doc__)

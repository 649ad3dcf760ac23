"""What do packing and padding cost on a GPU, in copies of the bytes that they write, and how often do they wait for it?

Against `clone` of the same bytes, `torch.nested.as_nested_tensor` of row slices, and `torch.nested.to_padded_tensor`,
for the batches of `codec.py`. Results are held to those on the CPU before anything is timed. A sync is an operation
that waits for the device, as `torch.cuda.set_sync_debug_mode` reports it. Seconds are by the wall clock, with the
device waited for at the end; other bytes pass through its cache before each round.

    python benchmarks/codec_gpu.py --out codec_gpu.json
    python benchmarks/codec_gpu.py --tiny              # every line on a CPU; says nothing about speed
"""

import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from codec import cases
from columns import Batch
from run import Bench, gpu_options, gpu_parser, write_report
from tensordict import TensorDict

from headrace.data_plane import materialize, pack_columns

SYNCS = 1
_CACHE_BYTES = 256 * 2**20
Columns = dict[str, torch.Tensor]


def count_syncs(call: Callable[[], Any]) -> int:
    """Return how many operations of one call wait for the device."""
    if not torch.cuda.is_available():
        call()
        return 0
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def slice_and_nest(padded: Columns, lengths: list[int]) -> Columns:
    """Pack as one would with torch alone."""
    return {
        name: torch.nested.as_nested_tensor(
            [column[row, :length] for row, length in enumerate(lengths)], layout=torch.jagged
        )
        for name, column in padded.items()
    }


def torch_pad(nested: Columns, names: list[str]) -> Columns:
    """Pad as one would with torch alone; only a jagged tensor that torch made knows its longest row."""
    return {name: torch.nested.to_padded_tensor(nested[name], 0) for name in names}


def supported(nested: Columns, padded: Columns) -> list[str]:
    """Return the columns that `to_padded_tensor` pads right here."""
    names = []
    for name, column in nested.items():
        try:
            back = torch.nested.to_padded_tensor(column, 0)
        except (NotImplementedError, RuntimeError):
            continue
        if torch.equal(back, padded[name]):
            names.append(name)
    return names


def check(batch: Batch, padded: Columns, wire: TensorDict) -> None:
    """The device gives what the CPU gives, from padded columns and from ragged ones."""
    truth = pack_columns(batch.padded, lengths=batch.lengths)
    again = pack_columns(dict(wire.items()), lengths=batch.lengths)
    nested = slice_and_nest(padded, batch.lengths.tolist())
    back = materialize(wire)
    for name, column in batch.padded.items():
        values = truth[name].values()
        for found in (wire[name], again[name], nested[name]):
            assert torch.equal(found.values().cpu(), values), name
        assert back[name].device == padded[name].device, name
        assert torch.equal(back[name].cpu(), column), name


def measure_case(bench: Bench, case: str, batch: Batch, device: torch.device) -> None:
    """Check, count and time one batch."""
    padded = {name: column.to(device) for name, column in batch.padded.items()}
    wire = pack_columns(padded, lengths=batch.lengths)
    check(batch, padded, wire)
    values, nested = {name: wire[name].values() for name in padded}, dict(wire.items())
    lengths, other = batch.lengths.tolist(), cache_filler(device)
    torch_nested = slice_and_nest(padded, lengths)
    names = supported(torch_nested, padded)
    packing: dict[str, Callable[[], Any]] = {
        "one copy": lambda: [value.clone() for value in values.values()],
        "from ragged": lambda: pack_columns(nested, lengths=batch.lengths),
        "from padded": lambda: pack_columns(padded, lengths=batch.lengths),
        "as_nested_tensor of slices": lambda: slice_and_nest(padded, lengths),
    }
    padding: dict[str, Callable[[], Any]] = {
        "one copy": lambda: [column.clone() for column in padded.values()],
        "materialize": lambda: materialize(wire),
        "to_padded_tensor": lambda: torch_pad(torch_nested, names),
    }
    syncs = {way: count_syncs(call) for way, call in {**packing, **padding}.items()}
    times = {
        kind: bench.race(f"{case}: {kind}", ways, clock=clock(device), between=lambda: other.add_(1))
        for kind, ways in (("pack", packing), ("pad", padding))
    }
    bench.notes[case] = {
        "ragged_bytes": sum(value.nbytes for value in values.values()),
        "padded_bytes": sum(column.nbytes for column in padded.values()),
        "syncs": syncs,
        "to_padded_tensor_pads": names,
    }
    for name, way in (
        ("pack_ragged", "from ragged"),
        ("pack_padded", "from padded"),
        ("pad", "materialize"),
    ):
        bench.figure(f"{name}_syncs.{case}", syncs[way], "syncs", at_most=SYNCS)
        found = times["pad" if way == "materialize" else "pack"]
        bench.figure(f"{name}.{case}", found[way].ratio, "copies")
    least = None if bench.quick else 1.0
    faster = times["pack"]["as_nested_tensor of slices"].median_s / times["pack"]["from padded"].median_s
    bench.figure(f"pack_faster_than_torch.{case}", faster, "x", at_least=least)
    pad = times["pad"]["to_padded_tensor"].median_s / times["pad"]["materialize"].median_s
    # No target: torch pads ready-made tensors that know their longest row, one kernel per column, as we do.
    note = "" if len(names) == len(padded) else f"torch pads {len(names)} of {len(padded)} columns"
    bench.figure(f"pad_faster_than_torch.{case}", pad, "x", note=note)


def clock(device: torch.device) -> Callable[[], float]:
    """Return a clock that waits for the device before it is read."""

    def read() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    return read


def cache_filler(device: torch.device) -> torch.Tensor:
    """Return bytes that do not fit in the device's cache."""
    return torch.zeros(_CACHE_BYTES if device.type == "cuda" else 1024, dtype=torch.uint8, device=device)


def main() -> int:
    """Run all batches, print the table, write the report; 1 if a figure misses its target."""
    options = gpu_options(gpu_parser(__doc__, tiny="a tiny batch"))
    device = options.device
    bench = Bench(options.quick, options.repeats, dict(options.target))
    for case, batch in cases(options.quick).items():
        measure_case(bench, case, batch, device)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    bench.notes["hardware"] = {"device": str(device), "gpu": gpu, "cuda": torch.version.cuda}
    report = bench.report("codec_gpu", (__doc__ or "").splitlines()[0])
    write_report(report, options.out)
    for figure in bench.figures:
        bound = "" if figure.target is None else f"{'>=' if figure.at_least else '<='} {figure.target:g}"
        print(
            f"{figure.name:<48}{figure.value:>10.2f} {figure.unit:<7} {bound} {figure.verdict}",
            file=sys.stderr,
        )
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())

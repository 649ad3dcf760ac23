"""Ragged rows on a CUDA device: same bits as on the CPU, for every dtype, and at most one synchronisation per call."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from headrace.data_plane import materialize, pack_columns
from headrace.data_plane.codec import RowPacker
from headrace.data_plane.wire import wire_tensordict
from headrace.distributed import ragged
from headrace.distributed.offsets_reader import OffsetsReader
from headrace.distributed.ragged import (
    RowLayout,
    gather_dense,
    gather_rows,
    gather_spans,
    nested_from_ragged,
    offsets_from_lengths,
    ragged_from_nested,
    take_apart,
)
from ragged_cases import DTYPES, arbitrary, strip_padding

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTHS = torch.tensor([3, 0, 5, 1])
# In one block and in many, rows shorter than a warp, empty rows at both ends, one row, one token.
SHAPES = {
    "small": ([3, 0, 5, 1], 6),
    "long": ([0, 5000, 1, 4096, 0], 5001),
    "many": ([i * 7 % 33 for i in range(3000)], 33),
    "blocks": ([1, 255, 256, 257, 1023, 1024, 1025], 1025),
    "one": ([2], 9),
    "empty": ([0, 0], 4),
}


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def synchronisations(expected: int) -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = [str(warning.message) for warning in caught if "synchroniz" in str(warning.message)]
    assert len(found) == expected, found


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Do what `reference.same_bits` does, for millions of bytes."""
    parts = [tensor.cpu().contiguous().flatten().view(torch.uint8) for tensor in (left, right)]
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(*parts)


def without_kernels(call: str, tensor: torch.Tensor, layout: RowLayout) -> torch.Tensor:
    """Strip or pad by index, as autograd needs it."""
    return getattr(layout, call)(tensor.requires_grad_()).detach()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("trailing", [(), (2, 3), (16,), (5, 8)], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_device_gives_the_same_bits_as_the_cpu(
    dtype: torch.dtype, trailing: tuple[int, ...], shape: str
) -> None:
    lengths, width = SHAPES[shape]
    padded = arbitrary((len(lengths), width, *trailing), dtype)
    layout = RowLayout(lengths, width)
    expected = layout.strip(padded)
    on_device = padded.to("cuda")
    with no_synchronisation():
        values = layout.strip(on_device)
        again = layout.with_width(width + 1).pad(values, 1)
        zeros = layout.pad(values)
    assert values.is_cuda
    assert same_bits(values.cpu(), expected)
    assert same_bits(again.cpu(), layout.with_width(width + 1).pad(expected, 1))
    assert same_bits(zeros.cpu(), layout.pad(expected))
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(1)).repeat(2)
    with no_synchronisation():
        gathered, _ = gather_rows(values, layout.offsets, order)
        rows = gather_dense(on_device, order)
    assert same_bits(gathered.cpu(), gather_rows(expected, layout.offsets, order)[0])
    assert same_bits(rows.cpu(), gather_dense(padded, order))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_apart_and_values_off_the_word_boundary_are_copied_whole(dtype: torch.dtype) -> None:
    wide = arbitrary((4, 9, 4), dtype)
    for source in (wide[:, 1:7], wide[:, :6], wide[:, 2:8, 1:], wide[1:].repeat(2, 1, 1)[1:5, 3:]):
        layout = RowLayout(LENGTHS, 6)
        truth, values = layout.strip(source), layout.strip(source.to("cuda"))
        apart = layout.strip(wide.to("cuda")[:, 1:7])
        assert same_bits(values.cpu(), truth)
        assert same_bits(apart.cpu(), layout.strip(wide[:, 1:7]))
        shifted = RowLayout([2, 0, 6], 7)
        assert same_bits(shifted.pad(values[1:], 1).cpu(), shifted.pad(truth[1:], 1))
        flat, flat_truth = values.flatten()[1:], truth.flatten()[1:]
        rest = RowLayout([0, len(flat)], len(flat) + 3)
        assert same_bits(rest.pad(flat, 1).cpu(), rest.pad(flat_truth, 1))


@pytest.mark.parametrize(
    ("dtype", "pad_value"),
    [
        (torch.int64, -1),
        (torch.int64, 2**40),
        (torch.uint16, 65_535),
        (torch.float32, -0.0),
        (torch.float32, float("nan")),
        (torch.bfloat16, float("-inf")),
        (torch.float64, 0.1),
        (torch.complex64, 2.0),
        (torch.complex128, 2.0),
    ],
    ids=str,
)
def test_every_pad_value_is_written_as_on_the_cpu(dtype: torch.dtype, pad_value: float) -> None:
    layout = RowLayout(LENGTHS, 6)
    values = torch.zeros((9, 2), dtype=dtype)
    assert same_bits(layout.pad(values.to("cuda"), pad_value).cpu(), layout.pad(values, pad_value))


def test_the_kernels_give_what_indices_give() -> None:
    layout = RowLayout(LENGTHS, 6)
    padded = torch.rand(4, 6, 3, device="cuda")
    values = layout.strip(padded)
    assert torch.equal(values, without_kernels("strip", padded.clone(), layout))
    assert torch.equal(layout.pad(values), without_kernels("pad", values.clone(), layout))


def test_the_kernels_are_what_copies_here() -> None:
    pytest.importorskip("triton")
    assert ragged._device_kernels(torch.zeros(1, device="cuda")) is not None


def test_a_long_span_among_very_many_is_gathered_whole() -> None:
    lengths = torch.ones(200_000, dtype=torch.int64)
    lengths[77] = 50_000
    starts = torch.arange(200_000)
    values = torch.arange(250_000, dtype=torch.int32)
    with no_synchronisation():
        found = gather_spans(values.to("cuda", non_blocking=True), starts, lengths)
    assert torch.equal(found.cpu(), gather_spans(values, starts, lengths))


def test_lengths_on_the_device_cost_one_synchronisation() -> None:
    padded, lengths = torch.rand(4, 6, device="cuda"), LENGTHS.cuda()
    with synchronisations(1):
        values, offsets = strip_padding(padded, lengths)
    assert offsets.is_cuda
    assert torch.equal(values.cpu(), strip_padding(padded.cpu(), LENGTHS)[0])


def test_nested_tensors_come_apart_and_together_on_the_device() -> None:
    values, offsets = strip_padding(torch.rand(4, 6, device="cuda"), LENGTHS)
    back, back_offsets, dim = ragged_from_nested(nested_from_ragged(values, offsets))
    assert back.data_ptr() == values.data_ptr()
    assert (back_offsets.device.type, back_offsets.diff().tolist(), dim) == ("cpu", LENGTHS.tolist(), 1)


@pytest.mark.parametrize("grad", [False, True])
def test_a_nested_tensor_is_made_without_waiting(grad: bool) -> None:
    values = torch.rand(9, device="cuda", requires_grad=grad)
    offsets = offsets_from_lengths(LENGTHS)
    with no_synchronisation():
        nested = nested_from_ragged(values, offsets)
    assert nested.is_cuda
    assert nested.offsets().tolist() == offsets.tolist()


def test_rows_that_lie_apart_in_a_nested_tensor_are_gathered_after_one_synchronisation() -> None:
    base = torch.rand(4, 6, device="cuda")
    narrowed = torch.nested.narrow(base, 1, torch.zeros(4).long().cuda(), LENGTHS.cuda(), layout=torch.jagged)
    with synchronisations(1):
        values, offsets, _, _ = take_apart(narrowed, OffsetsReader([narrowed]))
    assert torch.equal(values, strip_padding(base, LENGTHS)[0])
    assert offsets.diff().tolist() == LENGTHS.tolist()


def test_offsets_that_lie_apart_on_the_device_are_those_that_they_show() -> None:
    for dtype in (torch.int64, torch.int32):
        offsets = torch.tensor([[0, 9], [2, 9], [6, 9]], device="cuda", dtype=dtype)[:, 0]
        nested = torch.nested.nested_tensor_from_jagged(torch.arange(6, device="cuda"), offsets)
        padded = materialize(wire_tensordict({"x": nested}, 2))["x"]
        assert padded.tolist() == [[0, 1, 0, 0], [2, 3, 4, 5]]
        packed = pack_columns({"input_ids": nested, "token_mask": padded.to(torch.uint8)}, lengths=[2, 4])
        assert packed["token_mask"].values().tolist() == list(range(6))
        assert packed["input_ids"].offsets().is_contiguous()


def columns_of() -> dict[str, torch.Tensor]:
    scores = torch.arange(32.0).view(4, 8) / 7
    return {
        "input_ids": torch.arange(24).view(4, 6),
        "token_mask": torch.ones(4, 6, dtype=torch.uint8),
        "generation_logprobs": scores[:, :6],
        "prev_logprobs": scores,
        "advantages": -scores[:, 1:7],
    }


def test_padded_columns_are_packed_without_waiting_and_padded_after_one_synchronisation() -> None:
    truth = pack_columns(columns_of(), lengths=LENGTHS)
    padded = {name: column.cuda() for name, column in columns_of().items()}
    with no_synchronisation():
        wire = pack_columns(padded, lengths=LENGTHS)
    assert len({id(wire[name].offsets()) for name in padded}) == 1
    with synchronisations(1):
        back = materialize(wire)
    with no_synchronisation():
        jagged = materialize(wire, layout="jagged")
    expected = materialize(truth)
    for name in padded:
        assert wire[name].is_cuda
        assert torch.equal(wire[name].values().cpu(), truth[name].values())
        assert torch.equal(back[name].cpu(), expected[name])
        assert jagged[name].offsets() is wire[name].offsets()


@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS.tolist()], ids=["tensor", "list"])
def test_ragged_columns_that_share_their_offsets_are_packed_after_one_synchronisation(
    lengths: torch.Tensor | list[int],
) -> None:
    wire = pack_columns({name: column.cuda() for name, column in columns_of().items()}, lengths=LENGTHS)
    given = dict(wire.items())
    with synchronisations(1):
        again = pack_columns(given, lengths=lengths)
    assert all(again[name] is given[name] for name in given)


def test_offsets_of_all_columns_and_lengths_come_in_one_copy() -> None:
    parts = pack_columns(columns_of(), lengths=LENGTHS)
    given = {
        name: nested_from_ragged(parts[name].values().cuda(), offsets_from_lengths(LENGTHS).cuda())
        for name in columns_of()
    }
    lengths = LENGTHS.cuda()
    with synchronisations(1):
        packer = RowPacker(lengths, columns=given.values())
        packed = wire_tensordict({name: packer.pack(name, column) for name, column in given.items()}, 4)
    assert len({id(column.offsets()) for column in packed.values() if isinstance(column, torch.Tensor)}) == 1
    with synchronisations(1):
        back = materialize(wire_tensordict(given, 4))
    for name, column in materialize(parts).items():
        assert torch.equal(back[name].cpu(), column)


def test_gradients_flow_on_the_device() -> None:
    values = torch.rand(9, device="cuda", requires_grad=True)
    with no_synchronisation():
        padded = RowLayout(LENGTHS, 6).pad(values)
    padded.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1.0] * 9

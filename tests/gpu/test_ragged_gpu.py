"""Ragged rows on a CUDA device: same bits as on the CPU, for every dtype, without a synchronisation per row."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from headrace.distributed.ragged import (
    RowLayout,
    gather_dense,
    gather_rows,
    nested_from_ragged,
    pad_ragged,
    ragged_from_nested,
    strip_padding,
)
from ragged_cases import DTYPES, arbitrary
from reference import same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTHS = torch.tensor([3, 0, 5, 1])


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("trailing", [(), (2, 3)], ids=str)
def test_the_device_gives_the_same_bits_as_the_cpu(dtype: torch.dtype, trailing: tuple[int, ...]) -> None:
    padded = arbitrary((4, 6, *trailing), dtype)
    values, offsets = strip_padding(padded.cuda(), LENGTHS)
    expected, expected_offsets = strip_padding(padded, LENGTHS)
    assert values.is_cuda
    assert same_bits(values.cpu(), expected)
    assert torch.equal(offsets.cpu(), expected_offsets)
    again = pad_ragged(values, offsets, 7, 1)
    assert same_bits(again.cpu(), pad_ragged(expected, expected_offsets, 7, 1))
    order = torch.tensor([2, 2, 0, 1])
    gathered, _ = gather_rows(values, expected_offsets, order)
    assert same_bits(gathered.cpu(), gather_rows(expected, expected_offsets, order)[0])
    assert same_bits(gather_dense(padded.cuda(), order).cpu(), gather_dense(padded, order))


def test_lengths_on_the_device_cost_one_synchronisation() -> None:
    padded = torch.rand(4, 6, device="cuda")
    layout = RowLayout(LENGTHS.cuda(), 6)
    values = layout.strip(padded)
    with no_synchronisation():
        layout.pad(layout.strip(padded))
    assert torch.equal(values.cpu(), strip_padding(padded.cpu(), LENGTHS)[0])


def test_nested_tensors_come_apart_and_together_on_the_device() -> None:
    values, offsets = strip_padding(torch.rand(4, 6, device="cuda"), LENGTHS)
    back, back_offsets, dim = ragged_from_nested(nested_from_ragged(values, offsets))
    assert back.data_ptr() == values.data_ptr()
    assert (back_offsets.device.type, back_offsets.diff().tolist(), dim) == ("cpu", LENGTHS.tolist(), 1)


def test_gradients_flow_on_the_device() -> None:
    values = torch.rand(9, device="cuda", requires_grad=True)
    padded = RowLayout(LENGTHS, 6).pad(values)
    padded.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1.0] * 9

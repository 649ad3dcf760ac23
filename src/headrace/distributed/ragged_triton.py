"""Triton kernels of `ragged`: rows copied between padded and ragged memory on CUDA, whatever their dtype.

Kernels see words: the widest integers, 8 bytes at most, that tokens and addresses are multiples of. A program copies
one block of one row, so that few long rows and many short ones both fill the device. Nothing here waits for it:
sizes of grids and results come from numbers that the caller knows. Elements have 8 bytes at most.
"""

# mypy: disable-error-code="import-not-found,untyped-decorator,no-untyped-def,no-untyped-call"

import sys
from collections.abc import Sequence
from math import prod

import torch
import triton
import triton.language as tl

_WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
_BLOCKS = ((256, 2), (1024, 4))
"""(words, warps) of a program: the first for rows that fit in it."""
_MOST_PROGRAMS = 2**17
"""Programs that take spans, of which a long one among many short ones would otherwise ask for billions."""


def strip(padded: torch.Tensor, offsets: torch.Tensor, longest: int, total: int) -> torch.Tensor:
    """Return padded rows (N, S, ...) back to back, (total, ...); `offsets` (N + 1) int64 on the same device.

    There is at least one byte to copy, as there is for all functions of this module.
    """
    trailing = padded.shape[2:]
    elements = prod(trailing)
    if not padded[0].is_contiguous() or padded.stride(0) % elements:
        padded = padded.contiguous()
    out = padded.new_empty((total, *trailing))
    width = padded.stride(0) // elements
    _copy(padded, None, width, offsets, out, longest, elements * padded.element_size())
    return out


def gather(
    values: torch.Tensor,
    starts: torch.Tensor,
    offsets: torch.Tensor,
    longest: int,
    total: int,
) -> torch.Tensor:
    """Return spans of values (T, ...) back to back: span i starts at token `starts[i]` and goes to `offsets[i]`."""
    source = values.contiguous()
    trailing = source.shape[1:]
    out = source.new_empty((total, *trailing))
    _copy(source, starts, 0, offsets, out, longest, prod(trailing) * source.element_size())
    return out


def pad(
    values: torch.Tensor, offsets: torch.Tensor, shape: Sequence[int], fill: bytes | None
) -> torch.Tensor:
    """Return ragged rows as padded ones of `shape`; `fill` is one padding element, None is zeros."""
    source, (rows, width) = values.contiguous(), shape[:2]
    out = source.new_empty(shape)
    step = prod(shape[2:]) * source.element_size()
    size = _word_bytes(step, source, out)
    filler = fill * (size // len(fill)) if fill else b""
    words = step // size
    block, warps = _block(width * words)
    blocks = triton.cdiv(width * words, block)
    with torch.cuda.device_of(source):
        _pad_rows[(rows * blocks,)](
            triton.reinterpret(source, _WORDS[size]),
            offsets,
            triton.reinterpret(out, _WORDS[size]),
            words,
            width,
            int.from_bytes(filler, sys.byteorder, signed=True),
            blocks,
            block=block,
            num_warps=warps,
        )
    return out


def _copy(
    source: torch.Tensor,
    starts: torch.Tensor | None,
    width: int,
    offsets: torch.Tensor,
    out: torch.Tensor,
    longest: int,
    step: int,
) -> None:
    """Copy spans of tokens of `step` bytes that begin at `starts`, or else `width` tokens apart, to `offsets`."""
    size = _word_bytes(step, source, out)
    words, rows = step // size, offsets.shape[0] - 1
    block, warps = _block(longest * words)
    blocks = min(triton.cdiv(longest * words, block), max(1, _MOST_PROGRAMS // rows))
    with torch.cuda.device_of(source):
        _copy_rows[(rows * blocks,)](
            triton.reinterpret(source, _WORDS[size]),
            starts,
            offsets,
            triton.reinterpret(out, _WORDS[size]),
            words,
            width,
            blocks,
            block=block,
            num_warps=warps,
        )


def _word_bytes(step: int, *tensors: torch.Tensor) -> int:
    """Return the largest of 1, 2, 4, 8 that divides the bytes of a token and the addresses."""
    bits = step | 8
    for tensor in tensors:
        bits |= tensor.data_ptr()
    return bits & -bits


def _block(words: int) -> tuple[int, int]:
    small, large = _BLOCKS
    return small if words <= small[0] else large


# `step` is left to be specialised: rows of a multiple of 16 words are moved 16 bytes at a time.
@triton.jit(do_not_specialize=["width", "blocks"], do_not_specialize_on_alignment=["starts", "offsets"])
def _copy_rows(source, starts, offsets, out, step, width, blocks, block: tl.constexpr):
    row = tl.program_id(0) // blocks
    begin = tl.load(offsets + row)
    size = (tl.load(offsets + row + 1) - begin) * step
    start = row.to(tl.int64) * width if starts is None else tl.load(starts + row)
    first = (tl.program_id(0) % blocks).to(tl.int64) * block
    for near in range(first, size, blocks * block):
        place = near + tl.arange(0, block)
        words = tl.load(source + start * step + place, mask=place < size)
        tl.store(out + begin * step + place, words, mask=place < size)


@triton.jit(do_not_specialize=["width", "fill", "blocks"], do_not_specialize_on_alignment=["offsets"])
def _pad_rows(values, offsets, out, step, width, fill, blocks, block: tl.constexpr):
    row = tl.program_id(0) // blocks
    begin = tl.load(offsets + row)
    size = (tl.load(offsets + row + 1) - begin) * step
    span = width.to(tl.int64) * step
    place = (tl.program_id(0) % blocks).to(tl.int64) * block + tl.arange(0, block)
    filler = fill.to(values.dtype.element_ty)
    words = tl.load(values + begin * step + place, mask=place < size, other=filler)
    tl.store(out + row * span + place, words, mask=place < span)

"""Copies of ragged rows on the CPU where the C extension was not built."""

from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.errors import SchemaError

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]
PadValue = int | float | bool


def pad_element(pad_value: PadValue, dtype: torch.dtype) -> torch.Tensor:
    """Return the pad value as a 0-D tensor on the CPU; one of floating point is the nearest that its dtype has."""
    try:
        element = torch.full((), pad_value, dtype=dtype)
    except TypeError as error:
        raise SchemaError(f"pad value {pad_value} is no number; expected one that {dtype} holds") from error
    except (RuntimeError, OverflowError) as error:
        raise SchemaError(f"pad value {pad_value} does not fit in {dtype}") from error
    held = element.item()
    is_one = held == pad_value or (held != held and pad_value != pad_value)  # NaN equals nothing
    is_inexact = dtype.is_floating_point or dtype.is_complex
    if not is_one and not (is_inexact and abs(pad_value) <= torch.finfo(dtype).max):
        raise SchemaError(f"pad value {pad_value} does not fit in {dtype}")
    return element


# Row by row: a row costs about 0.3 us beside its bytes, so that short rows lose most.


def pad_rows(values: Bytes, offsets: Ints, filler: bytes | None, out: Bytes) -> None:
    """Write rows at byte `offsets` (N + 1) as N equal parts of `out`; the rest is from `filler`'s start, or zeros."""
    span = len(out) // (len(offsets) - 1)
    source, target, padding, first = values.data, out.data, memoryview(filler or bytes(span)), 0
    for start, stop in pairwise(offsets.tolist()):
        end = first + stop - start
        target[first:end] = source[start:stop]
        first += span
        target[end:first] = padding[: first - end]


def join_spans(source: Bytes, starts: Ints, lengths: Ints, out: Bytes) -> None:
    """Write the byte spans of `lengths[i]` from `starts[i]` on back to back."""
    view, target, first = source.data, out.data, 0
    for start, length in zip(starts.tolist(), lengths.tolist()):
        end = first + length
        target[first:end] = view[start : start + length]
        first = end

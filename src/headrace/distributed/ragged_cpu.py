"""Moves ragged rows between byte buffers on the CPU, whatever their dtype.

A token is `step` bytes. Short rows move as windows: overlapping fixed-size views of a buffer, gathered or
scattered in one NumPy call at a few nanoseconds per row. Long rows move one by one, which costs about 0.1 us
each and copies nothing that is not asked for. Large results lie in NumPy's memory, which asks for huge pages: a
fresh buffer of tens of megabytes costs a third of one from elsewhere.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]
TailWindows = Sequence[tuple[int, Ints]]

LONG_ROW_BYTES = 4_096
"""Padded rows of at least this size are padded one by one, and spans of this mean size joined so."""
WASTED_BYTES = 8_192
"""Padding per row above which packing goes row by row: copying the padding would cost more."""
FRESH_BYTES = 33_554_432
"""Size from which malloc takes a buffer fresh from the system each time, so that huge pages pay."""
_RUN_TOKENS = 32
"""Mean length from which copying runs one by one beats an index per token."""
_ROWS_PER_GROUP = 64
_SPANS_PER_JOIN = 512


def windows(buffer: Bytes, step: int, span: int) -> NDArray[np.void]:
    """View every stretch of `span` bytes that starts at a multiple of `step`, without a copy."""
    count = (len(buffer) - span) // step + 1
    return np.ndarray((count,), np.dtype((np.void, span)), buffer, strides=(step,))


def tail_windows(lengths: Ints, width: int) -> TailWindows:
    """Return (size, first tokens) pairs of windows that together are exactly the padding of (N, width) rows.

    With few distinct tails, each is one window of its own size. Otherwise a tail of t tokens is two windows
    of the largest power of two <= t, one at each end.
    """
    tails = width - lengths
    distinct = int(np.count_nonzero(np.bincount(tails, minlength=1)))
    exact = distinct * _ROWS_PER_GROUP <= len(tails)
    sizes = tails if exact else _powers_of_two(width).take(tails)
    order = np.argsort(sizes.astype(np.uint16), kind="stable")
    ends = width * np.arange(1, len(tails) + 1)
    firsts, lasts = (ends - tails).take(order), (ends - sizes).take(order)
    groups: list[tuple[int, Ints]] = []
    stop = 0
    for size, count in enumerate(np.bincount(sizes, minlength=1).tolist()):
        group = slice(stop, stop + count)
        stop += count
        if size and count:
            groups.append((size, firsts[group] if exact else np.append(firsts[group], lasts[group])))
    return groups


def _powers_of_two(largest: int) -> Ints:
    """Return a table from n to the largest power of two <= n; 0 has none and stays 0."""
    table = np.zeros(largest + 1, np.int64)
    power = 1
    while power <= largest:
        table[power:] = power
        power *= 2
    return table


def pad_short_rows(values: Bytes, offsets: Ints, width: int, fill: bytes, tails: TailWindows) -> Bytes:
    """Return N padded rows of `width` tokens; `fill` is one padding token, so `len(fill)` is the step."""
    step, starts = len(fill), offsets[:-1]
    span, rows = width * step, len(starts)
    last = len(values) // step - width
    # From row `inside` on, a window would reach beyond the buffer: those rows are read from a longer copy.
    inside = int(np.searchsorted(starts, last, side="right")) if last >= 0 else 0
    # Row numbers beyond the last window are clipped here and read again below.
    out = windows(values, step, span)[np.minimum(starts, last)] if inside else _rows_of(span, rows)
    if inside < rows:
        first = int(starts[inside])
        rest = np.empty(len(values) - first * step + span, np.uint8)
        rest[: len(values) - first * step] = values[first * step :]
        out[inside:] = windows(rest, step, span)[starts[inside:] - first]
    flat = out.view(np.uint8)
    for size, firsts in tails:
        padding = np.frombuffer(fill * size, np.dtype((np.void, size * step)))
        windows(flat, step, size * step)[firsts] = padding
    return flat


def _rows_of(span: int, rows: int) -> NDArray[np.void]:
    return np.empty(rows, np.dtype((np.void, span)))


def pad_long_rows(values: Bytes, offsets: Ints, width: int, fill: bytes) -> Bytes:
    """Return N padded rows of `width` tokens; `fill` is one padding token, so `len(fill)` is the step."""
    span, bounds = width * len(fill), (offsets * len(fill)).tolist()
    # Zeroing all memory at once beats writing the padding row by row; that holds for zeros only.
    padding = memoryview(fill * width) if any(fill) else None
    allocate = np.zeros if padding is None else np.empty
    out: Bytes = allocate(span * (len(bounds) - 1), np.uint8)
    source, target, first = values.data, out.data, 0
    for start, stop in pairwise(bounds):
        end = first + stop - start
        target[first:end] = source[start:stop]
        first += span
        if padding is not None:
            target[end:first] = padding[: first - end]
    return out


def strip_short_rows(padded: Bytes, row_step: int, offsets: Ints, width: int, step: int) -> Bytes:
    """Return the rows of a padded buffer back to back; row i starts at byte `i * row_step`."""
    span, total = width * step, int(offsets[-1])
    rows = np.ndarray((len(offsets) - 1,), np.dtype((np.void, span)), padded, strides=(row_step,))
    out = np.empty(total * step + span, np.uint8)
    # Rows are written in order, so that each overwrites the padding that came with the one before.
    windows(out, step, span)[offsets[:-1]] = rows
    return out[: total * step]


def join_spans(source: Bytes, starts: Ints, stops: Ints) -> Bytes | bytearray:
    """Return the byte spans [start, stop) back to back."""
    view, spans = source.data, list(zip(starts.tolist(), stops.tolist()))
    total = int((stops - starts).sum())
    if len(spans) <= _SPANS_PER_JOIN and total < FRESH_BYTES:
        return bytearray().join([view[a:b] for a, b in spans])
    out = np.empty(total, np.uint8)
    target, first = out.data, 0
    if total > LONG_ROW_BYTES * len(spans):
        for start, stop in spans:
            end = first + stop - start
            target[first:end] = view[start:stop]
            first = end
        return out
    # In portions, because the interpreter slows down tenfold over a long list of fresh views.
    for i in range(0, len(spans), _SPANS_PER_JOIN):
        part = b"".join([view[a:b] for a, b in spans[i : i + _SPANS_PER_JOIN]])
        target[first : first + len(part)] = part
        first += len(part)
    return out


def gather_spans(values: Bytes, starts: Ints, lengths: Ints, step: int) -> Bytes | bytearray:
    """Return the spans of `lengths[i]` tokens from token `starts[i]` on, back to back, in any order."""
    starts, lengths = merge_spans(starts, lengths)
    if int(lengths.sum()) >= _RUN_TOKENS * len(lengths):
        return join_spans(values, starts * step, (starts + lengths) * step)
    return windows(values, step, step).take(span_indices(starts, lengths)).view(np.uint8)


def merge_spans(starts: Ints, lengths: Ints) -> tuple[Ints, Ints]:
    """Join spans that follow one another; empty ones vanish.

    >>> merge_spans(np.array([4, 6, 0]), np.array([2, 1, 3]))
    (array([4, 0]), array([3, 3]))
    """
    filled = lengths > 0
    starts, lengths = starts[filled], lengths[filled]
    if not len(starts):
        return starts, lengths
    stops = starts + lengths
    heads = np.flatnonzero(np.append(True, starts[1:] != stops[:-1]))
    return starts[heads], stops[np.append(heads[1:], len(stops)) - 1] - starts[heads]


def span_indices(starts: Ints, lengths: Ints) -> Ints:
    """Return the indices start, start + 1, ... of every span, one after the other."""
    shifts = starts - (np.cumsum(lengths) - lengths)
    indices: Ints = np.arange(int(lengths.sum())) + np.repeat(shifts, lengths)
    return indices

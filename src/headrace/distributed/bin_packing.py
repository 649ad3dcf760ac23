"""Rows into bins of a token budget: which bin each row goes to, and how many bins there are."""

import heapq
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from headrace.distributed.balance import IntArray, descending_order
from headrace.errors import ConfigError, SchemaError
from headrace.utils.seeding import derive_seed

Algorithm = Literal[
    "first_fit_decreasing", "modified_first_fit_decreasing", "first_fit_shuffle", "concatenative"
]
"""`first_fit_shuffle` places rows in a random order that depends only on their number."""
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)

LONGEST_ROW = 2**31 - 1
"""Tokens of a row at most, as in a store; sums and costs of rows fit in 64 bits."""

_ROW_BY_ROW = 4096
"""Rows of a batch up to which bins are filled by plain loops, and modified first fit is used at all."""


def as_lengths(lengths: npt.ArrayLike) -> IntArray:
    array = np.asarray(lengths)
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise SchemaError(
            f"lengths have shape {array.shape} and dtype {array.dtype}; expected one integer per row"
        )
    if int(array.min()) < 0:
        row = int(array.argmin())
        raise SchemaError(f"row {row} has length {int(array[row])}; expected 0 or more")
    if int(array.max()) > LONGEST_ROW:
        row = int(array.argmax())
        raise SchemaError(f"row {row} has length {int(array[row])}; expected {LONGEST_ROW} at most")
    return array.astype(np.int64)


def check_fits(
    lengths: IntArray,
    rounded: IntArray,
    budget_tokens: int,
    *,
    knob: str,
    row_names: Sequence[str] | None = None,
) -> None:
    """Compare every row's rounded length with the token budget."""
    if int(rounded.max(initial=0)) <= budget_tokens:
        return
    row = int(rounded.argmax())
    name = f"row {row}" if row_names is None else f"sample '{row_names[row]}' (row {row})"
    length, most = int(lengths[row]), int(rounded[row])
    after = "" if most == length else f" ({most} after rounding)"
    raise ConfigError(
        f"{name} has {length} tokens{after}, more than the {budget_tokens} that {knob} allows in one "
        f"microbatch; raise {knob} to at least {most}, or drop the row"
    )


def check_algorithm(algorithm: str) -> None:
    if algorithm not in ALGORITHMS:
        raise ConfigError(
            f"packing algorithm '{algorithm}' is unknown; choose one of {', '.join(ALGORITHMS)}"
        )


def pack_shards(
    lengths: IntArray, shard_of_row: IntArray, shards: int, capacity: int, algorithm: str, order: IntArray
) -> IntArray:
    """Return each row's bin in its shard, (N,); shards are packed apart, from bin 0 on.

    `order` is that of descending lengths.

    Modified first-fit-decreasing of more than 4,096 rows is plain first-fit-decreasing, whose bins are as many there.
    """
    if algorithm == "first_fit_shuffle":
        seed = derive_seed(0, algorithm, len(lengths))
        order = np.random.default_rng(seed).permutation(len(lengths))
    order = order[descending_order(shards - 1 - shard_of_row[order])]  # (N,): shard after shard
    counts = np.bincount(shard_of_row, minlength=shards)
    bin_of = np.zeros(len(lengths), dtype=np.int64)
    if len(lengths) > _ROW_BY_ROW:
        bin_of[order] = _first_fit_all(lengths[order], counts, capacity)
        return bin_of
    pack = _modified_first_fit if algorithm == "modified_first_fit_decreasing" else _first_fit
    for rows in np.split(order, np.cumsum(counts)[:-1]):
        bin_of[rows] = pack(lengths[rows].tolist(), capacity)
    return bin_of


def _first_fit(lengths: Sequence[int], capacity: int) -> list[int]:
    """Return a bin for each row: the first with room for it.

    With rows in descending order this is first-fit-decreasing: at most 11/9 OPT + 6/9 bins.

    Source: Johnson, Demers, Ullman, Garey and Graham, "Worst-case performance bounds for simple
    one-dimensional packing algorithms", SIAM J. Comput. 3 (1974); Dósa, "The tight bound of first fit
    decreasing bin-packing algorithm is FFD(I) <= 11/9 OPT(I) + 6/9", ESCAPE 2007.
    """
    room: list[int] = []
    bin_of = []
    for length in lengths:
        for bin_, left in enumerate(room):
            if left >= length:
                room[bin_] = left - length
                break
        else:
            bin_ = len(room)
            room.append(capacity - length)
        bin_of.append(bin_)
    return bin_of


def _first_fit_all(lengths: IntArray, counts: IntArray, capacity: int) -> IntArray:
    """Do what `_first_fit` does, in all shards at once; `lengths` are theirs back to back, `counts` rows of each."""
    bin_of = np.empty(len(lengths), dtype=np.int64)
    # Shards with the most rows come first, so that those which still have one are a prefix.
    by_rows = np.argsort(-counts, kind="stable")
    starts = (np.cumsum(counts) - counts)[by_rows]
    active = np.searchsorted(-counts[by_rows], -np.arange(int(counts.max(initial=0))), side="left")
    # (shards, bins), in the narrowest integers: most of the time goes into looking for room.
    room = np.full((len(counts), 1), capacity, dtype=np.min_scalar_type(-capacity - 1))
    lengths, shards = lengths.astype(room.dtype), np.arange(len(counts))
    for step, count in enumerate(active.tolist()):
        at, first = starts[:count] + step, shards[:count]
        needed = lengths[at]
        bin_ = (room[:count] >= needed[:, None]).argmax(axis=1)
        left = room[first, bin_] - needed
        if left.min() < 0:
            room = np.pad(room, ((0, 0), (0, room.shape[1] // 4 + 1)), constant_values=capacity)
            bin_ = (room[:count] >= needed[:, None]).argmax(axis=1)
            left = room[first, bin_] - needed
        room[first, bin_] = left
        bin_of[at] = bin_
    return bin_of


def _modified_first_fit(lengths: Sequence[int], capacity: int) -> list[int]:
    """Return a bin for each row, in descending order of length, at most 71/60 OPT + 1 bins.

    Rows are large (over 1/2 of the capacity), medium (over 1/3), small (over 1/6) or tiny. Each large row opens a
    bin; medium rows, pairs of small rows and then the longest rows that fit fill these bins; first-fit-decreasing
    packs the rest.

    Source: Johnson and Garey, "A 71/60 theorem for bin packing", Journal of Complexity 1 (1985).
    """

    def longest(rows: Sequence[int], most: int) -> int:
        """Return the place in `rows`, longest first, of the first that has at most `most` tokens."""
        return bisect_left(rows, -most, key=lambda row: -lengths[row])

    large, medium, small = (longest(range(len(lengths)), capacity // parts) for parts in (2, 3, 6))
    bin_of = [*range(large), *([-1] * (len(lengths) - large))]
    room = [capacity - n for n in lengths[:large]]

    def place(rows: list[int], index: int, bin_: int) -> None:
        row = rows.pop(index)
        bin_of[row] = bin_
        room[bin_] -= lengths[row]

    mediums, smalls = [*range(large, medium)], [*range(medium, small)]
    without = []
    for bin_ in range(large):
        if (index := longest(mediums, room[bin_])) < len(mediums):
            place(mediums, index, bin_)
        else:
            without.append(bin_)
    for bin_ in reversed(without):
        if len(smalls) < 2 or lengths[smalls[-1]] + lengths[smalls[-2]] > room[bin_]:
            break
        place(smalls, longest(smalls, lengths[smalls[-1]]), bin_)
        place(smalls, longest(smalls, room[bin_]), bin_)
    rest = [*mediums, *smalls, *range(small, len(lengths))]
    for bin_ in range(large):
        while (index := longest(rest, room[bin_])) < len(rest):
            place(rest, index, bin_)
    for row, bin_ in zip(rest, _first_fit([lengths[row] for row in rest], capacity)):
        bin_of[row] = large + bin_
    return bin_of


def concatenate_rows(lengths: IntArray, capacity: int) -> IntArray:
    """Fill one bin after the other with the rows in their order; return each row's bin."""
    total = np.cumsum(lengths)
    following = np.searchsorted(total, total - lengths + capacity, side="right").tolist()
    bin_of = np.zeros(len(lengths), dtype=np.int64)
    row = 0
    while row < len(lengths):
        bin_of[row] = row > 0
        row = following[row]
    return np.cumsum(bin_of)


def split_fullest(
    lengths: IntArray, bin_of: IntArray, target: int, choose: Callable[[IntArray], npt.NDArray[np.bool_]]
) -> None:
    """Split the fullest bin of two rows or more, in place, until there are `target` bins; rows that `choose` go.

    Where there are fewer rows than bins, the last bins stay empty.
    """
    bins = int(bin_of.max(initial=-1)) + 1
    if target == bins:
        return
    members = np.split(np.argsort(bin_of, kind="stable"), np.cumsum(np.bincount(bin_of, minlength=bins))[:-1])
    heap = [(-int(lengths[rows].sum()), bin_, rows) for bin_, rows in enumerate(members) if len(rows) > 1]
    heapq.heapify(heap)
    for new in range(bins, target):
        if not heap:
            return
        _, bin_, rows = heapq.heappop(heap)
        goes = choose(lengths[rows])
        bin_of[rows[goes]] = new
        for name, part in ((bin_, rows[~goes]), (new, rows[goes])):
            if len(part) > 1:
                heapq.heappush(heap, (-int(lengths[part].sum()), name, part))


def behind_the_middle(lengths: IntArray) -> npt.NDArray[np.bool_]:
    """Choose the rows behind the middle token; at least one stays and one goes."""
    total = np.cumsum(lengths)
    first = int(np.searchsorted(total, total[-1] / 2, side="left")) + 1
    behind: npt.NDArray[np.bool_] = np.arange(len(lengths)) >= min(first, len(lengths) - 1)
    return behind

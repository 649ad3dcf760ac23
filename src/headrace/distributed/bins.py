"""Rows into bins of a token budget: which bin each row goes to, and how many bins there are."""

import heapq
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from headrace.distributed.first_fit import IntArray, Placements, Run, first_fit
from headrace.distributed.modified_first_fit import modified_first_fit
from headrace.errors import ConfigError, SchemaError
from headrace.utils.seeding import derive_seed

Algorithm = Literal[
    "first_fit_decreasing", "modified_first_fit_decreasing", "first_fit_shuffle", "concatenative"
]
"""`first_fit_shuffle` places rows in a random order that depends only on their number."""
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)


def pack_rows(
    lengths: npt.ArrayLike,
    capacity: int,
    algorithm: str,
    *,
    min_bin_count: int = 1,
    bin_count_multiple: int = 1,
) -> list[IntArray]:
    """Return the row indices of each bin, ascending within a bin.

    No bin holds more than `capacity` tokens. The number of bins is at least `min_bin_count` and a multiple of
    `bin_count_multiple`; a bin is empty only where there are fewer rows than bins.

    >>> [b.tolist() for b in pack_rows([5, 3, 4, 4], 8, "first_fit_decreasing")]
    [[0, 1], [2, 3]]

    Raises:
        ConfigError: an unknown algorithm, a row longer than `capacity`, or a count below 1.
    """
    costs = as_lengths(lengths)
    check_fits(costs, costs, capacity, knob="capacity")
    bin_of, bins = assign_bins(
        costs, capacity, algorithm, min_bin_count=min_bin_count, bin_count_multiple=bin_count_multiple
    )
    rows = np.argsort(bin_of, kind="stable")
    stops = np.cumsum(np.bincount(bin_of, minlength=bins))
    return [rows[start:stop] for start, stop in zip([0, *stops[:-1].tolist()], stops.tolist())]


def as_lengths(lengths: npt.ArrayLike) -> IntArray:
    """Return lengths as a (N,) int64 array.

    Raises:
        SchemaError: another shape, values that are not integers, or a negative length.
    """
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
    return array.astype(np.int64)


def check_fits(
    lengths: IntArray,
    costs: IntArray,
    budget_tokens: int,
    *,
    knob: str,
    row_names: Sequence[str] | None = None,
) -> None:
    """Hold every row to the token budget; `costs` are the lengths after rounding.

    Raises:
        ConfigError: a row costs more than the budget; the message names it, its length and `knob`.
    """
    if len(costs) == 0 or int(costs.max()) <= budget_tokens:
        return
    row = int(costs.argmax())
    name = f"row {row}" if row_names is None else f"sample '{row_names[row]}' (row {row})"
    length, cost = int(lengths[row]), int(costs[row])
    rounded = "" if cost == length else f" ({cost} after rounding)"
    raise ConfigError(
        f"{name} has {length} tokens{rounded}, more than the {budget_tokens} that {knob} allows in one "
        f"microbatch; raise {knob} to at least {cost}, or drop the row"
    )


def assign_bins(
    costs: IntArray, capacity: int, algorithm: str, *, min_bin_count: int = 1, bin_count_multiple: int = 1
) -> tuple[IntArray, int]:
    """Return the bin of each row, (N,), and the number of bins; every cost must fit `capacity`.

    When more bins are asked for than rows need, the heaviest bins are split in two; when there are fewer rows
    than bins, the last bins stay empty.
    """
    if min_bin_count < 0 or bin_count_multiple < 1:
        raise ConfigError(
            f"min_bin_count={min_bin_count} and bin_count_multiple={bin_count_multiple}; "
            "expected at least 0 and 1"
        )
    if algorithm not in ALGORITHMS:
        raise ConfigError(
            f"packing algorithm '{algorithm}' is unknown; choose one of {', '.join(ALGORITHMS)}"
        )
    in_order = algorithm == "concatenative"
    bin_of, bins = _ALGORITHMS[algorithm](costs, capacity)
    target = max(bins, min_bin_count)
    target += -target % bin_count_multiple
    if target > bins:
        _split_heaviest(costs, bin_of, bins, target, _cut_in_order if in_order else _deal_out)
    return bin_of, target


def descending_order(costs: IntArray) -> IntArray:
    """Return row indices from the largest cost to the smallest; equal rows keep their order."""
    if len(costs) == 0:
        return np.zeros(0, dtype=np.int64)
    largest = int(costs.max())
    if largest < 1 << 16:
        # numpy sorts 16-bit keys by radix, ten times faster.
        return np.argsort((largest - costs).astype(np.uint16), kind="stable")
    return np.argsort(-costs, kind="stable")


def _first_fit_decreasing(costs: IntArray, capacity: int) -> tuple[IntArray, int]:
    return _pack_runs(costs, capacity, descending_order(costs), first_fit)


def _modified_first_fit_decreasing(costs: IntArray, capacity: int) -> tuple[IntArray, int]:
    return _pack_runs(costs, capacity, descending_order(costs), modified_first_fit)


def _first_fit_shuffle(costs: IntArray, capacity: int) -> tuple[IntArray, int]:
    order = np.random.default_rng(derive_seed(0, "first_fit_shuffle", len(costs))).permutation(len(costs))
    return _pack_runs(costs, capacity, order, first_fit)


def _pack_runs(
    costs: IntArray, capacity: int, order: IntArray, pack: Callable[[list[Run], int, Placements], int]
) -> tuple[IntArray, int]:
    """Pack the rows in `order`; rows without tokens fit everywhere, so the first bin takes them all."""
    order = order[costs[order] > 0]
    placed = Placements()
    bins = pack(_runs(costs[order]), capacity, placed)
    bin_of = np.zeros(len(costs), dtype=np.int64)
    bin_of[order] = placed.bin_of_position(len(order))
    return bin_of, max(bins, min(len(costs), 1))


def _runs(costs: IntArray) -> list[Run]:
    first = np.flatnonzero(np.diff(costs, prepend=-1))
    rows = np.diff(first, append=len(costs))
    return list(zip(costs[first].tolist(), first.tolist(), rows.tolist()))


def _concatenate(costs: IntArray, capacity: int) -> tuple[IntArray, int]:
    """Fill one bin after the other with the rows in their order."""
    total = np.cumsum(costs)
    following = np.searchsorted(total, total - costs + capacity, side="right").tolist()
    starts, row = [], 0
    while row < len(costs):
        starts.append(row)
        row = following[row]
    bin_of = np.zeros(len(costs), dtype=np.int64)
    bin_of[starts[1:]] = 1
    return np.cumsum(bin_of), len(starts)


_ALGORITHMS: dict[str, Callable[[IntArray, int], tuple[IntArray, int]]] = {
    "first_fit_decreasing": _first_fit_decreasing,
    "modified_first_fit_decreasing": _modified_first_fit_decreasing,
    "first_fit_shuffle": _first_fit_shuffle,
    "concatenative": _concatenate,
}


def _split_heaviest(
    costs: IntArray,
    bin_of: IntArray,
    bins: int,
    target: int,
    cut: Callable[[IntArray], npt.NDArray[np.bool_]],
) -> None:
    """Halve the heaviest bin of two rows or more, in place, until there are `target` bins."""
    rows = np.argsort(bin_of, kind="stable")
    stops = np.cumsum(np.bincount(bin_of, minlength=bins))
    counts = np.diff(stops, prepend=0)
    loads = np.bincount(bin_of, weights=costs, minlength=bins)
    divisible = np.flatnonzero(counts > 1)
    heaviest = divisible[np.argsort(-loads[divisible], kind="stable")[: target - bins]]
    heap = [(-loads[b], int(b), rows[stops[b] - counts[b] : stops[b]]) for b in heaviest]
    for new in range(bins, target):
        if not heap:
            return
        _, bin_, members = heapq.heappop(heap)
        moved = cut(costs[members])
        bin_of[members[moved]] = new
        for name, part in ((bin_, members[~moved]), (new, members[moved])):
            if len(part) > 1:
                heapq.heappush(heap, (-float(costs[part].sum()), name, part))


def _deal_out(costs: IntArray) -> npt.NDArray[np.bool_]:
    """Choose about half of the tokens: of the rows in descending order, the pattern stay, go, go, stay."""
    turn = np.empty(len(costs), dtype=np.int64)
    turn[descending_order(costs)] = np.arange(len(costs)) % 4
    return np.isin(turn, (1, 2))


def _cut_in_order(costs: IntArray) -> npt.NDArray[np.bool_]:
    """Choose the rows behind the middle token; at least one stays and one goes."""
    total = np.cumsum(costs)
    first = int(np.searchsorted(total, total[-1] / 2, side="left")) + 1
    behind: npt.NDArray[np.bool_] = np.arange(len(costs)) >= min(first, len(costs) - 1)
    return behind

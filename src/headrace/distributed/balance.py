"""Equal token loads over ranks: items are dealt in rounds, then rows move from heavy ranks to light ones."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.distributed.first_fit import IntArray

TOLERANCE = 0.005
"""Largest difference between two ranks that is left alone, as a share of the mean load."""

_ADAPTIVE_ROUNDS = 4096
_NEIGHBOURS = 8


def deal(weights: IntArray, ranks: int) -> IntArray:
    """Return a rank for each of N items in descending order of weight; counts differ by one at most.

    Each round of `ranks` items gives one to every rank, the heaviest to the rank with the least so far
    (longest processing time first). A last, shorter round goes to the lightest ranks.

    >>> deal(np.array([9, 5, 4, 3]), 2).tolist()
    [0, 1, 1, 0]
    """
    if ranks == 1:
        return np.zeros(len(weights), dtype=np.int64)
    rounds = -(-len(weights) // ranks)
    adaptive = min(rounds, _ADAPTIVE_ROUNDS)
    result = np.empty(rounds * ranks, dtype=np.int64)
    loads = np.zeros(ranks, dtype=np.int64)
    for start in range(0, adaptive * ranks, ranks):
        items = weights[start : start + ranks]
        order = np.argsort(loads, kind="stable")
        result[start : start + ranks] = order
        loads[order[: len(items)]] += items
    # Differences within a round have become small beside the load: forth and back is as good, and faster.
    there_and_back = np.stack([np.arange(ranks), np.arange(ranks)[::-1]])
    tail = result[adaptive * ranks :].reshape(-1, ranks)
    tail[:] = np.argsort(loads, kind="stable")[there_and_back[np.arange(len(tail)) % 2]]
    return result[: len(weights)]


@dataclass(frozen=True)
class _Offers:
    """What a rank can give: its rows in ascending order of (cost, accepts), after entry 0, which is no row.

    `accepts` is the largest cost that may come in the row's place; for entry 0, that is the room of `bin_`.
    `leaves` says whether the row may go without one in its place: it is not alone in its bin.
    """

    rows: IntArray
    costs: IntArray
    accepts: IntArray
    leaves: npt.NDArray[np.bool_]
    bin_: int


class Balancer:
    """Exchanges rows between ranks until the ranks' loads agree.

    `bin_of` (N,) is changed in place; no bin ever holds more than `capacity`, and none becomes empty. Every
    rank has the same number of bins.
    """

    def __init__(
        self, costs: IntArray, bin_of: IntArray, rank_of_bin: IntArray, ranks: int, capacity: int
    ) -> None:
        bins = len(rank_of_bin)
        row_rank = rank_of_bin[bin_of]
        self._costs = costs
        self._bin_of = bin_of
        self._room = capacity - sum_by(bin_of, costs, bins)
        self._rows_in_bin = np.bincount(bin_of, minlength=bins)
        self._bins_of_rank = np.argsort(rank_of_bin, kind="stable").reshape(ranks, -1)
        self._loads = sum_by(row_rank, costs, ranks)
        self._rows_by_rank = np.argsort(row_rank, kind="stable")
        self._stops = np.cumsum(np.bincount(row_rank, minlength=ranks)).tolist()
        self._changed_rows: dict[int, IntArray] = {}
        self._offers: dict[int, _Offers] = {}

    def run(self) -> None:
        """Exchange rows until loads differ by less than TOLERANCE of their mean, or no exchange helps."""
        allowed = TOLERANCE * float(self._loads.mean())
        # Every exchange brings two loads closer, so this ends; the bound keeps it fast.
        for _ in range(64 + 32 * len(self._loads)):
            heavy, light = int(self._loads.argmax()), int(self._loads.argmin())
            if self._loads[heavy] - self._loads[light] <= allowed:
                return
            if not (self._exchange(heavy, light) or self._exchange_with_others(heavy, light)):
                return

    def _exchange_with_others(self, heavy: int, light: int) -> bool:
        order = np.argsort(self._loads, kind="stable").tolist()
        return any(self._exchange(heavy, other) for other in order[1:_NEIGHBOURS]) or any(
            self._exchange(other, light) for other in order[-2 : -_NEIGHBOURS - 1 : -1]
        )

    def _exchange(self, heavy: int, light: int) -> bool:
        gap = int(self._loads[heavy] - self._loads[light])
        if gap < 2:
            return False
        giver, taker = self._offers_of(heavy), self._offers_of(light)
        pair = _best_pair(giver, taker, gap, gap / 2)
        if pair is None:
            # Perhaps only the roomiest bin has room: aim at what it takes.
            taker = self._within_bin(taker)
            pair = _best_pair(giver, taker, gap, min(gap / 2, float(taker.accepts[0])))
        if pair is None:
            return False
        given, returned = int(giver.rows[pair[0]]), int(taker.rows[pair[1]])
        self._swap(heavy, light, given, returned, taker.bin_)
        return True

    def _swap(self, heavy: int, light: int, given: int, returned: int, into: int) -> None:
        """Move row `given` to the rank `light`, in place of `returned` or, if that is -1, to bin `into`."""
        source = int(self._bin_of[given])
        target = into if returned < 0 else int(self._bin_of[returned])
        tokens = int(self._costs[given]) - (0 if returned < 0 else int(self._costs[returned]))
        heavy_rows, light_rows = self._rows(heavy), self._rows(light)
        self._changed_rows[heavy] = heavy_rows[heavy_rows != given]
        self._changed_rows[light] = np.append(light_rows[light_rows != returned], given)
        self._bin_of[given] = target
        if returned < 0:
            self._rows_in_bin[source] -= 1
            self._rows_in_bin[target] += 1
        else:
            self._bin_of[returned] = source
            self._changed_rows[heavy] = np.append(self._changed_rows[heavy], returned)
        self._room[source] += tokens
        self._room[target] -= tokens
        self._loads[heavy] -= tokens
        self._loads[light] += tokens
        del self._offers[heavy], self._offers[light]

    def _rows(self, rank: int) -> IntArray:
        if rank in self._changed_rows:
            return self._changed_rows[rank]
        return self._rows_by_rank[self._stops[rank - 1] if rank else 0 : self._stops[rank]]

    def _offers_of(self, rank: int) -> _Offers:
        if rank not in self._offers:
            bins = self._bins_of_rank[rank]
            roomiest = int(bins[self._room[bins].argmax()])
            self._offers[rank] = self._sorted_offers(self._rows(rank), roomiest)
        return self._offers[rank]

    def _within_bin(self, offers: _Offers) -> _Offers:
        rows = offers.rows[1:]
        return self._sorted_offers(rows[self._bin_of[rows] == offers.bin_], offers.bin_)

    def _sorted_offers(self, rows: IntArray, bin_: int) -> _Offers:
        costs, bins = self._costs[rows], self._bin_of[rows]
        accepts = costs + self._room[bins]
        order = np.lexsort((accepts, costs))
        return _Offers(
            rows=np.concatenate([[-1], rows[order]]),
            costs=np.concatenate([[0], costs[order]]),
            accepts=np.concatenate([[self._room[bin_]], accepts[order]]),
            leaves=np.concatenate([[False], self._rows_in_bin[bins[order]] > 1]),
            bin_=bin_,
        )


def _best_pair(giver: _Offers, taker: _Offers, gap: int, aim: float) -> tuple[int, int] | None:
    """Return the entries to exchange so that about `aim` tokens, between 0 and `gap`, change ranks."""
    below = np.searchsorted(taker.costs, giver.costs - aim, side="right") - 1
    above = np.minimum(below + 1, len(taker.costs) - 1)
    # Of equal rows the last accepts most.
    above = np.searchsorted(taker.costs, taker.costs[above], side="right") - 1
    entry = np.concatenate([np.arange(len(giver.costs))] * 2)
    partner = np.concatenate([below, above])
    tokens = giver.costs[entry] - taker.costs[partner]
    possible = (
        (partner >= 0)
        & (entry > 0)
        & (tokens > 0)
        & (tokens < gap)
        & (giver.costs[entry] <= taker.accepts[partner])
        & ((partner > 0) | giver.leaves[entry])
    )
    if not possible.any():
        return None
    distance = np.where(possible, np.abs(tokens - aim), np.inf)
    best = int(distance.argmin())
    return int(entry[best]), int(partner[best])


def sum_by(group: IntArray, values: IntArray, groups: int) -> IntArray:
    """Return the sum of `values` in each group 0 .. groups - 1; exact below 2**53."""
    return np.bincount(group, weights=values, minlength=groups).astype(np.int64)

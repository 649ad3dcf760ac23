"""What rows cost, and how they are shared out so that every rank has the same work."""

import heapq

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

DEFAULT_ATTENTION_RATIO = 2e-5
"""That of a dense model of 7 billion weights with 32 layers, 4,096 wide: half the work of a row of 50,000 tokens."""

_ONE_BY_ONE = 32_768
_ADAPTIVE_ROUNDS = 4096
_EXCHANGED_ROWS = 1024
_TOLERANCE = 0.005


def row_costs(lengths: IntArray, attention_ratio: float) -> IntArray:
    """Return what each row costs to compute, in tokens without attention: L + attention_ratio * L**2, rounded.

    `attention_ratio` is the work of one pair of tokens over the work of one token, for causal attention:
    layers * heads * head size / active weights (`models.automodel.flops`). 0 counts tokens only.
    """
    costs: IntArray = lengths + np.rint(attention_ratio * lengths * lengths).astype(np.int64)
    return costs


def share_rows(costs: IntArray, ranks: int, order: IntArray) -> IntArray:
    """Return a rank for each row, so that the ranks' sums of costs are close; `order` is that of descending costs.

    Each row, from the costliest on, goes to the rank with the least so far, on a tie to the one with the fewest
    rows; where there are very many rows, the cheapest are dealt in rounds. Rows of small batches then change
    places with rows of the costliest rank as long as that lowers its cost.

    Source: Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17 (1969).
    """
    rank_of_row = np.zeros(len(costs), dtype=np.int64)
    if ranks == 1:
        return rank_of_row
    first, rest = order[:_ONE_BY_ONE], order[_ONE_BY_ONE:]
    heap = [(0, 0, rank) for rank in range(ranks)]
    chosen = []
    for cost in costs[first].tolist():
        load, rows, rank = heap[0]
        chosen.append(rank)
        heapq.heapreplace(heap, (load + cost, rows + 1, rank))
    rank_of_row[first] = chosen
    loads = sum_by(rank_of_row[first], costs[first], ranks)
    rank_of_row[rest] = deal(costs[rest], ranks, loads)
    if len(costs) <= _EXCHANGED_ROWS:
        _exchange_rows(costs, rank_of_row, ranks)
    return rank_of_row


def deal(costs: IntArray, ranks: int, loads: IntArray | None = None) -> IntArray:
    """Return a rank for each of N items in descending order of cost; counts differ by one at most.

    Each round of `ranks` items gives one to every rank, the costliest to the rank with the least so far, `loads`
    included. A last, shorter round goes to the ranks with the least.

    >>> deal(np.array([9, 5, 4, 3]), 2).tolist()
    [0, 1, 1, 0]
    """
    rounds = -(-len(costs) // ranks)
    adaptive = min(rounds, _ADAPTIVE_ROUNDS)
    result = np.empty(rounds * ranks, dtype=np.int64)
    loads = np.zeros(ranks, dtype=np.int64) if loads is None else loads.copy()
    for start in range(0, adaptive * ranks, ranks):
        items = costs[start : start + ranks]
        order = np.argsort(loads, kind="stable")
        result[start : start + ranks] = order
        loads[order[: len(items)]] += items
    # Differences within a round have become small beside the load: forth and back is as good, and faster.
    there_and_back = np.stack([np.arange(ranks), np.arange(ranks)[::-1]])
    tail = result[adaptive * ranks :].reshape(-1, ranks)
    tail[:] = np.argsort(loads, kind="stable")[there_and_back[np.arange(len(tail)) % 2]]
    return result[: len(costs)]


def divide_shares(rank_of_row: IntArray, ranks: int, parts: int, order: IntArray) -> IntArray:
    """Return which of the ranks' `parts` each row is in, (N,), rank after rank; `order` is that of descending costs.

    A rank's rows go to its parts forth and back, so that these have about as much each.
    """
    by_rank = order if ranks == 1 else order[descending_order(ranks - 1 - rank_of_row[order])]
    counts = np.bincount(rank_of_row, minlength=ranks)
    turns = np.concatenate([np.arange(parts), np.arange(parts)[::-1]])
    part_of_row = np.empty_like(rank_of_row)
    part_of_row[by_rank] = np.concatenate([np.resize(turns, count) for count in counts])
    return rank_of_row * parts + part_of_row


def _exchange_rows(costs: IntArray, rank_of_row: IntArray, ranks: int) -> None:
    """Lower the highest load, in place: its rank gives a row and takes a cheaper one, or none, of another rank."""
    loads = sum_by(rank_of_row, costs, ranks)
    allowed = (1 + _TOLERANCE) * loads.mean()
    for _ in range(4 * ranks):
        heavy = int(loads.argmax())
        if loads[heavy] <= allowed:
            return
        given, others = np.flatnonzero(rank_of_row == heavy), np.flatnonzero(rank_of_row != heavy)
        # Column 0 stands for taking nothing, on the rank with the least load.
        ranks_of = np.append(loads.argmin(), rank_of_row[others])
        moved = costs[given][:, None] - np.append(0, costs[others])[None, :]
        after = np.maximum(loads[heavy] - moved, loads[ranks_of][None, :] + moved)
        best = int(after.argmin())
        row, column = divmod(best, after.shape[1])
        if after[row, column] >= loads[heavy]:
            return
        light = int(ranks_of[column])
        rank_of_row[given[row]] = light
        if column:
            rank_of_row[others[column - 1]] = heavy
        loads[heavy] -= moved[row, column]
        loads[light] += moved[row, column]


def descending_order(costs: IntArray) -> IntArray:
    """Return row indices from the largest cost to the smallest; equal rows keep their order."""
    largest = int(costs.max(initial=0))
    if largest < 1 << 16:
        # numpy sorts 16-bit keys by radix, ten times faster.
        return np.argsort((largest - costs).astype(np.uint16), kind="stable")
    return np.argsort(-costs, kind="stable")


def sum_by(group: IntArray, values: IntArray, groups: int) -> IntArray:
    """Return the sum of `values` in each group 0 .. groups - 1; exact below 2**53."""
    return np.bincount(group, weights=values, minlength=groups).astype(np.int64)

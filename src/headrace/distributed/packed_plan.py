"""One global batch as packed microbatches: rows into bins, bins onto ranks, the same number on each."""

import heapq
from dataclasses import dataclass

import numpy as np

from headrace.distributed.balance import TOLERANCE, Balancer, deal, sum_by
from headrace.distributed.bins import assign_bins, descending_order
from headrace.distributed.first_fit import IntArray
from headrace.utils.rounding import round_up

_SECOND_ATTEMPT_ROWS = 32_768


@dataclass(frozen=True)
class BatchShares:
    """How one global batch of n rows falls to R ranks with K microbatches each.

    `rows` (n,) are row indices, rank after rank, each rank's in processing order; `rows_of_rank` (R,) counts
    them. `stops` (R, K) are ends of microbatches, counted in the rank's rows of this batch. `lengths` (R, K)
    are tokens: the sum of a packed microbatch, the padded row length of a dynamic one.
    """

    rows: IntArray
    rows_of_rank: IntArray
    stops: IntArray
    lengths: IntArray


def pack_batch(
    costs: IntArray, ranks: int, *, budget_tokens: int, algorithm: str, pad_multiple: int, longest_first: bool
) -> BatchShares:
    """Plan one global batch of rows with `costs` tokens each (rounded to `pad_multiple`, none over budget).

    Loads of ranks are balanced by exchanging rows, except for `concatenative`, which keeps rows in order.
    """
    bin_of, bins = assign_bins(costs, budget_tokens, algorithm, min_bin_count=ranks, bin_count_multiple=ranks)
    rank_of_bin = _deal_bins(sum_by(bin_of, costs, bins), ranks)
    if ranks > 1 and algorithm != "concatenative":
        Balancer(costs, bin_of, rank_of_bin, ranks, budget_tokens).run()
        if _imbalance(sum_by(rank_of_bin[bin_of], costs, ranks)) > 2 * TOLERANCE:
            bin_of, rank_of_bin = _second_attempt(costs, bin_of, rank_of_bin, ranks, budget_tokens, algorithm)
    return _lay_out(costs, bin_of, rank_of_bin, ranks, round_up(1, pad_multiple), longest_first)


def _deal_bins(loads: IntArray, ranks: int) -> IntArray:
    order = descending_order(loads)
    rank_of_bin = np.empty(len(loads), dtype=np.int64)
    rank_of_bin[order] = deal(loads[order], ranks)
    return rank_of_bin


def _imbalance(loads: IntArray) -> float:
    mean = float(loads.mean())
    return float(loads.max() - loads.min()) / mean if mean else 0.0


def _second_attempt(
    costs: IntArray, bin_of: IntArray, rank_of_bin: IntArray, ranks: int, capacity: int, algorithm: str
) -> tuple[IntArray, IntArray]:
    """Share rows over ranks first, then pack each rank's; keep it if it fits the bins and is more even."""
    per_rank = len(rank_of_bin) // ranks
    if len(costs) > _SECOND_ATTEMPT_ROWS:
        return bin_of, rank_of_bin
    rank_of_row = _longest_processing_time(costs, ranks)
    shared = np.empty_like(bin_of)
    for rank in range(ranks):
        rows = np.flatnonzero(rank_of_row == rank)
        local, bins = assign_bins(costs[rows], capacity, algorithm, min_bin_count=per_rank)
        if bins > per_rank:
            return bin_of, rank_of_bin
        shared[rows] = rank * per_rank + local
    in_order = np.repeat(np.arange(ranks), per_rank)
    Balancer(costs, shared, in_order, ranks, capacity).run()
    before, after = (
        _imbalance(sum_by(of_bin[bins], costs, ranks))
        for bins, of_bin in ((bin_of, rank_of_bin), (shared, in_order))
    )
    return (shared, in_order) if after < before else (bin_of, rank_of_bin)


def _longest_processing_time(costs: IntArray, ranks: int) -> IntArray:
    """Give each row, from the longest on, to the rank with the fewest tokens; on a tie, the fewest rows.

    Source: Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17 (1969).
    """
    order = descending_order(costs)
    heap = [(0, 0, rank) for rank in range(ranks)]
    chosen = []
    for cost in costs[order].tolist():
        tokens, rows, rank = heap[0]
        chosen.append(rank)
        heapq.heapreplace(heap, (tokens + cost, rows + 1, rank))
    rank_of_row = np.empty(len(costs), dtype=np.int64)
    rank_of_row[order] = chosen
    return rank_of_row


def _lay_out(
    costs: IntArray,
    bin_of: IntArray,
    rank_of_bin: IntArray,
    ranks: int,
    filler_tokens: int,
    longest_first: bool,
) -> BatchShares:
    """Order bins by rank and then by number, or from the fullest; bins without rows come last."""
    bins = len(rank_of_bin)
    loads = sum_by(bin_of, costs, bins)
    counts = np.bincount(bin_of, minlength=bins)
    within = -loads if longest_first else np.zeros(bins, dtype=np.int64)
    order = np.lexsort((within, counts == 0, rank_of_bin))
    slot_of_bin = np.empty(bins, dtype=np.int64)
    slot_of_bin[order] = np.arange(bins)
    counts = counts[order].reshape(ranks, -1)
    return BatchShares(
        rows=np.argsort(slot_of_bin[bin_of], kind="stable"),
        rows_of_rank=counts.sum(axis=1),
        stops=np.cumsum(counts, axis=1),
        lengths=np.where(counts > 0, loads[order].reshape(ranks, -1), filler_tokens),
    )

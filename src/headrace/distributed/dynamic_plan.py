"""One global batch as padded microbatches of similar lengths, with boundaries that all ranks share."""

import numpy as np

from headrace.distributed.balance import deal
from headrace.distributed.bins import descending_order
from headrace.distributed.first_fit import IntArray
from headrace.distributed.packed_plan import BatchShares


def batch_by_length(lengths: IntArray, ranks: int, *, budget_tokens: int, round_to: int) -> BatchShares:
    """Plan one global batch; every row's padded length, a multiple of `round_to`, must fit the budget.

    Rows are sorted by length and dealt one to each rank per position, so that the rows at a position are
    neighbours in length. A microbatch is a range of positions on every rank; rows times the longest padded
    length in it, over all ranks, is at most `budget_tokens`. When the rows do not divide by the ranks, the
    shortest position is missing on some ranks; a microbatch that loses its only row there is a filler.
    """
    order = descending_order(lengths)
    items = lengths[order]
    rank_of_item = deal(items, ranks)
    positions = -(-len(items) // ranks)
    longest = padded_lengths(items[::ranks][::-1], round_to)
    stops, padded = _boundaries(longest.tolist(), budget_tokens, round_to)
    # Positions ascend in length, so the deal is read backwards.
    by_rank = np.argsort(rank_of_item[::-1], kind="stable")
    rows_of_rank = np.bincount(rank_of_item, minlength=ranks)
    missing = positions - rows_of_rank
    shifted = np.maximum(np.array(stops)[None, :] - missing[:, None], 0)
    is_filler = np.diff(shifted, axis=1, prepend=0) == 0
    return BatchShares(
        rows=order[::-1][by_rank],
        rows_of_rank=rows_of_rank,
        stops=shifted,
        lengths=np.where(is_filler, round_to, np.array(padded)[None, :]),
    )


def padded_lengths(lengths: IntArray, round_to: int) -> IntArray:
    """Return lengths rounded up; a row without tokens counts as one, since a forward pass needs a token."""
    padded: IntArray = -(-np.maximum(lengths, 1) // round_to) * round_to
    return padded


def _boundaries(longest: list[int], budget_tokens: int, round_to: int) -> tuple[list[int], list[int]]:
    """Cut ascending lengths into ranges as long as the budget allows; without rows, one empty range."""
    if not longest:
        return [0], [round_to]
    stops: list[int] = []
    start = 0
    for position, length in enumerate(longest):
        if (position + 1 - start) * length > budget_tokens:
            stops.append(position)
            start = position
    stops.append(len(longest))
    return stops, [longest[stop - 1] for stop in stops]

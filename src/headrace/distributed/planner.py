"""The planner: row lengths in, microbatches per rank out. Pure, O(N) memory, no tensor.

`plan_microbatches` is what batches, the data plane and `headrace plan` call. Three ways to cut a global
batch: contiguous slices (no arguments), packed sequences, and dynamic batches of similar lengths. With the
last two, ranks share the work by cost, which knows attention (`row_costs`), microbatches keep a budget of
tokens, and every rank has the same number of them by construction; one without rows is a dummy of weight zero.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NotRequired, TypedDict

import numpy as np
import numpy.typing as npt

from headrace.distributed.balance import (
    DEFAULT_ATTENTION_RATIO,
    IntArray,
    deal,
    descending_order,
    divide_shares,
    row_costs,
    share_rows,
    sum_by,
)
from headrace.distributed.bin_packing import (
    as_lengths,
    behind_the_middle,
    check_algorithm,
    check_fits,
    concatenate_rows,
    pack_shards,
    split_fullest,
)
from headrace.errors import ConfigError
from headrace.utils.arguments import whole_number
from headrace.utils.rounding import round_up

_ROWS_PACKED_TOGETHER = 2048
MICROBATCH_ORDERS = ("planned", "longest_first")


class SequencePackingArgs(TypedDict):
    """How to pack: `sequence_length_pad_multiple` rounds every row up before it is packed.

    `microbatch_order`: `planned` (default) is the order in which the algorithm made the bins, `longest_first`
    starts with the costliest, so that memory peaks early. `attention_ratio`: see `row_costs`; left out,
    `DEFAULT_ATTENTION_RATIO`.
    """

    max_tokens_per_microbatch: int
    input_key: str
    input_lengths_key: str
    algorithm: str
    sequence_length_pad_multiple: int
    microbatch_order: NotRequired[str]
    attention_ratio: NotRequired[float]


class DynamicBatchingArgs(TypedDict):
    """How to batch by length: each microbatch is padded to a multiple of `sequence_length_round`."""

    max_tokens_per_microbatch: int
    input_key: str
    input_lengths_key: str
    sequence_length_round: int
    attention_ratio: NotRequired[float]


@dataclass(frozen=True, eq=False)
class MicrobatchPlan:
    """Which rows each of R ranks processes, in which order and in which microbatches.

    `row_order` (N,) are the caller's row indices, rank after rank, each rank's in processing order: global
    batch after global batch, microbatch after microbatch. `rows_per_batch` (R, G) counts rows by rank and
    global batch, `microbatches_per_batch` (G,) microbatches per rank (0: no plan, contiguous slices). `stops`
    and `microbatch_lengths` (R, M) hold, for the M microbatches of a rank, the end in the rank's rows of its
    global batch and the tokens: the packed total, or the padded length of a row.
    """

    kind: Literal["contiguous", "packed", "dynamic"]
    lengths: IntArray
    row_order: IntArray
    rows_per_batch: IntArray
    microbatches_per_batch: IntArray
    stops: IntArray
    microbatch_lengths: IntArray
    pad_target: int
    """Padded length that holds every row, rounded as the arguments say."""
    budget_tokens: int | None = None
    algorithm: str | None = None
    attention_ratio: float = DEFAULT_ATTENTION_RATIO

    @property
    def ranks(self) -> int:
        return len(self.rows_per_batch)

    @property
    def inverse(self) -> list[int]:
        """The caller's row of each row in rank order; `reorder_data(inverse)` restores the caller's order."""
        order: list[int] = self.row_order.tolist()
        return order

    @cached_property
    def rank_bounds(self) -> list[int]:
        """Where the rows of each rank begin in `row_order`, and the number of rows."""
        bounds: list[int] = np.append(0, np.cumsum(self.rows_per_batch.sum(axis=1))).tolist()
        return bounds

    def rank_rows(self, rank: int) -> IntArray:
        return self.row_order[self.rank_bounds[rank] : self.rank_bounds[rank + 1]]

    def rank_plan(self, rank: int) -> dict[str, Any]:
        """Return a rank's microbatches, by the names that batches and metas have for them; empty for slices.

        Per global batch: [start, stop) of each microbatch in the rank's rows of that batch, their lengths, and the
        rank's rows.
        """
        if self.kind == "contiguous":
            return {}
        pairs, lengths = self._pairs[rank].tolist(), self.microbatch_lengths[rank].tolist()
        return {
            "micro_batch_indices": [pairs[start:stop] for start, stop in pairwise(self._batch_bounds)],
            "micro_batch_lengths": [lengths[start:stop] for start, stop in pairwise(self._batch_bounds)],
            "elem_counts_per_gb": self.rows_per_batch[rank].tolist(),
        }

    @cached_property
    def _batch_bounds(self) -> list[int]:
        bounds: list[int] = np.append(0, np.cumsum(self.microbatches_per_batch)).tolist()
        return bounds

    @cached_property
    def _pairs(self) -> IntArray:
        """Start and stop of each microbatch, (R, M, 2)."""
        starts = np.zeros_like(self.stops)
        starts[:, 1:] = self.stops[:, :-1]
        starts[:, [first for first in self._batch_bounds[:-1] if first < starts.shape[1]]] = 0
        return np.stack([starts, self.stops], axis=2)


def plan_microbatches(
    lengths: npt.ArrayLike,
    *,
    shards: int,
    batch_size: int | None = None,
    sequence_packing_args: SequencePackingArgs | Mapping[str, Any] | None = None,
    dynamic_batching_args: DynamicBatchingArgs | Mapping[str, Any] | None = None,
    row_names: Sequence[str] | None = None,
) -> MicrobatchPlan:
    """Plan N rows for `shards` ranks.

    Global batches of `batch_size` rows follow one another; None makes all rows one. Without arguments for
    packing or dynamic batching, rank k gets the contiguous slice k of each global batch, which must divide by
    `shards`. `row_names` name the rows in errors.

    Raises:
        ConfigError: sizes that do not divide, a row over the token budget, bad arguments.
        SchemaError: lengths that are not N integers of at least 0.
    """
    rows = as_lengths(lengths)
    shards = whole_number("shards", shards, 1, ConfigError)
    batches = _count_batches(len(rows), batch_size)
    if sequence_packing_args is not None and dynamic_batching_args is not None:
        raise ConfigError(
            "dynamic_batching_args and sequence_packing_args cannot be passed together; drop one of them"
        )
    if sequence_packing_args is not None:
        args, plan_batch = _read("sequence_packing_args", sequence_packing_args, SequencePackingArgs), _pack
    elif dynamic_batching_args is not None:
        args = _read("dynamic_batching_args", dynamic_batching_args, DynamicBatchingArgs)
        plan_batch = _batch_by_length
    else:
        args, plan_batch = _Arguments("contiguous", 0, 1), _slice
    if args.budget:
        fitting = args.rounded(rows)
        check_fits(rows, fitting, args.budget, knob="max_tokens_per_microbatch", row_names=row_names)
    parts = [*rows.reshape(batches, -1)] if batches else []
    return _assemble(rows, shards, [plan_batch(part, shards, args) for part in parts], args)


def _count_batches(rows: int, batch_size: int | None) -> int:
    if batch_size is None:
        return 1
    batch_size = whole_number("batch_size", batch_size, 1, ConfigError)
    if rows % batch_size:
        raise ConfigError(
            f"Total batch size ({rows}) is not a multiple of batch_size ({batch_size}); "
            "change batch_size (train_global_batch_size), or the number of rows"
        )
    return rows // batch_size


@dataclass(frozen=True)
class _Arguments:
    """Checked arguments of a plan; `multiple` is that to which rows are rounded up."""

    kind: Literal["contiguous", "packed", "dynamic"]
    budget: int
    multiple: int
    attention_ratio: float = DEFAULT_ATTENTION_RATIO
    algorithm: str = ""
    longest_first: bool = False

    def rounded(self, lengths: IntArray) -> IntArray:
        """Return lengths rounded up; a padded row has a token at least, since a forward pass needs one."""
        if self.kind == "dynamic":
            lengths = np.maximum(lengths, 1)
        return lengths if self.multiple == 1 else -(-lengths // self.multiple) * self.multiple


@dataclass(frozen=True)
class _Shares:
    """How one global batch of n rows falls to R ranks with K microbatches each.

    `rows` (n,) are row indices, rank after rank, each rank's in processing order; `rows_of_rank` (R,) counts
    them. `stops` (R, K) are ends of microbatches, counted in the rank's rows of this batch. `lengths` (R, K)
    are tokens: the sum of a packed microbatch, the padded row length of a dynamic one.
    """

    rows: IntArray
    rows_of_rank: IntArray
    stops: IntArray
    lengths: IntArray


def _pack(lengths: IntArray, ranks: int, args: _Arguments) -> _Shares:
    """Plan one global batch as packed microbatches; rows go to ranks by cost, and then into bins.

    `concatenative` keeps rows in order: it makes the bins first, and every rank gets as many of them.
    """
    lengths = args.rounded(lengths)
    costs = row_costs(lengths, args.attention_ratio)
    if args.algorithm == "concatenative":
        bin_of = concatenate_rows(lengths, args.budget)
        bins = round_up(max(int(bin_of.max(initial=-1)) + 1, ranks), ranks)
        split_fullest(lengths, bin_of, bins, behind_the_middle)
        bin_costs = sum_by(bin_of, costs, bins)
        order = descending_order(bin_costs)
        rank_of_bin = np.empty(bins, dtype=np.int64)
        rank_of_bin[order] = deal(bin_costs[order], ranks)
    else:
        # A rank with very many rows packs them in parts, which costs a part of a bin each.
        parts = max(1, -(-len(lengths) // (ranks * _ROWS_PACKED_TOGETHER)))
        order = descending_order(lengths)  # of costs, too
        shard_of_row = share_rows(costs, ranks, order)
        if parts > 1:
            shard_of_row = divide_shares(shard_of_row, ranks, parts, order)
        bin_of = pack_shards(lengths, shard_of_row, ranks * parts, args.budget, args.algorithm, order)
        bins_of_shard = int(bin_of.max(initial=0)) + 1
        bin_of += shard_of_row * bins_of_shard
        rank_of_bin = np.repeat(np.arange(ranks), parts * bins_of_shard)
        bins = len(rank_of_bin)
    counts = np.bincount(bin_of, minlength=bins)
    within = -sum_by(bin_of, costs, bins) if args.longest_first else np.zeros(bins, dtype=np.int64)
    # By rank and then by number, or from the costliest; bins without rows come last.
    order = np.lexsort((within, counts == 0, rank_of_bin))
    slot_of_bin = np.empty(bins, dtype=np.int64)
    slot_of_bin[order] = np.arange(bins)
    counts = counts[order].reshape(ranks, -1)
    tokens = sum_by(bin_of, lengths, bins)[order].reshape(ranks, -1)
    return _Shares(
        rows=descending_order(bins - 1 - slot_of_bin[bin_of]),
        rows_of_rank=counts.sum(axis=1),
        stops=np.cumsum(counts, axis=1),
        lengths=np.where(counts > 0, tokens, args.multiple),
    )


def _batch_by_length(lengths: IntArray, ranks: int, args: _Arguments) -> _Shares:
    """Plan one global batch as padded microbatches; every row's rounded length must fit the budget.

    Rows are sorted by length and dealt one to each rank per position, so that the rows at a position are
    neighbours in length. A microbatch is a range of positions on every rank; rows times the longest padded
    length in it, over all ranks, is within the budget. When the rows do not divide by the ranks, the
    shortest position is missing on some ranks; a microbatch that loses its only row there is a dummy.
    """
    order = descending_order(lengths)
    items = lengths[order]
    rank_of_item = deal(row_costs(items, args.attention_ratio), ranks)
    positions = -(-len(items) // ranks)
    stops, padded = _boundaries(args.rounded(items[::ranks][::-1]).tolist(), args)
    # Positions ascend in length, so the deal is read backwards.
    by_rank = np.argsort(rank_of_item[::-1], kind="stable")
    rows_of_rank = np.bincount(rank_of_item, minlength=ranks)
    missing = positions - rows_of_rank
    shifted = np.maximum(np.array(stops)[None, :] - missing[:, None], 0)
    is_dummy = np.diff(shifted, axis=1, prepend=0) == 0
    return _Shares(
        rows=order[::-1][by_rank],
        rows_of_rank=rows_of_rank,
        stops=shifted,
        lengths=np.where(is_dummy, args.multiple, np.array(padded)[None, :]),
    )


def _boundaries(longest: list[int], args: _Arguments) -> tuple[list[int], list[int]]:
    """Cut ascending lengths into ranges as long as the budget allows; without rows, one empty range."""
    if not longest:
        return [0], [args.multiple]
    stops: list[int] = []
    start = 0
    for position, length in enumerate(longest):
        if (position + 1 - start) * length > args.budget:
            stops.append(position)
            start = position
    stops.append(len(longest))
    return stops, [longest[stop - 1] for stop in stops]


def _slice(lengths: IntArray, ranks: int, args: _Arguments) -> _Shares:
    """Give each rank a slice of one global batch, without microbatches."""
    batch = len(lengths)
    if batch % ranks:
        raise ConfigError(
            f"Batch size ({batch}) is not a multiple of shards ({ranks} data-parallel ranks); change "
            "batch_size or the number of ranks, or switch on sequence_packing or dynamic_batching"
        )
    counts = np.full(ranks, batch // ranks)
    nothing = np.zeros((ranks, 0), dtype=np.int64)
    return _Shares(rows=np.arange(batch), rows_of_rank=counts, stops=nothing, lengths=nothing)


def _assemble(lengths: IntArray, ranks: int, shares: Sequence[_Shares], args: _Arguments) -> MicrobatchPlan:
    """Join the global batches: each rank's rows of all batches follow each other."""
    nothing = np.zeros((ranks, 0), dtype=np.int64)
    batch_size = len(lengths) // max(len(shares), 1)
    rows = [share.rows + index * batch_size for index, share in enumerate(shares)]
    rank_of_row = [np.repeat(np.arange(ranks), share.rows_of_rank) for share in shares]
    by_rank = np.argsort(np.concatenate([*rank_of_row, nothing[0]]), kind="stable")
    return MicrobatchPlan(
        kind=args.kind,
        lengths=lengths,
        row_order=np.concatenate([*rows, nothing[0]])[by_rank],
        rows_per_batch=np.stack([s.rows_of_rank for s in shares], axis=1) if shares else nothing,
        microbatches_per_batch=np.array([s.stops.shape[1] for s in shares], dtype=np.int64),
        stops=np.concatenate([nothing, *(s.stops for s in shares)], axis=1),
        microbatch_lengths=np.concatenate([nothing, *(s.lengths for s in shares)], axis=1),
        pad_target=round_up(int(lengths.max(initial=1)), args.multiple),
        budget_tokens=args.budget or None,
        algorithm=args.algorithm or None,
        attention_ratio=args.attention_ratio,
    )


def _read(name: str, given: Mapping[str, Any], declared: type) -> _Arguments:
    """Check the arguments `name` for packing or dynamic batching, whose keys are those of `declared`."""
    known = declared.__annotations__
    if unknown := sorted(set(given) - set(known)):
        raise ConfigError(f"{name} has unknown keys {', '.join(unknown)}; known are {', '.join(known)}")
    budget = _positive(name, given, "max_tokens_per_microbatch")
    ratio = given.get("attention_ratio", DEFAULT_ATTENTION_RATIO)
    if not isinstance(ratio, int | float) or not 0 <= ratio < 1:
        raise ConfigError(f"{name}.attention_ratio={ratio}; expected a number from 0 to 1")
    if declared is DynamicBatchingArgs:
        multiple = _positive(name, given, "sequence_length_round", 1)
        return _Arguments("dynamic", budget, multiple, float(ratio))
    order, algorithm = given.get("microbatch_order", "planned"), str(given.get("algorithm", ""))
    check_algorithm(algorithm)
    if order not in MICROBATCH_ORDERS:
        raise ConfigError(f"{name}.microbatch_order='{order}'; choose one of {', '.join(MICROBATCH_ORDERS)}")
    multiple = _positive(name, given, "sequence_length_pad_multiple", 1)
    return _Arguments("packed", budget, multiple, float(ratio), algorithm, order == "longest_first")


def _positive(name: str, args: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = args.get(key, default)
    if value is None:
        raise ConfigError(f"{name} has no '{key}'; set it")
    return whole_number(f"{name}.{key}", value, 1, ConfigError)

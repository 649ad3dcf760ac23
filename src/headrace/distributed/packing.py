"""The planner: row lengths in, microbatches per rank out. Pure, O(N) memory, no tensor.

`plan_microbatches` is what batches, the data plane and `headrace plan` call. Three ways to cut a global
batch: contiguous slices (no arguments), packed sequences, and dynamic batches of similar lengths. With the
last two, every rank has the same number of microbatches by construction; one without rows is a zero-weight
filler.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypedDict

import numpy as np
import numpy.typing as npt

from headrace.distributed.bins import ALGORITHMS, Algorithm, as_lengths, check_fits, pack_rows
from headrace.distributed.dynamic_plan import batch_by_length, padded_lengths
from headrace.distributed.first_fit import IntArray
from headrace.distributed.packed_plan import BatchShares, pack_batch
from headrace.distributed.plan_report import describe_plan
from headrace.errors import ConfigError
from headrace.utils.arguments import whole_number
from headrace.utils.rounding import round_up

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "DynamicBatchingArgs",
    "MicrobatchPlan",
    "SequencePackingArgs",
    "pack_rows",
    "plan_microbatches",
]

MICROBATCH_ORDERS = ("planned", "longest_first")


class SequencePackingArgs(TypedDict):
    """How to pack: `sequence_length_pad_multiple` rounds every row up before it is packed.

    `microbatch_order`: `planned` (default) is the order in which the algorithm made the bins, `longest_first`
    starts with the fullest, so that memory peaks in the first microbatch.
    """

    max_tokens_per_microbatch: int
    input_key: str
    input_lengths_key: str
    algorithm: str
    sequence_length_pad_multiple: int
    microbatch_order: NotRequired[str]


class DynamicBatchingArgs(TypedDict):
    """How to batch by length: each microbatch is padded to a multiple of `sequence_length_round`."""

    max_tokens_per_microbatch: int
    input_key: str
    input_lengths_key: str
    sequence_length_round: int


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

    @property
    def ranks(self) -> int:
        return len(self.rows_per_batch)

    @property
    def inverse(self) -> list[int]:
        """The caller's row of each row in rank order; `reorder_data(inverse)` restores the caller's order."""
        order: list[int] = self.row_order.tolist()
        return order

    def rank_rows(self, rank: int) -> IntArray:
        stops = np.cumsum(self.rows_per_batch.sum(axis=1))
        return self.row_order[stops[rank] - self.rows_per_batch[rank].sum() : stops[rank]]

    def micro_batch_indices(self, rank: int) -> list[list[list[int]]]:
        """Return, per global batch, [start, stop) of each microbatch in the rank's rows of that batch."""
        return [
            np.stack([np.concatenate([[0], stops])[:-1], stops], axis=1).tolist()
            for stops in self._by_batch(self.stops[rank])
        ]

    def micro_batch_lengths(self, rank: int) -> list[list[int]]:
        return [lengths.tolist() for lengths in self._by_batch(self.microbatch_lengths[rank])]

    def elem_counts_per_gb(self, rank: int) -> list[int]:
        counts: list[int] = self.rows_per_batch[rank].tolist()
        return counts

    def explain(self) -> str:
        """Return a readable account: bins, fill, and imbalance over ranks; a summary where there is much."""
        return describe_plan(self)

    def _by_batch(self, row: IntArray) -> list[IntArray]:
        return (
            np.split(row, np.cumsum(self.microbatches_per_batch)[:-1])
            if len(self.microbatches_per_batch)
            else []
        )


def plan_microbatches(
    lengths: npt.ArrayLike,
    *,
    shards: int,
    batch_size: int | None = None,
    allow_uneven_shards: bool = False,
    sequence_packing_args: SequencePackingArgs | Mapping[str, Any] | None = None,
    dynamic_batching_args: DynamicBatchingArgs | Mapping[str, Any] | None = None,
    row_names: Sequence[str] | None = None,
) -> MicrobatchPlan:
    """Plan N rows for `shards` ranks.

    Global batches of `batch_size` rows follow one another; None makes all rows one. Without arguments for
    packing or dynamic batching, rank k gets the contiguous slice k of each global batch, which must divide by
    `shards` unless `allow_uneven_shards`. `row_names` name the rows in errors.

    Raises:
        ConfigError: sizes that do not divide, a row over the token budget, bad arguments.
        SchemaError: lengths that are not N integers of at least 0.
    """
    costs = as_lengths(lengths)
    shards = whole_number("shards", shards, 1, ConfigError)
    batches = _count_batches(len(costs), shards, batch_size, allow_uneven_shards)
    if sequence_packing_args is not None and dynamic_batching_args is not None:
        raise ConfigError(
            "dynamic_batching_args and sequence_packing_args cannot be passed together; drop one of them"
        )
    if sequence_packing_args is not None:
        return _plan_packed(costs, shards, batches, dict(sequence_packing_args), row_names)
    if dynamic_batching_args is not None:
        return _plan_dynamic(costs, shards, batches, dict(dynamic_batching_args), row_names)
    return _plan_contiguous(costs, shards, batches, allow_uneven_shards)


def _count_batches(rows: int, shards: int, batch_size: int | None, allow_uneven: bool) -> int:
    if batch_size is None:
        return 1
    batch_size = whole_number("batch_size", batch_size, 1, ConfigError)
    if allow_uneven:
        raise ConfigError("allow_uneven_shards needs batch_size=None: uneven shards are cut from one batch")
    if rows % batch_size:
        raise ConfigError(
            f"Total batch size ({rows}) is not a multiple of batch_size ({batch_size}); "
            "change batch_size (train_global_batch_size), or the number of rows"
        )
    return rows // batch_size


def _plan_packed(
    lengths: IntArray, ranks: int, batches: int, args: dict[str, Any], row_names: Sequence[str] | None
) -> MicrobatchPlan:
    _check_keys("sequence_packing_args", args, SequencePackingArgs)
    budget = _positive("sequence_packing_args", args, "max_tokens_per_microbatch")
    multiple = _positive("sequence_packing_args", args, "sequence_length_pad_multiple", 1)
    order = args.get("microbatch_order", "planned")
    if order not in MICROBATCH_ORDERS:
        raise ConfigError(
            f"sequence_packing_args.microbatch_order='{order}'; choose one of {', '.join(MICROBATCH_ORDERS)}"
        )
    algorithm = str(args.get("algorithm", ""))
    costs = lengths if multiple == 1 else -(-lengths // multiple) * multiple
    check_fits(lengths, costs, budget, knob="max_tokens_per_microbatch", row_names=row_names)
    shares = [
        pack_batch(
            batch,
            ranks,
            budget_tokens=budget,
            algorithm=algorithm,
            pad_multiple=multiple,
            longest_first=order == "longest_first",
        )
        for batch in _split(costs, batches)
    ]
    return _assemble("packed", lengths, ranks, shares, multiple, budget, algorithm)


def _plan_dynamic(
    lengths: IntArray, ranks: int, batches: int, args: dict[str, Any], row_names: Sequence[str] | None
) -> MicrobatchPlan:
    _check_keys("dynamic_batching_args", args, DynamicBatchingArgs)
    budget = _positive("dynamic_batching_args", args, "max_tokens_per_microbatch")
    multiple = _positive("dynamic_batching_args", args, "sequence_length_round", 1)
    padded = padded_lengths(lengths, multiple)
    check_fits(lengths, padded, budget, knob="max_tokens_per_microbatch", row_names=row_names)
    shares = [
        batch_by_length(batch, ranks, budget_tokens=budget, round_to=multiple)
        for batch in _split(lengths, batches)
    ]
    return _assemble("dynamic", lengths, ranks, shares, multiple, budget, None)


def _plan_contiguous(lengths: IntArray, ranks: int, batches: int, allow_uneven: bool) -> MicrobatchPlan:
    rows = len(lengths)
    batch = rows // batches if batches else 0
    if batch % ranks and not allow_uneven:
        raise ConfigError(
            f"Batch size ({batch}) is not a multiple of shards ({ranks} data-parallel ranks); change "
            "batch_size or the number of ranks, or switch on sequence_packing or dynamic_batching"
        )
    per_rank = -(-batch // ranks)
    counts = np.clip(batch - per_rank * np.arange(ranks), 0, per_rank)
    rank_of_row = np.tile(np.repeat(np.arange(ranks), counts), batches)
    return MicrobatchPlan(
        kind="contiguous",
        lengths=lengths,
        row_order=np.argsort(rank_of_row, kind="stable"),
        rows_per_batch=np.tile(counts[:, None], batches),
        microbatches_per_batch=np.zeros(batches, dtype=np.int64),
        stops=np.zeros((ranks, 0), dtype=np.int64),
        microbatch_lengths=np.zeros((ranks, 0), dtype=np.int64),
        pad_target=int(lengths.max(initial=0)),
    )


def _assemble(
    kind: Literal["packed", "dynamic"],
    lengths: IntArray,
    ranks: int,
    shares: Sequence[BatchShares],
    multiple: int,
    budget: int,
    algorithm: str | None,
) -> MicrobatchPlan:
    """Join the global batches: each rank's rows of all batches follow each other."""
    nothing = np.zeros((ranks, 0), dtype=np.int64)
    batch_size = len(lengths) // max(len(shares), 1)
    rows = [share.rows + index * batch_size for index, share in enumerate(shares)]
    rank_of_row = [np.repeat(np.arange(ranks), share.rows_of_rank) for share in shares]
    by_rank = np.argsort(np.concatenate([*rank_of_row, nothing[0]]), kind="stable")
    return MicrobatchPlan(
        kind=kind,
        lengths=lengths,
        row_order=np.concatenate([*rows, nothing[0]])[by_rank],
        rows_per_batch=np.stack([s.rows_of_rank for s in shares], axis=1) if shares else nothing,
        microbatches_per_batch=np.array([s.stops.shape[1] for s in shares], dtype=np.int64),
        stops=np.concatenate([nothing, *(s.stops for s in shares)], axis=1),
        microbatch_lengths=np.concatenate([nothing, *(s.lengths for s in shares)], axis=1),
        pad_target=round_up(int(lengths.max(initial=1)), multiple),
        budget_tokens=budget,
        algorithm=algorithm,
    )


def _split(costs: IntArray, batches: int) -> list[IntArray]:
    return [*costs.reshape(batches, -1)] if batches else []


def _check_keys(name: str, args: Mapping[str, Any], declared: type) -> None:
    unknown = sorted(set(args) - set(declared.__annotations__))
    if unknown:
        raise ConfigError(
            f"{name} has unknown keys {', '.join(unknown)}; known are {', '.join(declared.__annotations__)}"
        )


def _positive(name: str, args: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = args.get(key, default)
    if value is None:
        raise ConfigError(f"{name} has no '{key}'; set it")
    return whole_number(f"{name}.{key}", value, 1, ConfigError)

"""From one step's metadata to each data-parallel rank's: which rows, in which microbatches. No I/O."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from headrace.data_plane.interfaces import KVBatchMeta
from headrace.data_plane.row_lists import PACKED_IDS, Ints, packed_parts
from headrace.distributed.planner import DynamicBatchingArgs, SequencePackingArgs, plan_microbatches
from headrace.errors import SchemaError

_MANY_ROWS = 4096


def shard_meta_for_dp(
    meta: KVBatchMeta,
    *,
    dp_world: int,
    batch_size: int | None = None,
    sequence_packing_args: SequencePackingArgs | Mapping[str, Any] | None = None,
    dynamic_batching_args: DynamicBatchingArgs | Mapping[str, Any] | None = None,
) -> tuple[list[KVBatchMeta], list[int] | None]:
    """Return the metadata of each of `dp_world` ranks, and how to restore the caller's row order.

    Rows fall to ranks exactly as `BatchedDataDict.shard_by_batch_size` gives them, from the lengths alone.
    Ids, lengths and tags of a row stay together; `extra_info` is copied to every rank, with that rank's
    microbatch plan when packing or dynamic batching is on (then every rank has the same number of
    microbatches per global batch).

    Returns:
        The metas, and `inverse`: rows concatenated in rank order return to the caller's order by
        `reorder_data(inverse)`. None if they are in that order already, which without packing and dynamic
        batching is so for a single global batch.

    Raises:
        SchemaError: packing or dynamic batching without `sequence_lengths`.
        ConfigError: sizes that do not divide, a row over the token budget (by sample id), or bad arguments.
    """
    planned = sequence_packing_args is not None or dynamic_batching_args is not None
    if planned and meta.sequence_lengths is None:
        raise SchemaError(
            f"the meta of partition '{meta.partition_id}' has {meta.size} rows without sequence_lengths; "
            "packing and dynamic batching need them"
        )
    plan = plan_microbatches(
        meta.sequence_lengths if meta.sequence_lengths is not None else [0] * meta.size,
        shards=dp_world,
        batch_size=batch_size,
        sequence_packing_args=sequence_packing_args,
        dynamic_batching_args=dynamic_batching_args,
        row_names=meta.sample_ids,
    )
    metas = cut_meta(meta, plan.row_order, plan.rank_bounds)
    for rank, shard in enumerate(metas):
        shard.extra_info |= plan.rank_plan(rank)
    is_in_order = not planned and np.array_equal(plan.row_order, np.arange(meta.size))
    return metas, None if is_in_order else plan.inverse


def cut_meta(meta: KVBatchMeta, order: Ints, bounds: Sequence[int]) -> list[KVBatchMeta]:
    """Return what `subset(order[start:stop])` gives between each two neighbours of `bounds`.

    Of many rows, the ids of a part stay the bytes that a message has of them until somebody reads them: picking a
    million texts in another order than they lie in memory takes longer than planning them.
    """
    if len(order) < _MANY_ROWS:
        return [meta.subset(order[start:stop].tolist()) for start, stop in pairwise(bounds)]
    # As objects: the numbers stay those of the meta, and none is made anew.
    lengths = None if meta.sequence_lengths is None else np.array(meta.sequence_lengths, object)[order]
    packed, parts = packed_parts(meta.sample_ids, order, bounds), []
    for ids, (start, stop) in zip(packed, pairwise(bounds)):
        part = meta.bare()
        del part.sample_ids
        part.__dict__[PACKED_IDS] = ids
        part.sequence_lengths = None if lengths is None else lengths[start:stop].tolist()
        part.tags = None if meta.tags is None else [dict(meta.tags[i]) for i in order[start:stop].tolist()]
        parts.append(part)
    return parts

"""Shards of metadata, with microbatch orders by both of their names."""

from typing import Any

from headrace.compat.batched_data_dict import headrace_packing_args
from headrace.data_plane import preshard
from headrace.data_plane.interfaces import KVBatchMeta

__all__ = ["shard_meta_for_dp"]


def shard_meta_for_dp(
    meta: KVBatchMeta,
    *,
    dp_world: int,
    batch_size: int | None = None,
    sequence_packing_args: Any = None,
    dynamic_batching_args: Any = None,
) -> tuple[list[KVBatchMeta], list[int] | None]:
    """Return the metadata of each rank; see `headrace.data_plane.preshard.shard_meta_for_dp`."""
    return preshard.shard_meta_for_dp(
        meta,
        dp_world=dp_world,
        batch_size=batch_size,
        sequence_packing_args=headrace_packing_args(sequence_packing_args),
        dynamic_batching_args=dynamic_batching_args,
    )

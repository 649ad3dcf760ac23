"""Columns on the wire; batches made of them have the methods that callers of NeMo-RL use."""

from collections.abc import Mapping

from tensordict import TensorDict

from headrace.compat.batched_data_dict import BatchedDataDict
from headrace.data_plane import codec
from headrace.data_plane.codec import (
    RowPacker,
    maybe_pack_jagged,
    nest,
    pack_jagged_fields,
    pack_per_token_field,
    response_from_nested,
    stack_or_nest,
    to_nested_by_length,
    unwrap_wire_stripped_payload,
)
from headrace.data_plane.schema import Layout

__all__ = [
    "RowPacker",
    "materialize",
    "maybe_pack_jagged",
    "nest",
    "pack_jagged_fields",
    "pack_per_token_field",
    "response_from_nested",
    "stack_or_nest",
    "to_nested_by_length",
    "unwrap_wire_stripped_payload",
]


def materialize(
    td: TensorDict,
    layout: Layout = "padded",
    pad_value_dict: Mapping[str, int | float | bool] | None = None,
    pad_to_seqlen: int = 0,
) -> BatchedDataDict:
    """Turn a wire TensorDict into a batch; see `headrace.data_plane.codec.materialize`."""
    return BatchedDataDict.of(codec.materialize(td, layout, pad_value_dict, pad_to_seqlen))

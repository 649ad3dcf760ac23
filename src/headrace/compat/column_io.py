"""Columns in and out of a store: rows without `input_lengths` count as full width, media may be shared."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from headrace.compat.batched_data_dict import BatchedDataDict
from headrace.compat.packed_tensor import PackedTensor
from headrace.data_plane import column_io
from headrace.data_plane.column_io import pack_columns, round_up
from headrace.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from headrace.data_plane.schema import INPUT_IDS, INPUT_LENGTHS, PER_TOKEN_FIELDS, Layout
from headrace.distributed.ragged import is_nested, ragged_from_nested

__all__ = [
    "TOKEN_ALIGNED_FIELDS",
    "kv_first_write",
    "pack_columns",
    "read_columns",
    "round_up",
    "write_columns",
]

TOKEN_ALIGNED_FIELDS = PER_TOKEN_FIELDS
"""Columns with one value, or several, per token; `declare` adds to them."""


def read_columns(
    dp_client: DataPlaneClient,
    meta: KVBatchMeta,
    select_fields: Sequence[str],
    *,
    layout: Layout = "padded",
    pad_value_dict: Mapping[str, int | float | bool] | None = None,
) -> BatchedDataDict:
    """Read columns of the rows of `meta`, in their order; see `headrace.data_plane.read_columns`."""
    batch = column_io.read_columns(
        dp_client, meta, select_fields, layout=layout, pad_value_dict=pad_value_dict
    )
    return BatchedDataDict.of(batch)


def write_columns(dp_client: DataPlaneClient, meta: KVBatchMeta, fields: Mapping[str, Any]) -> KVBatchMeta:
    """Write columns of the rows of `meta`; one without lengths gets those of the first column of tokens."""
    if meta.sequence_lengths is None:
        meta.sequence_lengths = full_lengths(fields)
    return column_io.write_columns(dp_client, meta, plain_media(fields))


def kv_first_write(
    final_batch_cpu: Mapping[str, Any],
    *,
    sample_ids: Sequence[str],
    dp_client: DataPlaneClient,
    partition_id: str,
    extra_info: Mapping[str, Any] | None = None,
    task_name: str = "train",
    pad_to_multiple: int = 1,
    tags: Sequence[Mapping[str, Any]] | None = None,
    **options: Any,
) -> KVBatchMeta:
    """Write a rollout batch in one put; without `input_lengths`, every row is as long as its tokens are wide.

    The column `input_lengths` is written then, too. `options` are those of `headrace.data_plane.kv_first_write`.
    """
    batch = plain_media(final_batch_cpu)
    if INPUT_LENGTHS not in batch and (lengths := full_lengths(batch)) is not None:
        batch[INPUT_LENGTHS] = torch.tensor(lengths, dtype=torch.int64)
    return column_io.kv_first_write(
        batch,
        sample_ids=sample_ids,
        dp_client=dp_client,
        partition_id=partition_id,
        extra_info=extra_info,
        task_name=task_name,
        pad_to_multiple=pad_to_multiple,
        tags=tags,
        **options,
    )


def plain_media(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return columns with shared media as headrace stores them: one tensor per row."""
    return {n: c.joined() if isinstance(c, PackedTensor) else c for n, c in fields.items()}


def full_lengths(fields: Mapping[str, Any]) -> list[int] | None:
    """Return the width of each row of `input_ids`, or of another column of tokens; None if there is none.

    One value per sample, which may hold for all its tokens, says nothing.

    >>> full_lengths({"input_ids": torch.zeros(2, 3, dtype=torch.int64)})
    [3, 3]
    """
    for name in (INPUT_IDS, *fields):
        column = fields.get(name)
        if name not in PER_TOKEN_FIELDS or column is None:
            continue
        if isinstance(column, torch.Tensor) and is_nested(column):
            lengths: list[int] = ragged_from_nested(column)[1].diff().tolist()
            return lengths
        if isinstance(column, torch.Tensor):
            widths = [column.shape[1]] * len(column) if column.dim() > 1 else []
        else:
            widths = [len(row) for row in column if np.ndim(row)]
        if len(widths) == len(column):
            return widths
    return None

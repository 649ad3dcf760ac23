"""A microbatch that computes something and weighs nothing, for a rank that has fewer rows than the others."""

from typing import Any

import numpy as np
import torch

from headrace.distributed.columns import object_array
from headrace.distributed.multimodal import PackedTensor
from headrace.distributed.ragged import nested_from_ragged, ragged_from_nested


def is_weight(name: str) -> bool:
    """Return whether a column weighs rows or tokens in the loss: `loss_multiplier` and `*mask`.

    Not `*attention_mask`: a dummy's is left alone, since softmax over nothing is NaN.
    """
    return name == "loss_multiplier" or (name.endswith("mask") and not name.endswith("attention_mask"))


def dummy_column(name: str, column: Any, width: int | None, is_length: bool) -> Any:
    """Return a column of one row with one token: that of `column`, or zeros and None if it has none.

    Dense token columns are cut to `width` at most (None: the column is not one of tokens); weights are 0, the length is
    1, media are None.
    """
    if isinstance(column, PackedTensor):
        return PackedTensor([None], column.dim_to_pack)
    if isinstance(column, torch.Tensor):
        if column.is_nested:
            values, _, ragged_dim = ragged_from_nested(column)
            token = values[:1] if values.shape[0] else values.new_zeros((1, *values.shape[1:]))
            tensor = nested_from_ragged(token, torch.tensor([0, 1]), ragged_dim=ragged_dim)
        elif column.shape[0]:
            tensor = column[:1] if width is None else column[:1, :width]
        else:
            sizes = column.shape[1:] if width is None else (width, *column.shape[2:])
            tensor = column.new_zeros((1, *sizes))
        if is_length:
            return torch.ones_like(tensor)
        return torch.zeros_like(tensor) if is_weight(name) else tensor
    row: list[Any] = list(column[:1]) or [None]
    if is_length:
        row = [1]
    elif is_weight(name):
        row = [torch.zeros_like(row[0]) if isinstance(row[0], torch.Tensor) else 0]
    if not isinstance(column, np.ndarray):
        return row
    if column.dtype == object:
        return object_array(row)
    empty = np.zeros_like(column, shape=(1, *column.shape[1:]))
    return empty if row[0] is None else np.asarray(row, column.dtype)

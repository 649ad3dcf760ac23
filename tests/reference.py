"""Naive truth, one row at a time, that the fast code is compared with."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two dense tensors have the same dtype, shape and bits (so that NaN equals itself)."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return left.reshape(-1).tolist() == [] or _bits(left) == _bits(right)


def _bits(tensor: torch.Tensor) -> list[int]:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
    return flat.view(torch.uint8).tolist()


def unpad(padded: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Return row i as padded[i, :lengths[i]]."""
    return [padded[i, :length].clone() for i, length in enumerate(lengths)]


def pad(rows: Sequence[torch.Tensor], width: int, pad_value: float) -> torch.Tensor:
    """Return rows (L_i, ...) as (N, width, ...); at least one row."""
    out = torch.full((len(rows), width, *rows[0].shape[1:]), pad_value, dtype=rows[0].dtype)
    for i, row in enumerate(rows):
        for t in range(row.shape[0]):
            out[i, t] = row[t]
    return out


def rows_of(nested: torch.Tensor) -> list[torch.Tensor]:
    """Return the rows of a jagged tensor, cut by its own offsets."""
    values, offsets = nested.values(), nested.offsets().tolist()
    return [values[start:stop].clone() for start, stop in pairwise(offsets)]


def same_rows(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(same_bits(a, b) for a, b in zip(left, right))


def response_scores(rows: Sequence[torch.Tensor], responses: Sequence[int]) -> list[torch.Tensor]:
    """Return the entries before each of the last `responses[i]` tokens of row i."""
    return [
        torch.stack([row[t - 1] for t in range(len(row) - n, len(row))]) if n else row[:0]
        for row, n in zip(rows, responses)
    ]


@dataclass
class Row:
    """One row of a meta, as a plain record."""

    sample_id: str
    length: int | None
    tags: dict[str, Any] | None


def meta_rows(meta: Any) -> list[Row]:
    """Return a KVBatchMeta as records."""
    count = len(meta.sample_ids)
    lengths = meta.sequence_lengths or [None] * count
    tags = meta.tags or [None] * count
    return [Row(i, n, None if t is None else dict(t)) for i, n, t in zip(meta.sample_ids, lengths, tags)]

"""Tokens that stand for media: which of them belong to an image, and which are only text that spells the same id."""

import inspect
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

import torch

from headrace.compat.packed_tensor import PackedTensor
from headrace.distributed.multimodal import PackedTensor as PlainColumn
from headrace.errors import SchemaError

MEDIA_TOKEN_VALIDITY_MASK = "media_token_validity_mask"


def build_media_token_validity_mask(
    input_ids: torch.Tensor,
    media_token_id: int,
    media_counts_by_row: Sequence[int],
    base_mask: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Return (N, S) bool, False where a row without media spells the media token; None if no row does.

    `base_mask` (N, S): positions that are not valid in it stay so; it is not changed.

    Raises:
        SchemaError: ids that are not (N, S), or not one count per row.
    """
    if input_ids.dim() != 2:
        raise SchemaError(f"input_ids must be [B, S]; got shape {tuple(input_ids.shape)}")
    if len(media_counts_by_row) != len(input_ids):
        raise SchemaError(
            f"{len(media_counts_by_row)} media counts for {len(input_ids)} rows; expected one entry per row"
        )
    empty = [count == 0 for count in media_counts_by_row]
    without = torch.tensor(empty, dtype=torch.bool, device=input_ids.device)
    spelled = (input_ids == media_token_id) & without.unsqueeze(1)
    if not bool(spelled.any()):
        return base_mask
    valid = ~spelled
    return valid if base_mask is None else valid & base_mask.to(torch.bool)


def media_placeholder_token_id_from_chunks(chunks: Iterable[Any]) -> int | None:
    """Return the `image_token_index` of the first model chunk that has one."""
    found = (getattr(chunk, "image_token_index", None) for chunk in chunks)
    return next((int(token) for token in found if token is not None), None)


def chunks_accept_media_token_validity_mask(chunks: Iterable[Any]) -> bool:
    """Return whether the forward of a model chunk has a parameter for the mask."""
    for chunk in chunks:
        try:
            parameters = inspect.signature(chunk.forward).parameters
        except (TypeError, ValueError, AttributeError):
            continue
        if MEDIA_TOKEN_VALIDITY_MASK in parameters:
            return True
    return False


def image_counts_by_row(batch: Any, num_rows: int) -> list[int] | None:
    """Return how many images each row has, all 0 without `pixel_values`; None if the column does not say."""
    pixels = batch.get("pixel_values")
    if pixels is None:
        return [0] * num_rows
    if not isinstance(pixels, PlainColumn):
        return None
    counts = PackedTensor.of(pixels).logical_segment_counts_by_row()
    return counts if len(counts) == num_rows else None


def attach_media_token_validity_mask(batch: MutableMapping[str, Any], media_token_id: int | None) -> None:
    """Set `batch["media_token_validity_mask"]` where `build_media_token_validity_mask` has something to say."""
    ids = batch.get("input_ids")
    if media_token_id is None or not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return
    counts = image_counts_by_row(batch, len(ids))
    if counts is None:
        return
    mask = build_media_token_validity_mask(ids, media_token_id, counts)
    if mask is not None:
        batch[MEDIA_TOKEN_VALIDITY_MASK] = mask

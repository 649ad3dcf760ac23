"""Packed sequences, with what only code from outside asks of them: several packed rows, and a block-causal mask."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headrace.distributed.ragged import RowLayout, ragged_indices
from headrace.errors import SchemaError


@dataclass(frozen=True)
class FlashAttentionKwargs:
    """Where the sequences of a packed row begin: `cu_seqlens_*` (B + 1,) int32, and the longest length.

    Sequence i of the row is tokens `cu_seqlens_q[i]` to `cu_seqlens_q[i + 1] - 1`.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    def as_forward_kwargs(self) -> dict[str, Any]:
        """Return the same under the names that a transformers model's `forward` hands to its attention."""
        return {
            "cu_seq_lens_q": self.cu_seqlens_q,
            "cu_seq_lens_k": self.cu_seqlens_k,
            "max_length_q": self.max_seqlen_q,
            "max_length_k": self.max_seqlen_k,
        }


def get_flash_attention_kwargs(input_lengths: torch.Tensor) -> FlashAttentionKwargs:
    """Return the boundaries of sequences of `input_lengths` (B,) laid end to end.

    >>> get_flash_attention_kwargs(torch.tensor([3, 2])).cu_seqlens_q
    tensor([0, 3, 5], dtype=torch.int32)
    """
    ends = input_lengths.cumsum(0, dtype=torch.int32)
    boundaries = torch.nn.functional.pad(ends, (1, 0))
    longest = int(input_lengths.max()) if len(input_lengths) else 0
    return FlashAttentionKwargs(boundaries, boundaries, longest, longest)


def pack_sequences(
    input_ids: torch.Tensor,
    input_lengths: torch.Tensor,
    packed_sequence_size: Sequence[int],
    padding_value: int = 0,
    return_attention_mask: bool = True,
    min_seq_len: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Lay the sequences of a padded batch (N, S) end to end in R = `len(packed_sequence_size)` rows.

    Row r takes the next `packed_sequence_size[r]` sequences. All rows are as wide as the fullest, T, and at
    least `min_seq_len`; the rest is filled with `padding_value`.

    Returns:
        Token ids (R, T); position ids (R, T), from 0 in every sequence and 0 in the padding; and, if asked
        for, a block-causal mask (R, T, T) bool: True where row t may attend to column s (same sequence, s <=
        t).

    Raises:
        SchemaError: sizes that do not add up to N, or a length below 0 or above S.

    >>> pack_sequences(torch.tensor([[5, 6], [7, 0]]), torch.tensor([2, 1]), [2])[:2]
    (tensor([[5, 6, 7]]), tensor([[0, 1, 0]]))
    """
    count, width = input_ids.shape
    if len(input_lengths) != count or sum(packed_sequence_size) != count:
        raise SchemaError(
            f"got {count} sequences, {len(input_lengths)} input_lengths and packed_sequence_size="
            f"{list(packed_sequence_size)} (sum {sum(packed_sequence_size)}); all three must agree"
        )
    sequences = RowLayout(input_lengths, width)
    parts = torch.split(sequences.lengths, list(packed_sequence_size))
    totals = [int(part.sum()) for part in parts]
    rows = RowLayout(totals, max([*totals, min_seq_len]))
    device = input_ids.device
    _, positions = ragged_indices(sequences.offsets_on(device), sequences.total)
    packed = rows.pad(sequences.strip(input_ids), padding_value)
    positions = rows.pad(positions)
    mask = (
        _block_causal(positions, rows.lengths.to(device, non_blocking=True))
        if return_attention_mask
        else None
    )
    return packed, positions, mask


def _block_causal(positions: torch.Tensor, totals: torch.Tensor) -> torch.Tensor:
    sequence = (positions == 0).cumsum(-1)
    order = torch.arange(positions.shape[-1], device=positions.device)
    filled = order < totals[:, None]
    same = sequence[:, :, None] == sequence[:, None, :]
    return same & (order[:, None] >= order[None, :]) & filled[:, :, None] & filled[:, None, :]

"""Several sequences in one row: token packing in the form that transformers' attention takes.

Source: transformers, FlashAttentionKwargs (cu_seq_lens_q, max_length_q), and find_packed_sequence_indices in
masking_utils (a position id that does not follow the one before begins a new sequence).
"""

from dataclasses import dataclass
from typing import Any

import torch


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

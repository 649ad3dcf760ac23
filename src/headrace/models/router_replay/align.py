"""Routes in the order of a forward's tokens: padded, packed or jagged samples to rows (batch x sequence).

Padding tokens get experts too, since a router routes every row of its input. Padding row r takes experts
(r k + j) mod E for j < k: the rows spread evenly over the experts, and so over the ranks of expert parallelism.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace.errors import ReplayError


@dataclass(frozen=True)
class AlignedRoutes:
    """Rows for one forward: `ids` (T, routers, k), and `padding` (T,) bool, True on padding tokens."""

    ids: torch.Tensor
    padding: torch.Tensor


def align_padded(ids: torch.Tensor, attention_mask: torch.Tensor, *, num_experts: int) -> AlignedRoutes:
    """Return the rows of a padded batch: `ids` (B, S, routers, k) beside `attention_mask` (B, S).

    Where the mask is 0, on whichever side, the entries of `ids` do not matter.
    """
    if ids.dim() != 4 or ids.shape[:2] != attention_mask.shape:
        raise ReplayError(
            f"routes of shape {tuple(ids.shape)} beside a mask of shape {tuple(attention_mask.shape)}; expected "
            "(B, S, routers, k) and (B, S)"
        )
    real = attention_mask.flatten().bool().to(ids.device)
    return _take(ids.flatten(0, 1), real, torch.arange(len(real), device=ids.device), num_experts)


def align_packed(ids: torch.Tensor, total_tokens: int, *, num_experts: int) -> AlignedRoutes:
    """Return the rows of packed sequences: `ids` (T, routers, k), sequences one after another, padded to the total."""
    if ids.dim() != 3 or len(ids) > total_tokens:
        raise ReplayError(f"routes of shape {tuple(ids.shape)} for {total_tokens} packed tokens")
    return align_jagged(ids, [len(ids)], total_tokens, num_experts=num_experts)


def align_jagged(
    values: torch.Tensor, lengths: Sequence[int], width: int, *, num_experts: int, left: bool = False
) -> AlignedRoutes:
    """Return the rows of a padded batch (B, width) of samples with these lengths; `left`: padding is on the left.

    `values` (sum of lengths, routers, k) are the routes of the samples, one after another.
    """
    count = torch.tensor(list(lengths), dtype=torch.int64)
    if int(count.sum()) != len(values) or int(count.max()) > width:
        raise ReplayError(
            f"routes of {len(values)} tokens for samples of {int(count.sum())} tokens, the longest of "
            f"{int(count.max())}, padded to {width}"
        )
    column = torch.arange(width)
    first = (width - count if left else torch.zeros_like(count)).unsqueeze(1)
    real = ((column >= first) & (column < first + count.unsqueeze(1))).flatten().to(values.device)
    return _take(values, real, real.cumsum(0) - 1, num_experts)


def _take(values: torch.Tensor, real: torch.Tensor, source: torch.Tensor, num_experts: int) -> AlignedRoutes:
    """Return `values[source]` where `real`, and padding rows elsewhere."""
    layers, top_k = values.shape[1:]
    if top_k > num_experts:
        raise ReplayError(f"{top_k} experts per token of num_experts={num_experts}")
    # Padding rows repeat with a period that divides the number of experts.
    period = num_experts // math.gcd(num_experts, top_k)
    row = torch.arange(len(real), device=values.device)
    experts = (row[:period].unsqueeze(1) * top_k + torch.arange(top_k, device=values.device)) % num_experts
    fillers = experts.to(values.dtype).unsqueeze(1).expand(-1, layers, -1)
    source = torch.where(real, source, len(values) + row % period)
    return AlignedRoutes(torch.cat([values, fillers]).index_select(0, source), ~real)

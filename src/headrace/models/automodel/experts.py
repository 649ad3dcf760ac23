"""Grouped matrix products for mixture-of-experts layers that also hold under autocast and repeat bit for bit.

Registered with transformers as an experts implementation, around transformers' own `grouped_mm`. It adds:
- autocast does not know grouped products and would leave them in the weights' float32;
- on CPU, with several threads, the gradient of a token that is read once per expert is added up in any order.
"""

from typing import Any

import torch
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

GROUPED_EXPERTS = "headrace_grouped_mm"


class _CastWeights:
    """A view of an experts module whose parameters read as another dtype; gradients reach the originals."""

    def __init__(self, experts: torch.nn.Module, dtype: torch.dtype) -> None:
        self._experts, self._dtype = experts, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        return value.to(self._dtype) if isinstance(value, torch.nn.Parameter) else value


def grouped_experts(
    module: torch.nn.Module, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Run the chosen experts: `hidden` (T, H), `top_k_index` and `top_k_weights` (T, k), returns (T, H)."""
    kind = hidden.device.type
    experts: Any = module
    if torch.is_autocast_enabled(kind):
        experts = _CastWeights(module, torch.get_autocast_dtype(kind))
    tokens, k = top_k_index.shape
    if kind != "cpu" or k == 1:
        plain: torch.Tensor = grouped_mm_experts_forward(experts, hidden, top_k_index, top_k_weights)
        return plain
    # One row per (token, expert): every row is then read once, and autograd sums the copies in order.
    copies = hidden.unsqueeze(1).expand(-1, k, -1).reshape(tokens * k, -1)
    rows = grouped_mm_experts_forward(
        experts, copies, top_k_index.reshape(-1, 1), top_k_weights.reshape(-1, 1)
    )
    out: torch.Tensor = rows.view(tokens, k, -1).sum(1)
    return out


ExpertsInterface.register(GROUPED_EXPERTS, grouped_experts)

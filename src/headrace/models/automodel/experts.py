"""Grouped matrix products for mixture-of-experts layers that also hold under autocast and repeat bit for bit.

Registered with transformers as an experts implementation, around transformers' own `grouped_mm`. It adds:
- autocast does not know grouped products and would leave them in the weights' float32;
- on CPU, with several threads, the gradient of a token that is read once per expert is added up in any order;
- ranks hold whole experts, each a part of them. Tensor ranks have the same tokens, and add up what their experts make
  of these. Data and context ranks have tokens of their own, which go to the ranks of their experts and come back.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

from headrace.models.automodel.dispatch import Dispatch
from headrace.models.automodel.exchange import copy_to_ranks, sum_of_ranks

GROUPED_EXPERTS = "headrace_grouped_mm"
EXPERT_GROUP = "headrace_expert_group"
"""Attribute of an experts module: the tensor ranks that share its experts."""
DISPATCH_GROUP = "headrace_dispatch_group"
"""Attribute of an experts module: the data and context ranks that share its experts."""


class _Weights:
    """A view of an experts module with its parameters in another dtype, and those of this rank alone.

    Gradients reach the originals.
    """

    def __init__(
        self,
        experts: torch.nn.Module,
        dtype: torch.dtype | None,
        count: int | None = None,
        *,
        some_elsewhere: bool = False,
    ) -> None:
        self._experts, self._dtype = experts, dtype
        if count is not None:
            self.num_experts = count
            # Ids from `num_experts` on are of experts elsewhere; transformers then gives those tokens zero.
            self._is_expert_parallel = some_elsewhere

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        # FSDP hands its whole weights out as plain parameters or, where tensor ranks split them, as DTensors.
        if isinstance(value, DTensor):
            value = value.to_local()
        elif not isinstance(value, torch.nn.Parameter):
            return value
        return value if self._dtype is None else value.to(self._dtype)


def grouped_experts(
    module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Run the chosen experts: `hidden` (T, H), `top_k_index` and `top_k_weights` (T, k), returns (T, H)."""
    group, dispatch_group = getattr(module, EXPERT_GROUP, None), getattr(module, DISPATCH_GROUP, None)
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    if dispatch_group is not None:
        return _dispatched(module, hidden, top_k_index, top_k_weights, dtype, dispatch_group)
    if group is None:
        experts = module if dtype is None else _Weights(module, dtype)
        return _grouped(experts, hidden, top_k_index, top_k_weights)
    count = module.num_experts // dist.get_world_size(group)
    first = dist.get_rank(group) * count
    elsewhere = (top_k_index < first) | (top_k_index >= first + count)
    own_index = torch.where(elsewhere, count, top_k_index - first)
    hidden, top_k_weights = (copy_to_ranks(x, group) for x in (hidden, top_k_weights))
    own = _grouped(_Weights(module, dtype, count, some_elsewhere=True), hidden, own_index, top_k_weights)
    return sum_of_ranks(own, group)


def _dispatched(
    module: Any,
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    dtype: torch.dtype | None,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Run the chosen experts where they are; gate weights, and so the router's gradient, stay with the tokens."""
    # Some families name a choice of no expert by an id beyond them.
    real = top_k_index < module.num_experts
    ids, top_k_weights = top_k_index.where(real, 0), top_k_weights.where(real, 0.0)
    dispatch = Dispatch.plan(ids, module.num_experts, group)
    given = dispatch.send(hidden, hidden.dtype if dtype is None else dtype)
    experts = _Weights(module, dtype, module.num_experts // group.size())
    own = dispatch.expert_ids.unsqueeze(1)
    made = grouped_mm_experts_forward(experts, given, own, given.new_ones(own.shape))
    rows = dispatch.bring_back(made)  # (T, k, H)
    return (rows * top_k_weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


def _grouped(
    experts: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    tokens, k = top_k_index.shape
    if hidden.device.type != "cpu" or k == 1:
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

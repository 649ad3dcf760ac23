"""Tokens on their way to the ranks of their experts and back, in one microbatch of one layer.

A token goes once to each of its k experts. Which rank gets how many rows is told first, as split sizes; a rank may
send or get none.

Source: Lepikhin et al., GShard (arXiv 2006.16668), section 3.2.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from headrace.models.automodel.exchange import swap_rows


@dataclass(frozen=True)
class Dispatch:
    """Who sends what, of T tokens with k experts each, on this rank; R is the number of rows that it gets.

    `order` (T k) lists (token, choice) pairs by expert, and so by receiver; `places` is its inverse. `expert_ids`
    (R) are of this rank's experts, from 0; without any rows there is one idle row, so that every rank has gradients.
    """

    order: torch.Tensor
    places: torch.Tensor
    choices: int
    sent: list[int]
    received: list[int]
    expert_ids: torch.Tensor
    group: dist.ProcessGroup

    @classmethod
    def plan(cls, top_k_index: torch.Tensor, experts: int, group: dist.ProcessGroup) -> "Dispatch":
        """Tell the ranks of `group`, which share `experts` evenly, how many rows each gets. Waits for the device."""
        ids, ranks = top_k_index.flatten().long(), group.size()
        order = ids.argsort(stable=True)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=ids.device)
        counts = ids.new_zeros(experts).scatter_add_(0, ids, torch.ones_like(ids))
        theirs = torch.empty_like(counts)  # by sender, then by own expert
        dist.all_to_all_single(theirs, counts, group=group)
        sent, received = torch.stack([counts, theirs]).view(2, ranks, -1).sum(-1).tolist()
        own = torch.arange(experts // ranks, device=ids.device).repeat(ranks)
        expert_ids = own.repeat_interleave(theirs, output_size=sum(received))
        if not any(received):
            expert_ids = own[:1]
        return cls(order, places, top_k_index.shape[1], sent, received, expert_ids, group)

    def send(self, hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Send tokens (T, H), as `dtype`, to their experts; return this rank's rows (R, H)."""
        rows = _picked(hidden, self.order, self.places, self.choices, dtype)
        given = swap_rows(rows, self.sent, self.received, self.group)
        return given if any(self.received) else torch.cat([given, given.new_zeros(1, given.shape[1])])

    def bring_back(self, made: torch.Tensor) -> torch.Tensor:
        """Send what the experts made of the rows (R, H) back; return that of this rank's tokens (T, k, H)."""
        rows = swap_rows(made[: sum(self.received)], self.received, self.sent, self.group)
        in_order = _picked(rows, self.places, self.order, 1, rows.dtype)
        return in_order.view(-1, self.choices, rows.shape[1])


def _picked(
    x: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor, copies: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return rows `index // copies` of `x` as `dtype`; the gradients of a row's copies are added up in order."""
    out: torch.Tensor = _Picked.apply(x, index, inverse, copies, dtype)  # type: ignore[no-untyped-call]
    return out


class _Picked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        index: torch.Tensor,
        inverse: torch.Tensor,
        copies: int,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies, ctx.dtype = copies, x.dtype
        return x.to(dtype).index_select(0, index // copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        rows = grad.index_select(0, inverse).view(-1, ctx.copies, grad.shape[1])
        return rows.sum(1, dtype=ctx.dtype), None, None, None, None

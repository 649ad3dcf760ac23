"""Tokens on their way to the ranks of their experts and back, in one microbatch of one layer.

A token goes once to each of its k experts. Which rank gets how many rows is told first, as split sizes; a rank may
send or get none.

Source: Lepikhin et al., GShard (arXiv 2006.16668), section 3.2.
"""

from collections.abc import Iterator
from contextvars import ContextVar, Token
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
        """Tell the ranks of `group`, which share `experts` evenly, how many rows each gets.

        It waits for the device, but for the recompute of an activation checkpoint (`checkpoint_contexts`).
        """
        plans = _PLANS.get()
        if plans is None:
            return cls._new(top_k_index, experts, group)
        return plans.next(top_k_index, experts, group)

    @classmethod
    def _new(cls, top_k_index: torch.Tensor, experts: int, group: dist.ProcessGroup) -> "Dispatch":
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


class _Plans:
    """A context for the forward of a layer, which keeps its plans, or for a recompute, which takes those in order."""

    def __init__(self, kept: list[Dispatch], *, is_recompute: bool) -> None:
        self._kept, self._is_recompute = kept, is_recompute
        self._left: Iterator[Dispatch] = iter(())
        self._outer: Token[_Plans | None] | None = None

    def __enter__(self) -> None:
        self._left = iter(self._kept)
        self._outer = _PLANS.set(self)

    def __exit__(self, *_: object) -> None:
        assert self._outer is not None
        _PLANS.reset(self._outer)

    def next(self, top_k_index: torch.Tensor, experts: int, group: dist.ProcessGroup) -> Dispatch:
        if not self._is_recompute:
            self._kept.append(Dispatch._new(top_k_index, experts, group))
            return self._kept[-1]
        return next(self._left)


# A recompute runs in autograd's own thread where there is a device.
_PLANS: ContextVar[_Plans | None] = ContextVar("headrace_dispatch_plans", default=None)


def checkpoint_contexts() -> tuple[_Plans, _Plans]:
    """Return the contexts of an activation checkpoint's forward and recompute, which then sends rows as planned.

    A recompute has the experts of its forward, so that ranks need not tell each other again. It is a `context_fn` of
    `torch.utils.checkpoint.checkpoint`.
    """
    kept: list[Dispatch] = []
    return _Plans(kept, is_recompute=False), _Plans(kept, is_recompute=True)


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

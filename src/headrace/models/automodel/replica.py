"""One replica over several ranks: every rank holds the same packed row and works on its part of the tokens.

Context ranks run the model on consecutive parts of the row; attention exchanges them for parts of the heads.
Tensor ranks run it on the same tokens with parts of the matrices. All ranks then score disjoint tokens with the
whole output head, and one sum gives every rank the scores of all.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from headrace.distributed.topology import Topology
from headrace.models.automodel.data import ProcessedInputs


@dataclass(frozen=True)
class Replica:
    """The part of a replica's tokens that is this rank's."""

    topology: Topology
    sequence_parallel: bool = False

    @property
    def size(self) -> int:
        """Ranks of the replica; a packed row is a multiple of it long."""
        return self.topology.replica_size

    def forward_kwargs(self, inputs: ProcessedInputs) -> dict[str, Any]:
        """Return the keyword arguments of the model's forward on this rank: its context part of the row."""
        kwargs = inputs.forward_kwargs()
        size = self.topology.context_size
        if size == 1:
            return kwargs
        rank = dist.get_rank(self.topology.context)
        for name in ("input_ids", "position_ids"):
            kwargs[name] = kwargs[name].chunk(size, dim=1)[rank]
        return {**kwargs, "context_group": self.topology.context}

    def own_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states (1, T / size, H) of the tokens that this rank scores, of what its model gave."""
        if self.sequence_parallel or self.topology.tensor_size == 1:
            return hidden
        return scatter_tokens(hidden, self.topology.tensor)

    def own_tokens(self, total: int) -> tuple[int, int]:
        """Return [start, stop) of the tokens that this rank scores in a packed row of `total`."""
        part = total // self.size
        start = dist.get_rank(self.topology.replica) * part
        return start, start + part

    def join(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of what the ranks hold; every rank's gradient goes back to its own part alone."""
        joined: torch.Tensor = _Sum.apply(values, self.topology.replica)  # type: ignore[no-untyped-call]
        return joined


def scatter_tokens(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's part along dim 1 of what all ranks hold alike; gradients come back whole on all."""
    part: torch.Tensor = _Scatter.apply(x, group)  # type: ignore[no-untyped-call]
    return part


def gather_tokens(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the parts of all ranks along dim 1; of the gradient, which is whole on all, a rank takes its part."""
    whole: torch.Tensor = _Gather.apply(x, group)  # type: ignore[no-untyped-call]
    return whole


def copy_to_ranks(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return `x`, which all ranks hold alike; its gradient is the sum of theirs."""
    same: torch.Tensor = _Copy.apply(x, group)  # type: ignore[no-untyped-call]
    return same


def sum_of_ranks(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum of what the ranks hold; the gradient, which is alike on all, goes to each."""
    total: torch.Tensor = _Sum.apply(x, group)  # type: ignore[no-untyped-call]
    return total


def _all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x, group=group)
    return torch.cat(parts, dim=1)


def _own(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return x.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)].contiguous()


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _own(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_gather(grad.contiguous(), ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_gather(x.contiguous(), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _own(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None

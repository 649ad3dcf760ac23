"""What ranks of a replica exchange during a forward pass, with its counterpart for gradients in the backward pass.

Context ranks hold consecutive parts of a sequence. Before attention every rank gives its tokens' heads away and gets
all tokens of its own heads; after it, the reverse. Each rank then has the same work, whatever the lengths, and any
attention over a whole packed row serves.

Source: Jacobs et al., DeepSpeed Ulysses (arXiv 2309.14509), section 3.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from headrace.errors import ConfigError

Group = dist.ProcessGroup
Collective = Callable[[torch.Tensor, Group], torch.Tensor]


def scatter_tokens(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return this rank's part along dim 1 of what all ranks hold alike; gradients come back whole on all."""
    return _exchange(x, group, _own_part, _all_gather)


def gather_tokens(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the parts of all ranks along dim 1; of the gradient, which is whole on all, a rank takes its part."""
    return _exchange(x, group, _all_gather, _own_part)


def copy_to_ranks(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return `x`, which all ranks hold alike; its gradient is the sum of theirs."""
    return _exchange(x, group, _same, _sum)


def sum_of_ranks(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum of what the ranks hold; the gradient, which is alike on all, goes to each."""
    return _exchange(x, group, _sum, _same)


def swap_heads_and_tokens(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Exchange (1, H, T / ranks, D) for (1, H / ranks, T, D), or (1, T, H / ranks, D) for (1, T / ranks, H, D)."""
    parts = x[0].reshape(dist.get_world_size(group), -1, *x.shape[2:])  # by receiver
    received = _exchange(parts, group, _all_to_all, _all_to_all)  # by sender
    return received.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def swap_rows(x: torch.Tensor, sent: list[int], received: list[int], group: Group) -> torch.Tensor:
    """Send rows (sum of `sent`, ...), ordered by receiver, and return those received, ordered by sender."""
    there, back = partial(_swap, sent=sent, received=received), partial(_swap, sent=received, received=sent)
    return _exchange(x, group, there, back)


def check_heads(heads: int, key_value_heads: int, ranks: int) -> None:
    """Check that context ranks can share out the heads that a rank attends with."""
    rule = ""
    if heads % ranks:
        rule = f"{heads} query heads: it must divide them"
    elif key_value_heads % ranks and ranks % key_value_heads:
        rule = f"{key_value_heads} key-value heads: one must divide the other"
    if rule:
        raise ConfigError(
            f"policy.parallel.context={ranks} and {rule} (those of a rank: policy.parallel.tensor divides the model's "
            "where it splits attention); choose another policy.parallel.context"
        )


def _exchange(x: torch.Tensor, group: Group, forward: Collective, backward: Collective) -> torch.Tensor:
    out: torch.Tensor = _Exchange.apply(x, group, forward, backward)  # type: ignore[no-untyped-call]
    return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: Group, forward: Collective, backward: Collective
    ) -> torch.Tensor:
        ctx.group, ctx.turn_back = group, backward
        return forward(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.turn_back(grad, ctx.group), None, None, None


def _own_part(x: torch.Tensor, group: Group) -> torch.Tensor:
    return x.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)].contiguous()


def _all_gather(x: torch.Tensor, group: Group) -> torch.Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=1)


def _same(x: torch.Tensor, _group: Group) -> torch.Tensor:
    return x.view_as(x)


def _sum(x: torch.Tensor, group: Group) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _swap(rows: torch.Tensor, group: Group, *, sent: list[int], received: list[int]) -> torch.Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


def _all_to_all(parts: torch.Tensor, group: Group) -> torch.Tensor:
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, parts.contiguous(), group=group)
    return received

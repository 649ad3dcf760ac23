"""Attention over a sequence that context ranks hold in consecutive parts.

Before attention every rank gives its tokens' heads away and gets all tokens of its own heads; after it, the
reverse. Each rank then has the same work, whatever the lengths, and any attention over a whole packed row serves.

Source: Jacobs et al., DeepSpeed Ulysses (arXiv 2309.14509), section 3.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from headrace.errors import ConfigError


def tokens_to_heads(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange (1, H, T / ranks, D) for (1, H / ranks, T, D)."""
    ranks = dist.get_world_size(group)
    parts = x[0].reshape(ranks, -1, *x.shape[2:])
    received = _exchange(parts, group)
    return received.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def heads_to_tokens(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange (1, T, H / ranks, D) for (1, T / ranks, H, D)."""
    ranks = dist.get_world_size(group)
    parts = x[0].reshape(ranks, -1, *x.shape[2:])
    received = _exchange(parts, group)
    return received.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def check_heads(heads: int, key_value_heads: int, ranks: int) -> None:
    """Hold the heads that a rank attends with to the context ranks that share them out.

    Raises:
        ConfigError: query heads that `ranks` does not divide, or key-value heads of which neither number divides the
            other.
    """
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


def repeat_for_ranks(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """Repeat the heads of keys or values (1, H_kv, T, D), where they are fewer than the ranks, to one per rank.

    The numbers are those that `check_heads` lets pass.
    """
    heads = x.shape[1]
    return x if heads % ranks == 0 else x.repeat_interleave(ranks // heads, dim=1)


def _exchange(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send `parts[r]` to rank r; return what came, by sender."""
    received: torch.Tensor = _Exchange.apply(parts, group)  # type: ignore[no-untyped-call]
    return received


def _all_to_all(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, parts.contiguous(), group=group)
    return received


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_to_all(grad, ctx.group), None

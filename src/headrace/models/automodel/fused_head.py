"""Log-probabilities straight from hidden states and the output head's matrix, as one node of the autograd graph.

Where the plain path keeps several float32 copies of a chunk's [tokens, vocabulary] scores, this one keeps a single
copy in the compute dtype: one pass over it gives all that is wanted, and the backward pass turns it into its own
gradient, in place. The backward pass begins with the last chunk, whose scores are still there, and computes those of
the others anew: a single chunk's are computed once. The passes are Triton kernels on CUDA, and PyTorch elsewhere.
"""

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch.autograd.function import once_differentiable

_CHUNKS_AT_ONCE = 4
# Finite, so that a block of nothing but such scores has a maximum; in bfloat16 and under any temperature, its share of
# a softmax is 0.
_OUTSIDE = -1e30


def chunks_at_once(device: torch.device) -> int:
    """Return how many chunks of the plain path take as much memory as one chunk of this path.

    4 with kernels, which keep no float32 copies; 1 without, as PyTorch's operations make the same ones.
    """
    return 1 if _kernels(device.type) is None else _CHUNKS_AT_ONCE


def fused_scores(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    scale: float,
    chunk_tokens: int,
    unknown_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (n,) float32 logprobs of `targets` (n,) and entropies under softmax(scale x hidden weight^T).

    `hidden` (n, H), `weight` (V, H). Products run in the autocast dtype, or in the weight's without autocast; the
    scores of `chunk_tokens` tokens are in memory at once. Entropies (nats) have no gradient. For equal scores of
    V = 4 tokens both are log 4, the logprob negated. `unknown_ids` (K,) are left out of the softmax, but for a target.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    scored: tuple[torch.Tensor, torch.Tensor] = _FusedScores.apply(  # type: ignore[no-untyped-call]
        hidden.to(dtype), weight, targets, scale, chunk_tokens, unknown_ids
    )
    return scored


class _FusedScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        scale: float,
        chunk: int,
        unknown_ids: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Not by autocast's cache, which would keep a copy that no gradient flows through.
        matrix = weight.to(hidden.dtype)
        parts: list[tuple[torch.Tensor, ...]] = []
        logits: torch.Tensor | None = None
        for rows in _chunks(len(targets), chunk):
            del logits  # before the next chunk's are made
            logits = _logits(hidden[rows], matrix, targets[rows], unknown_ids)
            parts.append(_statistics(logits, targets[rows], scale))
        logprobs, normalizers, entropies = (torch.cat(column) for column in zip(*parts))
        ctx.save_for_backward(hidden, weight, targets, normalizers)
        ctx.scale, ctx.chunk, ctx.unknown_ids = scale, chunk, unknown_ids
        # The loss's backward pass follows at once, and would have to make room for them anyway.
        ctx.last_logits = logits
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, normalizers = ctx.saved_tensors
        matrix = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight: torch.Tensor | None = None
        # A second backward pass finds none.
        logits, ctx.last_logits = ctx.last_logits, None
        for rows in reversed(list(_chunks(len(targets), ctx.chunk))):
            if logits is None:
                logits = _logits(hidden[rows], matrix, targets[rows], ctx.unknown_ids)
            _turn_into_gradient(logits, targets[rows], normalizers[rows], grad[rows].contiguous(), ctx.scale)
            if grad_hidden is not None:
                grad_hidden[rows] = logits @ matrix
            if ctx.needs_input_grad[1]:
                part = logits.t() @ hidden[rows]
                grad_weight = part.to(weight.dtype) if grad_weight is None else grad_weight.add_(part)
                del part
            logits = None
        return grad_hidden, grad_weight, None, None, None, None


def _chunks(total: int, size: int) -> Iterator[slice]:
    for start in range(0, max(total, 1), size):
        yield slice(start, min(start + size, total))


def _logits(
    hidden: torch.Tensor, matrix: torch.Tensor, targets: torch.Tensor, unknown_ids: torch.Tensor | None
) -> torch.Tensor:
    """Return the scores (n, V) of a chunk, `_OUTSIDE` at ids without a token that are not the row's target."""
    logits = hidden @ matrix.t()
    if unknown_ids is not None:
        chosen = logits.gather(-1, targets[:, None])
        logits.index_fill_(-1, unknown_ids.to(logits.device), _OUTSIDE)
        logits.scatter_(-1, targets[:, None], chosen)
    return logits


def _statistics(
    logits: torch.Tensor, targets: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (n,) float32: logprob of the target, log of the softmax's denominator, entropy."""
    kernels = _kernels(logits.device.type)
    if kernels is not None and len(targets):
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = kernels.statistics(logits, targets, scale)
        return found
    scores = logits.float() * scale
    normalizers = scores.logsumexp(-1)
    probabilities = (scores - normalizers[:, None]).exp()
    expected = (probabilities * scores).sum(-1)  # scores are finite, `_OUTSIDE` too
    chosen = scores.gather(-1, targets[:, None]).squeeze(-1)
    return chosen - normalizers, normalizers, normalizers - expected


def _turn_into_gradient(
    logits: torch.Tensor, targets: torch.Tensor, normalizers: torch.Tensor, grad: torch.Tensor, scale: float
) -> None:
    """Overwrite logits (n, V) by grad x scale x (one-hot of the target - softmax)."""
    kernels = _kernels(logits.device.type)
    if kernels is not None and len(targets):
        kernels.turn_into_gradient(logits, targets, normalizers, grad, scale)
        return
    change = (logits.float() * scale - normalizers[:, None]).exp().neg_()
    change.scatter_add_(-1, targets[:, None], torch.ones_like(change[:, :1]))
    logits.copy_(change.mul_(grad[:, None] * scale))


@cache
def _kernels(device_type: str) -> Any:
    if device_type != "cuda" or find_spec("triton") is None:
        return None
    from headrace.models.automodel import fused_head_kernels  # noqa: PLC0415 - imports triton

    return fused_head_kernels

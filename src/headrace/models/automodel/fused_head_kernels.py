"""Triton kernels of `fused_head`: one pass over a chunk's scores, and one that overwrites them by their gradient."""

# mypy: disable-error-code="import-not-found,untyped-decorator,no-untyped-def"

import torch
import triton
import triton.language as tl

_READ_BLOCK, _WRITE_BLOCK, _WARPS = 4096, 4096, 8


def statistics(
    logits: torch.Tensor, targets: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (n,) float32 for contiguous logits (n, V): the target's logprob, log of the denominator, entropy."""
    rows, columns = logits.shape
    out = torch.empty((3, rows), dtype=torch.float32, device=logits.device)
    _statistics[(rows,)](
        logits, targets, out[0], out[1], out[2], scale, columns, block=_READ_BLOCK, num_warps=_WARPS
    )
    return out[0], out[1], out[2]


def turn_into_gradient(
    logits: torch.Tensor, targets: torch.Tensor, normalizers: torch.Tensor, grad: torch.Tensor, scale: float
) -> None:
    """Overwrite contiguous logits (n, V) by grad x scale x (one-hot of the target - softmax)."""
    rows, columns = logits.shape
    grid = (rows, triton.cdiv(columns, _WRITE_BLOCK))
    _turn_into_gradient[grid](
        logits, targets, normalizers, grad, scale, columns, block=_WRITE_BLOCK, num_warps=_WARPS
    )


@triton.jit
def _statistics(
    logits, targets, logprobs, normalizers, entropies, scale, columns: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    begin = logits + row * columns
    highest = -float("inf")
    total = 0.0
    weighted = 0.0
    for start in range(0, columns, block):
        place = start + tl.arange(0, block)
        score = tl.load(begin + place, mask=place < columns, other=-float("inf")).to(tl.float32) * scale
        higher = tl.maximum(highest, tl.max(score, 0))
        # Sums so far were relative to a lower maximum.
        shrink = tl.exp(highest - higher)
        share = tl.exp(score - higher)
        total = total * shrink + tl.sum(share, 0)
        weighted = weighted * shrink + tl.sum(tl.where(share > 0, share * score, 0.0), 0)
        highest = higher
    normalizer = highest + tl.log(total)
    chosen = tl.load(begin + tl.load(targets + row)).to(tl.float32) * scale
    tl.store(logprobs + row, chosen - normalizer)
    tl.store(normalizers + row, normalizer)
    tl.store(entropies + row, normalizer - weighted / total)


@triton.jit
def _turn_into_gradient(
    logits, targets, normalizers, grad, scale, columns: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * block + tl.arange(0, block)
    inside = place < columns
    at = logits + row * columns + place
    score = tl.load(at, mask=inside, other=0.0).to(tl.float32) * scale
    share = tl.exp(score - tl.load(normalizers + row))
    one_hot = tl.where(place == tl.load(targets + row), 1.0, 0.0)
    change = (one_hot - share) * tl.load(grad + row) * scale
    tl.store(at, change.to(logits.dtype.element_ty), mask=inside)

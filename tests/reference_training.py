"""Naive truth for scoring and training: one row at a time, all logits at once, in float32."""

from collections.abc import Mapping
from typing import Any

import torch

from headrace.distributed.worker_groups import registered
from headrace.models.interfaces import LossType


def naive_logprobs(
    model: Any,
    ids: torch.Tensor,
    lengths: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> torch.Tensor:
    """Return (N, S) log p(token t | tokens before t); 0 at position 0 and in the padding."""
    rows = []
    for row, length in zip(ids, lengths.tolist()):
        scores = torch.zeros(len(row))
        if length > 1:
            logits = model(input_ids=row[None, :length], use_cache=False).logits[0].float()
            for t in range(1, length):
                scores[t] = naive_logprob(logits[t - 1], int(row[t]), temperature, top_k, top_p)
        rows.append(scores)
    return torch.stack(rows)


def naive_logprob(
    logits: torch.Tensor, token: int, temperature: float, top_k: int | None, top_p: float
) -> torch.Tensor:
    """Return log p of one token under softmax(logits / temperature) cut to the top k and then to the nucleus.

    The token itself always counts as kept.
    """
    scaled = logits / temperature
    order = scaled.argsort(descending=True).tolist()
    kept = order if top_k is None else order[:top_k]
    probabilities = scaled[kept].softmax(0).tolist()
    nucleus, mass = set(), 0.0
    for index, probability in zip(kept, probabilities):
        if mass < top_p:
            nucleus.add(index)
        mass += probability
    nucleus.add(token)
    members = torch.tensor(sorted(nucleus))
    return scaled[token] - scaled[members].logsumexp(0)


@registered
class PolicyGradient:
    """- sum of advantage x logprob over valid tokens, over the global count of what `loss_type` says."""

    def __init__(self, loss_type: LossType = LossType.TOKEN_LEVEL) -> None:
        self.loss_type = loss_type

    def __call__(
        self,
        logprobs: torch.Tensor,
        data: Mapping[str, Any],
        *,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        weight = data["token_mask"].float() * data["sample_mask"].float()[:, None]
        count = global_valid_toks if self.loss_type == LossType.TOKEN_LEVEL else global_valid_seqs
        terms = -(logprobs * data["advantages"] * weight)[:, 1:]
        valid = logprobs.detach()[weight > 0]
        metrics = {"tokens_fraction": float(weight[:, 1:].sum() / global_valid_toks)}
        if len(valid):
            metrics |= {"logprob_min": float(valid.min()), "logprob_max": float(valid.max())}
        return terms.sum() / count, metrics


def naive_loss(model: Any, data: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the token-level policy-gradient loss of a whole batch, with gradient."""
    logprobs = naive_logprobs(model, data["input_ids"], data["input_lengths"])
    weight = data["token_mask"].float() * data["sample_mask"][:, None]
    return -(logprobs * data["advantages"] * weight)[:, 1:].sum() / weight[:, 1:].sum()


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of every gradient by parameter name; a weight without one counts as zero."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }


def largest_gap(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> float:
    """Return the largest difference, relative to the largest value of each tensor."""
    assert ours.keys() == theirs.keys()
    gaps = [float((ours[n] - theirs[n]).abs().max() / theirs[n].abs().max().clamp(min=1e-6)) for n in theirs]
    return max(gaps)

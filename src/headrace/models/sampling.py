"""The distribution that tokens are drawn from, for the generator that draws and the trainer that scores.

Ids without a token are left out; logits are divided by the temperature, then cut to the top k, then to the nucleus
(top-p), always in float32.
Every function works on the last dimension alone, so a batch and its chunks give the same bits on CPU.
"""

import math

import torch

from headrace.errors import ConfigError


def filter_logits(
    logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    unknown_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return float32 logits (..., V) whose softmax is the distribution sampled from; -inf where filtered.

    `unknown_ids` (K,) are the ids without a token (`headrace.models.tokenizers`).
    Ties with the k-th largest logit stay; the nucleus is the smallest set of most likely tokens that holds at
    least `top_p`. With the default arguments, float32 logits come back as they are, without a copy.

    Raises:
        ConfigError: `temperature` is not finite and positive, `top_k` < 1, or `top_p` outside (0, 1].

    >>> filter_logits(torch.tensor([3.0, 1.0, 2.0]), top_k=2)
    tensor([3., -inf, 2.])
    """
    scaled = _scale(logits, temperature)
    kept = _kept(scaled, top_k, top_p, unknown_ids)
    return scaled if kept is None else scaled.masked_fill(~kept, -math.inf)


def selected_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    unknown_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return log p (...), float32, of `token_ids` (...) under the filtered distribution of `logits` (..., V).

    A given token always counts as kept, and the others are normalised beside it. So a token that was sampled
    inside the nucleus, and that rounding (another kernel, another dtype, a tie) puts just outside it here,
    has a finite logprob: the one it would have if the cut let it in. Gradients flow to the kept logits only.
    """
    scaled = _scale(logits, temperature)
    kept = _kept(scaled, top_k, top_p, unknown_ids)
    if kept is not None:
        kept.scatter_(-1, token_ids.unsqueeze(-1), True)
        scaled = scaled.masked_fill(~kept, -math.inf)
    return gather_logprobs(scaled, token_ids)


def gather_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return log-softmax of `logits` (..., V) at `token_ids` (...)."""
    return logits.log_softmax(-1).gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)


def sample_at(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return the token id (...) at which the cumulative softmax of `logits` (..., V) passes each uniform sample.

    `uniforms` (...) are float64 in [0, 1). The sum runs in float64, so
    that rare tokens of a large vocabulary keep their share. A token of probability 0 is never drawn; a row
    with NaN gives any id.

    >>> sample_at(torch.tensor([0.5, 0.25, 0.25]).log(), torch.tensor(0.6, dtype=torch.float64))
    tensor(1)
    """
    cumulative = logits.softmax(-1).cumsum(-1, dtype=torch.float64)
    # float64 rounds the product of a total near 1 and a uniform sample of at most 1 - 2**-53 to less than the total.
    threshold = uniforms.unsqueeze(-1) * cumulative[..., -1:]
    ids = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
    return ids.clamp_(max=logits.shape[-1] - 1)


def _scale(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    if not 0 < temperature < math.inf:
        raise ConfigError(f"temperature={temperature}: expected a positive number (greedy needs none)")
    logits = logits.float()
    return logits if temperature == 1 else logits / temperature


def _kept(
    scaled: torch.Tensor, top_k: int | None, top_p: float, unknown_ids: torch.Tensor | None
) -> torch.Tensor | None:
    """Return which entries stay, or None for all of them."""
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k={top_k}: expected 1 or more, or none for the whole vocabulary")
    if not 0 < top_p <= 1:
        raise ConfigError(f"top_p={top_p}: expected more than 0 and at most 1 (1: the whole vocabulary)")
    whole = top_k is None or top_k >= scaled.shape[-1]
    if whole and top_p == 1 and unknown_ids is None:
        return None
    with torch.no_grad():
        kept = torch.ones_like(scaled, dtype=torch.bool)
        if unknown_ids is not None:
            kept.index_fill_(-1, unknown_ids.to(kept.device), False)
            scaled = scaled.masked_fill(~kept, -math.inf)
        if top_k is not None and not whole:
            kept &= ~(scaled < scaled.topk(top_k).values[..., -1:])
        return kept if top_p == 1 else kept & _nucleus(scaled.masked_fill(~kept, -math.inf), top_p)


def _nucleus(scaled: torch.Tensor, top_p: float) -> torch.Tensor:
    # A stable sort breaks ties alike for any batch shape: of equal logits at the edge, the later ids stay.
    ascending, order = scaled.sort(dim=-1, stable=True)
    outside = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
    outside[..., -1] = False
    return ~outside.scatter(-1, order, outside)

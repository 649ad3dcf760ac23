"""From values per token to one number: the aggregations, and metrics that stay on the device."""

from collections.abc import Mapping
from typing import Literal

import torch

from headrace.algorithms.loss.inputs import TokenMask, safe_divisor

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


def aggregation_weights(
    mask: TokenMask,
    aggregation: Aggregation,
    valid_seqs: torch.Tensor,
    valid_toks: torch.Tensor,
    constant_tokens: int | None = None,
) -> torch.Tensor:
    """Return (b, S-1) weights; the sum of weight x value is the rows' part of the global batch's mean.

    - `token_mean`: every token weighs 1 / global valid tokens. Source: DAPO, arXiv:2503.14476, equation 12.
    - `sequence_mean`: every sequence weighs 1 / global valid sequences, shared evenly by its tokens.
      Source: GRPO, arXiv:2402.03300, equation 3. A valid row without tokens adds nothing but counts.
    - `constant`: every token weighs 1 / (global valid sequences x `constant_tokens`). Source: Dr. GRPO,
      arXiv:2503.20783, section 3.2 and listing 1.

    Rows of 1 and 3 tokens: token_mean gives each token 1/4; sequence_mean gives 1/2 to the first row's
    token and 1/6 to each of the second row's; constant, of 4, gives each token 1/8.
    """
    per_token = mask.counts * mask.samples[:, None]
    if aggregation == "token_mean":
        return per_token / safe_divisor(valid_toks)
    if aggregation == "constant":
        assert constant_tokens is not None
        return per_token / constant_tokens / safe_divisor(valid_seqs)
    row_tokens = mask.counts.sum(-1, keepdim=True).clamp(min=1)
    return per_token / row_tokens / safe_divisor(valid_seqs)


def weighted_sum(values: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the sum of weight x value where `counts`; elsewhere the values are not looked at."""
    return (torch.where(counts, values, 0.0) * weights).sum()


def least(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the least value where `counts`; +inf, the neutral element of min, if there is none."""
    flat = torch.where(counts, values, torch.inf).flatten()
    return torch.nn.functional.pad(flat, (0, 1), value=torch.inf).amin()


def greatest(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the greatest value where `counts`; -inf, the neutral element of max, if there is none."""
    return -least(-values, counts)


def detached(metrics: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return 0-D tensors as float32 without gradient, where they are: whoever reads them waits for the device."""
    return {name: value.detach().to(torch.float32) for name, value in metrics.items()}

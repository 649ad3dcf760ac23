"""How far two sets of logprobs of the same sampled tokens are apart."""

from typing import Literal

import torch

KLKind = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""A difference of two logprobs counts as this at most, either way; exp(20) = 4.9e8 can still be summed."""


def clamp_log_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """Hold a difference of logprobs to +-MAX_LOG_RATIO; beyond, its gradient is 0. NaN stays NaN."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def kl_estimate(logprobs: torch.Tensor, reference: torch.Tensor, kind: KLKind) -> torch.Tensor:
    """Return a per-token estimate of KL(policy || reference) on tokens sampled from the policy.

    With d = logprobs - reference: k1 = d (unbiased, any sign), k2 = d^2 / 2 (biased, never negative),
    k3 = exp(-d) - 1 + d (unbiased, never negative). For d = 0.5: k1 = 0.5, k2 = 0.125, k3 = 0.1065.

    What they teach is another matter. As a loss term, on the policy's own samples, the expected gradient of k1 is 0,
    of k2 that of KL(policy || reference), of k3 that of KL(reference || policy). Times the live ratio of policy to
    previous policy (`kl_gradient=score_function`; DeepSeek-V3.2, arXiv:2512.02556), k1 and k3 have that of
    KL(policy || reference), also on samples of the previous policy. Taken from the reward, where the gradient is
    k x d log p, that of k1 is the one of KL(policy || reference), and those of k2 and k3 are not: they vanish near the
    reference faster than it.

    Source: J. Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html.
    """
    difference = clamp_log_ratio(logprobs - reference)
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference**2 / 2
    return torch.expm1(-difference) + difference


def probability_error(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp|log_ratio|: the factor by which two probabilities of a token differ, 1 if they agree.

    For probabilities of 0.2 and 0.4 it is 2, whichever is the larger.
    """
    return clamp_log_ratio(log_ratio.abs()).exp()

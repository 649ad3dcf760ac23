"""Corrections for the gap between the policy as the generator runs it and as the trainer runs it.

The same weights give different probabilities in two engines (kernels, precision, expert routes), so samples
come from a slightly different policy than the one that is trained. A correction weighs each token's loss by
w = p_trainer(token) / p_generator(token), both at the weights that sampled it, and bounds that weight.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from headrace.algorithms.loss.inputs import TokenMask
from headrace.algorithms.loss.kl import clamp_log_ratio

CorrectionKind = Literal["none", "tis", "icepop", "sequence_mask"]


@dataclass(frozen=True)
class Correction:
    """`weights` (b, S-1) on the tokens' loss, and `keep` (b,) bool: rows that stay in the loss."""

    weights: torch.Tensor
    keep: torch.Tensor


def importance_correction(
    log_ratio: torch.Tensor, mask: TokenMask, kind: CorrectionKind, low: float, high: float
) -> Correction:
    """Return the weights of one correction. The denominators of the loss do not change.

    - `none`: 1.
    - `tis`: min(w, high). Source: F. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy
      RL Training", https://fengyao.notion.site/off-policy-rl (truncated importance sampling).
    - `icepop`: w where low <= w <= high, else 0: the token is out. Source: IcePop, in arXiv:2510.18855.
    - `sequence_mask`: w, and a row is out if the geometric mean of its w lies outside [low, high].
      Source: J. Liu et al., "When Speed Kills Stability: Demystifying RL Collapse from the
      Training-Inference Mismatch" (geometric sequence masking).

    For w = [0.4, 1.5, 3.0], low 0.5 and high 2: tis [0.4, 1.5, 2.0]; icepop [0, 1.5, 0]; sequence_mask
    [0.4, 1.5, 3.0] and the row stays, as its geometric mean is 1.22.

    Args:
        log_ratio: (b, S-1) trainer's less generator's logprobs, without gradient.
        mask: Which tokens count.
        kind: `loss.importance_correction`.
        low: `loss.importance_low`.
        high: `loss.importance_high`.
    """
    keep = torch.ones_like(mask.samples, dtype=torch.bool)
    if kind == "none":
        return Correction(torch.ones_like(log_ratio), keep)
    weights = clamp_log_ratio(log_ratio).exp()
    if kind == "tis":
        return Correction(weights.clamp(max=high), keep)
    if kind == "icepop":
        outside = (weights < low) | (weights > high)
        return Correction(weights.masked_fill(outside, 0.0), keep)
    typical = clamp_log_ratio(mask.sequence_mean(log_ratio)).exp().squeeze(-1)
    return Correction(weights, ~((typical < low) | (typical > high)))

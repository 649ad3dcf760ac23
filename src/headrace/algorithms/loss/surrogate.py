"""Ratios and surrogate objectives: what a policy gradient loss is per token, before weights and means."""

from typing import Literal

import torch

from headrace.algorithms.loss.inputs import TokenMask
from headrace.algorithms.loss.kl import clamp_log_ratio
from headrace.config import LossConfig

RatioLevel = Literal["token", "sequence"]


def policy_ratio(
    logprobs: torch.Tensor, prev_logprobs: torch.Tensor, mask: TokenMask, level: RatioLevel
) -> torch.Tensor:
    """Return pi(token) / pi_prev(token), (b, S-1), with gradient.

    A log-ratio beyond +-20 counts as +-20; at token level it then has no gradient.

    - `token`: exp(logprobs - prev). Source: PPO, arXiv:1707.06347, section 3.
    - `sequence`: every token of a row carries the row's length-normalised ratio
      s = exp(mean over tokens(logprobs - prev)) as its value, and s * d logprob as its gradient, so that the
      clip acts on whole sequences. Source: GSPO, arXiv:2507.18071, equation 7 and, for the gradient,
      equation 14 (GSPO-token, which equals GSPO when a row's advantages are equal).

    Args:
        logprobs: (b, S-1), 0 where a token does not count.
        prev_logprobs: Likewise, without gradient.
        mask: Which tokens count.
        level: `loss.ratio_level`.
    """
    log_ratio = logprobs - prev_logprobs
    if level == "token":
        return clamp_log_ratio(log_ratio).exp()
    typical = clamp_log_ratio(mask.sequence_mean(log_ratio.detach())).exp()
    return with_score(typical, logprobs)


def with_score(values: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """Return `values` with the gradient values x d logprob, as of a ratio of these logprobs to some others."""
    return values * (logprobs - logprobs.detach()).exp()


def clipped_surrogate(ratio: torch.Tensor, advantages: torch.Tensor, cfg: LossConfig) -> torch.Tensor:
    """Return -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) per token.

    With `dual_clip` c, a token of negative advantage loses -c A at most. For clips of 0.2 and c = 3: r = 1.5
    and A = 1 gives -1.2; r = 0.5 and A = -1 gives 0.8; r = 5 and A = -1 gives 3 (5 without dual clip). None
    of the three has a gradient.

    Source: PPO, arXiv:1707.06347, equation 7; separate clips: DAPO, arXiv:2503.14476, equation 10;
    dual clip: arXiv:1912.09729, section 3 (Dual-clip PPO).
    """
    clipped = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    loss = torch.maximum(-ratio * advantages, -clipped * advantages)
    if cfg.dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -cfg.dual_clip * advantages), loss)


def cispo_surrogate(
    logprobs: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor, cfg: LossConfig
) -> torch.Tensor:
    """Return -clip(r, 1 - clip_low, 1 + clip_high) A logprob per token, the clipped ratio without gradient.

    No token loses its gradient; the clip bounds its weight. `clip_low` of 1 or more means no lower bound, as
    in the paper's runs. With clips of 0.2, r = 1.5 and A = 1, the gradient by the logprob is -1.2.

    Source: CISPO, in MiniMax-M1, arXiv:2506.13585, equations 4 and 5.
    """
    weight = ratio.detach().clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    return -weight * advantages * logprobs


def clip_hits(
    ratio: torch.Tensor, advantages: torch.Tensor, cfg: LossConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where the lower and the upper clip change a token's gradient, two (b, S-1) bool tensors.

    `clipped_pg` loses the gradient below 1 - clip_low only for a negative advantage, and above 1 + clip_high
    only for a positive one; `cispo` bounds the weight whatever the sign.
    """
    low, high = ratio < 1 - cfg.clip_low, ratio > 1 + cfg.clip_high
    if cfg.kind == "cispo":
        return low, high
    return low & (advantages < 0), high & (advantages > 0)

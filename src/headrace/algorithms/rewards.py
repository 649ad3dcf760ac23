"""Rewards between the environment and the advantages: checked, scaled, and charged for length and for KL.

The order is fixed: `check_rewards`, `shape_rewards`, `subtract_kl`. Each takes and returns one number for each of N
samples. Arithmetic is in float64, results are float32, and a result that does not fit is refused with its sample.
"""

import math
from collections.abc import Sequence
from typing import SupportsFloat

import torch

from headrace.config import RewardConfig
from headrace.errors import ConfigError, RewardError

_NAMED_SAMPLES = 5


def check_rewards(
    rewards: Sequence[SupportsFloat | None] | torch.Tensor, sample_ids: Sequence[str]
) -> torch.Tensor:
    """Return rewards as (N,) float32 on the CPU, one finite number for each of the N samples.

    Raises:
        RewardError: a count other than N, or a reward that is missing (None), no number, NaN, infinite or
            beyond float32. The message names five samples at most and counts the rest.
    """
    given = list(rewards.tolist()) if isinstance(rewards, torch.Tensor) else list(rewards)
    if len(given) != len(sample_ids):
        missing = [f"'{sample_id}'" for sample_id in sample_ids[len(given) :]]
        fate = f" (none for {name_some(missing)})" if missing else ""
        raise RewardError(
            f"got {len(given)} rewards for {len(sample_ids)} samples; expected one per sample{fate}. The environment's "
            "step() must return one result per conversation."
        )
    values = torch.tensor([_as_float(reward) for reward in given], dtype=torch.float64).to(torch.float32)
    if named := _not_finite(values, sample_ids, given):
        raise RewardError(
            f"rewards that are missing or not finite: {named}; expected one finite number per sample. "
            "Fix the environment's step(), which returned them."
        )
    return values


def scaled_rewards(rewards: torch.Tensor, cfg: RewardConfig, sample_ids: Sequence[str]) -> torch.Tensor:
    """Return clip(scale * reward + offset), (N,) float32: rewards by which groups are told apart.

    Raises:
        RewardError: a reward that is beyond float32 afterwards.
    """
    remedy = "Lower grpo.reward.scale and offset, or set grpo.reward.clip"
    return require_finite(_scaled(rewards, cfg), sample_ids, "scaled rewards", remedy)


def shape_rewards(
    rewards: torch.Tensor,
    turn_tokens: torch.Tensor,
    truncated: torch.Tensor,
    cfg: RewardConfig,
    *,
    max_new_tokens: int,
    sample_ids: Sequence[str],
) -> torch.Tensor:
    """Return clip(scale * reward + offset) less the soft overlong penalty, (N,) float32.

    The penalty is 0 up to `max_new_tokens - overlong_buffer_tokens` tokens, rises linearly to `overlong_penalty` at
    `max_new_tokens`, and stays there. A sample pays for the generated tokens of its longest turn (`turn_tokens`); one
    that a token limit cut (`truncated`) pays all of it. The clip comes first, so it never hides the penalty.

    With scale 1, penalty 1, a buffer of 4 and at most 16 tokens, rewards of 1 for responses of 12, 14 and
    16 tokens become 1.0, 0.5 and 0.0.

    Source: DAPO, arXiv:2503.14476, equation 13 (times `overlong_penalty`).

    Raises:
        ConfigError: a buffer longer than `max_new_tokens`.
        RewardError: a reward that is beyond float32 afterwards.
    """
    shaped, buffer = _scaled(rewards, cfg), cfg.overlong_buffer_tokens
    if cfg.overlong_penalty:
        if buffer > max_new_tokens:
            raise ConfigError(
                f"grpo.reward.overlong_buffer_tokens={buffer} is more than generation.max_new_tokens="
                f"{max_new_tokens}; lower the first or raise the second"
            )
        over = (turn_tokens.to(torch.float64) - (max_new_tokens - buffer)) / buffer
        shaped = shaped - cfg.overlong_penalty * torch.where(truncated, 1.0, over.clamp(0.0, 1.0))
    remedy = "Lower grpo.reward.scale and overlong_penalty, or set clip"
    return require_finite(shaped, sample_ids, "shaped rewards", remedy)


def subtract_kl(
    rewards: torch.Tensor, kl_sums: torch.Tensor | None, cfg: RewardConfig, sample_ids: Sequence[str]
) -> torch.Tensor:
    """Return rewards - kl_coefficient * kl_sums, (N,) float32; `kl_sums` is not read if the coefficient is 0.

    `kl_sums` is the KL to the reference policy, summed over each response's tokens (`sample_stats`).

    Raises:
        RewardError: `kl_sums` missing, or not finite for some sample; or a reward that is beyond float32 afterwards.
    """
    if not cfg.kl_coefficient:
        return rewards.to(torch.float32)
    if kl_sums is None:
        raise RewardError(
            f"grpo.reward.kl_coefficient={cfg.kl_coefficient} needs the KL to the reference policy, and "
            "there is none; set it to 0, or compute prev_logprobs and reference_policy_logprobs"
        )
    if named := _not_finite(kl_sums, sample_ids):
        raise RewardError(
            f"KL to the reference policy is not finite for {named}; expected finite "
            "prev_logprobs and reference_policy_logprobs on generated tokens"
        )
    charged = rewards.to(torch.float64) - cfg.kl_coefficient * kl_sums.to(torch.float64)
    return require_finite(charged, sample_ids, "rewards less KL", "Lower grpo.reward.kl_coefficient")


def overlong_mask(truncated: torch.Tensor, cfg: RewardConfig) -> torch.Tensor:
    """Return (N,) float32: 0 where overlong filtering takes a cut sample out of the loss, 1 elsewhere.

    Source: DAPO, arXiv:2503.14476, section 3.4 (overlong filtering).
    """
    return (~(truncated & cfg.overlong_filtering)).float()


def require_finite(values: torch.Tensor, sample_ids: Sequence[str], what: str, remedy: str) -> torch.Tensor:
    """Return (N,) values as float32.

    Raises:
        RewardError: some are NaN, infinite or beyond float32; names five samples at most and counts the rest.
    """
    single = values.to(torch.float32)
    if named := _not_finite(single, sample_ids, values.tolist()):
        raise RewardError(
            f"{what} that do not fit in float32: {named}; expected finite numbers up to 3.4e38. {remedy}."
        )
    return single


def name_some(names: Sequence[str]) -> str:
    """Return the first five names at most, and how many more there are."""
    more = len(names) - _NAMED_SAMPLES
    return ", ".join(names[:_NAMED_SAMPLES]) + (f" and {more} more" if more > 0 else "")


def _not_finite(values: torch.Tensor, sample_ids: Sequence[str], given: Sequence[object] = ()) -> str:
    """Return the names of samples whose value is not finite, with what was `given` for each."""
    bad = (~values.isfinite()).nonzero().flatten().tolist()
    return name_some([f"'{sample_ids[i]}'" + (f" ({given[i]!r})" if given else "") for i in bad])


def _scaled(rewards: torch.Tensor, cfg: RewardConfig) -> torch.Tensor:
    scaled = rewards.to(torch.float64) * cfg.scale + cfg.offset
    return scaled if cfg.clip is None else scaled.clamp(*cfg.clip)


def _as_float(reward: SupportsFloat | None) -> float:
    if not isinstance(reward, SupportsFloat):
        return math.nan
    try:
        return float(reward)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan

"""Rewards between the environment and the advantages: checked, scaled, and charged for length and for KL.

The order is fixed: `check_rewards`, `shape_rewards`, `subtract_kl`. Arithmetic is in float64; results are float32,
and each step refuses a result that does not fit, with its sample.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import islice
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
        raise RewardError(_wrong_count(len(given), sample_ids))
    values = torch.tensor([_as_float(reward) for reward in given], dtype=torch.float64).to(torch.float32)
    bad = (~values.isfinite()).nonzero().flatten().tolist()
    if bad:
        named = name_some((f"'{sample_ids[i]}' ({given[i]!r})" for i in bad), len(bad))
        raise RewardError(
            f"rewards that are missing or not finite: {named}; expected one finite number per sample. "
            "Fix the environment's step(), which returned them."
        )
    return values


def shape_rewards(
    rewards: torch.Tensor,
    turn_tokens: torch.Tensor,
    truncated: torch.Tensor,
    cfg: RewardConfig,
    *,
    max_new_tokens: int,
    sample_ids: Sequence[str] | None = None,
) -> torch.Tensor:
    """Return clip(scale * reward + offset) less the soft overlong penalty, (N,) float32.

    The penalty is 0 up to `max_new_tokens - overlong_buffer_tokens` tokens, rises linearly to `overlong_penalty` at
    `max_new_tokens`, and stays there. A sample of several turns pays for its longest one. One that was cut
    (`truncated`) pays all of it, whichever limit cut it. The clip comes first, so it never hides the penalty.

    With scale 1, penalty 1, a buffer of 4 and at most 16 tokens, rewards of 1 for responses of 12, 14 and
    16 tokens become 1.0, 0.5 and 0.0.

    Args:
        rewards: (N,) from `check_rewards`.
        turn_tokens: (N,) integers; generated tokens of a sample's longest turn.
        truncated: (N,) bool; True where a token limit cut the response.
        cfg: The recipe's `grpo.reward`.
        max_new_tokens: The limit on a turn, in tokens.
        sample_ids: Names for the message; row numbers without them.

    Source: DAPO, arXiv:2503.14476, equation 13 (times `overlong_penalty`).

    Raises:
        ConfigError: a buffer longer than `max_new_tokens`.
        RewardError: a reward that is beyond float32 afterwards.
    """
    shaped = _scaled(rewards, cfg)
    if cfg.overlong_penalty:
        share = _overlong_fraction(turn_tokens, truncated, cfg, max_new_tokens)
        shaped = shaped - cfg.overlong_penalty * share
    return require_finite(
        shaped, sample_ids, "shaped rewards", "lower grpo.reward.scale and overlong_penalty, or set clip"
    )


def scaled_rewards(
    rewards: torch.Tensor, cfg: RewardConfig, sample_ids: Sequence[str] | None = None
) -> torch.Tensor:
    """Return clip(scale * reward + offset), (N,) float32: rewards by which groups are told apart.

    Raises:
        RewardError: a reward that is beyond float32 afterwards.
    """
    remedy = "lower grpo.reward.scale and offset, or set grpo.reward.clip"
    return require_finite(_scaled(rewards, cfg), sample_ids, "scaled rewards", remedy)


def require_finite(
    values: torch.Tensor, sample_ids: Sequence[str] | None, what: str, remedy: str
) -> torch.Tensor:
    """Return (N,) values as float32.

    Raises:
        RewardError: some are NaN, infinite or beyond float32; names five samples at most and counts the rest.
    """
    single = values.to(torch.float32)
    bad = (~single.isfinite()).nonzero().flatten().tolist()
    if bad:
        given = values.tolist()
        names = (f"{_label(sample_ids, i)} ({given[i]!r})" for i in bad)
        raise RewardError(
            f"{what} that do not fit in float32: {name_some(names, len(bad))}; expected finite numbers up to 3.4e38. "
            f"{remedy[0].upper()}{remedy[1:]}."
        )
    return single


def overlong_mask(truncated: torch.Tensor, cfg: RewardConfig) -> torch.Tensor:
    """Return (N,) float32: 0 where overlong filtering takes a cut sample out of the loss, 1 elsewhere.

    Source: DAPO, arXiv:2503.14476, section 3.4 (overlong filtering).
    """
    return (~(truncated & cfg.overlong_filtering)).float()


def subtract_kl(
    rewards: torch.Tensor,
    kl_sums: torch.Tensor | None,
    cfg: RewardConfig,
    sample_ids: Sequence[str] | None = None,
) -> torch.Tensor:
    """Return rewards - kl_coefficient * kl_sums, (N,) float32; `kl_sums` is not read if the coefficient is 0.

    Args:
        rewards: (N,) after shaping.
        kl_sums: (N,) KL to the reference policy, summed over each response's tokens (`sample_stats`).
        cfg: The recipe's `grpo.reward`.
        sample_ids: Names for the message; row numbers without them.

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
    bad = (~kl_sums.isfinite()).nonzero().flatten().tolist()
    if bad:
        names = (_label(sample_ids, i) for i in bad)
        raise RewardError(
            f"KL to the reference policy is not finite for {name_some(names, len(bad))}; expected finite "
            "prev_logprobs and reference_policy_logprobs on generated tokens"
        )
    charged = rewards.to(torch.float64) - cfg.kl_coefficient * kl_sums.to(torch.float64)
    return require_finite(charged, sample_ids, "rewards less KL", "lower grpo.reward.kl_coefficient")


def _scaled(rewards: torch.Tensor, cfg: RewardConfig) -> torch.Tensor:
    scaled = rewards.to(torch.float64) * cfg.scale + cfg.offset
    return scaled if cfg.clip is None else scaled.clamp(*cfg.clip)


def _label(sample_ids: Sequence[str] | None, row: int) -> str:
    return f"'{sample_ids[row]}'" if sample_ids else f"row {row}"


def _overlong_fraction(
    turn_tokens: torch.Tensor, truncated: torch.Tensor, cfg: RewardConfig, max_new_tokens: int
) -> torch.Tensor:
    buffer = cfg.overlong_buffer_tokens
    if buffer > max_new_tokens:
        raise ConfigError(
            f"grpo.reward.overlong_buffer_tokens={buffer} is more than generation.max_new_tokens="
            f"{max_new_tokens}; lower the first or raise the second"
        )
    over = (turn_tokens.to(torch.float64) - (max_new_tokens - buffer)) / buffer
    return torch.where(truncated, 1.0, over.clamp(0.0, 1.0))


def _as_float(reward: SupportsFloat | None) -> float:
    if not isinstance(reward, SupportsFloat):
        return math.nan
    try:
        return float(reward)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan


def _wrong_count(got: int, sample_ids: Sequence[str]) -> str:
    message = f"got {got} rewards for {len(sample_ids)} samples; expected one per sample"
    missing = sample_ids[got:]
    if missing:
        names = (f"'{sample_id}'" for sample_id in missing)
        message += f" (none for {name_some(names, len(missing))})"
    return f"{message}. The environment's step() must return one result per conversation."


def name_some(names: Iterable[str], total: int) -> str:
    """Return the first five `names` at most, and how many of `total` there are more."""
    text = ", ".join(islice(names, _NAMED_SAMPLES))
    return text if total <= _NAMED_SAMPLES else f"{text} and {total - _NAMED_SAMPLES} more"

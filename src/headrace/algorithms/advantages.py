"""Advantages from rewards: how much better a sample did than its peers.

Groups are given by one integer per row, in any order: rows with the same integer answer the same prompt. A
prompt that occurs twice in a step has two integers. Invalid rows (masked out of the loss) enter no baseline
and get an advantage of 0. Arithmetic is in float64; results are float32.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from headrace.config import AdvantageConfig
from headrace.errors import ConfigError, SchemaError
from headrace.utils.targets import check_parameters, load_callable, user_code


@dataclass(frozen=True)
class AdvantageResult:
    """Advantages of N samples, and what they were measured against; each (N,) float32, float64 from an estimator.

    All tokens of a sample have its advantage, or, where a `TokenKL` was given, have it on average: a token's own is
    `advantages` - `kl_scale` x (its KL to go - the sample's mean KL to go).
    """

    advantages: torch.Tensor
    baseline: torch.Tensor
    std: torch.Tensor
    metrics: dict[str, float] = field(default_factory=dict)
    kl_scale: float = 0.0


@dataclass(frozen=True)
class TokenKL:
    """A KL in the reward of every token, as `sample_stats.kl_to_go_stats` sums it: (N,) float64 each."""

    coefficient: float
    to_go_sum: torch.Tensor
    to_go_squares: torch.Tensor


@dataclass(frozen=True)
class Groups:
    """Rewards with their groups' moments, float64; `centred` is exactly 0 in a group of equal rewards."""

    index: torch.Tensor  # (N,) group of each row, 0..G-1
    valid: torch.Tensor  # (N,) bool
    count: torch.Tensor  # (G,) valid rows
    centred: torch.Tensor  # (N,) reward - mean of its group; 0 where invalid
    mean: torch.Tensor  # (G,); 0 without valid rows
    std: torch.Tensor  # (G,); 0 with fewer than two valid rows

    def metrics(self) -> dict[str, torch.Tensor]:
        """Return means over groups that have a valid row, 0-D each."""
        filled = self.count > 0
        number = filled.sum().clamp(min=1)
        equal = (self.std == 0) & filled
        return {
            "group/std_mean": self.std.sum() / number,
            "group/zero_variance_fraction": equal.sum() / number,
        }


def compute_advantages(
    rewards: torch.Tensor,
    group_ids: torch.Tensor,
    valid: torch.Tensor,
    tokens: torch.Tensor,
    cfg: AdvantageConfig,
    *,
    kl: TokenKL | None = None,
) -> AdvantageResult:
    """Turn rewards into one advantage per sample.

    - `grpo`: distance from the group's mean (or the peers' mean, `leave_one_out`), divided by the group's
      standard deviation + epsilon if `normalize_std`. Source: DeepSeekMath, arXiv:2402.03300, section 4.1.2.
    - `rloo`: distance from the peers' mean, never divided. Source: arXiv:2402.14740, section 3.3 (RLOO).
    - `reinforce_plus_plus`: what a token's return (its sample's reward less the token's KL to go) is above the mean
      over all tokens of the batch, divided by their population standard deviation + epsilon if `normalize_std`. With
      `minus_baseline`, rewards are first measured from their group's mean. Source: REINFORCE++, arXiv:2501.03262,
      section 3 (the advantage and its normalisation over the batch; the variant with a baseline).

    Rewards [1, 0, 0] of one group give [0.667, -0.333, -0.333] (grpo, undivided) or [1, -0.5, -0.5] (rloo). Rewards
    [1, 0] of samples of 10 and 90 tokens give [3, -0.333] (reinforce_plus_plus): mean 0.1, standard deviation 0.3.
    A group of one sample, and a group of equal rewards, has advantages of exactly 0 (grpo, rloo).

    Args:
        rewards: (N,), finite where valid.
        group_ids: (N,) integers.
        valid: (N,) bool or 0/1.
        tokens: (N,) tokens of each sample that count in the loss.
        cfg: The recipe's `grpo.advantage`.
        kl: A KL that the rewards do not have yet (reinforce_plus_plus).

    Raises:
        SchemaError: inputs of different lengths, or group ids that are not integers.
        ConfigError: a function of `cfg.target` that cannot be called so, raises, or returns something else.
    """
    _check(rewards=rewards, group_ids=group_ids, valid=valid, tokens=tokens)
    groups = _group(rewards, group_ids, valid)
    if cfg.target is not None:
        result = _by_target(cfg.target, rewards, groups, tokens, cfg)
    else:
        result = ESTIMATORS[cfg.estimator](rewards, groups, tokens, cfg, kl)
    exact, samples = result.advantages, groups.valid.sum().clamp(min=1)
    mean = exact.sum() / samples
    spread = torch.where(groups.valid, exact - mean, 0.0)
    metrics = {
        "advantage/mean": mean,
        "advantage/std": ((spread**2).sum() / samples).sqrt(),
        "advantage/abs_max": torch.nn.functional.pad(exact.abs(), (0, 1)).amax(),
        **groups.metrics(),
    }
    numbers = torch.stack([value.to(torch.float64) for value in metrics.values()]).tolist()
    advantages, baseline, std = (v.to(torch.float32) for v in (exact, result.baseline, result.std))
    return AdvantageResult(advantages, baseline, std, dict(zip(metrics, numbers)), result.kl_scale)


def group_relative(
    rewards: torch.Tensor, groups: Groups, tokens: torch.Tensor, cfg: AdvantageConfig, kl: TokenKL | None
) -> AdvantageResult:
    """Measure a reward from the mean of its group, or, for `rloo` and `leave_one_out`, of its peers."""
    rloo = cfg.estimator == "rloo"
    advantages = groups.centred
    if rloo or cfg.leave_one_out:
        # From the mean of the other valid rows of the group; 0 without any.
        others = torch.where(groups.count > 1, groups.count / (groups.count - 1).clamp(min=1), 0.0)
        advantages = advantages * others[groups.index]
    std = groups.std[groups.index]
    baseline = _baseline(rewards, groups, advantages)
    if cfg.normalize_std and not rloo:
        advantages = advantages / (std + cfg.epsilon)
    return AdvantageResult(advantages, baseline, std)


def over_tokens(
    rewards: torch.Tensor, groups: Groups, tokens: torch.Tensor, cfg: AdvantageConfig, kl: TokenKL | None
) -> AdvantageResult:
    """Measure every token's return against those of all tokens, from sums per sample alone."""
    batch = _group(rewards, torch.zeros_like(groups.index), groups.valid)
    count = torch.where(groups.valid, tokens.to(torch.float64), 0.0)
    total = count.sum().clamp(min=1)
    returns = groups.centred if cfg.minus_baseline else batch.centred
    spread = torch.zeros_like(returns)
    if kl is not None:
        own = torch.where(groups.valid, kl.to_go_sum, 0.0) / count.clamp(min=1)
        returns = returns - kl.coefficient * own
        squares = torch.where(groups.valid, kl.to_go_squares, 0.0)
        spread = kl.coefficient**2 * (squares - count * own**2).clamp(min=0)
    mean = (count * returns).sum() / total
    centred = torch.where(groups.valid, returns - mean, 0.0)
    # The variance of all tokens: between the samples' means, and of the tokens of a sample around its own.
    std = ((count * centred**2 + spread).sum() / total).sqrt()
    scale = 1 / (std + cfg.epsilon) if cfg.normalize_std else torch.ones_like(std)
    kl_scale = 0.0 if kl is None else kl.coefficient * float(scale)
    baseline = _baseline(rewards, batch, centred)
    return AdvantageResult(centred * scale, baseline, std.expand(len(rewards)), kl_scale=kl_scale)


def _by_target(
    target: str, rewards: torch.Tensor, groups: Groups, tokens: torch.Tensor, cfg: AdvantageConfig
) -> AdvantageResult:
    """Return what a function of the user's own makes of the rewards; 0 where a sample does not count."""
    who, function = f"grpo.advantage.target={target}", load_callable(target, "grpo.advantage.target")
    values: dict[str, Any] = {
        "rewards": rewards.to(torch.float64),
        "group_ids": groups.index,
        "valid": groups.valid,
    }
    values |= {"tokens": tokens, "cfg": cfg}
    taken = check_parameters(function, values, who, example="(rewards, group_ids)")
    with user_code(who):
        found = torch.as_tensor(function(**{k: v for k, v in values.items() if taken is None or k in taken}))
    if found.shape != rewards.shape or not bool(found.isfinite()[groups.valid].all()):
        raise ConfigError(
            f"{who} returned a tensor of shape {tuple(found.shape)}, {int((~found.isfinite()).sum())} of it not "
            f"finite; expected one finite number for each of the {len(rewards)} samples"
        )
    advantages = torch.where(groups.valid, found.to(torch.float64), 0.0)
    return AdvantageResult(advantages, _baseline(rewards, groups, advantages), groups.std[groups.index])


class AdvantageEstimator(Protocol):
    """From rewards to advantages; `group_relative` is one to copy. Arguments as in `compute_advantages`."""

    def __call__(
        self,
        rewards: torch.Tensor,
        groups: Groups,
        tokens: torch.Tensor,
        cfg: AdvantageConfig,
        kl: TokenKL | None,
    ) -> AdvantageResult: ...


ESTIMATORS: dict[str, AdvantageEstimator] = {
    "grpo": group_relative,
    "rloo": group_relative,
    "reinforce_plus_plus": over_tokens,
}
"""By `grpo.advantage.estimator`."""


def _baseline(rewards: torch.Tensor, groups: Groups, distance: torch.Tensor) -> torch.Tensor:
    own = rewards.to(torch.float64) - distance
    return torch.where(groups.valid, own, groups.mean[groups.index])


def _group(rewards: torch.Tensor, group_ids: torch.Tensor, valid_mask: torch.Tensor) -> Groups:
    ids, index = torch.unique(group_ids, return_inverse=True)
    valid = valid_mask != 0
    values = rewards.to(torch.float64)

    def total(per_row: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(len(ids)).index_add_(0, index, per_row)

    count = total(valid.to(torch.float64))
    # Measured from the group's least reward, equal rewards are exact zeros, and so is all that follows.
    lowest = values.new_full((len(ids),), torch.inf).scatter_reduce_(
        0, index, values.masked_fill(~valid, torch.inf), "amin"
    )
    lowest = torch.where(count > 0, lowest, 0.0)
    shifted = torch.where(valid, values - lowest[index], 0.0)
    mean = total(shifted) / count.clamp(min=1)
    centred = torch.where(valid, shifted - mean[index], 0.0)
    std = (total(centred**2) / (count - 1).clamp(min=1)).sqrt()
    return Groups(index=index, valid=valid, count=count, centred=centred, mean=lowest + mean, std=std)


def _check(**inputs: torch.Tensor) -> None:
    rewards, group_ids = inputs["rewards"], inputs["group_ids"]
    if rewards.dim() != 1 or len({values.shape for values in inputs.values()}) != 1:
        got = ", ".join(f"{name} {tuple(values.shape)}" for name, values in inputs.items())
        raise SchemaError(f"advantages need {', '.join(inputs)} of one shape (N,); got {got}")
    if group_ids.is_floating_point() or group_ids.is_complex():
        raise SchemaError(f"group_ids must be integers, one per prompt; got {group_ids.dtype}")

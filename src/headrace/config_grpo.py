"""The parts of a recipe that say what a policy learns from: `grpo` with rewards and advantages, and `loss`."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from headrace.utils.section import Pair, Section


class AdvantageConfig(Section):
    """How rewards become advantages."""

    target: str | None = None
    """A function of your own (`package.module:function`) in place of `estimator`: of (rewards, group_ids), and, as it
    asks for, (valid, tokens, cfg), it gives the advantages, one for each sample."""
    estimator: Literal["grpo", "rloo", "reinforce_plus_plus"] = "grpo"
    """`grpo`: against the mean of the group. `rloo`: against the mean of the others in it, never divided.
    `reinforce_plus_plus`: against the mean of the batch."""
    normalize_std: bool = True
    """Divide by the standard deviation of the group (grpo), or of all tokens of the batch (reinforce_plus_plus)."""
    leave_one_out: bool = False
    """Take each sample out of its own baseline (grpo)."""
    minus_baseline: bool = False
    """Measure rewards from their group's mean before the batch normalises them (reinforce_plus_plus)."""
    epsilon: PositiveFloat = 1e-6
    """Added to the standard deviation before it divides."""

    def faults(self) -> Iterator[str]:
        batch = self.estimator == "reinforce_plus_plus"
        key = "leave_one_out" if batch else "minus_baseline"
        if getattr(self, key):
            yield f"{key}=true has no effect with estimator={self.estimator}; switch it off"
        if self.target is not None and self.estimator != "grpo":
            yield f"estimator={self.estimator} has no effect with target={self.target}; remove one of them"


class RewardConfig(Section):
    """What happens to rewards before advantages."""

    scale: float = 1.0
    """Rewards are multiplied by this first."""
    offset: float = 0.0
    """Added to a reward after `scale`."""
    clip: Pair | None = None
    """[lowest, highest] reward after scale and offset; None: no bounds."""
    overlong_filtering: bool = False
    """Mask samples that were cut at the length limit out of the loss."""
    overlong_penalty: NonNegativeFloat = 0.0
    """DAPO soft penalty: rises linearly to this over the last `overlong_buffer_tokens` tokens that
    `generation.max_new_tokens` allows a turn. The longest turn of a sample counts; one that was cut pays all of it.
    """
    overlong_buffer_tokens: NonNegativeInt = 0
    """Tokens before the limit over which `overlong_penalty` rises."""
    kl_coefficient: NonNegativeFloat = 0.0
    """KL to the reference policy, summed over a response's tokens, taken from its reward; with reinforce_plus_plus, a
    token's advantage pays for itself and the later ones."""
    kl_kind: Literal["k1", "k2", "k3"] = "k1"
    """Estimator per token, d = difference of logprobs: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. A reward's gradient
    is that of KL(policy || reference) for k1 alone."""

    def faults(self) -> Iterator[str]:
        if self.clip is not None and self.clip[0] > self.clip[1]:
            yield f"clip={list(self.clip)}: the lower bound is above the upper; swap them"
        if self.overlong_penalty and not self.overlong_buffer_tokens:
            yield (
                f"overlong_penalty={self.overlong_penalty} needs the tokens over which it rises; set "
                "overlong_buffer_tokens above 0 as well"
            )


class DynamicSamplingConfig(Section):
    """DAPO: drop groups of equal rewards (scaled and clipped, before KL and penalty) and refill with new prompts."""

    enabled: bool = False
    """Drop and refill."""
    target: str | None = None
    """A function of your own (`package.module:function`) that tells of the rewards of a group, a list of numbers,
    whether it trains. None: if they differ."""
    max_refills: PositiveInt = 10
    """Rollout rounds per step at most, each of as many prompts as the share of useful groups so far asks for and a
    batch has; then the step trains on the groups it has."""


class LossConfig(Section):
    """The policy-gradient loss."""

    kind: Literal["clipped_pg", "cispo"] = "clipped_pg"
    """`clipped_pg`: PPO's clipped objective. `cispo`: a clipped weight on the logprob; every token keeps a
    gradient."""
    ratio_level: Literal["token", "sequence"] = "token"
    """`sequence`: GSPO's length-normalised sequence ratio, for `clipped_pg` with `sequence_mean`."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """`token_mean`: every token of the batch weighs the same. `sequence_mean`: every sample does. `constant`: a sample
    is the sum over its tokens divided by `constant_tokens`, whatever its length (Dr. GRPO)."""
    constant_tokens: PositiveInt | None = None
    """What `aggregation=constant` divides by; Dr. GRPO takes `generation.max_new_tokens`."""
    clip_low: NonNegativeFloat = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: NonNegativeFloat = 0.2
    """The ratio is clipped above 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """A token of negative advantage loses this many times its advantage at most (clipped_pg); None: no bound."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the KL to the reference policy in the loss; 0: no reference policy is kept for it."""
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    """Estimator per token, as in `grpo.reward.kl_kind`. In expectation over the policy's samples, the gradient of k2 is
    that of KL(policy || reference), and that of k3, as in GRPO, is the one of KL(reference || policy)."""
    kl_gradient: Literal["value", "score_function"] = "value"
    """`score_function`: weigh k1 or k3 with the live ratio, so that the gradient is that of KL(policy || reference)."""
    importance_correction: Literal["none", "tis", "icepop", "sequence_mask"] = "none"
    """Correction for the gap between the generator's and the trainer's probabilities."""
    importance_low: NonNegativeFloat = 0.5
    """Weights (icepop), or a sample's typical weight (sequence_mask), below this are masked."""
    importance_high: PositiveFloat = 2.0
    """Weights above this are cut to it (tis) or masked (icepop, and sequence_mask by a sample's typical weight)."""
    max_sequence_logprob_error: PositiveFloat | None = None
    """Mask samples whose mean exp|train - generation logprob| exceeds this; above 1, which it is without any error."""
    on_non_finite: Literal["stop", "skip_step"] = "stop"
    """A loss or gradient that is not finite never updates; it ends the run, or is counted (train/nonfinite_updates)."""
    force_on_policy_ratio: bool = False
    """Take the ratio as exactly 1 with a live gradient, so that no prev-logprobs are computed."""
    target: str | None = None
    """A loss of your own (`package.module:function`) of (inputs, cfg), in place of `kind`: the loss per token. `cfg` is
    this section."""

    def faults(self) -> Iterator[str]:
        if self.kind == "cispo" and self.dual_clip is not None:
            yield (
                f"dual_clip={self.dual_clip} has no effect with kind=cispo, which clips weights and not the "
                "objective; remove it or set kind=clipped_pg"
            )
        if self.ratio_level == "sequence" and (self.kind == "cispo" or self.aggregation != "sequence_mean"):
            yield (
                "ratio_level=sequence is defined for kind=clipped_pg with aggregation=sequence_mean (GSPO), and not "
                f"for kind={self.kind} with aggregation={self.aggregation}; set these two, or ratio_level=token"
            )
        if (self.aggregation == "constant") != (self.constant_tokens is not None):
            yield (
                f"aggregation={self.aggregation} with constant_tokens={self.constant_tokens}: the one takes the other; "
                "set both (Dr. GRPO divides by generation.max_new_tokens), or neither"
            )
        if self.kl_coefficient and (self.kl_kind, self.kl_gradient) == ("k1", "value"):
            yield (
                f"kl_kind=k1 with kl_coefficient={self.kl_coefficient}: as a loss, k1 has an expected gradient of 0; "
                "set kl_gradient=score_function, or kl_kind=k2 or k3, or use grpo.reward.kl_coefficient"
            )
        if (self.kl_kind, self.kl_gradient) == ("k2", "score_function"):
            yield (
                "kl_kind=k2 with kl_gradient=score_function: k2 has the KL's gradient by itself; set kl_gradient=value"
            )
        if self.max_sequence_logprob_error is not None and self.max_sequence_logprob_error <= 1:
            yield (
                f"max_sequence_logprob_error={self.max_sequence_logprob_error} masks every sample, since a mean of "
                "exp|difference| is at least 1; set it above 1, or null for no limit"
            )
        bounded = self.importance_correction in ("icepop", "sequence_mask")
        if bounded and self.importance_low > self.importance_high:
            yield (
                f"importance_low={self.importance_low} is more than importance_high={self.importance_high}, so "
                f"{self.importance_correction} masks everything; swap them"
            )


class GRPOConfig(Section):
    """The loop."""

    num_prompts_per_step: PositiveInt = 32
    """Prompts of a step."""
    num_generations_per_prompt: PositiveInt = 8
    """Completions of each prompt; one group."""
    max_num_steps: PositiveInt = 100
    """Steps of the run, those before a resume included."""
    max_rollout_turns: PositiveInt = 1
    """Turns of a conversation at most, where the environment goes on after a completion."""
    advantage: AdvantageConfig = AdvantageConfig()
    reward: RewardConfig = RewardConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()

    def faults(self) -> Iterator[str]:
        advantage = self.advantage
        alone = advantage.estimator == "reinforce_plus_plus" and not advantage.minus_baseline
        alone = alone or advantage.target is not None
        needs_peers = not alone or self.dynamic_sampling.enabled
        if needs_peers and self.num_generations_per_prompt < 2:
            yield (
                f"num_generations_per_prompt=1 leaves advantage.estimator={self.advantage.estimator} without "
                "peers to compare with; set it to 2 or more, or use reinforce_plus_plus without minus_baseline and "
                "without dynamic_sampling"
            )

"""All losses: pure functions over `LossInputs`, and two losses made of them.

A loss of your own is a class like `NLLLoss`: it says which columns it reads (`required_columns`, which a training step
fetches beside the standard ones) and returns the rows' part of the global batch's loss, with metrics.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch

from headrace.config import LossConfig
from headrace.data_plane.schema import FIELDS, UNFILTERED_LOGPROBS
from headrace.errors import SchemaError
from headrace.models.interfaces import LossType

Aggregation = Literal["token_mean", "sequence_mean", "constant"]
KLKind = Literal["k1", "k2", "k3"]
MASKS = frozenset({"token_mask", "sample_mask"})

MAX_LOG_RATIO = 20.0
"""A difference of two logprobs counts as this at most, either way; exp(20) = 4.9e8 can still be summed."""


@dataclass(frozen=True)
class LossInputs:
    """Tokens 1..S-1 of b rows; (b, S-1) where not said otherwise.

    A token is in the loss where `loss_mask`. The others may hold anything, NaN and infinities included: put 0 there
    (`only`, `weighted_sum`) before any arithmetic, so that neither values nor gradients see them.
    """

    logprobs: torch.Tensor  # with gradient
    loss_mask: torch.Tensor  # bool: token_mask and the row's sample_mask are positive
    sample_mask: torch.Tensor  # (b,) weights of rows
    columns: Mapping[str, torch.Tensor]  # without gradient, but for UNFILTERED_LOGPROBS
    valid_seqs: torch.Tensor  # 0-D, of the global batch
    valid_toks: torch.Tensor  # 0-D, of the global batch

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.columns[name]

    def only(self, where: torch.Tensor) -> Self:
        """Return the inputs with only these tokens in the loss, and 0 in all other places."""
        columns = {name: torch.where(where, column, 0.0) for name, column in self.columns.items()}
        logprobs = torch.where(where, self.logprobs, 0.0)
        return replace(self, logprobs=logprobs, loss_mask=where, columns=columns)

    def with_current(self) -> Self:
        """Return the inputs with the current logprobs for previous and unfiltered ones that are not there."""
        current = {"prev_logprobs": self.logprobs.detach(), UNFILTERED_LOGPROBS: self.logprobs}
        return replace(self, columns={**current, **self.columns})

    def possible(self) -> Self:
        """Return the inputs without the tokens that have no ratio: one of their probabilities is 0."""
        return self.only(self.loss_mask & ~self.logprobs.isneginf() & ~self["prev_logprobs"].isneginf())

    def sequence_mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return (b, 1): the mean of (b, S-1) values over a row's tokens in the loss; 0 without any."""
        total = torch.where(self.loss_mask, values, 0.0).sum(-1, keepdim=True)
        return total / self.loss_mask.sum(-1, keepdim=True).clamp(min=1)


def read_inputs(
    logprobs: torch.Tensor,
    data: Mapping[str, Any],
    columns: AbstractSet[str],
    *,
    global_valid_seqs: torch.Tensor,
    global_valid_toks: torch.Tensor,
) -> LossInputs:
    """Return the inputs of a loss that reads the per-token `columns`; `LossFn` has the other arguments.

    Columns are in the dtype of `logprobs`. Where the field table allows it, one value per sample, (b,) or (b, 1), holds
    for the row's tokens.

    Raises:
        SchemaError: a mask or column is missing, or has another shape than `logprobs`.
    """
    rows, read = len(logprobs), {}
    for name in ("token_mask", *sorted(columns - MASKS)):
        column = data.get(name)
        if column is None:
            raise SchemaError(
                f"the loss needs column '{name}'{_REASONS.get(name, '')}; got {', '.join(sorted(data))}"
            )
        if (name not in FIELDS or FIELDS[name].broadcast) and column.shape in ((rows,), (rows, 1)):
            column = column.reshape(rows, 1).expand_as(logprobs)
        if column.shape != logprobs.shape:
            raise SchemaError(
                f"column '{name}' has shape {tuple(column.shape)}; expected that of the logprobs, "
                f"{tuple(logprobs.shape)} (rows, padded length)"
            )
        values = torch.as_tensor(column)[:, 1:].to(logprobs.dtype)
        read[name] = values if name == UNFILTERED_LOGPROBS else values.detach()
    samples = data.get("sample_mask")
    if samples is None or samples.shape != logprobs.shape[:1]:
        got = "nothing" if samples is None else f"shape {tuple(samples.shape)}"
        raise SchemaError(f"the loss needs column 'sample_mask' of shape ({rows},); got {got}")
    samples = samples.to(logprobs.dtype)
    loss_mask = (read.pop("token_mask") > 0) & (samples > 0)[:, None]
    return LossInputs(logprobs[:, 1:], loss_mask, samples, read, global_valid_seqs, global_valid_toks)


_REASONS = {
    "token_mask": ": it says which tokens were generated",
    "prev_logprobs": ": ratios compare with it unless loss.force_on_policy_ratio is on",
    "generation_logprobs": ": the generator's gap is measured by it",
    "advantages": ": they weigh the tokens",
    "reference_policy_logprobs": ": loss.kl_coefficient is above 0 and takes the KL to it",
    UNFILTERED_LOGPROBS: ": the KL is taken, or the completion learnt, without top-k and top-p",
}


# Sums and means.


def aggregation_weights(
    inputs: LossInputs, aggregation: Aggregation, constant_tokens: int | None = None
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
    per_token = inputs.loss_mask * inputs.sample_mask[:, None]
    if aggregation == "token_mean":
        return per_token / _divisor(inputs.valid_toks)
    if aggregation == "constant":
        assert constant_tokens is not None
        return per_token / constant_tokens / _divisor(inputs.valid_seqs)
    row_tokens = inputs.loss_mask.sum(-1, keepdim=True).clamp(min=1)
    return per_token / row_tokens / _divisor(inputs.valid_seqs)


def _divisor(count: torch.Tensor) -> torch.Tensor:
    return torch.where(count > 0, count, torch.ones_like(count))


def weighted_sum(values: torch.Tensor, weights: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """Return the sum of weight x value where `loss_mask`; elsewhere the values are not looked at."""
    return (torch.where(loss_mask, values, 0.0) * weights).sum()


def masked_min(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the least value where `mask`; +inf, the neutral element of min, if there is none."""
    flat = torch.where(mask, values, torch.inf).flatten()
    return torch.nn.functional.pad(flat, (0, 1), value=torch.inf).amin()


def masked_max(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the greatest value where `mask`; -inf, the neutral element of max, if there is none."""
    return -masked_min(-values, mask)


def _detached(metrics: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().to(torch.float32) for name, value in metrics.items()}


# How far two sets of logprobs of the same sampled tokens are apart.


def clamp_log_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """Clamp a difference of logprobs to +-MAX_LOG_RATIO; beyond, its gradient is 0. NaN stays NaN."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def kl_estimate(logprobs: torch.Tensor, reference: torch.Tensor, kind: KLKind) -> torch.Tensor:
    """Return a per-token estimate of KL(policy || reference) on tokens sampled from the policy.

    With d = logprobs - reference: k1 = d (unbiased, any sign), k2 = d^2 / 2 (biased, never negative),
    k3 = exp(-d) - 1 + d (unbiased, never negative). For d = 0.5: k1 = 0.5, k2 = 0.125, k3 = 0.1065.

    Their gradients differ. As a loss term, on the policy's own samples, the expected gradient of k1 is 0,
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
    """Return exp|log_ratio|: the factor by which two probabilities of a token differ, 1 if they agree."""
    return clamp_log_ratio(log_ratio.abs()).exp()


# Ratio, surrogate, and correction for the generator.


def policy_ratio(inputs: LossInputs, level: Literal["token", "sequence"]) -> torch.Tensor:
    """Return pi(token) / pi_prev(token), (b, S-1), with gradient.

    A log-ratio beyond +-20 counts as +-20; at token level it then has no gradient.

    - `token`: exp(logprobs - prev). Source: PPO, arXiv:1707.06347, section 3.
    - `sequence`: every token of a row has the row's length-normalised ratio s = exp(mean over tokens(logprobs - prev))
      as its value, and s * d logprob as its gradient, so that the clip acts on whole sequences. Source: GSPO,
      arXiv:2507.18071, equation 7 and, for the gradient, equation 14 (GSPO-token, which equals GSPO when a row's
      advantages are equal).
    """
    log_ratio = inputs.logprobs - inputs["prev_logprobs"]
    if level == "token":
        return clamp_log_ratio(log_ratio).exp()
    typical = clamp_log_ratio(inputs.sequence_mean(log_ratio.detach())).exp()
    return with_score(typical, inputs.logprobs)


def with_score(values: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """Return `values` with the gradient values x d logprob, as of a ratio of these logprobs to some others."""
    return values * (logprobs - logprobs.detach()).exp()


def surrogate(inputs: LossInputs, cfg: LossConfig) -> torch.Tensor:
    """Return the loss per token, (b, S-1), of the ratio r and the advantage A.

    - `clipped_pg`: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A); with `dual_clip` c, a token of negative advantage
      loses -c A at most. For clips of 0.2 and c = 3: r = 1.5 and A = 1 gives -1.2; r = 0.5 and A = -1 gives 0.8; r = 5
      and A = -1 gives 3 (5 without dual clip). None of the three has a gradient. Source: PPO, arXiv:1707.06347,
      equation 7; separate clips: DAPO, arXiv:2503.14476, equation 10; dual clip: arXiv:1912.09729, section 3.
    - `cispo`: -clip(r, 1 - clip_low, 1 + clip_high) A logprob, the clipped ratio without gradient. No token loses its
      gradient; the clip bounds its weight. `clip_low` of 1 or more means no lower bound, as in the paper's runs.
      Source: CISPO, in MiniMax-M1, arXiv:2506.13585, equations 4 and 5.
    """
    ratio, advantages = policy_ratio(inputs, cfg.ratio_level), inputs["advantages"]
    if cfg.kind == "cispo":
        weight = ratio.detach().clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
        return -weight * advantages * inputs.logprobs
    clipped = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    loss = torch.maximum(-ratio * advantages, -clipped * advantages)
    if cfg.dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -cfg.dual_clip * advantages), loss)


def importance_correction(inputs: LossInputs, cfg: LossConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights (b, S-1) of the tokens' loss, and which rows (b,) stay in it; denominators do not change.

    The same weights give different probabilities in two engines (kernels, precision, expert routes). With
    w = p_trainer(token) / p_generator(token), both at the weights that sampled it, `loss.importance_correction` is:

    - `none`: 1.
    - `tis`: min(w, high). Source: F. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy
      RL Training", https://fengyao.notion.site/off-policy-rl (truncated importance sampling).
    - `icepop`: w where low <= w <= high, else 0: the token is out. Source: IcePop, in arXiv:2510.18855.
    - `sequence_mask`: w, and a row is out if the geometric mean of its w lies outside [low, high].
      Source: J. Liu et al., "When Speed Kills Stability: Demystifying RL Collapse from the
      Training-Inference Mismatch" (geometric sequence masking).

    For w = [0.4, 1.5, 3.0], low 0.5 and high 2: tis [0.4, 1.5, 2.0]; icepop [0, 1.5, 0]; sequence_mask
    [0.4, 1.5, 3.0] and the row stays, as its geometric mean is 1.22.
    """
    gap = inputs["prev_logprobs"] - inputs["generation_logprobs"]
    low, high = cfg.importance_low, cfg.importance_high
    keep = torch.ones_like(inputs.sample_mask, dtype=torch.bool)
    kind = cfg.importance_correction
    weights = torch.ones_like(gap) if kind == "none" else clamp_log_ratio(gap).exp()
    if kind == "tis":
        weights = weights.clamp(max=high)
    if kind == "icepop":
        weights = weights.masked_fill((weights < low) | (weights > high), 0.0)
    if kind == "sequence_mask":
        typical = clamp_log_ratio(inputs.sequence_mean(gap)).exp().squeeze(-1)
        keep = ~((typical < low) | (typical > high))
    if cfg.max_sequence_logprob_error is not None:
        error = inputs.sequence_mean(probability_error(gap)).squeeze(-1)
        # An error of NaN compares as False, so such a row is out too.
        keep = keep & (error <= cfg.max_sequence_logprob_error)
    return weights, keep


# The losses.


class NLLLoss:
    """Mean negative log-likelihood of the tokens in the loss; satisfies `models.interfaces.LossFn`.

    With `filtered` (logprobs are cut by top-k or top-p) it is that of the whole vocabulary all the same. Logprobs of
    -1 and -3 on the two tokens of the global batch give a loss of 2. The metric `nll` is the loss.
    """

    loss_type = LossType.TOKEN_LEVEL

    def __init__(self, *, filtered: bool = False) -> None:
        self.required_columns = MASKS | {UNFILTERED_LOGPROBS} if filtered else MASKS

    def __call__(
        self, logprobs: torch.Tensor, data: Mapping[str, Any], **counts: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        inputs = read_inputs(logprobs, data, self.required_columns, **counts)
        scores = inputs.columns.get(UNFILTERED_LOGPROBS, inputs.logprobs)
        loss = -weighted_sum(scores, aggregation_weights(inputs, "token_mean"), inputs.loss_mask)
        return loss, _detached({"nll": loss})


class PolicyGradientLoss:
    """Policy-gradient loss, as the recipe's `loss` section says; satisfies `models.interfaces.LossFn`.

    loss = aggregate(w * surrogate(ratio, advantage) + kl_coefficient * kl), where ratio compares `logprobs` with
    `prev_logprobs` and w corrects for the generator. Sums over microbatches and ranks give the loss of the global
    batch, however it is cut or padded. Dummy rows, masked rows and padding weigh nothing in loss, denominators and
    metrics, whatever they hold. With `filtered`, logprobs are cut by top-k or top-p, and a KL reads them uncut.

    - `force_on_policy_ratio`: the current logprobs, detached, stand for `prev_logprobs`, which is not read.
    - `max_sequence_logprob_error`: a row is out if its mean exp|prev - generation logprob| exceeds it or is
      NaN. The global counts are the caller's, so a row that goes out here stays in the denominators; mask it
      in `sample_mask` beforehand (`sample_stats`) to take it out of them too.
    - A generated token that the trainer's filtered distribution (top-k, top-p) excludes has a logprob of -inf. It is
      out of the loss and counted in `impossible_fraction`. NaN at a token in the loss makes the loss NaN.

    Metrics are shares of the global batch, per valid token unless said otherwise:

    - policy_loss, and kl if there is a `kl_coefficient`: aggregated like the loss
    - ratio_mean, ratio_min, ratio_max: min and max are +inf and -inf if no token counts
    - clip_fraction_low, clip_fraction_high, and dual_clip_fraction if there is a `dual_clip`
    - approx_kl: k3 of prev against current; approx_entropy: mean -logprob
    - token_mult_prob_error: mean exp|prev - generation logprob|; importance_weight_mean
    - impossible_fraction; masked_sequence_fraction: rows that went out here, per valid sequence
    """

    def __init__(self, cfg: LossConfig, *, filtered: bool = False) -> None:
        self.cfg = cfg
        self.loss_type = LossType.TOKEN_LEVEL if cfg.aggregation == "token_mean" else LossType.SEQUENCE_LEVEL
        self.per_sequence_metrics = frozenset({"masked_sequence_fraction"})
        if self.loss_type is LossType.SEQUENCE_LEVEL:
            self.per_sequence_metrics |= {"policy_loss", "kl"}
        columns = {*MASKS, "advantages", "generation_logprobs"}
        if not cfg.force_on_policy_ratio:
            columns.add("prev_logprobs")
        if cfg.kl_coefficient:
            columns |= {"reference_policy_logprobs", *([UNFILTERED_LOGPROBS] if filtered else [])}
        self.required_columns = frozenset(columns)

    def __call__(
        self, logprobs: torch.Tensor, data: Mapping[str, Any], **counts: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        cfg = self.cfg
        valid = read_inputs(logprobs, data, self.required_columns, **counts).with_current()
        measured = valid.possible()  # and what is kept of it trains
        correction, keep = importance_correction(measured, cfg)
        kept = measured.only(measured.loss_mask & keep[:, None])
        weights = aggregation_weights(valid, cfg.aggregation, cfg.constant_tokens)
        loss = weighted_sum(correction * surrogate(kept, cfg), weights, kept.loss_mask)
        metrics = {"policy_loss": loss}
        if cfg.kl_coefficient:
            metrics["kl"] = weighted_sum(_kl(kept, cfg), weights, kept.loss_mask)
            loss = loss + cfg.kl_coefficient * metrics["kl"]
        with torch.no_grad():
            per_token = aggregation_weights(valid, "token_mean")
            metrics |= _diagnose(measured, correction, per_token, cfg)
            metrics["impossible_fraction"] = (per_token * ~measured.loss_mask).sum()
            masked = (valid.sample_mask * ~keep).sum()
            metrics["masked_sequence_fraction"] = masked / _divisor(valid.valid_seqs)
        return loss, _detached(metrics)


def _kl(inputs: LossInputs, cfg: LossConfig) -> torch.Tensor:
    policy = inputs[UNFILTERED_LOGPROBS]
    estimate = kl_estimate(policy, inputs["reference_policy_logprobs"], cfg.kl_kind)
    if cfg.kl_gradient != "score_function":
        return estimate
    moved = policy_ratio(replace(inputs, logprobs=inputs.logprobs.detach()), "token")
    return estimate * with_score(moved, policy)


def _diagnose(
    inputs: LossInputs, correction: torch.Tensor, weights: torch.Tensor, cfg: LossConfig
) -> dict[str, torch.Tensor]:
    prev, advantages, loss_mask = inputs["prev_logprobs"], inputs["advantages"], inputs.loss_mask
    ratio = policy_ratio(inputs, cfg.ratio_level)
    low, high = ratio < 1 - cfg.clip_low, ratio > 1 + cfg.clip_high
    if (
        cfg.kind != "cispo"
    ):  # which bounds weights whatever the advantage's sign; here the sign decides who is clipped
        low, high = low & (advantages < 0), high & (advantages > 0)
    shares = {
        "ratio_mean": ratio,
        "clip_fraction_low": low,
        "clip_fraction_high": high,
        "approx_kl": kl_estimate(prev, inputs.logprobs, "k3"),
        "approx_entropy": -inputs.logprobs,
        "token_mult_prob_error": probability_error(prev - inputs["generation_logprobs"]),
        "importance_weight_mean": correction,
    }
    if cfg.dual_clip is not None:
        shares["dual_clip_fraction"] = (ratio > cfg.dual_clip) & (advantages < 0)
    metrics = {name: weighted_sum(values, weights, loss_mask) for name, values in shares.items()}
    return metrics | {"ratio_min": masked_min(ratio, loss_mask), "ratio_max": masked_max(ratio, loss_mask)}

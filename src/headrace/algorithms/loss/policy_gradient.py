"""The policy-gradient loss: ratio, surrogate, correction, KL and mean, as the recipe's `loss` says."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from headrace.algorithms.loss.aggregate import (
    aggregation_weights,
    detached,
    greatest,
    least,
    weighted_sum,
)
from headrace.algorithms.loss.importance import Correction, importance_correction
from headrace.algorithms.loss.inputs import TokenMask, read_column, read_mask, safe_divisor
from headrace.algorithms.loss.kl import kl_estimate, probability_error
from headrace.algorithms.loss.surrogate import (
    cispo_surrogate,
    clip_hits,
    clipped_surrogate,
    policy_ratio,
    with_score,
)
from headrace.config import LossConfig
from headrace.data_plane.schema import UNFILTERED_LOGPROBS
from headrace.models.interfaces import LossType


@dataclass(frozen=True)
class _Tokens:
    """Columns (b, S-1) of the tokens that count. Only `logprobs` and `unfiltered` carry a gradient."""

    mask: TokenMask
    logprobs: torch.Tensor
    prev: torch.Tensor
    generation: torch.Tensor
    advantages: torch.Tensor
    reference: torch.Tensor | None
    unfiltered: torch.Tensor
    """The current logprobs as the reference's are: without top-k and top-p, and with a gradient."""

    def only(self, where: torch.Tensor) -> Self:
        """Return the columns with only these tokens counting, and 0 in all other places."""
        return replace(
            self,
            mask=replace(self.mask, counts=where),
            logprobs=torch.where(where, self.logprobs, 0.0),
            prev=torch.where(where, self.prev, 0.0),
            generation=torch.where(where, self.generation, 0.0),
            advantages=torch.where(where, self.advantages, 0.0),
            reference=None if self.reference is None else torch.where(where, self.reference, 0.0),
            unfiltered=torch.where(where, self.unfiltered, 0.0),
        )


class PolicyGradientLoss:
    """Policy-gradient loss of rows of a global batch; satisfies `models.interfaces.LossFn`.

    loss = aggregate(w * surrogate(ratio, advantage) + kl_coefficient * kl), where ratio compares `logprobs`
    with `prev_logprobs` and w corrects for the generator (`importance_correction`). Sums over microbatches
    and ranks give the loss of the global batch, however it is cut or padded. Filler rows, masked rows and
    padding weigh nothing in loss, denominators and metrics, whatever they hold.

    - `force_on_policy_ratio`: the current logprobs, detached, stand for `prev_logprobs`, which is not read.
    - `max_sequence_logprob_error`: a row is out if its mean exp|prev - generation logprob| exceeds it or is
      NaN. The global counts are the caller's, so a row that goes out here stays in the denominators; mask it
      in `sample_mask` beforehand (`sample_stats`) to take it out of them too.
    - A generated token that the trainer's filtered distribution (top-k, top-p) excludes has a logprob of
      -inf. It is out of the loss and counted in `impossible_fraction`. NaN at a counting token makes the loss
      NaN.

    Metrics are shares of the global batch, per valid token unless said otherwise:

    - policy_loss, and kl if there is a `kl_coefficient`: aggregated like the loss
    - ratio_mean, ratio_min, ratio_max: min and max are +inf and -inf if no token counts
    - clip_fraction_low, clip_fraction_high, and dual_clip_fraction if there is a `dual_clip`
    - approx_kl: k3 of prev against current; approx_entropy: mean -logprob
    - token_mult_prob_error: mean exp|prev - generation logprob|; importance_weight_mean
    - impossible_fraction; masked_sequence_fraction: rows that went out here, per valid sequence
    """

    def __init__(self, cfg: LossConfig, *, filtered: bool = False) -> None:
        """Take the recipe's `loss` section; `filtered`: logprobs are of a distribution cut by top-k or top-p."""
        self.cfg = cfg
        self._reads_unfiltered = filtered and cfg.kl_coefficient > 0
        self.loss_type = LossType.TOKEN_LEVEL if cfg.aggregation == "token_mean" else LossType.SEQUENCE_LEVEL

    @property
    def required_columns(self) -> frozenset[str]:
        """Columns that a call reads; fetch no others for the loss."""
        columns = {"token_mask", "sample_mask", "advantages", "generation_logprobs"}
        if not self.cfg.force_on_policy_ratio:
            columns.add("prev_logprobs")
        if self.cfg.kl_coefficient:
            columns.add("reference_policy_logprobs")
        if self._reads_unfiltered:
            columns.add(UNFILTERED_LOGPROBS)
        return frozenset(columns)

    def __call__(
        self,
        logprobs: torch.Tensor,
        data: Mapping[str, Any],
        *,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss (0-D, with gradient) and its metrics (0-D float32 each); see `LossFn` for the arguments.

        Raises:
            SchemaError: a column of `required_columns` is missing or has another shape.
        """
        cfg = self.cfg
        valid = self._read(logprobs, data)
        # A token without a probability has no ratio; what is left is measured, and what is kept of it trains.
        measured = valid.only(valid.mask.counts & ~valid.logprobs.isneginf() & ~valid.prev.isneginf())
        correction = self._correct(measured)
        kept = measured.only(measured.mask.counts & correction.keep[:, None])
        weights = aggregation_weights(
            valid.mask, cfg.aggregation, global_valid_seqs, global_valid_toks, cfg.constant_tokens
        )
        loss = weighted_sum(correction.weights * self._surrogate(kept), weights, kept.mask.counts)
        metrics = {"policy_loss": loss}
        if kept.reference is not None:
            estimate = kl_estimate(kept.unfiltered, kept.reference, cfg.kl_kind)
            if cfg.kl_gradient == "score_function":
                moved = policy_ratio(kept.logprobs.detach(), kept.prev, kept.mask, "token")
                estimate = estimate * with_score(moved, kept.unfiltered)
            metrics["kl"] = weighted_sum(estimate, weights, kept.mask.counts)
            loss = loss + cfg.kl_coefficient * metrics["kl"]
        with torch.no_grad():
            per_token = aggregation_weights(valid.mask, "token_mean", global_valid_seqs, global_valid_toks)
            metrics |= self._diagnose(measured, correction, per_token)
            metrics["impossible_fraction"] = (per_token * ~measured.mask.counts).sum()
            masked = (valid.mask.samples * ~correction.keep).sum()
            metrics["masked_sequence_fraction"] = masked / safe_divisor(global_valid_seqs)
        return loss, detached(metrics)

    def _read(self, logprobs: torch.Tensor, data: Mapping[str, Any]) -> _Tokens:
        cfg = self.cfg
        mask = read_mask(data, logprobs)

        def column(name: str, reason: str, *, live: bool = False) -> torch.Tensor:
            return read_column(data, name, logprobs, reason, live=live)

        current = logprobs[:, 1:]
        reference = None
        if cfg.kl_coefficient:
            reason = f"loss.kl_coefficient={cfg.kl_coefficient} takes the KL to it"
            reference = column("reference_policy_logprobs", reason)
        return _Tokens(
            mask=mask,
            logprobs=current,
            prev=current.detach()
            if cfg.force_on_policy_ratio
            else column("prev_logprobs", "ratios compare with it unless loss.force_on_policy_ratio is on"),
            generation=column("generation_logprobs", "the generator's gap is measured by it"),
            advantages=column("advantages", "they weigh the tokens"),
            reference=reference,
            unfiltered=column(UNFILTERED_LOGPROBS, "the KL is taken without top-k and top-p", live=True)
            if self._reads_unfiltered
            else current,
        )

    def _correct(self, tokens: _Tokens) -> Correction:
        """Return the importance correction; its `keep` also leaves out rows with too large an error."""
        cfg, mask = self.cfg, tokens.mask
        gap = tokens.prev - tokens.generation
        correction = importance_correction(
            gap, mask, cfg.importance_correction, cfg.importance_low, cfg.importance_high
        )
        if cfg.max_sequence_logprob_error is None:
            return correction
        error = mask.sequence_mean(probability_error(gap)).squeeze(-1)
        # An error of NaN compares as False, so such a row is out too.
        return replace(correction, keep=correction.keep & (error <= cfg.max_sequence_logprob_error))

    def _surrogate(self, tokens: _Tokens) -> torch.Tensor:
        cfg = self.cfg
        ratio = policy_ratio(tokens.logprobs, tokens.prev, tokens.mask, cfg.ratio_level)
        if cfg.kind == "cispo":
            return cispo_surrogate(tokens.logprobs, ratio, tokens.advantages, cfg)
        return clipped_surrogate(ratio, tokens.advantages, cfg)

    def _diagnose(
        self, tokens: _Tokens, correction: Correction, weights: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        cfg, counts = self.cfg, tokens.mask.counts

        def share(values: torch.Tensor) -> torch.Tensor:
            return weighted_sum(values, weights, counts)

        ratio = policy_ratio(tokens.logprobs, tokens.prev, tokens.mask, cfg.ratio_level)
        low, high = clip_hits(ratio, tokens.advantages, cfg)
        metrics = {
            "ratio_mean": share(ratio),
            "ratio_min": least(ratio, counts),
            "ratio_max": greatest(ratio, counts),
            "clip_fraction_low": share(low),
            "clip_fraction_high": share(high),
            "approx_kl": share(kl_estimate(tokens.prev, tokens.logprobs, "k3")),
            "approx_entropy": share(-tokens.logprobs),
            "token_mult_prob_error": share(probability_error(tokens.prev - tokens.generation)),
            "importance_weight_mean": share(correction.weights),
        }
        if cfg.dual_clip is not None:
            metrics["dual_clip_fraction"] = share((ratio > cfg.dual_clip) & (tokens.advantages < 0))
        return metrics

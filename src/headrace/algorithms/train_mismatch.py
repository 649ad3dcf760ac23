"""The generator's gap, measured by the training forward where no previous logprobs are computed.

A step of one update trains on logprobs of the weights that the previous logprobs would be of, so it needs no other
forward to say how far they are from the generator's.
"""

from collections.abc import Mapping
from typing import Any

import torch

from headrace.algorithms.loss.aggregate import greatest
from headrace.algorithms.loss.inputs import read_column, read_mask
from headrace.algorithms.sample_stats import MISMATCH, mismatch_shares, token_gaps
from headrace.models.interfaces import LossFn


class MismatchLoss:
    """Another loss, with sums for `mismatch_summary` beside its metrics; holds for one update per rollout."""

    def __init__(self, inner: LossFn) -> None:
        """Take the loss, whose value, gradient and metrics stay as they are."""
        self.inner = inner
        self.loss_type = inner.loss_type
        self.required_columns: frozenset[str] = getattr(inner, "required_columns", frozenset())

    def __call__(
        self,
        logprobs: torch.Tensor,
        data: Mapping[str, Any],
        *,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor | float]]:
        """Return the loss and its metrics, and `mismatch_totals`; see `LossFn`.

        Raises:
            SchemaError: a column of the loss or of `mismatch_totals` is missing or has another shape.
        """
        loss, metrics = self.inner(
            logprobs, data, global_valid_seqs=global_valid_seqs, global_valid_toks=global_valid_toks
        )
        totals = mismatch_totals(logprobs.detach(), data)
        return loss, {**metrics, **{f"{MISMATCH}{name}": value for name, value in totals.items()}}


def mismatch_totals(logprobs: torch.Tensor, data: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return sums (maxima where the name ends in `_max`) over the tokens that count, 0-D, without waiting for a device.

    Those of microbatches combine as metrics of a loss do, to what `mismatch_shares` takes.

    Args:
        logprobs: (b, S) of the trainer; -inf where its top-k or top-p excludes a token, which then does not count.
        data: Columns `token_mask`, `sample_mask` and `generation_logprobs` of the same rows.

    Raises:
        SchemaError: one of them is missing or has another shape.
    """
    generation = read_column(data, "generation_logprobs", logprobs, "the generator's gap is measured by it")
    prev = logprobs[:, 1:]
    counts = read_mask(data, logprobs).counts & ~prev.isneginf()
    gaps = token_gaps(*(torch.where(counts, column, 0.0).double() for column in (prev, generation)))
    gap = gaps.pop("gap")
    tokens = counts.sum(-1)
    per_row = {name: (values * counts).sum(-1) for name, values in gaps.items()}
    error = per_row["error"] / tokens.clamp(min=1)
    return {
        "tokens": tokens.sum(),
        **{name: values.sum() for name, values in per_row.items()},
        "gap_max": greatest(gap, counts),
        "sample_error_max": greatest(error, tokens > 0),
    }


def split_mismatch(metrics: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the loss's own metrics of a step and, where a `MismatchLoss` trained, `mismatch_shares` of the others."""
    own = {name: value for name, value in metrics.items() if not name.startswith(MISMATCH)}
    totals = {name.removeprefix(MISMATCH): v for name, v in metrics.items() if name not in own}
    return own, mismatch_shares(totals)

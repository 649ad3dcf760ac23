"""Statistics per sample and per batch about logprobs: KL to the reference, and the generator's gap.

The tokens that count are gathered into one flat vector before any arithmetic. So padding is never touched,
whatever it holds, and on the CPU the results are the same bit for bit at every padded width.

A token whose prev logprob is -inf (the trainer's top-k or top-p excludes it) does not count; the loss leaves
it out too, and reports how many there are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from headrace.algorithms.loss.kl import KLKind, clamp_log_ratio, kl_estimate, probability_error
from headrace.errors import SchemaError

STATS_COLUMNS: tuple[str, ...] = (
    "token_mask",
    "generation_logprobs",
    "prev_logprobs",
    "reference_policy_logprobs",
)
"""Columns that `sample_stats` looks at; all but `token_mask` are optional."""


def stats_columns(*, reference: bool) -> tuple[str, ...]:
    """Return `STATS_COLUMNS`, without the reference policy's logprobs if there are none."""
    return STATS_COLUMNS if reference else STATS_COLUMNS[:-1]


def sample_stats(data: Mapping[str, Any], *, kl_kind: KLKind) -> dict[str, torch.Tensor]:
    """Return statistics of each of N samples, each (N,) float32, over its tokens with `token_mask[:, 1:]`.

    - `kl_sum`: KL to the reference policy, summed over tokens (`kl_estimate` of prev against reference).
    - `logprob_error`: mean exp|prev - generation|; 1, perfect agreement, for a sample without tokens.
    - `mean_logprob`: mean prev logprob; 0 for a sample without tokens.

    A statistic is absent if a column that it needs is absent. NaN at a counting token gives the sample NaN.

    Args:
        data: Padded columns (N, S) of `STATS_COLUMNS`; `sample_mask` is not applied.
        kl_kind: The recipe's `grpo.reward.kl_kind`.

    Raises:
        SchemaError: no `token_mask`, or a column of another shape.
    """
    tokens = _gather(data)
    prev, generation, reference = tokens.prev, tokens.generation, tokens.reference
    if prev is None:
        return {}
    stats = {"mean_logprob": tokens.mean(prev, empty=0.0)}
    if reference is not None:
        stats["kl_sum"] = tokens.total(kl_estimate(prev, reference, kl_kind))
    if generation is not None:
        stats["logprob_error"] = tokens.mean(probability_error(prev - generation), empty=1.0)
    return {name: values.to(torch.float32) for name, values in stats.items()}


def mismatch_metrics(data: Mapping[str, Any]) -> dict[str, float]:
    """Return how far the trainer's probabilities are from the generator's, over a whole batch.

    Only tokens that count (`token_mask[:, 1:] * sample_mask > 0`) enter.

    - `generation_kl`: k3 estimate of KL(generator || trainer) per token that the generator sampled.
    - `token_mult_prob_error`: mean exp|prev - generation|; 1 is perfect agreement.
    - `logprob_gap_max`: the largest |prev - generation|, at most 20.
    - `sample_error_max`: the largest `logprob_error` of a sample.

    Returns {} if no token counts.

    Raises:
        SchemaError: `token_mask`, `prev_logprobs` or `generation_logprobs` is missing or has another shape.
    """
    tokens = _gather(data, data.get("sample_mask"))
    prev, generation = tokens.prev, tokens.generation
    if prev is None or generation is None:
        raise SchemaError(
            "the mismatch needs columns 'prev_logprobs' and 'generation_logprobs'; got "
            + ", ".join(sorted(data))
        )
    if not len(prev):
        return {}
    error = probability_error(prev - generation)
    values = {
        "generation_kl": kl_estimate(generation, prev, "k3").mean(),
        "token_mult_prob_error": error.mean(),
        "logprob_gap_max": clamp_log_ratio((prev - generation).abs()).amax(),
        "sample_error_max": tokens.mean(error, empty=1.0).amax(),
    }
    return dict(zip(values, torch.stack(list(values.values())).tolist()))


@dataclass(frozen=True)
class _FlatTokens:
    """The T tokens that count, row after row, in float64; `rows` (T,) says whose they are."""

    rows: torch.Tensor
    count: torch.Tensor
    prev: torch.Tensor | None
    generation: torch.Tensor | None
    reference: torch.Tensor | None

    def total(self, values: torch.Tensor) -> torch.Tensor:
        return self.count.new_zeros(len(self.count)).index_add_(0, self.rows, values)

    def mean(self, values: torch.Tensor, *, empty: float) -> torch.Tensor:
        return torch.where(self.count > 0, self.total(values) / self.count.clamp(min=1), empty)


def _gather(data: Mapping[str, Any], sample_mask: torch.Tensor | None = None) -> _FlatTokens:
    mask = data.get("token_mask")
    if mask is None or mask.dim() != 2:
        got = "nothing" if mask is None else f"shape {tuple(mask.shape)}"
        raise SchemaError(f"the statistics need column 'token_mask' of shape (N, S); got {got}")
    columns = {name: data.get(name) for name in STATS_COLUMNS[1:]}
    for name, column in columns.items():
        if column is not None and column.shape != mask.shape:
            raise SchemaError(
                f"column '{name}' has shape {tuple(column.shape)}; expected that of token_mask, "
                f"{tuple(mask.shape)}"
            )
    counts = mask[:, 1:] != 0
    if sample_mask is not None:
        counts = counts & (sample_mask > 0)[:, None]
    if (prev := columns["prev_logprobs"]) is not None:
        counts = counts & ~prev[:, 1:].isneginf()
    rows, places = counts.nonzero(as_tuple=True)
    flat = {
        name: None if column is None else column[rows, places + 1].to(torch.float64)
        for name, column in columns.items()
    }
    return _FlatTokens(
        rows=rows,
        count=counts.sum(-1).to(torch.float64),
        prev=flat["prev_logprobs"],
        generation=flat["generation_logprobs"],
        reference=flat["reference_policy_logprobs"],
    )

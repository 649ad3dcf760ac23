"""Statistics about logprobs: KL to the reference policy per sample, and the mismatch of generator and trainer.

The tokens that count are gathered into one flat vector before any arithmetic. So padding is never touched,
whatever it holds, and on the CPU the results are the same bit for bit at every padded width. A token whose prev logprob
is -inf (the trainer's top-k or top-p excludes it) does not count; the loss leaves it out too.

Where no previous logprobs are computed, `MismatchLoss` measures the mismatch in the training forward: a step of one
update trains on logprobs of the weights that the previous logprobs would be of.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from headrace.algorithms.loss import (
    KLKind,
    clamp_log_ratio,
    kl_estimate,
    masked_max,
    probability_error,
    read_inputs,
)
from headrace.data_plane.schema import MEAN_ADVANTAGES, PREV_UNFILTERED_LOGPROBS
from headrace.distributed.worker_groups import registered
from headrace.errors import SchemaError
from headrace.models.interfaces import LossFn

STATS_COLUMNS: tuple[str, ...] = (
    "token_mask",
    "generation_logprobs",
    "prev_logprobs",
    PREV_UNFILTERED_LOGPROBS,
    "reference_policy_logprobs",
)
"""Columns that `sample_stats` looks at; all but `token_mask` are optional."""

MISMATCH = "mismatch/"
"""Prefix of the mismatch's statistics and metrics."""

TAIL_FACTORS = (1.5, 2.0, 5.0)
"""Factors between two probabilities of a token beyond which a token is counted as far off."""


def stats_columns(*, reference: bool) -> tuple[str, ...]:
    """Return `STATS_COLUMNS`, without the reference policy's logprobs if there are none."""
    return STATS_COLUMNS if reference else STATS_COLUMNS[:-1]


def sample_stats(data: Mapping[str, Any], *, kl_kind: KLKind) -> dict[str, torch.Tensor]:
    """Return statistics of each of N samples, each (N,) float32, over its tokens with `token_mask[:, 1:]`.

    - `kl_sum`: KL to the reference policy, summed over tokens (`kl_estimate` of prev against reference; where there
      are `prev_unfiltered_logprobs`, of those).
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
    prev, generation = tokens.prev, tokens.generation
    if prev is None:
        return {}
    stats = {"mean_logprob": tokens.mean(prev, empty=0.0)}
    if tokens.reference is not None:
        stats["kl_sum"] = tokens.total(tokens.kl(kl_kind))
    if generation is not None:
        stats["logprob_error"] = tokens.mean(probability_error(prev - generation), empty=1.0)
    return {name: values.to(torch.float32) for name, values in stats.items()}


def kl_to_go_stats(data: Mapping[str, Any], *, kl_kind: KLKind) -> dict[str, torch.Tensor]:
    """Return what `advantages.TokenKL` takes of each of N samples, each (N,) float64.

    `kl_to_go_sum` and `kl_to_go_squares`: sums, over the tokens that count, of the KL to go and of its square. A
    token's KL to go is that of it and all later ones of its sample: KLs of 0.1, 0.4 and 0.1 make 0.6, 0.5 and 0.1.

    Raises:
        SchemaError: `token_mask`, `prev_logprobs` or `reference_policy_logprobs` is missing or has another shape.
    """
    tokens = _gather(data)
    to_go = tokens.kl_to_go(kl_kind)
    return {"kl_to_go_sum": tokens.total(to_go), "kl_to_go_squares": tokens.total(to_go**2)}


@registered
def token_advantages(data: Mapping[str, Any], *, kl_kind: KLKind, kl_scale: float) -> dict[str, torch.Tensor]:
    """Return the column `advantages` (N, S) float32, made of its mean per sample; 0 at tokens that do not count.

    A token's is its sample's - `kl_scale` x (its KL to go - the sample's mean KL to go). With 0.5, a scale of 2 and
    KLs to go of 0.6, 0.5 and 0.1: 0.1, 0.3 and 1.1.

    Args:
        data: Columns of `kl_to_go_stats`, and `mean_advantages` (N,), a sample's mean over its tokens.
        kl_kind: The recipe's `grpo.reward.kl_kind`.
        kl_scale: `AdvantageResult.kl_scale`.
    """
    tokens = _gather(data)
    to_go = tokens.kl_to_go(kl_kind)
    above = to_go - tokens.mean(to_go, empty=0.0)[tokens.rows]
    own = data[MEAN_ADVANTAGES].to(torch.float64)[tokens.rows]
    return {"advantages": tokens.spread(own - kl_scale * above).to(torch.float32)}


# The mismatch of generator and trainer.


def mismatch_stats(data: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return what `mismatch_summary` needs of each of N samples, each (N,) float64; {} without prev logprobs.

    Sums over tokens with `token_mask[:, 1:]` (`tokens`, `k1`, `k2`, `k3`, `js`, `error`, `tail_*`) and `gap_max`.

    Raises:
        SchemaError: no `token_mask`, or a column of another shape.
    """
    tokens = _gather(data)
    if tokens.prev is None or tokens.generation is None:
        return {}
    gaps = _token_gaps(tokens.prev, tokens.generation)
    zeros = torch.zeros_like(tokens.count)
    largest = zeros.scatter_reduce(0, tokens.rows, gaps.pop("gap"), "amax")
    totals = {name: tokens.total(values) for name, values in gaps.items()}
    return {"tokens": tokens.count, **totals, "gap_max": largest}


def mismatch_summary(stats: Mapping[str, torch.Tensor], sample_mask: torch.Tensor) -> dict[str, float]:
    """Return how far the trainer's probabilities are from the generator's, over the samples with a mask (N,) > 0.

    Per token that the generator sampled:

    - `generation_kl_k1`, `generation_kl_k2`, `generation_kl`: estimates of KL(generator || trainer); the last is k3.
    - `js_divergence`: estimate of the Jensen-Shannon divergence, in nats.
    - `token_mult_prob_error`: mean exp|prev - generation|; 1 is perfect agreement.
    - `tail_T`: share of tokens whose two probabilities differ by more than a factor of T.

    `logprob_gap_max` is the largest |prev - generation|, at most 20; `sample_error_max` the largest mean of
    exp|prev - generation| over one sample. Returns {} if no token counts.

    Source: the tail function F(tau) of rollout routing replay (arXiv 2510.11370).
    """
    chosen = sample_mask > 0
    kept = {name: values[chosen] for name, values in stats.items()}
    if not kept or not len(kept["tokens"]):
        return {}
    totals = {name: values.sum() for name, values in kept.items() if name != "gap_max"}
    per_sample = torch.where(kept["tokens"] > 0, kept["error"] / kept["tokens"].clamp(min=1), 1.0)
    totals |= {"gap_max": kept["gap_max"].amax(), "sample_error_max": per_sample.amax()}
    return _fractions(dict(zip(totals, torch.stack(list(totals.values())).tolist())))


class MismatchLoss:
    """Another loss, whose value, gradient and metrics stay, with sums for `split_mismatch` beside its metrics.

    The sums are those of the mismatch only with one update per rollout.
    """

    def __init__(self, inner: LossFn) -> None:
        self.inner = inner
        self.loss_type = inner.loss_type
        self.per_sequence_metrics: frozenset[str] = getattr(inner, "per_sequence_metrics", frozenset())
        own: frozenset[str] = getattr(inner, "required_columns", frozenset())
        self.required_columns = own | {"generation_logprobs"}

    def __call__(
        self, logprobs: torch.Tensor, data: Mapping[str, Any], **counts: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor | float]]:
        loss, metrics = self.inner(logprobs, data, **counts)
        totals = mismatch_totals(logprobs.detach(), data, **counts)
        return loss, {**metrics, **{f"{MISMATCH}{name}": value for name, value in totals.items()}}


def mismatch_totals(
    logprobs: torch.Tensor, data: Mapping[str, Any], **counts: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return sums (maxima where the name ends in `_max`) over the tokens that count, 0-D, without waiting for a device.

    Args:
        logprobs: (b, S) of the trainer; -inf where its top-k or top-p excludes a token, which then does not count.
        data: Columns `token_mask`, `sample_mask` and `generation_logprobs` of the same rows.
        counts: Those of a loss, which do not matter here.

    Raises:
        SchemaError: one of them is missing or has another shape.
    """
    inputs = read_inputs(logprobs, data, {"generation_logprobs"}, **counts)
    generation, prev = inputs["generation_logprobs"], inputs.logprobs
    loss_mask = inputs.loss_mask & ~prev.isneginf()
    gaps = _token_gaps(*(torch.where(loss_mask, column, 0.0).double() for column in (prev, generation)))
    gap = gaps.pop("gap")
    tokens = loss_mask.sum(-1)
    per_row = {name: (values * loss_mask).sum(-1) for name, values in gaps.items()}
    return {
        "tokens": tokens.sum(),
        **{name: values.sum() for name, values in per_row.items()},
        "gap_max": masked_max(gap, loss_mask),
        "sample_error_max": masked_max(per_row["error"] / tokens.clamp(min=1), tokens > 0),
    }


def split_mismatch(metrics: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the loss's own metrics of a step and, where a `MismatchLoss` trained, the mismatch's."""
    own = {name: value for name, value in metrics.items() if not name.startswith(MISMATCH)}
    return own, _fractions({name.removeprefix(MISMATCH): v for name, v in metrics.items() if name not in own})


def _fractions(totals: Mapping[str, float]) -> dict[str, float]:
    tokens = totals.get("tokens", 0)
    if not tokens:
        return {}
    names = {"k1": "generation_kl_k1", "k2": "generation_kl_k2", "k3": "generation_kl"}
    names |= {"js": "js_divergence", "error": "token_mult_prob_error"}
    names |= {f"tail_{tau:g}": f"tail_{tau:g}" for tau in TAIL_FACTORS}
    largest = {"logprob_gap_max": totals["gap_max"], "sample_error_max": totals["sample_error_max"]}
    return {**{metric: totals[name] / tokens for name, metric in names.items()}, **largest}


def _token_gaps(prev: torch.Tensor, generation: torch.Tensor) -> dict[str, torch.Tensor]:
    gap = clamp_log_ratio(prev - generation)
    factor = gap.abs().exp()
    kinds: tuple[KLKind, ...] = ("k1", "k2", "k3")
    return {
        **{k: kl_estimate(generation, prev, k) for k in kinds},
        "js": jensen_shannon(gap),
        "error": factor,
        **{f"tail_{tau:g}": (factor > tau).to(gap.dtype) for tau in TAIL_FACTORS},
        "gap": gap.abs(),
    }


def jensen_shannon(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return a per-token estimate of JS(p, q) in nats on tokens sampled from p, for log_ratio = log q - log p.

    With r = q / p: (log(2 / (1 + r)) + r log(2 r / (1 + r))) / 2; never negative, 0 at r = 1. Its mean is unbiased, as
    the part of JS under q is an expectation under p weighted with r. For r = 2: (log(2/3) + 2 log(4/3)) / 2 = 0.0849.
    """
    ratio = log_ratio.exp()
    middle = torch.log1p(ratio) - math.log(2)
    return (ratio * (log_ratio - middle) - middle) / 2


# Tokens of all rows, one after the other.


@dataclass(frozen=True)
class _FlatTokens:
    """The T tokens that count, row after row, in float64; they are at `rows` (T,) and `places` (T,)."""

    width: int
    rows: torch.Tensor
    places: torch.Tensor
    count: torch.Tensor
    prev: torch.Tensor | None
    unfiltered: torch.Tensor | None
    generation: torch.Tensor | None
    reference: torch.Tensor | None

    def kl(self, kind: KLKind) -> torch.Tensor:
        policy = self.prev if self.unfiltered is None else self.unfiltered
        if policy is None or self.reference is None:
            raise SchemaError(
                "the KL needs columns 'prev_logprobs' and 'reference_policy_logprobs', and one is missing"
            )
        return kl_estimate(policy, self.reference, kind)

    def kl_to_go(self, kind: KLKind) -> torch.Tensor:
        # Summed from the row's end, where padding is 0: on the CPU its width changes no bit.
        summed = self.spread(self.kl(kind)).flip(-1).cumsum(-1).flip(-1)
        return summed[self.rows, self.places]

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        padded = values.new_zeros(len(self.count), self.width)
        padded[self.rows, self.places] = values
        return padded

    def total(self, values: torch.Tensor) -> torch.Tensor:
        return self.count.new_zeros(len(self.count)).index_add_(0, self.rows, values)

    def mean(self, values: torch.Tensor, *, empty: float) -> torch.Tensor:
        return torch.where(self.count > 0, self.total(values) / self.count.clamp(min=1), empty)


def _gather(data: Mapping[str, Any]) -> _FlatTokens:
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
    if (prev := columns["prev_logprobs"]) is not None:
        counts = counts & ~prev[:, 1:].isneginf()
    rows, places = counts.nonzero(as_tuple=True)
    flat = {
        name: None if column is None else column[rows, places + 1].to(torch.float64)
        for name, column in columns.items()
    }
    return _FlatTokens(
        width=mask.shape[1],
        rows=rows,
        places=places + 1,
        count=counts.sum(-1).to(torch.float64),
        prev=flat["prev_logprobs"],
        unfiltered=flat[PREV_UNFILTERED_LOGPROBS],
        generation=flat["generation_logprobs"],
        reference=flat["reference_policy_logprobs"],
    )

"""What a train step gives, and how the results of microbatches, replicas and updates become one."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

import numpy as np
import torch

from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.distributed.worker_groups import WorkerGroup
from headrace.errors import HeadraceError

Outcome = Literal["updated", "no_tokens", "no_gradient", "not_finite", "evaluated"]
"""How a global batch ended. All but `updated` left weights, optimizer and schedule as they were: no token counted, the
gradient was exactly 0 (an update would be momentum and weight decay alone), loss or gradient were not finite, or
nothing was to be trained."""

_MEASURED = ("updated", "no_gradient", "evaluated")
_EXTREMES: dict[str, Callable[[Any], Any]] = {"_min": np.min, "_max": np.max}  # NaN stays NaN


@dataclass(frozen=True)
class StepResult:
    """What one global batch gave: this rank's share of loss and metrics, and the norm of the whole gradient.

    Where loss or gradient are not finite, `suspects` are the samples of this rank that are seen to be at fault, and
    `sample_ids` all of its samples; both are empty elsewhere.
    """

    loss: float
    grad_norm: float
    metrics: dict[str, float]
    num_microbatches: int
    tokens: int
    outcome: Outcome = "evaluated"
    suspects: list[str] = field(default_factory=list)
    sample_ids: list[str] = field(default_factory=list)

    @property
    def updated(self) -> bool:
        return self.outcome == "updated"


@dataclass(frozen=True)
class NonFinite:
    """A global batch, counted from 0, whose loss or gradient was not finite, and so was left out.

    `sample_ids` are the samples at fault; all of the global batch's, where none stands out (`is_exact` False).
    """

    index: int
    loss: float
    grad_norm: float
    sample_ids: list[str]
    is_exact: bool


@dataclass(frozen=True)
class Traffic:
    """Bytes that rows cost.

    `by_column` went through the store, puts and gets together. `driver_bytes` went to and from the driver's process:
    calls to workers and their results, and what the driver itself puts and gets; 0 where no worker is in another
    process.
    """

    by_column: Mapping[str, int] = field(default_factory=dict)
    driver_bytes: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            Counter(self.by_column) + Counter(other.by_column), self.driver_bytes + other.driver_bytes
        )

    def __sub__(self, before: "Traffic") -> "Traffic":
        columns = {name: n - before.by_column.get(name, 0) for name, n in self.by_column.items()}
        return Traffic(columns, self.driver_bytes - before.driver_bytes)

    def metrics(self) -> dict[str, float]:
        """Return the driver's part as metrics, where it is told from the whole."""
        total = sum(self.by_column.values())
        if not self.driver_bytes or not total:
            return {}
        return {
            "data_plane/driver_bytes": float(self.driver_bytes),
            "data_plane/driver_fraction": self.driver_bytes / total,
        }


def moved_by(rollouts: WorkerGroup) -> Traffic:
    """Return what a group of one rollout actor has moved so far."""
    return Traffic(rollouts.run_all("moved_bytes")[0], rollouts.transferred_bytes)


def collect_steps(steps: Sequence[StepResult]) -> dict[str, Any]:
    """Return the results of one rank's global batches as columns, which `aggregate_train_results` takes."""
    return {
        "loss": torch.tensor([s.loss for s in steps], dtype=torch.float64),
        "grad_norm": torch.tensor([s.grad_norm for s in steps], dtype=torch.float64),
        "metrics": [s.metrics for s in steps],
        "outcomes": [s.outcome for s in steps],
        "suspects": [s.suspects for s in steps],
        "sample_ids": [s.sample_ids for s in steps],
        "num_microbatches": sum(s.num_microbatches for s in steps),
        "tokens": sum(s.tokens for s in steps),
    }


def combine_metrics(
    parts: Sequence[Mapping[str, float]], rest: Callable[[Any], Any] = sum
) -> dict[str, float]:
    """Combine shares of one global batch: `*_min` by min, `*_max` by max, the rest by sum (or `rest`).

    >>> combine_metrics([{"loss": 1.0, "ratio_max": 2.0}, {"loss": 0.5, "ratio_max": 1.5}])
    {'loss': 1.5, 'ratio_max': 2.0}
    """
    names = dict.fromkeys(name for part in parts for name in part)
    return {
        name: float(_EXTREMES.get(name[-4:], rest)([part[name] for part in parts if name in part]))
        for name in names
    }


def merge_rows(parts: Sequence[Mapping[str, Any]], inverse: Sequence[int] | None) -> BatchedDataDict:
    """Concatenate per-replica columns and restore the caller's order; `inverse` None: it is the order already."""
    merged: BatchedDataDict = BatchedDataDict.from_batches([BatchedDataDict(part) for part in parts])
    if inverse is not None:
        merged.reorder_data(inverse)
    return merged


def aggregate_train_results(
    results: Sequence[dict[str, Any]], *, num_ranks: int, total_flops: float, theoretical_tflops: float
) -> dict[str, Any]:
    """Combine the replicas' results of one training call.

    Losses and metrics are shares of the global batch and are combined over replicas; every replica reports the same
    gradient norms and outcomes. Loss, norm and metrics are means over the global batches that have a token and finite
    numbers (`*_min` and `*_max` the least and the greatest); where there is none, the loss and norm are those of all.

    Raises:
        HeadraceError: replicas that took different numbers of optimizer steps, or that do not agree on how one ended.
    """
    ends = {tuple(r["outcomes"]) for r in results}
    if len(ends) != 1:
        raise HeadraceError(
            f"replicas do not agree on their updates: {sorted(ends)}; expected the same of each"
        )
    outcomes = ends.pop()
    losses = torch.stack([torch.as_tensor(r["loss"], dtype=torch.float64) for r in results]).sum(0)
    norms = torch.as_tensor(results[0]["grad_norm"], dtype=torch.float64)
    batches = [combine_metrics(same) for same in zip(*[r["metrics"] for r in results])]
    measured = [i for i, outcome in enumerate(outcomes) if outcome in _MEASURED]
    shown = measured or list(range(len(outcomes)))
    non_finite = [i for i, outcome in enumerate(outcomes) if outcome == "not_finite"]
    return {
        "loss": losses[shown].mean(),
        "grad_norm": norms[shown].mean(),
        "all_mb_metrics": combine_metrics([batches[i] for i in measured], fmean),
        "updates": outcomes.count("updated"),
        "skipped_updates": len(outcomes) - outcomes.count("updated"),
        "non_finite": [_named_fault(results, i, float(losses[i]), float(norms[i])) for i in non_finite],
        "total_flops": total_flops,
        "num_ranks": num_ranks,
        "theoretical_tflops": theoretical_tflops,
    }


def _named_fault(results: Sequence[dict[str, Any]], index: int, loss: float, grad_norm: float) -> NonFinite:
    def joined(key: str) -> list[str]:
        lists: Iterable[list[str]] = (r[key][index] for r in results)
        return list(dict.fromkeys(sample_id for ids in lists for sample_id in ids))

    suspects = joined("suspects")
    return NonFinite(index, loss, grad_norm, suspects or joined("sample_ids"), bool(suspects))

"""What a training call did: refused where it must be, and as metrics."""

from collections.abc import Mapping
from typing import Any, Literal

from headrace.algorithms.rewards import name_some
from headrace.algorithms.sample_stats import MISMATCH, split_mismatch
from headrace.errors import HeadraceError

OnNonFinite = Literal["stop", "skip_step"]


def check_finite(trained: Mapping[str, Any], on_non_finite: OnNonFinite, where: str) -> None:
    """Stop a run at an update whose loss or gradient is not finite; the workers have left that update out.

    `trained` is what `Policy.train` returns, `where` names the step in the message.

    Raises:
        HeadraceError: there is such an update, and it is to stop the run; names its samples.
    """
    if on_non_finite == "skip_step" or not trained["non_finite"]:
        return
    fault = trained["non_finite"][0]
    names = name_some([f"'{sample_id}'" for sample_id in fault.sample_ids]) or "samples without ids"
    part = "at fault" if fault.is_exact else "no single sample stands out among"
    raise HeadraceError(
        f"{where}, update {fault.index + 1} of {trained['updates'] + trained['skipped_updates']}: loss {fault.loss} "
        f"and gradient norm {fault.grad_norm}; expected finite numbers ({part}: {names}). "
        "The weights do not have this update; look at these samples, lower policy.optimizer.lr, or leave such updates "
        "out with loss.on_non_finite=skip_step"
    )


def update_metrics(trained: Mapping[str, Any] | None, updates: int) -> dict[str, float]:
    """Return the metrics of a step of `updates` global batches; `trained` None: no sample counted, so none was run."""
    if trained is None:
        return {"train/skipped_updates": float(updates), "train/nonfinite_updates": 0.0}
    own, gaps = split_mismatch(trained["all_mb_metrics"])
    own |= {"nonfinite_updates": len(trained["non_finite"]), "flops": trained["total_flops"]}
    own |= {name: trained[name] for name in ("skipped_updates", "loss", "grad_norm")}
    return {
        **{f"train/{name}": float(value) for name, value in own.items()},
        **{f"{MISMATCH}{name}": value for name, value in gaps.items()},
    }


def idle_reason(metrics: Mapping[str, float], updates: int) -> str | None:
    """Return why a step of `updates` global batches learned nothing from its rewards; None if it did.

    A step that moved weights by a KL term alone learned nothing from its rewards either.
    """
    if metrics["train/nonfinite_updates"] == updates:
        return "no loss or gradient was finite, so every update was left out"
    if metrics["train/skipped_updates"] == updates or metrics.get("advantage/abs_max") == 0:
        return (
            f"no group had samples that count and differ in reward (mean reward {metrics['reward/mean']:.3f})"
        )
    return None

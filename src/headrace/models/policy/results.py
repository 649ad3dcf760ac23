"""How the results of several replicas become one."""

from collections.abc import Sequence
from typing import Any

import torch

from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.errors import HeadraceError


def combine_metrics(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Combine shares of one global batch: `*_min` by min, `*_max` by max, the rest by sum.

    >>> combine_metrics([{"loss": 1.0, "ratio_max": 2.0}, {"loss": 0.5, "ratio_max": 1.5}])
    {'loss': 1.5, 'ratio_max': 2.0}
    """
    combined: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            if name not in combined:
                combined[name] = value
            elif name.endswith("_min"):
                combined[name] = min(combined[name], value)
            elif name.endswith("_max"):
                combined[name] = max(combined[name], value)
            else:
                combined[name] += value
    return combined


def merge_rows(parts: Sequence[Any], key: str, inverse: Sequence[int] | None) -> BatchedDataDict:
    """Concatenate per-replica rows and restore the caller's order; `inverse` None: it is the order already."""
    merged: BatchedDataDict = BatchedDataDict.from_batches([BatchedDataDict({key: part}) for part in parts])
    if inverse is not None:
        merged.reorder_data(inverse)
    return merged


def aggregate_train_results(
    results: Sequence[dict[str, Any]], *, num_ranks: int, total_flops: float, theoretical_tflops: float
) -> dict[str, Any]:
    """Combine the replicas' results of one training call.

    Losses and metrics are shares of the global batch and are combined over replicas; every replica reports the
    same gradient norm. Several global batches are averaged.

    Raises:
        HeadraceError: replicas that took different numbers of optimizer steps.
    """
    counts = {len(r["loss"]) for r in results}
    if len(counts) != 1:
        raise HeadraceError(f"replicas ran {sorted(counts)} global batches; expected one number")
    losses = torch.stack([torch.as_tensor(r["loss"], dtype=torch.float64) for r in results]).sum(0)
    batches = [combine_metrics(same) for same in zip(*[r["metrics"] for r in results])]
    names = dict.fromkeys(name for b in batches for name in b)
    return {
        "loss": losses.mean(),
        "grad_norm": torch.as_tensor(results[0]["grad_norm"], dtype=torch.float64).mean(),
        "all_mb_metrics": {n: sum(b[n] for b in batches if n in b) / len(batches) for n in names},
        "total_flops": total_flops,
        "num_ranks": num_ranks,
        "theoretical_tflops": theoretical_tflops,
    }

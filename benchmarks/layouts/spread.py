"""How far the ranks' work is apart, from the planner's costs alone: planned by cost, and rows dealt round."""

from functools import cache
from typing import Any

import numpy as np

from headrace.distributed.balance import row_costs, sum_by
from headrace.distributed.planner import plan_microbatches
from layouts.cases import Scale, attention_ratio, drawn_lengths, packing_args, rows_per_gpu

DRAWS = 20
Costs = list[np.ndarray[Any, Any]]
"""Of each rank, the cost of each of its microbatches."""


@cache
def modelled(model: str, ranks: int, scale: Scale) -> dict[str, dict[str, float]]:
    """Return, for both ways to share rows out, medians over some drawn batches.

    `max_to_mean`: the costliest rank over the mean. `lockstep`: the sum over microbatches of the costliest rank's, over
    the mean of the ranks' sums: what a step takes, if ranks wait for one another in every microbatch, as FSDP has them.
    """
    ratio = attention_ratio(model, scale)
    args = packing_args(scale.mb_tokens, ratio)
    found: dict[str, list[tuple[float, float]]] = {"planned": [], "dealt": []}
    for seed in range(DRAWS):
        lengths = drawn_lengths(ranks * rows_per_gpu(model, scale), scale, seed)
        alone = [_costs(lengths[rank::ranks], 1, args, ratio)[0] for rank in range(ranks)]
        found["planned"].append(_apart(_costs(lengths, ranks, args, ratio)))
        found["dealt"].append(_apart(alone))
    medians = {name: np.median(np.array(values), axis=0) for name, values in found.items()}
    return {n: {"max_to_mean": float(m[0]), "lockstep": float(m[1])} for n, m in medians.items()}


def _costs(lengths: np.ndarray[Any, Any], ranks: int, args: dict[str, Any], ratio: float) -> Costs:
    plan = plan_microbatches(lengths, shards=ranks, sequence_packing_args=args)
    costs, found, begin = row_costs(lengths[plan.row_order], ratio), [], 0
    for rows, stops in zip(plan.rows_per_batch[:, 0].tolist(), plan.stops):
        own = costs[begin : begin + rows]
        part = np.searchsorted(stops, np.arange(rows), side="right")
        found.append(sum_by(part, own, len(stops)))
        begin += rows
    return found


def _apart(costs: Costs) -> tuple[float, float]:
    most = max(len(rank) for rank in costs)
    table = np.array([np.pad(rank, (0, most - len(rank))) for rank in costs])
    mean = table.sum(1).mean()
    return float(table.sum(1).max() / mean), float(table.max(0).sum() / mean)

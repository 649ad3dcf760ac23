"""A microbatch plan as text."""

from typing import Any

import numpy as np

from headrace.distributed.balance import IntArray, row_costs
from headrace.distributed.planner import MicrobatchPlan

_MICROBATCHES = 16
_RANKS = 8
_BAR = 20


def describe_plan(plan: MicrobatchPlan) -> str:
    """Return what the plan does, line by line: totals, ranks, and microbatches with their fill.

    Beyond 16 microbatches or 8 ranks only the ends are shown.
    """
    return "\n".join([*_totals(plan), "", *_rank_table(plan), *_microbatch_table(plan)]) + "\n"


def _totals(plan: MicrobatchPlan) -> list[str]:
    rows, batches = len(plan.lengths), plan.rows_per_batch.shape[1]
    title = f"{plan.kind} plan" + (f" ({plan.algorithm})" if plan.algorithm else "")
    lines = [
        f"{title}: {rows:,} rows, {int(plan.lengths.sum()):,} tokens, {_count(plan.ranks, 'rank')}, "
        f"{_count(batches, 'global batch', 'es')}",
        f"longest row {int(plan.lengths.max(initial=0)):,} tokens, pad target {plan.pad_target:,}",
    ]
    if plan.budget_tokens is not None:
        used, dummies = _used_tokens(plan), int((_rows_in(plan) == 0).sum())
        computed = int(used.sum())
        lines += [
            f"microbatches per rank and global batch: {_span(plan.microbatches_per_batch)}, at most "
            f"{plan.budget_tokens:,} tokens each; {_count(dummies, 'dummy microbatch', 'es')} in all",
            f"fill {_fraction(computed, used.size * plan.budget_tokens)} of the budget, "
            f"padding {_fraction(computed - int(plan.lengths.sum()), computed)} of the tokens computed",
        ]
    loads, costs = _loads(plan, plan.lengths), _loads(plan, row_costs(plan.lengths, plan.attention_ratio))
    lines.append(
        f"tokens per rank: mean {loads.mean():,.0f}, least {loads.min():,}, most {loads.max():,}; "
        f"imbalance (most - least) / mean {_fraction(int(loads.max() - loads.min()), float(loads.mean()))}"
    )
    lines.append(
        f"cost per rank with attention (tokens + {plan.attention_ratio:g} x tokens^2 of each row): "
        f"imbalance (most - least) / mean {_fraction(int(costs.max() - costs.min()), float(costs.mean()))}"
    )
    return lines


def _rank_table(plan: MicrobatchPlan) -> list[str]:
    loads, rows = _loads(plan, plan.lengths), plan.rows_per_batch.sum(axis=1)
    mean = float(loads.mean())
    lines = ["rank      rows        tokens   to mean"]
    for rank in _ends(plan.ranks, _RANKS):
        if rank is None:
            lines.append(f" ...  ({plan.ranks - _RANKS} more)")
            continue
        deviation = 100 * (loads[rank] / mean - 1) if mean else 0.0
        lines.append(f"{rank:4d} {rows[rank]:9,} {loads[rank]:13,}  {deviation:+7.2f}%")
    return lines


def _microbatch_table(plan: MicrobatchPlan) -> list[str]:
    """Show the microbatches of the first global batch, over all ranks."""
    if plan.budget_tokens is None or not len(plan.microbatches_per_batch):
        return []
    count = int(plan.microbatches_per_batch[0])
    rows, used = _rows_in(plan)[:, :count], _used_tokens(plan)[:, :count]
    title = "microbatches of global batch 0" if len(plan.microbatches_per_batch) > 1 else "microbatches"
    lines = [
        "",
        f"{title} (rows and tokens: least to most over ranks)",
        "  mb      rows             tokens   mean fill",
    ]
    for index in _ends(count, _MICROBATCHES):
        if index is None:
            lines.append(f" ...  ({count - _MICROBATCHES} more)")
            continue
        fill = float(used[:, index].mean()) / plan.budget_tokens
        bar = "#" * round(_BAR * min(fill, 1.0))
        lines.append(
            f"{index:4d} {_span(rows[:, index]):>9} {_span(used[:, index]):>18}   "
            f"{bar:<{_BAR}} {100 * fill:5.1f}%"
        )
    return lines


def bins_of(plan: MicrobatchPlan, rows_per_microbatch: int) -> dict[str, Any]:
    """Return the plan as JSON values: {form, budget, ranks: [{rank, cost, bins: [{rows, tokens}]}]}.

    `rows` are the lengths of a microbatch's rows, `tokens` what it computes, padding included. Rows without a plan are
    cut into microbatches of so many, padded to the longest row.
    """
    costs = _loads(plan, row_costs(plan.lengths, plan.attention_ratio))
    ranks = [
        {"rank": rank, "cost": int(costs[rank]), "bins": _bins_of_rank(plan, rank, rows_per_microbatch)}
        for rank in range(plan.ranks)
    ]
    form = {"contiguous": "padded", "dynamic": "similar-length"}.get(plan.kind, plan.kind)
    return {"form": form, "budget": plan.budget_tokens, "ranks": ranks}


def _bins_of_rank(plan: MicrobatchPlan, rank: int, rows_per_microbatch: int) -> list[dict[str, Any]]:
    lengths, bins, start = plan.lengths[plan.rank_rows(rank)].tolist(), [], 0
    cuts = plan.rank_plan(rank)
    for batch, rows in enumerate(plan.rows_per_batch[rank].tolist()):
        own = lengths[start : start + rows]
        start += rows
        if not cuts:
            parts = [own[at : at + rows_per_microbatch] for at in range(0, rows, rows_per_microbatch)]
            bins += [{"rows": part, "tokens": len(part) * plan.pad_target} for part in parts]
            continue
        pairs = zip(cuts["micro_batch_indices"][batch], cuts["micro_batch_lengths"][batch])
        for (first, stop), tokens in pairs:
            times = 1 if plan.kind == "packed" else max(stop - first, 1)
            bins.append({"rows": own[first:stop], "tokens": tokens * times})
    return bins


def _rows_in(plan: MicrobatchPlan) -> IntArray:
    """Return (R, M) rows per microbatch."""
    starts = np.concatenate([np.zeros_like(plan.stops[:, :1]), plan.stops[:, :-1]], axis=1)
    counts = plan.microbatches_per_batch
    starts[:, (np.cumsum(counts) - counts)[counts > 0]] = 0
    rows: IntArray = plan.stops - starts
    return rows


def _used_tokens(plan: MicrobatchPlan) -> IntArray:
    """Return (R, M) tokens that each microbatch computes, padding included."""
    if plan.kind == "packed":
        return plan.microbatch_lengths
    used: IntArray = np.maximum(_rows_in(plan), 1) * plan.microbatch_lengths
    return used


def _loads(plan: MicrobatchPlan, per_row: IntArray) -> IntArray:
    """Return (R,) sums of `per_row` (N,) over each rank's rows."""
    totals = np.concatenate([[0], np.cumsum(per_row[plan.row_order])])
    stops = np.cumsum(plan.rows_per_batch.sum(axis=1))
    loads: IntArray = np.diff(totals[stops], prepend=0)
    return loads


def _ends(count: int, shown: int) -> list[int | None]:
    if count <= shown:
        return [*range(count)]
    half = shown // 2
    return [*range(half), None, *range(count - half, count)]


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def _span(values: IntArray) -> str:
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    return f"{low:,}" if low == high else f"{low:,}-{high:,}"


def _fraction(part: float, whole: float) -> str:
    return f"{100 * part / whole:.2f} %" if whole else "0.00 %"

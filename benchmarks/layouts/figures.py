"""From what the ranks of all cases found to figures: rates, efficiency against one GPU, spread between ranks."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from run import Bench

from layouts.cases import HEADRACE, TRANSFORMERS, Case, Scale
from layouts.spread import modelled

GOALS = {("0.6b", 4): 0.92, ("0.6b", 8): 0.9, ("8b-12", 4): 0.85, ("8b-12", 8): 0.8}
"""Least share of linear for data parallel ranks."""
LOSS_APART, NORM_APART = 5e-3, 0.05
"""Absolute and relative, of the first step of both ways: what bfloat16 rounding may do."""
_MODELLED = (2, 4, 8)
_SECONDS = ("step_s", "compute_s", "exposed_s", "communication_s")
Found = dict[str, Any]


def merged(case: Case, answers: list[Found] | str) -> Found:
    """Return one case's result, from its ranks'."""
    about: Found = {
        "model": case.model,
        "gpus": case.gpus,
        "layout": case.layout,
        "way": case.way,
        "kind": case.kind,
    }
    if isinstance(answers, str):
        return {**about, "failed": answers}
    return about | (_spread(answers) if case.kind == "spread" else _speed(case, answers))


def _speed(case: Case, ranks: Sequence[Found]) -> Found:
    # The slowest rank's time is that of the step; leaders have the tokens of their replica.
    steps = [max(times) for times in zip(*(rank["step_s"] for rank in ranks))]
    scores = [max(times) for times in zip(*(rank["score_s"] for rank in ranks))]
    tokens = sum(rank["tokens"] for rank in ranks[:: case.replica])
    profiles = [rank["profile"] for rank in ranks]
    mean = {key: statistics.mean(p[key] for p in profiles) for key in _SECONDS}
    return {
        "tokens": tokens,
        "microbatches": ranks[0]["microbatches"],
        "loss": sum(rank["loss"] for rank in ranks[:: case.replica]),
        "grad_norm": ranks[0]["grad_norm"],
        "step_median_s": statistics.median(steps),
        "step_all_s": steps,
        "step_tokens_per_s": tokens / statistics.median(steps),
        "score_median_s": statistics.median(scores),
        "score_all_s": scores,
        "score_tokens_per_s": tokens / statistics.median(scores),
        "peak_gib": max(rank["peak_gib"] for rank in ranks),
        "score_peak_gib": max(rank["score_peak_gib"] for rank in ranks),
        "exposed_share": mean["exposed_s"] / mean["step_s"],
        "communication_share": mean["communication_s"] / mean["step_s"],
        "compute_share": mean["compute_s"] / mean["step_s"],
        "profiles": [{key: p[key] for key in _SECONDS} for p in profiles],
        "longest_ms": profiles[0]["longest_ms"],
        "built_s": max(rank["built_s"] for rank in ranks),
    }


def _spread(ranks: Sequence[Found]) -> Found:
    found: Found = {}
    for way in ("planned", "dealt"):
        draws = list(zip(*(rank[way] for rank in ranks)))
        compute = [[rank["compute_s"] for rank in draw] for draw in draws]
        found[f"{way}_compute_s"] = compute
        found[f"{way}_max_to_mean"] = statistics.median(max(c) / statistics.mean(c) for c in compute)
        found[f"{way}_step_all_s"] = [max(rank["step_s"] for rank in draw) for draw in draws]
        found[f"{way}_step_s"] = statistics.median(found[f"{way}_step_all_s"])
    return found


def record(bench: Bench, results: Mapping[str, Found], scale: Scale) -> None:
    """Turn results into figures and measurements."""
    good = [case for case in results.values() if "failed" not in case]
    for case in (c for c in good if c["kind"] == "speed"):
        _record_speed(bench, case, good)
    for case in (c for c in good if c["kind"] == "spread"):
        where = f"{case['model']}.{case['gpus']}"
        for way in ("planned", "dealt"):
            bench.figure(f"spread.{way}.{where}", case[f"{way}_max_to_mean"], "x")
        slower = statistics.median(
            dealt / planned for dealt, planned in zip(case["dealt_step_all_s"], case["planned_step_all_s"])
        )
        bench.figure(f"spread.dealt_slower.{where}", slower, "x")
    bench.notes["spread_modelled"] = {f"{ranks} ranks": modelled("0.6b", ranks, scale) for ranks in _MODELLED}
    _record_whole(bench, {(c["model"], c["gpus"]): c for c in good if _is_plain_data(c)})


def _record_speed(bench: Bench, case: Found, good: Sequence[Found]) -> None:
    where = ".".join(str(case[key]) for key in ("model", "gpus", "layout", "way"))
    bench.measurements[where] = {
        kind: {"median_ms": case[f"{kind}_median_s"] * 1e3, "tokens_per_s": case[f"{kind}_tokens_per_s"]}
        for kind in ("step", "score")
    }
    for kind in ("step", "score"):
        bench.figure(f"{kind}.tokens_per_s.{where}", case[f"{kind}_tokens_per_s"], "tokens/s")
    bench.figure(f"peak.{where}", case["peak_gib"], "GiB")
    bench.figure(f"exposed.{where}", 100 * case["exposed_share"], "%")
    one = _like(good, case, gpus=1, layout="data")
    if one is not None and case["gpus"] > 1:
        ours = case["layout"] == "data" and case["way"] == HEADRACE
        goal = GOALS.get((case["model"], case["gpus"])) if ours else None
        for kind in ("step", "score"):
            key = f"{kind}_tokens_per_s"
            share = case[key] / case["gpus"] / one[key]
            bench.figure(f"{kind}.efficiency.{where}", share, "", at_least=goal if kind == "step" else None)
    data = _like(good, case, layout="data", way=HEADRACE)
    if data is not None and data is not case:
        _record_rates(bench, f"of_data.{where}", case, data)
    plain = _like(good, case, way=TRANSFORMERS)
    if plain is not None and case["way"] != TRANSFORMERS and case["layout"] == "data":
        _hold_equal(bench, where, case, plain)


def _hold_equal(bench: Bench, where: str, ours: Found, plain: Found) -> None:
    """Record how much faster headrace is than the plain way, and that both took the same first step."""
    _record_rates(bench, f"faster_than_plain.{where}", ours, plain)
    bench.figure(f"loss_apart.{where}", abs(ours["loss"] - plain["loss"]), "nats", at_most=LOSS_APART)
    apart = abs(ours["grad_norm"] / plain["grad_norm"] - 1)
    bench.figure(f"norm_apart.{where}", apart, "x", at_most=NORM_APART)


def _record_rates(bench: Bench, name: str, case: Found, other: Found) -> None:
    """Record the rate of one case in that of another."""
    for kind in ("step", "score"):
        key = f"{kind}_tokens_per_s"
        bench.figure(f"{kind}.{name}", case[key] / other[key], "x")


def _record_whole(bench: Bench, found: Mapping[tuple[str, int], Found]) -> None:
    """Hold the whole 8 B model to one GPU, whose seconds go on by the cost of a layer beyond 12."""
    if ("8b-6", 1) not in found or ("8b-12", 1) not in found:
        return
    six, twelve = found["8b-6", 1], found["8b-12", 1]
    for kind in ("step", "score"):
        per_token = [case[f"{kind}_median_s"] / case["tokens"] for case in (six, twelve)]
        layer = (per_token[1] - per_token[0]) / 6
        bench.figure(f"{kind}.us_per_token_and_layer.8b", layer * 1e6, "us")
        alone = 1 / (per_token[1] + 24 * layer)
        for (model, gpus), case in found.items():
            if model == "8b-36":
                share = case[f"{kind}_tokens_per_s"] / gpus / alone
                bench.figure(f"{kind}.efficiency_by_layers.{model}.{gpus}", share, "")


def _is_plain_data(case: Found) -> bool:
    return bool(case["kind"] == "speed" and case["layout"] == "data" and case["way"] == HEADRACE)


def _like(good: Sequence[Found], case: Found, **other: Any) -> Found | None:
    """Return the case that differs from another in these values."""
    wanted = {key: case[key] for key in ("model", "gpus", "layout", "way", "kind")} | other
    return next((c for c in good if all(c[key] == value for key, value in wanted.items())), None)

"""The trace of a run's routes: written step by step, checked from rollout to router, and explained where it differs.

A trace is a safetensors file per step. `rollout.*` are the step's samples: `tokens` (T,), `lengths` (N,), `routes`
(T, layers, k) as they were in the store, `digests` (N,) as the rollout computed them. `STAGE.*` are a stage's samples
in the order in which workers ran them: `tokens`, `lengths`, `given` (the rows handed to forwards), `used` (those that
routers used) and, of the stage that compares, `native` (those that they would have chosen).
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from headrace.config import RouterReplayConfig
from headrace.data_plane.route_binding import as_word, bound_digests, sample_salts
from headrace.data_plane.routes_codec import missing_mark, missing_rows
from headrace.data_plane.schema import INPUT_IDS, INPUT_LENGTHS, ROUTED_EXPERTS_FIELD
from headrace.distributed.ragged import RowLayout
from headrace.errors import ConfigError, ReplayError
from headrace.models.router_replay.diagnosis import RouteDifference, explain_misfit, find_difference
from headrace.models.router_replay.stats import TracedRows, join_rows, route_agreement
from headrace.utils import atomic
from headrace.utils.recipe import load_recipe
from headrace.utils.run_directory import RunDirectory, read_log

TRACED_SAMPLES = "router_replay/traced_samples"
"""The metric of a step that has a trace."""
TRACE_COLUMNS = (INPUT_IDS, INPUT_LENGTHS, ROUTED_EXPERTS_FIELD)
DEFAULT_FLOOR = RouterReplayConfig().min_exact_fraction

_MOST_CANDIDATES = 64
_MOST_STEPS = 8
_MEANING = {
    "shape": "the routes have another shape",
    "token_shift": "a shift by tokens",
    "layer_shift": "a shift by layers (a dense layer counted, or left out)",
    "renamed_experts": "renamed experts (physical in place of logical ids)",
    "stale": "stale rows (those of another sample)",
    "rows": "single rows",
}


@dataclass(frozen=True)
class RouteTrace:
    """One step: its samples' ids and digests, their rows in the store, and rows by stage.

    In `stored`, `given` and `used` are the same tensor.
    """

    step: int
    sample_ids: list[str]
    digests: torch.Tensor
    stored: TracedRows
    stages: dict[str, TracedRows]


class _Sample(NamedTuple):
    """One sample's tokens (L,) and routes (L - 1, layers, k)."""

    name: str
    tokens: tuple[int, ...]
    given: torch.Tensor
    used: torch.Tensor


def trace_of(
    step: int,
    sample_ids: Sequence[str],
    digests: torch.Tensor,
    columns: Mapping[str, torch.Tensor],
    stages: Mapping[str, Sequence[TracedRows]],
) -> RouteTrace:
    """Return the trace of a step from padded `TRACE_COLUMNS` and each stage's microbatches."""
    layout = RowLayout(columns[INPUT_LENGTHS], columns[INPUT_IDS].shape[1])
    routes = layout.strip(columns[ROUTED_EXPERTS_FIELD])
    stored = TracedRows(layout.strip(columns[INPUT_IDS]), layout.lengths, routes, routes)
    joined = {
        stage: join_rows(parts, torch.cat([p.lengths for p in parts]))
        for stage, parts in stages.items()
        if parts
    }
    return RouteTrace(step, list(sample_ids), digests, stored, joined)


def write_trace(directory: Path, trace: RouteTrace) -> Path:
    """Write a trace into `directory`, made if absent, and return its path."""
    stored = trace.stored
    tensors = {
        "rollout.tokens": stored.tokens,
        "rollout.lengths": stored.lengths,
        "rollout.routes": stored.given,
        "rollout.digests": trace.digests,
    }
    for stage, rows in trace.stages.items():
        tensors |= {f"{stage}.{part}": value for part, value in vars(rows).items() if value is not None}
    about = {"step": str(trace.step), "sample_ids": json.dumps(trace.sample_ids)}
    with atomic.naming(directory):
        directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"step_{trace.step:06d}.safetensors"
    atomic.write_bytes(path, save({name: t.contiguous() for name, t in tensors.items()}, about))
    return path


def read_trace(path: Path) -> RouteTrace:
    """Read what `write_trace` wrote."""
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata()
            parts: dict[str, dict[str, torch.Tensor]] = {}
            for name in file.keys():  # noqa: SIM118  (no iterator)
                stage, _, part = name.rpartition(".")
                parts.setdefault(stage, {})[part] = file.get_tensor(name)
        rollout = parts.pop("rollout")
        stored = TracedRows(rollout["tokens"], rollout["lengths"], rollout["routes"], rollout["routes"])
        stages = {stage: TracedRows(**tensors) for stage, tensors in sorted(parts.items())}
        return RouteTrace(
            int(about["step"]), json.loads(about["sample_ids"]), rollout["digests"], stored, stages
        )
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: not a trace of routes that can be read ({error})") from error


def check_run(run_dir: Path) -> list[str]:
    """Check every trace of a run, and that none is lost; return a line per step.

    Which steps were traced stands in metrics.jsonl, as a resumed run may trace some only. Without it, traces count from
    the first to the last step.

    Raises:
        ConfigError: no trace there, or a file that cannot be read.
        ReplayError: routes that changed on the way; names step, place, sample, token and layer, and the simplest
            cause that explains all of it. Recorded experts that the trainer's routers would too seldom choose. Or steps
            whose trace is lost.
    """
    run = RunDirectory(run_dir)
    paths = sorted(run.traces_dir.glob("step_*.safetensors"))
    if not paths:
        raise ConfigError(
            f"{run_dir}: no trace of routes; run with policy.router_replay.enabled=true and "
            "policy.router_replay.trace=true"
        )
    # A floor of 0 never stops a run; its trace is checked all the same.
    recipe = load_recipe(run.config_path, of_a_run=True) if run.config_path.exists() else None
    floor = (recipe and recipe.policy.router_replay.min_exact_fraction) or DEFAULT_FLOOR
    lines: dict[int, str] = {}
    earlier = None
    for path in paths:
        trace = read_trace(path)
        lines[trace.step] = check_trace(trace, floor=floor, earlier=earlier)
        earlier = trace.stored
    _check_complete(run, lines)
    return list(lines.values())


def _check_complete(run: RunDirectory, steps: Collection[int]) -> None:
    log = run.metrics_path
    lines = read_log(log) if log.exists() else ()
    recorded = {line.value["step"] for line in lines if TRACED_SAMPLES in line.value}
    lost = sorted((recorded or {*range(min(steps), max(steps))}).difference(steps))
    if lost:
        named = ", ".join(map(str, lost[:_MOST_STEPS])) + (", ..." if len(lost) > _MOST_STEPS else "")
        raise ReplayError(
            f"{run.traces_dir}: the traces of {len(lost)} steps are lost ({named}), so that their routes cannot be "
            f"checked; those of {len(steps)} steps are sound"
        )


def check_trace(trace: RouteTrace, *, floor: float = DEFAULT_FLOOR, earlier: TracedRows | None = None) -> str:
    """Check one step and say in one line what was compared.

    At least the fraction `floor` of the recorded experts has to be those that the trainer's routers chose, where a
    stage has compared them. `earlier` are the rows in the store of the step before.
    """
    stored = list(_samples(trace.stored, trace.sample_ids))
    _check_store(trace, stored)
    counts, fractions = [], ""
    for stage, rows in trace.stages.items():
        stage_name = f"step {trace.step}, stage '{stage}'"
        ran = list(_samples(rows, [f"row {i}" for i in range(len(rows.lengths))]))
        for sample, origin in zip(ran, _origins(stage_name, stored, ran)):
            where = f"{stage_name}, sample '{origin.name}'"
            _compare(f"{where}, rows handed to the forward", origin.given, sample.given, stored)
            _compare(f"{where}, rows that the routers used", sample.given, sample.used, stored)
        counts.append(f"{stage} {len(ran)}")
        fractions += _check_choices(stage_name, rows, floor, earlier)
    used = ", ".join(counts) or "none"
    return f"step {trace.step}: {len(stored)} samples as recorded; used as given: {used}{fractions}"


def _check_choices(where: str, rows: TracedRows, floor: float, earlier: TracedRows | None) -> str:
    """Require that a stage's recorded experts are the routers' own often enough, and say how often."""
    if rows.native is None:
        return ""
    stats = route_agreement(rows.given, rows.native, rows.counted)
    stats = replace(stats, rows=(rows,), earlier=() if earlier is None else (earlier,))
    if (misfit := explain_misfit(stats, floor)) is not None:
        raise ReplayError(f"{where}: {misfit}")
    fraction = stats.agreement().get("route_exact")
    return "" if fraction is None else f"; {fraction:.1%} are the routers' own choice"


def _samples(rows: TracedRows, names: Sequence[str]) -> Iterator[_Sample]:
    lengths = rows.lengths.tolist()
    parts = (torch.split(part, lengths) for part in (rows.tokens, rows.given, rows.used))
    for name, tokens, given, used in zip(names, *parts):
        # One token, as in a dummy microbatch, has no row: a sample's last token is left out.
        if len(tokens) > 1:
            yield _Sample(name, tuple(tokens.tolist()), given[:-1], used[:-1])


def _check_store(trace: RouteTrace, stored: Sequence[_Sample]) -> None:
    """Compare the rows in the store with the digests that the rollout computed."""
    digests = trace.digests[trace.stored.lengths > 1].tolist()
    for sample, expected in zip(stored, digests, strict=True):
        tokens = torch.tensor(sample.tokens[:-1], dtype=torch.int64)
        salt = sample_salts([sample.name])
        found = int(bound_digests(sample.given, tokens, torch.arange(len(tokens)), salt).sum())
        if found == expected:
            continue
        shared = ((s, min(len(s.given), len(sample.given))) for s in stored if s is not sample)
        twin = next((s for s, n in shared if n and torch.equal(s.given[:n], sample.given[:n])), None)
        cause = f"; its rows are those of sample '{twin.name}' (stale rows)" if twin is not None else ""
        raise ReplayError(
            f"step {trace.step}, store, sample '{sample.name}': the routes are not those that the rollout recorded "
            f"(transport): digest {as_word(found):016x}, expected {as_word(expected):016x}{cause}"
        )


def _origins(where: str, stored: Sequence[_Sample], ran: Sequence[_Sample]) -> list[_Sample]:
    """Return for each sample that ran the stored one that it is: equal tokens, and equal routes where there are."""
    left: dict[tuple[int, ...], list[_Sample]] = {}
    for sample in stored:
        left.setdefault(sample.tokens, []).append(sample)
    origins = []
    for sample in ran:
        candidates = left.get(sample.tokens)
        if not candidates:
            fault = "is not one of the step's samples" if candidates is None else "ran twice"
            raise ReplayError(f"{where}, {sample.name}: {fault}")
        best = next((c for c in candidates if torch.equal(c.given, sample.given)), candidates[0])
        candidates.remove(best)
        origins.append(best)
    missed = [s.name for rest in left.values() for s in rest]
    if missed:
        raise ReplayError(f"{where}: {len(missed)} samples did not run, first '{missed[0]}'")
    return origins


def _compare(where: str, expected: torch.Tensor, actual: torch.Tensor, others: Sequence[_Sample]) -> None:
    if expected.shape == actual.shape:
        lost = (missing_rows(actual) & ~missing_rows(expected)).nonzero()
        if len(lost):
            token, layer = lost[0].tolist()
            raise ReplayError(
                f"{where}: {len(lost)} rows have lost their routes, first token {token}, layer {layer}"
            )
    difference = find_difference(expected, actual)
    if difference is None:
        return
    if difference.kind == "rows":
        difference = _stale(expected, actual, others) or difference
    raise ReplayError(
        f"{where}: {_MEANING[difference.kind]}, first at token {difference.token}, layer {difference.layer} "
        f"({difference.rows} rows differ): {difference.detail}"
    )


def _stale(expected: torch.Tensor, actual: torch.Tensor, others: Sequence[_Sample]) -> RouteDifference | None:
    """Return the difference as that of stale rows, if another sample's rows explain it."""
    for other in others[:_MOST_CANDIDATES]:
        rows = torch.full_like(actual, missing_mark(actual.dtype))
        size = min(len(rows), len(other.given))
        rows[:size] = other.given[:size]
        found = find_difference(expected, actual, previous=rows)
        if found is not None and found.kind == "stale":
            return replace(found, detail=f"they are those of '{other.name}'")
    return None

"""A recorded trace of routes, checked: from rollout to store to forward to router, and where it first differs.

Equal all the way they may still be those of other tokens, if the engine's capture went wrong; so they are held to what
the trainer's routers choose, too.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace.algorithms.route_trace import TRACED_SAMPLES, RouteTrace, read_trace
from headrace.config import RouterReplayConfig
from headrace.data_plane.route_binding import bound_digests, sample_salts
from headrace.data_plane.routes_codec import missing_mark, missing_rows
from headrace.errors import ConfigError, ReplayError
from headrace.models.router_replay.agreement import add_agreements, route_agreement
from headrace.models.router_replay.choices import choices_of, explain_misfit
from headrace.models.router_replay.proof import Evidence, TracedRows
from headrace.models.router_replay.trace import RouteDifference, find_difference
from headrace.report import read_metrics
from headrace.utils.recipe import load_recipe
from headrace.utils.run_directory import RunDirectory

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
class _Sample:
    """One sample's tokens (L,) and routes (L - 1, layers, k)."""

    name: str
    tokens: tuple[int, ...]
    given: torch.Tensor
    used: torch.Tensor


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
    lines: dict[int, str] = {}
    floor, earlier = _floor(run), None
    for path in paths:
        trace = read_trace(path)
        lines[trace.step] = check_trace(trace, floor=floor, earlier=earlier)
        earlier = trace.stored
    _check_complete(run, lines)
    return list(lines.values())


def _floor(run: RunDirectory) -> float:
    """Return the run's share of exact choices, and the default where it has none or never stops."""
    if not run.config_path.exists():
        return DEFAULT_FLOOR
    return (
        load_recipe(run.config_path, of_a_run=True).policy.router_replay.min_exact_fraction or DEFAULT_FLOOR
    )


def _check_complete(run: RunDirectory, steps: Collection[int]) -> None:
    lost = sorted({*(_recorded_steps(run) or range(min(steps), max(steps)))}.difference(steps))
    if lost:
        named = ", ".join(map(str, lost[:_MOST_STEPS])) + (", ..." if len(lost) > _MOST_STEPS else "")
        raise ReplayError(
            f"{run.traces_dir}: the traces of {len(lost)} steps are lost ({named}), so that their routes cannot be "
            f"checked; those of {len(steps)} steps are sound"
        )


def _recorded_steps(run: RunDirectory) -> list[int]:
    if not run.metrics_path.exists() or not run.metrics_path.stat().st_size:
        return []
    return [record["step"] for record in read_metrics(run.path) if TRACED_SAMPLES in record]


def check_trace(trace: RouteTrace, *, floor: float = DEFAULT_FLOOR, earlier: TracedRows | None = None) -> str:
    """Check one step and say in one line what was compared.

    At least the share `floor` of the recorded experts has to be those that the trainer's routers chose, where a stage
    has compared them. `earlier` are the rows in the store of the step before.

    Raises:
        ReplayError: see `check_run`.
    """
    stored = list(_samples(trace.stored, trace.sample_ids))
    _check_store(trace, stored)
    counts, shares = [], ""
    for stage, rows in trace.stages.items():
        ran = list(_samples(rows, [f"row {i}" for i in range(len(rows.lengths))]))
        for sample, origin in zip(ran, _origins(trace.step, stage, stored, ran)):
            where = f"step {trace.step}, stage '{stage}', sample '{origin.name}'"
            _compare(f"{where}, rows handed to the forward", origin.given, sample.given, stored)
            _compare(f"{where}, rows that the routers used", sample.given, sample.used, stored)
        counts.append(f"{stage} {len(ran)}")
        shares += _check_choices(f"step {trace.step}, stage '{stage}'", rows, floor, earlier)
    used = ", ".join(counts) or "none"
    return f"step {trace.step}: {len(stored)} samples as recorded; used as given: {used}{shares}"


def _check_choices(where: str, rows: TracedRows, floor: float, earlier: TracedRows | None) -> str:
    """Hold a stage's recorded experts to the routers' own, and say their share."""
    if rows.native is None:
        return ""
    agreement = add_agreements(route_agreement(c.given, c.native) for c in choices_of([rows]))
    evidence = Evidence((rows,), () if earlier is None else (earlier,))
    misfit = explain_misfit(agreement, floor, evidence)
    if misfit is not None:
        raise ReplayError(f"{where}: {misfit}")
    share = None if agreement is None else agreement.metrics().get("route_exact")
    return "" if share is None else f"; {share:.1%} are the routers' own choice"


def _samples(rows: TracedRows, names: Sequence[str]) -> Iterator[_Sample]:
    lengths = rows.lengths.tolist()
    parts = (torch.split(part, lengths) for part in (rows.tokens, rows.given, rows.used))
    for name, tokens, given, used in zip(names, *parts):
        # One token, as in a filler microbatch, has no row: a sample's last token is left out.
        if len(tokens) > 1:
            yield _Sample(name, tuple(tokens.tolist()), given[:-1], used[:-1])


def _check_store(trace: RouteTrace, stored: Sequence[_Sample]) -> None:
    """Hold the rows in the store to the digests that the rollout computed."""
    digests = trace.digests[trace.stored.lengths > 1].tolist()
    for sample, expected in zip(stored, digests, strict=True):
        tokens = torch.tensor(sample.tokens[:-1], dtype=torch.int64)
        salt = sample_salts([sample.name])
        found = int(bound_digests(sample.given, tokens, torch.arange(len(tokens)), salt).sum())
        if found == expected:
            continue
        twin = next((s for s in stored if s is not sample and _same_rows(s.given, sample.given)), None)
        cause = f"; its rows are those of sample '{twin.name}' (stale rows)" if twin is not None else ""
        raise ReplayError(
            f"step {trace.step}, store, sample '{sample.name}': the routes are not those that the rollout recorded "
            f"(transport): digest {found & (2**64 - 1):016x}, expected {expected & (2**64 - 1):016x}{cause}"
        )


def _origins(step: int, stage: str, stored: Sequence[_Sample], ran: Sequence[_Sample]) -> list[_Sample]:
    """Return for each sample that ran the stored one that it is: equal tokens, and equal routes where there are.

    Raises:
        ReplayError: a sample that ran and is not one of the step's, one that ran twice, or one that did not run.
    """
    left: dict[tuple[int, ...], list[_Sample]] = {}
    for sample in stored:
        left.setdefault(sample.tokens, []).append(sample)
    origins = []
    for sample in ran:
        candidates = left.get(sample.tokens)
        if not candidates:
            fault = "is not one of the step's samples" if candidates is None else "ran twice"
            raise ReplayError(f"step {step}, stage '{stage}', {sample.name}: {fault}")
        best = next((c for c in candidates if torch.equal(c.given, sample.given)), candidates[0])
        candidates.remove(best)
        origins.append(best)
    missed = [s.name for rest in left.values() for s in rest]
    if missed:
        raise ReplayError(
            f"step {step}, stage '{stage}': {len(missed)} samples did not run, first '{missed[0]}'"
        )
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
            return RouteDifference(
                found.kind, found.token, found.layer, found.rows, f"they are those of '{other.name}'"
            )
    return None


def _same_rows(left: torch.Tensor, right: torch.Tensor) -> bool:
    size = min(len(left), len(right))
    return size > 0 and torch.equal(left[:size], right[:size])

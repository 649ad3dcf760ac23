"""The trace of one step's routes: a safetensors file with what was in the store and what every stage used.

`rollout.*` are the step's samples: `tokens` (T,), `lengths` (N,), `routes` (T, layers, k) as they were in the store,
`digests` (N,) as the rollout computed them. `STAGE.*` are a stage's samples in the order in which workers ran them:
`tokens`, `lengths`, `given` (the rows handed to forwards), `used` (those that routers used) and, of the stage that
compares, `native` (those that they would have chosen).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from headrace.data_plane.routes_codec import missing_mark
from headrace.data_plane.schema import INPUT_IDS, INPUT_LENGTHS, ROUTED_EXPERTS_FIELD
from headrace.distributed.ragged import RowLayout
from headrace.errors import ConfigError
from headrace.models.router_replay.proof import TracedRows
from headrace.utils import atomic

# The metric of a step that has a trace.
TRACED_SAMPLES = "router_replay/traced_samples"
TRACE_COLUMNS = (INPUT_IDS, INPUT_LENGTHS, ROUTED_EXPERTS_FIELD)
_ROLLOUT = "rollout"
_GIVEN, _USED, _NATIVE = "given", "used", "native"


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
    joined = {stage: _join(parts) for stage, parts in stages.items() if parts}
    return RouteTrace(step, list(sample_ids), digests, stored, joined)


def write_trace(directory: Path, trace: RouteTrace) -> Path:
    """Write a trace into `directory`, made if absent, and return its path."""
    stored = trace.stored
    tensors = {
        f"{_ROLLOUT}.tokens": stored.tokens,
        f"{_ROLLOUT}.lengths": stored.lengths,
        f"{_ROLLOUT}.routes": stored.given,
        f"{_ROLLOUT}.digests": trace.digests,
    }
    for stage, rows in trace.stages.items():
        tensors |= {f"{stage}.tokens": rows.tokens, f"{stage}.lengths": rows.lengths}
        tensors |= {f"{stage}.{_GIVEN}": rows.given, f"{stage}.{_USED}": rows.used}
        if rows.native is not None:
            tensors[f"{stage}.{_NATIVE}"] = rows.native
    about = {"step": str(trace.step), "sample_ids": json.dumps(trace.sample_ids)}
    with atomic.naming(directory):
        directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"step_{trace.step:06d}.safetensors"
    atomic.write_bytes(path, save({name: t.contiguous() for name, t in tensors.items()}, about))
    return path


def read_trace(path: Path) -> RouteTrace:
    """Read what `write_trace` wrote.

    Raises:
        ConfigError: not such a file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no iterator)
        routes = tensors[f"{_ROLLOUT}.routes"]
        stored = TracedRows(tensors[f"{_ROLLOUT}.tokens"], tensors[f"{_ROLLOUT}.lengths"], routes, routes)
        names = [name.removesuffix(f".{_USED}") for name in tensors if name.endswith(f".{_USED}")]
        stages = {stage: _stage_rows(tensors, stage) for stage in sorted(names)}
        ids = json.loads(about["sample_ids"])
        return RouteTrace(int(about["step"]), ids, tensors[f"{_ROLLOUT}.digests"], stored, stages)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: not a trace of routes that can be read ({error})") from error


def _stage_rows(tensors: Mapping[str, torch.Tensor], stage: str) -> TracedRows:
    tokens, lengths, given, used = (
        tensors[f"{stage}.{part}"] for part in ("tokens", "lengths", _GIVEN, _USED)
    )
    return TracedRows(tokens, lengths, given, used, tensors.get(f"{stage}.{_NATIVE}"))


def _join(parts: Sequence[TracedRows]) -> TracedRows:
    # Of a training stage without scoring, the microbatches before the first update compare, and no later ones.
    natives = [p.native if p.native is not None else _unknown(p.given) for p in parts]
    return TracedRows(
        torch.cat([p.tokens for p in parts]),
        torch.cat([p.lengths for p in parts]),
        torch.cat([p.given for p in parts]),
        torch.cat([p.used for p in parts]),
        torch.cat(natives) if any(p.native is not None for p in parts) else None,
    )


def _unknown(given: torch.Tensor) -> torch.Tensor:
    return torch.full_like(given, missing_mark(given.dtype))

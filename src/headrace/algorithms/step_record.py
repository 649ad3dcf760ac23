"""One step of a run in a folder: what it starts from and what it comes to, to be run again without an engine.

step.json              which step, versions, plan, and where its weights are
recipe.yaml            the run's recipe             replay.yaml    the same without store, cluster and displays
rollout_0.safetensors  columns of the samples of a round of rollouts
rollout_0.msgpack      what the driver knows of them
results.json, results.safetensors    loss, metrics, and the columns that the step computes
policy/, reference/    weights and optimizer before the step, unless they lie elsewhere
"""

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from pydantic import NonNegativeInt, PositiveInt, ValidationError

import headrace
from headrace.algorithms.column_files import SampleColumns
from headrace.algorithms.grpo import Session, StepResult
from headrace.config import ClusterConfig, DataPlaneConfig, LoggingConfig, RecipeConfig
from headrace.data_plane.interfaces import KVBatchMeta
from headrace.data_plane.object_codec import decode, encode
from headrace.data_plane.schema import (
    INPUT_LENGTHS,
    ROUTE_SALTS,
    SAMPLE_ID,
    SAMPLE_MASK,
    FieldSpec,
    Kind,
    Stage,
    added_fields,
)
from headrace.data_plane.wire import RowPacker, read_wire, wire_tensordict
from headrace.distributed.worker_groups import WorkerGroup
from headrace.errors import ConfigError
from headrace.models.policy.lm_policy import Policy
from headrace.models.policy.tq_policy import TQPolicy
from headrace.utils import atomic
from headrace.utils.checkpoints import Saved, damaged
from headrace.utils.json_text import read_json
from headrace.utils.recipe import dump_recipe

STEP_FILE, REPLAY_RECIPE, POLICY, REFERENCE = "step.json", "replay.yaml", "policy", "reference"
_METRICS, _COLUMNS = "results.json", "results.safetensors"
_FORMAT = 1
_REMEDY = "copy or record the step again"
_BESIDE = (SAMPLE_ID, ROUTE_SALTS)
"""Columns of a batch in memory that are made of others."""


class StepFacts(Saved):
    """What step.json holds.

    `policy` and `reference` are directories of weights, relative to the folder or absolute; None: those that the
    recipe builds. `error` is what the step ended with, where it came to no results. `plan` has, per replica, the
    samples in their order and the bounds of microbatches. `declared` are columns of the user's own.
    """

    format: PositiveInt
    step: PositiveInt
    error: str | None
    rounds: NonNegativeInt
    versions: dict[str, str]
    recorded_from: str
    policy: str | None
    reference: str | None
    model_is_folder: bool
    declared: list[dict[str, Any]]
    plan: list[dict[str, Any]]


@dataclass(frozen=True)
class Round:
    """A round of rollouts: its samples' columns, and the values and metrics that came with them."""

    samples: SampleColumns
    values: Mapping[str, Any]
    calls: Mapping[str, float]


@dataclass(frozen=True)
class Results:
    """What a step computes: metrics (loss and gradient norm among them), and columns of its samples."""

    metrics: dict[str, float]
    samples: SampleColumns

    def write(self, folder: Path) -> None:
        # JSON has no infinity and no NaN.
        metrics = {n: value if math.isfinite(value) else str(value) for n, value in self.metrics.items()}
        text = json.dumps({"versions": versions(), "metrics": metrics}, indent=1)
        atomic.write_text(folder / _METRICS, text)
        self.samples.write(folder / _COLUMNS)

    @classmethod
    def read(cls, folder: Path) -> "Results":
        """Read the results in a recorded step, or those that a replay has saved."""
        path = folder / _METRICS
        try:
            saved = read_json(path, remedy=_REMEDY)
            metrics = {name: float(value) for name, value in saved["metrics"].items()}
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ConfigError(
                f"{folder}: no {_METRICS} there; give a folder that headrace record-step or replay-step --save wrote"
            ) from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{path}: damaged; {_REMEDY}") from error
        return cls(metrics, SampleColumns.read(folder / _COLUMNS))


class RecordingRollouts(WorkerGroup):
    """Passes calls on to a group of rollout workers, and keeps the rows that they make for `policy`."""

    def __init__(self, inner: WorkerGroup, policy: Policy) -> None:
        self.inner, self.policy = inner, policy
        self.rounds: list[Round] = []
        self.dp_size, self.world_size = inner.dp_size, inner.world_size

    def run_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        results = self.inner.run_all(method, *args, **kwargs)
        self.transferred_bytes = self.inner.transferred_bytes
        if method == self.policy.rollout_call[0]:
            rows, values, _, calls = results[0]
            self.rounds.append(Round(_columns(self.policy, rows, ()), values, calls))
        return results

    def shutdown(self) -> None:
        self.inner.shutdown()


@dataclass
class ResultColumns:
    """Keeps the columns that a step computes of the rows of its `rounds`, and its plan."""

    policy: Policy
    rounds: Sequence[Round]
    samples: SampleColumns | None = None
    plan: list[dict[str, Any]] = field(default_factory=list)

    def take(self, rows: Any) -> None:
        given = {name for one in self.rounds for name in one.samples.columns}
        self.samples = _columns(self.policy, rows, given - {SAMPLE_MASK})
        self.plan = _plan(self.policy, rows)

    def results(self, step: StepResult) -> Results:
        assert self.samples is not None, "the step has come to its end"
        # Not those that depend on where rows lie.
        compared = {n: float(value) for n, value in step.metrics.items() if not n.startswith("data_plane/")}
        return Results(compared, self.samples)


def _columns(policy: Policy, rows: Any, without: Any) -> SampleColumns:
    """Return columns of rows, in the store or in memory, tokens without padding."""
    if isinstance(rows, KVBatchMeta):
        assert isinstance(policy, TQPolicy)
        assert rows.fields is not None
        ids, names = rows.sample_ids, [name for name in rows.fields if name not in without]
        return SampleColumns.of_leaves(ids, read_wire(policy.dp_client.get_data(rows, names)))
    kept = {name: column for name, column in rows.items() if name not in {*without, *_BESIDE}}
    leaves = read_wire(wire_tensordict(kept, rows.size))
    packer = RowPacker(rows[INPUT_LENGTHS])
    packed = {
        name: packer.pack(name, leaf) if isinstance(leaf, torch.Tensor) else leaf
        for name, leaf in leaves.items()
    }
    return SampleColumns.of_leaves(rows[SAMPLE_ID].tolist(), packed)


def _plan(policy: Policy, rows: Any) -> list[dict[str, Any]]:
    """Return how a training stage cuts the rows: per replica, samples and microbatches."""
    stored = isinstance(rows, KVBatchMeta)
    ids = rows.sample_ids if stored else rows[SAMPLE_ID].tolist()
    plan = policy.training_plan(rows.sequence_lengths if stored else rows[INPUT_LENGTHS].tolist())
    names = ("micro_batch_indices", "micro_batch_lengths")
    return [
        {
            "sample_ids": [ids[row] for row in plan.rank_rows(rank)],
            **{name: cut for name, cut in plan.rank_plan(rank).items() if name in names},
        }
        for rank in range(plan.ranks)
    ]


def versions() -> dict[str, str]:
    return {
        "headrace": headrace.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def replay_recipe(recipe: RecipeConfig) -> RecipeConfig:
    """Return what a replay needs of a recipe: rows in memory, workers on one machine, no displays."""
    policy = recipe.policy
    if policy.parallel.launcher == "ray":
        policy = policy.model_copy(
            update={"parallel": policy.parallel.model_copy(update={"launcher": "auto"})}
        )
    changes = {
        "policy": policy,
        "data_plane": DataPlaneConfig(enabled=False),
        "cluster": ClusterConfig(),
        "logging": LoggingConfig(samples_per_step=0),
    }
    return recipe.model_copy(update=changes)


def write_step(
    folder: Path,
    session: Session,
    facts: Mapping[str, Any],
    rounds: Sequence[Round],
    columns: ResultColumns,
    results: Results | None,
) -> None:
    """Write all files of a step but its weights; `facts` are those of `StepFacts` that only the caller knows."""
    recipe = session.recipe
    for number, one in enumerate(rounds):
        one.samples.write(folder / f"rollout_{number}.safetensors")
        known = {"values": dict(one.values), "calls": dict(one.calls)}
        atomic.write_bytes(folder / f"rollout_{number}.msgpack", encode(known))
    if results is not None:
        results.write(folder)
    atomic.write_text(folder / "recipe.yaml", dump_recipe(recipe))
    atomic.write_text(folder / REPLAY_RECIPE, dump_recipe(replay_recipe(recipe)))
    whole = StepFacts(
        format=_FORMAT,
        rounds=len(rounds),
        versions=versions(),
        model_is_folder=recipe.policy.model.path is not None and Path(recipe.policy.model.path).is_dir(),
        declared=[_written_spec(spec) for spec in added_fields()],
        plan=columns.plan,
        **facts,
    )
    atomic.write_text(folder / STEP_FILE, whole.model_dump_json(indent=1))


def read_facts(folder: Path) -> StepFacts:
    """Read step.json; a ConfigError says what is wrong with the folder."""
    path = folder / STEP_FILE
    try:
        facts = StepFacts.model_validate(read_json(path, remedy=_REMEDY))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(
            f"{folder}: no step.json there; give a folder that headrace record-step wrote"
        ) from error
    except ValidationError as error:
        raise damaged(path, error, "record the step again") from error
    if facts.format != _FORMAT:
        raise ConfigError(
            f"{path}: is of format {facts.format}, and this headrace reads {_FORMAT}; it was recorded by headrace "
            f"{facts.versions.get('headrace')}"
        )
    return facts


def read_rounds(folder: Path, count: int) -> list[Round]:
    rounds = []
    for number in range(count):
        path = folder / f"rollout_{number}.msgpack"
        try:
            known = decode(path.read_bytes())
            values, calls = known["values"], known["calls"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: missing or damaged; {_REMEDY}") from error
        rounds.append(Round(SampleColumns.read(folder / f"rollout_{number}.safetensors"), values, calls))
    return rounds


def _written_spec(spec: FieldSpec) -> dict[str, Any]:
    values = asdict(spec)
    values["dtype"] = None if spec.dtype is None else str(spec.dtype).removeprefix("torch.")
    values["accepts"] = sorted(str(dtype).removeprefix("torch.") for dtype in spec.accepts)
    values["consumers"] = sorted(spec.consumers)
    return values


def read_spec(values: Mapping[str, Any]) -> FieldSpec:
    """Return the declaration of a column as step.json has it."""
    changed = {
        "kind": Kind(values["kind"]),
        "dtype": None if values["dtype"] is None else getattr(torch, values["dtype"]),
        "accepts": frozenset(getattr(torch, name) for name in values["accepts"]),
        "producer": Stage(values["producer"]),
        "consumers": frozenset(map(Stage, values["consumers"])),
    }
    return FieldSpec(**{**values, **changed})

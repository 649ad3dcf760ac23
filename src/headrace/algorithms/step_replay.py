"""Runs a recorded step again, without an engine, a store or an environment, and compares what comes out."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import logging as hf_logging

from headrace.algorithms.column_files import SampleColumns
from headrace.algorithms.grpo import Session, run_step
from headrace.algorithms.own_code import build_loss
from headrace.algorithms.prompt_loader import PromptLoader
from headrace.algorithms.step_record import (
    REPLAY_RECIPE,
    ResultColumns,
    Results,
    Round,
    StepFacts,
    read_facts,
    read_rounds,
    read_spec,
)
from headrace.config import RecipeConfig
from headrace.data_plane.schema import SAMPLE_ID, declare
from headrace.data_plane.store.columns import Chunk
from headrace.distributed.columns import object_array
from headrace.distributed.worker_groups import WorkerGroup
from headrace.environments.interfaces import StepResult as Answer
from headrace.errors import ConfigError
from headrace.experience.types import Prompt
from headrace.models.automodel.setup import load_tokenizer
from headrace.models.policy.lm_policy import Policy
from headrace.utils.recipe import load_recipe
from headrace.utils.targets import extend_import_path
from headrace.utils.timer import Timer

_CHANGEABLE = ("policy", "loss", "grpo.advantage", "grpo.reward", "cpu_threads", "code_path")
"""Keys that act in a replay."""


class ReplayedRollouts(WorkerGroup):
    """Gives the recorded rounds, one by one, in place of workers that roll out."""

    dp_size = world_size = 1

    def __init__(self, rounds: Sequence[Round]) -> None:
        self._rounds = iter(rounds)

    def run_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        if method in ("moved_bytes", "make_way_for_training"):
            return [{}]
        one = next(self._rounds, None)
        if one is None:
            raise ConfigError(
                "the step asks for more rounds of rollouts than were recorded; leave out overrides that change rewards"
            )
        rows = one.samples.batch()
        rows[SAMPLE_ID] = object_array(list(one.samples.sample_ids))
        return [(rows, one.values, {}, dict(one.calls))]

    def shutdown(self) -> None:
        pass


class _NoEnvironment:
    """A step that is replayed asks nothing of its environment."""

    def prompts(self, split: str) -> list[Prompt]:
        return []

    def step(self, *args: Any, **kwargs: Any) -> list[Answer]:
        raise NotImplementedError


def replay_step(folder: Path, overrides: Sequence[str]) -> Results:
    """Run the step in `folder` again, with keys of its recipe changed, and return what comes out.

    Raises:
        ConfigError: a folder that holds no whole step, or an override that does not act in a replay.
        HeadraceError: the step fails, which it may have done when it was recorded.
    """
    facts = read_facts(folder)
    recipe = _recipe(folder, overrides, facts)
    declare(*map(read_spec, facts.declared))
    rounds = read_rounds(folder, facts.rounds)
    hf_logging.disable_progress_bar()
    policy = Policy(
        recipe.policy,
        recipe.generation,
        tokenizer=load_tokenizer(recipe.policy),
        seed=recipe.seed,
        with_reference=recipe.needs_reference,
        cluster=recipe.cluster,
    )
    with ExitStack() as closing:
        closing.callback(policy.shutdown)
        _load_weights(policy, recipe, folder, facts)
        prompts = PromptLoader([""], seed=0)
        session = Session(
            recipe, policy, ReplayedRollouts(rounds), _NoEnvironment(), prompts, build_loss(recipe)
        )
        columns = ResultColumns(policy, rounds)
        session.before_clearing = columns.take
        return columns.results(run_step(session, facts.step, Timer()))


def _recipe(folder: Path, overrides: Sequence[str], facts: StepFacts) -> RecipeConfig:
    for text in overrides:
        key = text.partition("=")[0]
        if not any(key == known or key.startswith(f"{known}.") for known in _CHANGEABLE):
            raise ConfigError(
                f"{text}: has no effect in a replay, where nothing is generated or stored; keys that have one begin "
                f"with {', '.join(_CHANGEABLE)}"
            )
    copied = folder / "policy" / "model"
    path = load_recipe(folder / REPLAY_RECIPE, of_a_run=True).policy.model.path
    gone = facts.model_is_folder and path is not None and not Path(path).exists()
    own = [f"policy.model.path={copied.absolute()}"] if gone and copied.is_dir() else []
    recipe = load_recipe(folder / REPLAY_RECIPE, [*own, *overrides], of_a_run=True)
    extend_import_path(recipe.code_path or ())
    if recipe.cpu_threads:
        torch.set_num_threads(recipe.cpu_threads)
    return recipe


def _load_weights(policy: Policy, recipe: RecipeConfig, folder: Path, facts: StepFacts) -> None:
    """Give a policy the weights that the step began with; the folder's own, or those that it points to."""
    places = {}
    for name, place in (("policy", facts.policy), ("reference", facts.reference)):
        places[name] = None if place is None else folder / place
        if place is not None and not (folder / place).is_dir():
            raise ConfigError(
                f"{folder / place}: not there, and the step starts from its weights; put the checkpoint back, or "
                "record the step without --no-weights"
            )
    if recipe.needs_reference:
        if places["reference"] is not None:
            policy.load_reference(places["reference"])
        else:
            policy.snapshot_reference()
    if places["policy"] is not None:
        policy.load_checkpoint(places["policy"])


@dataclass(frozen=True)
class ColumnGap:
    """How two results differ in a column: in how many samples, by how much at most, and where first.

    `token` is None where a sample has one value. Of objects, and of rows of other lengths, `largest` is infinite.
    """

    name: str
    samples: int
    largest: float
    sample_id: str | None = None
    token: int | None = None


def compare_columns(one: SampleColumns, other: SampleColumns) -> Iterator[ColumnGap]:
    """Yield how the columns that both have differ, sample by sample, by name.

    Raises:
        ConfigError: results of other samples.
    """
    place = {sample_id: row for row, sample_id in enumerate(other.sample_ids)}
    missing = [sample_id for sample_id in one.sample_ids if sample_id not in place]
    if missing or len(place) != len(one.sample_ids):
        odd = missing[0] if missing else next(iter(place.keys() - set(one.sample_ids)))
        raise ConfigError(
            f"the two results are not of the same samples: one of them lacks '{odd}'; compare replays of one step"
        )
    order = np.array([place[sample_id] for sample_id in one.sample_ids], np.int64)
    for name in sorted(one.columns.keys() & other.columns.keys()):
        yield _gap(name, one.sample_ids, one.columns[name], other.columns[name].shrunk(order))


def _gap(name: str, ids: Sequence[str], one: Chunk, other: Chunk) -> ColumnGap:
    lengths = [None if chunk.offsets is None else chunk.offsets.diff() for chunk in (one, other)]
    same_rows = (lengths[0] is None) == (lengths[1] is None) and one.form.trailing == other.form.trailing
    if lengths[0] is not None and lengths[1] is not None and same_rows:
        odd = (lengths[0] != lengths[1]).nonzero().flatten().tolist()
        if odd:
            return ColumnGap(name, len(odd), float("inf"), ids[odd[0]])
    if not same_rows:
        return ColumnGap(name, len(ids), float("inf"), ids[0])
    values, others = (
        chunk.values.flatten(1) if chunk.values.dim() > 1 else chunk.values[:, None] for chunk in (one, other)
    )
    differs = ~((values == others) | ((values != values) & (others != others)))  # NaN is as good as NaN
    places = differs.any(1).nonzero().flatten()
    if not len(places):
        return ColumnGap(name, 0, 0.0)
    gaps = (values.double() - others.double()).abs().nan_to_num(nan=float("inf"))
    largest = float("inf") if one.form.dtype is None else float(gaps[differs].max())
    if one.offsets is None:
        return ColumnGap(name, len(places), largest, ids[int(places[0])])
    rows = torch.searchsorted(one.offsets, places, right=True) - 1
    row = int(rows[0])
    token = int(places[0]) - int(one.offsets[row]) if one.form.dtype is not None else None
    return ColumnGap(name, len(set(rows.tolist())), largest, ids[row], token)


def metric_gaps(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Return the metrics of both, by name, that are not equal bit for bit."""
    both = {name: (one[name], other[name]) for name in one if name in other}
    return {n: (a, b) for n, (a, b) in both.items() if a != b and not (math.isnan(a) and math.isnan(b))}

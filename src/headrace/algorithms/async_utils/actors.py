"""The rollout actors of an asynchronous run, one for each collector, and the weights that they follow."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any

from headrace.algorithms.async_utils.replay_buffer import TRAINS
from headrace.algorithms.filtering import divide_groups
from headrace.algorithms.grpo import compared
from headrace.algorithms.rollout_table import RolloutTable
from headrace.config import DataPlaneConfig, RecipeConfig
from headrace.data_plane.interfaces import DataPlaneClient
from headrace.data_plane.schema import FieldSpec, added_fields
from headrace.distributed.worker_groups import LocalWorkerGroup, WorkerGroup, WorkerSpec
from headrace.distributed.worker_groups.interfaces import Reader
from headrace.environments.interfaces import Environment
from headrace.experience.collecting_actor import CollectingActor, Tags
from headrace.experience.live_generator import LiveGenerator
from headrace.experience.published_weights import PublishedWeights
from headrace.models.automodel.setup import resolve_device

Start = Callable[[WorkerSpec, str], WorkerGroup]
"""Starts a worker as a Ray actor, which messages call so."""
_AT_ONCE = 16


def build_actors(
    recipe: RecipeConfig, tokenizer: Any, environment: Environment, store: DataPlaneClient
) -> tuple[list[WorkerGroup], WorkerGroup]:
    """Return `async.collectors` actors in this process, each a group, and the group of their weights.

    They share `generation.engines`; more actors than engines share a generator. On GPUs all of them share one, since
    each generator takes the same GPUs for its engines. The first has the given tokenizer and environment, each of the
    others its own, since neither is safe in two threads.
    """
    collectors, weights = recipe.asynchrony.collectors, PublishedWeights()
    on_cpu = resolve_device(recipe.policy).type == "cpu"
    generators = min(collectors, recipe.generation.engines) if on_cpu else 1
    actors: list[CollectingActor] = []
    for index in range(collectors):
        parts: dict[str, Any] = {"dp_client": store}
        if index == 0:
            parts |= {"tokenizer": tokenizer, "environment": environment}
        if index >= generators:
            parts["generator"] = actors[index % generators].generator
        own = _with_part_of_engines(recipe, index, generators)
        actors.append(_collecting_actor(own, weights.newer_than, collectors > generators, **parts))
    return [LocalWorkerGroup(actor) for actor in actors], LocalWorkerGroup(weights)


def start_actors(
    recipe: RecipeConfig, dp_cfg: DataPlaneConfig | Mapping[str, Any], start: Start, start_keeper: Start
) -> tuple[list[WorkerGroup], WorkerGroup]:
    """Do the same with Ray actors, each with engines of its own: one at least."""
    collectors = recipe.asynchrony.collectors
    with ExitStack() as undo:
        weights = start_keeper(WorkerSpec(PublishedWeights), "the keeper of the weights")
        undo.callback(weights.shutdown)
        newer_than = weights.reader("newer_than")

        def start_one(index: int) -> WorkerGroup:
            own = _with_part_of_engines(recipe, index, collectors)
            spec = WorkerSpec(_attached_actor, (own, newer_than, dp_cfg, added_fields()))
            group = start(spec, f"rollout actor {index}")
            undo.callback(group.shutdown)
            return group

        with ThreadPoolExecutor(_AT_ONCE) as pool:  # each takes as long as its model's loading
            groups = list(pool.map(start_one, range(collectors)))
        undo.pop_all()
    return groups, weights


def _collecting_actor(
    recipe: RecipeConfig, newer_than: Reader, is_shared: bool = False, **parts: Any
) -> CollectingActor:
    """Build an actor that follows weights; `is_shared`: others use its generator, too."""
    actor, cfg = CollectingActor.from_recipe(recipe, **parts), recipe.asynchrony
    piece = cfg.piece_tokens if cfg.on_update == "resume" else None
    if not isinstance(actor.generator, LiveGenerator) and (is_shared or piece is not None):
        actor.generator = LiveGenerator(actor.generator, piece, keeps_cache=cfg.kv_cache == "keep")
    if recipe.grpo.dynamic_sampling.enabled:
        actor.judge = partial(_judged, recipe)
    actor.follow(newer_than)
    return actor


def _attached_actor(
    recipe: RecipeConfig,
    newer_than: Reader,
    dp_cfg: DataPlaneConfig | Mapping[str, Any],
    columns: Sequence[FieldSpec],
) -> CollectingActor:
    """Build an actor in a process of its own, which may be started again."""
    actor = _collecting_actor(recipe, newer_than)
    actor.setup_data_plane(dp_cfg, columns)
    return actor


def _judged(recipe: RecipeConfig, sample_ids: Sequence[str], tags: Tags) -> Tags:
    """Return tags that also say whether a step can learn from the row's group."""
    varied, _ = divide_groups(**compared(recipe, RolloutTable.from_tags(sample_ids, tags)))
    trains = set(chain.from_iterable(varied))
    return [{**tag, TRAINS: int(row in trains)} for row, tag in enumerate(tags)]


def _with_part_of_engines(recipe: RecipeConfig, index: int, parts: int) -> RecipeConfig:
    engines = recipe.generation.engines
    own = max(1, engines // parts + (index < engines % parts))
    return recipe.model_copy(update={"generation": recipe.generation.model_copy(update={"engines": own})})

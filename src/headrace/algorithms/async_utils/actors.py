"""The rollout actors of an asynchronous run in the driver's process, one for each collector."""

from functools import partial
from typing import Any

from headrace.config import RecipeConfig
from headrace.data_plane.interfaces import DataPlaneClient
from headrace.environments.interfaces import Environment
from headrace.experience.live_generator import LiveGenerator
from headrace.experience.sync_rollout_actor import SyncRolloutActor
from headrace.models.automodel.setup import resolve_device


def build_actors(
    recipe: RecipeConfig, tokenizer: Any, environment: Environment, store: DataPlaneClient
) -> list[SyncRolloutActor]:
    """Return `async.collectors` actors, which share `generation.engines`; more actors than engines share a generator.

    On GPUs all of them share one, since each generator takes the same GPUs for its engines. The first has the given
    tokenizer and environment, each of the others its own, since neither is safe in two threads.
    """
    cfg, engines = recipe.asynchrony, recipe.generation.engines
    generators = min(cfg.collectors, engines) if resolve_device(recipe.policy).type == "cpu" else 1
    piece = cfg.piece_tokens if cfg.on_update == "resume" else None
    actors: list[SyncRolloutActor] = []
    for index in range(cfg.collectors):
        own_tokenizer, own_environment = (tokenizer, environment) if index == 0 else (None, None)
        build = partial(SyncRolloutActor.from_recipe, tokenizer=own_tokenizer, environment=own_environment)
        if index >= generators:
            actors.append(build(recipe, dp_client=store, generator=actors[index % generators].generator))
            continue
        own = engines // generators + (index < engines % generators)
        generation = recipe.generation.model_copy(update={"engines": own})
        actor = build(recipe.model_copy(update={"generation": generation}), dp_client=store)
        if cfg.collectors > generators or piece is not None:
            actor.generator = LiveGenerator(actor.generator, piece)
        actors.append(actor)
    return actors

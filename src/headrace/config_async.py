"""The recipe's section `async`: making samples and training at the same time."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from headrace.utils.section import Section


class AsyncConfig(Section):
    """Samples are made while the policy trains, joined by the store alone (docs/asynchrony.md)."""

    enabled: bool = False
    """Make samples and train at the same time."""
    max_lag: NonNegativeInt = 1
    """Steps that the policy may have made since the weights that drew a sample's first token; 0: none, as without
    `async`."""
    on_stale: Literal["wait", "drop"] = "wait"
    """`wait`: a step trains on the groups made for it, and no answer begins that could become too old. `drop`: a step
    trains on whatever is ready, and what has become too old is dropped and counted."""
    sampler: str | None = None
    """A class of your own (`package.module:Name`), built with `max_lag`, in place of `on_stale`: it says when answers
    may begin, and which groups a step takes."""
    order: Literal["oldest", "freshest"] = "oldest"
    """Which of the ready groups a step takes first."""
    collectors: PositiveInt = 1
    """Collectors that make samples side by side. They share `generation.engines`; more collectors than engines score
    while others generate. On Ray each is an actor with an engine of its own at least."""
    prompts_per_call: PositiveInt | None = None
    """Prompts that a collector answers together; their groups are put together. None: a step's prompts, divided among
    the collectors."""
    room: PositiveInt | None = None
    """Groups that the store holds at most, those in training included; collectors wait for room. None: those of
    `max_lag` + 1 steps, and of one more with dynamic sampling."""
    on_update: Literal["finish", "resume"] = "finish"
    """What new weights mean for answers that are being made: they are finished with the old ones, or go on with the
    new ones."""
    piece_tokens: PositiveInt = 64
    """Tokens of an answer between two looks for new weights."""
    kv_cache: Literal["recompute", "keep"] = "recompute"
    """Keys and values of an answer that goes on with new weights: computed anew, or those of the weights that drew its
    tokens."""
    max_failures: NonNegativeInt = 3
    """Calls that may fail within a step; each is made again. One more ends the run."""
    lease_s: PositiveFloat = 1800.0
    """Seconds that a step's groups belong to the trainer, counted anew at each of its stages and while it waits for
    more."""
    micro_steps: PositiveInt = 1
    """Parts of a step's groups: each is scored and trained on when it is there, and the update waits for all. 1: the
    step waits for all its groups first."""
    validation: Literal["between", "beside"] = "between"
    """`between`: training waits for a validation. `beside`: it goes on."""


def room_of(recipe: Any) -> int:
    """Return how many groups the store holds at most."""
    cfg, grpo = recipe.asynchrony, recipe.grpo
    # With dynamic sampling, new groups are made beside those of a step that is not full.
    steps = cfg.max_lag + 1 + grpo.dynamic_sampling.enabled
    return int(cfg.room or grpo.num_prompts_per_step * steps)


def async_faults(recipe: Any) -> Iterator[str]:
    """Yield what the rest of a recipe has that an asynchronous run cannot work with."""
    cfg: AsyncConfig = recipe.asynchrony
    if not cfg.enabled:
        return
    grpo, loss, groups = recipe.grpo, recipe.loss, recipe.grpo.num_prompts_per_step
    if cfg.max_lag and loss.force_on_policy_ratio:
        yield (
            "loss.force_on_policy_ratio=true takes samples to be of the present weights, and async.max_lag="
            f"{cfg.max_lag} lets them be of older ones; switch it off, or set async.max_lag=0"
        )
    if cfg.max_lag and loss.importance_correction == "none":
        yield (
            f"async.max_lag={cfg.max_lag} trains on samples of older weights, which have to be weighed: set "
            "loss.importance_correction=tis (or icepop, sequence_mask), or async.max_lag=0"
        )
    if not recipe.uses_store:
        yield (
            "async.enabled=true joins collectors and trainer by the store; set data_plane.enabled=true or null, and "
            f"data_plane.impl=transfer_queue where policy.workers={recipe.policy.workers} is more than 1"
        )
    if cfg.prompts_per_call and groups % cfg.prompts_per_call:
        yield (
            f"async.prompts_per_call={cfg.prompts_per_call} does not divide grpo.num_prompts_per_step={groups}; "
            "change one of them"
        )
    if cfg.prompts_per_call is None and groups % cfg.collectors:
        yield (
            f"async.collectors={cfg.collectors} do not divide grpo.num_prompts_per_step={groups}; change one of them, "
            "or set async.prompts_per_call"
        )
    if cfg.room is not None and cfg.room < groups:
        yield (
            f"async.room={cfg.room} cannot hold the grpo.num_prompts_per_step={groups} groups of a step; raise it, or "
            "remove it"
        )
    elif cfg.room is not None and grpo.dynamic_sampling.enabled and cfg.room < 2 * groups:
        yield (
            f"async.room={cfg.room} with grpo.dynamic_sampling.enabled=true, where new groups are made beside those of "
            f"a step that is not full; set {2 * groups} or more, or remove it"
        )
    rows = room_of(recipe) * grpo.num_generations_per_prompt
    if recipe.uses_store and recipe.data_plane.storage_capacity < rows:
        yield (
            f"data_plane.storage_capacity={recipe.data_plane.storage_capacity} cannot hold the {rows} samples of "
            f"async.room={room_of(recipe)} groups; raise the first, or lower the second or async.max_lag"
        )
    if cfg.micro_steps > 1:
        yield from _part_faults(recipe)
    if cfg.on_update == "resume":
        yield from _resume_faults(recipe)


def _part_faults(recipe: Any) -> Iterator[str]:
    parts, groups, advantage = (
        recipe.asynchrony.micro_steps,
        recipe.grpo.num_prompts_per_step,
        recipe.grpo.advantage,
    )
    key = f"async.micro_steps={parts}"
    if groups % parts:
        yield f"{key} does not divide grpo.num_prompts_per_step={groups}; change one of them"
        return
    rows = recipe.samples_per_step // parts
    if recipe.samples_per_step != recipe.policy.train_global_batch_size:
        yield (
            f"{key} is one update in parts; set policy.train_global_batch_size={recipe.samples_per_step} (the samples "
            "of a step), or async.micro_steps=1"
        )
    mbs = recipe.policy.train_micro_batch_size * recipe.policy.replicas
    if recipe.policy.has_fixed_microbatches and rows % mbs:
        yield (
            f"{key} makes parts of {rows} samples, which are not divisible by {mbs} (policy.train_micro_batch_size x "
            "data-parallel replicas); change one of them, or switch on policy.sequence_packing or dynamic_batching"
        )
    if advantage.estimator == "reinforce_plus_plus" or advantage.target is not None:
        yield f"{key} takes advantages within groups; set grpo.advantage.estimator=grpo or rloo, or async.micro_steps=1"
    if recipe.policy.router_replay.enabled:
        yield f"{key}: router replay is checked over whole steps; switch one of them off"


def _resume_faults(recipe: Any) -> Iterator[str]:
    for key, is_set, why in (
        (
            "generation.stop_strings",
            bool(recipe.generation.stop_strings),
            "may lie across two pieces of an answer",
        ),
        (
            "policy.router_replay.enabled",
            recipe.policy.router_replay.enabled,
            "takes the routes of an answer whole",
        ),
    ):
        if is_set:
            yield f"async.on_update=resume: {key} {why}; remove it, or set async.on_update=finish"
    if recipe.asynchrony.kv_cache == "keep" and recipe.generation.backend != "vllm":
        yield (
            f"async.kv_cache=keep: generation.backend={recipe.generation.backend} keeps no keys and values between two "
            "pieces of an answer; set generation.backend=vllm, or async.kv_cache=recompute"
        )

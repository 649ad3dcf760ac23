"""The side that makes samples and validates the policy: generator, environment and store client in one process.

A worker group runs it, in the driver's process or as an actor of its own. One call rolls out and puts the rows; only
metadata comes back.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Self

import torch
from transformers.utils import logging as hf_logging

from headrace.config import DataPlaneConfig, RecipeConfig, ValidationConfig, ValidationSourceConfig
from headrace.data_plane.column_io import kv_first_write
from headrace.data_plane.factory import build_data_plane_client
from headrace.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from headrace.data_plane.schema import SAMPLE_ID, FieldSpec, declare
from headrace.data_plane.worker_mixin import bytes_moved
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.distributed.columns import object_array
from headrace.distributed.worker_groups.rank import Seat
from headrace.environments.interfaces import Environment
from headrace.environments.routed import RoutedEnvironment
from headrace.errors import ConfigError, DataPlaneError
from headrace.experience.chat import ChatTokenizer, render_prompt
from headrace.experience.flatten import PER_SAMPLE_KEYS, flatten, per_sample_values
from headrace.experience.metrics import ENGINES_LOST, rollout_metrics
from headrace.experience.probe import Probe, complete
from headrace.experience.prompt_room import prompts_that_fit
from headrace.experience.rollouts import RolloutSettings, run_rollouts
from headrace.experience.types import Prompt, Rollout
from headrace.experience.validation import measure, sets_of
from headrace.models.automodel.quantized_base import round_base
from headrace.models.automodel.setup import COMPUTE_DTYPES, load_model, load_tokenizer
from headrace.models.generation.build import build_generator
from headrace.models.generation.engine_generator import EngineGenerator
from headrace.models.generation.interfaces import Generator, SamplingParams
from headrace.models.generation.weight_group import WeightRoute
from headrace.models.generation.weights import Opening, WeightStream
from headrace.models.policy.launch import engine_room
from headrace.utils.seeding import derive_seed
from headrace.utils.targets import extend_import_path

TAGS = ("reward", "uid", "group_index", "weight_version", "weight_version_min", "truncated")
"""Per-sample values that are stamped on the meta, for filters."""
MADE_AT = "made_at_s"
"""A tag beside them: when the rows were written, in seconds since 1970."""

DriverCarry = dict[str, torch.Tensor | list[Any]]


class SyncRolloutActor:
    """Turns prompts into rows of the store, or, without a store, into samples in memory.

    The generator is released after every call that finishes generation, and after every error.

    Raises:
        ConfigError: `validation` is given, and the environment has no prompts for it.
    """

    def __init__(
        self,
        generator: Generator,
        tokenizer: ChatTokenizer,
        environment: Environment,
        settings: RolloutSettings,
        *,
        dp_client: DataPlaneClient | None = None,
        validation: ValidationConfig | None = None,
        validation_sets: Mapping[str, ValidationSourceConfig] | None = None,
        task_name: str = "train",
        seed: int = 0,
    ) -> None:
        self.generator = generator
        self.tokenizer = tokenizer
        self.settings = settings
        self._environment = environment
        self._dp_client = dp_client
        self._own_client: DataPlaneClient | None = None
        self._validation = validation
        held_out = environment.prompts("validation") if validation else []
        self._held_out = sets_of(
            held_out, validation_sets or {}, validation.max_samples if validation else None
        )
        self._task_name = task_name
        self._seed = seed
        self._steps = 0
        self._rounds = 0
        self._lost = 0.0
        """Engines that died in validations and probes, whose generator metrics nobody reads; the next rollout tells."""
        self._by_uid: dict[str, Prompt] = {}
        if validation and not all(one.prompts for one in self._held_out):
            raise ConfigError("the validation split has no prompts; raise data.validation_size")

    @classmethod
    def from_recipe(
        cls,
        recipe: RecipeConfig,
        tokenizer: ChatTokenizer | None = None,
        environment: Environment | None = None,
        dp_client: DataPlaneClient | None = None,
        generator: Generator | None = None,
        seats: Sequence[Seat] = (),
    ) -> Self:
        """Build all that is not given from a recipe; `seats` are those of the policy's ranks, if they are Ray actors.

        Raises:
            ConfigError: a model, environment or generator that the recipe gets wrong, or router replay with a
                generator that records no routes.
        """
        hf_logging.disable_progress_bar()
        extend_import_path(recipe.code_path or ())
        tokenizer = tokenizer or load_tokenizer(recipe.policy)
        environment = environment or prompts_that_fit(recipe, tokenizer)
        replays = recipe.policy.router_replay.enabled
        if generator is None:
            room = engine_room(recipe, seats)
            device = torch.device("cpu") if room else None  # this process needs the description alone
            model = load_model(recipe.policy, seed=recipe.seed, device=device)
            round_base(model, recipe.policy.lora, COMPUTE_DTYPES[recipe.policy.precision])
            generator = build_generator(recipe.generation, model, tokenizer, record_routes=replays, room=room)
        if replays and generator.route_shape is None:
            raise ConfigError(
                f"policy.router_replay.enabled=true, and generation.backend={recipe.generation.backend} records no "
                "routes; use one that does, or switch router replay off"
            )
        settings = RolloutSettings.from_recipe(recipe)
        return cls(
            generator,
            tokenizer,
            environment,
            settings,
            dp_client=dp_client,
            validation=recipe.validation,
            validation_sets=recipe.data.validation,
        )

    def setup_data_plane(
        self, cfg: DataPlaneConfig | Mapping[str, Any], columns: Sequence[FieldSpec] = ()
    ) -> None:
        """Attach to the store that the driver has started, with the columns that it declares there."""
        declare(*columns)
        self._dp_client = self._own_client = build_data_plane_client(cfg, bootstrap=False)

    def rollout_to_tq(
        self,
        input_batch: Sequence[Prompt] | Mapping[str, Any],
        *,
        partition_id: str,
        group_size: int = 1,
        first_iter: bool = True,
        finish_generation: bool = True,
        task_to_env_override: Mapping[str, Environment] | None = None,
        carry_keys: Sequence[str] | None = None,
        tag_keys: Sequence[str] = TAGS,
    ) -> tuple[KVBatchMeta, DriverCarry, dict[str, float], dict[str, float]]:
        """Roll out `group_size` samples per prompt and write them with one put, as the last thing it does.

        Args:
            input_batch: Prompts, or a mapping with `prompts` (or their uids in the training split) and, optionally,
                `seed`, `tag` (goes into the sample ids), `greedy`, `tags` (further tags by name, one value for each
                prompt) and `producer` (who writes; a call that is made again then writes no row twice). Without a
                seed, one is derived from the actor's seed and its count of calls.
            partition_id: An open partition of the store.
            group_size: Samples per prompt.
            first_iter: Whether the call begins a step; False for a refill of the same step.
            finish_generation: Whether the generator may free its caches; False if a refill may follow.
            task_to_env_override: Environments that judge the prompts whose `info["task"]` is their key.
            carry_keys: Names of the values to return; None for all.
            tag_keys: Names of the values that become tags.

        Returns:
            The meta, tagged with `tag_keys` and `MADE_AT`; the values of `flatten.per_sample_values`; metrics of the
            rollout; metrics of the generator. No tensor per token.

        Raises:
            ConfigError: a prompt without room for a completion, or an unknown key in `input_batch`, `carry_keys` or
                `tag_keys`.
            GenerationError, RewardError, SchemaError, DataPlaneError: see `run_rollouts`, `flatten` and the
                put. After any error the store is as it was before.
        """
        if self._dp_client is None:
            raise DataPlaneError("the rollout actor has no store; call setup_data_plane(cfg) first")
        _check_keys("carry_keys", carry_keys or ())
        _check_keys("tag_keys", tag_keys)
        self._steps += int(first_iter)
        self._rounds = 0 if first_iter else self._rounds + 1
        with ExitStack() as release_on_error:
            release_on_error.callback(self.generator.release)
            request = _request(input_batch)
            rollouts, calls = self._roll_out(request, group_size, task_to_env_override)
            if finish_generation:
                release_on_error.close()
            values = per_sample_values(rollouts)
            tags = _tags(values, tag_keys, request.get("tags", {}), group_size)
            meta = self._put(rollouts, tags, partition_id, request.get("producer"))
            release_on_error.pop_all()
        return meta, _carried(values, carry_keys), rollout_metrics(values), calls

    def _put(
        self,
        rollouts: Sequence[Rollout],
        tags: Sequence[Mapping[str, Any]],
        partition_id: str,
        producer: str | None,
    ) -> KVBatchMeta:
        assert self._dp_client is not None
        return kv_first_write(
            flatten(rollouts, route_shape=self.generator.route_shape, asked=self.settings.columns),
            sample_ids=[r.sample_id for r in rollouts],
            dp_client=self._dp_client,
            partition_id=partition_id,
            task_name=self._task_name,
            pad_to_multiple=self.settings.pad_to_multiple,
            tags=tags,
            routes_checked=True,  # by flatten
            producer=producer,
            once=producer is not None,
        )

    def rollout_in_memory(
        self,
        input_batch: Mapping[str, Any],
        *,
        group_size: int,
        finish_generation: bool = True,
        carry_keys: Sequence[str] | None = None,
    ) -> tuple[BatchedDataDict, DriverCarry, dict[str, float], dict[str, float]]:
        """Do the same without a store: the rows themselves come back, with their ids, tokens jagged."""
        with ExitStack() as release:
            release.callback(self.generator.release)
            rollouts, calls = self._roll_out(input_batch, group_size, None)
            if not finish_generation:
                release.pop_all()
        values = per_sample_values(rollouts)
        columns = flatten(rollouts, route_shape=self.generator.route_shape, asked=self.settings.columns)
        rows: BatchedDataDict = BatchedDataDict(columns)
        rows[SAMPLE_ID] = object_array([rollout.sample_id for rollout in rollouts])
        return rows, _carried(values, carry_keys), rollout_metrics(values), calls

    def make_way_for_training(self) -> None:
        """Let the generator free what an update brings back, which has to come before it generates again."""
        if isinstance(self.generator, EngineGenerator):
            self.generator.release(weights_follow=True)
        else:
            self.generator.release()

    def validate(self, seed: int) -> dict[str, float]:
        """Return accuracy and mean reward of greedy completions and, if configured, of sampled ones, by metric name.

        See `validation.measure`. The sampling seed depends on `seed` alone, so validations of one run draw the same
        numbers. Nothing is stored.
        """
        assert self._validation is not None, "no validation section was given"

        def roll_out(
            prompts: Sequence[Prompt], sampling: SamplingParams, samples: int, number: int, greedy: bool
        ) -> list[Rollout]:
            rollouts, calls = run_rollouts(
                prompts,
                generator=self.generator,
                tokenizer=self.tokenizer,
                environment=self._environment,
                settings=replace(self.settings, sampling=sampling),
                group_size=samples,
                seed=derive_seed(seed, "validation", number),
                greedy=greedy,
            )
            self._lost += calls.get(ENGINES_LOST, 0.0)
            return rollouts

        return measure(self._held_out, self._validation, self.settings.sampling, roll_out)

    def weight_route(self) -> WeightRoute | None:
        """Return how the policy's first rank sends its next weights straight to engines; None: by `update_weights`."""
        return self.generator.weight_route() if isinstance(self.generator, EngineGenerator) else None

    def update_weights(self, weights: Iterable[Any], version: int) -> None:
        """Give the generator what a policy's `weight_stream` yields."""
        items = iter(weights)
        opening: Opening = next(items)
        if opening.shapes is None:
            self.generator.update_weights(items, version)
            return
        stream = WeightStream(opening.shapes, items, is_routed=opening.is_routed)
        self.generator.update_weights(stream, version)

    def probe(
        self, num_prompts: int, others: Sequence[list[int]], *, max_new_tokens: int, seed: int, sampled: bool
    ) -> Probe:
        """Complete the first training prompts and `others` (token ids), greedily and, if asked, as the run samples."""
        most = min(max_new_tokens, self.settings.sampling.max_new_tokens)
        params = replace(
            self.settings.sampling, max_new_tokens=most, max_total_tokens=self.settings.max_total_tokens
        )
        task = [
            render_prompt(self.tokenizer, prompt.messages)
            for prompt in self._environment.prompts("train")[:num_prompts]
        ]
        prompts = [*task, *others]
        try:
            ways = [replace(params, greedy=True), *([params] if sampled else [])]
            answers = [complete(self.generator, prompts, way, seed) for way in ways]
        finally:
            self.generator.release()
        self._lost += sum(metrics.get("engines_lost", 0.0) for _, metrics in answers)
        return Probe(task, *(rows for rows, _ in answers))

    def moved_bytes(self) -> dict[str, int]:
        """Return the bytes by column that a store client of the actor's own has moved."""
        return bytes_moved(self._own_client) if self._own_client is not None else {}

    def shutdown(self) -> None:
        """Release the generator, and the store's client if it is this actor's own; may be called twice."""
        self.generator.shutdown()
        if self._own_client is not None:
            self._own_client.close()
            self._dp_client = self._own_client = None

    def _roll_out(
        self, request: Mapping[str, Any], group_size: int, overrides: Mapping[str, Environment] | None
    ) -> tuple[list[Rollout], dict[str, float]]:
        seed = request.get("seed")
        if seed is None:
            seed = derive_seed(self._seed, "rollout", self._steps, self._rounds)
        rollouts, calls = run_rollouts(
            [self._prompt(uid) if isinstance(uid, str) else uid for uid in request["prompts"]],
            generator=self.generator,
            tokenizer=self.tokenizer,
            environment=self._environment
            if not overrides
            else RoutedEnvironment(self._environment, overrides, default=self._environment),
            settings=self.settings,
            group_size=group_size,
            seed=seed,
            tag=request.get("tag"),
            greedy=request.get("greedy", False),
        )
        if ENGINES_LOST in calls:
            calls[ENGINES_LOST] += self._lost
            self._lost = 0.0
        return rollouts, calls

    def _prompt(self, uid: str) -> Prompt:
        if not self._by_uid:
            prompts = self._environment.prompts("train")
            self._by_uid = {prompt.uid: prompt for prompt in prompts}
            if len(self._by_uid) != len(prompts):
                raise ConfigError(
                    f"the training split has {len(prompts)} prompts under {len(self._by_uid)} uids; a rollout actor "
                    "finds prompts by uid: make them unique, or set cluster.rollout=driver"
                )
        return self._by_uid[uid]


def _request(input_batch: Sequence[Prompt] | Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(input_batch, Mapping):
        return {"prompts": input_batch}
    known = ("prompts", "seed", "tag", "greedy", "tags", "producer")
    unknown = [key for key in input_batch if key not in known]
    if unknown or "prompts" not in input_batch:
        fault = f"unknown key '{unknown[0]}'" if unknown else "missing key 'prompts'"
        raise ConfigError(f"input_batch: {fault}; known keys: {', '.join(known)}")
    return input_batch


def _check_keys(name: str, keys: Sequence[str]) -> None:
    for key in keys:
        if key not in PER_SAMPLE_KEYS:
            raise ConfigError(f"{name}: unknown key '{key}'; known: {', '.join(PER_SAMPLE_KEYS)}")


def _carried(values: DriverCarry, keys: Sequence[str] | None) -> DriverCarry:
    return values if keys is None else {key: values[key] for key in keys}


def _tags(
    values: DriverCarry, keys: Sequence[str], by_prompt: Mapping[str, Sequence[Any]], group_size: int
) -> list[dict[str, Any]]:
    columns = [v.tolist() if isinstance(v, torch.Tensor) else v for v in (values[name] for name in keys)]
    columns += [[value for value in given for _ in range(group_size)] for given in by_prompt.values()]
    made_at = {MADE_AT: time.time()}
    return [dict(zip((*keys, *by_prompt), row)) | made_at for row in zip(*columns, strict=True)]

"""The producer of a synchronous loop: one call rolls out, flattens and puts; only metadata comes back."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from headrace.data_plane.column_io import kv_first_write
from headrace.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from headrace.environments.interfaces import Environment, StepResult
from headrace.errors import ConfigError
from headrace.experience.chat import ChatTokenizer
from headrace.experience.flatten import PER_SAMPLE_KEYS, FlatBatch, flatten, per_sample_values
from headrace.experience.judging import checked_results
from headrace.experience.rollouts import RolloutBatch, RolloutSettings, run_rollouts
from headrace.experience.types import Message, Prompt
from headrace.models.interfaces import Generator
from headrace.utils.seeding import derive_seed

TAGS = ("reward", "uid", "group_index", "weight_version", "truncated")
"""Per-sample values that are stamped on the meta, for filters."""

DriverCarry = dict[str, torch.Tensor | list[Any]]


class SyncRolloutActor:
    """Turns prompts into rows of the store.

    Has no state but a count of its calls, so it runs in the driver's process or wrapped in an actor. The
    generator is released after every call that finishes generation, and after every error.
    """

    def __init__(
        self,
        generator: Generator,
        tokenizer: ChatTokenizer,
        environment: Environment,
        settings: RolloutSettings,
        *,
        dp_client: DataPlaneClient,
        task_name: str = "train",
        seed: int = 0,
    ) -> None:
        self._generator = generator
        self._tokenizer = tokenizer
        self._environment = environment
        self._settings = settings
        self._dp_client = dp_client
        self._task_name = task_name
        self._seed = seed
        self._steps = 0
        self._rounds = 0

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
    ) -> tuple[KVBatchMeta, DriverCarry, dict[str, float], dict[str, float]]:
        """Roll out `group_size` samples per prompt and write them with one put, as the last thing it does.

        Args:
            input_batch: Prompts, or a mapping with `prompts` and, optionally, `seed`, `tag` (goes into the
                sample ids) and `greedy`. Without a seed, one is derived from the actor's seed and its count
                of calls.
            partition_id: An open partition of the store.
            group_size: Samples per prompt.
            first_iter: Whether the call begins a step; False for a refill of the same step.
            finish_generation: Whether the generator may let go of its caches; False if a refill may follow.
            task_to_env_override: Environments that judge the prompts whose `info["task"]` is their key.
            carry_keys: Names of the values to return; None for all.

        Returns:
            The meta, tagged with `TAGS`; the values of `flatten.per_sample_values`; metrics of the rollout;
            metrics of the generator. No tensor per token.

        Raises:
            ConfigError: a prompt without room for an answer, or an unknown key in `input_batch` or
                `carry_keys`.
            GenerationError, RewardError, SchemaError, DataPlaneError: see `run_rollouts`, `flatten` and the
                put. After any error the store is as it was before.
        """
        _check_keys(carry_keys)
        self._count(first_iter)
        with ExitStack() as release_on_error:
            release_on_error.callback(self._generator.release)
            batch = self._roll_out(_request(input_batch), group_size, task_to_env_override or {})
            if finish_generation:
                release_on_error.close()
            values = per_sample_values(batch.rollouts)
            flat = flatten(batch.rollouts, route_shape=self._generator.route_shape)
            meta = self._put(flat, _tags(values), partition_id)
            release_on_error.pop_all()
        carry = {key: values[key] for key in (PER_SAMPLE_KEYS if carry_keys is None else carry_keys)}
        return meta, carry, batch.metrics, batch.generation_metrics

    def _count(self, first_iter: bool) -> None:
        self._steps += int(first_iter)
        self._rounds = 0 if first_iter else self._rounds + 1

    def _roll_out(
        self, request: Mapping[str, Any], group_size: int, overrides: Mapping[str, Environment]
    ) -> RolloutBatch:
        seed = request.get("seed")
        if seed is None:
            seed = derive_seed(self._seed, "rollout", self._steps, self._rounds)
        return run_rollouts(
            request["prompts"],
            generator=self._generator,
            tokenizer=self._tokenizer,
            environment=_Routed(self._environment, overrides) if overrides else self._environment,
            settings=self._settings,
            group_size=group_size,
            seed=seed,
            tag=request.get("tag"),
            greedy=request.get("greedy", False),
        )

    def _put(self, flat: FlatBatch, tags: list[dict[str, Any]], partition_id: str) -> KVBatchMeta:
        return kv_first_write(
            flat.columns(),
            sample_ids=flat.sample_ids,
            dp_client=self._dp_client,
            partition_id=partition_id,
            task_name=self._task_name,
            pad_to_multiple=self._settings.pad_to_multiple,
            tags=tags,
            routes_checked=True,  # by flatten
        )


class _Routed:
    """Sends each prompt to the environment of its task, or to a default one."""

    def __init__(self, default: Environment, by_task: Mapping[str, Environment]) -> None:
        self._default = default
        self._by_task = by_task

    def prompts(self, split: str) -> list[Prompt]:
        return self._default.prompts(split)

    def step(
        self, prompts: Sequence[Prompt], conversations: Sequence[Sequence[Message]], truncated: Sequence[bool]
    ) -> list[StepResult]:
        rows_by_task: dict[str | None, list[int]] = {}
        for row, prompt in enumerate(prompts):
            task = prompt.info.get("task")
            rows_by_task.setdefault(task if task in self._by_task else None, []).append(row)
        results: dict[int, StepResult] = {}
        for task, rows in rows_by_task.items():
            environment = self._default if task is None else self._by_task[task]
            judged = environment.step(
                [prompts[i] for i in rows],
                [conversations[i] for i in rows],
                truncated=[truncated[i] for i in rows],
            )
            names = [f"prompt '{prompts[i].uid}'" for i in rows]
            judged = checked_results(judged, names, who=f"the environment of task {task!r}")
            results.update(zip(rows, judged))
        return [results[row] for row in range(len(prompts))]


def _request(input_batch: Sequence[Prompt] | Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(input_batch, Mapping):
        return {"prompts": input_batch}
    known = ("prompts", "seed", "tag", "greedy")
    unknown = [key for key in input_batch if key not in known]
    if unknown or "prompts" not in input_batch:
        fault = f"unknown key '{unknown[0]}'" if unknown else "missing key 'prompts'"
        raise ConfigError(f"input_batch: {fault}; known keys: {', '.join(known)}")
    return input_batch


def _check_keys(carry_keys: Sequence[str] | None) -> None:
    for key in carry_keys or ():
        if key not in PER_SAMPLE_KEYS:
            raise ConfigError(f"carry_keys: unknown key '{key}'; known: {', '.join(PER_SAMPLE_KEYS)}")


def _tags(values: DriverCarry) -> list[dict[str, Any]]:
    columns = [v.tolist() if isinstance(v, torch.Tensor) else v for v in (values[name] for name in TAGS)]
    return [dict(zip(TAGS, row)) for row in zip(*columns)]

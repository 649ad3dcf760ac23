"""The collectors of a run, with the tickets, the weights and the buffer that join them to the trainer."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from headrace.algorithms.async_utils.dispatcher import Dispatcher, Plan
from headrace.algorithms.async_utils.replay_buffer import TRAINS, ReplayBuffer
from headrace.algorithms.async_utils.staleness_sampler import NEWEST, OLDEST, build_sampler
from headrace.algorithms.async_utils.weights import Weights
from headrace.algorithms.prompt_loader import PromptLoader
from headrace.algorithms.rollout_table import RolloutTable
from headrace.config import RecipeConfig
from headrace.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from headrace.distributed.worker_groups import LocalWorkerGroup, WorkerGroup
from headrace.errors import GeneratorLost, HeadraceError
from headrace.experience.collector import MADE_FOR, POSITION, Collector
from headrace.experience.live_generator import LiveGenerator
from headrace.experience.sync_rollout_actor import TAGS
from headrace.models.policy.results import Traffic
from headrace.utils.run_state import Progress

_LOOK_S = 0.5
"""How long a wait for groups lasts before it is looked whether the user wants to stop, or a collector has failed."""
_GRACE_S = 10.0
"""How long collectors may take to end a call when a run ends."""


class Producers:
    """Makes samples beside the trainer, from `start` to `close`; the trainer takes them step by step."""

    def __init__(
        self,
        recipe: RecipeConfig,
        client: DataPlaneClient,
        partition_id: str,
        prompts: PromptLoader,
        rollouts: Sequence[WorkerGroup],
        progress: Progress,
        weights: Weights | None = None,
    ) -> None:
        """Open the partition; `rollouts` are groups of one `CollectingActor`, each with a collector of its own.

        `weights` are those that the actors follow; None: they cannot be lost.
        """
        cfg = recipe.asynchrony
        plan = plan_of(recipe, progress)
        self.buffer = ReplayBuffer(client, partition_id, plan.sampler, recipe)
        self.buffer.open()
        plan = replace(plan, there=frozenset(self.buffer.positions_there()))
        self.tickets = Dispatcher(
            plan,
            prompts,
            self.buffer.wait_for_room,
            self.buffer.drop,
            most_rows=self.buffer.rows,
            max_failures=cfg.max_failures,
            collectors=len(rollouts),
        )
        self._weights = weights
        self._collectors = [
            Collector(
                f"collector-{index}",
                group,
                self.tickets,
                partition_id=partition_id,
                group_size=plan.group_size,
                tag_keys=dict.fromkeys([*TAGS, *RolloutTable.tag_keys()]),
                **({} if weights is None else {"has_weights": weights.are_there}),
            )
            for index, group in enumerate(rollouts)
        ]

    def start(self) -> None:
        for collector in self._collectors:
            collector.start()

    def publish(self, version: int) -> None:
        """Publish the policy's weights, and tell collectors of their version.

        Raises:
            HeadraceError: they were lost more often within a step than calls may fail.
        """
        if self._weights is not None:
            self._weights.publish(version, self._lost_weights)
        self.tickets.publish(version)

    def mend(self) -> None:
        """Publish the policy's weights again, if they are lost and it is still the one that had them."""
        if self.tickets.lacks_weights:
            self.publish(self.tickets.version)

    def recover(self, error: HeadraceError) -> None:
        """Let a call that failed be made again: count it, or wait for weights that `mend` publishes.

        Raises:
            HeadraceError: too many calls have failed within a step.
        """
        if self._weights is None or self._weights.are_there():
            self.count_failure(error)
        elif not self.tickets.wait_for_weights():
            raise error

    def _lost_weights(self, error: HeadraceError) -> None:
        self.tickets.count_restored()
        self.count_failure(error)

    def count_failure(self, error: HeadraceError) -> None:
        """Count a call that failed.

        Raises:
            HeadraceError: too many have within a step.
        """
        self.tickets.count_failure(error)
        if self.tickets.error is not None:
            raise self.tickets.error from error

    def take(
        self,
        step: int,
        groups: int,
        should_stop: Callable[[], bool] = lambda: False,
        held: Sequence[KVBatchMeta] = (),
    ) -> KVBatchMeta | None:
        """Wait for groups, and lease them to a step; drop what is too old for it. None: the user wants to stop.

        Meanwhile those that the step holds already stay leased.

        Raises:
            HeadraceError: no more can be made; what a collector raised.
        """
        while True:
            self.mend()
            self.buffer.renew(held)
            self.tickets.drop(step)
            rows = self.buffer.take(step, groups, _LOOK_S)
            if rows is not None:
                return rows
            if self.tickets.error is not None:
                raise self.tickets.error
            if should_stop():
                return None

    def used(self, taken: Sequence[KVBatchMeta]) -> None:
        """Note that rows have been trained on."""
        self.tickets.used(tag[POSITION] for rows in taken for tag in rows.tags or [])

    @contextmanager
    def quiet(self) -> Iterator[tuple[WorkerGroup, int]]:
        """Return a context in which a rollout actor is the caller's, with the newest weights; their version.

        It is the first one, or the next that has not lost its engines.
        """
        first = next((one for one in self._collectors if not one.has_retired), self._collectors[0])
        generator = _live_generator(first)
        with first.lock, nullcontext() if generator is None else generator.held():
            try:
                version = first.take_weights()
            except GeneratorLost as error:
                first.retire(error)
                raise
            yield first.rollouts, version

    def moved(self) -> Traffic:
        """Return what collectors have moved so far."""
        return sum((collector.moved for collector in self._collectors), Traffic())

    def take_metrics(self) -> dict[str, float]:
        return {**self.tickets.take_metrics(), **self.buffer.take_metrics()}

    def take_calls(self) -> list[tuple[str, float, float]]:
        """Return the calls that have ended since this was asked last: collector, begin by `time.time`, seconds."""
        return [(one.name, *one.calls.popleft()) for one in self._collectors for _ in range(len(one.calls))]

    def close(self) -> None:
        """End the collectors and clear the partition; a collector that is amid a call is given some seconds."""
        self.tickets.close()
        deadline = time.monotonic() + _GRACE_S
        for collector in self._collectors:
            collector.join(max(0.0, deadline - time.monotonic()))
        self.buffer.close()


def plan_of(recipe: RecipeConfig, progress: Progress) -> Plan:
    """Return the plan of a run that has come so far."""
    cfg, grpo = recipe.asynchrony, recipe.grpo
    return Plan(
        per_step=grpo.num_prompts_per_step,
        per_call=cfg.prompts_per_call or grpo.num_prompts_per_step // cfg.collectors,
        group_size=grpo.num_generations_per_prompt,
        seed=recipe.seed,
        first_step=progress.step + 1,
        position=progress.prompt_position,
        last_step=grpo.max_num_steps if cfg.sampler is None and cfg.on_stale == "wait" else None,
        trained=frozenset(progress.prompts_ahead),
        sampler=build_sampler(recipe),
    )


def worth_restoring(
    recipe: RecipeConfig, progress: Progress, then: Mapping[str, Any] | None = None
) -> Callable[[Mapping[str, Any]], bool]:
    """Return whether a run that goes on can train on a row of before, by the row's tags.

    Where steps train on the groups made for them, they are made again as they were, and with them the weights that drew
    later groups. Elsewhere groups of weights that the checkpoint does not know are left out. So are all groups where
    the recipe of `then` cut prompts in another way (some of a call would get the ids of others that are there), or had
    another rule of which groups a step takes (it might take none of them, and they would not be made again).
    """
    plan = plan_of(recipe, progress)
    is_cut_alike = then is None or _cut_of(then) == _cut_of(recipe.model_dump())

    def keep(tags: Mapping[str, Any]) -> bool:
        # A synchronous run's rows have no position, and without dynamic sampling groups are not judged.
        is_known = POSITION in tags and (TRAINS in tags or not recipe.grpo.dynamic_sampling.enabled)
        if not (is_known and is_cut_alike):
            return False
        position, made_for, version = tags[POSITION], tags[MADE_FOR], tags[OLDEST]
        if position < plan.position or position in plan.trained:
            return False
        if plan.in_order:
            return made_for == plan.made_for(position, 0) and plan.sampler.may_begin(made_for, version)
        return bool(tags[NEWEST] <= progress.step)

    return keep


def _cut_of(recipe: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return how many prompts a step has, and a call, and what says which groups a step takes."""
    cfg, grpo = recipe["async"], recipe["grpo"]
    per_step = grpo["num_prompts_per_step"]
    per_call = cfg["prompts_per_call"] or per_step // cfg["collectors"]
    return per_step, per_call, cfg["sampler"], cfg["on_stale"], grpo["dynamic_sampling"]


def _live_generator(collector: Collector) -> LiveGenerator | None:
    """Return the generator that a collector shares or that takes weights amid a call, if it has such a one."""
    group = collector.rollouts
    generator = group.worker.generator if isinstance(group, LocalWorkerGroup) else None
    return generator if isinstance(generator, LiveGenerator) else None

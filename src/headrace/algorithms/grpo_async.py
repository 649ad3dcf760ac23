"""Asynchronous GRPO: collectors make samples while the policy trains; the store alone joins them.

    collector:  ticket -> newest weights -> rollout -> put groups            (over and over, while there is room)
    trainer:    wait -> previous and reference logprobs -> advantages -> train -> publish weights      (each step)

What a step does with its rows is `grpo.learn`, as in the synchronous loop. Other than there are where the rows come
from, how old they may be, and how weights reach those who make them.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from headrace.algorithms.async_utils.producers import Producers
from headrace.algorithms.async_utils.replay_buffer import TRAINS, Staleness
from headrace.algorithms.async_utils.weights import Weights
from headrace.algorithms.grpo import (
    Collected,
    Part,
    Session,
    Stage,
    StepInterrupted,
    StepResult,
    finish,
    learn,
    loss_of,
    open_stage,
    prepare,
    score,
)
from headrace.algorithms.loop import Loop
from headrace.algorithms.rewards import check_rewards
from headrace.algorithms.rollout_table import RolloutTable
from headrace.algorithms.updates import check_finite
from headrace.data_plane.interfaces import KVBatchMeta
from headrace.errors import ConfigError, HeadraceError
from headrace.models.policy.tq_policy import TQPolicy
from headrace.utils.background import in_background
from headrace.utils.run_state import Metrics
from headrace.utils.timer import Timer

_LOOK_S = 0.5
"""How long a wait for a validation lasts before it is looked whether the weights have to be published again."""


def run_step(session: Session, producers: Producers, step: int, timer: Timer) -> StepResult:
    """Run step number `step` on groups that collectors have made.

    Raises:
        StepInterrupted: `should_stop` turned true before training began; groups that were taken are given back.
        ClaimExpired: a stage took longer than `async.lease_s`.
        HeadraceError: what a collector raised, or what `grpo.run_step` raises.
    """
    cfg, grpo, taken = session.recipe.asynchrony, session.recipe.grpo, list[KVBatchMeta]()
    stage = partial(_leased_stage, producers, taken, session, step, timer)

    def take() -> Collected:
        with stage("wait"):
            groups = grpo.num_prompts_per_step // cfg.micro_steps
            rows = producers.take(step, groups, session.should_stop, taken)
        if rows is None:
            raise StepInterrupted(f"stopped while step {step} waited for samples")
        taken.append(rows)
        return collect(session, rows, step)

    with producers.buffer.leased(taken):
        in_parts = partial(learn_in_parts, parts=cfg.micro_steps)
        result = (
            learn(session, step, take(), stage)
            if cfg.micro_steps == 1
            else in_parts(session, step, take, stage)
        )
    producers.used(taken)
    # A collector counts a call after its put, so that the calls of these rows are counted only by now.
    result.metrics.update(producers.take_metrics())
    if flat := producers.buffer.take_flat():
        result.metrics.update(_drawn(taken, flat))
    session.detail.beside(step, producers.take_calls())
    return result


def _drawn(taken: Sequence[KVBatchMeta], flat: Sequence[KVBatchMeta]) -> Metrics:
    """Return the metrics of all samples that were drawn, where dynamic sampling has dropped some."""
    tables = [RolloutTable.from_tags(rows.sample_ids, rows.tags or []) for rows in (*taken, *flat)]
    drawn = RolloutTable.join(tables)
    return {**drawn.drawn_metrics(), "async/flat_groups": float(len(flat))}


def learn_in_parts(
    session: Session, step: int, take: Callable[[], Collected], stage: Stage, *, parts: int
) -> StepResult:
    """Do what `learn` does with rows that come one part after the other: each is scored and trained on as it comes.

    The update waits for all of them. It is that of `learn` but for the last bits.
    """
    recipe, policy, ready = session.recipe, session.policy, list[Part]()
    assert isinstance(policy, TQPolicy)
    with ExitStack() as undo:
        undo.callback(policy.abort_train_step)  # which does nothing to a step that is finished
        policy.begin_train_step()
        for _ in range(parts):
            part = prepare(session, take(), stage)
            with stage("train"):
                policy.train_microbatches_from_meta(part.rows, loss_of(session))
            ready.append(part)
        rows = policy.join_rows([part.rows for part in ready])
        counts = any(part.scored.sample_mask.any() for part in ready)
        with stage("train"):
            trained = policy.finish_train_step(rows) if counts else None
            if trained is not None:
                check_finite(trained, recipe.loss.on_non_finite, f"step {step}")
    table = RolloutTable.join([part.table for part in ready])
    stats = {name: torch.cat([part.stats[name] for part in ready]) for name in ready[0].stats}
    scored = score(recipe, table, stats, torch.cat([part.weights for part in ready]))
    metrics = {**table.drawn_metrics(), **Staleness.of(rows, step).metrics(), **scored.metrics}
    return finish(session, ready, trained, metrics, {})


def collect(session: Session, rows: KVBatchMeta, step: int) -> Collected:
    """Return rows with what their tags say of them; refuse any that is older than the bound."""
    tags = rows.tags or []
    table, staleness = RolloutTable.from_tags(rows.sample_ids, tags), Staleness.of(rows, step)
    check_rewards(table.rewards, table.sample_ids)
    bound = session.recipe.asynchrony.max_lag
    if (oldest := max(staleness.lags)) > bound:
        sample_id = rows.sample_ids[staleness.lags.index(oldest)]
        raise HeadraceError(
            f"step {step}: the weights of sample '{sample_id}' are {oldest} steps old, and async.max_lag={bound}; "
            "async.sampler must not let a step take it"
        )
    metrics = {**table.drawn_metrics(), **staleness.metrics()}
    return Collected(rows, table, torch.tensor([float(tag.get(TRAINS, 1)) for tag in tags]), metrics)


@contextmanager
def _leased_stage(
    producers: Producers,
    taken: Sequence[KVBatchMeta],
    session: Session,
    step: int,
    timer: Timer,
    name: str,
) -> Iterator[None]:
    with open_stage(session, step, timer, name):
        producers.buffer.renew(taken)
        yield


class AsyncLoop(Loop):
    """The outer loop over asynchronous steps; weights of version v are those that v steps have made."""

    producers: Producers
    _beside: "Future[tuple[int, Metrics]] | None" = None
    """A validation that goes on beside training: the version that it measures, and what it found."""

    def run(self) -> bool:
        session, policy = self.session, self.session.policy
        assert isinstance(policy, TQPolicy)
        assert session.weights is not None
        self.producers = Producers(
            session.recipe,
            policy.dp_client,
            policy.tq_partition_id,
            session.prompts,
            (session.rollouts, *session.others),
            self.progress,
            Weights(policy.workers, session.weights),
        )
        session.moved = self.producers.moved
        with ExitStack() as ending:
            ending.callback(self.producers.close)
            self.producers.start()
            return super().run()

    def save(self) -> None:
        if not self.session.should_stop():  # a user who stops does not wait for it
            self._end_validation()
        super().save()

    def _mark(self) -> dict[str, list[int]] | None:
        # Groups are dropped at any time, and what was dropped by now must not be made again.
        with self.producers.tickets.without_drops():
            self._note_prompts()
            return super()._mark()

    def _run_step(self, step: int, timer: Timer) -> StepResult:
        if self._beside is not None and self._beside.done():
            self._end_validation()
        return run_step(self.session, self.producers, step, timer)

    def _update_weights(self, step: int) -> None:
        self.producers.publish(step)

    @contextmanager
    def _guarded(self, step: int) -> Iterator[None]:
        is_due = self._guard_due(step)
        yield
        if is_due and self.guard is not None:
            with self.producers.quiet() as (self.guard.rollouts, _):
                self.guard.compare(step)

    def _note_prompts(self) -> None:
        self.progress.prompt_position, self.progress.prompts_ahead = self.producers.tickets.progress()

    def _validate(self, timer: Timer) -> None:
        self._end_validation()
        is_edge = self.progress.step in (0, self.recipe.grpo.max_num_steps)
        if is_edge or self.recipe.asynchrony.validation == "between":
            super()._validate(timer)
            return
        self._beside = in_background(self._measured, "validation")

    def _measure(self) -> Metrics:
        return self._awaited(in_background(self._measured, "validation"))[1]

    def _measured(self) -> tuple[int, Metrics]:
        """Validate, until it succeeds or calls have failed too often; not in the thread that publishes weights."""
        while True:
            try:
                with self.producers.quiet() as (rollouts, version):
                    return version, self.session.validate(rollouts)
            except ConfigError:
                raise
            except HeadraceError as error:
                self.producers.recover(error)

    def _end_validation(self) -> None:
        """Wait for the validation that goes on, if there is one, and report it."""
        beside, self._beside = self._beside, None
        if beside is not None:
            self._take_validation(*self._awaited(beside))

    def _awaited(self, validation: "Future[tuple[int, Metrics]]") -> tuple[int, Metrics]:
        while not wait([validation], _LOOK_S).done:
            self.producers.mend()
        return validation.result()

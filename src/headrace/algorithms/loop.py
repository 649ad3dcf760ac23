"""The outer loop: steps, validation, checkpoints and safe stops, the same for every kind of step."""

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from headrace.algorithms.grpo import Session, StepInterrupted, StepResult, run_step
from headrace.algorithms.mismatch_guard import MismatchGuard
from headrace.algorithms.observer import UPDATE_BYTES, RunObserver, StepRecord
from headrace.algorithms.updates import idle_reason
from headrace.config import RecipeConfig
from headrace.data_plane.interfaces import DataPlaneClient
from headrace.data_plane.journal.client import journal_position, keep_since
from headrace.errors import ConfigError
from headrace.models.policy.lm_policy import Policy
from headrace.utils.checkpoints import CheckpointInfo, CheckpointManager
from headrace.utils.run_state import Metrics, Progress, PromptsState, RunState, read_state
from headrace.utils.timer import Timer

VALIDATION, UPDATE_WEIGHTS, CHECKPOINT = "validation", "update_weights", "checkpoint"
IDLE_STEPS = 10
"""Steps in a row without anything to learn after which a run says so (all steps, of a shorter run)."""


@dataclass
class Loop:
    """One run of GRPO steps, wherever their rows live."""

    session: Session
    observer: RunObserver
    progress: Progress
    prompts: PromptsState
    checkpoints: CheckpointManager | None = None
    guard: MismatchGuard | None = None
    # Seconds of the checkpoint after a step go into the next step's record.
    _saving: Timer = field(default_factory=Timer)
    _told_idle: bool = False

    @property
    def recipe(self) -> RecipeConfig:
        return self.session.recipe

    def run(self) -> bool:
        """Run to the last step; return False if the user stopped it before.

        Either way the newest checkpoint (if enabled) is of the last whole step.
        """
        total = self.recipe.grpo.max_num_steps
        with self._guarded(self.progress.step):
            self._update_weights(self.progress.step)
        # A run that was stopped in its first step has measured its first weights.
        is_due = self.progress.step == 0 and self.progress.first_validation is None
        if is_due and self.recipe.validation.at_start and not self.session.should_stop():
            self._validate(Timer())
            self.progress.first_validation = dict(self.progress.last_validation)
        completed = True
        while self.progress.step < total:
            try:
                self._one_step(self.progress.step + 1, total)
            except StepInterrupted:
                completed = False
                break
        # One that goes on where it is to end has measured other weights.
        has_measured = self.progress.last_validation_step == self.progress.step
        if completed and self.recipe.validation.at_end and not has_measured:
            self._validate(Timer())
        self.save()
        return completed

    def _one_step(self, step: int, total: int) -> None:
        timer = Timer()
        with self._guarded(step):
            started = time.perf_counter()
            result = self._run_step(step, timer)
            self.observer.on_stage(step, UPDATE_WEIGHTS)
            with timer.time(UPDATE_WEIGHTS), self._watched(UPDATE_WEIGHTS, step):
                self._update_weights(step)
            result.metrics[UPDATE_BYTES] = float(self.session.policy.sent_bytes)
            self.progress.train_seconds += time.perf_counter() - started
        self.progress.step = step
        self._note_prompts()
        if self._validation_due(step, total):
            self._validate(timer)
        # First the record, then the checkpoint: a crash between the two costs no line of the metrics.
        self._report(result, step, total, timer)
        self._watch_idleness(result.metrics, step, total)
        # The last step is saved by run().
        if step % self.recipe.checkpointing.save_period == 0 and step != total:
            self.save()

    # What another kind of step does otherwise.

    def _run_step(self, step: int, timer: Timer) -> StepResult:
        return run_step(self.session, step, timer)

    def _update_weights(self, step: int) -> None:
        """Give the generator the weights that so many steps have made."""
        update_weights(self.session)

    def _guarded(self, step: int) -> AbstractContextManager[None]:
        """Return a context around an update of the weights, which the guard watches where it is due."""
        return self.guard.around(step) if self.guard and self._guard_due(step) else nullcontext()

    def _note_prompts(self) -> None:
        """Note in the progress where the prompts of the next step begin."""
        at = self.progress.prompt_position = self.session.prompts.position
        self.progress.prompts_ahead = [ahead for ahead in self.progress.prompts_ahead if ahead >= at]

    def _measure(self) -> Metrics:
        return self.session.validate()

    def _guard_due(self, step: int) -> bool:
        return self.guard is not None and (step == self.progress.step or self.guard.due(step))

    def _watched(self, stage: str, step: int) -> AbstractContextManager[None]:
        return self.session.detail.stage(step, stage, self.session.policy)

    def _report(self, result: StepResult, step: int, total: int, timer: Timer) -> None:
        if result.samples:
            self.observer.on_samples(step, "train", result.samples)
        timings = {**timer.totals(), **self._saving.totals()}
        self._saving = Timer()
        metrics = {**result.metrics, **(self.guard.take_metrics() if self.guard else {})}
        self.observer.on_step(
            StepRecord(step, total, metrics, timings, result.tokens, result.bytes_by_column)
        )

    def _watch_idleness(self, metrics: Metrics, step: int, total: int) -> None:
        """Tell once when many steps in a row have taught the policy nothing."""
        updates = self.recipe.samples_per_step // self.recipe.policy.train_global_batch_size
        reason, progress = idle_reason(metrics, updates), self.progress
        progress.idle_steps += int(reason is not None)
        progress.idle_streak = 0 if reason is None else progress.idle_streak + 1
        if progress.idle_streak >= min(IDLE_STEPS, total) and not self._told_idle:
            self._told_idle = True
            self.observer.on_notice(
                step,
                f"the last {progress.idle_streak} steps taught the policy nothing: {reason}. The task may be too hard "
                "or too easy for it, or its rewards constant; look at the samples",
            )

    def _validation_due(self, step: int, total: int) -> bool:
        cfg = self.recipe.validation
        if step == total:
            return cfg.at_end
        return bool(cfg.period) and step % cfg.period == 0

    def _validate(self, timer: Timer) -> None:
        self.observer.on_stage(self.progress.step, VALIDATION)
        with timer.time(VALIDATION), self._watched(VALIDATION, self.progress.step):
            metrics = self._measure()
        self._take_validation(self.progress.step, metrics)

    def _take_validation(self, step: int, metrics: Metrics) -> None:
        self.observer.on_validation(step, metrics)
        cfg = self.recipe.checkpointing
        if cfg.enabled and cfg.metric is not None and cfg.metric not in metrics:
            raise ConfigError(
                f"checkpointing.metric={cfg.metric} is not measured: the environment says of no answer whether it is "
                f"right; choose one of {', '.join(metrics)}, or leave it out"
            )
        self.progress.last_validation, self.progress.last_validation_step = metrics, step

    def _mark(self) -> dict[str, list[int]] | None:
        """Return how far the store's journal has come, if it has one; the progress is of the same moment."""
        client: DataPlaneClient | None = getattr(self.session.policy, "dp_client", None)
        return None if client is None else journal_position(client)

    def save(self) -> None:
        """Write a checkpoint of the last whole step, unless there is one."""
        if self.checkpoints is None or not self.recipe.checkpointing.enabled:
            return
        latest = self.checkpoints.latest()
        if latest and latest.step == self.progress.step and not self._is_of_warm_start(latest):
            return
        self.observer.on_stage(self.progress.step, CHECKPOINT)
        with self._saving.time(CHECKPOINT), self._watched(CHECKPOINT, self.progress.step):
            position = self._mark()
            save_checkpoint(
                self.session.policy, self.checkpoints, self.recipe, self.progress, self.prompts, position
            )
        info = self.checkpoints.latest()
        if info is not None:
            self.observer.on_checkpoint(info.step, info.path)

    def _is_of_warm_start(self, latest: CheckpointInfo) -> bool:
        """Return whether a checkpoint was written in the middle of the supervised steps before step 1."""
        return read_state(latest).progress.warm_start_steps < self.progress.warm_start_steps


def update_weights(session: Session) -> None:
    """Give the side that makes samples the policy's weights."""
    policy = session.policy
    # By a route, tensors go from the policy's first rank straight to engines.
    (route,) = session.rollouts.run_all("weight_route")
    policy.workers.stream_to(
        session.rollouts, "weight_stream", "update_weights", policy.weight_version, given=(route,)
    )


def save_checkpoint(
    policy: Policy,
    checkpoints: CheckpointManager,
    recipe: RecipeConfig,
    progress: Progress,
    prompts: PromptsState,
    position: dict[str, list[int]] | None = None,
) -> None:
    """Write the policy and the state of the run as one checkpoint, whole or not at all.

    The state has a position of the store's journal (None: the present one), which then keeps what a restore needs.
    """
    client: DataPlaneClient | None = getattr(policy, "dp_client", None)
    if position is None and client is not None:
        position = journal_position(client)
    with checkpoints.writing(progress.step) as draft:
        policy.save_checkpoint(draft / "policy", with_optimizer=recipe.checkpointing.save_optimizer)
    metrics = progress.last_validation if progress.last_validation_step == progress.step else {}
    state = RunState(
        progress=progress, prompts=prompts, recipe=recipe.model_dump(mode="json"), journal=position
    )
    checkpoints.commit(progress.step, metrics, state.model_dump())
    if client is not None and position is not None:
        keep_since(client, position)

"""What `nemo_rl.algorithms.async_utils.trajectory_collector` names: rollouts beside training, into a buffer.

headrace's own asynchronous loop collects by itself; this collector serves loops of a caller's own.
"""

import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from headrace.compat.actors import ActorClass, call
from headrace.compat.prompt_groups import NEXT_NEMO_GYM_TASK_INDEX_KEY
from headrace.compat.turns import Talk
from headrace.errors import ConfigError, HeadraceError

_MAX_NEMO_GYM_STREAM_RETRIES = 3
_NEMO_GYM_RETRY_DELAY_BASE_SECONDS = 1.0
_REPLAY_BUFFER_MAX_BACKOFF_SECONDS = 0.5

_log = logging.getLogger("headrace.compat")


class AsyncTrajectoryCollector(ActorClass):
    """Rolls prompts of a data loader out into a buffer, for the steps of versions that are near.

    Weights of version v make trajectories for the steps v + 1 to v + `max_trajectory_age_steps`, the first weights also
    for their own. `master_config` is read for `grpo.num_prompts_per_step`, `.num_generations_per_prompt`,
    `.max_rollout_turns`, `.async_grpo.max_trajectory_age_steps`, and `policy.max_total_sequence_length`. Generator,
    environments and buffer may be actors; see `Talk` for what they are asked.

    Raises:
        ConfigError: teachers, which are not served.
    """

    def __init__(
        self,
        policy_generation: Any,
        tokenizer: Any,
        task_to_env: Mapping[str, Any],
        master_config: Mapping[str, Any],
        replay_buffer: Any,
        start_step: int = 0,
        teacher_worker_groups: Any = None,
        alias_to_group_alias: Any = None,
        on_policy_distillation_cfg: Any = None,
        next_nemo_gym_task_index: int = 0,
        processor: Any = None,
    ) -> None:
        if teacher_worker_groups or on_policy_distillation_cfg:
            raise ConfigError("teacher_worker_groups: distillation is not served; leave it out")
        grpo = master_config["grpo"]
        self._prompts, self._samples = grpo["num_prompts_per_step"], grpo["num_generations_per_prompt"]
        self._max_age = self._lead = int(grpo["async_grpo"]["max_trajectory_age_steps"])
        self._talk = Talk(
            policy_generation,
            tokenizer,
            task_to_env,
            grpo.get("max_rollout_turns") or 1,
            master_config["policy"]["max_total_sequence_length"],
        )
        self._waits_for_pending = not grpo["async_grpo"].get("in_flight_weight_updates", False)
        self._buffer, self._first = replay_buffer, start_step
        self._version, self._task_index = start_step, next_nemo_gym_task_index
        self._changed = threading.Condition()
        self._running, self._exhausted = True, False
        self._pending: set[Future[None]] = set()
        self._talking = 0  # groups of which conversations are under way
        self._begun: Counter[int] = (
            Counter()
        )  # groups by the step that they are made for, until they are in the buffer
        self._loader: Any = None
        self._thread: threading.Thread | None = None
        self._failures: list[BaseException] = []
        self._collected, self._busy_s, self._begun_s = 0, 0.0, time.monotonic()

    # What the trainer says.

    def set_weight_version(self, version: int) -> None:
        with self._changed:
            self._version = version
            self._changed.notify_all()

    def get_weight_version(self) -> int:
        return self._version

    def set_generation_window(
        self, *, weight_version: int, generation_lead_steps: int, max_trajectory_age_steps: int
    ) -> None:
        """Set the version, how many steps ahead of it trajectories are made, and how old they may be."""
        with self._changed:
            self._lead, self._max_age = generation_lead_steps, max_trajectory_age_steps
        self.set_weight_version(weight_version)

    def pause(self) -> None:
        """Begin no more rollouts."""
        with self._changed:
            self._running = False

    def resume(self) -> None:
        with self._changed:
            self._running = True
            self._changed.notify_all()

    def prepare_for_refit(self) -> None:
        """Pause; without `in_flight_weight_updates`, also wait for the conversations that have begun."""
        self.pause()
        if self._waits_for_pending:
            self.wait_for_pending_generations()

    def resume_after_refit(self) -> None:
        self.resume()

    def wait_for_pending_generations(self) -> None:
        """Wait until no conversation is under way; trajectories that wait for room in the buffer may still do so."""
        with self._changed:
            self._changed.wait_for(lambda: not self._talking)

    # What it tells.

    def is_data_exhausted(self) -> bool:
        """Return whether all prompts have been rolled out."""
        return self._exhausted and not self._pending

    def get_status(self) -> dict[str, Any]:
        return {
            "weight_version": self._version,
            "running": self._running,
            "data_exhausted": self.is_data_exhausted(),
            "pending_groups": len(self._pending),
            "collected_groups": self._collected,
            "failed_groups": len(self._failures),
        }

    def check_health(self) -> bool:
        """Return True, or raise what the first rollout that failed has raised."""
        if self._failures:
            raise HeadraceError(f"a rollout failed: {self._failures[0]!r}") from self._failures[0]
        return True

    def get_dataloader_state(self) -> dict[str, Any]:
        """Return what the data loader remembers; empty, if nothing."""
        state_dict = getattr(self._loader, "state_dict", None)
        return {} if state_dict is None else dict(state_dict())

    def get_efficiency_metrics(self) -> dict[str, float]:
        """Return how many groups have been made, the seconds spent on them by all threads, and groups per second."""
        elapsed = time.monotonic() - self._begun_s
        return {
            "collected_groups": float(self._collected),
            "rollout_seconds": self._busy_s,
            "groups_per_s": self._collected / elapsed if elapsed else 0.0,
        }

    async def drain_payload_metrics(self) -> list[dict[str, Any]]:
        """Return measures of media that were sent, of which there are none: they are not copied."""
        return []

    def get_rollouts_state(self) -> dict[str, int]:
        return {NEXT_NEMO_GYM_TASK_INDEX_KEY: self._task_index}

    # Collecting.

    def start_collection(self, dataloader: Any) -> None:
        """Roll the batches of a data loader out, in a thread; each is a batch of datums, or a list of them.

        Raises:
            ConfigError: it collects already.
        """
        if self._thread is not None and self._thread.is_alive():
            raise ConfigError("the collector has a data loader already; wait until is_data_exhausted()")
        self._loader, self._exhausted = dataloader, False
        self._thread = threading.Thread(target=self._collect, args=(dataloader,), daemon=True)
        self._thread.start()

    def _collect(self, dataloader: Any) -> None:
        prompts = (prompt for batch in dataloader for prompt in _datums(batch))
        try:
            with ThreadPoolExecutor(max_workers=self._prompts) as pool:
                for prompt in prompts:
                    version, target = self._begin_group()
                    future = pool.submit(self._roll_out, prompt, version, target)
                    with self._changed:
                        self._pending.add(future)
                    future.add_done_callback(self._done)
            self._exhausted = True
        finally:
            if (error := sys.exception()) is not None:
                self._failures.append(error)

    def _begin_group(self) -> tuple[int, int]:
        """Return the version that makes the next group, and the step that lacks it; wait while there is none."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._running)
                first = self._version + (self._version != self._first)
                consumed = call(self._buffer.get_last_target_weight_already_generated)
                for target in range(max(first, consumed + 1), self._version + self._lead + 1):
                    lacks = call(self._buffer.get_trajectories_needed, target, self._prompts, self._max_age)
                    if lacks > self._begun[target]:
                        self._begun[target] += 1
                        self._talking += 1
                        return self._version, target
                self._changed.wait(timeout=_REPLAY_BUFFER_MAX_BACKOFF_SECONDS)

    def _roll_out(self, prompt: Mapping[str, Any], version: int, target: int) -> None:
        start = time.monotonic()
        trajectory = None
        try:
            trajectory = self._talk.about(prompt, self._samples)
        finally:
            with self._changed:
                self._busy_s += time.monotonic() - start
                self._begun[target] -= trajectory is None  # it failed
                self._talking -= 1
                self._changed.notify_all()
        pause_s = 0.01
        while not self._put(trajectory, version, target):
            if not threading.main_thread().is_alive():
                return  # nobody will take from the buffer, and the process waits for this thread
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _REPLAY_BUFFER_MAX_BACKOFF_SECONDS)

    def _put(self, trajectory: dict[str, Any], version: int, target: int) -> bool:
        with self._changed:  # counted as begun or in the buffer, never as both
            if call(self._buffer.add, trajectory, version, target) == "full":
                return False
            self._begun[target] -= 1
            return True

    def _done(self, future: "Future[None]") -> None:
        error = future.exception()
        with self._changed:
            self._pending.discard(future)
            if error is None:
                self._collected += 1
            else:
                self._failures.append(error)
                _log.error("a rollout failed: %r", error)
            self._changed.notify_all()


def _datums(batch: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the prompts of a batch: of columns, or of a list of datums."""
    if not isinstance(batch, Mapping):
        yield from batch
        return
    for row in range(len(batch["message_log"])):
        yield {name: column[row] for name, column in batch.items()}

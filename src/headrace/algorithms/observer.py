"""What a training loop tells the outside: one record per step, and events between.

A loop calls an observer and knows nothing of terminals or files. The names of the metrics that displays and
reports look for stand here; a loop may report others.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.experience import metrics

REWARD = "reward/mean"
LOSS = "train/loss"
GRAD_NORM = "train/grad_norm"
GREEDY_ACCURACY, SAMPLED_ACCURACY = metrics.GREEDY_ACCURACY, metrics.SAMPLED_ACCURACY
GREEDY_REWARD, SAMPLED_REWARD = metrics.GREEDY_REWARD, metrics.SAMPLED_REWARD
TOKENS_PER_S = metrics.TOKENS_PER_S
GENERATION_KL = "mismatch/generation_kl"
ROUTE_AGREEMENT = "router_replay/route_exact"
LAG, FAILED_CALLS, COLLECTORS_WAIT_S = "async/lag_mean", "async/failed_calls", "async/collectors_wait_s"
UPDATE_BYTES = "weights/update_bytes"
BEST_BY = (GREEDY_ACCURACY, GREEDY_REWARD, SAMPLED_ACCURACY, SAMPLED_REWARD)
"""What the best checkpoint is best at, where the recipe does not say: the first of these that is measured."""

STAGES = (
    "rollout",
    "wait",
    "prev_logprobs",
    "reference_logprobs",
    "advantages",
    "train",
    "update_weights",
    "validation",
    "checkpoint",
)
"""The stages of a step, in the order in which they run; an asynchronous one waits in place of its rollout."""


@dataclass(frozen=True)
class StepRecord:
    """One finished step. Steps count from 1.

    `timings_s` has the seconds of each stage that ran (names of `STAGES`); `tokens` counts the tokens of the
    step's samples; `bytes_by_column` has the bytes that went through the data plane in this step.
    """

    step: int
    total_steps: int
    metrics: dict[str, float]
    timings_s: dict[str, float]
    tokens: int
    bytes_by_column: dict[str, int]
    phase: str = "grpo"

    def flat(self) -> dict[str, float]:
        """Return all numbers by one name each: metrics, `tokens`, `time_s/STAGE`, `bytes/COLUMN`."""
        times = {f"time_s/{stage}": seconds for stage, seconds in self.timings_s.items()}
        sizes = {f"bytes/{column}": size for column, size in self.bytes_by_column.items()}
        return {**self.metrics, "tokens": self.tokens, **times, **sizes}


class RunObserver:
    """Is told what a run does, in the order in which it happens; a subclass overrides what it wants to know."""

    def on_start(self, *, total_steps: int, first_step: int, info: dict[str, str]) -> None:
        """The loop is ready; `first_step` is the next to run, 1 for a fresh run; `info` describes the run."""

    def on_phase(self, name: str, total: int) -> None:
        """A phase of `total` steps before the first step begins, for example `warm_start`."""

    def on_phase_progress(self, name: str, done: int, metrics: dict[str, float]) -> None:
        """`done` steps of a phase are over."""

    def on_stage(self, step: int, stage: str) -> None:
        """A stage of a step begins, one of `STAGES`."""

    def on_step(self, record: StepRecord) -> None:
        """A step is over."""

    def on_validation(self, step: int, metrics: dict[str, float]) -> None:
        """The model after `step` steps was validated; step 0 is the model before the first."""

    def on_samples(self, step: int, split: str, samples: list[dict[str, Any]]) -> None:
        """Some samples of a step, as samples.jsonl has them."""

    def on_detail(self, step: int, kind: str, values: dict[str, Any]) -> None:
        """Something of the inside of a step, for displays: see `algorithms.step_detail`.

        `begin`: a stage has begun; `span`: who worked how long; `store`: what a stage has left there; `packing`: the
        microbatches of training.
        """

    def on_checkpoint(self, step: int, path: Path) -> None:
        """A checkpoint is whole."""

    def on_notice(self, step: int, message: str) -> None:
        """Something of the run that a person should know, after `step` steps; the run goes on."""

    def on_finish(self, summary: dict[str, Any]) -> None:
        """The run is over; not called for one that was interrupted."""

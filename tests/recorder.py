"""An observer that keeps everything, and a stopper that never stops or stops after a number of questions."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from headrace.algorithms.observer import StepRecord
from headrace.utils.interrupt import InterruptFlag


class Recorder:
    """Keeps what a run reports."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.samples: list[Any] = []
        self.validations: list[tuple[int, dict[str, float]]] = []
        self.checkpoints: list[Path] = []
        self.phases: list[tuple[str, int]] = []
        self.notices: list[tuple[int, str]] = []
        self.details: list[tuple[int, str, dict[str, Any]]] = []
        self.summary: dict[str, Any] = {}

    def on_start(self, *, total_steps: int, first_step: int, info: dict[str, str]) -> None:
        pass

    def on_phase(self, name: str, total: int) -> None:
        self.phases.append((name, total))

    def on_phase_progress(self, name: str, done: int, metrics: dict[str, float]) -> None:
        self.phases.append((name, done))

    def on_stage(self, step: int, stage: str) -> None:
        pass

    def on_step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def on_validation(self, step: int, metrics: dict[str, float]) -> None:
        self.validations.append((step, metrics))

    def on_samples(self, step: int, split: str, samples: list[dict[str, Any]]) -> None:
        self.samples.append((step, split, samples))

    def on_detail(self, step: int, kind: str, values: dict[str, Any]) -> None:
        self.details.append((step, kind, values))

    def on_checkpoint(self, step: int, path: Path) -> None:
        self.checkpoints.append(path)

    def on_notice(self, step: int, message: str) -> None:
        self.notices.append((step, message))

    def on_finish(self, summary: dict[str, Any]) -> None:
        self.summary = summary


class NeverStop(InterruptFlag):
    """The user never asks to stop: outside of a `with`, it looks at no signal."""


class StopAfter(InterruptFlag):
    """The user asks to stop after the loop has looked `questions` times."""

    def __init__(self, questions: int) -> None:
        super().__init__()
        self.left = questions

    def is_set(self) -> bool:
        self.left -= 1
        return self.left < 0

    def at_once(self) -> AbstractContextManager[None]:
        return nullcontext()

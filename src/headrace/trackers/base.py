"""What trackers share: events as flat numbers and rows, and failures that never stop a run."""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from headrace.algorithms.observer import RunObserver, StepRecord
from headrace.progress import CompositeObserver
from headrace.utils import atomic
from headrace.utils.recipe import leaves

logger = logging.getLogger(__name__)


class Tracker(RunObserver):
    """An observer that gets a run's events in four forms; a subclass overrides what it can show.

    `settings` is the resolved recipe, nested; a run by recipe sets it before the first event. With `id_file`, the id
    that a service gives the run is kept there, so that a run that is continued stays one.
    """

    def __init__(self, *, settings: Mapping[str, Any] | None = None, id_file: Path | None = None) -> None:
        self.settings = dict(settings or {})
        self._id_file = id_file
        self._summary: Mapping[str, Any] | None = None
        self._begun = False

    def begin(self, settings: Mapping[str, Any], first_step: int) -> None:
        """The first event. `settings` has dotted keys, and values that are numbers, truth values or text."""

    def log(self, values: Mapping[str, float], step: int, phase: str = "") -> None:
        """Finite numbers after `step` steps, of training and validation, or of a `phase` that counts its own."""

    def log_samples(self, rows: list[dict[str, Any]], step: int, split: str) -> None:
        """Samples as `sample_row` gives them."""

    def end(self, summary: Mapping[str, Any] | None) -> None:
        """The last event; no summary: the run was stopped, or has failed."""

    def known_id(self) -> str | None:
        """Return the id under which an earlier part of this run is known."""
        if self._id_file is None or not self._id_file.exists():
            return None
        return self._id_file.read_text(encoding="utf-8").strip() or None

    def keep_id(self, id: str) -> None:
        if self._id_file is not None:
            atomic.write_text(self._id_file, f"{id}\n")

    def on_start(self, *, total_steps: int, first_step: int, info: dict[str, str]) -> None:
        flat = {key: _setting(value) for key, value in leaves(self.settings)}
        self.begin(flat or dict(info), first_step)
        self._begun = True

    def on_phase_progress(self, name: str, done: int, metrics: dict[str, float]) -> None:
        self.log(_finite({f"{name}/{key}": value for key, value in metrics.items()}), done, name)

    def on_step(self, record: StepRecord) -> None:
        self.log(_finite(record.flat()), record.step, "" if record.phase == "grpo" else record.phase)

    def on_validation(self, step: int, metrics: dict[str, float]) -> None:
        self.log(_finite(metrics), step)

    def on_samples(self, step: int, split: str, samples: list[dict[str, Any]]) -> None:
        self.log_samples([sample_row(sample) for sample in samples], step, split)

    def on_finish(self, summary: dict[str, Any]) -> None:
        self._summary = summary

    def close(self) -> None:
        """End the run there; may be called twice."""
        if self._begun:
            self._begun = False
            self.end(self._summary)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def sample_row(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample as one row of text and numbers: prompt, completion, expected answer, reward and its parts."""
    messages = list(sample.get("messages", ()))
    first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
    prompt, completion = (
        "\n".join(m["content"] for m in part) for part in (messages[:first], messages[first:])
    )
    rest = {key: value for key, value in sample.items() if key not in ("messages", "parts", "tokens")}
    return {"prompt": prompt, "completion": completion, **rest, **sample.get("parts", {})}


def not_installed(tracker: str, package: str, extra: str) -> str:
    remedy = f"pip install 'headrace[{extra}]', or leave {tracker} out"
    return f"logging.trackers={tracker}: {package} is not installed; {remedy}"


def _setting(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) else "null" if value is None else str(value)


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    return {key: float(value) for key, value in values.items() if math.isfinite(value)}


class GuardedObserver(CompositeObserver):
    """Hands events to a tracker until it fails; that is said once, and it gets no more of them."""

    def __init__(self, observer: Tracker) -> None:
        super().__init__([observer])
        self._observer = observer
        self._failed = False

    def _tell(self, event: str, *args: Any, **kwargs: Any) -> None:
        if self._failed:
            return
        try:
            getattr(self._observer, event)(*args, **kwargs)
        except Exception as error:
            self._failed = True
            name, reason = type(self._observer).__name__, " ".join(f"{type(error).__name__}: {error}".split())
            logger.warning("%s failed in %s (%s); the run goes on without it", name, event, reason)

    def close(self) -> None:
        self._tell("close")

"""Every event of a run as a line of JSON, for programs that follow it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.trackers.base import Tracker
from headrace.utils import atomic
from headrace.utils.paths import user_path


class JsonlTracker(Tracker):
    """Appends to a file; each object has `event`: start, values, samples, checkpoint, notice or end."""

    def __init__(self, path: str | Path, *, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(settings=settings)
        self._path = user_path(path, "logging.jsonl.path")

    def _write(self, event: str, **values: Any) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        atomic.append_line(
            self._path, json.dumps({"event": event, **values}, default=str, ensure_ascii=False)
        )

    def begin(self, settings: Mapping[str, Any], first_step: int) -> None:
        self._write("start", first_step=first_step, settings=self.settings or settings)

    def log(self, values: Mapping[str, float], step: int, phase: str = "") -> None:
        self._write("values", step=step, phase=phase, values=values)

    def log_samples(self, rows: list[dict[str, Any]], step: int, split: str) -> None:
        self._write("samples", step=step, split=split, samples=rows)

    def on_checkpoint(self, step: int, path: Path) -> None:
        self._write("checkpoint", step=step, path=path)

    def on_notice(self, step: int, message: str) -> None:
        self._write("notice", step=step, message=message)

    def end(self, summary: Mapping[str, Any] | None) -> None:
        self._write("end", summary=summary)

"""Runs in Trackio: on this machine, or in a Hugging Face Space."""

import io
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any

from headrace.trackers.base import Tracker, not_installed
from headrace.utils.targets import load_optional


class TrackioTracker(Tracker):
    """A Trackio run; `trackio show` draws it. Its own lines on the terminal are left out.

    Raises:
        ConfigError: trackio is not installed.
    """

    def __init__(
        self,
        *,
        project: str = "headrace",
        name: str | None = None,
        space_id: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(settings=settings)
        self._trackio = load_optional("trackio", not_installed("trackio", "trackio", "trackio"))
        self._options = {"project": project, "name": name, "space_id": space_id}
        self._run: Any = None

    def begin(self, settings: Mapping[str, Any], first_step: int) -> None:
        resume = "allow" if first_step > 1 else "never"
        with redirect_stdout(io.StringIO()):
            self._run = self._trackio.init(
                **self._options, config=dict(settings), resume=resume, embed=False, auto_log_gpu=False
            )

    def log(self, values: Mapping[str, float], step: int, phase: str = "") -> None:
        self._run.log(dict(values), step=step)

    def log_samples(self, rows: list[dict[str, Any]], step: int, split: str) -> None:
        self._run.log({f"samples/{split}": self._trackio.Table(data=rows)}, step=step)

    def end(self, summary: Mapping[str, Any] | None) -> None:
        with redirect_stdout(io.StringIO()):
            # The package's own, not the run's: otherwise it finishes the run once more when the process ends.
            self._trackio.finish()

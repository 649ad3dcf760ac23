"""What is known of a run, read from its directory as far as it has come; nothing there is written."""

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from headrace.dashboard.detail import Detail
from headrace.dashboard.palette import MAIN_METRICS, colour
from headrace.dashboard.samples import Query, SampleIndex
from headrace.dashboard.series import MOST_POINTS, Metrics
from headrace.dashboard.tail import UNREADABLE, LineTail
from headrace.errors import ConfigError
from headrace.utils.recipe import leaves, read_resolved
from headrace.utils.run_directory import RunDirectory

_DEEPEST = 3
_SILENT_S = 60.0
# What comes of a text that is no UTF-8 or JSON, or a value that JSON has no form for, as half a surrogate pair.
_NO_JSON = (ValueError, TypeError, RecursionError)


_Rows = Annotated[int, msgspec.Meta(ge=0)]


class Cursor(TypedDict):
    """How much of a run somebody has: `rows` of steps, validations and phases."""

    version: int
    rows: tuple[_Rows, _Rows, _Rows]
    samples: int
    detail: int
    state: str


class Run:
    """One run directory. `poll` reads what is new; `payload` and `news` give it as JSON values; from any thread."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, _as_text(name)
        self._directory = RunDirectory(path)
        self._lines = {
            "metrics": LineTail(self._directory.metrics_path),
            "samples": LineTail(self._directory.samples_path),
            "detail": LineTail(self._directory.detail_path),
        }
        self._lock = threading.Lock()
        self._decode = msgspec.json.Decoder().decode
        self._version = 0
        self._recipe_s = 0.0
        self._metrics, self._detail = Metrics(), Detail()
        self._samples = SampleIndex(self._directory.samples_path)

    def poll(self) -> None:
        """Read what has been appended since the last call."""
        with self._lock:
            recipe_s = _changed_s(self._directory.config_path)
            self._version += recipe_s != self._recipe_s
            self._recipe_s = recipe_s
            for name, tail in self._lines.items():
                if tail.has_news():
                    self._read(name, tail)

    def _read(self, name: str, tail: LineTail) -> None:
        before = tail.restarts
        lines = tail.read()
        if tail.restarts != before and name != "detail":  # which begins anew when it has grown too long
            self._version += 1
            if name == "metrics":
                self._metrics = Metrics()
            else:
                self._samples.clear()
        if name == "samples":
            for offset, line in lines:
                self._samples.add(offset, line)
            return
        keep = self._metrics if name == "metrics" else self._detail
        for _, line in lines:
            try:
                keep.add(self._decode(line))
            except UNREADABLE:
                keep.add(None)

    def find(self, query: Query) -> dict[str, Any]:
        """Return the samples that match: how many, and the part asked for."""
        started = time.perf_counter()
        with self._lock:
            matching, rows = self._samples.find(query)
            total = len(self._samples)
        seconds = round(time.perf_counter() - started, 4)
        return {"total": total, "matching": matching, "rows": rows, "seconds": seconds}

    @property
    def series_count(self) -> int:
        return len(self._metrics.steps.columns) + 2 * len(MAIN_METRICS)

    def payload(self, most: int = MOST_POINTS) -> dict[str, Any]:
        """Return everything but the samples; a series with more than `most` points is thinned."""
        with self._lock:
            return {
                **self._state(),
                "path": _as_text(str(self.path)),
                "recipe": self._recipe(),
                "steps": self._metrics.steps.payload(MAIN_METRICS, most),
                "validations": self._metrics.validations.payload(most=most),
                "phases": self._metrics.phases.payload(most=most),
                "colours": self._colours(),
            }

    def _colours(self) -> dict[str, str]:
        names = {name for table in (self._metrics.steps, self._metrics.validations) for name in table.columns}
        parts = {name.partition("/")[2] for name in names if name.startswith(("time_s/", "bytes/"))}
        return {name: colour(name) for name in sorted(names | parts | self._detail.columns)}

    def news(self, cursor: Cursor) -> dict[str, Any] | None:
        """Return what has come since a state with that cursor; None: nothing.

        {"reload": True}: it is another run, or more has come than is given without thinning.
        """
        with self._lock:
            state = self._state()
            if state["cursor"] == cursor:
                return None
            behind = max(have - had for have, had in zip(self._metrics.counts, cursor["rows"]))
            if state["cursor"]["version"] != cursor["version"] or behind > MOST_POINTS:
                return {"name": self.name, "cursor": state["cursor"], "reload": True}
            steps, validations, phases = cursor["rows"]
            return {
                **state,
                "steps": self._metrics.steps.rows_from(steps),
                "validations": self._metrics.validations.rows_from(validations),
                "phases": self._metrics.phases.rows_from(phases),
                "colours": self._colours(),
            }

    def _state(self) -> dict[str, Any]:
        summary = self._summary()
        steps = self._metrics.steps.steps
        state = self._how_it_goes(summary)
        cursor = Cursor(
            version=self._version,
            rows=self._metrics.counts,
            samples=len(self._samples),
            detail=self._detail.count,
            state=state,
        )
        return {
            "name": self.name,
            "cursor": cursor,
            "state": state,
            "summary": summary,
            "step": steps[-1] if steps else 0,
            "samples": {"count": len(self._samples), "splits": self._samples.splits},
            "detail": self._detail.payload(),
            "damaged": self._metrics.damaged + self._samples.damaged + self._detail.damaged,
        }

    def _how_it_goes(self, summary: Mapping[str, Any] | None) -> str:
        if summary is not None:
            return "finished"
        changed = max((_changed_s(tail.path) for tail in self._lines.values()), default=0.0)
        # A lock that is asked for may keep a run out that starts just then, so it is the last to be asked.
        if time.time() - changed < _SILENT_S or self._directory.is_held:
            return "running"
        return "stopped"

    def _recipe(self) -> dict[str, Any]:
        try:
            recipe = dict(leaves(read_resolved(self._directory.config_path.read_text(encoding="utf-8"))))
            msgspec.json.encode(recipe)
        except (OSError, YAMLError, OmegaConfBaseException, AssertionError, *_NO_JSON):
            return {}
        return recipe

    def _summary(self) -> dict[str, Any] | None:
        try:
            summary = json.loads(self._directory.summary_path.read_text(encoding="utf-8"))
            msgspec.json.encode(summary)
        except (OSError, *_NO_JSON):
            return None
        return summary if isinstance(summary, dict) else None


def _as_text(path: str) -> str:
    """Return a path, or a part of one, with a mark for each byte that is no UTF-8."""
    return os.fsencode(path).decode(errors="replace")


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def find_runs(paths: Sequence[Path]) -> list[Run]:
    """Return the runs at the paths, or in folders below them, with short names that tell them apart.

    Raises:
        ConfigError: a path that is no folder, or no run in any of them.
    """
    found: list[Path] = []
    for path in paths:
        if not os.path.isdir(path):
            raise ConfigError(
                f"{path}: no such directory; give the directory of a run, or one that holds runs"
            )
        found += _below(path, 0)
    folders = list(dict.fromkeys(path.absolute() for path in found))
    if not folders:
        where = ", ".join(map(str, paths))
        raise ConfigError(f"{where}: no run there; give the directory of a run (one with a metrics.jsonl)")
    return [Run(path, name) for path, name in zip(folders, _names(folders))]


def _below(path: Path, depth: int) -> Iterator[Path]:
    """Yield the runs at or below a folder; one that may not be read has none."""
    try:
        if os.path.isfile(path / "metrics.jsonl") or RunDirectory(path).is_marked:
            yield path
            return
        entries = sorted(path.iterdir()) if depth < _DEEPEST else []
    except OSError:
        return
    for entry in entries:
        if os.path.isdir(entry) and not entry.name.startswith("."):
            yield from _below(entry, depth + 1)


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the ends of the paths, as long as it takes to tell them apart."""
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]

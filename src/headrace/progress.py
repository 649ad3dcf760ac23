"""Observers of a run: a display for a person, and the files of the run directory."""

import io
import math
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partialmethod
from pathlib import Path
from typing import Any, Literal, Self

from rich.console import Console, ConsoleDimensions, RenderableType
from rich.live import Live

from headrace.algorithms.observer import REWARD, TOKENS_PER_S, RunObserver, StepRecord
from headrace.live_view import Pace, ViewState, render
from headrace.run_tables import format_clock, format_number, format_seconds, held_out, summary_table
from headrace.utils.interrupt import discard_output, tell_stderr
from headrace.utils.run_directory import RunDirectory

Mode = Literal["auto", "on", "off"]

_SHOW_CURSOR = b"\x1b[?25h"
_LINES_PER_PHASE = 4
_LEAST_WIDTH = 10
_STEPS_PER_LINE = 10


class ConsoleObserver(RunObserver):
    """Shows a run to a person; use it as a context manager.

    `auto` draws a live display if the console is a terminal, and otherwise prints a plain line for each
    validation, checkpoint and phase and every tenth step; `on` always draws; `off` prints the result only.
    """

    def __init__(self, console: Console, *, title: str, mode: Mode = "auto") -> None:
        self._console = console
        self._state = ViewState(title)
        self._total, self._first = 0, 1
        self._lines = mode != "off"
        self._lock = threading.RLock()  # the display is drawn by a thread of its own
        draws = mode == "on" or (mode == "auto" and _is_terminal(console))
        live = Live(console=console, get_renderable=self._draw, refresh_per_second=4, transient=True)
        self._live = live if draws else None

    def on_start(self, *, total_steps: int, first_step: int, info: dict[str, str]) -> None:
        with self._lock:
            self._state.info = dict(info)
            self._total, self._first = total_steps, first_step
        steps = f"steps {first_step} to {total_steps}"
        about = f" ({self._state.about})" if info else ""
        self._say((steps if first_step <= total_steps else "no step is left to run") + about)

    def on_phase(self, name: str, total: int) -> None:
        with self._lock:
            self._state.label = self._state.activity = name
            self._state.pace = Pace(total, started_s=time.monotonic())
            self._state.metrics = {}
        self._say(f"{name}: {total} steps")

    def on_phase_progress(self, name: str, done: int, metrics: dict[str, float]) -> None:
        """Advance; print about four lines per phase."""
        now = time.monotonic()
        with self._lock:
            pace = self._state.pace
            if pace is None or self._state.label != name:
                return
            before = pace.done
            pace.advance(done, now)
            self._state.metrics = dict(metrics)
            every = max(1, pace.total // _LINES_PER_PHASE)
        if done // every > before // every:
            self._say_plain(f"{name} {done}/{pace.total}, " + _numbers(metrics))

    def on_stage(self, step: int, stage: str) -> None:
        with self._lock:
            if step >= self._first:
                self._begin_steps()
            self._state.activity = stage

    def on_step(self, record: StepRecord) -> None:
        """Advance; print every tenth step, the first and the last."""
        now = time.monotonic()
        with self._lock:
            pace = self._begin_steps()
            pace.advance(record.step, now)
            self._state.add(record)
            left_s = pace.left_s(now)
        if record.step % _STEPS_PER_LINE == 0 or record.step in (pace.first, pace.total):
            self._say_plain(_step_line(record, left_s))

    def on_validation(self, step: int, metrics: dict[str, float]) -> None:
        with self._lock:
            self._state.validation = (step, dict(metrics))
        self._say(f"validation at step {step}: {_results(metrics)}")

    def on_checkpoint(self, step: int, path: Path) -> None:
        self._say(f"checkpoint of step {step}: {path}")

    def on_notice(self, step: int, message: str) -> None:
        self._say(f"step {step}: {message}")

    def on_finish(self, summary: dict[str, Any]) -> None:
        self.close()
        with suppress(OSError):
            self._console.print(summary_table(summary))

    def notice(self, message: str) -> None:
        """Show one line of importance; safe to call from a signal handler."""
        self._state.notice = message
        if self._live is None:
            tell_stderr(message)

    def show_cursor(self) -> None:
        """Show the cursor, whether the display is closed afterwards or not; safe to call from a signal handler."""
        if self._live is not None:
            with suppress(OSError):
                os.write(self._console.file.fileno(), _SHOW_CURSOR)

    def _begin_steps(self) -> Pace:
        if self._state.pace is None or self._state.label != "step":
            self._state.label, self._state.metrics = "step", {}
            self._state.pace = Pace(
                self._total, first=self._first, done=self._first - 1, started_s=time.monotonic()
            )
        return self._state.pace

    def _draw(self) -> RenderableType:
        with self._lock:
            return render(self._state, time.monotonic(), self._console.width)

    def _say(self, line: str) -> None:
        if self._lines:
            tell(self._console, line)

    def _say_plain(self, line: str) -> None:
        if self._live is None:
            self._say(line)

    def close(self) -> None:
        """Leave the terminal as it was; may be called twice."""
        if self._live is not None:
            with suppress(OSError):
                self._live.stop()

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _RunConsole(Console):
    """A console that ends no run: its reader may go away (`headrace train ... | head`), or it may have no width."""

    @property
    def size(self) -> ConsoleDimensions:
        """What the terminal says, but wide enough for a table."""
        found = super().size
        return found._replace(width=max(found.width, _LEAST_WIDTH))

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        self._width, self._height = new_size

    def on_broken_pipe(self) -> None:
        self.quiet = True
        discard_output(self.file.fileno())


def make_console(mode: Mode = "auto") -> Console:
    """Return the console of standard output; `on` makes it draw into a file or pipe too."""
    forgive_encoding()
    return _RunConsole(force_terminal=True if mode == "on" else None)


def forgive_encoding() -> None:
    """Have standard output show `?` for a character that its encoding lacks, in place of an error."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="replace")


def print_line(console: Console, line: str) -> None:
    console.print(line, soft_wrap=True, highlight=False, markup=False)


def tell(console: Console, line: str) -> None:
    """Print a line of a run, which a terminal that is gone or a full disk does not end."""
    with suppress(OSError):
        print_line(console, line)


def _is_terminal(console: Console) -> bool:
    # Not `console.is_terminal`, which FORCE_COLOR turns on in a pipe.
    return console.file.isatty() and not console.is_dumb_terminal


def _step_line(record: StepRecord, left_s: float | None) -> str:
    parts = [f"step {record.step}/{record.total_steps}"]
    if REWARD in record.metrics:
        parts.append(f"reward {record.metrics[REWARD]:.3f}")
    if TOKENS_PER_S in record.metrics:
        parts.append(f"{record.metrics[TOKENS_PER_S]:,.0f} tokens/s")
    parts.append(f"{format_seconds(sum(record.timings_s.values()))} per step")
    if left_s is not None and record.step < record.total_steps:
        parts.append(f"{format_clock(left_s)} left")
    return ", ".join(parts)


def _numbers(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {format_number(value)}" for name, value in metrics.items())


def _results(metrics: Mapping[str, float]) -> str:
    kind, values = held_out(metrics)
    what = "" if kind == "accuracy" else f" {kind}"
    return ", ".join(
        f"{how}{'' if '@' in how else what} {value}" for how, value in values.items()
    ) or _numbers(metrics)


class FileObserver(RunObserver):
    """Writes metrics.jsonl, samples.jsonl, detail.jsonl and summary.json.

    A line of metrics.jsonl has `kind` (step, validation or phase), `step`, and flat keys: the loop's metrics
    by name, `tokens`, `time_s/STAGE`, `bytes/COLUMN`. A metric that is not finite is null there.
    """

    def __init__(self, run: RunDirectory, *, detail_mb: int = 16) -> None:
        self._run = run
        self._detail_bytes = detail_mb * 1_000_000

    def on_start(self, *, total_steps: int, first_step: int, info: dict[str, str]) -> None:
        """Write the recipe, and take away what the steps to come will write anew."""
        self._run.begin()
        if first_step <= total_steps:
            self._run.summary_path.unlink(missing_ok=True)

    def on_phase_progress(self, name: str, done: int, metrics: dict[str, float]) -> None:
        self._write("phase", done, {f"{name}/{key}": value for key, value in metrics.items()}, phase=name)

    def on_step(self, record: StepRecord) -> None:
        kind = "step" if record.phase == "grpo" else "phase"
        self._write(kind, record.step, record.flat(), phase=record.phase)

    def on_validation(self, step: int, metrics: dict[str, float]) -> None:
        self._write("validation", step, metrics)

    def on_samples(self, step: int, split: str, samples: list[dict[str, Any]]) -> None:
        for sample in samples:
            self._run.append_sample({"step": step, "split": split, **sample})

    def on_detail(self, step: int, kind: str, values: dict[str, Any]) -> None:
        self._run.append_detail({"kind": kind, "step": step, **values}, self._detail_bytes)

    def on_finish(self, summary: dict[str, Any]) -> None:
        self._run.write_summary(summary)

    def _write(self, kind: str, step: int, values: Mapping[str, float], phase: str | None = None) -> None:
        head = {"kind": kind, "step": step, **({"phase": phase} if phase else {})}
        self._run.append_metrics(head | {key: _json_number(value) for key, value in values.items()})


def _json_number(value: float) -> float | int | None:
    if isinstance(value, int):
        return value
    return float(value) if math.isfinite(value) else None


class CompositeObserver(RunObserver):
    """Passes every event on to several observers, in order."""

    def __init__(self, observers: Sequence[RunObserver]) -> None:
        self._observers = tuple(observers)

    def _tell(self, event: str, *args: Any, **kwargs: Any) -> None:
        for observer in self._observers:
            getattr(observer, event)(*args, **kwargs)


for _event in [name for name in vars(RunObserver) if name.startswith("on_")]:
    setattr(
        CompositeObserver, _event, partialmethod(lambda self, *args, **kw: self._tell(*args, **kw), _event)
    )

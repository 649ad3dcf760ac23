"""Trains a recipe as `headrace train` does, in a process that sends itself a signal when a stage of a step begins."""

import os
import signal
import sys
import threading
import time
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from headrace.algorithms.run import train
from headrace.errors import HeadraceError
from headrace.progress import CompositeObserver, FileObserver
from headrace.utils.recipe import dump_recipe, load_recipe
from headrace.utils.run_directory import RunDirectory
from recorder import NeverStop, Recorder


class Sender(Recorder):
    """Sends the signal once: `when` is a delay in seconds, or `draft`: when files of a checkpoint are being written."""

    def __init__(self, run_dir: Path, number: str, step: str, stage: str, when: str) -> None:
        super().__init__()
        self._at, self._when, self._checkpoints = (int(step), stage), when, run_dir / "checkpoints"
        self._send = partial(os.kill, os.getpid(), signal.Signals[number])

    def on_stage(self, step: int, stage: str) -> None:
        if (step, stage) != self._at:
            return
        if self._when == "draft":
            there = set(self._checkpoints.iterdir())
            threading.Thread(target=self._send_at_draft, args=(there,), daemon=True).start()
        elif float(self._when):
            threading.Timer(float(self._when), self._send).start()
        else:
            self._send()

    def _send_at_draft(self, there: set[Path]) -> None:
        while set(self._checkpoints.iterdir()) <= there:
            time.sleep(0.0002)
        self._send()


def live(path: Path, output: Path, *told: Any) -> None:
    """Do one life of a run, in this process, and end it; all that it says goes to a file."""
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    recipe = load_recipe(path, [])
    with RunDirectory.open(recipe.run_dir, recipe_text=dump_recipe(recipe)) as run:
        observers: list[Any] = [FileObserver(run), *([Sender(run.path, *told)] if told else [])]
        try:
            train(recipe, run.path, CompositeObserver(observers), NeverStop())
        except HeadraceError as error:
            sys.exit(f"{type(error).__name__}: {error}")


def is_stopped(pid: int) -> bool:
    """Return whether a process has stopped by SIGSTOP."""
    return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] == "T"


class Life:
    """A process that does one life of a run. It is forked from one that has loaded what a run needs."""

    def __init__(self, path: Path, *told: str) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._output = path.with_name("output.txt")
        self._process = context.Process(target=live, args=(path, self._output, *told))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def is_stopped(self) -> bool:
        assert self._process.is_alive(), self.end()
        return is_stopped(self.pid)

    def end(self, within_s: float = 300.0) -> tuple[int | None, str]:
        """Wait for the end, and return the exit code, below 0 for a signal, and what it has said."""
        self._process.join(within_s)
        code = self._process.exitcode
        if code is None:
            self._process.kill()
        return code, self._output.read_text()


if __name__ == "__main__":
    live(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])

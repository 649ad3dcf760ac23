"""The processes of a machine's ranks: they start once, take case after case, and start anew after one that fails."""

import multiprocessing
import signal
import sys
import time
import uuid
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from layouts.cases import Case, Scale
from layouts.rank import Job, Result, serve

_START_S, _END_S = 180.0, 5.0
Answers = list[Result] | str
"""What each rank of a case found, or why there is nothing."""


class Ranks:
    """Runs cases on the first ranks of a machine, each within a limit of seconds."""

    def __init__(self, count: int, scratch: Path, scale: Scale, repeats: int, *, cuda: bool) -> None:
        self._count, self._scratch, self._cuda = count, scratch, cuda
        self._scale, self._repeats = scale, repeats
        self._processes: list[SpawnProcess] = []
        self._pipes: list[Connection[Any, Any]] = []
        self._failed = False

    def run(self, case: Case, limit_s: float, save_s: float) -> Answers:
        """Return what the ranks of a case found; its model is written first, where it is not there yet."""
        if not self._processes and isinstance(failed := self._start(), str):
            return failed
        directory = self._scratch / case.model
        if not (directory / "config.json").exists():
            written = self._ask(1, self._job(case.model, None, directory), save_s)
            if isinstance(written, str):
                return written
        return self._ask(case.gpus, self._job(case.model, case, directory), limit_s)

    def stop(self) -> None:
        """End all processes, by force if they do not go."""
        for pipe in self._pipes:
            # A rank that has failed has closed its end.
            with suppress(OSError):
                pipe.send(None)
        if not self._failed:
            for process in self._processes:
                process.join(_END_S)
        for end in (SpawnProcess.terminate, SpawnProcess.kill):
            for process in self._processes:
                if process.is_alive():
                    end(process)
            for process in self._processes:
                process.join(_END_S)
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self._failed = [], [], False

    def _job(self, model: str, case: Case | None, directory: Path) -> Job:
        rendezvous = self._scratch / f"rendezvous{uuid.uuid4().hex}"
        return Job(model, case, directory, rendezvous, self._scale, self._repeats)

    def _start(self) -> Answers:
        context = multiprocessing.get_context("spawn")
        for rank in range(self._count):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, rank, self._count, self._cuda), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        return self._answers(self._count, _START_S)

    def _ask(self, count: int, job: Job, limit_s: float) -> Answers:
        for pipe in self._pipes[:count]:
            # A rank that has ended is told of where its answer is waited for.
            with suppress(OSError):
                pipe.send(job)
        return self._answers(count, limit_s)

    def _answers(self, count: int, limit_s: float) -> Answers:
        """Collect one answer of each of the first ranks; after a failure all processes are ended."""
        deadline = time.monotonic() + limit_s
        found: dict[int, Result] = {}
        while len(found) < count:
            waiting = {self._pipes[rank]: rank for rank in range(count) if rank not in found}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                return self._fail(f"rank {min(waiting.values())} has not answered within {limit_s:g} s")
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    word, answer = self._pipes[rank].recv()
                except (EOFError, ConnectionError):
                    return self._fail(f"rank {rank} has ended without an answer{self._end_of(rank)}")
                if word != "ok":
                    return self._fail(f"rank {rank}: {answer}")
                found[rank] = answer
        return [found[rank] for rank in range(count)]

    def _end_of(self, rank: int) -> str:
        """Return how a rank's process has ended."""
        self._processes[rank].join(_END_S)
        code = self._processes[rank].exitcode
        if code == -signal.SIGKILL:
            return ": it was killed, as a host that is short of memory does"
        return "" if code is None else f": exit code {code}"

    def _fail(self, why: str) -> str:
        print(why, file=sys.stderr, flush=True)
        self._failed = True
        self.stop()
        lines = why.strip().splitlines()
        return "; ".join(dict.fromkeys([lines[0][:200], lines[-1][:400]]))

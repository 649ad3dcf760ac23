"""Judging that may not end, in a process of its own, with a deadline that holds in every thread.

Text of a model that is evaluated can take for ever, and no other thread can stop it. The process that `ask` starts
counts its own computing time: beyond the limit it gives up, and where it cannot, it dies and the next question starts
another. It ends with this process, however that ends.
"""

import atexit
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection, Pipe
from typing import Any

from headrace.environments import judge_server
from headrace.errors import HeadraceError

LIMIT_S = 3.0
"""Seconds of computing that one verdict may take."""
_START_S = 120.0
"""Longest wait for the process to start and to load what judges."""
_WAITS_PER_LIMIT = 10
"""How many times the limit a verdict may take by the clock: a busy machine computes slowly."""


class NoVerdict(Exception):
    """A text that could not be judged: it ran over its limit, or what judges it failed."""


class JudgeProcess:
    """Calls functions in one process, one at a time; started by the first call, and after it has died."""

    def __init__(self, *, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection[Any, Any] | None = None

    @property
    def pid(self) -> int | None:
        """The id of the process, if there is one."""
        return None if self._process is None else self._process.pid

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return `function(*arguments)`: text, a number, a truth value or None.

        What goes there is pickled, what comes back is JSON: nothing that judged text has made is unpickled. Loading
        `function` and the arguments takes nothing from the limit.

        Raises:
            NoVerdict: over the limit, or `function` failed, or ended the process.
            HeadraceError: the process cannot be started, or cannot load `function`.
        """
        question = pickle.dumps((function, arguments))
        with self._lock:
            pipe = self._loaded(question)
            answer = self._receive(pipe, self._limit_s * _WAITS_PER_LIMIT)
        if answer is None:
            raise NoVerdict("the process that judged it had to be ended")
        if "fault" in answer:
            raise NoVerdict(answer["fault"])
        return answer["value"]

    def close(self) -> None:
        """End the process; a further call starts another."""
        process, pipe, self._process, self._pipe = self._process, self._pipe, None, None
        if pipe is not None:
            pipe.close()
        if process is not None:
            process.kill()
            process.wait()

    def _loaded(self, question: bytes) -> "Connection[Any, Any]":
        """Return the pipe of a process that has loaded the question and works on it."""
        # One that has died since the last question shows here.
        for _ in range(2):
            try:
                pipe = self._pipe or self._start()
                pipe.send_bytes(question)
            except OSError:
                self.close()
                continue
            answer = self._receive(pipe, _START_S)
            if answer is not None and "fault" in answer:
                raise HeadraceError(f"the process that judges answers cannot load them: {answer['fault']}")
            if answer is not None:
                return pipe
        raise HeadraceError(
            f"the process that judges answers does not start ({sys.executable} -m {judge_server.__name__}); "
            "check memory and limits on processes"
        )

    def _receive(self, pipe: "Connection[Any, Any]", timeout_s: float) -> dict[str, Any] | None:
        """Return the next message; without one in time, or at all, end the process."""
        whole = False
        try:
            if pipe.poll(timeout_s):
                message: dict[str, Any] = json.loads(pipe.recv_bytes())
                whole = True
                return message
        except (EOFError, OSError):
            pass
        finally:
            # Also after an interrupt: the answer that is still to come would be taken for the next one's.
            if not whole:
                self.close()
        return None

    def _start(self) -> "Connection[Any, Any]":
        ours, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", judge_server.__name__, str(theirs.fileno()), str(self._limit_s)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # Ctrl-C is for this process alone.
                process_group=0,
                env=_environment(),
            )
        self._pipe = ours
        return ours


@cache
def judge_process() -> JudgeProcess:
    """Return this process's own."""
    judge = JudgeProcess()
    atexit.register(judge.close)
    return judge


def _environment() -> dict[str, str]:
    # Modules are found where they are found here; sympy and numpy need no threads, which would take address space.
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {
        **os.environ,
        "PYTHONPATH": path,
        "PYTHONSAFEPATH": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }

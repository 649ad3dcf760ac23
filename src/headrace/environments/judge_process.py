"""Judging that may not end, in a process of its own, with a deadline that holds in every thread.

Text of a model that is evaluated can take for ever, and no other thread can stop it. The process that `ask` starts
counts its own computing time: beyond the limit it gives up, and where it cannot, it dies and the next question starts
another. It ends with this process, however that ends. Both ends stand here: what the process runs is `_serve`.
"""

import atexit
import json
import os
import pickle
import queue
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection, Pipe
from types import FrameType
from typing import Any, NoReturn

from headrace.errors import HeadraceError

LIMIT_S = 3.0
"""Seconds of computing that one verdict may take."""
_START_S = 120.0
"""Longest wait for the process to start and to load what judges."""
_WAITS_PER_LIMIT = 10
"""How many times the limit a verdict may take by the clock: a busy machine computes slowly."""
_SLACK_S = 2.0
"""How much longer than its limit of the clock a call may take to give up, before its process is ended."""
_MEMORY_BYTES = 8 * 1024**3
"""Address space at most: a text that evaluates to more fails here, and takes no memory from a trainer."""

FAILURES = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, MemoryError, NameError),
    *(OSError, RecursionError, SyntaxError, SystemExit, TypeError, ValueError),
)
"""What text that is evaluated raises; anything else ends the process, which is no verdict either."""


class NoVerdict(Exception):
    """A text that could not be judged: it ran over its limit, or what judges it failed."""


class JudgeProcess:
    """Calls functions in one process, one at a time; started by the first call, and after it has died."""

    def __init__(self, *, limit_s: float = LIMIT_S, code_of_user: bool = False) -> None:
        """With `code_of_user`, the limit is of the clock, memory has none, and what is printed is shown."""
        self._limit_s = limit_s
        self._code_of_user = code_of_user
        self._wait_s = limit_s + _SLACK_S if code_of_user else limit_s * _WAITS_PER_LIMIT
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection[Any, Any] | None = None

    @property
    def pid(self) -> int | None:
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
            verdict = self._receive(pipe, self._wait_s)
        if verdict is None:
            raise NoVerdict("the process that judged it had to be ended")
        if "fault" in verdict:
            raise NoVerdict(verdict["fault"])
        return verdict["value"]

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
            reply = self._receive(pipe, _START_S)
            if reply is not None and "fault" in reply:
                raise HeadraceError(f"the process that judges completions cannot load them: {reply['fault']}")
            if reply is not None:
                return pipe
        raise HeadraceError(
            f"the process that judges completions does not start ({sys.executable} -m {__name__}); check memory and "
            "limits on processes"
        )

    def _receive(self, pipe: "Connection[Any, Any]", timeout_s: float) -> dict[str, Any] | None:
        """Return the next message; without one in time, or at all, end the process."""
        message: dict[str, Any] | None = None
        try:
            if pipe.poll(timeout_s):
                message = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            pass
        finally:
            # Also after an interrupt: the reply that is still to come would be taken for the next one's.
            if message is None:
                self.close()
        return message

    def _start(self) -> "Connection[Any, Any]":
        ours, theirs = Pipe()
        # Modules are found where they are found here; sympy and numpy need no threads, which would take address space.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        settings = {"PYTHONSAFEPATH": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", __name__, str(theirs.fileno()), str(self._limit_s)),
                    *(["user"] if self._code_of_user else []),
                ],
                stdin=subprocess.DEVNULL,
                stdout=2 if self._code_of_user else subprocess.DEVNULL,
                stderr=None if self._code_of_user else subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # Ctrl-C is for this process alone.
                process_group=0,
                env={**os.environ, "PYTHONPATH": path, **settings},
            )
        self._pipe = ours
        return ours


@cache
def judge_process() -> JudgeProcess:
    """Return this process's own."""
    judge = JudgeProcess()
    atexit.register(judge.close)
    return judge


class _OverLimit(BaseException):
    """Raised by the clock, past what handles errors."""


def _serve(pipe: "Connection[Any, Any]", limit_s: float, *, by_clock: bool) -> NoReturn:
    """Load each question, say so, and send its verdict."""
    questions: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, questions), daemon=True).start()
    signal.signal(signal.SIGPROF, _give_up)
    signal.signal(signal.SIGALRM, _give_up)
    while True:
        try:
            function, arguments = pickle.loads(questions.get())
        except (*FAILURES, pickle.UnpicklingError) as error:
            _send(pipe, {"fault": f"{type(error).__name__}: {error}"})
            continue
        _send(pipe, {})
        _send(pipe, _verdict(function, arguments, limit_s, by_clock=by_clock))


def _listen(pipe: "Connection[Any, Any]", questions: "queue.SimpleQueue[bytes]") -> None:
    """Take questions; end the process, whatever it is doing, when there is nobody left to ask."""
    with suppress(EOFError, OSError):
        while True:
            questions.put(pipe.recv_bytes())
    os._exit(0)


def _send(pipe: "Connection[Any, Any]", message: dict[str, Any]) -> None:
    pipe.send_bytes(json.dumps(message, default=repr).encode())


def _verdict(
    function: Callable[..., Any], arguments: tuple[Any, ...], limit_s: float, *, by_clock: bool
) -> dict[str, Any]:
    # The first clock raises, the second kills: work that never comes back to Python sees no exception. Both count
    # this process's computing, so that verdicts do not depend on what else the machine does. By the clock on the wall,
    # the asking process does the killing.
    clocks = (signal.ITIMER_REAL,) if by_clock else (signal.ITIMER_PROF, signal.ITIMER_VIRTUAL)
    try:
        for times, clock in enumerate(clocks, 1):
            signal.setitimer(clock, times * limit_s)
        return {"value": function(*arguments)}
    except _OverLimit:
        return {"fault": f"it took more than {limit_s:g} s{'' if by_clock else ' of computing'}"}
    except FAILURES as error:
        return {"fault": type(error).__name__}
    finally:
        for clock in clocks:
            signal.setitimer(clock, 0)


def _give_up(number: int, frame: FrameType | None) -> None:
    raise _OverLimit


if __name__ == "__main__":
    with suppress(ValueError, OSError):
        if "user" not in sys.argv:
            resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, resource.RLIM_INFINITY))
    _serve(Connection(int(sys.argv[1])), float(sys.argv[2]), by_clock="user" in sys.argv)

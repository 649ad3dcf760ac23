"""The other end of `judge_process`: answers one question after the other until nobody asks any more."""

import json
import os
import pickle
import queue
import resource
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

_MEMORY_BYTES = 8 * 1024**3
"""Address space at most: a text that evaluates to more fails here, and takes no memory from a trainer."""

FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    NameError,
    OSError,
    RecursionError,
    SyntaxError,
    SystemExit,
    TypeError,
    ValueError,
)
"""What text that is evaluated raises; anything else ends the process, which is no verdict either."""


class _OverLimit(BaseException):
    """Raised by the clock, past what handles errors."""


def serve(pipe: "Connection[Any, Any]", limit_s: float) -> None:
    """Load each question, say so, and send its answer."""
    questions: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, questions), daemon=True).start()
    signal.signal(signal.SIGPROF, _give_up)
    while True:
        try:
            function, arguments = pickle.loads(questions.get())
        except (*FAILURES, pickle.UnpicklingError) as error:
            _send(pipe, {"fault": f"{type(error).__name__}: {error}"})
            continue
        _send(pipe, {})
        _send(pipe, _answer(function, arguments, limit_s))


def _listen(pipe: "Connection[Any, Any]", questions: "queue.SimpleQueue[bytes]") -> None:
    """Take questions; end the process, whatever it is doing, when there is nobody left to ask."""
    with suppress(EOFError, OSError):
        while True:
            questions.put(pipe.recv_bytes())
    os._exit(0)


def _send(pipe: "Connection[Any, Any]", message: dict[str, Any]) -> None:
    pipe.send_bytes(json.dumps(message, default=repr).encode())


def _answer(function: Callable[..., Any], arguments: tuple[Any, ...], limit_s: float) -> dict[str, Any]:
    # The first clock raises, the second kills: work that never comes back to Python sees no exception. Both count
    # this process's computing, so that verdicts do not depend on what else the machine does.
    try:
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        signal.setitimer(signal.ITIMER_VIRTUAL, 2 * limit_s)
        return {"value": function(*arguments)}
    except _OverLimit:
        return {"fault": f"it took more than {limit_s:g} s of computing"}
    except FAILURES as error:
        return {"fault": type(error).__name__}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _give_up(number: int, frame: FrameType | None) -> None:
    raise _OverLimit


def main() -> None:
    """Serve the pipe that the command line names."""
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, resource.RLIM_INFINITY))
    serve(Connection(int(sys.argv[1])), float(sys.argv[2]))


if __name__ == "__main__":
    main()

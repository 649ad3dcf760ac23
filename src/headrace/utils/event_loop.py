"""Coroutines of a user's own: all of a thread run in one event loop, which stays."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, in the loop that ran this thread's last one.

    A semaphore, or a client with open connections, belongs to the loop in which it was first used.
    """
    with _loop as runner:
        return runner.run(coroutine)


class _Loop(threading.local):
    """The loop of each thread; one that is interrupted ends, with all that is unfinished in it."""

    _runner: asyncio.Runner | None = None

    def __enter__(self) -> asyncio.Runner:
        self._runner = self._runner or asyncio.Runner()
        return self._runner

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._runner is not None and kind is not None and not issubclass(kind, Exception):
            self._runner.close()
            self._runner = None


_loop = _Loop()

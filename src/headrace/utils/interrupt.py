"""Ctrl-C that lets a loop stop where its state is whole."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def tell_stderr(message: str) -> None:
    """Write one line to standard error by a plain system call, which is safe inside a signal handler."""
    os.write(2, f"headrace: {message}\n".encode())


class InterruptFlag:
    """Turns the first SIGINT or SIGTERM into a flag; the second raises KeyboardInterrupt at once.

    >>> with InterruptFlag() as interrupt:
    ...     while not interrupt.is_set():
    ...         train_one_step()

    Where nothing can be lost yet, `at_once` lets the first signal raise, too. Handlers are installed in the main
    thread only (elsewhere the block changes nothing) and put back at the end. `notify` gets the one line for the
    user; it runs inside the signal handler.
    """

    def __init__(self, notify: Callable[[str], None] = tell_stderr) -> None:
        self._notify = notify
        self._set = False
        self._raises = False
        self._signal = signal.SIGINT
        self._previous: dict[signal.Signals, Any] = {}

    def is_set(self) -> bool:
        """Return whether the loop should stop at its next safe point."""
        return self._set

    def set(self) -> None:
        """Ask the loop to stop, as a signal would."""
        self._set = True

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Let the first signal raise KeyboardInterrupt in the block; one that has come raises at its beginning."""
        self._raises = True
        try:
            if self._set:
                raise KeyboardInterrupt
            yield
        finally:
            self._raises = False

    @property
    def exit_code(self) -> int:
        """Exit code of a process that stopped for this: 128 + the signal's number (130 for Ctrl-C)."""
        return 128 + self._signal

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number)
        if self._set:
            raise KeyboardInterrupt
        self._set = True
        if self._raises:
            self._notify("stopping; once more to stop without cleaning up")
            raise KeyboardInterrupt
        self._notify("stopping at the next safe point; once more to stop at once")

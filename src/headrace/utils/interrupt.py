"""Ctrl-C that lets a loop stop where its state is whole."""

import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Self

# Windows has no SIGHUP.
HANGUP: tuple[signal.Signals, ...] = (signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()
TERMINAL_SIGNALS = (signal.SIGINT, *HANGUP)
"""What a terminal sends to every process that was started from it."""
_SIGNALS = (*TERMINAL_SIGNALS, signal.SIGTERM)


@contextmanager
def held_back(signals: Collection[signal.Signals]) -> Iterator[None]:
    """Block signals in this thread and in processes started meanwhile; here they are delivered afterwards."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def tell_stderr(message: str) -> None:
    with suppress(OSError):  # there may be nobody left to read it
        os.write(2, f"headrace: {message}\n".encode())


def discard_output(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


class InterruptFlag:
    """Turns the first SIGINT, SIGTERM or SIGHUP into a flag; the second raises KeyboardInterrupt at once.

    >>> with InterruptFlag() as interrupt:
    ...     while not interrupt.is_set():
    ...         train_one_step()

    Where nothing can be lost yet, `at_once` lets the first signal raise, too. Handlers are installed in the main
    thread only (elsewhere the block changes nothing) and put back at the end. A SIGHUP that is ignored, as under
    `nohup`, stays so; after one, output to a terminal that is gone goes nowhere, and fails no longer. `notify` gets
    the one line for the user, and `leave_terminal` undoes what a picture did to the terminal before the second signal
    raises; both run inside the signal handler.
    """

    def __init__(
        self,
        notify: Callable[[str], None] = tell_stderr,
        leave_terminal: Callable[[], None] = lambda: None,
    ) -> None:
        self._notify = notify
        self._leave_terminal = leave_terminal
        self._set = False
        self._raises = False
        self._signal = signal.SIGINT
        self._previous: dict[signal.Signals, Any] = {}
        self._terminals: tuple[int, ...] = ()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
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
        """128 + the signal's number: 130 for Ctrl-C."""
        return 128 + self._signal

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._terminals = tuple(descriptor for descriptor in (1, 2) if os.isatty(descriptor))
            for number in _SIGNALS:
                if number not in HANGUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number)
        if number in HANGUP:
            for descriptor in self._terminals:
                if not os.isatty(descriptor):  # writing there would end the run before its checkpoint
                    discard_output(descriptor)
        if self._set:
            self._leave_terminal()
            raise KeyboardInterrupt
        self._set = True
        if self._raises:
            self._notify("stopping; once more to stop without cleaning up")
            raise KeyboardInterrupt
        self._notify("stopping at the next safe point; once more to stop at once")

"""A function that runs in a thread of its own."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def in_background(function: Callable[[], T], name: str) -> "Future[T]":
    """Start a function, and return its result to come; the process does not wait for it when it ends.

    An executor's threads would keep the process until they are done, also after a second Ctrl-C.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    Thread(target=run, name=name, daemon=True).start()
    return future

"""The timer with what only code from outside asks of it: spans that are opened and closed by name, and forgotten."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.utils import timer


class Timer(timer.Timer):
    """Sums seconds by label, of blocks (`time`) or from `start` to `stop`."""

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[str, float] = {}

    def start(self, label: str) -> None:
        """Open a span; an open one of the same label is an error."""
        if label in self._open:
            raise ValueError(f"timer '{label}' is running already; stop it first")
        self._open[label] = time.perf_counter()

    def stop(self, label: str) -> float:
        if label not in self._open:
            raise ValueError(f"timer '{label}' is not running; start it first")
        seconds = time.perf_counter() - self._open.pop(label)
        self._spans[label].append(seconds)
        return seconds

    @contextmanager
    def time(self, label: str) -> Iterator[None]:
        self.start(label)
        try:
            yield
        finally:
            self.stop(label)

    get_timing_metrics = timer.Timer.totals

    def get_elapsed(self, label: str) -> list[float]:
        return list(self._spans.get(label, ()))

    def reset(self, label: str | None = None) -> None:
        """Forget one label's spans, or all."""
        for name in [label] if label is not None else list(self._spans):
            self._spans.pop(name, None)

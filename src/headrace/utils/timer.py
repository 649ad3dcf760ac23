"""Named wall-clock timings."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Timer:
    """Sums seconds by label; labels nest by a slash, by convention.

    >>> timer = Timer()
    >>> with timer.time("rollout"):
    ...     pass
    >>> sorted(timer.totals())
    ['rollout']
    """

    def __init__(self) -> None:
        self._spans: dict[str, list[float]] = defaultdict(list)
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

    def totals(self) -> dict[str, float]:
        return {label: sum(spans) for label, spans in self._spans.items()}

    get_timing_metrics = totals

    def get_elapsed(self, label: str) -> list[float]:
        return list(self._spans.get(label, ()))

    def reset(self, label: str | None = None) -> None:
        """Forget one label's spans, or all."""
        for name in [label] if label is not None else list(self._spans):
            self._spans.pop(name, None)

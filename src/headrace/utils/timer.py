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

    @contextmanager
    def time(self, label: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._spans[label].append(time.perf_counter() - started)

    def totals(self) -> dict[str, float]:
        return {label: sum(spans) for label, spans in self._spans.items()}

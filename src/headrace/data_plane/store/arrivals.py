"""How many rows have come to a partition, whether they are still there or not."""

from collections.abc import Sequence


class Arrivals:
    """Counts rows that come, each that is new to the partition.

    A row that goes before any task has had it, and that comes again, is the same; one that a task has had is another.
    Ids are remembered for this only until the rows that are `expected` have come, so they are fewer than those.
    """

    def __init__(self, expected: int) -> None:
        self.expected, self.count = expected, 0
        self._unused: set[str] = set()

    @property
    def are_all(self) -> bool:
        return self.count >= self.expected

    def add(self, ids: Sequence[str]) -> None:
        """Count rows that a put has brought."""
        again = self._unused.intersection(ids)
        self._unused -= again
        self.count += len(ids) - len(again)
        if self.are_all:
            self._unused.clear()

    def drop(self, ids: Sequence[str]) -> None:
        """Let rows go that no task has had."""
        if not self.are_all:
            self._unused.update(ids)

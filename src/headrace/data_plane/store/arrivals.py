"""How many rows have come to a partition, whether they are still there or not."""

from collections.abc import Sequence


class Arrivals:
    """The `count` of rows that have come, which who brings new ones adds to.

    A row that goes before any task has had it, and that comes again, is the same; one that a task has had is another.
    Ids are remembered for this only until the rows that are `expected` have come, so they are fewer than those.
    """

    def __init__(self, expected: int) -> None:
        self.expected, self.count = expected, 0
        self.unused: set[str] = set()
        """Ids of rows that went before any task has had them."""

    @property
    def are_all(self) -> bool:
        return self.count >= self.expected

    def know_again(self, ids: Sequence[str]) -> None:
        """Count those of the rows that have come last once that were there before, unused."""
        again = self.unused.intersection(ids)
        self.unused -= again
        self.count -= len(again)
        if self.are_all:
            self.unused.clear()

    def drop(self, ids: Sequence[str]) -> None:
        """Let rows go that no task has had."""
        if not self.are_all:
            self.unused.update(ids)

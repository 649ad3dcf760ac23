"""The policy's newest weights, for those who make samples while it trains."""

from collections.abc import Iterable, Iterator
from typing import Any


class PublishedWeights:
    """Keeps a copy of what a policy's `weight_stream` yields, in this process or in an actor of its own.

    A version is there as a whole or not at all: readers have the one before until the copy is complete.
    """

    def __init__(self) -> None:
        self._newest: tuple[int, list[Any]] | None = None

    def keep(self, items: Iterable[Any], version: int) -> None:
        """Copy weights, each on its device."""
        self._newest = (
            version,
            [(item[0], item[1].clone()) if isinstance(item, tuple) else item for item in items],
        )

    def newer_than(self, version: int) -> Iterator[Any]:
        """Yield the version of the weights and then what `keep` got; nothing if they are not newer than `version`."""
        if self._newest is not None and self._newest[0] > version:
            newest, items = self._newest
            yield newest
            yield from items

    def shutdown(self) -> None:
        self._newest = None

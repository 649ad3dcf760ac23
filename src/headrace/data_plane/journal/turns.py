"""The order in which operations on the same rows come to a journal, and to its store: one for both."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple


class _Operation(NamedTuple):
    """Something that is done to rows; `ids` None: to the partition."""

    folder: Path
    partition: str
    ids: Sequence[str] | None

    def meets(self, other: "_Operation") -> bool:
        if self[:2] != other[:2]:
            return False
        return self.ids is None or other.ids is None or not set(self.ids).isdisjoint(other.ids)


_changed = threading.Condition()
_under_way: dict[object, _Operation] = {}
"""In the order in which they began; of all clients of this process."""


@contextmanager
def turn(folder: Path, partition: str, ids: Sequence[str] | None) -> Iterator[None]:
    """Wait for operations of this process that began before and have some of the same rows; others go on beside it."""
    mine, key = _Operation(folder.absolute(), partition, ids), object()
    with _changed:
        before = {other for other, one in _under_way.items() if mine.meets(one)}
        _under_way[key] = mine
    try:
        with _changed:
            _changed.wait_for(lambda: before.isdisjoint(_under_way))
        yield
    finally:
        with _changed:
            del _under_way[key]
            _changed.notify_all()

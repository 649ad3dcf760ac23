"""What each task of a partition has claimed, and which samples it may claim next."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.data_plane.store.columns import Rows, grown, shown
from headrace.data_plane.store.groups import Groups
from headrace.errors import DataPlaneError

Mask = NDArray[np.bool_]
Held = Callable[[Rows], Mask]
"""Tells which of some slots have a column."""

_WINDOW = 1024
"""Places that a claim looks at, at least."""


class Registration(NamedTuple):
    """How a partition is opened; see `DataPlaneClient.register_partition`."""

    partition_id: str
    num_samples: int
    tasks: tuple[str, ...]
    group_size: int = 1
    group_tag: str | None = None
    enums: Mapping[str, tuple[Any, ...]] = {}


class ClaimRequest(NamedTuple):
    """Which rows a claim takes; see `DataPlaneClient.claim_meta`."""

    partition_id: str
    task: str
    fields: list[str]
    rows: int
    allow_partial: bool = False


class _Cursor:
    """One task's claims: which slots are `taken`, how many rows it has had, and the place to look from."""

    def __init__(self) -> None:
        self.taken: Mask = np.empty(0, bool)
        self.start = 0
        self.count = 0


class Claims:
    """The claims on the samples of a partition, by slot.

    Slots have an order in which they are handed out: their own, or that of groups, one after the other. A task looks
    from the first place on at which there is anything left for it, so a claim costs what it hands out, not what the
    partition holds. Samples that have come since the last call are taken in by the next, which is told how many slots
    there are.
    """

    def __init__(self, name: str, registration: Registration | None) -> None:
        self.groups: Groups | None = None
        self._name = name
        self._gone: Mask = np.empty(0, bool)
        self._slots = 0
        self._expected = 1
        self._cursors: dict[str, _Cursor] = {}
        if registration is not None:
            self._expected = max(registration.num_samples, 1)
            self._cursors = {task: _Cursor() for task in registration.tasks}
            if registration.group_size > 1:
                self.groups = Groups(name, registration.group_size, registration.group_tag)

    def _see(self, slots: int) -> None:
        """Take in samples up to that number of slots."""
        self._slots = max(self._slots, slots)
        self._gone = grown(self._gone, self._slots, False)
        for cursor in self._cursors.values():
            cursor.taken = grown(cursor.taken, self._slots, False)

    def drop(self, slots: Rows) -> None:
        """Forget samples."""
        self._see(int(slots.max(initial=-1)) + 1)
        self._gone[slots] = True
        if self.groups is not None:
            self.groups.drop(slots)

    def renumber(self, slots: Rows) -> None:
        """Let what is slot `slots[i]` now be slot i; all other slots are free."""
        self._see(int(slots.max(initial=-1)) + 1)
        self._gone, self._slots = self._gone[slots], len(slots)
        for cursor in self._cursors.values():
            cursor.taken, cursor.start = cursor.taken[slots], 0
        if self.groups is not None:
            self.groups.renumber(slots)

    def claim(self, request: ClaimRequest, ids: Sequence[str], held_by: Mapping[str, Held]) -> Rows | None:
        """Take the next rows for a task; None if they are not there yet, no rows if it has had them all.

        `ids` are those of all slots; `held_by` tells of each column that the task asks for which slots have it.
        """
        self._see(len(ids))
        cursor = self._cursor(request.task)
        if self.groups is not None:
            self.groups.check_claim(request.rows, ids)
        self._advance(cursor)
        slots = self._ready(cursor, held_by, request.rows)
        if len(slots) < request.rows:
            left = self._left(cursor)
            is_rest = len(slots) == left and cursor.count + left >= self._expected
            if not request.allow_partial or not is_rest:
                return None
        cursor.taken[slots] = True
        cursor.count += len(slots)
        return slots

    def _left(self, cursor: _Cursor) -> int:
        return int(np.count_nonzero(self._is_free(cursor)))

    def _is_free(self, cursor: _Cursor, slots: Rows | None = None) -> Mask:
        which = slice(self._slots) if slots is None else slots
        free: Mask = ~(self._gone[which] | cursor.taken[which])
        return free

    def _ready(self, cursor: _Cursor, held_by: Mapping[str, Held], limit: int) -> Rows:
        """Return the next slots that the task may have, at most `limit`."""
        parts = [np.empty(0, np.int64)]
        found, start, width = 0, cursor.start, self._width(2 * limit)
        while found < limit and len(slots := self._order(start, start + width)):
            free = self._is_free(cursor, slots)
            for held in held_by.values():
                free &= held(slots)
            ready = slots.reshape(-1, self._size)[free.reshape(-1, self._size).all(axis=1)]
            parts.append(ready.reshape(-1))
            found, start, width = found + ready.size, start + width, 2 * width
        return np.concatenate(parts)[:limit]

    def _advance(self, cursor: _Cursor) -> None:
        """Move the place to look from to the first group (or sample) of which nothing is taken or gone."""
        width = self._width()
        while len(slots := self._order(cursor.start, cursor.start + width)):
            whole = self._is_free(cursor, slots).reshape(-1, self._size).all(axis=1)
            if whole.any():
                cursor.start += int(whole.argmax()) * self._size
                return
            cursor.start += len(slots)

    @property
    def _size(self) -> int:
        return 1 if self.groups is None else self.groups.size

    def _width(self, least: int = 0) -> int:
        """Return how many places to look at: whole groups."""
        return max(_WINDOW, least) // self._size * self._size or self._size

    def _order(self, start: int, stop: int) -> Rows:
        if self.groups is None:
            return np.arange(start, min(stop, self._slots))
        return np.array(self.groups.order[start:stop], np.int64)

    def _cursor(self, task: str) -> _Cursor:
        if task not in self._cursors:
            known = shown(list(self._cursors)) or "none"
            raise DataPlaneError(
                f"partition '{self._name}' has no task '{task}'; registered consumer_tasks: {known}"
            )
        return self._cursors[task]

    def describe_wait(self, task: str, slots: int, held_by: Mapping[str, Held]) -> str:
        """Return what a claim is waiting for: ready samples, how far each column has come, and those yet to come."""
        self._see(slots)
        cursor = self._cursor(task)
        left = np.flatnonzero(self._is_free(cursor))
        ready = len(self._ready(cursor, held_by, self._slots))
        parts = [f"{ready} are ready of {len(left)} not claimed yet"]
        for name, held in held_by.items():
            count = int(np.count_nonzero(held(left)))
            if count < len(left) or not len(left):
                parts.append(f"column '{name}' is written for {count} of them")
        if self.groups is not None:
            parts.append(self.groups.describe())
        come = cursor.count + len(left)
        if come < self._expected:
            parts.append(f"{come} of {self._expected} registered samples have come")
        return "; ".join(parts)

    def is_consumed(self, tasks: Sequence[str], slots: int) -> bool:
        """Return whether all samples that were registered have come, and each task has had them."""
        self._see(slots)
        cursors = [self._cursor(task) for task in tasks]
        return bool(cursors) and all(
            cursor.count >= self._expected and not self._left(cursor) for cursor in cursors
        )

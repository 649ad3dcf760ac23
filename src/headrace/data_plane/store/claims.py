"""What each task of a partition has claimed, and which samples it may claim next."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.data_plane.checks import shown
from headrace.data_plane.requests import ClaimRequest, Registration
from headrace.data_plane.store.chunks import Rows
from headrace.data_plane.store.groups import Groups
from headrace.errors import DataPlaneError

Mask = NDArray[np.bool_]
Held = Callable[[Rows], Mask]
"""Tells which of some slots have a column."""

_WINDOW = 1024
"""Places that a claim looks at, at least."""


class _Cursor:
    """One task's claims: which slots are `taken`, how many rows it has had, and the place to look from."""

    def __init__(self) -> None:
        self.taken: Mask = np.empty(0, bool)
        self.start = 0
        self.count = 0


class PartitionClaims:
    """The claims on the samples of a partition, by slot.

    Slots have an order in which they are handed out: their own, or that of groups, one after the other. A task looks
    from the first place on at which there is anything left for it, so a claim costs what it hands out, not what the
    partition holds.
    """

    def __init__(self, name: str, registration: Registration | None) -> None:
        self.alive: Mask = np.empty(0, bool)
        self._name = name
        self._slots = 0
        self._expected = 1
        self._groups: Groups | None = None
        self._cursors: dict[str, _Cursor] = {}
        if registration is not None:
            self._expected = max(registration.num_samples, 1)
            self._cursors = {task: _Cursor() for task in registration.tasks}
            if registration.group_size > 1:
                self._groups = Groups(name, registration.group_size, registration.group_tag)

    def check(self, ids: Sequence[str], slots: Rows | None, tags: Sequence[Mapping[str, Any]] | None) -> None:
        if self._groups is not None:
            self._groups.check(ids, slots, tags)

    def add(self, ids: Sequence[str], tags: Sequence[Mapping[str, Any]] | None) -> None:
        """Take in new samples, which get the next slots."""
        first, self._slots = self._slots, self._slots + len(ids)
        if len(self.alive) < self._slots:
            size = max(self._slots, 2 * len(self.alive))
            self.alive = _grown(self.alive, size)
            for cursor in self._cursors.values():
                cursor.taken = _grown(cursor.taken, size)
        self.alive[first : self._slots] = True
        if self._groups is not None:
            self._groups.add(ids, first, tags)

    def drop(self, slots: Rows) -> None:
        """Forget samples."""
        self.alive[slots] = False
        if self._groups is not None:
            self._groups.drop(slots)

    def renumber(self, slots: Rows) -> None:
        """Let what is slot `slots[i]` now be slot i; all other slots are free."""
        self.alive, self._slots = self.alive[slots], len(slots)
        for cursor in self._cursors.values():
            cursor.taken, cursor.start = cursor.taken[slots], 0
        if self._groups is not None:
            self._groups.renumber(slots)

    # Claiming.

    def claim(self, request: ClaimRequest, ids: Sequence[str], held_by: Mapping[str, Held]) -> Rows | None:
        """Take the next rows for a task; None if they are not there yet, no rows if it has had them all.

        `ids` are those of all slots; `held_by` tells of each column that the task asks for which slots have it.

        Raises:
            DataPlaneError: an unknown task, or what `Groups.check_claim` refuses.
        """
        cursor = self._cursor(request.task)
        if self._groups is not None:
            self._groups.check_claim(request.rows, ids)
        self._advance(cursor)
        slots = self._ready(cursor, held_by, request.rows)
        if len(slots) < request.rows and not (request.allow_partial and self._is_rest(cursor, slots)):
            return None
        cursor.taken[slots] = True
        cursor.count += len(slots)
        return slots

    def _is_rest(self, cursor: _Cursor, ready: Rows) -> bool:
        left = self._left(cursor)
        return len(ready) == left and cursor.count + left >= self._expected

    def _left(self, cursor: _Cursor) -> int:
        return int(np.count_nonzero(self.alive & ~cursor.taken))

    def _ready(self, cursor: _Cursor, held_by: Mapping[str, Held], limit: int) -> Rows:
        """Return the next slots that the task may have, at most `limit`."""
        parts = [np.empty(0, np.int64)]
        found, start, width = 0, cursor.start, self._width(2 * limit)
        while found < limit and len(slots := self._order(start, start + width)):
            free = self._free(cursor, slots)
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
            whole = self._free(cursor, slots).reshape(-1, self._size).all(axis=1)
            if whole.any():
                cursor.start += int(whole.argmax()) * self._size
                return
            cursor.start += len(slots)

    @property
    def _size(self) -> int:
        return 1 if self._groups is None else self._groups.size

    def _width(self, least: int = 0) -> int:
        """Return how many places to look at: whole groups."""
        return max(_WINDOW, least) // self._size * self._size or self._size

    def _order(self, start: int, stop: int) -> Rows:
        if self._groups is None:
            return np.arange(start, min(stop, self._slots))
        return self._groups.order[start:stop]

    def _free(self, cursor: _Cursor, slots: Rows) -> Mask:
        free: Mask = self.alive[slots] & ~cursor.taken[slots]
        return free

    def _cursor(self, task: str) -> _Cursor:
        if task not in self._cursors:
            known = shown(list(self._cursors)) or "none"
            raise DataPlaneError(
                f"partition '{self._name}' has no task '{task}'; registered consumer_tasks: {known}"
            )
        return self._cursors[task]

    # Reports.

    def describe_wait(self, task: str, held_by: Mapping[str, Held]) -> str:
        """Return what a claim is waiting for: ready samples, how far each column has come, and those yet to come."""
        cursor = self._cursor(task)
        left = np.flatnonzero(self.alive & ~cursor.taken)
        ready = len(self._ready(cursor, held_by, self._slots))
        parts = [f"{ready} are ready of {len(left)} not claimed yet"]
        for name, held in held_by.items():
            count = int(np.count_nonzero(held(left)))
            if count < len(left) or not len(left):
                parts.append(f"column '{name}' is written for {count} of them")
        if self._groups is not None:
            parts.append(self._groups.describe())
        come = cursor.count + len(left)
        if come < self._expected:
            parts.append(f"{come} of {self._expected} registered samples have come")
        return "; ".join(parts)

    def is_consumed(self, tasks: Sequence[str]) -> bool:
        """Return whether all samples that were registered have come, and each task has had them."""
        cursors = [self._cursor(task) for task in tasks]
        return bool(cursors) and all(
            cursor.count >= self._expected and not self._left(cursor) for cursor in cursors
        )


def _grown(array: Mask, size: int) -> Mask:
    """Return an array of `size`, false after what was there."""
    grown = np.zeros(size, bool)
    grown[: len(array)] = array
    return grown

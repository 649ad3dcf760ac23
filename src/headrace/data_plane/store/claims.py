"""What each task of a partition has claimed, for a time or for good, and which samples it may claim next."""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from headrace.data_plane.claim_terms import LeaseReport, TagRule, TaskReport, WaitState
from headrace.data_plane.store.arrivals import Arrivals
from headrace.data_plane.store.columns import Rows, grown
from headrace.data_plane.store.groups import Groups
from headrace.data_plane.store.places import Mask, OpenPlaces
from headrace.errors import ClaimExpired, DataPlaneError
from headrace.utils.arguments import shown

Held = Callable[[Rows], Mask]
"""Tells which of some slots have a column."""
Passes = Callable[[Rows], Mask]
"""Tells which of some groups, a row of slots each, a claim's rules let pass."""
Clock = Callable[[], float]
"""Seconds; only differences count."""

_WINDOW = 1024
"""Slots that a claim looks at, at least."""


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
    lease_s: float | None = None
    holder: str | None = None
    where: list[TagRule] = []  # noqa: RUF012 - never changed
    order: str = "oldest"
    token: str | None = None
    """Id of a claim of which this is a part, with a lease; other stores hand out the others."""


class Ready(NamedTuple):
    """What a task may claim: the number in the order of each of the next groups, and what is known of the others.

    `left` rows can be claimed, now or when they have their columns; `all_ready` counts those of them that have all
    (-1: nobody asked). The task has `leased` rows for a time. Of `expected` rows so many have `come`.
    """

    numbers: Rows
    size: int
    left: int
    leased: int
    all_ready: int
    come: int
    expected: int

    @property
    def state(self) -> list[int]:
        """What changes when a claim that had to wait should look again."""
        return [len(self.numbers), self.left, self.leased, self.all_ready, self.come]


class Consumption(NamedTuple):
    """How many rows are `expected`, have `come`; and of each task, how many it may claim yet or has by a lease."""

    expected: int
    come: int
    open_rows: list[int]


def is_rest(found: int, *, have_come: bool, left: int, leased: int, all_ready: int) -> bool:
    """Return whether nothing will be ready beside what was `found`: all rows have come, and none is waited for."""
    return have_come and all_ready == left and (found > 0 or not leased)


@dataclass
class _Lease:
    """The rows of one claim, which the task has until a time; none lies before `place` of the order."""

    task: str
    holder: str | None
    slots: Rows
    ends: float
    place: int
    is_part: bool = False
    is_done: bool = False
    """All rows of a part were cleared under the claim, which the other parts may hold on to."""


class _Cursor:
    """One task's claims: which slots are `taken`, how many rows it has had, and at which places others may be."""

    def __init__(self) -> None:
        self.taken: Mask = np.empty(0, bool)
        self.open = OpenPlaces()
        self.count = 0


class Claims:
    """The claims on the samples of a partition, by slot.

    Slots have an order in which they are handed out: their own, or that of groups, a place for each. A task looks at
    the places at which there is something left for it, until it has found enough. So a claim costs what it hands out,
    and what it passes that is not ready, not what the partition holds. `catch_up` takes in samples that have come, and
    ends leases that have run out.
    """

    def __init__(self, name: str, registration: Registration | None, clock: Clock = time.monotonic) -> None:
        self.groups: Groups | None = None
        self._name, self._clock = name, clock
        self._gone: Mask = np.empty(0, bool)
        self._slots = 0
        self._most = 0 if registration is None else registration.num_samples
        self.arrivals = Arrivals(max(self._most, 1))
        self._cursors: dict[str, _Cursor] = {}
        self._leases: dict[str, _Lease] = {}
        self._number: Rows = np.empty(0, np.int64)
        if registration is not None:
            self._cursors = {task: _Cursor() for task in registration.tasks}
            if registration.group_size > 1:
                self.groups = Groups(name, registration.group_size, registration.group_tag)

    def _see(self, slots: int) -> None:
        """Take in samples up to that number of slots."""
        self._slots = max(self._slots, slots)
        self._gone = grown(self._gone, self._slots, False)
        for cursor in self._cursors.values():
            cursor.taken = grown(cursor.taken, self._slots, False)

    def drop(self, ids: Sequence[str], slots: Rows, claim: str | None = None) -> None:
        """Forget samples; the claim of which the last goes is finished."""
        self._see(int(slots.max(initial=-1)) + 1)
        if self._cursors and not self.arrivals.are_all:
            had = np.any([cursor.taken[slots] for cursor in self._cursors.values()], axis=0)
            self.arrivals.drop([ids[row] for row in np.flatnonzero(~had).tolist()])
        self._gone[slots] = True
        if self.groups is not None:
            self.groups.drop(slots)
        if claim is not None and not len(self._rest(lease := self._leases[claim])):
            lease.is_done = True
            if not lease.is_part:
                del self._leases[claim]

    def number(self, first: int, numbers: Rows) -> None:
        """Give the slots from `first` on their numbers in an order that other stores share."""
        self._number = grown(self._number, first + len(numbers), 0)
        self._number[first : first + len(numbers)] = numbers

    def numbers(self, slots: Rows) -> Rows:
        """Return the numbers of slots; 0 where nobody gave one."""
        self._number = grown(self._number, int(slots.max(initial=-1)) + 1, 0)
        return self._number[slots]

    def renumber(self, slots: Rows) -> None:
        """Let what is slot `slots[i]` now be slot i; all other slots are free."""
        self._see(int(slots.max(initial=-1)) + 1)
        place = np.full(len(self._gone), -1)
        place[slots] = np.arange(len(slots))
        for lease in self._leases.values():
            now = place[lease.slots]
            lease.slots, lease.place = now[now >= 0], 0
        self._number = self.numbers(slots)
        self._gone, self._slots = self._gone[slots], len(slots)
        for cursor in self._cursors.values():
            cursor.taken, cursor.open = cursor.taken[slots], OpenPlaces()
        if self.groups is not None:
            self.groups.renumber(slots)

    def claim(
        self,
        request: ClaimRequest,
        ids: Sequence[str],
        held_by: Mapping[str, Held],
        passes: Passes | None = None,
    ) -> tuple[Rows, str | None] | None:
        """Take the next rows for a task, and return them with the claim's id, if they are leased.

        None if they are not there yet, no rows if the task has had them all. `ids` are those of all slots; `held_by`
        tells of each column that the task asks for which slots have it.
        """
        cursor, places = self._next(request, ids, held_by, passes)
        slots = self._units(places).reshape(-1)
        if len(slots) < request.rows and not (
            request.allow_partial and self._is_rest(request.task, held_by, len(slots))
        ):
            return None
        cursor.taken[slots] = True
        cursor.count += len(slots)
        if request.lease_s is None or not len(slots):
            return slots, None
        claim, ends = request.token or uuid.uuid4().hex, self._clock() + request.lease_s
        place, is_part = int(places.min()), request.token is not None
        self._leases[claim] = _Lease(request.task, request.holder, slots, ends, place, is_part)
        return slots, claim

    def ready(
        self,
        request: ClaimRequest,
        ids: Sequence[str],
        held_by: Mapping[str, Held],
        passes: Passes | None = None,
    ) -> Ready:
        """Return what `claim` would take, and take nothing."""
        cursor, places = self._next(request, ids, held_by, passes)
        all_ready = self._count(cursor, held_by) if request.allow_partial else -1
        numbers = self.numbers(self._units(places)).max(axis=1, initial=0)
        leased = self._leased(request.task)
        come, expected = self.arrivals.count, self.arrivals.expected
        return Ready(numbers, self._size, self._left(cursor), leased, all_ready, come, expected)

    def _next(
        self, request: ClaimRequest, ids: Sequence[str], held_by: Mapping[str, Held], passes: Passes | None
    ) -> tuple[_Cursor, Rows]:
        """Return the task's cursor, and the places of the rows that are ready for the request."""
        cursor = self._cursor(request.task)
        if request.rows > self._most and not request.allow_partial:
            raise DataPlaneError(
                f"batch_size={request.rows} for partition '{self._name}', which holds at most num_samples={self._most} "
                "samples; claim fewer, set allow_partial=True, or register the partition with more"
            )
        if self.groups is not None:
            self.groups.check_claim(request.rows, ids)
        is_freshest = request.order == "freshest"
        return cursor, self._ready(cursor, held_by, request.rows, passes, is_freshest=is_freshest)

    def _is_rest(self, task: str, held_by: Mapping[str, Held], found: int) -> bool:
        cursor = self._cursor(task)
        all_ready = self._count(cursor, held_by)
        left, leased = self._left(cursor), self._leased(task)
        return is_rest(found, have_come=self.arrivals.are_all, left=left, leased=leased, all_ready=all_ready)

    # Leases.

    def check_in_force(self, claim: str, slots: Rows, ids: Sequence[str]) -> None:
        """Refuse the writer of samples who no longer has them, or never had; a slot below 0 is a sample not there."""
        own = np.isin(slots, self._lease(claim).slots)
        if not own.all():
            raise not_of_claim(self._name, [ids[row] for row in np.flatnonzero(~own).tolist()], claim)

    def renew(self, claim: str, lease_s: float) -> None:
        self._lease(claim).ends = self._clock() + lease_s

    def hold(self, claim: str, least_s: float) -> bool:
        """Let a claim in force last so long at least; return whether it has rows that were not cleared under it."""
        lease = self._lease(claim)
        lease.ends = max(lease.ends, self._clock() + least_s)
        return not lease.is_done

    def finish(self, claim: str) -> None:
        """Let the rows of a lease be taken for good."""
        self._lease(claim)
        del self._leases[claim]

    def release(self, claim: str) -> None:
        """Give the rows of a lease back to its task, in their old place; a lease that is not in force is ignored."""
        lease = self._leases.pop(claim, None)
        if lease is not None:
            self._give_back(lease.task, self._rest(lease), lease.place)

    def claimed(self, claim: str) -> Rows:
        """Return the slots of a claim in force that are not cleared."""
        return self._rest(self._lease(claim))

    def mark(self, task: str, slots: Rows) -> None:
        """Let a task have had samples for good, without a claim."""
        cursor = self._cursor(task)
        new = slots[~cursor.taken[slots]]
        cursor.taken[new] = True
        cursor.count += len(new)

    def take_back(self, task: str, slots: Rows, claim: str | None) -> None:
        """Undo the claim that was made last."""
        if claim is not None:
            self.release(claim)
        else:
            self._give_back(task, slots, 0)

    def _give_back(self, task: str, slots: Rows, place: int) -> None:
        cursor = self._cursors[task]
        cursor.taken[slots] = False
        cursor.count -= len(slots)
        cursor.open.forget(place)

    def catch_up(self, slots: int) -> None:
        """Take in samples up to that number of slots, and release the leases that have run out."""
        self._see(slots)
        now = self._clock()
        for claim in [claim for claim, lease in self._leases.items() if lease.ends <= now]:
            self.release(claim)

    def next_end_s(self) -> float:
        """Return how long it is until the next lease runs out; infinite if there is none."""
        return min((lease.ends for lease in self._leases.values()), default=float("inf")) - self._clock()

    def _lease(self, claim: str) -> _Lease:
        if claim not in self._leases:
            raise claim_expired(self._name, claim)
        return self._leases[claim]

    def _rest(self, lease: _Lease) -> Rows:
        return lease.slots[~self._gone[lease.slots]]

    def _leased(self, task: str) -> int:
        leases = (lease for lease in self._leases.values() if lease.task == task and not lease.is_done)
        return sum(len(self._rest(lease)) for lease in leases)

    # Which samples are left.

    def _left(self, cursor: _Cursor) -> int:
        """Return how many rows a task may claim, now or when they have their columns and their groups are whole."""
        free = self._is_free(cursor)
        if self.groups is not None:
            free[self.groups.broken_slots] = False
            if self.groups.is_mended:
                units = self.groups.at(np.arange(self.groups.count))
                units = units[~self._gone[units].any(axis=1)]
                free[units[~free[units].all(axis=1)]] = False
        return int(np.count_nonzero(free))

    def _is_free(self, cursor: _Cursor, slots: Rows | None = None) -> Mask:
        which = slice(self._slots) if slots is None else slots
        free: Mask = ~(self._gone[which] | cursor.taken[which])
        return free

    def _ready(
        self,
        cursor: _Cursor,
        held_by: Mapping[str, Held],
        limit: int,
        passes: Passes | None = None,
        *,
        is_freshest: bool = False,
    ) -> Rows:
        """Return the next places at which the task may have all rows, for at most `limit` rows."""

        def is_open(places: Rows) -> Mask:
            whole: Mask = np.logical_and.reduce(self._is_free(cursor, self._units(places)), axis=1)
            return whole

        cursor.open.see(self._slots if self.groups is None else self.groups.count)
        parts, found = [np.empty(0, np.int64)], 0
        width = max(_WINDOW, 2 * limit) // self._size or 1
        for places in cursor.open.walk(is_open, width, is_back=is_freshest):
            units = self._units(places)
            slots = units.reshape(-1)
            ready = np.ones(len(slots), bool)
            for held in held_by.values():
                ready &= held(slots)
            at = np.flatnonzero(ready.reshape(units.shape).all(axis=1))[:: -1 if is_freshest else 1]
            if passes is not None and len(at):
                at = at[passes(units[at])]
            parts.append(places[at])
            found += len(at) * self._size
            if found >= limit:
                break
        return np.concatenate(parts)[: -(-limit // self._size)]

    def _count(self, cursor: _Cursor, held_by: Mapping[str, Held], passes: Passes | None = None) -> int:
        """Return how many rows the task may have."""
        return len(self._ready(cursor, held_by, self._slots, passes)) * self._size

    @property
    def _size(self) -> int:
        return 1 if self.groups is None else self.groups.size

    def _units(self, places: Rows) -> Rows:
        """Return the slots at each of some places."""
        return places[:, None] if self.groups is None else self.groups.at(places)

    def _cursor(self, task: str) -> _Cursor:
        if task not in self._cursors:
            known = shown(list(self._cursors)) or "none"
            raise DataPlaneError(
                f"partition '{self._name}' has no task '{task}'; registered consumer_tasks: {known}"
            )
        return self._cursors[task]

    # What is told.

    def waiting(
        self, request: ClaimRequest, held_by: Mapping[str, Held], passes: Passes | None = None
    ) -> WaitState:
        """Return what a claim is waiting for."""
        cursor = self._cursor(request.task)
        left = np.flatnonzero(self._is_free(cursor))
        return WaitState(
            ready=self._count(cursor, held_by),
            left=len(left),
            come=self.arrivals.count,
            expected=self.arrivals.expected,
            passing=None if passes is None else self._count(cursor, held_by, passes),
            written={name: int(np.count_nonzero(held(left))) for name, held in held_by.items()},
            broken=None if self.groups is None else self.groups.broken(),
            leases=[lease for lease in self.leases() if lease.task == request.task],
        )

    def consumption(self, tasks: Sequence[str]) -> Consumption:
        """Return how far tasks have come with the samples."""
        open_rows = [self._left(self._cursor(task)) + self._leased(task) for task in tasks]
        return Consumption(self.arrivals.expected, self.arrivals.count, open_rows)

    def is_consumed(self, tasks: Sequence[str]) -> bool:
        """Return whether all samples that were registered have come, and each task has had for good what is left."""
        return consumed([self.consumption(tasks)])

    def leases(self) -> list[LeaseReport]:
        now = self._clock()
        return [
            LeaseReport(claim, lease.task, lease.holder, len(self._rest(lease)), lease.ends - now)
            for claim, lease in self._leases.items()
            if not lease.is_done
        ]

    def tasks(self) -> dict[str, TaskReport]:
        reports: dict[str, TaskReport] = {}
        for task, cursor in self._cursors.items():
            leased, ready = self._leased(task), self._count(cursor, {})
            reports[task] = TaskReport(cursor.count, leased, cursor.count - leased, ready)
        return reports

    def unconsumed(self) -> Rows:
        """Return the slots that some task has not had for good; all, if there are no tasks."""
        had = np.full(self._slots, bool(self._cursors))
        for cursor in self._cursors.values():
            had &= cursor.taken[: self._slots]
        for lease in self._leases.values():
            had[lease.slots] = False
        return np.flatnonzero(~(had | self._gone[: self._slots]))


def claim_expired(partition: str, claim: str) -> ClaimExpired:
    return ClaimExpired(
        f"claim '{claim}' on partition '{partition}' is no longer in force: its lease ran out, it was released or "
        "finished, or the partition was emptied. Claim rows again; a longer lease_s, or renew_claim in time, keeps them"
    )


def consumed(parts: Sequence[Consumption]) -> bool:
    """Return whether tasks have had all rows for good, by what the parts of a partition say."""
    have_come = sum(part.come for part in parts) >= parts[0].expected
    return have_come and bool(parts[0].open_rows) and not any(n for part in parts for n in part.open_rows)


def not_of_claim(partition: str, ids: Sequence[str], claim: str) -> DataPlaneError:
    return DataPlaneError(
        f"{shown(ids)} of partition '{partition}' are not among the rows of claim '{claim}'; write and clear under a "
        "claim only what it handed out"
    )

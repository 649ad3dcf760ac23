"""Partitions behind one lock: their samples, columns, lengths, tags and tasks.

Where the rows lie, here or elsewhere, is for a client of the store to know. Bytes are copied outside the lock: a put
copies its columns before it takes the lock, and a get only selects under the lock, since chunks never change.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np

from headrace.data_plane.claim_terms import PartitionReport, WaitState
from headrace.data_plane.store.claims import ClaimRequest, Clock, Registration, claim_expired
from headrace.data_plane.store.columns import Block, Columns, Put, RowFacts, Selection, Slots
from headrace.data_plane.store.partition import Partition
from headrace.errors import CapacityExceeded, DataPlaneError, SampleNotFound
from headrace.utils.arguments import shown

_REMEMBERED = 1000
"""Registrations that are kept of partitions that have ended."""

Answer = TypeVar("Answer")


class SampleStore(Generic[Block]):
    """Partitions by name, at most `capacity` samples over all of them.

    A partition ends when it is cleared as a whole or, if nobody has registered it, with its last row. Then nothing is
    left of it but its registration, while it is one of the latest: it begins again, empty, when somebody asks for it.
    `register`, `put` and `clear` return the blocks that no row is left of.
    """

    def __init__(self, capacity: int, clock: Clock = time.monotonic) -> None:
        self._capacity, self._clock = capacity, clock
        self._partitions: dict[str, Partition[Block]] = {}
        self._ended: dict[str, Registration] = {}
        self._held = 0
        self._changed = threading.Condition()  # who has it may take it again
        self._is_closed = False

    def register(self, registration: Registration) -> list[Block]:
        """Open a partition, in place of one of the same name."""
        name, asked = registration.partition_id, registration.num_samples
        if asked > self._capacity:
            raise CapacityExceeded(
                f"partition '{name}' expects {asked} samples; the store holds at most {self._capacity}. Raise "
                "data_plane.storage_capacity"
            )
        with self._changed:
            self._check_open()
            gone = self._end(name)
            self._ended.pop(name, None)
            self._partitions[name] = self._opened(name, registration)
            self._changed.notify_all()
            return gone

    def _opened(self, name: str, registration: Registration | None) -> Partition[Block]:
        return Partition(name, registration, self._clock)

    def _end(self, name: str) -> list[Block]:
        """Drop a partition with its rows; of a registered one, its registration stays for a while."""
        self._ended.pop(name, None)
        partition = self._partitions.pop(name, None)
        if partition is None:
            return []
        self._held -= len(partition)
        if partition.registration is not None:
            self._ended[name] = partition.registration
            if len(self._ended) > _REMEMBERED:
                del self._ended[next(iter(self._ended))]
        return partition.blocks

    def put(self, put: Put, columns: Columns[Block]) -> tuple[RowFacts | None, list[Block]]:
        """Write rows, all or nothing; a partition that was not registered appears with its first put.

        None in place of facts: a put that is to be done once was done before, and its own blocks are in nobody's use.
        """
        name, ids = put.partition_id, put.ids
        with self._changed:
            partition, slots, new = self._checked(put, columns)
            if new is None:
                return None, [block for blocks in columns.values() for block in blocks]
            if ids or partition.registration is not None:
                self._partitions[name] = partition
                self._ended.pop(name, None)
            self._held += new
            slots, gone = partition.write(put, columns, slots)
            facts = partition.facts(ids, slots, with_tags=put.tells)
            self._changed.notify_all()
        return facts, gone

    def check_put(self, put: Put, columns: Columns[Block]) -> tuple[Put, int | None]:
        """Raise what `put` would raise; return the put with the slots found, and how many rows are new.

        None in place of new rows: there is nothing to write.
        """
        with self._changed:
            partition, slots, new = self._checked(put, columns)
            return put._replace(known=(partition, partition.version, slots)), new

    def _checked(self, put: Put, columns: Columns[Block]) -> tuple[Partition[Block], Slots, int | None]:
        """Return the partition of a put that nothing speaks against, which may be new, the ids' slots, and new rows.

        None in place of new rows: all were put before, and were to be put once.
        """
        self._check_open()
        name = put.partition_id
        partition = self._partitions.get(name)
        if partition is None:
            partition = self._opened(name, self._ended.get(name))
        is_known = put.known is not None and put.known[:2] == (partition, partition.version)
        slots = put.known[2] if is_known else partition.locate(put.ids)
        if put.once and partition.has_had(put, slots):
            return partition, slots, None
        new = partition.check(put, columns, slots, has_groups_checked=is_known)
        if not put.part_of and self._held + new > self._capacity:
            raise store_full(name, new, self._capacity, self._held)
        return partition, slots, new

    def select(
        self, partition_id: str, ids: Sequence[str], names: Sequence[str]
    ) -> dict[str, Selection[Block]]:
        """Return how to read columns of rows.

        Raises:
            SampleNotFound: unknown ids or columns that are not written, all named.
        """
        with self._changed:
            slots, columns = self._existing(partition_id, ids).find(ids, names)
            return {name: column.select(slots) for name, column in columns.items()}

    def shared_columns(self, partition_id: str, ids: Sequence[str]) -> list[str]:
        with self._changed:
            return self._existing(partition_id, ids).shared_columns(ids)

    def clear(self, partition_id: str, ids: Sequence[str] | None, claim: str | None = None) -> list[Block]:
        """Remove rows, or with None the partition; what is not there is ignored. A `claim` has to be in force."""
        with self._changed:
            self._check_open()
            if claim is not None:
                self._claimed(partition_id, claim).claims.check_in_force(claim, np.empty(0, np.int64), ())
            partition = self._partitions.get(partition_id)
            if partition is None:
                return []
            gone: list[Block] = []
            if ids is not None:
                before = len(partition)
                gone = partition.clear(ids, claim)
                self._held -= before - len(partition)
            if ids is None or (partition.registration is None and not len(partition)):
                gone += self._end(partition_id)
            self._changed.notify_all()
            return gone

    # Claims.

    def claim(self, request: ClaimRequest, timeout_s: float = 0.0) -> RowFacts | None:
        """Take rows for a task, waiting up to `timeout_s` for them.

        None if they did not come; no rows if the task has had all there will be.
        """

        def attempt() -> RowFacts | None:
            partition = self._registered(request.partition_id)
            claimed = partition.claim(request)
            if claimed is None:
                return None
            ids, slots, claim = claimed
            return partition.facts(ids, slots)._replace(claim=claim)

        return self._waited(attempt, timeout_s)

    def take_back(self, request: ClaimRequest, facts: RowFacts) -> None:
        """Undo the claim that was made last, with nothing since, of which nobody will know."""
        with self._changed:
            partition = self._registered(request.partition_id)
            partition.claims.take_back(request.task, partition.locate(facts.sample_ids).at, facts.claim)
            self._changed.notify_all()

    def has_room(self, partition_id: str, rows: int, timeout_s: float = 0.0) -> bool:
        """Return whether so many rows more fit in, waiting up to `timeout_s` for it.

        Raises:
            DataPlaneError: they never will.
        """

        def attempt() -> bool:
            most = self._most(self._registered(partition_id))
            if rows > most:
                raise never_room(partition_id, rows, most)
            return self.room(partition_id) >= rows

        return self._waited(attempt, timeout_s)

    def room(self, partition_id: str) -> int:
        """Return how many rows more fit into a partition."""
        with self._changed:
            partition = self._registered(partition_id)
            return min(self._most(partition) - len(partition), self._capacity - self._held)

    def _most(self, partition: Partition[Block]) -> int:
        return self._capacity if partition.registration is None else partition.registration.num_samples

    def _waited(self, attempt: Callable[[], Answer], timeout_s: float) -> Answer:
        """Return what `attempt` does as soon as that is true, or after that time what it does then.

        It is tried again when something has changed: rows were put, given back or cleared, or a lease has run out.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                answer, left = attempt(), deadline - time.monotonic()
                if answer or left <= 0:
                    return answer
                self._changed.wait(min(left, max(self.next_end_s(), 0.0), threading.TIMEOUT_MAX))

    def next_end_s(self) -> float:
        """Return how long it is until a lease runs out, which may let a claim that waits have rows."""
        with self._changed:
            ends = [partition.claims.next_end_s() for partition in self._partitions.values()]
        return min(ends, default=float("inf"))

    def renew(self, partition_id: str, claim: str, lease_s: float) -> None:
        """Let a claim end that long from now; raises ClaimExpired."""
        with self._changed:
            self._claimed(partition_id, claim).claims.renew(claim, lease_s)
            self._changed.notify_all()

    def finish(self, partition_id: str, claim: str) -> None:
        """Let the rows of a claim be taken for good; raises ClaimExpired."""
        with self._changed:
            self._claimed(partition_id, claim).claims.finish(claim)
            self._changed.notify_all()

    def claimed_ids(self, partition_id: str, claim: str) -> list[str]:
        """Return the rows of a claim that are there; raises ClaimExpired."""
        with self._changed:
            return self._claimed(partition_id, claim).claimed_ids(claim)

    def mark_consumed(self, partition_id: str, task: str, ids: Sequence[str]) -> None:
        """Let a task have had rows for good; what is not there is ignored."""
        with self._changed:
            self._registered(partition_id).mark_consumed(task, ids)
            self._changed.notify_all()

    def release(self, partition_id: str, claim: str) -> None:
        """Give the rows of a claim back to its task, if it is in force."""
        with self._changed:
            self._check_open()
            if partition_id in self._partitions:
                self._partitions[partition_id].claims.release(claim)
                self._changed.notify_all()

    def _claimed(self, partition_id: str, claim: str) -> Partition[Block]:
        """Return a partition of which there are claims: that has rows."""
        self._check_open()
        if partition_id not in self._partitions:
            raise claim_expired(partition_id, claim)
        return self._partitions[partition_id]

    def claim_timeout_text(self, request: ClaimRequest) -> str:
        """Return what a claim has waited for in vain."""
        with self._changed:
            return claim_timeout(request, self._registered(request.partition_id).waiting(request))

    def report(self, partition_id: str, limit: int) -> PartitionReport:
        """Return what a partition holds, with at most `limit` rows that are not consumed."""
        with self._changed:
            return self._registered(partition_id).report(limit)

    def is_consumed(self, partition_id: str, tasks: Sequence[str]) -> bool:
        with self._changed:
            return self._registered(partition_id).claims.is_consumed(tasks)

    def sample_ids(self) -> dict[str, list[str]]:
        with self._changed:
            return {name: partition.sample_ids() for name, partition in self._partitions.items()}

    def stored_bytes(self) -> dict[str, int]:
        with self._changed:
            return {name: partition.nbytes for name, partition in self._partitions.items()}

    def close(self) -> None:
        """Drop everything and wake all waiting claims, which then fail."""
        with self._changed:
            self._is_closed = True
            self._partitions.clear()
            self._ended.clear()
            self._changed.notify_all()

    def _check_open(self) -> None:
        if self._is_closed:
            raise DataPlaneError("the store is closed: the client that started it was closed")

    def _registered(self, name: str) -> Partition[Block]:
        """Return a partition; one that has ended begins again."""
        self._check_open()
        if name in self._ended:
            self._partitions[name] = self._opened(name, self._ended.pop(name))
        if name not in self._partitions:
            raise DataPlaneError(
                f"unknown partition '{name}'; there are: {shown(list(self._partitions)) or 'none'}"
            )
        return self._partitions[name]

    def _existing(self, name: str, ids: Sequence[str]) -> Partition[Block]:
        self._check_open()
        if name not in self._partitions:
            raise unknown_partition(name, list(self._partitions), ids)
        return self._partitions[name]


def store_full(partition: str, new: int, capacity: int, held: int) -> CapacityExceeded:
    return CapacityExceeded(
        f"a put of {new} new samples into partition '{partition}' does not fit: the store holds {held} of at most "
        f"{capacity}. Clear samples that are done with, or raise data_plane.storage_capacity"
    )


def never_room(partition: str, rows: int, most: int) -> DataPlaneError:
    return DataPlaneError(
        f"no room for {rows} samples at a time in partition '{partition}': it holds at most num_samples={most}. Wait "
        "for fewer, or register the partition with more"
    )


def claim_timeout(request: ClaimRequest, state: WaitState) -> str:
    """Return what a claim has waited for in vain."""
    return (
        f"task '{request.task}' waited in vain for {request.rows} samples of partition '{request.partition_id}': "
        f"{state}. Raise timeout_s, or look for the producer of what is missing"
    )


def unknown_partition(name: str, known: Sequence[str], ids: Sequence[str]) -> SampleNotFound:
    there = shown(list(known)) or "none"
    return SampleNotFound(f"unknown partition '{name}' (there are: {there}), so no sample ids {shown(ids)}")

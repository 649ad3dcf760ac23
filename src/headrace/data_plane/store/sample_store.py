"""Partitions behind one lock. Where their rows lie, here or elsewhere, is for a client of the store to know.

Bytes are copied outside the lock: a put copies its columns before it takes the lock, and a get only selects
under the lock, since chunks never change.
"""

import threading
import time
from collections.abc import Sequence
from typing import Generic

from headrace.data_plane.store.columns import Block, Put, Selection, Slots, shown
from headrace.data_plane.store.partition import Partition, RowFacts
from headrace.data_plane.store.requests import ClaimRequest, Registration
from headrace.errors import CapacityExceeded, ClaimTimeout, DataPlaneError, SampleNotFound

_REMEMBERED = 1000
"""Registrations that are kept of partitions that have ended."""


class SampleStore(Generic[Block]):
    """Partitions by name, at most `capacity` samples over all of them.

    A partition ends when it is cleared as a whole or, if nobody has registered it, with its last row. Then nothing is
    left of it but its registration, while it is one of the latest: it begins again, empty, when somebody asks for it.
    `register`, `put` and `clear` return the blocks that no row is left of.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._partitions: dict[str, Partition[Block]] = {}
        self._ended: dict[str, Registration] = {}
        self._held = 0
        self._changed = threading.Condition()
        self._waiting = 0
        self._is_closed = False

    def register(self, registration: Registration) -> list[Block]:
        """Open a partition, in place of one of the same name.

        Raises:
            CapacityExceeded: more samples than the store holds at most.
        """
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
            self._partitions[name] = Partition(name, registration)
            self._changed.notify_all()
            return gone

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

    def put(self, put: Put[Block]) -> tuple[RowFacts, list[Block]]:
        """Write rows, all or nothing; a partition that was not registered appears with its first put."""
        name, ids = put.partition_id, put.ids
        with self._changed:
            partition, slots, new = self._checked(put)
            if ids or partition.registration is not None:
                self._partitions[name] = partition
                self._ended.pop(name, None)
            self._held += new
            slots, gone = partition.write(put, slots)
            facts = partition.facts(ids, slots)
            if self._waiting:
                self._changed.notify_all()
        return facts, gone

    def check_put(self, put: Put[Block]) -> None:
        """Raise what `put` would raise."""
        with self._changed:
            self._checked(put)

    def _checked(self, put: Put[Block]) -> tuple[Partition[Block], Slots, int]:
        """Return the partition of a put that nothing speaks against, which may be new, the ids' slots, and new rows."""
        self._check_open()
        name = put.partition_id
        partition = self._partitions.get(name)
        if partition is None:
            partition = Partition(name, self._ended.get(name))
        slots = partition.locate(put.ids)
        new = partition.check(put, slots)
        if self._held + new > self._capacity:
            raise CapacityExceeded(
                f"a put of {new} new samples into partition '{name}' does not fit: the store holds {self._held} of "
                f"at most {self._capacity}. Clear samples that are done with, or raise data_plane.storage_capacity"
            )
        return partition, slots, new

    def select(
        self, partition_id: str, ids: Sequence[str], names: Sequence[str]
    ) -> dict[str, Selection[Block]]:
        """Return how to read columns of rows.

        Raises:
            SampleNotFound: unknown ids or columns that are not written, all named.
        """
        with self._changed:
            return self._existing(partition_id, ids).select(ids, names)

    def shared_columns(self, partition_id: str, ids: Sequence[str]) -> list[str]:
        """Return the columns that all of `ids` have."""
        with self._changed:
            return self._existing(partition_id, ids).shared_columns(ids)

    def clear(self, partition_id: str, ids: Sequence[str] | None) -> list[Block]:
        """Remove rows, or with None the partition; what is not there is ignored."""
        with self._changed:
            self._check_open()
            partition = self._partitions.get(partition_id)
            if partition is None:
                return []
            gone: list[Block] = []
            if ids is not None:
                before = len(partition)
                gone = partition.clear(ids)
                self._held -= before - len(partition)
            if ids is None or (partition.registration is None and not len(partition)):
                gone += self._end(partition_id)
            return gone

    def claim(self, request: ClaimRequest, timeout_s: float = 0.0) -> RowFacts | None:
        """Take rows for a task, waiting up to `timeout_s` for them.

        None if they did not come; no rows if the task has had all there will be.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                partition = self._registered(request.partition_id)
                claimed = partition.claim(request)
                if claimed is not None:
                    ids, slots = claimed
                    return partition.facts(ids, slots)
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._waiting += 1
                try:
                    self._changed.wait(min(left, threading.TIMEOUT_MAX))
                finally:
                    self._waiting -= 1

    def claim_timeout(self, request: ClaimRequest) -> ClaimTimeout:
        """Return the error that says what a claim has waited for."""
        with self._changed:
            state = self._registered(request.partition_id).describe_wait(request)
        return ClaimTimeout(
            f"task '{request.task}' waited in vain for {request.rows} samples of partition "
            f"'{request.partition_id}': {state}. Raise timeout_s, or look for the producer of what is missing"
        )

    def is_consumed(self, partition_id: str, tasks: Sequence[str]) -> bool:
        with self._changed:
            return self._registered(partition_id).is_consumed(tasks)

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
            self._partitions[name] = Partition(name, self._ended.pop(name))
        if name not in self._partitions:
            raise DataPlaneError(f"unknown partition '{name}'; there are: {self._known()}")
        return self._partitions[name]

    def _existing(self, name: str, ids: Sequence[str]) -> Partition[Block]:
        self._check_open()
        if name not in self._partitions:
            raise SampleNotFound(
                f"unknown partition '{name}' (there are: {self._known()}), so no sample ids {shown(ids)}"
            )
        return self._partitions[name]

    def _known(self) -> str:
        return shown(list(self._partitions)) or "none"

"""Partitions behind one lock: `SampleStore` keeps the books, `LocalStore` the bytes as well.

Bytes are copied outside the lock: a put copies its columns before it takes the lock, and a get only selects
under the lock, since chunks never change.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple

from headrace.data_plane.checks import shown
from headrace.data_plane.requests import ClaimRequest, Registration
from headrace.data_plane.store.chunks import Chunk, OwnOffsets, Rows
from headrace.data_plane.store.column import Block, Selection, read
from headrace.data_plane.store.lengths import Said
from headrace.data_plane.store.partition import Partition
from headrace.errors import CapacityExceeded, ClaimTimeout, DataPlaneError, SampleNotFound

_REMEMBERED = 1000
"""Registrations that are kept of partitions that have ended."""


class RowFacts(NamedTuple):
    """What a meta says about rows."""

    sample_ids: list[str]
    sequence_lengths: list[int] | None
    tags: list[dict[str, Any]] | None


class SampleStore(Generic[Block]):
    """Partitions by name, at most `capacity` samples over all of them; their rows may be kept elsewhere.

    A partition ends when it is cleared as a whole or, if nobody has registered it, with its last row. Then nothing is
    left of it but its registration, while it is one of the latest: it begins again, empty, when somebody asks for it.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._partitions: dict[str, Partition[Block]] = {}
        self._ended: dict[str, Registration] = {}
        self._held = 0
        self._changed = threading.Condition()
        self._waiting = 0
        self._is_closed = False

    def register(self, registration: Registration) -> None:
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
            self._end(name)
            self._ended.pop(name, None)
            self._partitions[name] = Partition(name, registration)
            self._changed.notify_all()

    def _end(self, name: str) -> None:
        """Drop a partition with its rows; of a registered one, its registration stays for a while."""
        self._ended.pop(name, None)
        partition = self._partitions.pop(name, None)
        if partition is None:
            return
        self._held -= len(partition)
        if partition.registration is not None:
            self._ended[name] = partition.registration
            if len(self._ended) > _REMEMBERED:
                del self._ended[next(iter(self._ended))]

    def _find(self, name: str) -> Partition[Block] | None:
        """Return a partition; one that has ended begins again."""
        if name in self._ended:
            self._partitions[name] = Partition(name, self._ended.pop(name))
        return self._partitions.get(name)

    def put(
        self,
        partition_id: str,
        ids: list[str],
        chunks: Mapping[str, Sequence[Block]],
        tags: Sequence[Mapping[str, Any]] | None,
        lengths: Said,
    ) -> RowFacts:
        """Write rows, all or nothing; a partition that was not registered appears with its first put.

        The `chunks` of a column together have one row per id; no ids: one chunk at least. `lengths` are what
        `said_lengths` gives for the columns.
        """
        with self._changed:
            partition, slots, new = self._checked(partition_id, ids, chunks, tags, lengths)
            if ids or partition.registration is not None:
                self._partitions[partition_id] = partition
                self._ended.pop(partition_id, None)
            self._held += new
            slots = partition.put(ids, slots, chunks, tags, lengths)
            facts = self._facts(partition, ids, slots)
            if self._waiting:
                self._changed.notify_all()
        return facts()

    def check_put(
        self,
        partition_id: str,
        ids: list[str],
        chunks: Mapping[str, Sequence[Block]],
        tags: Sequence[Mapping[str, Any]] | None,
        lengths: Said,
    ) -> None:
        """Raise what `put` would raise."""
        with self._changed:
            self._checked(partition_id, ids, chunks, tags, lengths)

    def _checked(
        self,
        partition_id: str,
        ids: list[str],
        chunks: Mapping[str, Sequence[Block]],
        tags: Sequence[Mapping[str, Any]] | None,
        lengths: Said,
    ) -> tuple[Partition[Block], Rows | None, int]:
        """Return the partition of a put that nothing speaks against, which may be new, the ids' slots, and new rows."""
        self._check_open()
        partition = self._partitions.get(partition_id)
        if partition is None:
            partition = Partition(partition_id, self._ended.get(partition_id))
        slots = partition.locate(ids)
        new = partition.count_new(ids, slots)
        self._check_capacity(partition_id, new)
        partition.check_room(new)
        partition.check_put(ids, slots, chunks, tags, lengths)
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

    def shared_columns(self, partition_id: str, ids: list[str]) -> list[str]:
        """Return the columns that all of `ids` have."""
        with self._changed:
            return self._existing(partition_id, ids).shared_columns(ids)

    def clear(self, partition_id: str, ids: Sequence[str] | None) -> None:
        """Remove rows, or with None the partition; what is not there is ignored."""
        with self._changed:
            self._check_open()
            partition = self._partitions.get(partition_id)
            if partition is None:
                return
            if ids is not None:
                before = len(partition)
                partition.clear(ids)
                self._held -= before - len(partition)
            if ids is None or (partition.registration is None and not len(partition)):
                self._end(partition_id)

    def claim(self, request: ClaimRequest, timeout_s: float = 0.0) -> RowFacts | None:
        """Take rows for a task, waiting up to `timeout_s` for them.

        None if they did not come; no rows if the task has had all there will be.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (facts := self._claim_now(request)) is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._waiting += 1
                try:
                    self._changed.wait(min(left, threading.TIMEOUT_MAX))
                finally:
                    self._waiting -= 1
        return facts()

    def _claim_now(self, request: ClaimRequest) -> Callable[[], RowFacts] | None:
        partition = self._registered(request.partition_id)
        slots = partition.claim(request)
        return None if slots is None else self._facts(partition, partition.ids_of(slots), slots)

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

    def _facts(self, partition: Partition[Block], ids: list[str], slots: Rows) -> Callable[[], RowFacts]:
        """Gather facts about rows under the lock; the result lists the lengths, outside it."""
        tags, lengths = partition.tags_of(ids), partition.lengths_of(slots)
        return lambda: RowFacts(ids, None if lengths is None else lengths.tolist(), tags)

    def _check_capacity(self, partition_id: str, asked: int) -> None:
        if self._held + asked > self._capacity:
            raise CapacityExceeded(
                f"a put of {asked} new samples into partition '{partition_id}' does not fit: the store holds "
                f"{self._held} of at most {self._capacity}. Clear samples that are done with, or raise "
                "data_plane.storage_capacity"
            )

    def _check_open(self) -> None:
        if self._is_closed:
            raise DataPlaneError("the store is closed: the client that started it was closed")

    def _registered(self, partition_id: str) -> Partition[Block]:
        self._check_open()
        partition = self._find(partition_id)
        if partition is None:
            raise DataPlaneError(f"unknown partition '{partition_id}'; there are: {self._known()}")
        return partition

    def _existing(self, partition_id: str, ids: Sequence[str]) -> Partition[Block]:
        self._check_open()
        partition = self._partitions.get(partition_id)
        if partition is None:
            raise SampleNotFound(
                f"unknown partition '{partition_id}' (there are: {self._known()}), so no sample ids {shown(ids)}"
            )
        return partition

    def _known(self) -> str:
        return shown(list(self._partitions)) or "none"


class LocalStore(SampleStore[Chunk]):
    """Partitions with their bytes, in this process."""

    def get(self, partition_id: str, ids: Sequence[str], names: Sequence[str]) -> dict[str, Chunk]:
        """Return columns of rows in memory that is fresh for this call; raises what `select` raises."""
        selections, shared = self.select(partition_id, ids, names), OwnOffsets()
        return {name: read(selection, shared) for name, selection in selections.items()}

"""Partitions behind one lock: `SampleStore` keeps the books, `LocalStore` the bytes as well.

Bytes are copied outside the lock: a put copies its columns before it takes the lock, and a get only selects
under the lock, since chunks never change.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple

from headrace.data_plane.adapters.local_chunks import Chunk, OwnOffsets, Rows
from headrace.data_plane.adapters.local_column import Block, Selection, read
from headrace.data_plane.adapters.local_partition import Partition
from headrace.data_plane.adapters.partition_lengths import Said
from headrace.data_plane.checks import shown
from headrace.errors import CapacityExceeded, ClaimTimeout, DataPlaneError, SampleNotFound


class RowFacts(NamedTuple):
    """What a meta says about rows."""

    sample_ids: list[str]
    sequence_lengths: list[int] | None
    tags: list[dict[str, Any]] | None


class SampleStore(Generic[Block]):
    """Partitions by name, at most `capacity` samples over all of them; their rows may be kept elsewhere."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._partitions: dict[str, Partition[Block]] = {}
        self._changed = threading.Condition()
        self._waiting = 0
        self._is_closed = False

    def register(self, partition: Partition[Block], num_samples: int) -> None:
        """Add a partition, in place of one of the same name.

        Raises:
            CapacityExceeded: `num_samples` is more than the store holds at most.
            DataPlaneError: `num_samples` are no whole groups.
        """
        partition.check_size(num_samples)
        if num_samples > self._capacity:
            raise CapacityExceeded(
                f"partition '{partition.name}' expects {num_samples} samples; the store holds at most "
                f"{self._capacity}. Raise data_plane.storage_capacity"
            )
        with self._changed:
            self._check_open()
            self._partitions[partition.name] = partition
            self._changed.notify_all()

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
            self._check_open()
            partition = self._partitions.get(partition_id)
            if partition is None:
                partition = Partition(partition_id)
            slots = partition.locate(ids)
            self._check_capacity(partition_id, partition.count_new(ids, slots))
            partition.check_put(ids, slots, chunks, tags, lengths)
            self._partitions[partition_id] = partition
            slots = partition.put(ids, slots, chunks, tags, lengths)
            facts = self._facts(partition, ids, slots)
            if self._waiting:
                self._changed.notify_all()
        return facts()

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
        """Remove rows; what is not there is ignored."""
        with self._changed:
            self._check_open()
            if partition_id in self._partitions:
                self._partitions[partition_id].clear(ids)

    def claim(
        self, partition_id: str, task: str, required: Sequence[str], count: int, timeout_s: float
    ) -> RowFacts | None:
        """Take rows for a task, waiting up to `timeout_s` for them; None if they did not come."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                partition = self._registered(partition_id)
                slots = partition.claim(task, required, count)
                if slots is not None:
                    facts = self._facts(partition, partition.ids_of(slots), slots)
                    break
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._waiting += 1
                try:
                    self._changed.wait(left)
                finally:
                    self._waiting -= 1
        return facts()

    def claim_timeout(
        self, partition_id: str, task: str, required: Sequence[str], count: int
    ) -> ClaimTimeout:
        """Return the error that says what a claim has waited for."""
        with self._changed:
            state = self._registered(partition_id).describe_wait(task, required)
        return ClaimTimeout(
            f"task '{task}' waited in vain for {count} samples of partition '{partition_id}': {state}. "
            "Raise timeout_s, or look for the producer of what is missing"
        )

    def is_consumed(self, partition_id: str, tasks: Sequence[str]) -> bool:
        """Return whether each task has claimed every row, and there is one."""
        with self._changed:
            return self._registered(partition_id).is_consumed(tasks)

    def sample_ids(self) -> dict[str, list[str]]:
        """Return the ids of every partition."""
        with self._changed:
            return {name: partition.sample_ids() for name, partition in self._partitions.items()}

    def stored_bytes(self) -> dict[str, int]:
        """Return the bytes of every partition."""
        with self._changed:
            return {name: partition.nbytes for name, partition in self._partitions.items()}

    def close(self) -> None:
        """Drop everything and wake all waiting claims, which then fail."""
        with self._changed:
            self._is_closed = True
            self._partitions.clear()
            self._changed.notify_all()

    def _facts(self, partition: Partition[Block], ids: list[str], slots: Rows) -> Callable[[], RowFacts]:
        """Gather facts about rows under the lock; the result lists the lengths, outside it."""
        tags, lengths = partition.tags_of(ids), partition.lengths_of(slots)
        return lambda: RowFacts(ids, None if lengths is None else lengths.tolist(), tags)

    def _check_capacity(self, partition_id: str, asked: int) -> None:
        held = sum(len(partition) for partition in self._partitions.values())
        if held + asked > self._capacity:
            raise CapacityExceeded(
                f"a put of {asked} new samples into partition '{partition_id}' does not fit: the store holds "
                f"{held} of at most {self._capacity}. Clear samples that are done with, or raise "
                "data_plane.storage_capacity"
            )

    def _check_open(self) -> None:
        if self._is_closed:
            raise DataPlaneError("the store is closed: the client that started it was closed")

    def _registered(self, partition_id: str) -> Partition[Block]:
        self._check_open()
        if partition_id not in self._partitions:
            known = shown(list(self._partitions)) or "none"
            raise DataPlaneError(f"unknown partition '{partition_id}'; there are: {known}")
        return self._partitions[partition_id]

    def _existing(self, partition_id: str, ids: Sequence[str]) -> Partition[Block]:
        self._check_open()
        if partition_id not in self._partitions:
            known = shown(list(self._partitions)) or "none"
            raise SampleNotFound(
                f"unknown partition '{partition_id}' (there are: {known}), so no sample ids {shown(ids)}"
            )
        return self._partitions[partition_id]


class LocalStore(SampleStore[Chunk]):
    """Partitions with their bytes, in this process."""

    def get(self, partition_id: str, ids: Sequence[str], names: Sequence[str]) -> dict[str, Chunk]:
        """Return columns of rows in memory that is fresh for this call; raises what `select` raises."""
        selections, shared = self.select(partition_id, ids, names), OwnOffsets()
        return {name: read(selection, shared) for name, selection in selections.items()}

"""A client that keeps on disk what goes into its store."""

import os
import secrets
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar
from weakref import finalize

import msgspec
from tensordict import TensorDict

from headrace.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from headrace.data_plane.journal import segments as files
from headrace.data_plane.journal.ledger import Ledger
from headrace.data_plane.journal.records import (
    AnyHead,
    Cleared,
    Consumed,
    Listed,
    Opened,
    Taken,
    Undone,
    Written,
    put_body,
)
from headrace.data_plane.journal.segments import Position, Segment, Writer, now
from headrace.data_plane.journal.turns import turn
from headrace.data_plane.object_codec import encode
from headrace.data_plane.passing_client import PassingClient
from headrace.data_plane.store.columns import checked_put
from headrace.data_plane.store.groups import MARK
from headrace.errors import CapacityExceeded, TransportError, WriteError
from headrace.utils import atomic
from headrace.utils.arguments import texts
from headrace.utils.forks import after_fork

HeadType = TypeVar("HeadType", bound=AnyHead)
_MOST_PARTS = 4096
"""Groups of a partition of which a client remembers that they are not whole."""


class JournalDataPlaneClient(PassingClient):
    """Passes every call on to `inner`, and journals puts, clears and what tasks have for good, in `folder`.

    A put is journaled before the store has it, so that none that has returned is lost; a clear and a claim afterwards.
    Rows that a claim leases are consumed when the claim is finished, those that it takes for good at once. All clients
    of a store have the same folder, and each its own files there.

    Raises, beside what the store raises:
        CapacityExceeded: the folder holds `max_bytes`.
        WriteError: the folder cannot be written. Nothing of a put has happened then; a clear, a claim or its end has.
    """

    write_samples = DataPlaneClient.write_samples  # by a put, which is journaled

    def __init__(
        self,
        inner: DataPlaneClient,
        folder: Path,
        *,
        segment_bytes: int = 64 * 1024**2,
        max_bytes: int = 64 * 1024**3,
        fsync: Literal["groups", "never"] = "groups",
        lock: int | None = None,
    ) -> None:
        """`lock` is the descriptor of a file that is locked for as long as this client is open."""
        self.inner, self.folder = inner, folder
        self._process = os.getpid()
        self._unlock = (lambda: None) if lock is None else finalize(self, os.close, lock)
        self._max_bytes = max_bytes
        self._lock = threading.RLock()
        self._syncs = fsync == "groups"
        files.set_clock(folder)
        name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._writer = Writer(folder, name, segment_bytes=segment_bytes, syncs=self._syncs)
        self._janitor = Janitor(folder, name, syncs=self._syncs)
        self._bytes, self._frees = 0, False
        self._opened: dict[str, Opened] = {}
        # Samples that were put of groups that are not whole yet, by partition and uid, the latest groups.
        self._parts: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))

    # Operations that are journaled.

    def register_partition(
        self,
        partition_id: str,
        fields: Sequence[str],
        num_samples: int,
        consumer_tasks: Sequence[str],
        grpo_group_size: int | None = None,
        enums: Mapping[str, Sequence[str]] | None = None,
        *,
        group_tag: str | None = None,
    ) -> None:
        with turn(self.folder, partition_id, None):
            before = now()
            # It refuses what no head could be made of.
            self.inner.register_partition(
                partition_id, fields, num_samples, consumer_tasks, grpo_group_size, enums, group_tag=group_tag
            )
            head = partial(
                Opened,
                partition=partition_id,
                before=before,
                fields=list(map(str, fields)),
                num_samples=int(num_samples),
                tasks=list(map(str, consumer_tasks)),
                group_size=None if grpo_group_size is None else int(grpo_group_size),
                enums=None if enums is None else encode({tag: list(values) for tag, values in enums.items()}),
                group_tag=group_tag,
            )
            self._opened.pop(partition_id, None)
            self._parts.pop(partition_id, None)
            self.remember(self._journal(head))

    def put_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
        **more: Any,
    ) -> KVBatchMeta:
        put, chunks = checked_put(sample_ids, partition_id, fields, tags, more.get("producer"))
        if not put.ids:
            return self.inner.put_samples([], partition_id, fields, put.tags, **more)
        packed = None if put.tags is None else encode([dict(tag) for tag in put.tags])
        columns, offsets, body = put_body(chunks)
        head = partial(
            Written,
            partition=partition_id,
            ids=put.ids,
            columns=columns,
            offsets=offsets,
            tags=packed,
            producer=put.producer,
            once=bool(more.get("once")),
        )
        with turn(self.folder, partition_id, put.ids):
            record = self._journal(head, body, self._ends_group(partition_id, put.ids))
            try:
                meta = self.inner.put_samples(put.ids, partition_id, fields, put.tags, **more)
            except TransportError:
                raise  # the store may have the rows
            except Exception:  # whatever it is, a restore would meet it again
                self.undo(partition_id, put.ids, record.at)
                raise
            if meta.size:
                self._note_taken(partition_id, record.at)
            else:  # the store has had them, and has written nothing
                self.undo(partition_id, put.ids, record.at)
        return meta

    def undo(self, partition: str, ids: list[str], at: int) -> None:
        """Journal that the store has not taken the put of a time."""
        self._journal(partial(Undone, partition=partition, ids=ids, of=at))

    def _note_taken(self, partition: str, at: int) -> None:
        """Journal that the store has taken a put, which has succeeded also where there is no room to say so."""
        with self._lock, suppress(WriteError):
            self._bytes += self._writer.append(Taken(at=now(), partition=partition, of=at))

    def clear_samples(self, sample_ids: Sequence[str] | None, partition_id: str, **more: Any) -> None:
        ids = None if sample_ids is None else texts("sample_ids", sample_ids)
        with turn(self.folder, partition_id, ids):
            before = now()
            self.inner.clear_samples(ids, partition_id, **more)
            if ids is None or len(ids):
                self._journal(partial(Cleared, partition=partition_id, before=before, ids=ids))

    def claim_meta(self, *args: Any, **more: Any) -> KVBatchMeta | None:
        meta = self.inner.claim_meta(*args, **more)
        if meta is not None and more.get("lease_s") is None:
            self._consume(meta.partition_id, meta.task_name, meta.sample_ids)
        return meta

    def finish_claim(self, meta: KVBatchMeta) -> None:
        # The meta may name a part of the claim, or rows that were cleared and put again meanwhile.
        ids = self.inner.claimed_ids(meta)
        self.inner.finish_claim(meta)
        self._consume(meta.partition_id, meta.task_name, ids)

    def mark_consumed(self, partition_id: str, task_name: str, sample_ids: Sequence[str]) -> None:
        ids = texts("sample_ids", sample_ids)
        self.inner.mark_consumed(partition_id, task_name, ids)
        self._consume(partition_id, task_name, ids)

    def _consume(self, partition: str, task: str, ids: list[str]) -> None:
        if ids:
            self._journal(partial(Consumed, partition=partition, task=task, ids=ids))

    def close(self) -> None:
        """Close the journal's file, and the store's client; may be called twice."""
        with self._lock:
            self._writer.close()
        self.inner.close()
        self._unlock()

    # The journal.

    def journal_position(self) -> dict[str, list[int]]:
        """Return how far the journal has come, which is on disk then; `restore` goes back to it."""
        with self._lock:
            self._writer.sync()
        return files.position_of(self.folder)

    def forget(self, partition: str, ids: list[str]) -> None:
        """Journal that the store does not have rows."""
        if ids:
            self._journal(partial(Cleared, partition=partition, before=now(), ids=ids))

    def remember(self, opened: Opened) -> None:
        """Go on with a partition that another writer has registered: each new file says so."""
        self._opened[opened.partition] = opened

    def begin_anew(self, opened: Opened) -> None:
        """Journal that a partition is registered, and is empty, in a store that has it already."""
        anew = partial(msgspec.structs.replace, opened, before=now(), first=None)
        self.remember(self._journal(anew))

    def adopt(self, writers: Iterable[str]) -> None:
        """Remove files of other writers as well, which have ended, when nothing needs them."""
        self._janitor.writers.update(writers)

    def _journal(
        self, head: Callable[..., HeadType], body: Sequence[memoryview] = (), ends_group: bool = True
    ) -> HeadType:
        """Append a record of the present time, and return its head."""
        if self._process != os.getpid():
            raise after_fork(self._process)
        size = sum(map(len, body))
        with self._lock:
            if self._writer.is_full:
                self._begin_file()
            if body and self._bytes + size > self._max_bytes:
                self._make_room(size)
            made = head(at=now())
            self._bytes += self._writer.append(made, body)
            self._frees |= not body
            if ends_group:
                self._writer.sync()
        return made

    def _begin_file(self) -> None:
        """Begin the next file, with what there is of earlier ones, and remove those that nothing needs."""
        files.set_clock(self.folder)
        self._writer.begin()
        for opened in self._opened.values():
            first = opened.at if opened.first is None else opened.first
            self._writer.append(msgspec.structs.replace(opened, at=now(), first=first))
        self._writer.append(self._janitor.listed())
        # Before what it stands for goes.
        self._writer.sync()
        self._bytes, self._frees = self._janitor.clean(self._writer.segment), False

    def _make_room(self, size: int) -> None:
        """Remove files for so many bytes, if something was cleared since the last time."""
        if self._frees:
            self._begin_file()
        if self._bytes + size > self._max_bytes:
            raise CapacityExceeded(
                f"a put of {size} bytes does not fit: the journal in {self.folder} holds {self._bytes} bytes of "
                f"data_plane.journal.max_bytes={self._max_bytes}. Clear samples that are done with, write checkpoints "
                "more often (checkpointing.save_period), or raise it"
            )

    def _ends_group(self, partition: str, ids: Sequence[str]) -> bool:
        """Return whether a put brings the last samples of a group, or is of no group."""
        opened = self._opened.get(partition)
        size = 1 if opened is None or opened.group_tag is not None else opened.group_size or 1
        if size == 1:
            return True
        ends = False
        with self._lock:
            for sample_id in ids:
                parts, uid = self._parts[partition], sample_id.rpartition(MARK)[0]
                parts[uid].add(sample_id)
                if len(parts[uid]) >= size:
                    del parts[uid]
                    ends = True
                elif len(parts) > _MOST_PARTS:
                    # Its rest goes through another client, or never comes.
                    del parts[next(iter(parts))]
                    ends = True
        return ends


class Janitor:
    """Removes files that nothing needs any more, of `writers`."""

    def __init__(self, folder: Path, name: str, *, syncs: bool) -> None:
        self._folder, self.name, self.writers, self._syncs = folder, name, {name}, syncs
        self._ledger = Ledger()
        self._kept: Position | None = None
        self._read: dict[Segment, int] = {}
        self._sizes: dict[Segment, int] = {}
        self._newest = 0

    def _read_in(self, sizes: Mapping[Segment, int]) -> None:
        """Take in what is new in files of these sizes, up to the checkpoint that is kept."""
        found = [
            record
            for segment, size in sizes.items()
            for record in files.records(
                self._folder, segment, self._read.get(segment, 0), self._bound(segment, size)
            )
        ]
        for record in sorted(found, key=lambda record: record.head.at):
            self._read[record.segment] = record.end
            self._newest = max(self._newest, record.head.at)
            self._ledger.apply(record.head, record.segment)

    def _bound(self, segment: Segment, size: int) -> int:
        return files.bound(segment, self._kept, size)

    def _own(self) -> list[Segment]:
        """Return the files of `writers` that have been read to their end."""
        return [
            s for s, size in self._sizes.items() if s.writer in self.writers and self._bound(s, size) == size
        ]

    def listed(self) -> Listed:
        """Return a record of what is left of the rows in the files that have been read to their end."""
        self._kept = files.kept_position(self._folder)
        there = files.segments(self._folder)
        self._sizes = {segment: files.size_of(self._folder, segment) for segment in there}
        self._read_in(self._sizes)
        until = self._ledger.covering({s.writer: s.number + (s.writer != self.name) for s in self._own()})
        # It is of the time up to which it tells: what others write meanwhile comes after it.
        return Listed(
            at=self._newest + 1,
            partition="",
            until=until,
            rows=self._ledger.listing(until),
            spent=self._ledger.spent_ids(),
        )

    def clean(self, in_use: Segment) -> int:
        """Remove files, by what was `listed`, and return the bytes of those that stay.

        If a checkpoint is to be kept restorable, the files stay that it needs.
        """
        self._sizes[in_use] = files.size_of(self._folder, in_use)
        self._read_in({in_use: self._sizes[in_use]})
        may_go = [segment for segment in self._own() if segment != in_use]
        for segment in self._ledger.removable(self._sizes, may_go):
            path = segment.path(self._folder)
            path.unlink(missing_ok=True)
            if self._syncs:  # else one that has to go later may have gone alone
                atomic.sync(path.parent)
            del self._sizes[segment]
        return sum(self._sizes.values())


def journal_position(client: DataPlaneClient) -> dict[str, list[int]] | None:
    """Return how far the journal of a client's store has come; None: it has none."""
    journal = journal_of(client)
    return None if journal is None else journal.journal_position()


def keep_since(client: DataPlaneClient, position: Position) -> None:
    """Have the journal of a client's store keep what a restore of this position needs, and no more."""
    journal = journal_of(client)
    if journal is not None:
        files.keep_since(journal.folder, position)


def journal_of(client: DataPlaneClient) -> JournalDataPlaneClient | None:
    """Return the client that journals, which may be inside of others; None: there is none."""
    inner: Any = client
    while inner is not None and not isinstance(inner, JournalDataPlaneClient):
        inner = inner.__dict__.get("inner")
    return inner

"""The index of one TransferQueue store: which block holds each row, tags, claims; whole, or one of several.

Blocks in transit are leased to one process: those of a put before they are stored, until it is committed; and garbage,
which no row refers to, once it is handed to a caller who drops it, until that has happened. What a process leaves
behind that dies, or that goes silent, is so freed by another one.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from headrace.data_plane.adapters.transfer_queue_socket import Elsewhere, Garbage, wire_tags
from headrace.data_plane.claim_terms import PartitionReport, WaitState
from headrace.data_plane.store.blocks import BlockColumn, BlockInfo, placed
from headrace.data_plane.store.claims import ClaimRequest, Consumption, Ready, Registration
from headrace.data_plane.store.columns import Form, Places, Put, RowFacts, Rows
from headrace.data_plane.store.merge import Located, Standing, Taken
from headrace.data_plane.store.partition import Faults, Partition
from headrace.data_plane.store.sample_store import SampleStore
from headrace.errors import TransportError

# How often processes that hold leases, or wait, are looked for; when a caller that has not dropped garbage loses it.
LOOK_S, _DROP_S = 1.0, 60.0

BlockColumns = dict[str, list[BlockInfo]]


class Begun(NamedTuple):
    """A put of which one of several indexes has a part: the ticket for `commit`, and how many of its rows are new.

    No ticket: all rows of the part were put before, and are to be put once.
    """

    ticket: int | None
    new: int
    standing: Standing


class _Lease(NamedTuple):
    owner: bytes
    ends: float
    numbers: list[int]
    put: tuple[Put, BlockColumns] | None
    new: int = 0


def is_always_alive(owner: bytes) -> bool:
    return True


class SampleIndex(SampleStore[BlockInfo]):
    """The index of one store, whose blocks lie in TransferQueue; `is_alive`: see `Indexes`."""

    def __init__(self, capacity: int, is_alive: Callable[[bytes], bool] = is_always_alive) -> None:
        super().__init__(capacity)
        self._is_alive = is_alive
        self._garbage: list[int] = []
        self._leases: dict[int, _Lease] = {}
        self._tickets = itertools.count()
        self._next_look = 0.0

    def register(self, registration: Registration) -> list[BlockInfo]:
        return self._discarded(super().register(registration))

    def clear(
        self, partition_id: str, ids: Sequence[str] | None, claim: str | None = None
    ) -> list[BlockInfo]:
        return self._discarded(super().clear(partition_id, ids, claim))

    def _discarded(self, blocks: Sequence[BlockInfo]) -> list[BlockInfo]:
        """Let blocks be garbage, so that none is left for the caller."""
        self._garbage += [block.number for block in blocks]
        return []

    def begin_put(self, owner: bytes, put: Put, columns: BlockColumns, limit_s: float) -> int | None:
        """Lease the blocks of a put, which are not stored yet, to a client; return the ticket for `commit`.

        None: a put that is to be done once was done before.
        """
        put, new = self.check_put(put, columns)
        if new is None:
            return None
        numbers = [block.number for blocks in columns.values() for block in blocks]
        return self._lease(owner, numbers, limit_s, (put, columns), new)

    def commit(self, ticket: int, slots: Sequence[int], order: Rows | None = None) -> RowFacts | None:
        """Commit a put whose blocks are stored in these slots; a refusal leaves blocks and ticket to the client.

        `order`: see `Put`. The facts come without the ids, which the caller has, and with no tags ([]) where all are
        those of the put. None: another put of these rows, which are to be put once, was sooner.
        """
        put, columns = self._begun(ticket)
        # The tags of new rows are those of the put, which the caller has.
        is_new = self._leases[ticket].new == len(put.ids) > 0
        facts, gone = self.put(
            put._replace(order=order, tells=put.tells and not is_new), placed(columns, slots)
        )
        self._discarded(gone)
        self.end([ticket])
        if facts is None:
            return None
        return facts._replace(sample_ids=[], tags=[] if is_new else wire_tags(facts.tags))

    def _begun(self, ticket: int) -> tuple[Put, BlockColumns]:
        lease = self._leases.get(ticket)
        if lease is None or lease.put is None:
            raise TransportError(
                "the put took so long that its blocks were dropped, or its process was taken for dead; put again"
            )
        return lease.put

    def locate(self, partition_id: str, ids: Sequence[str], names: Sequence[str]) -> dict[str, Located]:
        """Return where columns of rows lie; no rows lie in no blocks."""
        located: dict[str, Located] = {}
        with self._changed:
            slots, columns = self._existing(partition_id, ids).find(ids, names)
            for name, column in columns.items():
                assert isinstance(column, BlockColumn)
                assert column.form is not None
                table, places = column.told(slots)
                located[name] = Located(
                    column.form, table if ids else table[:0], places and _places(table["rows"], *places)
                )
        return located

    def _opened(self, name: str, registration: Registration | None) -> Partition[BlockInfo]:
        return Partition(name, registration, self._clock, BlockColumn)

    def claim(self, request: ClaimRequest, timeout_s: float = 0.0) -> RowFacts | None:
        """Take rows for a task; None if too few are ready."""
        facts = super().claim(request, timeout_s)
        return facts and facts._replace(tags=wire_tags(facts.tags))

    def report(self, partition_id: str, limit: int) -> PartitionReport:
        told = super().report(partition_id, limit)
        return replace(
            told, unconsumed=[replace(row, tags=wire_tags([row.tags])[0]) for row in told.unconsumed]
        )

    def give_back(self, tickets: Sequence[int]) -> None:
        """Take garbage back from a client that has not dropped it."""
        self._garbage += self.end(tickets)

    def end(self, tickets: Sequence[int]) -> list[int]:
        """End leases, and return the numbers of their blocks; a ticket that is not open is ignored."""
        ended = [self._leases.pop(ticket, None) for ticket in tickets]
        return [number for lease in ended if lease is not None for number in lease.numbers]

    def hand_out(self, owner: bytes, *, at_once: bool = False) -> Garbage | None:
        """Lease garbage to a client that drops it, if there is some, with what lost leases have left.

        Processes are looked for `at_once`, or once a second.
        """
        now, gone = time.monotonic(), set[bytes]()
        if self._leases and (at_once or now >= self._next_look):
            self._next_look = now + LOOK_S
            gone = {o for o in {lease.owner for lease in self._leases.values()} if not self._is_alive(o)}
        self.give_back([t for t, lease in self._leases.items() if lease.ends <= now or lease.owner in gone])
        numbers, self._garbage = self._garbage, []
        return Garbage(self._lease(owner, numbers, _DROP_S), numbers) if numbers else None

    def _lease(
        self,
        owner: bytes,
        numbers: list[int],
        limit_s: float,
        put: tuple[Put, BlockColumns] | None = None,
        new: int = 0,
    ) -> int:
        ticket = next(self._tickets)
        self._leases[ticket] = _Lease(owner, time.monotonic() + limit_s, numbers, put, new)
        return ticket


class PartIndex(SampleIndex):
    """One of several indexes of a store, each with groups of its own: what `SeveralIndexes` asks of each.

    `by_tag` is how the caller takes the groups of a partition to be named, which says where they are.
    """

    def __init__(self, capacity: int, is_alive: Callable[[bytes], bool] = is_always_alive) -> None:
        super().__init__(capacity, is_alive)
        self._numbers = 0

    def is_tagged(self, partition_id: str) -> bool:
        """Return whether a tag names the groups of a partition, which then lies in one index."""
        with self._changed:
            partition = self._partitions.get(partition_id)
            known = self._ended.get(partition_id) if partition is None else partition.registration
            return known is not None and known.group_tag is not None

    def _check_home(self, partition_id: str, by_tag: bool) -> None:
        if self.is_tagged(partition_id) != by_tag:
            raise Elsewhere(f"partition '{partition_id}' has been registered with other groups meanwhile")

    def begin_part(
        self, owner: bytes, put: Put, columns: BlockColumns, limit_s: float, by_tag: bool
    ) -> Begun:
        """Begin a part of a put; the caller adds up what all indexes hold, and ends the ticket if there is no room."""
        self._check_home(put.partition_id, by_tag)
        ticket = self.begin_put(owner, put, columns, limit_s)
        new = 0 if ticket is None else self._leases[ticket].new
        return Begun(ticket, new, self._standing(put.partition_id))

    def beside(
        self, partition_id: str, forms: dict[str, Form], samples: str, once: bool, by_tag: bool
    ) -> Standing:
        """Say what speaks against a put into other indexes, and how full this one is."""
        self._check_home(partition_id, by_tag)
        with self._changed:
            if partition_id in self._partitions:
                self._partitions[partition_id].check_beside(forms, samples, once=once)
        return self._standing(partition_id)

    def standing(self, partition_id: str, seen: list[int]) -> Standing | None:
        """Return how full this index is, None if its rows are those that the caller has `seen`."""
        self.room(partition_id)
        now = self._standing(partition_id)
        return None if [now.rows, now.held] == seen else now

    def _standing(self, partition_id: str) -> Standing:
        coming = [(lease.put[0].partition_id, lease.new) for lease in self._leases.values() if lease.put]
        with self._changed:
            partition = self._partitions.get(partition_id)
            known = self._ended.get(partition_id) if partition is None else partition.registration
            rows = (0 if partition is None else len(partition)) + sum(
                n for p, n in coming if p == partition_id
            )
            held = self._held + sum(n for _, n in coming)
        return Standing(rows, held, None if known is None else known.num_samples, self._capacity)

    def prepare(self, tickets: Sequence[int], hold_s: float) -> None:
        """Look again at puts that are about to be committed, and let their claims last so long at least."""
        for ticket in tickets:
            put, columns = self._begun(ticket)
            self.check_put(put, columns)
            if put.claim is not None:
                self.hold(put.partition_id, put.claim, hold_s)

    def next_numbers(self, rows: int) -> int:
        """Give out numbers for new rows of all indexes, the next higher ones, and return the first."""
        self._numbers += rows
        return self._numbers - rows

    def abandon(self, tickets: Sequence[int]) -> None:
        """End puts of which nothing is stored."""
        self.end(tickets)

    def faults(self, partition_id: str, ids: Sequence[str], names: Sequence[str]) -> Faults | None:
        """Return what keeps a read from its rows; None: there is no such partition here."""
        with self._changed:
            partition = self._partitions.get(partition_id)
            return None if partition is None else partition.faults(ids, names)

    def check_clear(
        self, partition_id: str, ids: Sequence[str], claim: str | None, by_tag: bool
    ) -> list[str]:
        """Return which of some ids are here; with a claim that has rows here, they have to be its own."""
        self._check_home(partition_id, by_tag)
        with self._changed:
            partition = self._partitions.get(partition_id)
            if partition is None:
                return []
            known = [sample_id for sample_id in ids if partition.has(sample_id)]
            if claim is not None:
                partition.claims.check_in_force(claim, partition.locate(known).at, known)
            return known

    def clear_part(
        self, partition_id: str, ids: Sequence[str] | None, claim: str | None, by_tag: bool
    ) -> list[BlockInfo]:
        """Remove rows, or with None all that are here."""
        if ids is not None:
            self._check_home(partition_id, by_tag)
        return self.clear(partition_id, ids, claim)

    def hold(self, partition_id: str, claim: str, least_s: float) -> bool:
        """Let a claim last so long at least; return whether it has rows here that nobody cleared under it."""
        with self._changed:
            return self._claimed(partition_id, claim).claims.hold(claim, least_s)

    def ready(self, request: ClaimRequest, seen: list[int]) -> Ready | None:
        """Return what a claim would take here; None if it is what the caller has `seen`."""
        with self._changed:
            now = self._registered(request.partition_id).ready(request)
        return None if now.state == seen else now

    def take(self, request: ClaimRequest) -> Taken | None:
        """Hand out rows, each with the number of its group; None if too few are ready."""
        facts = self.claim(request)
        if facts is None:
            return None
        with self._changed:
            partition = self._registered(request.partition_id)
            numbers = partition.numbers(facts.sample_ids)
            size = 1 if partition.registration is None else partition.registration.group_size
        return Taken(facts, np.repeat(numbers.reshape(-1, size).max(axis=1, initial=0), size))

    def _numbers_of(self, partition_id: str, ids: Sequence[str]) -> Rows:
        with self._changed:
            return self._partitions[partition_id].numbers(ids)

    def waiting(self, request: ClaimRequest) -> WaitState:
        """Return what a claim waits for here."""
        with self._changed:
            return self._registered(request.partition_id).waiting(request)

    def report_part(self, partition_id: str, limit: int) -> tuple[PartitionReport, Rows]:
        """Return what is here, and the numbers of the rows that it names."""
        report = self.report(partition_id, limit)
        return report, self._numbers_of(partition_id, [row.sample_id for row in report.unconsumed])

    def consumption(self, partition_id: str, tasks: Sequence[str]) -> Consumption:
        """Return how far tasks have come with the rows here."""
        with self._changed:
            return self._registered(partition_id).claims.consumption(tasks)

    def numbered_ids(self) -> dict[str, tuple[list[str], Rows]]:
        """Return the ids of each partition with their numbers."""
        return {name: (ids, self._numbers_of(name, ids)) for name, ids in self.sample_ids().items()}


def _places(counts: Rows, block_of: Rows, row_of: Rows) -> Places:
    """Return where rows lie, in few bytes; None: they are all rows of blocks of so many rows, in order."""
    if len(row_of) == counts.sum():
        starts = np.repeat(np.cumsum(counts) - counts, counts)
        is_whole = (block_of[1:] >= block_of[:-1]).all() and (row_of == np.arange(len(row_of)) - starts).all()
        if is_whole and (np.bincount(block_of, minlength=len(counts)) == counts).all():
            return None
    small = np.uint16 if len(counts) <= 65_536 else np.int64
    return block_of.astype(small), row_of.astype(np.int32)

"""Several indexes of one TransferQueue store, asked as if they were one.

Each has whole groups: those whose uid hashes to its number, or, where a tag names the groups, all of some partitions.
Calls go to the indexes that have the rows, at the same time. What concerns all rows (claims, room, reports) is put
together here; the order of groups is that of numbers that the first index gives out, one for each new row.
"""

import uuid
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import numpy as np

from headrace.data_plane.adapters.transfer_queue_ask import HOLD_S, IndexCall, Watch, or_error
from headrace.data_plane.adapters.transfer_queue_rows import Begun
from headrace.data_plane.adapters.transfer_queue_shares import Shares
from headrace.data_plane.adapters.transfer_queue_socket import Elsewhere, Garbage
from headrace.data_plane.claim_terms import PartitionReport
from headrace.data_plane.store.blocks import PackedColumns, pack
from headrace.data_plane.store.claims import (
    ClaimRequest,
    Ready,
    claim_expired,
    consumed,
    not_of_claim,
)
from headrace.data_plane.store.columns import Chunk, Put, RowFacts, Rows
from headrace.data_plane.store.merge import (
    Located,
    Standing,
    Taken,
    check_room,
    in_order,
    merged_facts,
    merged_places,
    merged_reports,
    merged_waits,
    most_of,
    part_of,
    room_of,
    shares_of,
    summed,
)
from headrace.data_plane.store.partition import Faults, had_before
from headrace.data_plane.store.sample_store import claim_timeout, never_room, unknown_partition
from headrace.distributed.ray_connection import Deadline
from headrace.errors import ClaimExpired, HeadraceError, SampleNotFound, TransportError
from headrace.utils.arguments import shown

# How long a claim lasts at least while something that it was looked at for is done.
_DOING_S = 10.0
LEASE_MARGIN_S = 5.0

T = TypeVar("T")


class _Lost(Exception):
    """Another claim was sooner."""


class _Part(NamedTuple):
    """What one index has of a put."""

    rows: Rows
    put: Put
    packed: PackedColumns


class Several(Shares):
    """The indexes of a store; methods are named as, and return what, those of `SampleIndex` do."""

    # Putting.

    def put(
        self,
        put: Put,
        chunks: Mapping[str, Chunk],
        store: Callable[[PackedColumns], list[int]],
        *,
        gives_rows: bool,
        deadline: Deadline,
        tags: Sequence[Mapping[str, Any]] | None = None,
    ) -> RowFacts | None:
        """Begin at the indexes of the rows, `store` the blocks, commit; `tags` as given. None: done before, once."""

        def begin() -> tuple[dict[int, _Part], list[Begun], list[Standing]]:
            parts: dict[int, _Part] = {}
            for index, rows in (self._shares(put.partition_id, put.ids) or nowhere).items():
                own = {name: chunk.picked(rows) for name, chunk in chunks.items()} if put.ids else {}
                packed = pack(own, gives_rows=gives_rows)
                parts[index] = _Part(rows, part_of(put, rows), packed)
            return parts, *self._begin(put, parts, chunks, deadline)

        nowhere = {self._holders(put.claim)[0] if put.claim else 0: np.arange(0)}
        self._check_owners(put)
        parts, begun, standings = self._routed(put.partition_id, begin)
        tickets = {index: part.ticket for index, part in zip(parts, begun) if part.ticket is not None}
        if not tickets:
            return None
        try:
            self._check_room(put, parts, begun, standings)
        except HeadraceError:
            self._asker.ask([(index, "abandon", ([ticket],)) for index, ticket in tickets.items()])
            raise
        facts = self._commit(put, parts, tickets, any(part.new for part in begun), store, deadline)
        return merged_facts(len(put.ids), facts, tags)

    def _begin(
        self, put: Put, parts: Mapping[int, _Part], chunks: Mapping[str, Chunk], deadline: Deadline
    ) -> tuple[list[Begun], list[Standing]]:
        """Lease the blocks at the indexes of a put; ask the others what speaks against it."""
        by_tag, limit_s = self._tagged.get(put.partition_id, False), deadline.left + LEASE_MARGIN_S
        begins: list[IndexCall] = [
            (i, "begin_part", (self._asker.clients[i].owner, part.put, part.packed.columns, limit_s, by_tag))
            for i, part in parts.items()
        ]
        forms = {name: chunk.form for name, chunk in chunks.items()} if put.ids else {}
        besides: list[IndexCall] = [
            (i, "beside", (put.partition_id, forms, shown(put.ids), put.once, by_tag))
            for i in range(self._count)
            if i not in parts
        ]
        answers = self._asker.attempt([*begins, *besides], deadline)
        begun: list[Any] = answers[: len(begins)]
        if any(isinstance(answer, HeadraceError) for answer in answers):
            open_puts = [(call[0], one.ticket) for call, one in zip(begins, begun) if isinstance(one, Begun)]
            self._asker.ask([(i, "abandon", ([ticket],)) for i, ticket in open_puts if ticket is not None])
            or_error(answers)
        return begun, [*(one.standing for one in begun), *answers[len(begins) :]]

    def _check_room(
        self, put: Put, parts: Mapping[int, _Part], begun: Sequence[Begun], standings: Sequence[Standing]
    ) -> None:
        had = [part for part, one in zip(parts.values(), begun) if one.ticket is None]
        if had:
            raise had_before(put.partition_id, len(put.ids), [name for part in had for name in part.put.ids])
        check_room(put.partition_id, sum(one.new for one in begun), standings)

    def _commit(
        self,
        put: Put,
        parts: Mapping[int, _Part],
        tickets: Mapping[int, int],
        has_new: bool,
        store: Callable[[PackedColumns], list[int]],
        deadline: Deadline,
    ) -> list[tuple[Rows, RowFacts | None]]:
        packed = [part.packed for part in parts.values()]
        whole = PackedColumns(
            {}, [b for one in packed for b in one.blocks], [f for one in packed for f in one.frames]
        )
        is_ready = False
        try:
            slots = store(whole) if whole.frames else []
            order = self._prepare(put, tickets, has_new, deadline)
            is_ready = True
            ends = list(accumulate(len(one.blocks) for one in packed))
            facts = self._asker.ask(
                [
                    (
                        i,
                        "commit",
                        (tickets[i], slots[end - len(part.packed.blocks) : end], order and order(part.rows)),
                    )
                    for (i, part), end in zip(parts.items(), ends)
                ],
                deadline,
            )
        except HeadraceError as error:
            if is_ready and isinstance(error, TransportError):
                raise TransportError(f"{error}. The rows may have been written") from error
            for index, part in parts.items():
                numbers = [block.number for block in part.packed.blocks]
                self._asker.drop(index, "commit", Garbage(tickets[index], numbers), deadline)
            raise
        return [(part.rows, one) for part, one in zip(parts.values(), facts)]

    def _prepare(
        self, put: Put, tickets: Mapping[int, int], has_new: bool, deadline: Deadline
    ) -> Callable[[Rows], Rows] | None:
        """Make sure that no index refuses what another commits; return the numbers of new rows."""
        calls: list[IndexCall] = []
        if has_new:
            calls.append((0, "next_numbers", (len(put.ids),)))
        if len(tickets) > 1:
            calls += [(index, "prepare", ([ticket], _DOING_S)) for index, ticket in tickets.items()]
        answers = self._asker.ask(calls, deadline)
        return (lambda rows: rows + answers[0]) if has_new else None

    # Reading.

    def locate(
        self, partition_id: str, ids: Sequence[str], names: Sequence[str], deadline: Deadline
    ) -> dict[str, Located]:
        def attempt() -> dict[str, Located]:
            shares = self._shares(partition_id, ids)
            if not shares:
                return self._located_nothing(partition_id, names)
            calls: list[IndexCall] = [
                (i, "locate", (partition_id, [ids[row] for row in rows.tolist()], names))
                for i, rows in shares.items()
            ]
            found = self._asker.attempt(calls, deadline)
            if any(isinstance(one, SampleNotFound) for one in found):
                raise self._read_error(partition_id, ids, names, found)
            or_error(found)
            return {
                name: merged_places(
                    name, len(ids), [(rows, one[name]) for rows, one in zip(shares.values(), found)]
                )
                for name in names
            }

        return self._routed(partition_id, attempt)

    def _located_nothing(self, partition_id: str, names: Sequence[str]) -> dict[str, Located]:
        """Return where no rows of columns lie, which is nowhere; any index that has a column says its form."""
        found: dict[str, Located] = {}
        for some in [[name] for name in names] or [[]]:
            tried = self._asker.attempt([(i, "locate", (partition_id, [], some)) for i in range(self._count)])
            known = [answer for answer in tried if not isinstance(answer, HeadraceError)]
            if not known:
                raise self._read_error(partition_id, [], names, tried)
            found |= known[0]
        return found

    def _read_error(
        self, partition_id: str, ids: Sequence[str], names: Sequence[str], tried: Sequence[Any]
    ) -> HeadraceError:
        """Return the error of a read that some indexes refused, with the faults of all together."""
        if self._learn(partition_id):
            return Elsewhere(partition_id)
        shares, none = self._shares(partition_id, ids), np.arange(0)
        own = [[str(ids[row]) for row in shares.get(i, none).tolist()] for i in range(self._count)]
        calls: list[IndexCall] = [(i, "faults", (partition_id, mine, names)) for i, mine in enumerate(own)]
        faults: list[Faults | None] = self._asker.ask(calls)
        if all(one is None for one in faults):
            known = {name for one in self._asker.all("stored_bytes") for name in one}
            return unknown_partition(partition_id, sorted(known), ids)
        lost = {i for mine, one in zip(own, faults) for i in (mine if one is None else one.unknown)}
        missing = [name for name in names if all(one is None or name in one.no_row_has for one in faults)]
        lacking: dict[str, set[str]] = {name: set() for name in names if name not in missing}
        there = [(mine, one) for mine, one in zip(own, faults) if one is not None]
        for name, rows in lacking.items():
            for mine, one in there:
                rows.update(mine if name in one.no_row_has else one.lacking.get(name, ()))
        order = list(dict.fromkeys(map(str, ids)))
        by_column = {
            name: [i for i in order if i in rows - lost] for name, rows in lacking.items() if rows - lost
        }
        merged = Faults([i for i in order if i in lost], missing, by_column)
        # The rows may have come meanwhile.
        first: HeadraceError = next(error for error in tried if isinstance(error, HeadraceError))
        return merged.error(partition_id) if any(merged) else first

    def shared_columns(self, partition_id: str, ids: Sequence[str]) -> list[str]:
        def attempt() -> list[str]:
            mine = self._ids_of(partition_id, ids) or {index: [] for index in range(self._count)}
            calls: list[IndexCall] = [(i, "shared_columns", (partition_id, own)) for i, own in mine.items()]
            found = self._asker.attempt(calls)
            known = [one for one in found if not isinstance(one, HeadraceError)]
            if len(known) < len(found) and (ids or not known):
                raise self._read_error(partition_id, ids, [], found)
            if not ids:
                return list(dict.fromkeys(name for one in known for name in one))
            return [name for name in known[0] if all(name in one for one in known)]

        return self._routed(partition_id, attempt)

    def clear(self, partition_id: str, ids: Sequence[str] | None, claim: str | None = None) -> None:
        if claim is not None:
            self._hold(partition_id, claim)
        if ids is None:
            self._asker.all("clear_part", partition_id, None, None, False)
            return

        def attempt() -> None:
            by_tag = self._tagged.get(partition_id, False)
            mine = self._ids_of(partition_id, ids)
            if claim is not None:
                mine = self._checked_clear(partition_id, mine, claim, by_tag)
            self._asker.ask(
                [(i, "clear_part", (partition_id, own, claim, by_tag)) for i, own in mine.items()]
            )

        self._routed(partition_id, attempt)
        if claim is not None:
            self._end_done(partition_id, claim)

    def _end_done(self, partition_id: str, claim: str) -> None:
        """End a claim all of whose rows are cleared; else each index would keep its part until the lease is over."""
        calls: list[IndexCall] = [(i, "hold", (partition_id, claim, 0.0)) for i in self._holders(claim)]
        if all(has_rows is False for has_rows in self._asker.attempt(calls)):
            self.release(partition_id, claim)

    def _checked_clear(
        self, partition_id: str, mine: Mapping[int, list[str]], claim: str, by_tag: bool
    ) -> dict[int, list[str]]:
        """Return which rows each index of a claim is to clear; refuse if there are others."""
        holders = self._holders(claim)
        calls: list[IndexCall] = [
            (i, "check_clear", (partition_id, own, claim if i in holders else None, by_tag))
            for i, own in mine.items()
        ]
        there = dict(zip(mine, self._asker.ask(calls)))
        others = [sample_id for i, known in there.items() if i not in holders for sample_id in known]
        if others:
            raise not_of_claim(partition_id, others, claim)
        return {i: known for i, known in there.items() if i in holders}

    # Claims.

    def claim(self, request: ClaimRequest, wait_s: float) -> RowFacts | None:
        """Hand out rows of all indexes, as one does; waiting claims look again when what is ready somewhere changes."""

        def decide(ready: dict[int, Ready]) -> RowFacts | None:
            share = shares_of(request, ready)
            return None if share is None else self._taken(request, share)

        return self._watched("ready", (request,), lambda now: now.state, wait_s, decide)

    def _taken(self, request: ClaimRequest, share: Mapping[int, int]) -> RowFacts:
        """Take so many rows from each index; from one after the other, so that of claims that meet one gets through."""
        if not share:
            return RowFacts([], None, None)
        token = f"{uuid.uuid4().hex}.{sum(1 << i for i in share):x}"
        lease_s = request.lease_s if request.lease_s is not None else self._asker.timeout_s
        whole = request._replace(allow_partial=False, token=token, lease_s=lease_s)
        if len(share) == 1 and request.lease_s is None:
            whole = request._replace(allow_partial=False)
        taken: dict[int, Taken] = {}
        for index in sorted(share):
            (some,) = self._asker.ask([(index, "take", (whole._replace(rows=share[index]),))])
            if some is None:
                self._asker.ask([(i, "release", (request.partition_id, token)) for i in taken])
                raise _Lost
            taken[index] = some
        if len(share) > 1 and request.lease_s is None:
            self._asker.ask([(i, "finish", (request.partition_id, token)) for i in taken])
        claim = None if request.lease_s is None else token
        return in_order(list(taken.values()), request.order == "freshest")._replace(claim=claim)

    def _watched(
        self,
        operation: str,
        arguments: tuple[object, ...],
        state: Callable[[Any], list[int]],
        wait_s: float,
        decide: Callable[[dict[int, Any]], T | None],
    ) -> T | None:
        """Return what is decided by what all indexes say; while that is nothing, wait until one says another thing."""
        wait = Deadline(wait_s, "timeout_s")
        known: dict[int, Any] = {}
        with Watch(self._asker, operation) as watch:
            while True:
                # Until all have answered, none is asked again.
                for index in [i for i in range(self._count) if i not in known] or range(self._count):
                    hold_s = min(wait.left, HOLD_S) if index in known and wait_s > 0 else 0.0
                    seen = state(known[index]) if index in known else []
                    watch.ask((index, operation, (*arguments, seen)), hold_s)
                known |= watch.answers()
                if len(known) < self._count:
                    continue
                try:
                    decided = decide(known)
                except _Lost:
                    known.clear()
                    watch.forget()
                    continue
                if decided is not None or wait.is_over():
                    return decided

    def has_room(self, partition_id: str, rows: int, wait_s: float) -> bool:
        def decide(standings: dict[int, Standing]) -> bool | None:
            most = most_of(list(standings.values()))
            if rows > most:
                raise never_room(partition_id, rows, most)
            return room_of(list(standings.values())) >= rows or None

        state = "standing", (partition_id,), lambda now: [now.rows, now.held]
        return bool(self._watched(*state, wait_s, decide))

    def room(self, partition_id: str) -> int:
        return room_of(self._asker.some("standing", partition_id, []))

    def _holders(self, claim: str) -> list[int]:
        """Return the indexes that have rows of a claim."""
        mask = claim.rpartition(".")[2]
        try:
            bits = int(mask, 16)
        except ValueError:
            bits = 0
        return [i for i in range(self._count) if bits >> i & 1] or list(range(self._count))

    def _hold(self, partition_id: str, claim: str) -> list[int]:
        """Let a claim in force last a while, and return the indexes that have its rows; raises ClaimExpired.

        Where it has ended in one index only, it ends in all.
        """
        holders = self._holders(claim)
        held = self._asker.attempt([(i, "hold", (partition_id, claim, _DOING_S)) for i in holders])
        if any(isinstance(one, ClaimExpired) for one in held):
            self.release(partition_id, claim)
        if not any(or_error(held)):
            raise claim_expired(partition_id, claim)
        return holders

    def _check_owners(self, put: Put) -> None:
        """Refuse a put under a claim of rows that lie where the claim has none; raises ClaimExpired."""
        if put.claim is not None:
            holders = self._hold(put.partition_id, put.claim)
            shares = self._shares(put.partition_id, put.ids)
            others = [rows for index, rows in shares.items() if index not in holders]
            if others:
                ids = [put.ids[row] for row in np.concatenate(others).tolist()]
                raise not_of_claim(put.partition_id, ids, put.claim)

    def renew(self, partition_id: str, claim: str, lease_s: float) -> None:
        holders = self._hold(partition_id, claim)
        self._asker.ask([(i, "renew", (partition_id, claim, lease_s)) for i in holders])

    def finish(self, partition_id: str, claim: str) -> None:
        holders = self._hold(partition_id, claim)
        self._asker.ask([(i, "finish", (partition_id, claim)) for i in holders])

    def claimed_ids(self, partition_id: str, claim: str) -> list[str]:
        holders = self._hold(partition_id, claim)
        parts = self._asker.ask([(i, "claimed_ids", (partition_id, claim)) for i in holders])
        return [sample_id for part in parts for sample_id in part]

    def mark_consumed(self, partition_id: str, task: str, ids: Sequence[str]) -> None:
        self._learn(partition_id)
        mine = self._ids_of(partition_id, ids) or {0: []}
        self._asker.ask([(i, "mark_consumed", (partition_id, task, own)) for i, own in mine.items()])

    def release(self, partition_id: str, claim: str) -> None:
        self._asker.ask([(i, "release", (partition_id, claim)) for i in self._holders(claim)])

    # What is told.

    def claim_timeout_text(self, request: ClaimRequest) -> str:
        return claim_timeout(request, merged_waits(self._asker.all("waiting", request)))

    def report(self, partition_id: str, limit: int) -> PartitionReport:
        parts = self._asker.some("report_part", partition_id, limit)
        numbers = np.concatenate([numbers for _, numbers in parts])
        rows = [row for report, _ in parts for row in report.unconsumed]
        oldest = [rows[i] for i in np.argsort(numbers, kind="stable")[:limit].tolist()]
        return merged_reports([report for report, _ in parts], oldest)

    def is_consumed(self, partition_id: str, tasks: Sequence[str]) -> bool:
        return consumed(self._asker.some("consumption", partition_id, tasks))

    def sample_ids(self) -> dict[str, list[str]]:
        found: dict[str, list[tuple[int, str]]] = {}
        for part in self._asker.all("numbered_ids"):
            for name, (ids, numbers) in part.items():
                found.setdefault(name, []).extend(zip(numbers.tolist(), ids))
        return {name: [sample_id for _, sample_id in sorted(rows)] for name, rows in found.items()}

    def stored_bytes(self) -> dict[str, int]:
        return summed(self._asker.all("stored_bytes"))

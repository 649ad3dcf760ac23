"""One store in several: which of them has a row, and what the answers of all come to. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from operator import itemgetter
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from headrace.data_plane.claim_terms import LeaseReport, PartitionReport, RowReport, TaskReport, WaitState
from headrace.data_plane.store.blocks import BlockTable
from headrace.data_plane.store.claims import ClaimRequest, Ready, is_rest
from headrace.data_plane.store.columns import Form, Places, Put, RowFacts, Rows
from headrace.data_plane.store.groups import MARK
from headrace.data_plane.store.partition import no_room
from headrace.data_plane.store.sample_store import store_full
from headrace.errors import DataPlaneError
from headrace.utils.arguments import shown


class Located(NamedTuple):
    """Where rows of a column lie: all rows of `blocks`, in order; or row i is row `places[1][i]` of `places[0][i]`."""

    form: Form
    blocks: BlockTable
    places: Places


class Standing(NamedTuple):
    """How full one of several indexes is: its rows of a partition and of the store, with those on their way.

    `most`: what the partition was registered for, None if it was not; `capacity`: of the whole store.
    """

    rows: int
    held: int
    most: int | None
    capacity: int


class Taken(NamedTuple):
    """Rows that one of several indexes hands out, and their numbers in the order that these share."""

    facts: RowFacts
    numbers: Rows


def owner_of(sample_id: str, indexes: int) -> int:
    """Return which index has a row: by the uid of its group, or by its id where that names none."""
    return crc32((sample_id.rpartition(MARK)[0] or sample_id).encode()) % indexes


def part_of(put: Put, rows: Rows) -> Put:
    """Return the put of some of the rows; lengths that were shared still are."""
    own = {id(lengths): lengths[rows] for lengths in put.lengths.values()}
    at = rows.tolist()
    return put._replace(
        ids=[put.ids[row] for row in at],
        tags=None if put.tags is None else [put.tags[row] for row in at],
        lengths={name: own[id(lengths)] for name, lengths in put.lengths.items()},
        part_of=shown(put.ids) or "no samples",
    )


def merged_facts(
    count: int, parts: Sequence[tuple[Rows, RowFacts | None]], given: Sequence[Mapping[str, Any]] | None
) -> RowFacts | None:
    """Return what is said of the rows of a put, whose ids the caller has, and whose tags were `given`.

    None: another was sooner with all of them.
    """
    told = [(rows.tolist(), facts) for rows, facts in parts if facts is not None]
    if not told:
        return None
    lengths: list[int] = [0] * count
    tags: list[dict[str, Any]] = [{} for _ in range(count)]
    for rows, facts in told:
        for row, length in zip(rows, facts.sequence_lengths or ()):
            lengths[row] = length
        own = [given[row] for row in rows] if facts.tags == [] and given else facts.tags
        for row, tag in zip(rows, own or ()):
            tags[row] = dict(tag)
    has_lengths = all(facts is not None and facts.sequence_lengths is not None for _, facts in parts)
    return RowFacts([], lengths if has_lengths else None, tags if any(tags) else None)


def merged_places(name: str, count: int, parts: Sequence[tuple[Rows, Located]]) -> Located:
    """Return where `count` rows of a column lie of which indexes have told the parts."""
    if len(parts) == 1:
        return parts[0][1]
    form = parts[0][1].form
    first, tables = 0, list[BlockTable]()
    block_of, row_of = np.empty(count, np.int64), np.empty(count, np.int64)
    for rows, located in parts:
        if located.form != form:
            raise DataPlaneError(f"column '{name}' was put as {form} and as {located.form} at the same time")
        if located.places is None:
            counts = located.blocks["rows"]
            block_of[rows] = first + np.repeat(np.arange(len(counts)), counts)
            row_of[rows] = np.concatenate([np.arange(n) for n in counts])
        else:
            block_of[rows], row_of[rows] = first + located.places[0].astype(np.int64), located.places[1]
        first += len(located.blocks)
        tables.append(located.blocks)
    return Located(form, np.concatenate(tables), (block_of, row_of))


def shares_of(request: ClaimRequest, ready: Mapping[int, Ready]) -> dict[int, int] | None:
    """Return how many rows of each index a claim takes; none if the task has had all; None: it has to wait."""
    size = next(iter(ready.values())).size
    index_of = np.repeat(np.array(list(ready)), [len(one.numbers) for one in ready.values()])
    numbers = np.concatenate([one.numbers for one in ready.values()])
    found = len(numbers) * size
    if found < request.rows and not (request.allow_partial and _is_rest(list(ready.values()), found)):
        return None
    order = np.argsort(-numbers if request.order == "freshest" else numbers, kind="stable")
    chosen = index_of[order[: request.rows // size]]
    return {int(i): int(n) * size for i, n in zip(*np.unique(chosen, return_counts=True))}


def _is_rest(ready: Sequence[Ready], found: int) -> bool:
    return is_rest(
        found,
        have_come=sum(one.come for one in ready) >= ready[0].expected,
        left=sum(one.left for one in ready),
        leased=sum(one.leased for one in ready),
        all_ready=sum(one.all_ready for one in ready),
    )


def in_order(taken: Sequence[Taken], is_freshest: bool) -> RowFacts:
    """Return rows that indexes have handed out in the order of their groups."""
    sizes = [len(one.facts.sample_ids) for one in taken]
    keys = np.concatenate([one.numbers for one in taken])
    order = np.argsort(-keys if is_freshest else keys, kind="stable").tolist()
    ids = [sample_id for one in taken for sample_id in one.facts.sample_ids]
    lengths = [n for one in taken for n in one.facts.sequence_lengths or ()]
    tags = [tag for one, size in zip(taken, sizes) for tag in one.facts.tags or [{} for _ in range(size)]]
    return RowFacts(
        [ids[i] for i in order],
        [lengths[i] for i in order] if len(lengths) == len(ids) else None,
        [tags[i] for i in order] if any(tags) else None,
    )


def most_of(standings: Sequence[Standing]) -> int:
    most = next((one.most for one in standings if one.most is not None), None)
    return standings[0].capacity if most is None else most


def check_room(partition: str, new: int, standings: Sequence[Standing]) -> None:
    """Raise CapacityExceeded if rows do not fit of which so many are new, all of them counted in the standings."""
    rows, held = sum(one.rows for one in standings), sum(one.held for one in standings)
    most = next((one.most for one in standings if one.most is not None), None)
    capacity = standings[0].capacity
    if new and most is not None and rows > most:
        raise no_room(partition, new, most, rows - new)
    if new and held > capacity:
        raise store_full(partition, new, capacity, held - new)


def room_of(standings: Sequence[Standing]) -> int:
    """Return how many rows more fit into a partition, by what all indexes say."""
    left = standings[0].capacity - sum(one.held for one in standings)
    return min(most_of(standings) - sum(one.rows for one in standings), left)


def merged_leases(parts: Sequence[Sequence[LeaseReport]]) -> list[LeaseReport]:
    """Return the claims of several stores, of which one may have rows in each."""
    found: dict[str, LeaseReport] = {}
    for lease in (lease for part in parts for lease in part):
        if lease.claim in found:
            other = found[lease.claim]
            least = min(lease.seconds_left, other.seconds_left)
            lease = replace(lease, rows=lease.rows + other.rows, seconds_left=least)
        found[lease.claim] = lease
    return list(found.values())


def merged_waits(parts: Sequence[WaitState]) -> WaitState:
    """Return what a claim waits for in several stores of the same partition."""
    first = parts[0]
    broken = None
    if first.broken is not None:
        all_broken = [part.broken for part in parts if part.broken is not None]
        worst = max(all_broken, key=itemgetter(1))
        broken = (worst[0], sum(part[1] for part in all_broken), *worst[2:])
    return WaitState(
        ready=sum(part.ready for part in parts),
        left=sum(part.left for part in parts),
        come=sum(part.come for part in parts),
        expected=first.expected,
        passing=None if first.passing is None else sum(part.passing or 0 for part in parts),
        written=summed(part.written for part in parts),
        broken=broken,
        leases=merged_leases([part.leases for part in parts]),
    )


def merged_reports(parts: Sequence[PartitionReport], oldest: Sequence[RowReport]) -> PartitionReport:
    """Return what several stores of the same partition hold; `oldest` are the oldest of their rows."""
    tasks = {
        task: TaskReport(
            *(sum(getattr(part.tasks[task], f.name) for part in parts) for f in fields(TaskReport))
        )
        for task in parts[0].tasks
    }
    return PartitionReport(
        rows=sum(part.rows for part in parts),
        bytes_by_column=summed(part.bytes_by_column for part in parts),
        rows_by_column=summed(part.rows_by_column for part in parts),
        rows_by_producer=summed(part.rows_by_producer for part in parts),
        tasks=tasks,
        leases=merged_leases([part.leases for part in parts]),
        unconsumed_rows=sum(part.unconsumed_rows for part in parts),
        unconsumed=list(oldest),
        num_samples=parts[0].num_samples,
        group_size=parts[0].group_size,
    )


def summed(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the sums of what parts count under the same names."""
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)

"""From a journal back into a store."""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.data_plane.interfaces import DataPlaneClient
from headrace.data_plane.journal import segments as files
from headrace.data_plane.journal.client import JournalDataPlaneClient, journal_of
from headrace.data_plane.journal.ledger import Ledger, Row
from headrace.data_plane.journal.records import Opened, Taken, Undone, Written, read_put
from headrace.data_plane.journal.segments import Position, Record
from headrace.data_plane.object_codec import decode
from headrace.data_plane.store.columns import Known
from headrace.data_plane.store.groups import MARK
from headrace.data_plane.wire import wire_tensordict
from headrace.errors import TransportError

_log = logging.getLogger(__name__)


@dataclass
class RestoreReport:
    """What a restore has given back.

    `rows` counts them by partition. `cut_bytes` are of records that a crash has cut in two, and of those after the
    position that was asked for. `revived` rows were cleared or consumed only after it. `refused` ones are of puts that
    were under way at a crash, and that the store had not taken. `unwanted` ones are those that `keep` has left out.
    """

    rows: dict[str, int] = field(default_factory=dict)
    cut_bytes: int = 0
    revived: int = 0
    refused: int = 0
    unwanted: int = 0

    @property
    def total(self) -> int:
        return sum(self.rows.values())


Keep = Callable[[Mapping[str, Any]], bool]
"""Whether a row is to come back, by its tags."""


def restore(
    client: DataPlaneClient,
    folder: Path,
    position: Position | None = None,
    *,
    later: bool = False,
    keep: Keep | None = None,
) -> RestoreReport:
    """Put every row that a journal has and that is neither cleared nor consumed into a store, which may be any other.

    Partitions are registered as they were, so this comes before anything else is put. Rows that only some tasks of a
    partition have consumed are consumed for those.

    Args:
        folder: Of the journal. If it is that of `client`, it goes on being it.
        position: Restore the rows of then: what lies after it is cut off. None: those of the journal's end.
        later: Beside these, restore the rows that were put after the position, and take back what was cleared or
            consumed after it; nothing is cut off. They may be more than a partition takes, so that it has room for as
            many rows more as it was registered for.
        keep: With `later`, leave out the rows whose tags it refuses, as if they had never been put.

    Raises:
        DataPlaneError: a damaged record.
        CapacityExceeded: rows that the store has no room for.
    """
    report = RestoreReport()
    if position is not None and not later:
        report.cut_bytes += files.cut(folder, position)
    found = _whole_records(folder, report)
    before, everything = _ledgers(found, position)
    doubtful = _doubtful_puts(found)
    refused = list(_never_taken(found, before, doubtful))
    begins = _first_puts(found, before, keep, report) if later else {}
    journal = journal_of(client)
    same = journal is not None and journal.folder.absolute() == folder.absolute()
    # What the journal has already is not written there once more, but for rows that it takes for cleared. With those
    # that came later, it is: what it says of rows that were put, cleared and come back would be hard to tell.
    quiet = journal.inner if journal is not None and same else client
    again = client if later else quiet
    _open_partitions(before, everything, folder, journal if same else None, quiet, again, later=later)
    left = {partition: before.left(partition) for partition in before.partitions}
    known = {partition: everything.left(partition) for partition in left if same}
    report.revived = sum(len(left[partition].keys() - rows.keys()) for partition, rows in known.items())
    for record, some in _in_turn(found, left, doubtful):
        for target, ids in _targets(record, some, {} if later else known, begins, quiet, client):
            if not _is_put(target, folder, record, ids, is_sure=record.head.at not in doubtful):
                before.drop(record.head, ids, record.segment)
                refused.append((record, ids))
    report.refused = sum(len(ids) for _, ids in refused)
    if journal is not None and same:
        for record, ids in refused:
            journal.undo(record.head.partition, ids, record.head.at)
    for partition in before.partitions:
        if rows := before.left(partition):
            report.rows[partition] = len(rows)
            if partition in before.registered:
                _consume(again, before.registered[partition][0], rows)
    if report.cut_bytes:
        _log.warning("%s: %d bytes were cut off the journal's end", folder, report.cut_bytes)
    return report


def _open_partitions(
    wanted: Ledger,
    everything: Ledger,
    folder: Path,
    journal: JournalDataPlaneClient | None,
    quiet: DataPlaneClient,
    again: DataPlaneClient,
    *,
    later: bool,
) -> None:
    """Register partitions as they were, which know the ids that they have had; `journal` is that of the folder."""
    if journal is not None:
        journal.adopt({segment.writer for segment in files.segments(folder)})
        for partition, rows in everything.partitions.items():
            # The store does not have them any more, so that a sample of the same id is another one.
            journal.forget(partition, [sample_id for sample_id, row in rows.items() if row.is_done])
    for partition, (opened, _) in wanted.registered.items():
        more = len(wanted.left(partition)) if later else 0
        _register(quiet, partition, msgspec.structs.replace(opened, num_samples=opened.num_samples + more))
        if journal is not None:
            journal.begin_anew(opened) if later else journal.remember(opened)
        done = [sample_id for sample_id, row in wanted.partitions[partition].items() if row.is_done]
        _spend(again, opened, list(dict.fromkeys([*wanted.spent[partition], *done])))


def _whole_records(folder: Path, report: RestoreReport) -> list[Record]:
    """Return all records in the order of their times, and cut off what a crash has left of the last ones.

    What is journaled from now on is of later times.
    """
    there = files.segments(folder)
    last = {segment.writer: segment for segment in there}
    found: list[Record] = []
    for segment in there:
        size = files.size_of(folder, segment)
        mine = list(files.records(folder, segment, 0, size))
        end = mine[-1].end if mine else 0
        if segment != last[segment.writer]:
            if end != size:
                raise files.damaged(segment.path(folder), end)
        elif mine and not mine[-1].is_whole(folder):
            end = mine.pop().start
        if end < size:
            report.cut_bytes += files.shorten(folder, segment, end)
        found += mine
    found.sort(key=lambda record: record.head.at)
    files.go_on_after(folder, found[-1].head.at if found else 0)
    return found


def _ledgers(found: Sequence[Record], position: Position | None) -> tuple[Ledger, Ledger]:
    """Return what is to be restored, and what the journal itself says is left."""
    wanted, everything = Ledger(), Ledger()
    for record in found:
        head = record.head
        everything.apply(head, record.segment)
        is_before = files.bound(record.segment, position, record.end) >= record.end
        is_new = isinstance(head, Opened) and head.partition not in wanted.registered
        if is_before or is_new or isinstance(head, Written | Undone):
            wanted.apply(head, record.segment)
    return wanted, everything


def _register(client: DataPlaneClient, partition: str, opened: Opened) -> None:
    client.register_partition(
        partition,
        opened.fields,
        opened.num_samples,
        opened.tasks,
        opened.group_size,
        None if opened.enums is None else decode(opened.enums),
        group_tag=opened.group_tag,
    )


def _first_puts(
    found: Sequence[Record], wanted: Ledger, keep: Keep | None, report: RestoreReport
) -> dict[str, dict[str, int]]:
    """Return the times of the puts that rows begin with, by partition and id; rows not to be kept are let go of.

    A row that was put `once`, lost to an earlier restore and put `once` again, begins with the latter put. Rows that
    were put `once` under ids that the partition had before are none: a store refuses them, and a restore says so.
    """
    for partition, ids in wanted.spent.items():
        rows = wanted.partitions[partition]
        for sample_id in [sample_id for sample_id in ids if sample_id in rows and rows[sample_id].once]:
            del rows[sample_id]
    begins: dict[str, dict[str, int]] = {}
    kept: dict[tuple[str, str], bool] = {}
    left = {partition: wanted.left(partition) for partition in wanted.partitions}
    for record in found:
        head = record.head
        if not isinstance(head, Written) or not (head.once or head.tags):
            continue
        there, starts = left[head.partition], begins.setdefault(head.partition, {})
        tags = [{}] * len(head.ids) if head.tags is None else decode(head.tags)
        for sample_id, tag in zip(head.ids, tags):
            if sample_id in there and head.at in there[sample_id].puts:
                if head.once:
                    starts[sample_id] = head.at
                kept[head.partition, sample_id] = keep is None or keep(tag)
    for (partition, sample_id), is_kept in kept.items():
        if not is_kept:
            del wanted.partitions[partition][sample_id]
            report.unwanted += 1
    return begins


RowsLeft = Mapping[str, Mapping[str, Row]]
Part = tuple[Record, list[str]]
"""A put, and some rows of it."""


def _doubtful_puts(found: Iterable[Record]) -> set[int]:
    """Return the times of puts of which the journal does not say that the store took them: their process died."""
    taken = {record.head.of for record in found if isinstance(record.head, Taken)}
    return {record.head.at for record in found if isinstance(record.head, Written)} - taken


def _never_taken(found: Sequence[Record], wanted: Ledger, doubtful: Set[int]) -> Iterator[Part]:
    """Let go of doubtful puts that no store took, by what it took besides, and yield them with their rows.

    It had a row before that a put was to bring `once`, or another brought it `once` afterwards.
    """
    begins = {
        (record.head.partition, sample_id): record.head.at
        for record in found
        if isinstance(record.head, Written) and record.head.once and record.head.at not in doubtful
        for sample_id in record.head.ids
    }
    for record in found:
        head = record.head
        if not isinstance(head, Written) or head.at not in doubtful:
            continue
        rows, spent = wanted.partitions[head.partition], wanted.spent[head.partition]
        ids = [i for i in head.ids if i in rows and head.at in rows[i].puts]
        if any(
            begins.get((head.partition, i), 0) > head.at
            or (head.once and (i in spent or any(at < head.at for at in rows[i].puts.keys() - doubtful)))
            for i in ids
        ):
            wanted.drop(head, ids, record.segment)
            yield record, ids


def _in_turn(found: Sequence[Record], left: RowsLeft, doubtful: Set[int]) -> Iterator[Part]:
    """Yield puts with those of their rows that are left, as they go into the store.

    Last are rows that only doubtful puts have brought, so that they take the room of no others.
    """
    last = {
        partition: {i for i, row in rows.items() if not row.consumed and row.puts.keys() <= doubtful}
        for partition, rows in left.items()
    }
    for is_last in (False, True):
        for record in found:
            head = record.head
            if isinstance(head, Written) and (head.at in doubtful or not is_last):
                rows, own = left.get(head.partition, {}), last.get(head.partition, ())
                yield (
                    record,
                    [i for i in head.ids if i in rows and head.at in rows[i].puts and (i in own) == is_last],
                )


def _targets(
    record: Record,
    some: Sequence[str],
    known: RowsLeft,
    begins: Mapping[str, Mapping[str, int]],
    quiet: DataPlaneClient,
    client: DataPlaneClient,
) -> Iterable[tuple[DataPlaneClient, list[str]]]:
    """Yield where some rows of a put go: `known` ones quietly, others through the journal."""
    head = record.head
    there, begin = known.get(head.partition, {}), begins.get(head.partition, {})
    mine = [i for i in some if head.at >= begin.get(i, 0)]
    held = [i for i in mine if i in there and head.at in there[i].puts]
    if held:
        yield quiet, held
    if len(held) < len(mine):
        gone = set(mine) - set(held)
        yield client, [sample_id for sample_id in mine if sample_id in gone]


def _is_put(
    client: DataPlaneClient, folder: Path, record: Record, ids: Collection[str], *, is_sure: bool
) -> bool:
    """Put rows again; return False where the store refuses a put that is not sure to have been taken.

    The store refused it then as well, and the crash came before the journal was told.
    """
    try:
        _put(client, folder, record, ids)
    except TransportError:
        raise
    except Exception:
        if is_sure:
            raise
        return False
    return True


def _put(client: DataPlaneClient, folder: Path, record: Record, ids: Collection[str]) -> None:
    head = record.head
    assert isinstance(head, Written)
    wanted = set(ids)
    rows = np.array([row for row, sample_id in enumerate(head.ids) if sample_id in wanted], np.int64)
    own, chunks, tags = read_put(head, record.body(folder), rows)
    known: Known = []
    wire = wire_tensordict({name: chunk.leaf(known) for name, chunk in chunks.items()}, len(own))
    fields = wire if chunks else None
    client.put_samples(own, head.partition, fields, tags, producer=head.producer, once=head.once)


def _spend(client: DataPlaneClient, opened: Opened, ids: Sequence[str]) -> None:
    """Have a partition refuse rows that it had: a producer that has got no answer may put them once more."""
    if opened.group_tag is not None:
        return
    most = max(opened.num_samples, 1)
    for some in _whole_puts(ids, opened.group_size or 1):
        for start in range(0, len(some), most):
            part = some[start : start + most]
            client.put_samples(part, opened.partition, once=True)
            client.clear_samples(part, opened.partition)


def _whole_puts(ids: Sequence[str], size: int) -> Iterable[list[str]]:
    """Return ids in puts of which none has more samples of a group than it takes: a uid may come again and again."""
    seen: Counter[str] = Counter()
    puts: dict[int, list[str]] = defaultdict(list)
    for sample_id in ids:
        uid = sample_id.rpartition(MARK)[0]
        puts[seen[uid] // size if uid else 0].append(sample_id)
        seen[uid] += 1
    return puts.values() if size > 1 else [list(ids)]


def _consume(client: DataPlaneClient, opened: Opened, rows: Mapping[str, Row]) -> None:
    """Have tasks consume the rows again that they had."""
    for task in opened.tasks:
        had = [sample_id for sample_id, row in rows.items() if task in row.consumed]
        if had:
            client.mark_consumed(opened.partition, task, had)

"""From a journal back into a store."""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from headrace.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from headrace.data_plane.journal import segments as files
from headrace.data_plane.journal.client import journal_of
from headrace.data_plane.journal.ledger import Ledger, Row
from headrace.data_plane.journal.records import Opened, Undone, Written, read_put
from headrace.data_plane.journal.segments import Position, Record
from headrace.data_plane.object_codec import decode
from headrace.data_plane.store.columns import Known
from headrace.data_plane.wire import wire_tensordict
from headrace.errors import HeadraceError

_LEASE_S = 3600.0
_log = logging.getLogger(__name__)


@dataclass
class RestoreReport:
    """What a restore has given back.

    `rows` counts them by partition. `cut_bytes` are of records that a crash has cut in two, and of those after the
    position that was asked for. `revived` rows were cleared or consumed only after it. `refused` ones were put last by
    a writer, and no store takes them.
    """

    rows: dict[str, int] = field(default_factory=dict)
    cut_bytes: int = 0
    revived: int = 0
    refused: int = 0

    @property
    def total(self) -> int:
        return sum(self.rows.values())


def restore(
    client: DataPlaneClient, folder: Path, position: Position | None = None, *, later: bool = False
) -> RestoreReport:
    """Put every row that a journal has and that is neither cleared nor consumed into a store, which may be any other.

    Partitions are registered as they were, so this comes before anything else is put. Rows that only some tasks of a
    partition have consumed are consumed for those.

    Args:
        folder: Of the journal. If it is that of `client`, it goes on being it.
        position: Restore the rows of then: what lies after it is cut off. None: those of the journal's end.
        later: Beside these, restore the rows that were put after the position, and take back what was cleared or
            consumed after it; nothing is cut off.

    Raises:
        DataPlaneError: a damaged record.
        CapacityExceeded: rows that the store has no room for.
    """
    report = RestoreReport()
    if position is not None and not later:
        report.cut_bytes += files.cut(folder, position)
    found = _whole_records(folder, report)
    before, everything = _ledgers(found, position)
    journal = journal_of(client)
    same = journal is not None and journal.folder.absolute() == folder.absolute()
    if journal is not None and same:
        journal.adopt({segment.writer for segment in files.segments(folder)})
        for partition, rows in everything.partitions.items():
            # The store does not have them any more, so that a sample of the same id is another one.
            journal.forget(partition, [sample_id for sample_id, row in rows.items() if row.is_done])
    # What the journal has already is not written there once more, but for rows that it takes for cleared.
    quiet = journal.inner if journal is not None and same else client
    for partition, (opened, _) in before.registered.items():
        _register(quiet, partition, opened)
        done = [sample_id for sample_id, row in before.partitions[partition].items() if row.is_done]
        _spend(quiet, opened, list(dict.fromkeys([*before.spent[partition], *done])))
        if journal is not None and same:
            journal.remember(opened)
    last = {record.segment.writer: record for record in found}
    for record in found:
        for target, ids in _targets(record, before, everything, quiet, client):
            report.revived += len(ids) if target is client and same else 0
            try:
                _put(target, folder, record, ids)
            except HeadraceError:
                if record is not last[record.segment.writer]:
                    raise
                # The store refused it then as well, and the crash came before the journal was told.
                report.refused += len(ids)
                before.drop(record.head, ids)
    for partition in before.partitions:
        left = before.left(partition)
        if left:
            report.rows[partition] = len(left)
        if left and partition in before.registered:
            _consume(quiet, before.registered[partition][0], left)
    if report.cut_bytes:
        _log.warning("%s: %d bytes were cut off the journal's end", folder, report.cut_bytes)
    return report


def _whole_records(folder: Path, report: RestoreReport) -> list[Record]:
    """Return all records in the order of their times, and cut off what a crash has left of the last ones."""
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
    return sorted(found, key=lambda record: record.head.at)


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


def _targets(
    record: Record, wanted: Ledger, everything: Ledger, quiet: DataPlaneClient, client: DataPlaneClient
) -> Iterable[tuple[DataPlaneClient, list[str]]]:
    """Yield where the rows of a put go that are left: those that the journal takes for gone, through the journal."""
    head = record.head
    if not isinstance(head, Written):
        return
    left, known = wanted.left(head.partition), everything.left(head.partition)
    mine = [sample_id for sample_id in head.ids if sample_id in left and head.at in left[sample_id].puts]
    held = [sample_id for sample_id in mine if sample_id in known and head.at in known[sample_id].puts]
    if held:
        yield quiet, held
    if len(held) < len(mine):
        gone = set(mine) - set(held)
        yield client, [sample_id for sample_id in mine if sample_id in gone]


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
    for start in range(0, len(ids) if opened.group_tag is None else 0, max(opened.num_samples, 1)):
        some = ids[start : start + opened.num_samples]
        client.put_samples(some, opened.partition, once=True)
        client.clear_samples(some, opened.partition)


def _consume(client: DataPlaneClient, opened: Opened, rows: Mapping[str, Row]) -> None:
    """Have tasks consume the rows again that they had, where others have not had them."""
    for task in opened.tasks:
        if not any(task in row.consumed for row in rows.values()):
            continue
        others: list[KVBatchMeta] = []
        size = opened.group_size or 1
        while meta := client.claim_meta(opened.partition, task, [], size, blocking=False, lease_s=_LEASE_S):
            if all(task in rows[sample_id].consumed for sample_id in meta.sample_ids):
                client.finish_claim(meta)
            else:
                others.append(meta)
        for meta in others:
            client.release_claim(meta)

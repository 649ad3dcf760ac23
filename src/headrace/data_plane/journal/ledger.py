"""What the records of a journal come to: which rows are left, and which files may go.

A row is left until it is cleared, or until all tasks of its partition have consumed it. A file is needed while

- a row that is left was put in it, or was consumed in it by some of the tasks;
- a row that all tasks have consumed, and that is not cleared, was consumed in it, or put while no `Listed` record names
  it: else a column that is written to it later would look like a new row;
- a partition's present registration is in it;
- it clears rows of other files that are there still: without it they would come back. A `Listed` record, with which a
  file begins, says which rows of earlier files are left, so that clears before it need not stay;
- its `Listed` record is the latest of its writers.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from headrace.data_plane.journal.records import AnyHead, Cleared, Consumed, Listed, Opened, Undone, Written
from headrace.data_plane.journal.segments import Segment

_MOST_SPENT = 10_000
"""Ids of a partition that are remembered after their rows have gone: a producer tries again soon, or never."""


@dataclass
class Row:
    """A row that is in the store: the time and file of each put, and of what it was consumed by.

    `listed` are the files whose `Listed` records say that it was consumed.
    """

    puts: dict[int, Segment] = field(default_factory=dict)
    consumed: dict[str, Segment] = field(default_factory=dict)
    listed: tuple[Segment, ...] = ()
    is_done: bool = False
    once: bool = False


class Ledger:
    """Rows by partition and id, after records in the order of their times."""

    def __init__(self) -> None:
        self.partitions: dict[str, dict[str, Row]] = defaultdict(dict)
        self.registered: dict[str, tuple[Opened, Segment]] = {}
        # In the order in which they were cleared, each with the file that says so; and all files that say so of any.
        self.spent: dict[str, dict[str, Segment]] = defaultdict(dict)
        self._spent_in: dict[str, set[Segment]] = defaultdict(set)
        # Rows that are left, by file.
        self._left: Counter[Segment] = Counter()
        # By file, the rows that it clears, each with a file that it was put in.
        self._clears: dict[Segment, set[tuple[str, str, Segment]]] = defaultdict(set)
        # Of a writer, the files before this number are listed in that file.
        self._listed: dict[str, tuple[int, Segment]] = {}

    def apply(self, head: AnyHead, segment: Segment) -> None:
        """Take a record in; a put that the store refused takes its `Undone` to be so."""
        match head:
            case Opened():
                self._open(head, segment)
            case Written(ids=ids, at=at, once=once):
                rows = self.partitions[head.partition]
                for sample_id in ids:
                    row = rows.setdefault(sample_id, Row())
                    row.puts[at] = segment
                    row.once |= once
                    self._left[segment] += not row.is_done
            case Undone(ids=ids, of=of):
                self._undo(head.partition, ids, segment, of)
            case Cleared(ids=ids):
                self._spend(head.partition, ids, segment)
                self._clear(head.partition, ids, segment, range(head.before))
            case Consumed(ids=ids, task=task):
                for sample_id in ids:
                    known = self.partitions[head.partition].get(sample_id)
                    if known is not None:
                        self._consume(head.partition, sample_id, {**known.consumed, task: segment})
            case Listed():
                self._list(head, segment)

    def drop(self, put: AnyHead, ids: Iterable[str], segment: Segment) -> None:
        """Let go of rows of a put, which no record says; `segment` is where it is."""
        self._undo(put.partition, ids, segment, put.at)

    def _open(self, head: Opened, segment: Segment) -> None:
        known = self.registered.get(head.partition)
        if head.first is None:
            self._spend(head.partition, None, segment)
            self._clear(head.partition, None, segment, range(head.before))
        # A writer repeats what it knows, which another may have registered anew.
        if known is None or _first(head) >= _first(known[0]):
            self.registered[head.partition] = (head, segment)
            if known is None or _first(head) != _first(known[0]):
                for sample_id, row in self.partitions[head.partition].items():
                    self._consume(head.partition, sample_id, row.consumed)

    def _spend(self, partition: str, ids: list[str] | None, segment: Segment) -> None:
        """Remember the latest ids, put once or consumed, that are cleared; clearing a partition forgets them."""
        if ids is None:
            self.spent.pop(partition, None)
            places = self._spent_in.pop(partition, set[Segment]()) - {segment}
            self._clears[segment] |= {(partition, "", place) for place in places}
            return
        rows = self.partitions[partition]
        known = {sample_id: rows[sample_id] for sample_id in ids if sample_id in rows}
        spent = [sample_id for sample_id, row in known.items() if row.once or row.is_done]
        if spent:
            self._spent_in[partition].add(segment)
            self.spent[partition].update(dict.fromkeys(spent, segment))
            for sample_id in list(self.spent[partition])[:-_MOST_SPENT]:
                del self.spent[partition][sample_id]

    def spent_ids(self) -> dict[str, list[str]]:
        return {partition: list(ids) for partition, ids in self.spent.items()}

    def _clear(
        self, partition: str, ids: Iterable[str] | None, segment: Segment, times: Collection[int]
    ) -> None:
        """Let go of the puts of some times."""
        rows = self.partitions[partition]
        for sample_id in list(rows) if ids is None else ids:
            row = rows.get(sample_id)
            gone = [] if row is None else [at for at in row.puts if at in times]
            if row is None or (row.puts and not gone):
                continue
            self._count(row, -1)
            # What was put meanwhile is another row, which nobody has had.
            places = {*(row.puts.pop(at) for at in gone), *row.consumed.values(), *row.listed}
            row.consumed, row.listed, row.is_done = {}, (), False
            self._count(row, 1)
            self._clears[segment] |= {(partition, sample_id, place) for place in places if place != segment}
            if not row.puts:
                del rows[sample_id]

    def _undo(self, partition: str, ids: Iterable[str], segment: Segment, at: int) -> None:
        """Let go of a put that the store refused; a row that was there before stays."""
        rows = self.partitions[partition]
        for sample_id in ids:
            row = rows.get(sample_id)
            if row is None or at not in row.puts:
                continue
            self._count(row, -1)
            put = row.puts.pop(at)
            self._count(row, 1)
            if put != segment:
                self._clears[segment].add((partition, sample_id, put))
            if not row.puts and not row.consumed:
                del rows[sample_id]

    def _count(self, row: Row, rows: int) -> None:
        if not row.is_done:
            for segment in (*row.puts.values(), *row.consumed.values()):
                self._left[segment] += rows

    def _consume(self, partition: str, sample_id: str, tasks: Mapping[str, Segment]) -> None:
        """Let these tasks be the ones that have consumed a row."""
        row = self.partitions[partition].setdefault(sample_id, Row())
        self._count(row, -1)
        row.consumed = dict(tasks)
        opened = self.registered.get(partition)
        row.is_done = opened is not None and bool(tasks) and tasks.keys() >= set(opened[0].tasks)
        self._count(row, 1)

    def _list(self, head: Listed, segment: Segment) -> None:
        """Let go of rows of earlier files that are not listed, and of the clears that said so."""

        def covered(place: Segment) -> bool:
            return place.number < head.until.get(place.writer, 0)

        for partition, rows in self.partitions.items():
            listed = head.rows.get(partition, {})
            for sample_id in [sample_id for sample_id in rows if sample_id not in listed]:
                self._unlist(partition, sample_id, covered)
        for partition, listed in head.rows.items():
            for sample_id, tasks in listed.items():
                row = self.partitions[partition].setdefault(sample_id, Row())
                others = {task: place for task, place in row.consumed.items() if not covered(place)}
                self._consume(partition, sample_id, {**others, **dict.fromkeys(tasks, segment)})
                own = (segment,) if tasks else ()
                row.listed = (*(place for place in row.listed if not covered(place)), *own)
        for partition in {*self.spent, *head.spent}:
            told = dict.fromkeys(head.spent.get(partition, ()), segment)
            others = {i: place for i, place in self.spent[partition].items() if not covered(place)}
            self.spent[partition] = {**told, **others}
            places = {place for place in self._spent_in[partition] if not covered(place)}
            self._spent_in[partition] = places | ({segment} if told else set())
        for clears in self._clears.values():
            clears -= {one for one in clears if covered(one[2]) and one[1] not in head.rows.get(one[0], {})}
        for writer, number in head.until.items():
            if number >= self._listed.get(writer, (0, segment))[0]:
                self._listed[writer] = (number, segment)

    def _unlist(self, partition: str, sample_id: str, covered: Callable[[Segment], bool]) -> None:
        """Let go of what files say of a row that they do not have any more."""
        rows = self.partitions[partition]
        row = rows[sample_id]
        places = (*row.puts.values(), *row.consumed.values(), *row.listed)
        if places and not any(map(covered, places)):
            return
        self._count(row, -1)
        was_covered = any(map(covered, row.puts.values()))
        row.puts = {at: put for at, put in row.puts.items() if not covered(put)}
        row.listed = tuple(place for place in row.listed if not covered(place))
        tasks = {task: place for task, place in row.consumed.items() if not covered(place)}
        self._count(row, 1)
        self._consume(partition, sample_id, tasks)
        if not row.puts and (was_covered or not tasks):
            self._count(row, -1)
            del rows[sample_id]

    def covering(self, until: Mapping[str, int]) -> dict[str, int]:
        """Return these numbers, and those that records have listed in the files before them.

        So files that have gone stay covered: their rows may be in the store, and written to.
        """
        covered = {
            writer: number
            for writer, (number, place) in self._listed.items()
            if place.number < until.get(place.writer, 0)
        }
        return {writer: max(covered.get(writer, 0), until.get(writer, 0)) for writer in {**covered, **until}}

    def listing(self, until: Mapping[str, int]) -> dict[str, dict[str, list[str]]]:
        """Return the rows of which files before these numbers say something, each with the tasks that have had it.

        Rows that all tasks have had are among them until they are cleared: they are in the store, and a column that is
        written to them later makes no new rows.
        """
        found: dict[str, dict[str, list[str]]] = {}
        for partition, rows in self.partitions.items():
            for sample_id, row in rows.items():
                places = (*row.puts.values(), *row.consumed.values())
                if any(place.number < until.get(place.writer, 0) for place in places):
                    found.setdefault(partition, {})[sample_id] = sorted(row.consumed)
        return found

    def left(self, partition: str) -> dict[str, Row]:
        """Return the rows of a partition that are left, in the order of their first puts."""
        rows = self.partitions.get(partition, {})
        return {sample_id: row for sample_id, row in rows.items() if row.puts and not row.is_done}

    def removable(self, existing: Collection[Segment], may_go: Collection[Segment]) -> list[Segment]:
        """Return which of the files that `may_go` nothing needs, in the order in which they have to go."""
        there = set(existing)
        needed = {segment for segment, count in self._left.items() if count}
        needed |= {segment for _, segment in self.registered.values()}
        needed |= {segment for _, segment in self._listed.values()}
        for rows in self.partitions.values():
            for row in rows.values():
                if row.is_done:
                    needed.update(row.consumed.values(), () if row.listed else row.puts.values())
        gone: list[Segment] = []
        while True:
            left = there - needed
            free = [s for s in may_go if s in left and not any(c[2] in there for c in self._clears[s])]
            if not free:
                return gone
            gone += free
            there -= set(free)


def _first(opened: Opened) -> int:
    """Return the time of a registration, also if this is it once more."""
    return opened.at if opened.first is None else opened.first

"""Partitions behind one lock: their samples, columns, lengths, tags and tasks.

Where the rows lie, here or elsewhere, is for a client of the store to know. Bytes are copied outside the lock: a put
copies its columns before it takes the lock, and a get only selects under the lock, since chunks never change.
"""

import threading
import time
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple

import numpy as np

from headrace.data_plane.object_codec import copied_tag
from headrace.data_plane.schema import FIELDS, INPUT_IDS, INPUT_LENGTHS
from headrace.data_plane.store.claims import ClaimRequest, Claims, Held, Registration
from headrace.data_plane.store.columns import (
    Block,
    Column,
    Columns,
    Lengths,
    Put,
    Rows,
    Selection,
    Slots,
    grown,
    shown,
)
from headrace.errors import CapacityExceeded, ClaimTimeout, DataPlaneError, SampleNotFound, SchemaError

_REMEMBERED = 1000
"""Registrations that are kept of partitions that have ended."""
_FEW_SLOTS = 1024
_UNKNOWN = -1


class RowFacts(NamedTuple):
    """What a meta says about rows."""

    sample_ids: list[str]
    sequence_lengths: list[int] | None
    tags: list[dict[str, Any]] | None


class Partition(Generic[Block]):
    """Samples by id. Each has a slot, a small number; slots keep the order of the first puts. Not thread-safe."""

    def __init__(self, name: str, registration: Registration | None = None) -> None:
        """Without a registration nobody claims, and there is no limit to its samples."""
        self.name, self.registration = name, registration
        self._ids: list[str] = []
        # None: slot i is that of the i-th id, and nobody has asked for a single one yet; see `_slot_of`.
        self._slots_by_id: dict[str, int] | None = None
        # Counts up when samples come or go.
        self._version = 0
        self._all_slots: Slots | None = None
        self._tags: dict[str, dict[str, Any]] = {}
        self._columns: dict[str, Column[Block]] = {}
        # Tokens by slot. A number stays when the last column that said it has gone: then it binds nobody.
        self._lengths: Lengths = np.empty(0, np.int32)
        # Columns whose last put said the lengths of its rows.
        self._saying: set[str] = set()
        self._claims = Claims(name, registration)

    def __len__(self) -> int:
        return len(self._ids if self._slots_by_id is None else self._slots_by_id)

    @property
    def _slot_of(self) -> dict[str, int]:
        if self._slots_by_id is None:
            self._slots_by_id = {sample_id: slot for slot, sample_id in enumerate(self._ids)}
        return self._slots_by_id

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self._columns.values())

    @property
    def blocks(self) -> list[Block]:
        return [block for column in self._columns.values() for block in column.blocks]

    def sample_ids(self) -> list[str]:
        return list(self._ids if self._slots_by_id is None else self._slots_by_id)

    # Writing.

    def locate(self, ids: Sequence[str]) -> Slots:
        """Return each id's slot, -1 where there is none."""
        if not len(self):
            return Slots(np.full(len(ids), -1))
        if len(ids) == len(self._ids) == len(self) and ids == self._ids:
            if self._all_slots is None:
                self._all_slots = Slots(np.arange(len(ids)), self._version)
            return self._all_slots
        slot_of = self._slot_of.get
        return Slots(np.array([slot_of(sample_id, -1) for sample_id in map(str, ids)], dtype=np.int64))

    def check(self, put: Put, columns: Columns[Block], slots: Slots) -> int:
        """Return how many samples of a put are new; `slots` are what `locate` gives for its ids."""
        new = 0 if slots.version is not None else int(np.count_nonzero(slots.at < 0))
        registration = self.registration
        if registration is not None and len(self) + new > registration.num_samples:
            raise CapacityExceeded(
                f"a put of {new} new samples does not fit into partition '{self.name}': it was registered for "
                f"num_samples={registration.num_samples} and holds {len(self)}. Clear samples that are done with, or "
                "register more"
            )
        for name, blocks in columns.items():
            if name in self._columns:
                self._check_form(name, blocks[0], put.ids, slots.at)
        if put.lengths:
            self._check_lengths(put, columns, slots.at)
        if self._claims.groups is not None:
            self._claims.groups.check(put.ids, slots.at, put.tags)
        for tag, allowed in (registration.enums if registration else {}).items():
            for row, values in enumerate(put.tags or ()):
                if tag in values and values[tag] not in allowed:
                    raise SchemaError(
                        f"tag '{tag}' of sample '{put.ids[row]}' is {values[tag]!r}; partition '{self.name}' was "
                        f"registered with {', '.join(map(repr, allowed))}"
                    )
        return new

    def _check_form(self, name: str, block: Block, ids: Sequence[str], slots: Rows) -> None:
        column, got = self._columns[name], block.form
        held = column.form
        if held is None or held == got:
            return
        axes = FIELDS[name].trailing_dims if name in FIELDS else 0
        if axes and got.trailing[-axes:] != held.trailing[-axes:]:
            raise SchemaError(
                f"column '{name}' of {shown(ids) or 'no samples'} has {got.trailing[-axes:]} values per token; the "
                f"samples of partition '{self.name}' have {held.trailing[-axes:]} (routes: MoE layers, experts per "
                "token). Write the rows of one model to one partition, or clear its samples first"
            )
        if not column.holds_only(slots[slots >= 0]):
            raise SchemaError(
                f"column '{name}' of partition '{self.name}' holds {held}; got {got}. Put the same kind, dtype and "
                "shape, overwrite all its rows at once, or use another column name"
            )

    def _check_lengths(self, put: Put, columns: Columns[Block], slots: Rows) -> None:
        """Hold the columns of a put to one length per row, and to the rows that are there."""
        (first, lengths), *others = put.lengths.items()
        for name, other in others:
            if other is not lengths and len(rows := np.flatnonzero(other != lengths)):
                row = int(rows[0])
                raise _two_lengths(name, put.ids[row], other[row], first, lengths[row], "of the same put")
        if not len(self._lengths):
            return
        held = self._lengths[slots]
        differs = np.flatnonzero((held != lengths) & (held != _UNKNOWN) & (slots >= 0))
        if not len(differs):
            return
        for name, column in self._columns.items():
            if name in self._saying and name not in columns:
                says = column.held(slots[differs])
                if says.any():
                    row = int(differs[int(says.argmax())])
                    where = "that the store holds"
                    raise _two_lengths(first, put.ids[row], lengths[row], name, held[row], where)

    def write(self, put: Put, columns: Columns[Block], slots: Slots) -> tuple[Slots, list[Block]]:
        """Write what `check` has let pass; return the slots of all samples, and the blocks that no row is left of."""
        if slots.version is None:
            slots = self._with_new(put, slots.at)
        gone: list[Block] = []
        if put.ids:
            lengths = next(iter(put.lengths.values()), None)
            if lengths is not None and slots.version is not None:
                self._lengths = lengths.copy()
            else:
                self._lengths = grown(self._lengths, len(self._ids), _UNKNOWN)
                if lengths is not None:
                    self._lengths[slots.at] = lengths
            self._saying = (self._saying - columns.keys()) | put.lengths.keys()
            for name, blocks in columns.items():
                if name not in self._columns:
                    self._columns[name] = Column()
                gone += self._columns[name].write(slots, blocks)
        for sample_id, values in zip(put.ids, put.tags or ()):
            self._tags.setdefault(sample_id, {}).update(values)
        return slots, gone

    def _with_new(self, put: Put, slots: Rows) -> Slots:
        """Give slots to samples that have none."""
        rows = np.flatnonzero(slots < 0)
        if not len(rows):
            return Slots(slots)
        first, count = len(self._ids), len(rows)
        ids, tags = put.ids, put.tags
        if count < len(slots):
            ids = [ids[row] for row in rows.tolist()]
            tags = None if tags is None else [tags[row] for row in rows.tolist()]
        slots[rows] = np.arange(first, first + count)
        if first:
            self._slot_of.update(zip(ids, range(first, first + count)))
        else:
            self._slots_by_id = None
        self._ids.extend(ids)
        self._version += 1
        self._all_slots = None if first else Slots(slots, self._version)
        if self._claims.groups is not None:
            self._claims.groups.add(ids, first, tags)
        return self._all_slots or Slots(slots)

    def clear(self, ids: Sequence[str]) -> list[Block]:
        """Remove samples, and return the blocks that no row is left of; ids that it does not have are ignored."""
        known = [sample_id for sample_id in dict.fromkeys(ids) if sample_id in self._slot_of]
        slots = np.array([self._slot_of.pop(sample_id) for sample_id in known], dtype=np.int64)
        self._version, self._all_slots = self._version + 1, None
        self._claims.drop(slots)
        for sample_id in known:
            self._tags.pop(sample_id, None)
        gone = [block for column in self._columns.values() for block in column.drop(slots)]
        self._columns = {name: column for name, column in self._columns.items() if column.form is not None}
        if not len(self) or len(self._ids) > max(_FEW_SLOTS, 2 * len(self)):
            self._renumber()
        return gone

    def _renumber(self) -> None:
        """Close the gaps that cleared samples have left."""
        slots = np.array(list(self._slot_of.values()), dtype=np.int64)
        for column in self._columns.values():
            column.renumber(slots)
        self._ids, self._slots_by_id = list(self._slot_of), None
        self._lengths = self._lengths[slots]
        self._claims.renumber(slots)

    # Reading.

    def slots(self, ids: Sequence[str], names: Sequence[str]) -> Slots:
        """Return the slots of `ids`, all of which have the columns `names`."""
        slots, faults = self.locate(ids), []
        known = slots
        if slots.version is None and (slots.at < 0).any():
            unknown = list(dict.fromkeys(str(ids[row]) for row in np.flatnonzero(slots.at < 0).tolist()))
            faults.append(f"unknown sample ids {shown(unknown)}")
            known = Slots(slots.at[slots.at >= 0])
        for name in names:
            column = self._columns.get(name)
            if column is None:
                faults.append(f"no sample has column '{name}'")
            elif not column.holds_all(known):
                lacking = known.at[~column.held(known.at)].tolist()
                ids_lacking = list(dict.fromkeys(self._ids[slot] for slot in lacking))
                faults.append(f"column '{name}' is not written for {shown(ids_lacking)}")
        if faults:
            raise SampleNotFound(f"partition '{self.name}': {'; '.join(faults)}")
        return slots

    def select(self, ids: Sequence[str], names: Sequence[str]) -> dict[str, Selection[Block]]:
        """Return how to read columns of samples; raises what `slots` raises."""
        slots = self.slots(ids, names)
        return {name: self._columns[name].select(slots) for name in names}

    def shared_columns(self, ids: Sequence[str]) -> list[str]:
        """Return the columns that all of `ids` have."""
        slots = self.slots(ids, ())
        return [name for name, column in self._columns.items() if column.holds_all(slots)]

    def facts(self, ids: list[str], slots: Slots) -> RowFacts:
        """Return lengths, if a column of lengths or of tokens says those of all samples, and copies of the tags."""
        lengths: list[int] | None = None
        for name in (INPUT_LENGTHS, INPUT_IDS):
            if name in self._saying and name in self._columns and self._columns[name].holds_all(slots):
                lengths = self._lengths[slots.at].tolist()
                break
        tags = None
        if self._tags:
            tags = [copied_tag(self._tags.get(sample_id, {}), row) for row, sample_id in enumerate(ids)]
        return RowFacts(ids, lengths, tags if tags and any(tags) else None)

    # Claiming.

    def claim(self, request: ClaimRequest) -> tuple[list[str], Slots] | None:
        """Take the next samples for a task; raises what `Claims.claim` raises."""
        slots = self._claims.claim(request, self._ids, self._held_by(request.fields))
        return None if slots is None else ([self._ids[slot] for slot in slots.tolist()], Slots(slots))

    def describe_wait(self, request: ClaimRequest) -> str:
        return self._claims.describe_wait(request.task, len(self._ids), self._held_by(request.fields))

    def is_consumed(self, tasks: Sequence[str]) -> bool:
        return self._claims.is_consumed(tasks, len(self._ids))

    def _held_by(self, names: Sequence[str]) -> dict[str, Held]:
        return {name: self._columns.get(name, Column[Block]()).held for name in names}


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
        """Open a partition, in place of one of the same name."""
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

    def put(self, put: Put, columns: Columns[Block]) -> tuple[RowFacts, list[Block]]:
        """Write rows, all or nothing; a partition that was not registered appears with its first put."""
        name, ids = put.partition_id, put.ids
        with self._changed:
            partition, slots, new = self._checked(put, columns)
            if ids or partition.registration is not None:
                self._partitions[name] = partition
                self._ended.pop(name, None)
            self._held += new
            slots, gone = partition.write(put, columns, slots)
            facts = partition.facts(ids, slots)
            if self._waiting:
                self._changed.notify_all()
        return facts, gone

    def check_put(self, put: Put, columns: Columns[Block]) -> None:
        """Raise what `put` would raise."""
        with self._changed:
            self._checked(put, columns)

    def _checked(self, put: Put, columns: Columns[Block]) -> tuple[Partition[Block], Slots, int]:
        """Return the partition of a put that nothing speaks against, which may be new, the ids' slots, and new rows."""
        self._check_open()
        name = put.partition_id
        partition = self._partitions.get(name)
        if partition is None:
            partition = Partition(name, self._ended.get(name))
        slots = partition.locate(put.ids)
        new = partition.check(put, columns, slots)
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
            raise DataPlaneError(
                f"unknown partition '{name}'; there are: {shown(list(self._partitions)) or 'none'}"
            )
        return self._partitions[name]

    def _existing(self, name: str, ids: Sequence[str]) -> Partition[Block]:
        self._check_open()
        if name not in self._partitions:
            known = shown(list(self._partitions)) or "none"
            raise SampleNotFound(
                f"unknown partition '{name}' (there are: {known}), so no sample ids {shown(ids)}"
            )
        return self._partitions[name]


def _two_lengths(name: str, sample: str, got: int, other: str, held: int, where: str) -> SchemaError:
    return SchemaError(
        f"column '{name}' has {got} tokens for sample '{sample}'; column '{other}' {where} says {held}. Write "
        "all columns of a sample that have one value per token with one length (kv_first_write and write_columns pack "
        f"padded rows); to change it, overwrite them, and '{INPUT_LENGTHS}', in one put"
    )

"""One partition: its samples by id and slot, their columns, lengths, tags, claims and producers."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any, Generic, NamedTuple

import numpy as np

from headrace.data_plane.claim_terms import PartitionReport, RowReport, TagRule, WaitState, is_one_of
from headrace.data_plane.object_codec import copied_tag
from headrace.data_plane.schema import FIELDS, INPUT_IDS, INPUT_LENGTHS
from headrace.data_plane.store.claims import (
    ClaimRequest,
    Claims,
    Clock,
    Held,
    Passes,
    Ready,
    Registration,
)
from headrace.data_plane.store.columns import (
    Block,
    Column,
    Columns,
    Form,
    Lengths,
    Put,
    RowFacts,
    Rows,
    Slots,
    grown,
)
from headrace.data_plane.store.places import Mask
from headrace.data_plane.store.refusals import Refusals
from headrace.data_plane.store.spent import SpentIds
from headrace.errors import CapacityExceeded, SampleNotFound, SchemaError
from headrace.utils.arguments import shown

_FEW_SLOTS = 1024
_LOOKED_FOR_AGAIN = 32
_UNKNOWN = -1


class Faults(NamedTuple):
    """What keeps a read from its rows: ids that are not there, columns that no row has, and rows that lack others."""

    unknown: list[str]
    no_row_has: list[str]
    lacking: dict[str, list[str]]

    def error(self, partition: str) -> SampleNotFound:
        texts = [f"unknown sample ids {shown(self.unknown)}"] if self.unknown else []
        texts += [f"no sample has column '{name}'" for name in self.no_row_has]
        texts += [f"column '{name}' is not written for {shown(ids)}" for name, ids in self.lacking.items()]
        return SampleNotFound(f"partition '{partition}': {'; '.join(texts)}")


class Partition(Generic[Block]):
    """Samples by id. Each has a slot, a small number; slots keep the order of the first puts. Not thread-safe."""

    def __init__(
        self,
        name: str,
        registration: Registration | None = None,
        clock: Clock = time.monotonic,
        column: Callable[[], Column[Block]] = Column,
    ) -> None:
        """Without a registration nobody claims, and there is no limit to its samples; `column` makes an empty one."""
        self._column = column
        self.name, self.registration = name, registration
        self._ids: list[str] = []
        # None: slot i is that of the i-th id, and nobody has asked for a single one yet; see `_slot_of`.
        self._slots_by_id: dict[str, int] | None = None
        # Counts up when samples come or go.
        self.version = 0
        self._all_slots: Slots | None = None
        self._tags: dict[str, dict[str, Any]] = {}
        self._columns: dict[str, Column[Block]] = {}
        # Tokens by slot. A number stays when the last column that said it has gone: then it binds nobody.
        self._lengths: Lengths = np.empty(0, np.int32)
        # Columns whose last put said the lengths of its rows.
        self._saying: set[str] = set()
        self._claims = Claims(name, registration, clock)
        self._refusals = Refusals()
        # Who named itself in a put, and by slot which of them did last.
        self._producers: dict[str, int] = {}
        self._producer_of: Lengths = np.empty(0, np.int32)
        # Ids that have been cleared since the first put that asked for it; see `has_had`.
        self._spent: SpentIds | None = None
        # Slots of lists of ids that were looked for, until samples go; and how many they are.
        self._found_before: dict[tuple[str, ...], Rows] = {}
        self._found_rows = 0

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

    def has(self, sample_id: str) -> bool:
        return sample_id in self._slot_of

    def sample_ids(self) -> list[str]:
        return list(self._ids if self._slots_by_id is None else self._slots_by_id)

    # Writing.

    def locate(self, ids: Sequence[str]) -> Slots:
        """Return each id's slot, -1 where there is none."""
        if not len(self):
            return Slots(np.full(len(ids), -1))
        if len(ids) == len(self._ids) == len(self) and ids == self._ids:
            if self._all_slots is None:
                self._all_slots = Slots(np.arange(len(ids)), self.version)
            return self._all_slots
        if len(ids) < _LOOKED_FOR_AGAIN:
            return Slots(self._found(ids))
        # Readers come back for the same rows; a look for each in a large table costs much more than to compare lists.
        key = tuple(ids)
        if key not in self._found_before:
            found = self._found(key)
            if (found < 0).any():
                return Slots(found)
            if self._found_rows > 2 * len(self):
                self._forget_found()
            found.flags.writeable = False
            self._found_before[key], self._found_rows = found, self._found_rows + len(key)
        return Slots(self._found_before[key])

    def _found(self, ids: Sequence[str]) -> Rows:
        return np.fromiter(map(self._slot_of.get, ids, repeat(_UNKNOWN)), np.int64, len(ids))

    def _forget_found(self) -> None:
        self._found_before.clear()
        self._found_rows = 0

    def check(
        self, put: Put, columns: Columns[Block], slots: Slots, *, has_groups_checked: bool = False
    ) -> int:
        """Return how many samples of a put are new; `slots` are what `locate` gives for its ids.

        Its groups need no second look while no samples have come or gone.
        """
        new = 0 if slots.version is not None else int(np.count_nonzero(slots.at < 0))
        if put.claim is not None:
            self.claims.check_in_force(put.claim, slots.at, put.ids)
        registration = self.registration
        most = registration.num_samples if registration is not None else math.inf
        if not put.part_of and len(self) + new > most:
            raise no_room(self.name, new, int(most), len(self))
        for name, blocks in columns.items():
            if name in self._columns:
                self._check_form(name, blocks[0].form, put.part_of or shown(put.ids), slots.at)
        if put.lengths:
            self._check_lengths(put, columns, slots.at)
        if self._claims.groups is not None and not has_groups_checked:
            self._claims.groups.check(put.ids, slots.at, put.tags)
        for tag, allowed in (registration.enums if registration else {}).items():
            for row, values in enumerate(put.tags or ()):
                if tag in values and not is_one_of(values[tag], allowed):
                    raise SchemaError(
                        f"tag '{tag}' of sample '{put.ids[row]}' is {values[tag]!r}; partition '{self.name}' was "
                        f"registered with {', '.join(map(repr, allowed))}"
                    )
        return new

    def has_had(self, put: Put, slots: Slots) -> bool:
        """Return whether all samples of a put are there, or were before.

        Raises:
            SchemaError: some are new, and others are not.
        """
        old: Mask = slots.at >= 0
        if self._spent is not None:
            old |= self._spent.has(put.ids)
        if old.any() and not old.all():
            raise had_before(self.name, len(put.ids), [put.ids[row] for row in np.flatnonzero(old).tolist()])
        return bool(old.all())

    def check_beside(self, forms: Mapping[str, Form], samples: str, *, once: bool) -> None:
        """Refuse a put into other stores of the partition, which is to be done `once`, for the forms of its columns."""
        for name, form in forms.items():
            column = self._columns.get(name)
            if column is not None and column.form is not None:
                self._check_form(name, form, samples, np.empty(0, np.int64))
        if once and self._spent is None:
            self._spent = SpentIds()

    def _check_form(self, name: str, got: Form, samples: str, slots: Rows) -> None:
        column = self._columns[name]
        held = column.form
        if held is None or held == got:
            return
        axes = FIELDS[name].trailing_dims if name in FIELDS else 0
        if axes and got.trailing[-axes:] != held.trailing[-axes:]:
            raise SchemaError(
                f"column '{name}' of {samples or 'no samples'} has {got.trailing[-axes:]} values per token; the "
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
        is_new = slots.version is None and bool((slots.at < 0).all())
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
                    self._columns[name] = self._column()
                gone += self._columns[name].write(slots, blocks)
        if put.tags and is_new:
            self._tags.update(zip(put.ids, map(dict, put.tags)))
        else:
            for sample_id, values in zip(put.ids, put.tags or ()):
                self._tags.setdefault(sample_id, {}).update(values)
        if put.tags and self._refusals.known:
            self._refusals.forget(slots.at)
        if put.producer is not None:
            self._producer_of = grown(self._producer_of, len(self._ids), _UNKNOWN)
            self._producer_of[slots.at] = self._producers.setdefault(put.producer, len(self._producers))
        if put.once and self._spent is None:
            self._spent = SpentIds()
        return slots, gone

    def _with_new(self, put: Put, slots: Rows) -> Slots:
        """Give slots to samples that have none."""
        first, count = len(self._ids), int(np.count_nonzero(slots < 0))
        if not count:
            return Slots(slots)
        ids, tags, order, new = put.ids, put.tags, put.order, np.arange(first, first + count)
        if count == len(slots):
            slots = new
        else:
            rows = np.flatnonzero(slots < 0)
            ids = [ids[row] for row in rows.tolist()]
            tags = None if tags is None else [tags[row] for row in rows.tolist()]
            order = None if order is None else order[rows]
            slots[rows] = new
        if first:
            self._slot_of.update(zip(ids, range(first, first + count)))
        else:
            self._slots_by_id = None
        self._ids.extend(ids)
        self.version += 1
        self._all_slots = None if first else Slots(slots, self.version)
        if order is not None:
            self._claims.number(first, order)
        self._claims.arrivals.count += count
        if self._claims.arrivals.unused:
            self._claims.arrivals.know_again(ids)
        if self._claims.groups is not None:
            self._claims.groups.add(ids, first, tags)
        return self._all_slots or Slots(slots)

    def clear(self, ids: Sequence[str], claim: str | None = None) -> list[Block]:
        """Remove samples, and return the blocks that no row is left of; ids that it does not have are ignored."""
        slot_of = self._slot_of
        known = [sample_id for sample_id in dict.fromkeys(ids) if sample_id in slot_of]
        slots = self._found(known)
        if claim is not None:
            self.claims.check_in_force(claim, slots, known)
        tables: list[dict[str, Any]] = [slot_of, self._tags]
        is_all = len(known) == len(slot_of)
        for table in tables:
            if is_all:
                table.clear()
            else:
                for sample_id in known:
                    table.pop(sample_id, None)
        if self._spent is not None:
            self._spent.add(known)
        self.version, self._all_slots = self.version + 1, None
        self._forget_found()
        self._claims.drop(known, slots, claim)
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
        if self._producers:
            self._producer_of = grown(self._producer_of, int(slots.max(initial=-1)) + 1, _UNKNOWN)[slots]
        self._claims.renumber(slots)
        self._refusals.renumber(slots)

    # Reading.

    def slots(self, ids: Sequence[str], names: Sequence[str]) -> Slots:
        """Return the slots of `ids`, all of which have the columns `names`."""
        slots = self.locate(ids)
        is_known = slots.version is not None or not (slots.at < 0).any()
        columns = [self._columns.get(name) for name in names]
        if not is_known or not all(column is not None and column.holds_all(slots) for column in columns):
            raise self.faults(ids, names).error(self.name)
        return slots

    def faults(self, ids: Sequence[str], names: Sequence[str]) -> Faults:
        """Return what keeps columns of rows from being read."""
        slots = self.locate(ids).at
        unknown = list(dict.fromkeys(str(ids[row]) for row in np.flatnonzero(slots < 0).tolist()))
        known, lacking = slots[slots >= 0], dict[str, list[str]]()
        for name in (name for name in names if name in self._columns):
            missing = known[~self._columns[name].held(known)].tolist()
            if missing:
                lacking[name] = list(dict.fromkeys(self._ids[slot] for slot in missing))
        return Faults(unknown, [name for name in names if name not in self._columns], lacking)

    def find(self, ids: Sequence[str], names: Sequence[str]) -> tuple[Slots, dict[str, Column[Block]]]:
        """Return the slots of samples and columns that have them all; raises what `slots` raises."""
        slots = self.slots(ids, names)
        return slots, {name: self._columns[name] for name in names}

    def shared_columns(self, ids: Sequence[str]) -> list[str]:
        slots = self.slots(ids, ())
        return [name for name, column in self._columns.items() if column.holds_all(slots)]

    def facts(self, ids: list[str], slots: Slots, *, with_tags: bool = True) -> RowFacts:
        """Return lengths, if a column of lengths or of tokens says those of all samples, and copies of the tags."""
        lengths: list[int] | None = None
        for name in (INPUT_LENGTHS, INPUT_IDS):
            if name in self._saying and name in self._columns and self._columns[name].holds_all(slots):
                lengths = self._lengths[slots.at].tolist()
                break
        tags = None
        if self._tags and with_tags:
            tags = [copied_tag(self._tags.get(sample_id, {}), row) for row, sample_id in enumerate(ids)]
        return RowFacts(ids, lengths, tags if tags and any(tags) else None)

    # Claiming.

    @property
    def claims(self) -> Claims:
        """The claims as they are now: on all samples, without those that have run out."""
        self._claims.catch_up(len(self._ids))
        return self._claims

    def claim(self, request: ClaimRequest) -> tuple[list[str], Slots, str | None] | None:
        """Take the next samples for a task; raises what `Claims.claim` raises."""
        claimed = self.claims.claim(request, self._ids, *self._wanted(request))
        if claimed is None:
            return None
        slots, claim = claimed
        return [self._ids[slot] for slot in slots.tolist()], Slots(slots), claim

    def claimed_ids(self, claim: str) -> list[str]:
        """Return the samples of a claim that are there; raises ClaimExpired."""
        return [self._ids[slot] for slot in self.claims.claimed(claim).tolist()]

    def mark_consumed(self, task: str, ids: Sequence[str]) -> None:
        """Let a task have had samples for good."""
        slots = self.locate(ids).at
        self.claims.mark(task, slots[slots >= 0])

    def ready(self, request: ClaimRequest) -> Ready:
        """Return what a claim would take; raises what `Claims.claim` raises."""
        return self.claims.ready(request, self._ids, *self._wanted(request))

    def waiting(self, request: ClaimRequest) -> WaitState:
        return self.claims.waiting(request, *self._wanted(request))

    def numbers(self, ids: Sequence[str]) -> Rows:
        """Return the numbers of samples in the order that their puts gave."""
        return self._claims.numbers(self.locate(ids).at)

    def _wanted(self, request: ClaimRequest) -> tuple[dict[str, Held], Passes | None]:
        """Return what tells which slots have the columns that a claim asks for, and which groups pass its rules."""
        held_by: dict[str, Held] = {
            name: self._columns.get(name, Column[Block]()).held for name in request.fields
        }
        if not request.where:
            return held_by, None
        judge = partial(self._judged, request.where)
        return held_by, lambda units: self._refusals.passing(request.where, units, judge)

    def _judged(self, rules: Sequence[TagRule], units: Rows) -> Mask:
        nothing: dict[str, Any] = {}
        groups = ([self._tags.get(self._ids[slot], nothing) for slot in unit] for unit in units.tolist())
        return np.array([all(rule.passes(tags) for rule in rules) for tags in groups], bool)

    def report(self, limit: int) -> PartitionReport:
        """Return what there is, with at most `limit` rows that are not consumed."""
        slots = len(self._ids)
        unconsumed = self.claims.unconsumed()
        names, all_slots = list(self._producers), np.array(list(self._slot_of.values()), np.int64)
        producers = grown(self._producer_of, slots, _UNKNOWN)
        counts = np.bincount(producers[all_slots] + 1, minlength=len(names) + 1)[1:].tolist()
        return PartitionReport(
            rows=len(self),
            bytes_by_column={name: column.nbytes for name, column in self._columns.items()},
            rows_by_column={
                name: int(np.count_nonzero(column.held(all_slots))) for name, column in self._columns.items()
            },
            rows_by_producer={name: count for name, count in zip(names, counts) if count},
            tasks=self._claims.tasks(),
            leases=self._claims.leases(),
            unconsumed_rows=len(unconsumed),
            unconsumed=[
                RowReport(
                    self._ids[slot],
                    names[producers[slot]] if producers[slot] >= 0 else None,
                    copied_tag(self._tags.get(self._ids[slot], {}), 0),
                )
                for slot in unconsumed[:limit].tolist()
            ],
            num_samples=None if self.registration is None else self.registration.num_samples,
            group_size=1 if self.registration is None else self.registration.group_size,
        )


def no_room(partition: str, new: int, most: int, held: int) -> CapacityExceeded:
    return CapacityExceeded(
        f"a put of {new} new samples does not fit into partition '{partition}': it was registered for "
        f"num_samples={most} and holds {held}. Clear samples that are done with, or register more"
    )


def had_before(partition: str, rows: int, known: Sequence[str]) -> SchemaError:
    return SchemaError(
        f"a put of {rows} samples with once=True has {shown(known)}, which partition '{partition}' has had before, "
        "beside new ones; put again what was put together, or give new samples ids of their own"
    )


def _two_lengths(name: str, sample: str, got: int, other: str, held: int, where: str) -> SchemaError:
    return SchemaError(
        f"column '{name}' has {got} tokens for sample '{sample}'; column '{other}' {where} says {held}. Write "
        "all columns of a sample that have one value per token with one length (kv_first_write and write_columns pack "
        f"padded rows); to change it, overwrite them, and '{INPUT_LENGTHS}', in one put"
    )

"""One partition of a store: its samples, their columns and tags, and its tasks.

Not thread-safe by itself: the store calls it under its lock.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Generic

import numpy as np
from numpy.typing import NDArray

from headrace.data_plane.checks import check_same_axes, copied_tags, shown
from headrace.data_plane.requests import ClaimRequest, Registration
from headrace.data_plane.schema import INPUT_IDS, INPUT_LENGTHS
from headrace.data_plane.store.chunks import Rows
from headrace.data_plane.store.claims import Held, PartitionClaims
from headrace.data_plane.store.column import Block, Column, Selection
from headrace.data_plane.store.lengths import PartitionLengths, Said
from headrace.errors import CapacityExceeded, SampleNotFound, SchemaError

_FEW_SLOTS = 1024


class Partition(Generic[Block]):
    """Samples by id. Each has a slot, a small number; slots keep the order of the first puts."""

    def __init__(self, name: str, registration: Registration | None = None) -> None:
        """Without a registration nobody claims, and there is no limit to its samples."""
        self.name, self.registration = name, registration
        self._ids: list[str] = []
        # None: slot i is that of the i-th id, and nobody has asked for a single one yet; see `_slot_of`.
        self._slots_by_id: dict[str, int] | None = None
        # All slots in order, where no sample has gone; one object until samples come or go, see `Column`.
        self._everyone: Rows | None = None
        self._tags: dict[str, dict[str, Any]] = {}
        self._columns: dict[str, Column[Block]] = {}
        self._lengths = PartitionLengths()
        # Columns whose last put said the lengths of its rows: writers know which do, and books may not.
        self._saying: set[str] = set()
        self._claims = PartitionClaims(name, registration)

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

    def sample_ids(self) -> list[str]:
        return list(self._ids if self._slots_by_id is None else self._slots_by_id)

    # Writing.

    def locate(self, ids: Sequence[str]) -> Rows | None:
        """Return each id's slot, -1 where there is none; None: the partition has no samples."""
        if not len(self):
            return None
        if len(ids) == len(self._ids) == len(self) and ids == self._ids:
            if self._everyone is None:
                self._everyone = np.arange(len(ids))
            return self._everyone
        slot_of = self._slot_of.get
        return np.array([slot_of(sample_id, -1) for sample_id in map(str, ids)], dtype=np.int64)

    def count_new(self, ids: Sequence[str], slots: Rows | None) -> int:
        """Return how many of `ids` it does not have; `slots` are what `locate` gave for them."""
        if slots is None:
            return len(ids)
        return 0 if slots is self._everyone else int(np.count_nonzero(slots < 0))

    def check_room(self, new: int) -> None:
        """Refuse more samples than were registered.

        Raises:
            CapacityExceeded: with all numbers.
        """
        limit = None if self.registration is None else self.registration.num_samples
        if limit is not None and len(self) + new > limit:
            raise CapacityExceeded(
                f"a put of {new} new samples does not fit into partition '{self.name}': it was registered for "
                f"num_samples={limit} and holds {len(self)}. Clear samples that are done with, or register more"
            )

    def check_put(
        self,
        ids: Sequence[str],
        slots: Rows | None,
        chunks: Mapping[str, Sequence[Block]],
        tags: Sequence[Mapping[str, Any]] | None,
        lengths: Said,
    ) -> None:
        """Refuse a put that would mix forms in a column, or lengths in a row, or whose tags are outside enums."""
        for name, parts in chunks.items():
            column = self._columns.get(name)
            form = column.form if column else None
            if column is None or form is None or form == parts[0].form:
                continue
            check_same_axes(name, parts[0].form.trailing, form.trailing, ids, self.name)
            if not self._overwrites(column, slots):
                raise SchemaError(
                    f"column '{name}' of partition '{self.name}' holds {form}; got {parts[0].form}. Put the same "
                    "kind, dtype and shape, overwrite all its rows at once, or use another column name"
                )
        self._lengths.check(ids, slots, lengths, lambda some: self._says_length(some, chunks))
        self._claims.check(ids, slots, tags)
        for tag, allowed in (self.registration.enums if self.registration else {}).items():
            for row, values in enumerate(tags or ()):
                if tag in values and values[tag] not in allowed:
                    raise SchemaError(
                        f"tag '{tag}' of sample '{ids[row]}' is {values[tag]!r}; partition '{self.name}' was "
                        f"registered with {', '.join(map(repr, allowed))}"
                    )

    @staticmethod
    def _overwrites(column: Column[Block], slots: Rows | None) -> bool:
        return slots is not None and column.holds_only(slots[slots >= 0])

    def put(
        self,
        ids: Sequence[str],
        slots: Rows | None,
        chunks: Mapping[str, Sequence[Block]],
        tags: Sequence[Mapping[str, Any]] | None,
        lengths: Said,
    ) -> Rows:
        """Write what `check_put` has let pass, and return the slots; `slots` are what `locate` gave."""
        slots = self._with_new(ids, slots, tags)
        everyone = self._everyone
        if len(ids):
            self._lengths.write(slots, lengths, everyone=everyone, size=len(self._ids))
            self._saying = (self._saying - chunks.keys()) | lengths.keys()
            for name, parts in chunks.items():
                self._columns.setdefault(name, Column()).write(slots, parts, everyone)
        for sample_id, values in zip(ids, tags or ()):
            self._tags.setdefault(sample_id, {}).update(values)
        return slots

    def _with_new(
        self, ids: Sequence[str], slots: Rows | None, tags: Sequence[Mapping[str, Any]] | None
    ) -> Rows:
        """Give slots to samples that have none."""
        if slots is None:
            return self._add(ids, tags)
        if self.count_new(ids, slots):
            new = np.flatnonzero(slots < 0)
            rows = new.tolist()
            slots[new] = self._add(
                [ids[row] for row in rows], None if tags is None else [tags[r] for r in rows]
            )
        return slots

    def _says_length(
        self, slots: Rows, besides: Mapping[str, object]
    ) -> tuple[str, NDArray[np.bool_]] | None:
        """Return a column, not among `besides`, that says the length of some of the slots, and of which."""
        for name, column in self._columns.items():
            if name in self._saying and name not in besides:
                held = column.held(slots)
                if held.any():
                    return name, held
        return None

    def _add(self, ids: Sequence[str], tags: Sequence[Mapping[str, Any]] | None) -> Rows:
        first, count = len(self._ids), len(ids)
        slots = np.arange(first, first + count)
        if first:
            self._slot_of.update(zip(ids, range(first, first + count)))
        else:
            self._slots_by_id = None
        self._ids.extend(ids)
        self._everyone = slots if not first else None
        self._claims.add(ids, tags)
        return slots

    def clear(self, ids: Sequence[str]) -> None:
        """Remove samples; ids that it does not have are ignored."""
        self._everyone = None
        self._clear_known([sample_id for sample_id in dict.fromkeys(ids) if sample_id in self._slot_of])
        if not len(self) or len(self._ids) > max(_FEW_SLOTS, 2 * len(self)):
            self._renumber()

    def _clear_known(self, ids: Sequence[str]) -> None:
        slots = np.array([self._slot_of.pop(sample_id) for sample_id in ids], dtype=np.int64)
        self._claims.drop(slots)
        for sample_id in ids:
            self._tags.pop(sample_id, None)
        for column in self._columns.values():
            column.drop(slots)
        self._columns = {name: column for name, column in self._columns.items() if column.form is not None}

    def _renumber(self) -> None:
        """Close the gaps that cleared samples have left."""
        slots = np.flatnonzero(self._claims.alive)
        for column in self._columns.values():
            column.renumber(slots)
        self._ids = [self._ids[slot] for slot in slots.tolist()]
        self._slots_by_id = None
        self._lengths.renumber(slots)
        self._claims.renumber(slots)

    # Reading.

    def slots(self, ids: Sequence[str], names: Sequence[str]) -> Rows:
        """Return the slots of `ids`, all of which have the columns `names`.

        Raises:
            SampleNotFound: unknown ids, and columns that known ones lack, all in one message.
        """
        slots = self.locate(ids)
        if slots is None:
            slots = np.full(len(ids), -1)
        faults = self._unknown(ids, slots)
        known = slots if not faults else slots[slots >= 0]
        for name in names:
            column = self._columns.get(name)
            if column is None:
                faults.append(f"no sample has column '{name}'")
            elif not column.holds_all(known):
                held = column.held(known)
                lacking = list(dict.fromkeys(self._ids[slot] for slot in known[~held].tolist()))
                faults.append(f"column '{name}' is not written for {shown(lacking)}")
        if faults:
            raise SampleNotFound(f"partition '{self.name}': {'; '.join(faults)}")
        return slots

    def _unknown(self, ids: Sequence[str], slots: Rows) -> list[str]:
        if not self.count_new(ids, slots):
            return []
        unknown = list(dict.fromkeys(str(ids[row]) for row in np.flatnonzero(slots < 0).tolist()))
        return [f"unknown sample ids {shown(unknown)}"]

    def select(self, ids: Sequence[str], names: Sequence[str]) -> dict[str, Selection[Block]]:
        """Return how to read columns of samples; raises what `slots` raises."""
        slots = self.slots(ids, names)
        return {name: self._columns[name].select(slots) for name in names}

    def shared_columns(self, ids: list[str]) -> list[str]:
        """Return the columns that all of `ids` have."""
        slots = self.slots(ids, ())
        return [name for name, column in self._columns.items() if column.holds_all(slots)]

    def tags_of(self, ids: Sequence[str]) -> list[dict[str, Any]] | None:
        """Return copies of the samples' tags; None if none has any."""
        if not self._tags:
            return None
        tags = copied_tags([self._tags.get(sample_id, {}) for sample_id in ids])
        return tags if any(tags) else None

    def lengths_of(self, slots: Rows) -> Rows | None:
        """Return the samples' lengths if a column says them that all have: of lengths, or of tokens."""
        for name in (INPUT_LENGTHS, INPUT_IDS):
            column = self._columns.get(name)
            if column and name in self._saying and column.holds_all(slots):
                return self._lengths.of(slots)
        return None

    def ids_of(self, slots: Rows) -> list[str]:
        return [self._ids[slot] for slot in slots.tolist()]

    # Claiming.

    def claim(self, request: ClaimRequest) -> Rows | None:
        """Take the next samples for a task; raises what `PartitionClaims.claim` raises."""
        return self._claims.claim(request, self._ids, self._held_by(request.fields))

    def describe_wait(self, request: ClaimRequest) -> str:
        return self._claims.describe_wait(request.task, self._held_by(request.fields))

    def is_consumed(self, tasks: Sequence[str]) -> bool:
        return self._claims.is_consumed(tasks)

    def _held_by(self, names: Sequence[str]) -> dict[str, Held]:
        return {name: self._columns.get(name, Column[Block]()).held for name in names}

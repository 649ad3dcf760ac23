"""One partition of the local store: its samples, their columns and tags, and what each task has claimed.

Not thread-safe by itself: the store calls it under its lock.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.data_plane.adapters.local_chunks import Rows
from headrace.data_plane.adapters.local_column import Block, Column, Selection
from headrace.data_plane.adapters.partition_lengths import PartitionLengths, Said, says_length
from headrace.data_plane.checks import check_same_axes, shown
from headrace.data_plane.schema import INPUT_IDS, INPUT_LENGTHS
from headrace.errors import DataPlaneError, SampleNotFound, SchemaError

Kind = TypeVar("Kind", bound=np.generic)

_FEW_SLOTS = 1024


class Partition(Generic[Block]):
    """Samples by id. Each has a slot, a small number; slots keep the order of the first puts."""

    def __init__(
        self,
        name: str,
        *,
        consumer_tasks: Sequence[str] = (),
        group_size: int | None = None,
        enums: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.name = name
        self._group_size = group_size or 1
        self._enums = {tag: tuple(values) for tag, values in (enums or {}).items()}
        self._ids: list[str] = []
        # None: slot i is that of the i-th id, and nobody has asked for a single one yet; see `_slot_of`.
        self._slots_by_id: dict[str, int] | None = None
        # All slots in order, where no sample has gone; one object until samples come or go, see `Column`.
        self._everyone: Rows | None = None
        self._tags: dict[str, dict[str, Any]] = {}
        self._columns: dict[str, Column[Block]] = {}
        self._lengths = PartitionLengths()
        self._alive: NDArray[np.bool_] = np.empty(0, bool)
        # A sample's place in the order of all first puts, cleared ones included: groups are made of it.
        self._place: Rows = np.empty(0, np.int64)
        self._next_place = 0
        self._claimed: dict[str, NDArray[np.bool_]] = {task: np.empty(0, bool) for task in consumer_tasks}

    def __len__(self) -> int:
        return len(self._ids if self._slots_by_id is None else self._slots_by_id)

    @property
    def _slot_of(self) -> dict[str, int]:
        if self._slots_by_id is None:
            self._slots_by_id = {sample_id: slot for slot, sample_id in enumerate(self._ids)}
        return self._slots_by_id

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(column.nbytes for column in self._columns.values())

    def sample_ids(self) -> list[str]:
        """Return the ids in the order of their first puts."""
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

    def check_size(self, num_samples: int) -> None:
        """Refuse a number of rows that does not make whole groups: the rest would never be handed out."""
        if num_samples % self._group_size:
            raise DataPlaneError(
                f"partition '{self.name}' expects {num_samples} samples, which are no whole groups of "
                f"grpo_group_size={self._group_size}"
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
        for tag, allowed in self._enums.items():
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
        slots = self._with_new(ids, slots)
        everyone = self._everyone
        if len(ids):
            self._lengths.write(slots, lengths, everyone=everyone, size=len(self._ids))
        for name, parts in chunks.items():
            if len(ids):
                self._columns.setdefault(name, Column()).write(slots, parts, everyone)
        for sample_id, values in zip(ids, tags or ()):
            self._tags.setdefault(sample_id, {}).update(values)
        return slots

    def _with_new(self, ids: Sequence[str], slots: Rows | None) -> Rows:
        """Give slots to samples that have none."""
        if slots is None:
            return self._add(ids)
        if self.count_new(ids, slots):
            new = np.flatnonzero(slots < 0)
            slots[new] = self._add([ids[row] for row in new.tolist()])
        return slots

    def _says_length(
        self, slots: Rows, besides: Mapping[str, object]
    ) -> tuple[str, NDArray[np.bool_]] | None:
        """Return a column, not among `besides`, that says the length of some of the slots, and of which."""
        for name, column in self._columns.items():
            form = column.form
            if name not in besides and form and says_length(name, form.kind, form.ragged_dim):
                held = column.held(slots)
                if held.any():
                    return name, held
        return None

    def _add(self, ids: Sequence[str]) -> Rows:
        first, count = len(self._ids), len(ids)
        slots = np.arange(first, first + count)
        if first:
            self._slot_of.update(zip(ids, range(first, first + count)))
        else:
            self._slots_by_id = None
        self._ids.extend(ids)
        self._everyone = slots if not first else None
        if len(self._alive) < len(self._ids):
            size = max(len(self._ids), 2 * len(self._alive))
            self._alive, self._place = _grown(self._alive, size), _grown(self._place, size)
            self._claimed = {task: _grown(claimed, size) for task, claimed in self._claimed.items()}
        self._alive[first : first + count] = True
        self._place[first : first + count] = slots + (self._next_place - first)
        self._next_place += count
        return slots

    def clear(self, ids: Sequence[str] | None) -> None:
        """Remove samples; ids that it does not have are ignored."""
        self._everyone = None
        if ids is None:
            self._slots_by_id, self._tags, self._columns = {}, {}, {}
            self._alive[:] = False
        else:
            self._clear_some([sample_id for sample_id in dict.fromkeys(ids) if sample_id in self._slot_of])
        if not len(self) or len(self._ids) > max(_FEW_SLOTS, 2 * len(self)):
            self._renumber()

    def _clear_some(self, ids: Sequence[str]) -> None:
        slots = np.array([self._slot_of.pop(sample_id) for sample_id in ids], dtype=np.int64)
        self._alive[slots] = False
        for sample_id in ids:
            self._tags.pop(sample_id, None)
        for column in self._columns.values():
            column.drop(slots)
        self._columns = {name: column for name, column in self._columns.items() if column.form is not None}

    def _renumber(self) -> None:
        """Close the gaps that cleared samples have left."""
        slots = np.flatnonzero(self._alive)
        for column in self._columns.values():
            column.renumber(slots)
        self._ids = [self._ids[slot] for slot in slots.tolist()]
        self._slots_by_id = None
        self._alive, self._place = self._alive[slots], self._place[slots]
        self._lengths.renumber(slots)
        self._claimed = {task: claimed[slots] for task, claimed in self._claimed.items()}

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
        tags = [dict(self._tags.get(sample_id, ())) for sample_id in ids]
        return tags if any(tags) else None

    def lengths_of(self, slots: Rows) -> Rows | None:
        """Return the samples' lengths if a column says them that all have: of lengths, or of tokens."""
        for name in (INPUT_LENGTHS, INPUT_IDS):
            column = self._columns.get(name)
            form = column.form if column else None
            if column and form and says_length(name, form.kind, form.ragged_dim) and column.holds_all(slots):
                return self._lengths.of(slots)
        return None

    def ids_of(self, slots: Rows) -> list[str]:
        """Return the samples' ids."""
        return [self._ids[slot] for slot in slots.tolist()]

    # Claiming.

    def claim(self, task: str, required: Sequence[str], count: int) -> Rows | None:
        """Take the next `count` samples that are ready for `task`; None if there are fewer.

        Raises:
            DataPlaneError: an unknown task, or a count that is not a multiple of the group size.
        """
        claimed = self._claims(task)
        if count < 1 or count % self._group_size:
            raise DataPlaneError(
                f"batch_size={count} for partition '{self.name}'; expected a positive multiple of "
                f"grpo_group_size={self._group_size}"
            )
        slots = self._ready(claimed, required)[:count]
        if len(slots) < count:
            return None
        claimed[slots] = True
        return slots

    def _ready(self, claimed: NDArray[np.bool_], required: Sequence[str]) -> Rows:
        slots = np.flatnonzero(self._alive & ~claimed)
        for name in required:
            column = self._columns.get(name)
            slots = slots[column.held(slots)] if column else slots[:0]
        if self._group_size == 1 or not len(slots):
            return slots
        groups = self._place[slots] // self._group_size
        _, group_of, sizes = np.unique(groups, return_inverse=True, return_counts=True)
        ready: Rows = slots[sizes[group_of] == self._group_size]
        return ready

    def _claims(self, task: str) -> NDArray[np.bool_]:
        if task not in self._claimed:
            known = shown(list(self._claimed)) or "none"
            raise DataPlaneError(
                f"partition '{self.name}' has no task '{task}'; registered consumer_tasks: {known}"
            )
        return self._claimed[task]

    def describe_wait(self, task: str, required: Sequence[str]) -> str:
        """Return what a claim is waiting for: ready samples, and how far each column has come."""
        claimed = self._claims(task)
        slots = np.flatnonzero(self._alive & ~claimed)
        parts = [f"{len(self._ready(claimed, required))} are ready of {len(slots)} not claimed yet"]
        for name in required:
            column = self._columns.get(name)
            count = int(np.count_nonzero(column.held(slots))) if column else 0
            if count < len(slots) or not len(slots):
                parts.append(f"column '{name}' is written for {count} of them")
        if self._group_size > 1:
            parts.append(f"samples are claimed in whole groups of {self._group_size}")
        return "; ".join(parts)

    def is_consumed(self, tasks: Sequence[str]) -> bool:
        """Return whether each task has claimed every sample there is, and there is one."""
        done = [bool(self._claims(task)[self._alive].all()) for task in tasks]
        return len(self) > 0 and all(done)


def _grown(array: NDArray[Kind], size: int) -> NDArray[Kind]:
    """Return an array of `size`, zero after what was there."""
    grown = np.zeros(size, array.dtype)
    grown[: len(array)] = array
    return grown

"""The groups of a partition: samples of one uid, which claims hand out together or not at all."""

from array import array
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from headrace.data_plane.claim_terms import is_one_of
from headrace.data_plane.store.columns import Rows
from headrace.errors import DataPlaneError, SchemaError
from headrace.utils.arguments import shown

MARK = "_g"


class _Group(NamedTuple):
    """The samples of a uid that are there, by slot, in the order of their first puts."""

    uid: Hashable
    slots: list[int]


_GONE = _Group(None, [])


class Groups:
    """Groups of `size` samples, and the order in which they became whole."""

    def __init__(self, partition: str, size: int, tag: str | None) -> None:
        self.size = size
        self._partition, self._tag = partition, tag
        self._by_uid: dict[Hashable, _Group] = {}
        self._of: list[_Group | None] = []
        self._loose = 0
        # Slots, `size` for each group, in the order in which groups became whole; a sample that goes leaves its slot.
        self._order = array("q")
        # Uids of groups that have lost a sample, and are not whole.
        self._broken: set[Hashable] = set()
        self._broken_slots: Rows | None = None
        self.is_mended = False
        """Whether a group that was broken ever became whole again, so that a task may have had a part of it."""

    @property
    def count(self) -> int:
        """How many groups have become whole, those of which samples are gone included."""
        return len(self._order) // self.size

    def at(self, places: Rows) -> Rows:
        """Return the slots of groups by their places in the order in which they became whole."""
        if not len(places):
            return np.empty((0, self.size), np.int64)
        # The view is gone when this returns; the array could not grow beside it.
        return np.frombuffer(self._order, np.int64).reshape(-1, self.size).take(places, axis=0)

    @property
    def broken_slots(self) -> Rows:
        """The slots of what is left of broken groups."""
        if self._broken_slots is None:
            slots = [slot for uid in self._broken for slot in self._by_uid[uid].slots]
            self._broken_slots = np.array(slots, np.int64)
        return self._broken_slots

    def check(self, ids: Sequence[str], slots: Rows, tags: Sequence[Mapping[str, Any]] | None) -> None:
        """Refuse a put after which a group has too many samples, or that does not say a new sample's group."""
        if self._tag is not None and tags is not None:
            self._check_moves(self._tag, ids, slots.tolist(), tags)
        new = np.flatnonzero(slots < 0).tolist()
        ids, tags = [ids[row] for row in new], None if tags is None else [tags[row] for row in new]
        uids = self._uids(ids, tags)
        for uid, count in Counter(uids).items():
            held = len(self._by_uid[uid].slots) if uid in self._by_uid else 0
            if uid is not None and held + count > self.size:
                raise SchemaError(
                    f"group {uid!r} of partition '{self._partition}' has {held} samples and gets {count} more; "
                    f"expected grpo_group_size={self.size} in all. Give the new ones another uid, or clear the others "
                    "first"
                )

    def _check_moves(
        self, tag: str, ids: Sequence[str], slots: Sequence[int], tags: Sequence[Mapping[str, Any]]
    ) -> None:
        for sample_id, slot, values in zip(ids, slots, tags):
            group = self._of[slot] if slot >= 0 else None
            if group is not None and tag in values and not is_one_of(values[tag], (group.uid,)):
                raise SchemaError(
                    f"tag '{tag}' of sample '{sample_id}' is {values[tag]!r}; its first put said {group.uid!r}, and a "
                    "sample stays in its group (group_tag)"
                )

    def _uids(
        self, ids: Sequence[str], tags: Sequence[Mapping[str, Any]] | None
    ) -> Sequence[Hashable | None]:
        """Return the uids of new samples, None where an id has none."""
        if self._tag is None:
            return [sample_id.rpartition(MARK)[0] or None for sample_id in map(str, ids)]
        return [self._tagged(self._tag, row, values) for row, values in zip(ids, tags or [{}] * len(ids))]

    def _tagged(self, tag: str, sample_id: str, values: Mapping[str, Any]) -> Hashable:
        uid: Any = values.get(tag)
        if not isinstance(uid, str | int):
            raise SchemaError(
                f"tag '{tag}' of sample '{sample_id}' is {uid!r}; expected the uid of its group, a text or a whole "
                f"number: partition '{self._partition}' was registered with group_tag='{tag}'"
            )
        return uid

    def add(self, ids: Sequence[str], first: int, tags: Sequence[Mapping[str, Any]] | None) -> None:
        """Take in samples that `check` has let pass; they have the slots from `first` on."""
        for uid, run in groupby(self._uids(ids, tags)):
            slots = range(first, first := first + len(list(run)))
            if uid is None:
                self._loose += len(slots)
                self._of.extend([None] * len(slots))
                continue
            group = self._by_uid.get(uid)
            if group is None:
                group = self._by_uid[uid] = _Group(uid, [])
            self._of.extend([group] * len(slots))
            group.slots.extend(slots)
            if len(group.slots) == self.size:
                self._order.extend(group.slots)
                self.is_mended |= uid in self._broken
                self._broken.discard(uid)
        self._broken_slots = None

    def drop(self, slots: Rows) -> None:
        """Forget samples."""
        for slot in slots.tolist():
            group, self._of[slot] = self._of[slot], _GONE
            if group is None:
                self._loose -= 1
                continue
            group.slots.remove(slot)
            self._broken.add(group.uid)
            if not group.slots:
                del self._by_uid[group.uid]
                self._broken.remove(group.uid)
        self._broken_slots = None

    def renumber(self, slots: Rows) -> None:
        """Let what is slot `slots[i]` now be slot i; all other slots are free."""
        place = np.full(len(self._of), -1)
        place[slots] = np.arange(len(slots))
        for group in self._by_uid.values():
            group.slots[:] = place[group.slots].tolist()
        self._broken_slots = None
        self._of = [self._of[slot] for slot in slots.tolist()]
        units = place[np.array(self._order)].reshape(-1, self.size)
        self._order = array("q", units[(units >= 0).all(axis=1)].tobytes())

    def check_claim(self, count: int, ids: Sequence[str]) -> None:
        """Refuse a claim of no whole groups, or where samples have none; `ids` are those of all slots."""
        if count % self.size:
            raise DataPlaneError(
                f"batch_size={count} for partition '{self._partition}'; expected a multiple of "
                f"grpo_group_size={self.size}"
            )
        if self._loose:
            loose = [sample_id for sample_id, group in zip(ids, self._of) if group is None]
            raise DataPlaneError(
                f"partition '{self._partition}' hands out groups (grpo_group_size={self.size}), and {shown(loose)} "
                "name none; name samples '<uid>_g<index>', or register the partition with group_tag, the tag that "
                "holds their uid"
            )

    def broken(self) -> tuple[int, int, str, int]:
        """Return the size of a group, how many groups are not whole, and of one of these its uid and its samples."""
        partial = [group for group in self._by_uid.values() if len(group.slots) < self.size]
        if not partial:
            return self.size, 0, "", 0
        return self.size, len(partial), repr(partial[0].uid), len(partial[0].slots)

"""What the store's users program against: KVBatchMeta and DataPlaneClient.

A KVBatchMeta names rows; it holds no tensor. A DataPlaneClient holds rows by (partition, sample id) and column.
Two ways to reach them: by key (`put_samples`, `get_samples`, `clear_samples`), or by task (`claim_meta` hands
each task every ready row once, for good or for the time of a lease, and `get_data` reads what was claimed).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from math import lcm
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import torch
from tensordict import TensorDict

from headrace.config import DataPlaneConfig
from headrace.data_plane.claim_terms import PartitionReport, TagRule
from headrace.data_plane.row_lists import PACKED_IDS, join, pick, union
from headrace.data_plane.schema import (
    CLAIM,
    ELEM_COUNTS_PER_GB,
    GLOBAL_FORWARD_PAD_SEQLEN,
    MICRO_BATCH_INDICES,
    MICRO_BATCH_LENGTHS,
    PAD_TO_MULTIPLE,
)
from headrace.errors import DataPlaneError, SchemaError
from headrace.utils.arguments import names_list, texts, whole_number, whole_numbers
from headrace.utils.rounding import round_up

__all__ = ["DataPlaneClient", "DataPlaneConfig", "KVBatchMeta", "PartitionReport", "TagRule"]

_PLAN_KEYS = (MICRO_BATCH_INDICES, MICRO_BATCH_LENGTHS, ELEM_COUNTS_PER_GB)


@dataclass
class KVBatchMeta:
    """Names N rows of one partition: ids, lengths and tags, always aligned; picklable; no tensor inside.

    `fields` are the columns known to be there (None: unknown). `sequence_lengths` are tokens per row.
    `extra_info` carries batch-wide facts: pad target, microbatch plan, rollout metadata. `tags` are small
    per-row values to filter on; no two metas share a tag dict. An id may repeat (a read with replacement);
    every put refuses that.

    Raises:
        SchemaError: lengths or tags that do not match the ids one to one, or a negative length.
    """

    partition_id: str
    task_name: str
    sample_ids: list[str]
    fields: list[str] | None = None
    sequence_lengths: list[int] | None = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    tags: list[dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        self.sample_ids = texts("sample_ids", self.sample_ids)
        self.fields = None if self.fields is None else list(names_list("fields", self.fields))
        self.extra_info = dict(self.extra_info)
        if self.sequence_lengths is not None:
            self.sequence_lengths = whole_numbers(
                "sequence length", "a whole number of tokens", self.sequence_lengths
            )
            self._check_aligned("sequence_lengths", len(self.sequence_lengths))
            if min(self.sequence_lengths, default=0) < 0:
                row = next(i for i, length in enumerate(self.sequence_lengths) if length < 0)
                raise SchemaError(
                    f"sample '{self.sample_ids[row]}' has sequence length {self.sequence_lengths[row]}; "
                    "expected 0 or more"
                )
        if self.tags is not None:
            self.tags = [dict(t) for t in names_list("tags", self.tags)]
            self._check_aligned("tags", len(self.tags))

    def _check_aligned(self, name: str, got: int) -> None:
        if got != len(self.sample_ids):
            raise SchemaError(
                f"{name} has {got} entries for {len(self.sample_ids)} sample_ids; give one per sample"
            )

    @property
    def size(self) -> int:
        return len(self.sample_ids)

    def __len__(self) -> int:
        return self.size

    def subset(self, indices: Sequence[int] | torch.Tensor) -> "KVBatchMeta":
        """Return the rows at `indices`, in that order; repeats are allowed, a microbatch plan is dropped.

        Raises:
            IndexError: an index outside [-N, N).
            SchemaError: a boolean mask or a fraction in place of an index.
        """
        rows, part = self._rows_at(indices), self.bare()
        part.sample_ids = pick(self.sample_ids, rows)
        part.sequence_lengths = None if self.sequence_lengths is None else pick(self.sequence_lengths, rows)
        part.tags = None if self.tags is None else [dict(self.tags[i]) for i in rows]
        return part

    def bare(self) -> "KVBatchMeta":
        """Return a meta to which ids, lengths and tags are yet to be given; a microbatch plan is dropped."""
        part = copy(self)
        part.__dict__.pop(PACKED_IDS, None)
        part.fields = None if self.fields is None else list(self.fields)
        part.extra_info = {k: v for k, v in self.extra_info.items() if k not in _PLAN_KEYS}
        return part

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return the ids of a part of many rows (`preshard`) that nobody has read yet."""
            packed = self.__dict__.get(PACKED_IDS) if name == "sample_ids" else None
            if packed is not None:
                # Several threads may come here at once: all get the list of the first.
                self.__dict__.setdefault(name, msgspec.msgpack.decode(packed, type=list[str]))
                self.__dict__.pop(PACKED_IDS, None)
            if name not in self.__dict__:
                raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
            return self.__dict__[name]

    def slice(self, start: int, stop: int) -> "KVBatchMeta":
        """Return rows start to stop - 1, with the bounds of a Python slice."""
        return self.subset(range(*slice(start, stop).indices(self.size)))

    def drop(self, indices: Sequence[int] | torch.Tensor) -> "KVBatchMeta | None":
        """Return the meta without the rows at `indices`, or None if nothing is left; raises what `subset` raises."""
        gone = {i % self.size for i in self._rows_at(indices)}
        kept = [i for i in range(self.size) if i not in gone]
        return self.subset(kept) if kept else None

    def _rows_at(self, indices: Sequence[int] | torch.Tensor) -> list[int]:
        """Return indices of rows as numbers in [-N, N)."""
        rows = _row_numbers(indices)
        if rows and not -self.size <= min(rows) <= max(rows) < self.size:
            outside = next(i for i in rows if not -self.size <= i < self.size)
            raise IndexError(f"row {outside} of a meta with {self.size} rows")
        return rows

    def with_fields(self, names: Sequence[str]) -> "KVBatchMeta":
        """Return the same rows with `names` as their known columns; a microbatch plan stays."""
        meta = self.bare()
        meta.sample_ids = list(self.sample_ids)
        meta.sequence_lengths = None if self.sequence_lengths is None else list(self.sequence_lengths)
        meta.tags = None if self.tags is None else list(map(dict, self.tags))
        meta.fields, meta.extra_info = list(names_list("fields", names)), dict(self.extra_info)
        return meta

    def add_fields(self, names: Sequence[str]) -> None:
        """Add columns to the known ones, in place; if they are not known, they stay so."""
        if self.fields is not None:
            self.fields = list(dict.fromkeys([*self.fields, *names_list("fields", names)]))

    def stamp_tags(self, values: Mapping[str, Sequence[Any]]) -> "KVBatchMeta":
        """Set one tag value per row for every name, in place, and return self.

        Example: `meta.stamp_tags({"reward": [0.0, 1.0]})` on a meta of two rows.
        """
        for name, column in values.items():
            self._check_aligned(f"tag '{name}'", len(names_list(f"tag '{name}'", column)))
        if self.tags is None:
            self.tags = [{} for _ in range(self.size)]
        for name, column in values.items():
            for tag, value in zip(self.tags, column):
                tag[name] = value.item() if isinstance(value, torch.Tensor | np.generic) else value
        return self

    def concat(self, *others: "KVBatchMeta") -> "KVBatchMeta":
        """Return the rows of all parts, in order.

        Known columns are merged; lengths and tags are None if any part lacks them; the first part's
        `extra_info` wins. A microbatch plan is dropped, and so is a claim that not all parts are of. What rows are
        padded to suits every part: its multiple is the smallest that all parts' multiples divide, and a pad target is
        such a multiple that covers the longest row and the targets of all parts.

        Raises:
            SchemaError: parts of different partitions.
        """
        parts = (self, *others)
        for part in others:
            if part.partition_id != self.partition_id:
                raise SchemaError(
                    f"cannot concat partition '{part.partition_id}' to '{self.partition_id}'; "
                    "move the rows to one partition first"
                )
        extra: dict[str, Any] = {}
        for part in reversed(parts):
            extra.update({k: v for k, v in part.extra_info.items() if k not in _PLAN_KEYS})
        if any(part.extra_info.get(CLAIM) != self.extra_info.get(CLAIM) for part in others):
            extra.pop(CLAIM, None)
        meta = replace(
            self,
            sample_ids=[i for p in parts for i in p.sample_ids],
            fields=union([p.fields for p in parts]),
            sequence_lengths=join([p.sequence_lengths for p in parts]),
            tags=join([p.tags for p in parts]),
            extra_info=extra,
        )
        if PAD_TO_MULTIPLE in extra:
            meta.extra_info[PAD_TO_MULTIPLE] = _common_multiple(parts)
        if GLOBAL_FORWARD_PAD_SEQLEN in extra:
            meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = _pad_target(parts)
        return meta

    def stamp_pad_target(self, multiple: int) -> None:
        """Set the batch-wide pad target, in place: it covers the longest row, and the target that there is.

        It is a multiple of `multiple` and of `extra_info["pad_to_multiple"]`, which becomes so, too.
        """
        own = whole_number(PAD_TO_MULTIPLE, multiple, 1)
        self.extra_info[PAD_TO_MULTIPLE] = lcm(own, _common_multiple([self]))
        self.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = _pad_target([self])


def _row_numbers(indices: Sequence[int] | torch.Tensor) -> list[int]:
    rows = indices.tolist() if isinstance(indices, torch.Tensor | np.ndarray) else list(indices)
    if any(issubclass(kind, bool | np.bool_) for kind in set(map(type, rows))):
        raise SchemaError("got a boolean mask; expected row indices, as mask.nonzero().flatten() gives them")
    return whole_numbers("row index", "a whole number", rows)


def _common_multiple(parts: Sequence[KVBatchMeta]) -> int:
    return lcm(*(whole_number(PAD_TO_MULTIPLE, p.extra_info.get(PAD_TO_MULTIPLE, 1), 1) for p in parts))


def _pad_target(parts: Sequence[KVBatchMeta]) -> int:
    targets = [
        whole_number(GLOBAL_FORWARD_PAD_SEQLEN, p.extra_info.get(GLOBAL_FORWARD_PAD_SEQLEN, 0), 0)
        for p in parts
    ]
    longest = [max(p.sequence_lengths or [0]) for p in parts]
    return round_up(max(*targets, *longest), _common_multiple(parts))


class DataPlaneClient(ABC):
    """One process's handle on the store. All methods may be called from several threads."""

    @abstractmethod
    def register_partition(
        self,
        partition_id: str,
        fields: Sequence[str],
        num_samples: int,
        consumer_tasks: Sequence[str],
        grpo_group_size: int | None = None,
        enums: Mapping[str, Sequence[str]] | None = None,
        *,
        group_tag: str | None = None,
    ) -> None:
        """Open a partition, or empty and re-open one of the same id.

        Args:
            fields: Columns that consumers will ask for; producers may write others too.
            num_samples: Rows expected, and the most it holds at a time; checked against the capacity at once.
            consumer_tasks: Tasks that claim rows, each with a cursor of its own.
            grpo_group_size: Rows of a group, which claims hand out together or not at all. A group is the rows of
                one uid, whichever puts they came with: a sample's uid is its id up to the last `_g`, as of `a_g0`.
            enums: Allowed values per tag name.
            group_tag: The tag that holds a sample's uid, in place of its id; its first put has to bring it.

        Raises:
            DataPlaneError: sizes that are no numbers of rows, or samples that make no whole groups.
            CapacityExceeded: more samples than the store holds.
            SchemaError: a text in place of a list.
        """

    @abstractmethod
    def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: Sequence[str],
        batch_size: int,
        dp_rank: int | None = None,
        blocking: bool = True,
        timeout_s: float = 60.0,
        *,
        allow_partial: bool = False,
        lease_s: float | None = None,
        holder: str | None = None,
        where: Sequence[TagRule] = (),
        order: Literal["oldest", "freshest"] = "oldest",
    ) -> KVBatchMeta | None:
        """Take the next `batch_size` rows that have all `required_fields` and that the task has not had.

        Rows come in the order of their first puts; where they make groups, one group after the other, in the order
        in which they became whole. A group of which a row is missing or claimed is not handed out.
        With `dp_rank`, repeating the call for another rank takes further rows: no two ranks share one.
        Not blocking: None if too few rows are ready.

        With `allow_partial`, the last rows of a partition are handed out also if they are fewer: when all
        `num_samples` rows have come, and all that the task has not had are ready. None, at once: it has had them all.
        So a loop over claims ends with the partition. Rows that were cleared have come; one that no task had had, and
        that is put again, counts once. What is left of a group of which a row was cleared is not waited for. What
        does not pass `where` is left out, and rows that others
        have by a lease are waited for once there are no others.

        With `lease_s` the rows are the holder's for a time. `meta.extra_info["claim"]` is the claim. If it is neither
        renewed, finished nor released before that time is over, the task may claim the rows again, in their old place,
        and what the old holder writes or clears under the claim is refused. Without it, rows are taken for good.

        Args:
            task_name: One of the partition's `consumer_tasks`.
            batch_size: Rows to take, in whole groups.
            dp_rank: Who claims; told for the caller's own use.
            timeout_s: How long to wait; `math.inf` is for ever, and 0 or less not at all.
            lease_s: Seconds, by the clock of the store.
            holder: Who claims, for reports.
            where: Rules that all have to pass, for a group as a whole.
            order: `freshest`: the newest first; the rows of a group stay in their order.

        Raises:
            ClaimTimeout: blocking, and too few rows became ready within `timeout_s`.
            DataPlaneError: unknown partition or task, a `batch_size` that makes no whole groups or that, without
                `allow_partial`, is more than the partition ever holds; a time that is no number, another order, or
                samples whose ids name no group where groups are asked for.
            SchemaError: a text in place of a list, or a rule that compares a tag which is no number.
        """

    def renew_claim(self, meta: KVBatchMeta, lease_s: float) -> None:
        """Let the claim of `meta`, all of it, end that long from now.

        Raises:
            ClaimExpired: it is no longer in force.
        """
        raise self._cannot("lease claims")

    def release_claim(self, meta: KVBatchMeta) -> None:
        """Give all rows of the claim of `meta` back to its task; nothing happens if it is no longer in force."""
        raise self._cannot("lease claims")

    def finish_claim(self, meta: KVBatchMeta) -> None:
        """Let all rows of the claim of `meta` be taken for good; clearing them all under the claim does so, too.

        Raises:
            ClaimExpired: it is no longer in force.
        """
        raise self._cannot("lease claims")

    # For a journal: what is claimed, and what was claimed before a restart.

    def claimed_ids(self, meta: KVBatchMeta) -> list[str]:
        """Return the rows of the claim of `meta`, all that are not cleared.

        Raises:
            ClaimExpired: it is no longer in force.
        """
        raise self._cannot("tell the rows of a claim")

    def mark_consumed(self, partition_id: str, task_name: str, sample_ids: Sequence[str]) -> None:
        """Let a task have had rows for good, whole groups or not; what is not there is ignored.

        Raises:
            DataPlaneError: unknown partition or task.
        """
        raise self._cannot("mark rows as consumed")

    @abstractmethod
    def get_data(self, meta: KVBatchMeta, select_fields: Sequence[str] | None = None) -> TensorDict:
        """Read the rows of `meta`: `select_fields`, or else `meta.fields`, or else every column they share."""

    @abstractmethod
    def check_consumption_status(self, partition_id: str, task_names: Sequence[str]) -> bool:
        """Return whether all rows that the partition was registered for have come, and each task has claimed them.

        A leased row does not count before its claim is finished. Rows that were cleared by their ids have come, and
        are waited for no more, nor is what is left of their groups; a partition that nothing was put into is not
        consumed.
        """

    @abstractmethod
    def put_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
        *,
        claim: str | None = None,
        producer: str | None = None,
        once: bool = False,
    ) -> KVBatchMeta:
        """Write columns and tags of rows, all or nothing; rows that exist get the new ones added.

        The meta has the rows' lengths and tags, as all puts together have left them.

        A column or a tag written twice keeps the last value. `fields` is what `codec.pack_jagged_fields` returns: dense
        (N, ...) tensors, jagged nested tensors, and object arrays.

        Routes have the layers and experts per token of those that the partition holds. Their ids are not looked at,
        which takes many times as long as the put: `kv_first_write` and `write_columns` do.

        Args:
            claim: The claim that all rows are of; `write_columns` takes it from the meta.
            producer: Who writes, for reports; the last who said so counts.
            once: The put of a producer that tries again when it got no answer. Rows that the partition has, or had
                since the first such put, are written no second time, also when they are trained on and cleared; the
                meta then has no rows. Whatever it had is forgotten when the partition is cleared or registered anew.

        Raises:
            ClaimExpired: `claim` is no longer in force.
            SchemaError: repeated ids, a wrong row count, a dtype that the column does not take, other layers or
                experts per token, a value that cannot be encoded; `once`, and only some of the rows are new.
            CapacityExceeded: the rows do not fit.
            DataPlaneError: rows that are not of the `claim`.
        """

    def write_samples(
        self, sample_ids: Sequence[str], partition_id: str, fields: TensorDict, *, claim: str | None = None
    ) -> None:
        """Do what `put_samples` does, for a caller that wants no meta of the rows; a store may save making one."""
        # What is not given is not passed on, so that a client of an older signature will do.
        given: dict[str, Any] = {} if claim is None else {CLAIM: claim}
        self.put_samples(sample_ids, partition_id, fields=fields, **given)

    @abstractmethod
    def get_samples(
        self, sample_ids: Sequence[str], partition_id: str, select_fields: Sequence[str]
    ) -> TensorDict:
        """Read columns of rows, in the order asked, repeated ids included.

        Raises:
            SampleNotFound: ids that are unknown, or columns that a row does not have, all named at once.
        """

    @abstractmethod
    def clear_samples(
        self, sample_ids: Sequence[str] | None, partition_id: str, *, claim: str | None = None
    ) -> None:
        """Remove rows; ids that are not there are ignored. None removes the partition, with all its rows and claims.

        It may be filled again: as it was registered, unless more than a thousand others have been removed since.

        Raises:
            ClaimExpired: `claim` is no longer in force.
            DataPlaneError: rows that are not of the `claim`, which a partition as a whole never is.
        """

    def wait_for_room(self, partition_id: str, rows: int, timeout_s: float = 60.0) -> None:
        """Wait until so many rows more fit in; nothing is reserved, so of two that waited one may come too late.

        Raises:
            ClaimTimeout: they do not fit within `timeout_s`, which may be `math.inf`.
            DataPlaneError: unknown partition, or one that never holds as many.
        """
        raise self._cannot("wait for room")

    @abstractmethod
    def close(self) -> None:
        """Let go of the store; may be called twice."""

    # For reports. A store that cannot say raises DataPlaneError.

    def partition_report(self, partition_id: str, limit: int = 100) -> PartitionReport:
        """Return what a partition holds, who has it, and up to `limit` rows that are not consumed.

        Raises:
            DataPlaneError: unknown partition.
        """
        raise self._cannot(f"report on partition '{partition_id}'")

    def partition_ids(self) -> list[str]:
        raise self._cannot("list its partitions")

    def sample_ids(self, partition_id: str) -> list[str]:
        """Return the ids that a partition holds, in the order of their first puts; none if there is no such."""
        raise self._cannot(f"list the samples of partition '{partition_id}'")

    def stored_bytes(self, partition_id: str | None = None) -> int:
        raise self._cannot("count its bytes")

    def _cannot(self, what: str) -> DataPlaneError:
        return DataPlaneError(f"{type(self).__name__} cannot {what}")

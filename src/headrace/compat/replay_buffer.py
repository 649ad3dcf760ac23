"""What `nemo_rl.algorithms.async_utils.replay_buffer` names; a buffer over a store has rows there, and metas here."""

import asyncio
import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDict

from headrace.compat.payload import pack_payload, record_to_train_batch
from headrace.compat.prompt_groups import PromptGroupRecord
from headrace.compat.trajectory_buffer import ReplayBuffer, ReplayBufferImpl
from headrace.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from headrace.data_plane.schema import INPUT_LENGTHS, ROUTED_EXPERTS_FIELD
from headrace.errors import ReplayError, SchemaError

__all__ = ["ReplayBuffer", "ReplayBufferImpl", "TQReplayBuffer"]

_log = logging.getLogger("headrace.compat")
_ENVELOPE = ("partition_id", "saved_capacity", "groups")
_GROUP = ("meta", "start_weight", "end_weight", "target_step", "group_id", "fields_data")


@dataclass
class _Slot:
    """A group that was begun with one version of the weights; its meta once its rows are in the store."""

    group_id: str
    start_weight: int
    target_step: int | None
    end_weight: int = -1
    meta: KVBatchMeta | None = None


class TQReplayBuffer:
    """Groups of samples in the order in which they were reserved: rows in a store's partition, metas in this process.

    To be used from one event loop; the store's calls run in threads. With `require_routed_experts` a group without
    routes is refused.
    """

    def __init__(
        self,
        dp_client: DataPlaneClient,
        partition_id: str,
        *,
        pad_value_dict: Mapping[str, int],
        require_routed_experts: bool = False,
    ) -> None:
        self._client, self._partition_id = dp_client, partition_id
        self._pads, self._needs_routes = dict(pad_value_dict), require_routed_experts
        self._slots: list[_Slot] = []

    # By place, as samplers read them.

    @property
    def meta_list(self) -> list[KVBatchMeta | None]:
        return [slot.meta for slot in self._slots]

    @property
    def start_weight_list(self) -> list[int]:
        return [slot.start_weight for slot in self._slots]

    @property
    def end_weight_list(self) -> list[int]:
        return [slot.end_weight for slot in self._slots]

    @property
    def target_step_list(self) -> list[int | None]:
        return [slot.target_step for slot in self._slots]

    @property
    def ready_list(self) -> list[bool]:
        return [slot.meta is not None for slot in self._slots]

    def size(self) -> int:
        """Return how many groups are reserved or ready."""
        return len(self._slots)

    def __len__(self) -> int:
        return self.size()

    def count_for_target_step(self, target_step: int) -> int:
        """Return how many groups are meant for a step, those that are still being made counted."""
        return sum(slot.target_step == target_step for slot in self._slots)

    # Groups.

    def reserve(
        self, *, weight_version: int, target_step: int | None = None, group_id: str | None = None
    ) -> str:
        """Keep a place for a group that is about to be made; returns its id, a new one unless it is given.

        Raises:
            SchemaError: an id that is there already.
        """
        name = group_id or uuid.uuid4().hex
        if any(slot.group_id == name for slot in self._slots):
            raise SchemaError(f"group '{name}' is reserved already; give each group an id of its own")
        self._slots.append(_Slot(name, weight_version, target_step))
        return name

    async def commit(
        self, group_id: str, record: PromptGroupRecord, start_weight_version: int, end_weight_version: int
    ) -> KVBatchMeta:
        """Put the completions of a reserved group into the store; its rows are there as a whole or not at all.

        Raises:
            SchemaError: a group that is not reserved, or no longer, or completions that do not become rows.
            ReplayError: routes are required, and there are none.
        """
        slot = self._slot(group_id)
        batch = record_to_train_batch(record, pad_value_dict=self._pads)
        if self._needs_routes and ROUTED_EXPERTS_FIELD not in batch:
            raise ReplayError(
                f"router_replay.enabled=true requires routed_experts, and group '{group_id}' has none; have the engine "
                "return them"
            )
        ids, fields, tags = pack_payload(batch, weight_version=start_weight_version, group_id=group_id)
        lengths = [int(length) for length in batch[INPUT_LENGTHS]]
        await self._put(ids, fields, tags)
        if not any(slot is other for other in self._slots):
            await asyncio.to_thread(self._client.clear_samples, ids, self._partition_id)
            raise SchemaError(f"group '{group_id}' was removed while its rows were put; they are cleared")
        meta = KVBatchMeta(self._partition_id, "train", ids, list(fields.keys()), lengths, tags=tags)
        slot.meta, slot.start_weight, slot.end_weight = meta, start_weight_version, end_weight_version
        return meta

    async def remove_group(self, group_id: str, *, remove_in_dp: bool = False) -> bool:
        """Forget a group, and with `remove_in_dp` clear its rows; False: there is no such."""
        places = [place for place, slot in enumerate(self._slots) if slot.group_id == group_id]
        return bool(await self.remove(places, remove_in_dp))

    async def remove(self, idxs: Sequence[int], remove_in_dp: bool) -> int:
        """Forget the groups at these places, and with `remove_in_dp` clear their rows; returns how many they were.

        Raises:
            IndexError: a place that there is not; nothing is removed.
        """
        for place in idxs:
            if not 0 <= place < len(self._slots):
                raise IndexError(f"buffer index out of range: {place}; size={len(self._slots)}")
        gone = [self._slots[place] for place in sorted(set(idxs))]
        self._slots = [slot for slot in self._slots if not any(slot is other for other in gone)]
        ids = [sample_id for slot in gone if slot.meta is not None for sample_id in slot.meta.sample_ids]
        if remove_in_dp and ids:
            await asyncio.to_thread(self._client.clear_samples, ids, self._partition_id)
        return len(gone)

    def promote_ready_group(self, *, to_target_step: int) -> str | None:
        """Mean the ready group of the nearest later step for this one; returns its id, None: there is no such."""
        later = [
            slot
            for slot in self._slots
            if slot.meta is not None and slot.target_step is not None and slot.target_step > to_target_step
        ]
        if not later:
            return None
        nearest = min(later, key=lambda slot: slot.target_step or 0)
        nearest.target_step = to_target_step
        return nearest.group_id

    def _slot(self, group_id: str) -> _Slot:
        for slot in self._slots:
            if slot.group_id == group_id:
                return slot
        raise SchemaError(f"group '{group_id}' is not reserved; call reserve first")

    async def _put(self, ids: list[str], fields: TensorDict, tags: Any) -> None:
        stored = False
        put = asyncio.ensure_future(
            asyncio.to_thread(self._client.put_samples, ids, self._partition_id, fields=fields, tags=tags)
        )
        try:
            await asyncio.shield(put)
            stored = True
        finally:
            if not stored:  # a put whose answer was lost may have written, and one that is given up goes on
                await asyncio.gather(put, return_exceptions=True)
                await asyncio.to_thread(self._client.clear_samples, ids, self._partition_id)

    # Checkpoints.

    async def state_dict(self, *, saved_capacity: int) -> dict[str, Any]:
        """Return the ready groups with their rows; those that are being made are left out."""
        groups = []
        for slot in [slot for slot in self._slots if slot.meta is not None]:
            meta = slot.meta
            assert meta is not None
            rows = await asyncio.to_thread(
                self._client.get_samples,
                list(meta.sample_ids),
                self._partition_id,
                select_fields=list(meta.fields or ()),
            )
            values = (meta, slot.start_weight, slot.end_weight, slot.target_step, slot.group_id, rows)
            groups.append(dict(zip(_GROUP, values)))
        return dict(zip(_ENVELOPE, (self._partition_id, saved_capacity, groups)))

    async def load_state_dict(
        self,
        state: Mapping[str, Any],
        *,
        max_groups: int,
        expected_partition_id: str,
        expected_group_size: int,
    ) -> int:
        """Put saved groups back, behind those that are there; returns how many they are.

        If they exceed `max_groups`, the freshest stay, which is not possible where they are meant for steps.

        Raises:
            SchemaError: a state of another form, partition or group size; nothing is put.
        """
        groups = _checked(state, expected_partition_id, expected_group_size)
        if len(groups) > max_groups:
            groups = _freshest(groups, max_groups)
            _log.warning(
                "replay buffer capacity changed from %s to %d groups: the freshest %d of %d saved groups are kept",
                state["saved_capacity"],
                max_groups,
                len(groups),
                len(state["groups"]),
            )
        for group in groups:
            meta: KVBatchMeta = group["meta"]
            tags = [dict(tag) for tag in meta.tags or [{} for _ in meta.sample_ids]]
            await self._put(list(meta.sample_ids), group["fields_data"], tags)
            self._slots.append(
                _Slot(
                    group["group_id"], group["start_weight"], group["target_step"], group["end_weight"], meta
                )
            )
        return len(groups)


def _checked(state: Mapping[str, Any], partition_id: str, group_size: int) -> list[dict[str, Any]]:
    if missing := [key for key in _ENVELOPE if key not in state]:
        raise SchemaError(f"replay buffer state is missing required keys: {', '.join(missing)}")
    if state["partition_id"] != partition_id:
        raise SchemaError(
            f"partition_id mismatch: the state is of '{state['partition_id']}', expected '{partition_id}'"
        )
    seen: set[str] = set()
    for place, group in enumerate(state["groups"]):
        if missing := [key for key in _GROUP if key not in group]:
            raise SchemaError(f"group missing keys: group {place} lacks {', '.join(missing)}")
        meta = group["meta"]
        sizes = {len(meta.sample_ids), group_size, *(len(c) for c in (meta.sequence_lengths, meta.tags) if c)}
        if len(sizes) != 1:
            raise SchemaError(
                f"group {place} is misaligned: it has sizes {sorted(sizes)}; expected {group_size}"
            )
        if twice := seen & set(meta.sample_ids):
            raise SchemaError(f"duplicate sample_id '{min(twice)}' in group {place}")
        seen |= set(meta.sample_ids)
    return list(state["groups"])


def _freshest(groups: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    if any(group["target_step"] is not None for group in groups):
        raise SchemaError(
            f"{len(groups)} saved groups with target_step stamps exceed max_groups={count}, and dropping some would "
            f"leave steps waiting for ever; set max_buffered_rollouts >= {len(groups)}"
        )
    by_age = sorted(range(len(groups)), key=lambda place: (groups[place]["start_weight"], place))
    return [groups[place] for place in sorted(by_age[len(groups) - count :])]

"""The data plane inside one process: no server, no serialisation of tensors, every promise of the contract.

The process has one store at a time: `start` makes it, `attach` gives further clients of it, and closing the
client that started it drops it. A client made directly has a store of its own.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict

from headrace.config import DataPlaneConfig
from headrace.data_plane.adapters.local_chunks import Chunk, OwnOffsets, chunk_from_leaf
from headrace.data_plane.adapters.local_partition import Partition
from headrace.data_plane.adapters.local_store import LocalStore, RowFacts
from headrace.data_plane.adapters.partition_lengths import said_lengths
from headrace.data_plane.checks import checked_ids, checked_leaves, checked_tags, id_list
from headrace.data_plane.interfaces import DataPlaneClient, KVBatchMeta, meta_of_checked
from headrace.data_plane.leaves import wire_tensordict
from headrace.errors import DataPlaneError

_process_lock = threading.Lock()
_process_store: LocalStore | None = None


class LocalDataPlaneClient(DataPlaneClient):
    """A client of an in-process store.

    Columns are copied in and out: neither the caller's tensors nor the results share memory with the store,
    and results are on the CPU. Columns whose rows have the same lengths come back around the same offsets.
    """

    def __init__(self, store: LocalStore | None = None) -> None:
        self._owns_store = store is None
        self._store = LocalStore(DataPlaneConfig().storage_capacity) if store is None else store
        self._is_closed = False

    @classmethod
    def start(cls, storage_capacity: int) -> "LocalDataPlaneClient":
        """Make this process's store and return the client that owns it.

        Clients of a store started earlier keep that store; `attach` gives the latest.
        """
        global _process_store
        client = cls(LocalStore(storage_capacity))
        client._owns_store = True
        with _process_lock:
            _process_store = client._store
        return client

    @classmethod
    def attach(cls) -> "LocalDataPlaneClient":
        """Return a client of this process's store.

        Raises:
            DataPlaneError: the process has none.
        """
        with _process_lock:
            store = _process_store
        if store is None:
            raise DataPlaneError(
                "this process has no local store to attach to; the driver starts one first with "
                "build_data_plane_client(cfg, bootstrap=True). Workers in other processes need "
                "data_plane.impl=transfer_queue"
            )
        return cls(store)

    def register_partition(
        self,
        partition_id: str,
        fields: Sequence[str],
        num_samples: int,
        consumer_tasks: Sequence[str],
        grpo_group_size: int | None = None,
        enums: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Open a partition, or empty and re-open one of the same id."""
        partition = Partition[Chunk](
            partition_id, consumer_tasks=consumer_tasks, group_size=grpo_group_size, enums=enums
        )
        self._open().register(partition, num_samples)

    def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: Sequence[str],
        batch_size: int,
        dp_rank: int | None = None,
        blocking: bool = True,
        timeout_s: float = 60.0,
    ) -> KVBatchMeta | None:
        """Take the next ready rows of a task, in the order of their first puts.

        A group of which a row was cleared is never whole again, so its other rows are not handed out.
        """
        store = self._open()
        wait_s = timeout_s if blocking else 0.0
        facts = store.claim(partition_id, task_name, required_fields, batch_size, wait_s)
        if facts is not None:
            return _meta(partition_id, task_name, list(required_fields), facts)
        if blocking:
            raise store.claim_timeout(partition_id, task_name, required_fields, batch_size)
        return None

    def get_data(self, meta: KVBatchMeta, select_fields: Sequence[str] | None = None) -> TensorDict:
        """Read the rows of `meta`."""
        names = select_fields if select_fields is not None else meta.fields
        if names is None:
            names = self._open().shared_columns(meta.partition_id, meta.sample_ids)
        return self.get_samples(meta.sample_ids, meta.partition_id, names)

    def check_consumption_status(self, partition_id: str, task_names: Sequence[str]) -> bool:
        """Return whether each task has claimed every row; an empty partition is not consumed."""
        return self._open().is_consumed(partition_id, task_names)

    def put_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
    ) -> KVBatchMeta:
        """Write columns and tags of rows; a tag written twice keeps the last value, others stay."""
        store = self._open()
        ids = checked_ids(sample_ids)
        copied_tags = checked_tags(tags, len(ids))
        leaves = checked_leaves(fields, len(ids))
        shared = OwnOffsets()
        copies = {name: chunk_from_leaf(name, leaf, ids).copy(shared) for name, leaf in leaves.items()}
        chunks, lengths = {name: [chunk] for name, chunk in copies.items()}, said_lengths(copies)
        facts = store.put(partition_id, ids, chunks, copied_tags, lengths)
        return _meta(partition_id, "", list(chunks), facts)

    def get_samples(
        self, sample_ids: Sequence[str], partition_id: str, select_fields: Sequence[str]
    ) -> TensorDict:
        """Read columns of rows, in the order asked, repeated ids included."""
        # The store makes texts of ids that it has to look up, which all rows in their order are not.
        ids = sample_ids if type(sample_ids) is list else id_list(sample_ids)
        chunks = self._open().get(partition_id, ids, list(dict.fromkeys(select_fields)))
        offsets: list[torch.Tensor] = []
        columns = {name: chunk.with_shared_offsets(offsets).leaf() for name, chunk in chunks.items()}
        return wire_tensordict(columns, len(ids))

    def clear_samples(self, sample_ids: Sequence[str] | None, partition_id: str) -> None:
        """Remove rows; None removes all rows of the partition. Ids that are not there are ignored."""
        ids = None if sample_ids is None else id_list(sample_ids)
        self._open().clear(partition_id, ids)

    def close(self) -> None:
        """Let go of the store; the client that started it drops it, for all its clients."""
        global _process_store
        if self._is_closed:
            return
        self._is_closed = True
        if self._owns_store:
            self._store.close()
            with _process_lock:
                if _process_store is self._store:
                    _process_store = None

    # Beyond the contract, for leak reports.

    def partition_ids(self) -> list[str]:
        """Return the partitions that are registered or were written to."""
        return list(self._open().sample_ids())

    def sample_ids(self, partition_id: str) -> list[str]:
        """Return the ids that a partition holds, in the order of their first puts."""
        return self._open().sample_ids().get(partition_id, [])

    def stored_bytes(self, partition_id: str | None = None) -> int:
        """Return the bytes of a partition's columns, or of all partitions."""
        by_partition = self._open().stored_bytes()
        return sum(by_partition.values()) if partition_id is None else by_partition.get(partition_id, 0)

    def _open(self) -> LocalStore:
        if self._is_closed:
            raise DataPlaneError("this client is closed; build a new one with build_data_plane_client")
        return self._store


def _meta(partition_id: str, task_name: str, fields: list[str], facts: RowFacts) -> KVBatchMeta:
    return meta_of_checked(
        partition_id, task_name, facts.sample_ids, fields, facts.sequence_lengths, tags=facts.tags
    )

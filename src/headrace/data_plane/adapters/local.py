"""The data plane inside one process: no server, no serialisation of tensors, every promise of the contract.

`start` makes a store of a name, `attach` gives further clients of it, and closing the client that started it drops it.
A client made directly has a store of its own, without a name.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from tensordict import TensorDict

from headrace.config import DataPlaneConfig
from headrace.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from headrace.data_plane.store.columns import Chunk, Known, checked_put, read_rows
from headrace.data_plane.store.requests import ClaimRequest, Registration, waiting_time
from headrace.data_plane.store.sample_store import SampleStore
from headrace.data_plane.wire import wire_tensordict
from headrace.errors import DataPlaneError
from headrace.utils.arguments import texts

_owners_lock = threading.Lock()
# By store name. A name belongs to the client that started the store, for as long as that lives.
_owners: WeakValueDictionary[str, "LocalDataPlaneClient"] = WeakValueDictionary()


class LocalDataPlaneClient(DataPlaneClient):
    """A client of an in-process store.

    Columns are copied in and out: neither the caller's tensors nor the results share memory with the store,
    and results are on the CPU. Columns whose rows have the same lengths come back around the same offsets.
    """

    def __init__(self, store: SampleStore[Chunk] | None = None) -> None:
        self._owns_store = store is None
        self._store = SampleStore(DataPlaneConfig().storage_capacity) if store is None else store
        self._name: str | None = None
        self._is_closed = False

    @classmethod
    def start(cls, storage_capacity: int, name: str = "headrace") -> "LocalDataPlaneClient":
        """Make a store of this process and return the client that owns it.

        Raises:
            DataPlaneError: there is one of that name.
        """
        client = cls(SampleStore(storage_capacity))
        client._owns_store = True
        with _owners_lock:
            if name in _owners:
                raise DataPlaneError(
                    f"store '{name}' is open already; attach to it, close it first, or set another "
                    "data_plane.store_name"
                )
            _owners[name], client._name = client, name
        return client

    @classmethod
    def attach(cls, name: str = "headrace") -> "LocalDataPlaneClient":
        """Return a client of a store of this process.

        Raises:
            DataPlaneError: the process has none of that name.
        """
        with _owners_lock:
            owner = _owners.get(name)
        if owner is None:
            raise DataPlaneError(
                f"this process has no local store '{name}' to attach to; the driver starts one first with "
                "build_data_plane_client(cfg, bootstrap=True). Workers in other processes need "
                "data_plane.impl=transfer_queue"
            )
        return cls(owner._store)

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
        asked = (partition_id, fields, num_samples, consumer_tasks, grpo_group_size, enums)
        self._open().register(Registration.of(*asked, group_tag=group_tag))

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
    ) -> KVBatchMeta | None:
        """Take the next ready rows of a task."""
        request = ClaimRequest.of(partition_id, task_name, required_fields, batch_size, allow_partial)
        store, wait_s = self._open(), waiting_time(blocking, timeout_s)
        facts = store.claim(request, wait_s)
        if facts is None and blocking:
            raise store.claim_timeout(request)
        if facts is None or not facts.sample_ids:
            return None
        return facts.meta(partition_id, task_name, request.fields)

    def get_data(self, meta: KVBatchMeta, select_fields: Sequence[str] | None = None) -> TensorDict:
        """Read the rows of `meta`."""
        names = select_fields if select_fields is not None else meta.fields
        if names is None:
            names = self._open().shared_columns(meta.partition_id, meta.sample_ids)
        return self.get_samples(meta.sample_ids, meta.partition_id, names)

    def check_consumption_status(self, partition_id: str, task_names: Sequence[str]) -> bool:
        return self._open().is_consumed(partition_id, texts("task_names", task_names))

    def put_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
    ) -> KVBatchMeta:
        """Write columns and tags of rows; a tag written twice keeps the last value, others stay."""
        store, put = self._open(), checked_put(sample_ids, partition_id, fields, tags)
        own = {name: [chunk.copy() for chunk in chunks] for name, chunks in put.columns.items()}
        facts, _ = store.put(put._replace(columns=own))
        return facts.meta(partition_id, "", list(own))

    def get_samples(
        self, sample_ids: Sequence[str], partition_id: str, select_fields: Sequence[str]
    ) -> TensorDict:
        """Read columns of rows, in the order asked, repeated ids included."""
        # The store makes texts of ids that it has to look up, which all rows in their order are not.
        ids = sample_ids if type(sample_ids) is list else texts("sample_ids", sample_ids)
        names = list(dict.fromkeys(texts("select_fields", select_fields)))
        known: Known = []
        selected = self._open().select(partition_id, ids, names)
        columns = {name: read_rows(*selection).leaf(known) for name, selection in selected.items()}
        return wire_tensordict(columns, len(ids))

    def clear_samples(self, sample_ids: Sequence[str] | None, partition_id: str) -> None:
        """Remove rows, or with None the partition; ids that are not there are ignored."""
        ids = None if sample_ids is None else texts("sample_ids", sample_ids)
        self._open().clear(partition_id, ids)

    def close(self) -> None:
        """Let go of the store; the client that started it drops it, for all its clients."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._owns_store:
            self._store.close()
        if self._name is not None:
            with _owners_lock:
                del _owners[self._name]

    def partition_ids(self) -> list[str]:
        return list(self._open().sample_ids())

    def sample_ids(self, partition_id: str) -> list[str]:
        return self._open().sample_ids().get(partition_id, [])

    def stored_bytes(self, partition_id: str | None = None) -> int:
        by_partition = self._open().stored_bytes()
        return sum(by_partition.values()) if partition_id is None else by_partition.get(partition_id, 0)

    def _open(self) -> SampleStore[Chunk]:
        if self._is_closed:
            raise DataPlaneError("this client is closed; build a new one with build_data_plane_client")
        return self._store

"""The data plane inside one process: no server, no serialisation of tensors, every promise of the contract.

`start` makes a store of a name, `attach` gives further clients of it, and closing the client that started it drops it.
A client made directly has a store of its own, without a name.
"""

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from tensordict import TensorDict

from headrace.config import DataPlaneConfig
from headrace.data_plane.interfaces import KVBatchMeta
from headrace.data_plane.store.client import StoreClient
from headrace.data_plane.store.columns import Chunk, Known, RowFacts, checked_put, read_rows
from headrace.data_plane.store.sample_store import SampleStore
from headrace.data_plane.wire import wire_tensordict
from headrace.errors import DataPlaneError
from headrace.utils.arguments import texts
from headrace.utils.forks import after_fork, in_forks

_owners_lock = threading.Lock()
# By store name. A name belongs to the client that started the store, for as long as that lives.
_owners: WeakValueDictionary[str, "LocalDataPlaneClient"] = WeakValueDictionary()
in_forks(_owners.clear)  # a store is of the process that started it


class LocalDataPlaneClient(StoreClient):
    """A client of an in-process store.

    Columns are copied in and out: neither the caller's tensors nor the results share memory with the store,
    and results are on the CPU. Columns whose rows have the same lengths come back around the same offsets.
    """

    def __init__(self, store: SampleStore[Chunk] | None = None) -> None:
        self._owns_store = store is None
        self._store = SampleStore(DataPlaneConfig().storage_capacity) if store is None else store
        self._name: str | None = None
        self._is_closed = False
        self._process = os.getpid()

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

    def _ask(self, operation: str, *arguments: object) -> Any:
        return getattr(self._open(), operation)(*arguments)

    def _await(self, operation: str, *arguments: object, wait_s: float) -> Any:
        return self._ask(operation, *arguments, wait_s)

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
        store = self._open()
        put, chunks = checked_put(sample_ids, partition_id, fields, tags, producer)
        own = {name: [chunk.copy()] for name, chunk in chunks.items() if put.ids}
        facts, _ = store.put(put._replace(claim=claim, once=once), own)
        return (facts or RowFacts([], [], None)).meta(partition_id, "", list(chunks))

    def get_samples(
        self, sample_ids: Sequence[str], partition_id: str, select_fields: Sequence[str]
    ) -> TensorDict:
        # The store makes texts of ids that it has to look up, which all rows in their order are not.
        ids = sample_ids if type(sample_ids) is list else texts("sample_ids", sample_ids)
        names = list(dict.fromkeys(texts("select_fields", select_fields)))
        known: Known = []
        selected = self._open().select(partition_id, ids, names)
        # Copy all first: a copy drives out of the caches what a jagged tensor is made with, 15 to 20 us a column.
        chunks = {name: read_rows(*selection) for name, selection in selected.items()}
        columns = {name: chunk.leaf(known) for name, chunk in chunks.items()}
        return wire_tensordict(columns, len(ids))

    def close(self) -> None:
        """Let go of the store; the client that started it drops it, for all its clients."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._owns_store:
            self._store.close()
        if self._name is not None:
            with _owners_lock:
                if _owners.get(self._name) is self:
                    del _owners[self._name]

    def _open(self) -> SampleStore[Chunk]:
        if self._is_closed:
            raise DataPlaneError("this client is closed; build a new one with build_data_plane_client")
        if self._process != os.getpid():
            raise after_fork(self._process)
        return self._store

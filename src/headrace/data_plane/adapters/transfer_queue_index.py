"""The books of a TransferQueue store: which block holds each row, tags, claims. No bulk passes through.

An index is a `SampleStore` whose blocks lie in TransferQueue. It runs in one Ray actor per cluster, which every
client asks; the actor keeps one index per store name. A block that no row refers to any more is garbage: its
key is handed to the next caller, who drops it from TransferQueue.
"""

import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from headrace.data_plane.adapters.local_chunks import Form, RowBlock, Rows
from headrace.data_plane.adapters.local_store import RowFacts, SampleStore
from headrace.data_plane.adapters.partition_lengths import Said
from headrace.data_plane.packed_payload import BlockInfo
from headrace.data_plane.requests import ClaimRequest, Registration
from headrace.errors import DataPlaneError


class StoredBlock(RowBlock):
    """A block in TransferQueue."""

    def __init__(self, info: BlockInfo) -> None:
        self.info = info

    @property
    def form(self) -> Form:
        """What the rows have in common."""
        return self.info.form

    @property
    def nbytes(self) -> int:
        """Bytes of the block, header included."""
        return self.info.nbytes

    def __len__(self) -> int:
        return self.info.rows

    def shrunk(self, rows: Rows) -> None:
        """Return None: blocks go as a whole."""


class Located(NamedTuple):
    """Where rows of a column lie: all rows of `blocks`, in order; or row i is row `places[1][i]` of `places[0][i]`."""

    form: Form
    blocks: list[BlockInfo]
    places: tuple[Rows, Rows] | None


class SampleIndex:
    """The books of one store."""

    def __init__(self, capacity: int) -> None:
        self._store: SampleStore[StoredBlock] = SampleStore(capacity)
        self._garbage: deque[str] = deque()

    def take_garbage(self) -> list[str]:
        """Return the keys of blocks that no row refers to; the caller drops them."""
        keys: list[str] = []
        while self._garbage:
            keys.append(self._garbage.popleft())
        return keys

    def register(self, registration: Registration) -> None:
        """Open a partition, in place of one of the same name."""
        self._store.register(registration)

    def put(
        self,
        partition_id: str,
        ids: list[str],
        columns: Mapping[str, Sequence[BlockInfo]],
        tags: Sequence[Mapping[str, Any]] | None,
        lengths: Said | None = None,
    ) -> RowFacts:
        """Commit rows whose blocks are stored; a refusal leaves the blocks to the caller.

        The facts come without the ids, which the caller has.
        """
        blocks = {name: list(map(StoredBlock, infos)) for name, infos in columns.items()}
        facts = self._store.put(partition_id, ids, blocks, tags, lengths or {})
        for block in (block for parts in blocks.values() for block in parts):
            weakref.finalize(block, self._garbage.append, block.info.key).atexit = False
        return facts._replace(sample_ids=[])

    def select(self, partition_id: str, ids: list[str], names: Sequence[str]) -> dict[str, Located]:
        """Return where columns of rows lie."""
        located: dict[str, Located] = {}
        for name, (blocks, places) in self._store.select(partition_id, ids, names).items():
            infos = [block.info for block in blocks]
            located[name] = Located(
                blocks[0].form, infos, None if places is None else _places(infos, *places)
            )
        return located

    def shared_columns(self, partition_id: str, ids: list[str]) -> list[str]:
        """Return the columns that all of `ids` have."""
        return self._store.shared_columns(partition_id, ids)

    def clear(self, partition_id: str, ids: Sequence[str] | None) -> None:
        """Remove rows, or with None the partition; what is not there is ignored."""
        self._store.clear(partition_id, ids)

    def claim(self, request: ClaimRequest) -> RowFacts | None:
        """Take rows for a task; None if too few are ready."""
        return self._store.claim(request)

    def claim_timeout(self, request: ClaimRequest) -> str:
        """Return the message of a claim that has waited in vain."""
        return str(self._store.claim_timeout(request))

    def is_consumed(self, partition_id: str, tasks: Sequence[str]) -> bool:
        """Return whether each task has claimed all rows, and they have all come."""
        return self._store.is_consumed(partition_id, tasks)

    def sample_ids(self) -> dict[str, list[str]]:
        """Return the ids of every partition."""
        return self._store.sample_ids()

    def stored_bytes(self) -> dict[str, int]:
        """Return the bytes of every partition."""
        return self._store.stored_bytes()

    def close(self) -> None:
        """Forget everything; later calls fail."""
        self._store.close()


def _places(blocks: Sequence[BlockInfo], block_of: Rows, row_of: Rows) -> tuple[Rows, Rows] | None:
    """Return where rows lie, in few bytes; None: they are all rows of `blocks`, in order."""
    counts = [block.rows for block in blocks]
    if len(row_of) == sum(counts):
        starts = np.repeat(np.cumsum([0, *counts[:-1]]), counts)
        is_whole = (block_of[1:] >= block_of[:-1]).all() and (row_of == np.arange(len(row_of)) - starts).all()
        if is_whole and (np.bincount(block_of, minlength=len(counts)) == counts).all():
            return None
    small = np.uint16 if len(blocks) <= 65_536 else np.int64
    return block_of.astype(small), row_of.astype(np.int32)


class Indexes:
    """The indexes of a cluster by store name; what the actor runs.

    `connection` is how a process reaches TransferQueue, as bytes that only clients read; None until it is up.
    """

    def __init__(self) -> None:
        self._open: dict[str, SampleIndex] = {}
        self._connection: bytes | None = None

    def set_connection(self, connection: bytes) -> None:
        """Publish how to reach TransferQueue."""
        self._connection = connection

    def connection(self) -> bytes | None:
        """Return how to reach TransferQueue; None: not yet."""
        return self._connection

    def open_store(self, name: str, capacity: int) -> None:
        """Add a store.

        Raises:
            DataPlaneError: there is one of that name.
        """
        if name in self._open:
            raise DataPlaneError(
                f"store '{name}' is open already; attach to it, close it first, or set another data_plane.store_name"
            )
        self._open[name] = SampleIndex(capacity)

    def check_store(self, name: str) -> None:
        """Raise DataPlaneError if there is no such store."""
        self._index(name)

    def close_store(self, name: str) -> None:
        """Drop a store's books; its blocks are for the caller to drop."""
        index = self._open.pop(name, None)
        if index is not None:
            index.close()

    def run(self, store: str, operation: str, *arguments: object) -> tuple[Any, list[str]]:
        """Return what an operation of a store returns, and keys to drop."""
        index = self._index(store)
        result = getattr(index, operation)(*arguments)
        return result, index.take_garbage()

    def _index(self, name: str) -> SampleIndex:
        if name not in self._open:
            raise DataPlaneError(
                f"store '{name}' is closed, or was never opened; the driver opens it with "
                "build_data_plane_client(cfg, bootstrap=True)"
            )
        return self._open[name]

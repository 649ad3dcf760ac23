"""The books of a TransferQueue store: which block holds each row, tags, claims. No bulk passes through.

An index is a `SampleStore` whose blocks lie in TransferQueue. It runs in one Ray actor per cluster, which every
client asks; the actor keeps one index per store. Blocks in transit are leased (`transfer_queue_leases`): those of a put
before they are stored, until it is committed; and garbage, which no row refers to, once it is handed to a caller who
drops it from TransferQueue, until that has happened.
"""

import secrets
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from headrace.data_plane.adapters.transfer_queue_leases import Leases
from headrace.data_plane.store.blocks import BlockInfo, placed
from headrace.data_plane.store.columns import Form, Places, Put, Rows
from headrace.data_plane.store.partition import RowFacts
from headrace.data_plane.store.requests import ClaimRequest, Registration
from headrace.data_plane.store.sample_store import SampleStore
from headrace.errors import DataPlaneError, TransportError

# A caller that has not dropped its garbage by then leaves it to another.
_DROP_S = 60.0


class Located(NamedTuple):
    """Where rows of a column lie: all rows of `blocks`, in order; or row i is row `places[1][i]` of `places[0][i]`."""

    form: Form
    blocks: list[BlockInfo]
    places: Places


class Garbage(NamedTuple):
    """Blocks for the caller to drop from TransferQueue, and the ticket that says so."""

    ticket: int
    keys: list[str]


def _everyone_is_alive(owner: bytes) -> bool:
    return True


class SampleIndex:
    """The books of one store; `is_alive` says whether a client's process is."""

    def __init__(self, capacity: int, is_alive: Callable[[bytes], bool] = _everyone_is_alive) -> None:
        self._store: SampleStore[BlockInfo] = SampleStore(capacity)
        self._garbage: deque[str] = deque()
        self._leases = Leases(is_alive)

    def hand_out(self, owner: bytes, *, at_once: bool = False) -> Garbage | None:
        """Return garbage for a client to drop, if there is some: what lost leases have left, too.

        Processes are looked for `at_once`, or once a second.
        """
        self._garbage.extend(self._leases.end_lost(at_once=at_once))
        keys: list[str] = []
        while self._garbage:
            keys.append(self._garbage.popleft())
        return Garbage(self._leases.grant(owner, keys, _DROP_S), keys) if keys else None

    def end(self, tickets: Sequence[int]) -> None:
        self._leases.end(tickets)

    def give_back(self, tickets: Sequence[int]) -> None:
        self._garbage.extend(self._leases.end(tickets))

    def register(self, registration: Registration) -> None:
        self._free(self._store.register(registration))

    def _free(self, blocks: Sequence[BlockInfo]) -> None:
        self._garbage.extend(block.key for block in blocks)

    def begin_put(self, owner: bytes, put: Put[BlockInfo], limit_s: float) -> int:
        """Lease the blocks of a put, which are not stored yet, to a client; return the ticket for `commit`.

        Raises:
            HeadraceError: what a commit would raise.
        """
        self._store.check_put(put)
        keys = [block.key for blocks in put.columns.values() for block in blocks]
        return self._leases.grant(owner, keys, limit_s, put)

    def commit(self, ticket: int, slots: Sequence[int]) -> RowFacts:
        """Commit a put whose blocks are stored in these slots; a refusal leaves blocks and ticket to the client.

        The facts come without the ids, which the caller has.

        Raises:
            TransportError: the lease has run out.
        """
        lease = self._leases.get(ticket)
        if lease is None:
            raise TransportError(
                "the put took so long that its blocks were dropped, or its process was taken for dead; put again"
            )
        put: Put[BlockInfo] = lease.purpose
        facts = self.put(put._replace(columns=placed(put.columns, slots)))
        self._leases.end([ticket])
        return facts

    def put(self, put: Put[BlockInfo]) -> RowFacts:
        """Commit rows whose blocks are stored and leased to nobody."""
        facts, gone = self._store.put(put)
        self._free(gone)
        return facts._replace(sample_ids=[])

    def select(self, partition_id: str, ids: list[str], names: Sequence[str]) -> dict[str, Located]:
        """Return where columns of rows lie."""
        selected = self._store.select(partition_id, ids, names)
        return {
            name: Located(blocks[0].form, blocks, None if places is None else _places(blocks, *places))
            for name, (blocks, places) in selected.items()
        }

    def shared_columns(self, partition_id: str, ids: list[str]) -> list[str]:
        """Return the columns that all of `ids` have."""
        return self._store.shared_columns(partition_id, ids)

    def clear(self, partition_id: str, ids: Sequence[str] | None) -> None:
        """Remove rows, or with None the partition; what is not there is ignored."""
        self._free(self._store.clear(partition_id, ids))

    def claim(self, request: ClaimRequest) -> RowFacts | None:
        """Take rows for a task; None if too few are ready."""
        return self._store.claim(request)

    def claim_timeout(self, request: ClaimRequest) -> str:
        return str(self._store.claim_timeout(request))

    def is_consumed(self, partition_id: str, tasks: Sequence[str]) -> bool:
        return self._store.is_consumed(partition_id, tasks)

    def sample_ids(self) -> dict[str, list[str]]:
        return self._store.sample_ids()

    def stored_bytes(self) -> dict[str, int]:
        return self._store.stored_bytes()

    def close(self) -> None:
        """Forget everything; later calls fail."""
        self._store.close()


def _places(blocks: Sequence[BlockInfo], block_of: Rows, row_of: Rows) -> Places:
    """Return where rows lie, in few bytes; None: they are all rows of `blocks`, in order."""
    counts = [block.rows for block in blocks]
    if len(row_of) == sum(counts):
        starts = np.repeat(np.cumsum([0, *counts[:-1]]), counts)
        is_whole = (block_of[1:] >= block_of[:-1]).all() and (row_of == np.arange(len(row_of)) - starts).all()
        if is_whole and (np.bincount(block_of, minlength=len(counts)) == counts).all():
            return None
    small = np.uint16 if len(blocks) <= 65_536 else np.int64
    return block_of.astype(small), row_of.astype(np.int32)


class Call(NamedTuple):
    """An operation of a store, or of all stores (no `store`), asked by a client's process.

    `dropped` are tickets of garbage that is gone from TransferQueue.
    """

    owner: bytes
    store: str
    operation: str
    arguments: tuple[Any, ...] = ()
    dropped: Sequence[int] = ()


class StoreFacts(NamedTuple):
    """What is known of a store; `holder` says which process opened it."""

    name: str
    holder: str
    is_alive: bool
    rows: int
    nbytes: int


class _OpenStore(NamedTuple):
    name: str
    owner: bytes
    holder: str
    books: SampleIndex


class Indexes:
    """The indexes of a cluster; what the actor runs.

    A store has a name, which belongs to the process that opened it for as long as that lives, and a handle, which
    belongs to nobody else ever. `connection` is how a process reaches TransferQueue, as bytes that only clients read;
    None until it is up.
    """

    def __init__(self, is_alive: Callable[[bytes], bool] = _everyone_is_alive) -> None:
        self._is_alive = is_alive
        self._open: dict[str, _OpenStore] = {}
        # Handles of stores that are closed, and whose blocks nobody has dropped yet, with their names.
        self._ended: dict[str, str] = {}
        self._connection: bytes | None = None

    def set_connection(self, connection: bytes) -> None:
        self._connection = connection

    def connection(self) -> bytes | None:
        """Return how to reach TransferQueue; None: not yet."""
        return self._connection

    def open_store(self, owner: bytes, name: str, capacity: int, holder: str) -> tuple[str, list[str]]:
        """Add a store, in place of one of a process that is gone.

        Returns its handle, and those of closed stores of this name, for the caller to drop and `forget`.

        Raises:
            DataPlaneError: there is one of that name, and its process lives.
        """
        self._end_store(name, "close it there, attach to it, or set another data_plane.store_name")
        handle = f"{name}/{secrets.token_hex(4)}"
        self._open[handle] = _OpenStore(name, owner, holder, SampleIndex(capacity, self._is_alive))
        return handle, self._ended_of(name)

    def attach(self, name: str) -> str:
        """Return a store's handle.

        Raises:
            DataPlaneError: there is no such store.
        """
        handle = self._handle(name)
        if handle is None:
            raise _closed(name)
        return handle

    def close_store(self, handle: str) -> None:
        """Drop a store's books; its blocks are for the caller to drop, and then to `forget`."""
        closed = self._open.pop(handle, None)
        if closed is not None:
            closed.books.close()
            self._ended[handle] = closed.name

    def drop_store(self, name: str, force: bool) -> list[str]:
        """Close the store of that name, if there is one; return the handles of those to drop and `forget`.

        Raises:
            DataPlaneError: its process lives, and nobody uses `force`.
        """
        self._end_store(name, "close it there, or add --force", force=force)
        return self._ended_of(name)

    def forget(self, handles: Sequence[str]) -> None:
        for handle in handles:
            self._ended.pop(handle, None)

    def list_stores(self) -> list[StoreFacts]:
        """Return the stores that are open."""
        return [
            StoreFacts(
                store.name,
                store.holder,
                self._is_alive(store.owner),
                sum(map(len, store.books.sample_ids().values())),
                sum(store.books.stored_bytes().values()),
            )
            for store in self._open.values()
        ]

    def run(self, call: Call) -> tuple[Any, Garbage | None]:
        """Return what an operation returns, and garbage for the caller to drop."""
        if not call.store:
            return getattr(self, call.operation)(*call.arguments), None
        if call.store not in self._open:
            raise _closed(call.store.rpartition("/")[0])
        index = self._open[call.store].books
        index.end(call.dropped)
        result = getattr(index, call.operation)(*call.arguments)
        if call.operation == "give_back":
            return result, None
        return result, index.hand_out(call.owner, at_once=call.operation == "clear")

    def _end_store(self, name: str, remedy: str, *, force: bool = False) -> None:
        handle = self._handle(name)
        if handle is None:
            return
        store = self._open[handle]
        if not force and self._is_alive(store.owner):
            raise DataPlaneError(f"store '{name}' is open already, by {store.holder}, which lives; {remedy}")
        self.close_store(handle)

    def _handle(self, name: str) -> str | None:
        return next((handle for handle, store in self._open.items() if store.name == name), None)

    def _ended_of(self, name: str) -> list[str]:
        return [handle for handle, ended in self._ended.items() if ended == name]


def _closed(name: str) -> DataPlaneError:
    return DataPlaneError(
        f"store '{name}' is closed, or was never opened; the driver opens it with "
        "build_data_plane_client(cfg, bootstrap=True)"
    )

"""The data plane over TransferQueue (backends simple and mooncake_cpu), for many processes.

It is blocks under keys in TransferQueue, and an index in one Ray actor. A put packs its columns into blocks
(`store/blocks.py`), announces them to the index, which is the truth about which rows there are, stores them in
TransferQueue, and commits them. A get asks the index where rows lie and fetches the blocks. Bulk goes from the producer
to the storage units and from there to the consumer.
"""

import asyncio
import atexit
import contextlib
import itertools
import logging
import os
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import CancelledError
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

import ray
import torch
from tensordict import TensorDict
from transfer_queue.client import TransferQueueClient
from zmq import ZMQError

from headrace.config import DataPlaneConfig
from headrace.data_plane.adapters import transfer_queue_cluster as cluster
from headrace.data_plane.adapters import transfer_queue_mooncake as mooncake
from headrace.data_plane.adapters.transfer_queue_index import Garbage, Located, StoreFacts, wire_tags
from headrace.data_plane.adapters.transfer_queue_socket import IndexClient
from headrace.data_plane.interfaces import KVBatchMeta
from headrace.data_plane.store.blocks import (
    BlockError,
    BlockInfo,
    BlockRead,
    Frames,
    PackedColumns,
    call_bounds,
    pack,
)
from headrace.data_plane.store.client import StoreClient
from headrace.data_plane.store.columns import Known, RowFacts, Rows, checked_put
from headrace.data_plane.wire import wire_tensordict
from headrace.distributed.ray_connection import Deadline, Part, check_parts, connect, wait_for
from headrace.errors import DataPlaneError, HeadraceError, TransportError
from headrace.utils.arguments import shown, texts

T = TypeVar("T")

_log = logging.getLogger(__name__)
# It warns at every call on a machine of fewer than 8 cores.
logging.getLogger("transfer_queue.utils.common").setLevel(logging.ERROR)

_KNOB, _ADDRESS_KNOB = "data_plane.timeout_s", "data_plane.ray_address"
# A fetch that loses against an overwrite or a clear looks the rows up again.
_FETCH_ATTEMPTS = 5
# A put that has come to its time limit is given up by then on both sides.
_LEASE_MARGIN_S = 5.0
# How long the index holds a call that waits before it is asked again.
_HOLD_S = 10.0
# What a TransferQueue call may raise; lost blocks are told apart before.
_FAULTS = (RuntimeError, ValueError, KeyError, TypeError, AssertionError, OSError, ZMQError, CancelledError)


class Blocks:
    """A process's connection to TransferQueue: blocks are put, fetched and dropped, each within a time limit.

    TransferQueue's calls have no time-out of their own, drop missing keys silently, and report a put as done
    whose notice to the controller was lost. So every call of its client runs on its event loop and is
    given up after a time, or when Ray says who died; a fetch checks that all blocks came. Its simple storage units are
    asked directly; elsewhere a block is one flat uint8 row of one field, which no backend reshapes or casts.
    """

    def __init__(self, connection: cluster.Connection, deadline: Deadline) -> None:
        """Connect; raises TransportError: no answer by the deadline, or a process is gone."""
        self._unit_parts = connection.unit_parts
        self._parts = [connection.controller_part, *connection.unit_parts]
        self._client: TransferQueueClient | None = None
        self._units: cluster.StorageUnits | None = None
        # Whether `get` can give some rows of a block.
        self.gives_rows = connection.backend == "simple"
        name, kind = f"headrace_{os.getpid()}_{id(self):x}", cluster.BACKENDS[connection.backend]
        client = TransferQueueClient(name, connection.controller, zmq_io_threads=1)
        self._loop = client._loop
        with ExitStack() as undo:
            # The client is not closed while a thread may still shake hands: its sockets are no other thread's.
            undo.callback(self._loop.call_soon_threadsafe, self._loop.stop)
            if self.gives_rows:
                self._units = cluster.StorageUnits(connection.storage["zmq_info"], self._unit_parts)
                undo.callback(self._units.close)
            handshake = asyncio.to_thread(client.initialize_storage_manager, kind, dict(connection.storage))
            self._result(handshake, "connecting to TransferQueue", deadline)
            undo.pop_all()
        self._client = client

    @property
    def _has_lost(self) -> bool:
        return any(part.is_lost for part in self._parts)

    def put(self, partition: str, packed: PackedColumns, deadline: Deadline) -> list[int]:
        """Store all blocks, and return their slots, in the order of `packed.blocks`."""
        blocks, sizes = packed.blocks, [block.nbytes for block in packed.blocks]
        what = f"putting {len(blocks)} blocks ({sum(sizes)} bytes) into TransferQueue"
        slots = self._result(self._reserve(partition, [block.key for block in blocks]), what, deadline)
        if self._units is None:
            self._result(mooncake.put_blocks(self._client, partition, slots, packed), what, deadline)
            return slots
        for first, last in call_bounds(sizes):
            self._units.put(slots[first:last], packed.frames[first:last], what, deadline)
        return slots

    async def _reserve(self, partition: str, keys: list[str]) -> list[int]:
        slots: list[int] = []
        for first, last in call_bounds([0] * len(keys)):
            meta = await self._open().async_kv_retrieve_meta(keys[first:last], partition, create=True)
            if meta.size != last - first:
                raise BlockError(f"TransferQueue made room for {meta.size} of {last - first} blocks")
            slots.extend(meta.global_indexes)
        return slots

    def get(
        self, partition: str, blocks: Sequence[BlockInfo], rows: Sequence[Rows | None], deadline: Deadline
    ) -> Sequence[torch.Tensor | Frames]:
        """Return the bytes of blocks, in order; where it `gives_rows`, those `rows`. BlockError: not all are there."""
        what = f"fetching {len(blocks)} blocks from TransferQueue"
        if self._units is None:
            got = mooncake.get_blocks(self._client, partition, blocks)
            return self._result(got, what, deadline, reads=True)
        frames: list[Frames] = []
        for first, last in call_bounds([block.nbytes for block in blocks]):
            frames += self._units.get(blocks[first:last], rows[first:last], what, deadline)
        return frames

    def drop(self, partition: str, keys: list[str], deadline: Deadline) -> None:
        """Remove blocks; those that are not there are ignored.

        Once a process is known to be lost, nothing is done: that error has been told, and the blocks end with the
        store.
        """
        if not self._has_lost:
            what = f"dropping {len(keys)} blocks from TransferQueue"
            self._result(self._drop(partition, keys), what, deadline)

    def drop_later(self, partition: str, keys: list[str], limit_s: float, then: Callable[[], None]) -> None:
        """Try to remove blocks, without waiting and without an error; `then` is called if that succeeds."""

        async def attempt() -> None:
            try:
                await asyncio.wait_for(self._drop(partition, keys), limit_s)
                then()
            except (TransportError, *_FAULTS) as error:
                _log.warning("%d blocks of %s are left in TransferQueue: %s", len(keys), partition, error)

        if self._client is not None and not self._has_lost:
            asyncio.run_coroutine_threadsafe(attempt(), self._loop)

    async def _drop(self, partition: str, keys: list[str]) -> None:
        for first, last in call_bounds([0] * len(keys)):
            known = await self._open().async_kv_retrieve_meta(keys[first:last], partition, create=False)
            if known.size:
                # Of our own making, since TransferQueue's lists no field of which a notice was lost.
                meta = mooncake.batch_meta(partition, list(known.global_indexes), [0] * known.size)
                await self._open().async_clear_samples(meta)

    def drop_partition(self, partition: str, deadline: Deadline) -> None:
        """Remove a partition with all its blocks."""

        async def attempt() -> None:
            if partition in await self._open().async_get_partition_list():
                await self._open().async_clear_partition(partition)

        self._result(attempt(), f"dropping partition '{partition}' from TransferQueue", deadline)

    def keys(self, partition: str, deadline: Deadline) -> list[str]:
        listing = self._open().async_kv_list(partition)
        return list(self._result(listing, "listing TransferQueue's blocks", deadline).get(partition, {}))

    def close(self) -> None:
        """Disconnect; may be called twice."""
        client, self._client = self._client, None
        if client is not None:
            client.close()
            if self._units is not None:
                self._units.close()

    def _open(self) -> TransferQueueClient:
        if self._client is None:
            raise TransportError("the connection to TransferQueue is closed")
        return self._client

    def _result(
        self, work: Coroutine[Any, Any, T], what: str, deadline: Deadline, *, reads: bool = False
    ) -> T:
        """Return what the event loop makes of `work`; a read does not need the controller."""
        parts = self._unit_parts if reads else self._parts
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            wait_for(lambda s: futures.wait([future], s).done, parts, what, deadline)
            return future.result()
        except _FAULTS as error:
            check_parts(parts, what, ask=True)
            raise TransportError(f"{what}: {type(error).__name__}: {error}") from error
        finally:
            future.cancel()


@dataclass
class Link:
    """A process's connections to an engine: to its blocks, and to its index; and how many clients here use them."""

    blocks: Blocks
    index: IndexClient
    users: int = 0

    @classmethod
    def of(cls, connection: cluster.Connection, index: Any, deadline: Deadline) -> Self:
        if connection.backend == "mooncake_cpu":
            mooncake.prepare_process(ray.util.get_node_ip_address())
        with ExitStack() as undo:
            blocks = Blocks(connection, deadline)
            undo.callback(blocks.close)
            asks = IndexClient(connection.index, [Part("the index of the store", index)], deadline)
            undo.pop_all()
        return cls(blocks, asks)

    def drop_ended(self, handles: Sequence[str], what: str, deadline: Deadline) -> None:
        """Drop the blocks of stores that are closed."""
        for handle in handles:
            self.blocks.drop_partition(f"headrace/{handle}", deadline)
            self.index.ask("forget", handle, what=what, deadline=deadline)

    def close(self) -> None:
        self.index.close()
        self.blocks.close()


_links_lock = threading.Lock()
_links: dict[str, Link] = {}
"""One per engine."""


@contextlib.contextmanager
def _linked(index: Any, deadline: Deadline) -> Iterator[Link]:
    """Connect to the engine of an index actor, once for all clients of this process, until the block ends."""
    connection = cluster.wait_for_connection(index, deadline)
    engine = connection.engine_id
    with _links_lock:
        link = _links[engine] = _links.get(engine) or Link.of(connection, index, deadline)
        link.users += 1
    try:
        yield link
    finally:
        with _links_lock:
            link.users -= 1
            unused = None if link.users else _links.pop(engine)
        if unused is not None:
            unused.close()


@contextlib.contextmanager
def _engines(config: DataPlaneConfig) -> Iterator[dict[str, Link]]:
    """Connect to the engines that a cluster has, by backend, until the block ends."""
    deadline = Deadline(config.startup_timeout_s, cluster.STARTUP_KNOB)
    with ExitStack() as undo:
        if connect(config.ray_address, knob=_ADDRESS_KNOB, may_start=False).connects:
            undo.callback(ray.shutdown)
        found = {backend: cluster.find_index(backend) for backend in cluster.BACKENDS}
        yield {
            b: undo.enter_context(_linked(index, deadline)) for b, index in found.items() if index is not None
        }


def list_stores(config: DataPlaneConfig) -> dict[str, list[StoreFacts]]:
    """Return the stores that are open on a Ray cluster, by backend."""
    what, deadline = "listing stores", Deadline(config.timeout_s, _KNOB)
    with _engines(config) as links:
        asked = {b: link.index.ask("list_stores", what=what, deadline=deadline) for b, link in links.items()}
    return {backend: done.answer for backend, done in asked.items()}


def drop_store(config: DataPlaneConfig, name: str, force: bool) -> None:
    """Close the store of a name on each engine of a cluster, and free what it holds."""
    what, deadline = f"dropping store '{name}'", Deadline(config.timeout_s, _KNOB)
    with _engines(config) as links:
        ended: list[str] = []
        for link in links.values():
            mine = link.index.ask("drop_store", name, force, what=what, deadline=deadline).answer
            link.drop_ended(mine, what, deadline)
            ended += mine
    if not ended:
        known = [store.name for stores in list_stores(config).values() for store in stores]
        raise DataPlaneError(f"this Ray cluster has no store '{name}'; it has: {shown(known) or 'none'}")


class TransferQueueDataPlaneClient(StoreClient):
    """A client of a store whose bulk lies in TransferQueue.

    Every call ends within `timeout_s` of the config (a blocking claim: plus its own), with a TransportError
    that names the operation if the store did not answer. Results are on the CPU and share no memory with
    anything else.
    """

    def __init__(self, config: DataPlaneConfig, *, bootstrap: bool) -> None:
        """Start or join the cluster's engine and open the store (`bootstrap`), or attach to it.

        Raises:
            TransportError: no cluster, or no answer within `startup_timeout_s`.
            DataPlaneError: bootstrap: the store is open already; attach: there is none.
            ConfigError: a backend that is not installed.
        """
        self._config = config
        self._deadline = partial(Deadline, config.timeout_s, _KNOB)
        self._store, self._owns_store = "", False
        # Tickets of blocks that are to be dropped here, and of those that are.
        self._in_hand: set[int] = set()
        self._dropped: list[int] = []
        self._link: Link | None = None
        self._prefix, self._puts = uuid.uuid4().hex[:12], itertools.count()
        self._engine: cluster.Engine | None = None
        self._undo = ExitStack()
        with ExitStack() as undo:
            undo.callback(self.close)
            if connect(config.ray_address, knob=_ADDRESS_KNOB, may_start=bootstrap).connects:
                self._undo.callback(ray.shutdown)
            self._connect(bootstrap)
            undo.pop_all()
        if bootstrap:
            atexit.register(self.close)

    def _connect(self, bootstrap: bool) -> None:
        config, deadline = self._config, Deadline(self._config.startup_timeout_s, cluster.STARTUP_KNOB)
        index = cluster.find_index(config.backend)
        if index is None and bootstrap:
            index, self._engine = cluster.start_engine(config)
            if self._engine is not None:
                self._undo.callback(self._engine.stop)
        if index is None:
            raise DataPlaneError(
                "this Ray cluster has no store to attach to; the driver starts one first with "
                "build_data_plane_client(cfg, bootstrap=True)"
            )
        link = self._undo.enter_context(_linked(index, deadline))
        if not bootstrap:
            what = f"attaching to store '{config.store_name}'"
            self._store = link.index.ask("attach", config.store_name, what=what, deadline=deadline).answer
        else:
            what = f"opening store '{config.store_name}'"
            holder = f"process {os.getpid()} on {ray.util.get_node_ip_address()}"
            asked = (link.index.owner, config.store_name, config.storage_capacity, holder)
            opened = link.index.ask("open_store", *asked, what=what, deadline=deadline)
            self._store, ended = opened.answer
            self._owns_store = True
            link.drop_ended(ended, what, deadline)
        self._partition, self._link = f"headrace/{self._store}", link

    def _await(self, operation: str, *arguments: object, wait_s: float) -> Any:
        wait = Deadline(wait_s, "timeout_s")
        while True:
            hold_s = min(wait.left, _HOLD_S) if wait_s > 0 else 0.0
            deadline = Deadline(hold_s + self._config.timeout_s, _KNOB)
            answer = self._ask(operation, *arguments, 0.0, deadline=deadline, wait_s=hold_s)
            if answer or wait.is_over():
                return answer

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
        """Write columns and tags of rows.

        Raises:
            TransportError: the store did not answer in time; then none of the rows were written, unless the
                message says that the commit itself went unanswered.
        """
        link = self._open()
        (put, chunks), deadline = checked_put(sample_ids, partition_id, fields, tags), self._deadline()
        key = f"{self._prefix}.{next(self._puts)}"
        packed = pack(chunks if put.ids else {}, key, gives_rows=link.blocks.gives_rows)
        told = put._replace(tags=wire_tags(put.tags), claim=claim, producer=producer, once=once)
        asked = (link.index.owner, told, packed.columns, deadline.left + _LEASE_MARGIN_S)
        ticket = self._ask("begin_put", *asked, deadline=deadline)
        facts = None if ticket is None else self._commit(ticket, packed, deadline)
        facts = facts._replace(sample_ids=put.ids) if facts else RowFacts([], [], None)
        return facts.meta(partition_id, "", list(chunks))

    def _commit(self, ticket: int, packed: PackedColumns, deadline: Deadline) -> RowFacts | None:
        """Store the blocks of a put that has begun, and return what the index says of its rows."""
        blocks = self._open().blocks
        is_stored = False
        try:
            slots = blocks.put(self._partition, packed, deadline) if packed.frames else []
            is_stored = True
            facts: RowFacts | None = self._ask("commit", ticket, slots, deadline=deadline)
            return facts
        except HeadraceError as error:
            if is_stored and isinstance(error, TransportError):
                # Nobody knows whether the index has the rows. If not, it frees the blocks when the lease runs out.
                raise TransportError(f"{error}. The rows may have been written") from error
            self._drop_later(Garbage(ticket, [block.key for block in packed.blocks]))
            raise

    def get_samples(
        self, sample_ids: Sequence[str], partition_id: str, select_fields: Sequence[str]
    ) -> TensorDict:
        """Read columns of rows, in the order asked, repeated ids included.

        Raises:
            TransportError: no answer in time, or blocks that are lost or are not what was put.
        """
        ids = texts("sample_ids", sample_ids)
        names = list(dict.fromkeys(texts("select_fields", select_fields)))
        link, deadline = self._open(), self._deadline()
        for attempt in range(_FETCH_ATTEMPTS):
            located: dict[str, Located] = self._ask("locate", partition_id, ids, names, deadline=deadline)
            reads = [BlockRead.of(*where, gives_rows=link.blocks.gives_rows) for where in located.values()]
            blocks = [block for read in reads for block in read.blocks]
            rows = [some for read in reads for some in read.rows]
            try:
                data = iter(link.blocks.get(self._partition, blocks, rows, deadline) if blocks else ())
                chunks = [read.gather(data) for read in reads]
                break
            except BlockError:
                if attempt + 1 == _FETCH_ATTEMPTS:
                    raise
        known: Known = []
        leaves = [chunk.leaf(known) for chunk in chunks]
        return wire_tensordict(dict(zip(located, leaves, strict=True)), len(ids))

    def close(self) -> None:
        """Disconnect from the store; the client that opened it drops it, and ends the processes that it started."""
        atexit.unregister(self.close)
        link, self._link = self._link, None
        with self._undo:
            if link is not None and ray.is_initialized():
                self._leave(link)

    def _leave(self, link: Link) -> None:
        """Close the store if it is this client's, else hand over what this client has not dropped yet."""
        what = f"closing store '{self._config.store_name}'"
        deadline = Deadline(min(self._config.timeout_s, 30.0), _KNOB)
        try:
            if self._owns_store:
                link.index.ask("close_store", self._store, what=what, deadline=deadline)
                if self._engine is None:
                    link.drop_ended([self._store], what, deadline)
            elif self._in_hand or self._dropped:
                ask = partial(link.index.ask, what=what, deadline=deadline, store=self._store)
                ask("give_back", list(self._in_hand), dropped=self._dropped)
        except DataPlaneError as error:
            # Whoever started the engine has ended it, and the data with it; or the store is closed.
            _log.info("%s: %s", what, error)

    def stored_blocks(self) -> int:
        """Return how many blocks TransferQueue holds for the store; for leak reports."""
        return len(self._open().blocks.keys(self._partition, self._deadline()))

    def _open(self) -> Link:
        if self._link is None:
            raise DataPlaneError("this client is closed; build a new one with build_data_plane_client")
        return self._link

    def _ask(
        self, operation: str, *arguments: object, deadline: Deadline | None = None, wait_s: float = 0.0
    ) -> Any:
        """Return what the store's index answers, and drop the blocks that it has done with."""
        link, deadline = self._open(), deadline or self._deadline()
        what = f"operation '{operation}' of store '{self._config.store_name}'"
        dropped, self._dropped = self._dropped, []
        ask = partial(link.index.ask, what=what, deadline=deadline, store=self._store)
        done = ask(operation, *arguments, dropped=dropped, wait_s=wait_s)
        garbage = done.garbage
        if garbage and operation == "clear":
            self._in_hand.add(garbage.ticket)
            link.blocks.drop(self._partition, garbage.keys, deadline)
            self._note_drop(garbage.ticket)
        elif garbage:
            self._drop_later(garbage)
        return done.answer

    def _drop_later(self, garbage: Garbage) -> None:
        self._in_hand.add(garbage.ticket)
        note = partial(self._note_drop, garbage.ticket)
        self._open().blocks.drop_later(self._partition, garbage.keys, self._config.timeout_s, note)

    def _note_drop(self, ticket: int) -> None:
        self._in_hand.discard(ticket)
        self._dropped.append(ticket)

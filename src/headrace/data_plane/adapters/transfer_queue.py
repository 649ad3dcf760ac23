"""The data plane over TransferQueue (backends simple and mooncake_cpu), for many processes.

It is blocks under keys in TransferQueue, and an index in one Ray actor. A put packs its columns into blocks
(`store/blocks.py`), announces them to the index, which is the truth about which rows there are, stores them in
TransferQueue, and commits them. A get asks the index where rows lie and fetches the blocks. Bulk goes from the producer
to the storage units and from there to the consumer.
"""

import atexit
import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import ray
from tensordict import TensorDict

from headrace.config import DataPlaneConfig
from headrace.data_plane.adapters import transfer_queue_cluster as cluster
from headrace.data_plane.adapters import transfer_queue_mooncake as mooncake
from headrace.data_plane.adapters.transfer_queue_ask import HOLD_S, KNOB, IndexAsker
from headrace.data_plane.adapters.transfer_queue_index import StoreFacts, operation_of
from headrace.data_plane.adapters.transfer_queue_several import LEASE_MARGIN_S, Several
from headrace.data_plane.adapters.transfer_queue_socket import (
    BACKENDS,
    Blocks,
    Connection,
    Garbage,
    IndexClient,
    wire_tags,
)
from headrace.data_plane.interfaces import KVBatchMeta
from headrace.data_plane.store.blocks import BlockError, BlockRead, pack
from headrace.data_plane.store.client import StoreClient
from headrace.data_plane.store.columns import Chunk, Known, Put, RowFacts, checked_put
from headrace.data_plane.store.merge import Located
from headrace.data_plane.wire import wire_tensordict
from headrace.distributed.ray_connection import Deadline, connect_until
from headrace.errors import DataPlaneError, HeadraceError, TransportError
from headrace.utils.arguments import shown, texts
from headrace.utils.forks import after_fork

_log = logging.getLogger(__name__)
# It warns at every call on a machine of fewer than 8 cores.
logging.getLogger("transfer_queue.utils.common").setLevel(logging.ERROR)

_ADDRESS_KNOB = "data_plane.ray_address"
# A fetch that loses against an overwrite or a clear looks the rows up again.
_FETCH_ATTEMPTS = 5


@dataclass
class Link:
    """A process's connections to an engine: to its blocks, and to its indexes; and how many clients here use them."""

    blocks: Blocks
    index: IndexClient
    """The first, which knows the stores."""
    indexes: list[IndexClient]
    users: int = 0

    @classmethod
    def of(cls, connection: Connection, deadline: Deadline) -> Self:
        if connection.backend == "mooncake_cpu":
            mooncake.prepare_process(ray.util.get_node_ip_address())
        with ExitStack() as undo:
            blocks, indexes = Blocks(connection, deadline), list[IndexClient]()
            undo.callback(blocks.close)
            for endpoint, part in zip(connection.indexes, connection.index_parts, strict=True):
                indexes.append(IndexClient(endpoint, [part], deadline, operation_of))
                undo.callback(indexes[-1].close)
            undo.pop_all()
        return cls(blocks, indexes[0], indexes)

    def drop_ended(self, handles: Sequence[str], what: str, deadline: Deadline) -> None:
        """Drop the blocks of stores that are closed."""
        for handle in handles:
            for index in self.indexes[1:]:
                index.ask("close_store", handle, what=what, deadline=deadline)
            self.blocks.drop_partition(f"headrace/{handle}", deadline)
            self.index.ask("forget", handle, what=what, deadline=deadline)

    def list_stores(self, deadline: Deadline) -> list[StoreFacts]:
        """Return what the first index knows of each store, with the rows and bytes of all."""
        first, *others = (
            index.ask("list_stores", what="listing stores", deadline=deadline).answer
            for index in self.indexes
        )
        return [
            store._replace(
                rows=store.rows
                + sum(one.rows for other in others for one in other if one.name == store.name),
                nbytes=store.nbytes
                + sum(one.nbytes for other in others for one in other if one.name == store.name),
            )
            for store in first
        ]

    def close(self) -> None:
        for index in self.indexes:
            index.close()
        self.blocks.close()


_links_lock = threading.Lock()
_links: dict[str, Link] = {}
"""One per engine."""


def _linked(undo: ExitStack, index: Any, deadline: Deadline) -> Link:
    """Connect to the engine of an index actor, once for all clients of this process, until `undo` ends."""
    connection = cluster.wait_for_connection(index, deadline)
    engine = connection.engine_id
    with _links_lock:
        link = _links[engine] = _links.get(engine) or Link.of(connection, deadline)
        link.users += 1
    undo.callback(_unlink, engine, link)
    return link


def _unlink(engine: str, link: Link) -> None:
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
        connect_until(undo, config.ray_address, knob=_ADDRESS_KNOB, may_start=False)
        found = {backend: cluster.find_index(backend) for backend in BACKENDS}
        yield {b: _linked(undo, index, deadline) for b, index in found.items() if index is not None}


def list_stores(config: DataPlaneConfig) -> dict[str, list[StoreFacts]]:
    """Return the stores that are open on a Ray cluster, by backend."""
    with _engines(config) as links:
        return {b: link.list_stores(Deadline(config.timeout_s, KNOB)) for b, link in links.items()}


def drop_store(config: DataPlaneConfig, name: str, force: bool) -> None:
    """Close the store of a name on each engine of a cluster, and free what it holds."""
    what, deadline = f"dropping store '{name}'", Deadline(config.timeout_s, KNOB)
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
        self._config, self._process = config, os.getpid()
        self._deadline = partial(Deadline, config.timeout_s, KNOB)
        self._store, self._owns_store = "", False
        # Tickets of blocks that are to be dropped here, with the number of their index, and by index of those that are.
        self._in_hand: set[tuple[int, int]] = set()
        self._dropped: list[list[int]] = [[]]
        self._link: Link | None = None
        self._several: Several | None = None
        self._engine: cluster.Engine | None = None
        self._undo = ExitStack()
        with ExitStack() as undo:
            undo.callback(self.close)
            connect_until(self._undo, config.ray_address, knob=_ADDRESS_KNOB, may_start=bootstrap)
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
        link = _linked(self._undo, index, deadline)
        if bootstrap:
            self._store, count = self._open_store(link, deadline), config.indexes
            self._owns_store = True
        else:
            what = f"attaching to store '{config.store_name}'"
            self._store, count = link.index.ask(
                "attach", config.store_name, what=what, deadline=deadline
            ).answer
        self._partition, self._link, self._dropped = (
            f"headrace/{self._store}",
            link,
            [[] for _ in range(count)],
        )
        if count > 1:
            told = (self._store, config.store_name, config.timeout_s, self._take_dropped, self._drop)
            self._several = Several(IndexAsker(link.indexes[:count], *told))

    def _open_store(self, link: Link, deadline: Deadline) -> str:
        """Open the store at as many indexes as are asked for, and return its handle."""
        config = self._config
        if config.indexes > len(link.indexes):
            raise DataPlaneError(
                f"data_plane.indexes={config.indexes}, and the stores of this cluster, which were started before, have "
                f"{len(link.indexes)}; ask for as many, or close those stores first"
            )
        what = f"opening store '{config.store_name}'"
        holder = f"process {os.getpid()} on {ray.util.get_node_ip_address()}"
        told = (config.store_name, config.storage_capacity, holder)
        asked = (link.index.owner, *told, config.indexes)
        opened: tuple[str, list[str]] = link.index.ask(
            "open_store", *asked, what=what, deadline=deadline
        ).answer
        handle, ended = opened
        link.drop_ended(ended, what, deadline)
        for index in link.indexes[1 : config.indexes]:
            index.ask("join_store", index.owner, *told, handle, what=what, deadline=deadline)
        return handle

    def _await(self, operation: str, *arguments: object, wait_s: float) -> Any:
        if self._several is not None:
            self._open()
            return getattr(self._several, operation)(*arguments, wait_s)
        wait = Deadline(wait_s, "timeout_s")
        while True:
            hold_s = min(wait.left, HOLD_S) if wait_s > 0 else 0.0
            deadline = Deadline(hold_s + self._config.timeout_s, KNOB)
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
        tells: bool = True,
    ) -> KVBatchMeta:
        """Write columns and tags of rows; unless it `tells`, the meta has no tags that the rows had before.

        Raises:
            TransportError: the store did not answer in time; then none of the rows were written, unless the
                message says that the commit itself went unanswered.
        """
        link = self._open()
        put, chunks = checked_put(sample_ids, partition_id, fields, tags, producer)
        deadline = self._deadline()
        told = put._replace(tags=wire_tags(put.tags), claim=claim, once=once, tells=tells)
        facts = self._put(link, told, chunks, deadline, put.tags)
        if facts is None:
            return RowFacts([], [], None).meta(partition_id, "", list(chunks))
        own_tags = facts.tags
        if own_tags == []:
            own_tags = [dict(tag) for tag in put.tags or ()] if any(put.tags or ()) else None
        return facts._replace(sample_ids=put.ids, tags=own_tags).meta(partition_id, "", list(chunks))

    def _put(
        self,
        link: Link,
        put: Put,
        chunks: dict[str, Chunk],
        deadline: Deadline,
        tags: Sequence[Mapping[str, Any]] | None,
    ) -> RowFacts | None:
        """Announce a put, store its blocks, and return what the index says of its rows; None: done before."""
        gives_rows = link.blocks.gives_rows
        if self._several is not None:
            store = partial(link.blocks.put, self._partition, deadline=deadline)
            return self._several.put(put, chunks, store, gives_rows=gives_rows, deadline=deadline, tags=tags)
        packed = pack(chunks if put.ids else {}, gives_rows=gives_rows)
        asked = (link.index.owner, put, packed.columns, deadline.left + LEASE_MARGIN_S)
        ticket = self._ask("begin_put", *asked, deadline=deadline)
        if ticket is None:
            return None
        is_stored = False
        try:
            slots = link.blocks.put(self._partition, packed, deadline) if packed.frames else []
            is_stored = True
            facts: RowFacts | None = self._ask("commit", ticket, slots, None, deadline=deadline)
            return facts
        except HeadraceError as error:
            if is_stored and isinstance(error, TransportError):
                # Nobody knows whether the index has the rows. If not, it frees the blocks when the lease runs out.
                raise TransportError(f"{error}. The rows may have been written") from error
            self._drop(0, "commit", Garbage(ticket, [block.number for block in packed.blocks]), deadline)
            raise

    def write_samples(
        self, sample_ids: Sequence[str], partition_id: str, fields: TensorDict, *, claim: str | None = None
    ) -> None:
        self.put_samples(sample_ids, partition_id, fields, claim=claim, tells=False)

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
            reads = [
                BlockRead.of(form, table, places, gives_rows=link.blocks.gives_rows)
                for form, table, places in located.values()
            ]
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
        if self._process != os.getpid():  # the connections, and the store, are of the process that was forked
            self._undo.pop_all()
            return
        with self._undo:
            if link is not None and ray.is_initialized():
                self._leave(link)

    def _leave(self, link: Link) -> None:
        """Close the store if it is this client's, else hand over what this client has not dropped yet."""
        what = f"closing store '{self._config.store_name}'"
        deadline = Deadline(min(self._config.timeout_s, 30.0), KNOB)
        try:
            if self._owns_store:
                link.index.ask("close_store", self._store, what=what, deadline=deadline)
                if self._engine is None:
                    link.drop_ended([self._store], what, deadline)
            else:
                self._give_back(link, what, deadline)
        except DataPlaneError as error:
            # Whoever started the engine has ended it, and the data with it; or the store is closed.
            _log.info("%s: %s", what, error)

    def _give_back(self, link: Link, what: str, deadline: Deadline) -> None:
        for number, dropped in enumerate(self._dropped):
            tickets = [ticket for index, ticket in self._in_hand if index == number]
            if tickets or dropped:
                ask = partial(link.indexes[number].ask, what=what, deadline=deadline, store=self._store)
                ask("give_back", tickets, dropped=dropped)

    def stored_blocks(self) -> int:
        """Return how many blocks TransferQueue holds for the store; for leak reports."""
        return len(self._open().blocks.keys(self._partition, self._deadline()))

    def _open(self) -> Link:
        if self._link is None:
            raise DataPlaneError("this client is closed; build a new one with build_data_plane_client")
        if self._process != os.getpid():
            raise after_fork(self._process)
        return self._link

    def _ask(
        self, operation: str, *arguments: object, deadline: Deadline | None = None, wait_s: float = 0.0
    ) -> Any:
        """Return what the store's index answers, and drop the blocks that it has done with."""
        link, deadline = self._open(), deadline or self._deadline()
        if self._several is not None:
            more = {"deadline": deadline} if operation == "locate" else {}
            return getattr(self._several, operation)(*arguments, **more)
        what = f"operation '{operation}' of store '{self._config.store_name}'"
        ask = partial(link.index.ask, what=what, deadline=deadline, store=self._store)
        dropped, self._dropped[0] = self._dropped[0], []
        done = ask(operation, *arguments, dropped=dropped, wait_s=wait_s)
        if done.garbage:
            self._drop(0, operation, done.garbage, deadline)
        return done.answer

    def _take_dropped(self, index: int) -> list[int]:
        dropped, self._dropped[index] = self._dropped[index], []
        return dropped

    def _drop(self, index: int, operation: str, garbage: Garbage, deadline: Deadline) -> None:
        """Drop blocks, after a clear at once, else while the caller goes on; the index is told with its next call."""
        blocks, ticket = self._open().blocks, (index, garbage.ticket)
        self._in_hand.add(ticket)
        if operation.startswith("clear"):
            blocks.drop(self._partition, garbage.numbers, deadline)
            self._note_drop(ticket)
        else:
            note = partial(self._note_drop, ticket)
            blocks.drop_later(self._partition, garbage.numbers, self._config.timeout_s, note)

    def _note_drop(self, ticket: tuple[int, int]) -> None:
        self._in_hand.discard(ticket)
        self._dropped[ticket[0]].append(ticket[1])

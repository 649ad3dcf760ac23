"""The data plane over TransferQueue (backends simple and mooncake_cpu), for many processes.

A put packs its columns into blocks (`store/blocks.py`), announces them to the index actor, which is the truth about
which rows there are, stores them in TransferQueue, and commits them. A get asks the index where rows lie and fetches
the blocks. Bulk goes from the producer to the storage units and from there to the consumer.
"""

import atexit
import itertools
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np
import ray
import torch
from tensordict import TensorDict

from headrace.config import DataPlaneConfig
from headrace.data_plane.adapters import transfer_queue_cluster as cluster
from headrace.data_plane.adapters.transfer_queue_channel import STARTUP_KNOB
from headrace.data_plane.adapters.transfer_queue_cluster import Deadline, queue_partition
from headrace.data_plane.adapters.transfer_queue_index import Garbage, Located
from headrace.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from headrace.data_plane.store.blocks import (
    MAX_BLOCK_BYTES,
    MIN_BLOCK_BYTES,
    BlockError,
    BlockInfo,
    PackedColumns,
    pack,
    unpack,
)
from headrace.data_plane.store.columns import (
    Chunk,
    Form,
    Known,
    Put,
    Rows,
    checked_put,
    chunk_of_bytes,
    read_rows,
)
from headrace.data_plane.store.partition import RowFacts
from headrace.data_plane.store.requests import ClaimRequest, Registration, waiting_time
from headrace.data_plane.wire import wire_tensordict
from headrace.errors import ClaimTimeout, DataPlaneError, HeadraceError, TransportError
from headrace.utils.arguments import texts

_log = logging.getLogger(__name__)

# A fetch that loses against an overwrite or a clear looks the rows up again.
_FETCH_ATTEMPTS = 5
# A put that has come to its time limit is given up by then on both sides.
_LEASE_MARGIN_S = 5.0


class TransferQueueDataPlaneClient(DataPlaneClient):
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
        self._is_closed = False
        self._owns_store = False
        self._store = ""
        # Tickets of blocks that are to be dropped here, and whether they are.
        self._in_hand: dict[int, bool] = {}
        self._engine: cluster.Engine | None = None
        self._link: cluster.Link | None = None
        self._prefix = uuid.uuid4().hex[:12]
        self._puts = itertools.count()
        self._owns_ray = cluster.connect_ray(config, may_start=bootstrap)
        with ExitStack() as undo:
            undo.callback(self.close)
            self._connect(bootstrap)
            undo.pop_all()
        if bootstrap:
            atexit.register(self.close)

    def _connect(self, bootstrap: bool) -> None:
        config, deadline = self._config, Deadline(self._config.startup_timeout_s, STARTUP_KNOB)
        index = cluster.find_index(config.backend)
        if index is None:
            if not bootstrap:
                raise DataPlaneError(
                    "this Ray cluster has no store to attach to; the driver starts one first with "
                    "build_data_plane_client(cfg, bootstrap=True)"
                )
            self._engine = cluster.start_engine(config)
            index = self._engine.index if self._engine else cluster.find_index(config.backend)
            if index is None:
                raise TransportError(
                    "the process that was starting this cluster's engine has given up; try again"
                )
        self._connection = cluster.wait_for_connection(index, deadline)
        self._link = cluster.shared_links.acquire(self._connection, index, deadline)
        if bootstrap:
            self._store, self._owns_store = self._link.open_store(config, deadline), True
        else:
            what, arguments = f"attaching to store '{config.store_name}'", (config.store_name,)
            self._store, _ = self._link.call("", "attach", arguments, what, deadline.left())

    @property
    def _queue_partition(self) -> str:
        return queue_partition(self._store)

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
        self._ask("register", Registration.of(*asked, group_tag=group_tag))

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
        """Take the next ready rows of a task; waits by polling."""
        request = ClaimRequest.of(partition_id, task_name, required_fields, batch_size, allow_partial)
        wait = Deadline(waiting_time(blocking, timeout_s))
        while (facts := self._ask("claim", request)) is None:
            if not blocking:
                return None
            if wait.is_over():
                raise ClaimTimeout(self._ask("claim_timeout", request))
            time.sleep(min(self._config.claim_meta_poll_interval_s, wait.left()))
        return facts.meta(partition_id, task_name, request.fields) if facts.sample_ids else None

    def get_data(self, meta: KVBatchMeta, select_fields: Sequence[str] | None = None) -> TensorDict:
        """Read the rows of `meta`."""
        names = select_fields if select_fields is not None else meta.fields
        if names is None:
            names = self._ask("shared_columns", meta.partition_id, meta.sample_ids)
        return self.get_samples(meta.sample_ids, meta.partition_id, names)

    def check_consumption_status(self, partition_id: str, task_names: Sequence[str]) -> bool:
        is_consumed: bool = self._ask("is_consumed", partition_id, texts("task_names", task_names))
        return is_consumed

    def put_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
    ) -> KVBatchMeta:
        """Write columns and tags of rows; a tag written twice keeps the last value, others stay.

        Raises:
            TransportError: the store did not answer in time; then none of the rows were written, unless the
                message says that the commit itself went unanswered.
        """
        self._open()
        put = checked_put(sample_ids, partition_id, fields, tags)
        size = MAX_BLOCK_BYTES if self._open().payloads.gives_rows else MIN_BLOCK_BYTES
        packed = pack(put.columns if put.ids else {}, f"{self._prefix}.{next(self._puts)}", size)
        deadline = Deadline(self._config.timeout_s)
        stored = Put(partition_id, put.ids, packed.columns, put.tags, put.lengths)
        facts = self._store_put(stored, packed, deadline)
        return facts._replace(sample_ids=put.ids).meta(partition_id, "", list(put.columns))

    def _store_put(self, put: Put[BlockInfo], packed: PackedColumns, deadline: Deadline) -> RowFacts:
        owner, limit_s = self._open().books.owner(), deadline.left() + _LEASE_MARGIN_S
        ticket: int = self._ask("begin_put", owner, put, limit_s, deadline=deadline)
        keys = [block.key for block in packed.blocks]
        try:
            slots = self._store_blocks(keys, packed, deadline)
        except TransportError:
            self._drop_later(Garbage(ticket, keys))
            raise
        try:
            facts: RowFacts = self._ask("commit", ticket, slots, deadline=deadline)
        except TransportError as error:
            # Nobody knows whether the index has the rows. If it has not, it frees the blocks when the lease runs out.
            raise TransportError(f"{error}. The rows may have been written") from error
        except HeadraceError:
            self._drop_later(Garbage(ticket, keys))
            raise
        return facts

    def _store_blocks(self, keys: Sequence[str], packed: PackedColumns, deadline: Deadline) -> list[int]:
        if not keys:
            return []
        payloads = self._open().payloads
        reserved = payloads.reserve(self._queue_partition, keys)
        return payloads.put(self._queue_partition, reserved, packed, deadline.left())

    def get_samples(
        self, sample_ids: Sequence[str], partition_id: str, select_fields: Sequence[str]
    ) -> TensorDict:
        """Read columns of rows, in the order asked, repeated ids included.

        Raises:
            TransportError: no answer in time, or blocks that are lost or are not what was put.
        """
        ids = texts("sample_ids", sample_ids)
        names = list(dict.fromkeys(texts("select_fields", select_fields)))
        deadline = Deadline(self._config.timeout_s)
        chunks = self._fetch(partition_id, ids, names, deadline)
        known: Known = []
        columns = {name: chunk.leaf(known) for name, chunk in chunks.items()}
        return wire_tensordict(columns, len(ids))

    def _fetch(
        self, partition_id: str, ids: list[str], names: list[str], deadline: Deadline
    ) -> dict[str, Chunk]:
        for attempt in range(_FETCH_ATTEMPTS):
            located: dict[str, Located] = self._ask("select", partition_id, ids, names, deadline=deadline)
            reads = {
                name: _Read.plan(where, self._open().payloads.gives_rows) for name, where in located.items()
            }
            try:
                blocks = self._fetch_blocks(list(reads.values()) if ids else [], deadline)
            except BlockError:
                if attempt + 1 == _FETCH_ATTEMPTS:
                    raise
                continue
            return {name: read.gather(blocks, len(ids)) for name, read in reads.items()}
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _fetch_blocks(self, reads: "Sequence[_Read]", deadline: Deadline) -> dict[str, Chunk]:
        blocks = [block for read in reads for block in read.blocks]
        rows = [some for read in reads for some in read.rows]
        if not blocks:
            return {}
        data = self._open().payloads.get(self._queue_partition, blocks, deadline.left(), rows)
        return {
            block.key: unpack(block, part, None if some is None else len(some))
            for block, part, some in zip(blocks, data, rows, strict=True)
        }

    def clear_samples(self, sample_ids: Sequence[str] | None, partition_id: str) -> None:
        """Remove rows, or with None the partition; ids that are not there are ignored.

        A block's bytes are freed when the last of its rows is gone.
        """
        self._ask("clear", partition_id, None if sample_ids is None else texts("sample_ids", sample_ids))

    def close(self) -> None:
        """Let go of the store; the client that opened it drops it, and ends the processes that it started."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._link is not None:
            if ray.is_initialized():
                self._let_go(self._link)
            cluster.shared_links.release(self._connection)
            self._link = None
        if self._engine is not None:
            self._engine.stop()
            self._engine = None
        atexit.unregister(self.close)
        if self._owns_ray:
            ray.shutdown()

    def _let_go(self, link: cluster.Link) -> None:
        """Close the store if it is this client's, else hand over what this client has not dropped yet."""
        what, deadline = (
            f"closing store '{self._config.store_name}'",
            Deadline(min(self._config.timeout_s, 30.0)),
        )
        try:
            if self._owns_store:
                link.call("", "close_store", (self._store,), what, deadline.left())
                if self._engine is None:
                    link.drop_ended([self._store], what, deadline)
            elif self._in_hand:
                dropped = [ticket for ticket, is_dropped in self._in_hand.items() if is_dropped]
                left = [ticket for ticket, is_dropped in self._in_hand.items() if not is_dropped]
                link.call(self._store, "give_back", (left,), what, deadline.left(), dropped)
        except DataPlaneError as error:
            # Whoever started the engine has ended it, and the data with it; or the store is closed.
            _log.info("%s: %s", what, error)

    def partition_ids(self) -> list[str]:
        return list(self._ask("sample_ids"))

    def sample_ids(self, partition_id: str) -> list[str]:
        by_partition: dict[str, list[str]] = self._ask("sample_ids")
        return by_partition.get(partition_id, [])

    def stored_bytes(self, partition_id: str | None = None) -> int:
        by_partition: dict[str, int] = self._ask("stored_bytes")
        return sum(by_partition.values()) if partition_id is None else by_partition.get(partition_id, 0)

    # Beyond the contract.

    def stored_blocks(self) -> int:
        """Return how many blocks TransferQueue holds for the store; for leak reports."""
        return len(self._open().payloads.keys(self._queue_partition, self._config.timeout_s))

    def _open(self) -> cluster.Link:
        if self._is_closed or self._link is None:
            raise DataPlaneError("this client is closed; build a new one with build_data_plane_client")
        return self._link

    def _ask(self, operation: str, *arguments: object, deadline: Deadline | None = None) -> Any:
        """Return what the store's index answers, and drop the blocks that it has done with."""
        link = self._open()
        deadline = deadline or Deadline(self._config.timeout_s)
        what = f"operation '{operation}' of store '{self._config.store_name}'"
        dropped = [ticket for ticket, is_dropped in list(self._in_hand.items()) if is_dropped]
        for ticket in dropped:
            self._in_hand.pop(ticket, None)
        result, garbage = link.call(self._store, operation, arguments, what, deadline.left(), dropped)
        if garbage and operation == "clear":
            self._in_hand[garbage.ticket] = False
            link.payloads.drop(self._queue_partition, garbage.keys, deadline.left())
            self._in_hand[garbage.ticket] = True
        elif garbage:
            self._drop_later(garbage)
        return result

    def _drop_later(self, garbage: Garbage) -> None:
        def note() -> None:
            self._in_hand[garbage.ticket] = True

        self._in_hand[garbage.ticket] = False
        self._open().payloads.drop_later(self._queue_partition, garbage.keys, self._config.timeout_s, note)


class _Read(NamedTuple):
    """How to read rows of a column: of each block all rows, or some; None in `places`: all, in order.

    Row i of the result is row `places[1][i]` of what comes of block `places[0][i]`.
    """

    form: Form
    blocks: list[BlockInfo]
    rows: list[Rows | None]
    places: tuple[Rows, Rows] | None

    @classmethod
    def plan(cls, where: Located, gives_rows: bool) -> Self:
        """Ask for single rows of a block if they are at most half of it, and the store can give them."""
        rows: list[Rows | None] = [None] * len(where.blocks)
        if where.places is None:
            return cls(where.form, where.blocks, rows, None)
        block_of, row_of = (numbers.astype(np.int64) for numbers in where.places)
        if gives_rows:
            order = np.argsort(block_of, kind="stable")
            ends = np.cumsum(np.bincount(block_of, minlength=len(rows))).tolist()
            for number, (start, end) in enumerate(pairwise([0, *ends])):
                if 2 * (end - start) <= where.blocks[number].rows:
                    mine = order[start:end]
                    rows[number], row_of[mine] = row_of[mine], np.arange(end - start)
        return cls(where.form, where.blocks, rows, (block_of, row_of))

    def gather(self, blocks: Mapping[str, Chunk], count: int) -> Chunk:
        """Return the `count` rows out of the blocks that came, in fresh memory."""
        if not count:
            return chunk_of_bytes(self.form, 0, torch.empty(0, dtype=torch.uint8), None)
        return read_rows([blocks[block.key] for block in self.blocks], self.places)

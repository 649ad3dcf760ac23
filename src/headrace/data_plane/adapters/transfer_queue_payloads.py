"""Blocks of bytes in TransferQueue: put, fetch, drop, each within a time limit and checked.

TransferQueue's calls have no time-out of their own, drop missing keys silently, and report a put as done
whose notice to the controller was lost. So every call of its client runs on one event loop of this process and is
given up after a time, or when Ray says who died; a fetch checks that all blocks came. Its simple storage units are
asked directly (`transfer_queue_units`); elsewhere a block is one flat uint8 row of one field, which no backend
reshapes or casts.
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import zmq
from tensordict import TensorDict
from transfer_queue.client import AsyncTransferQueueClient
from transfer_queue.metadata import BatchMeta

from headrace.data_plane.adapters.transfer_queue_channel import KNOB, PATIENCE_S, STARTUP_KNOB, Endpoint
from headrace.data_plane.adapters.transfer_queue_units import FIELD, StorageUnits
from headrace.data_plane.store.blocks import BlockError, BlockInfo, Frames, PackedColumns
from headrace.data_plane.store.columns import Rows
from headrace.distributed.ragged import nested_from_ragged, ragged_from_nested
from headrace.errors import TransportError

T = TypeVar("T")

_log = logging.getLogger(__name__)
# It warns at every call on a machine of fewer than 8 cores.
logging.getLogger("transfer_queue.utils.common").setLevel(logging.ERROR)

_SIMPLE = "SimpleStorage"
_BYTES_PER_CALL = 256 * 1024 * 1024
_KEYS_PER_CALL = 4096
_CLOSE_TIMEOUT_S = 10.0
# What a TransferQueue call may raise; lost blocks are told apart before.
_FAULTS = (RuntimeError, ValueError, KeyError, TypeError, AssertionError, OSError, zmq.ZMQError)


class Part(NamedTuple):
    """A process of the store: what a message calls it, and its name as a Ray actor."""

    label: str
    actor: str


@dataclass(frozen=True)
class Connection:
    """How a process reaches TransferQueue and the index, and which processes they are; picklable."""

    engine_id: str
    backend: str
    controller: Any
    storage: dict[str, Any]
    index: Endpoint
    controller_part: Part
    unit_parts: tuple[Part, ...]


class PayloadClient:
    """A process's connection to TransferQueue.

    While an answer is missing, `find_lost` is asked which of the processes in question is gone, if any. The
    operation then ends with an error that names it, and so does every later one that needs it.
    """

    def __init__(
        self,
        connection: Connection,
        timeout_s: float,
        find_lost: Callable[[Sequence[Part]], Part | None],
    ) -> None:
        """Connect.

        Raises:
            TransportError: no answer within `timeout_s`, or a process is gone.
        """
        self._find_lost = find_lost
        self._lost: set[Part] = set()
        self._unit_parts = connection.unit_parts
        self._parts = (connection.controller_part, *connection.unit_parts)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, daemon=True, name="headrace-transfer-queue")
        self._thread.start()
        self._client: AsyncTransferQueueClient | None = None
        self._units = StorageUnits(connection.storage["zmq_info"]) if connection.backend == _SIMPLE else None
        self._is_closed = False
        try:
            what, connecting = "connecting to TransferQueue", self._connect(connection)
            self._client = self._call(what, timeout_s, connecting, knob=STARTUP_KNOB)
        finally:
            if self._client is None:
                self.close()

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    async def _connect(self, connection: Connection) -> AsyncTransferQueueClient:
        client = AsyncTransferQueueClient(
            f"headrace_{os.getpid()}_{id(self):x}", connection.controller, zmq_io_threads=1
        )
        # The handshake blocks, so it gets a thread.
        await asyncio.get_running_loop().run_in_executor(
            None, client.initialize_storage_manager, connection.backend, dict(connection.storage)
        )
        return client

    @property
    def gives_rows(self) -> bool:
        """Whether `get` can give some rows of a block."""
        return self._units is not None

    def reserve(self, partition: str, keys: Sequence[str]) -> "Future[list[int]]":
        """Begin to make room for blocks; the result, their slots, is for `put`."""
        return asyncio.run_coroutine_threadsafe(self._reserve(partition, keys), self._loop)

    async def _reserve(self, partition: str, keys: Sequence[str]) -> list[int]:
        slots: list[int] = []
        for first in range(0, len(keys), _KEYS_PER_CALL):
            names = list(keys[first : first + _KEYS_PER_CALL])
            meta = await self._open().async_kv_retrieve_meta(names, partition, create=True)
            if meta.size != len(names):
                raise BlockError(f"TransferQueue made room for {meta.size} of {len(names)} blocks")
            slots.extend(meta.global_indexes)
        return slots

    def put(
        self, partition: str, reserved: "Future[list[int]]", packed: PackedColumns, limit_s: float
    ) -> list[int]:
        """Store all blocks, in the order of `packed.blocks`, in the slots that `reserve` has got; return the slots.

        Raises:
            TransportError: not done within `limit_s`, or refused; some blocks may be stored.
        """
        what = f"putting {len(packed.frames)} blocks ({packed.nbytes} bytes) into TransferQueue"
        deadline = time.monotonic() + limit_s
        slots = self._result(reserved, what, limit_s)
        if self._units is None:
            self._call(what, deadline - time.monotonic(), self._put(partition, slots, packed))
            return slots
        with self._faults(what, limit_s, self._unit_parts) as ask_after:
            for first, last in _runs([block.nbytes for block in packed.blocks]):
                self._units.put(slots[first:last], packed.frames[first:last], deadline, ask_after)
        return slots

    async def _put(self, partition: str, slots: list[int], packed: PackedColumns) -> None:
        sizes, bounds, buffer = [block.flat_bytes for block in packed.blocks], packed.bounds, packed.buffer
        for first, last in _runs(sizes):
            offsets = torch.tensor(bounds[first : last + 1]) - bounds[first]
            rows = nested_from_ragged(buffer[bounds[first] : bounds[last]], offsets, 1)
            # `async_put` would add a request for tags, which are in the index.
            fields = TensorDict({FIELD: rows}, batch_size=[last - first])
            meta = _meta(partition, slots[first:last], sizes[first:last])
            await self._open().storage_manager.put_data(fields, meta)

    def get(
        self,
        partition: str,
        blocks: Sequence[BlockInfo],
        limit_s: float,
        rows: Sequence[Rows | None] | None = None,
    ) -> Sequence[torch.Tensor | Frames]:
        """Return the bytes of blocks, in order; of some, if it `gives_rows`, only `rows`.

        Raises:
            BlockError: TransferQueue does not have all of them.
            TransportError: no answer within `limit_s`, or a failure.
        """
        what = f"fetching {len(blocks)} blocks from TransferQueue"
        if self._units is None:
            return self._call(what, limit_s, self._get(partition, blocks), self._unit_parts)
        wanted = [None] * len(blocks) if rows is None else list(rows)
        deadline, got = time.monotonic() + limit_s, list[Frames]()
        with self._faults(what, limit_s, self._unit_parts) as ask_after:
            for first, last in _runs([block.nbytes for block in blocks]):
                got += self._units.get(blocks[first:last], wanted[first:last], deadline, ask_after)
        return got

    async def _get(self, partition: str, blocks: Sequence[BlockInfo]) -> list[torch.Tensor]:
        rows: list[torch.Tensor] = []
        for first, last in _runs([block.flat_bytes for block in blocks]):
            part = blocks[first:last]
            meta = _meta(partition, [block.slot for block in part], [block.flat_bytes for block in part])
            try:
                fields = await self._open().async_get_data(meta)
            except KeyError as error:
                raise BlockError(f"blocks are not in TransferQueue (any more): {error}") from error
            got = _rows(fields.get(FIELD))
            if len(got) != len(part):
                raise BlockError(f"TransferQueue gave {len(got)} of {len(part)} blocks")
            rows.extend(got)
        return rows

    def drop(self, partition: str, keys: Sequence[str], limit_s: float) -> None:
        """Remove blocks; those that are not there are ignored.

        Once a process is known to be lost, nothing is done: that error has been told, and the blocks end with the
        store.
        """
        if not self._lost:
            self._call(
                f"dropping {len(keys)} blocks from TransferQueue", limit_s, self._drop(partition, keys)
            )

    def drop_later(
        self, partition: str, keys: Sequence[str], limit_s: float, then: Callable[[], None]
    ) -> None:
        """Try to remove blocks, without waiting and without an error; `then` is called if that succeeds."""

        async def attempt() -> None:
            try:
                await asyncio.wait_for(self._drop(partition, keys), limit_s)
                then()
            except (TransportError, *_FAULTS) as error:
                _log.warning("%d blocks of %s are left in TransferQueue: %s", len(keys), partition, error)

        if not self._is_closed and not self._lost:
            asyncio.run_coroutine_threadsafe(attempt(), self._loop)

    async def _drop(self, partition: str, keys: Sequence[str]) -> None:
        for first in range(0, len(keys), _KEYS_PER_CALL):
            names = list(keys[first : first + _KEYS_PER_CALL])
            known = await self._open().async_kv_retrieve_meta(names, partition, create=False)
            if known.size:
                # Of our own making, since TransferQueue's lists no field of which a notice was lost.
                slots = list(known.global_indexes)
                await self._open().async_clear_samples(_meta(partition, slots, [0] * len(slots)))

    def drop_partition(self, partition: str, limit_s: float) -> None:
        """Remove a partition with all its blocks."""
        self._call(
            f"dropping partition '{partition}' from TransferQueue",
            limit_s,
            self._drop_partition(partition),
        )

    async def _drop_partition(self, partition: str) -> None:
        if partition in await self._open().async_get_partition_list():
            await self._open().async_clear_partition(partition)

    def keys(self, partition: str, limit_s: float) -> list[str]:
        listing = self._call("listing TransferQueue's blocks", limit_s, self._open().async_kv_list(partition))
        return list(listing.get(partition, {}))

    def close(self) -> None:
        """Disconnect; may be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._units is not None:
            self._units.close()
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(*_FAULTS, FutureTimeoutError):
                asyncio.run_coroutine_threadsafe(_in_loop(client.close), self._loop).result(_CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _open(self) -> AsyncTransferQueueClient:
        if self._client is None:
            raise TransportError("the connection to TransferQueue is closed")
        return self._client

    def _call(
        self,
        what: str,
        limit_s: float,
        work: Coroutine[Any, Any, T],
        parts: Sequence[Part] | None = None,
        knob: str = KNOB,
    ) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        return self._result(future, what, limit_s, parts, knob)

    def _result(
        self,
        future: "Future[T]",
        what: str,
        limit_s: float,
        parts: Sequence[Part] | None = None,
        knob: str = KNOB,
    ) -> T:
        """Return a result that needs `parts` (None: all of them)."""
        end = time.monotonic() + limit_s
        parts = self._parts if parts is None else parts
        try:
            with self._faults(what, limit_s, parts, knob) as ask_after:
                while (left := end - time.monotonic()) > PATIENCE_S and not future.done():
                    with contextlib.suppress(FutureTimeoutError):
                        return future.result(PATIENCE_S)
                    if not future.done():
                        ask_after()
                return future.result(max(0.0, left))
        finally:
            future.cancel()

    @contextlib.contextmanager
    def _faults(
        self, what: str, limit_s: float, parts: Sequence[Part], knob: str = KNOB
    ) -> Iterator[Callable[[], None]]:
        """Turn what goes wrong into a TransportError that names the operation, and the part that is lost.

        Gives a function that raises this error if a part is lost.
        """
        ask_after = partial(self._ask_after, what, parts)
        self._raise_lost(what, self._lost.intersection(parts))
        try:
            yield ask_after
        except (FutureTimeoutError, TimeoutError, asyncio.CancelledError) as error:
            ask_after()
            raise TransportError(
                f"{what}: no answer within {limit_s:.3g} s, and Ray knows of no process that died; if the cluster is "
                f"only slow, raise {knob}"
            ) from error
        except _FAULTS as error:
            ask_after()
            raise TransportError(f"{what}: {type(error).__name__}: {error}") from error

    def _ask_after(self, what: str, parts: Sequence[Part]) -> None:
        """Raise TransportError if one of `parts` is gone."""
        found = self._find_lost(parts)
        if found is not None:
            self._lost.add(found)
            self._raise_lost(what, {found})

    def _raise_lost(self, what: str, lost: set[Part]) -> None:
        for part in lost:
            raise TransportError(
                f"{what}: {part.label} has died. What only it held is lost: end the run and start it again, it goes "
                "on from its newest checkpoint"
            )


def _meta(partition: str, slots: list[int], sizes: list[int]) -> BatchMeta:
    """Return what TransferQueue needs to find blocks, without asking its controller."""
    schema = {
        "dtype": torch.uint8,
        "shape": None,
        "is_nested": True,
        "is_non_tensor": False,
        "per_sample_shapes": [(size,) for size in sizes],
    }
    count = len(slots)
    return BatchMeta(
        global_indexes=slots,
        partition_ids=[partition] * count,
        field_schema={FIELD: schema},
        production_status=np.ones(count, dtype=np.int8),
        custom_meta=[{} for _ in slots],
        _custom_backend_meta=[{} for _ in slots],
    )


async def _in_loop(call: Callable[[], None]) -> None:
    call()


def _runs(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Cut blocks into runs of bounded size: (first, past last)."""
    runs, first, held = [], 0, 0
    for last, size in enumerate(sizes):
        if last > first and (last - first == _KEYS_PER_CALL or held + size > _BYTES_PER_CALL):
            runs.append((first, last))
            first, held = last, 0
        held += size
    return [*runs, (first, len(sizes))] if sizes else runs


def _rows(leaf: Any) -> list[torch.Tensor]:
    if not isinstance(leaf, torch.Tensor):
        return [item for item in leaf if isinstance(item, torch.Tensor)] if leaf is not None else []
    if leaf.is_nested:
        values, offsets, _ = ragged_from_nested(leaf)
        return list(torch.split(values, offsets.diff().tolist()))
    return [row.contiguous() for row in leaf.unbind()]

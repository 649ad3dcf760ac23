"""The sockets of a client of a TransferQueue store: to its index, and to the simple storage units; and its messages.

Messages to the index are msgspec structs; a call names a method, whose annotations are the types of its arguments and
answer. Nothing is unpickled, and a message that is not signed with a secret, which Ray has carried, is not read.
"""

import asyncio
import hmac
import logging
import math
import os
import threading
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent import futures
from concurrent.futures import CancelledError
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch
import zmq
from transfer_queue.client import TransferQueueClient
from transfer_queue.storage.simple_storage import KEY_NOT_FOUND_MARKER
from transfer_queue.utils.enum_utils import Role
from transfer_queue.utils.zmq_utils import (
    STORAGE_MANAGER_IDENTITY_PREFIX,
    ZMQMessage,
    ZMQRequestType,
    ZMQServerInfo,
    ZMQSocketPool,
    create_zmq_socket,
    format_zmq_address,
)

from headrace import errors
from headrace.data_plane.adapters import transfer_queue_mooncake as mooncake
from headrace.data_plane.adapters.transfer_queue_mooncake import FIELD
from headrace.data_plane.object_codec import SCALARS, from_ext, to_wire
from headrace.data_plane.store.blocks import (
    BLOCK_FACTS,
    BlockError,
    BlockInfo,
    Frames,
    PackedColumns,
    call_bounds,
)
from headrace.data_plane.store.columns import Rows
from headrace.distributed.ray_connection import Deadline, Part, check_parts, wait_for
from headrace.errors import DataPlaneError, HeadraceError, SchemaError, TransportError

_SOCKET = "index"
_UNIT_CLIENT = f"{STORAGE_MANAGER_IDENTITY_PREFIX}headrace"
# The msgpack extensions of an array of one dimension, its dtype in 4 bytes, then its elements; and of a `BlockTable`.
_EXT_NUMBERS, _EXT_BLOCKS = 16, 17

_log = logging.getLogger(__name__)

BACKENDS = {"simple": "SimpleStorage", "mooncake_cpu": "MooncakeStore"}

Answer = TypeVar("Answer")
T = TypeVar("T")


class Garbage(NamedTuple):
    """Blocks for the caller to drop from TransferQueue, and the ticket that says so."""

    ticket: int
    numbers: list[int]


class Call(msgspec.Struct, frozen=True, array_like=True):
    """A call of a client's process to its `store`, or, without one, to all stores of the engine.

    `dropped` are tickets of garbage that is gone from TransferQueue. `wait_s`: see `IndexClient.ask`.
    """

    owner: bytes
    store: str
    operation: str
    arguments: msgspec.Raw
    dropped: list[int] = []
    wait_s: float = 0.0


class Done(msgspec.Struct, Generic[Answer], frozen=True, array_like=True, tag=True):
    """What a call returns, and garbage for the caller to drop."""

    answer: Answer
    garbage: Garbage | None = None


class Elsewhere(DataPlaneError):
    """Rows that another index of the store has, by how their partition is registered now."""


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The error that a call ends with: the name of its class in `headrace.errors`, and its text."""

    kind: str
    text: str

    def error(self) -> HeadraceError:
        error: HeadraceError = getattr(errors, self.kind, Elsewhere)(self.text)
        return error


class Operation(NamedTuple):
    """How to read what a method is given, and what comes of it."""

    arguments: msgspec.msgpack.Decoder[Any]
    reply: msgspec.msgpack.Decoder[Any]


class UnsignedMessage(TransportError):
    """A message that is not signed with the secret of its store."""


def sealed(secret: bytes, message: Call | Done[Any] | Failed) -> list[bytes]:
    body = encoder.encode(message)
    return [hmac.digest(secret, body, "sha256"), body]


def opened(secret: bytes, frames: Sequence[bytes], decoder: msgspec.msgpack.Decoder[Any]) -> Any:
    """Return the message in signed frames; raises UnsignedMessage."""
    if len(frames) != 2 or not hmac.compare_digest(frames[0], hmac.digest(secret, frames[1], "sha256")):
        raise UnsignedMessage("a message that is not signed with the secret of this store")
    return decoder.decode(frames[1])


def wire_tags(tags: Sequence[Mapping[str, Any]] | None) -> Any:
    """Return tags as messages carry them: what msgpack has no form for, tuples and tensors, as its extensions."""
    if tags is None or {type(value) for tag in tags for value in tag.values()} <= SCALARS:
        return tags
    return [to_wire(tag) for tag in tags]


def _to_wire(value: object) -> object:
    if isinstance(value, np.ndarray) and value.dtype == BLOCK_FACTS:
        return msgspec.msgpack.Ext(_EXT_BLOCKS, value.tobytes())
    if isinstance(value, np.ndarray) and value.ndim == 1:
        return msgspec.msgpack.Ext(_EXT_NUMBERS, value.dtype.str.encode().ljust(4) + value.tobytes())
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    raise SchemaError(f"a value of type {type(value).__qualname__} cannot be sent to the index of a store")


def _from_ext(code: int, data: memoryview) -> object:
    if code == _EXT_NUMBERS:  # in the memory of the message
        return np.frombuffer(data[4:], bytes(data[:4]).decode().strip())
    return np.frombuffer(data, BLOCK_FACTS) if code == _EXT_BLOCKS else from_ext(code, data)


def decoder_of(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    # Of all that messages hold, msgspec does not know dtypes alone.
    return msgspec.msgpack.Decoder(
        kind,
        ext_hook=_from_ext,
        dec_hook=lambda of, value: getattr(torch, value, None) if of is torch.dtype else value,
    )


encoder = msgspec.msgpack.Encoder(enc_hook=_to_wire)
calls = decoder_of(Call)


# What a TransferQueue call may raise; lost blocks are told apart before.
_FAULTS = (
    RuntimeError,
    ValueError,
    KeyError,
    TypeError,
    AssertionError,
    OSError,
    zmq.ZMQError,
    CancelledError,
)


@dataclass(frozen=True)
class Endpoint:
    """Where the index listens, and the secret that it shares with its clients."""

    address: str
    port: int
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class Connection:
    """How a process reaches TransferQueue and the index, and which processes they are; Ray carries it."""

    engine_id: str
    backend: str
    controller: Any
    storage: dict[str, Any]
    indexes: list[Endpoint]
    index_parts: list[Part]
    controller_part: Part
    unit_parts: list[Part]


class IndexClient:
    """A process's connection to the index; safe to use from several threads.

    The process is alive for as long as a connection that it keeps open, its lifeline, stands: that ends with the
    process, however it does. `owner` is what the index knows the process by.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        parts: Sequence[Part],
        deadline: Deadline,
        operation_of: Callable[[str, str], Operation],
    ) -> None:
        """Connect; `operation_of` says how to read what an operation of a store, or of the engine, returns."""
        self.secret, self.parts, self.operation_of = endpoint.secret, parts, operation_of
        ports = {_SOCKET: endpoint.port}
        self.server = ZMQServerInfo(role=Role.CONTROLLER, id=_SOCKET, ip=endpoint.address, ports=ports)
        self._context = zmq.Context()
        self.pool = ZMQSocketPool(self._context, "headrace", _SOCKET)
        self.owner = uuid.uuid4().hex.encode()
        self._lifeline_lock = threading.Lock()
        self._lifeline = create_zmq_socket(self._context, zmq.DEALER, endpoint.address, self.owner)
        self._lifeline.connect(format_zmq_address(endpoint.address, endpoint.port))
        with ExitStack() as undo:
            undo.callback(self.close)
            self.ask("hello", what="connecting to the index", deadline=deadline, socket=self._lifeline)
            undo.pop_all()

    def ask(
        self,
        operation: str,
        *arguments: object,
        what: str,
        deadline: Deadline,
        store: str = "",
        dropped: Sequence[int] = (),
        wait_s: float = 0.0,
        socket: Any = None,
    ) -> Done[Any]:
        """Return what an operation of a store, or of the engine, returns, and blocks to drop.

        For up to `wait_s` the index waits until the answer is neither None nor false. `socket` None: one of the pool's.
        """
        self.hear()
        call = Call(
            self.owner, store, operation, msgspec.Raw(encoder.encode(arguments)), list(dropped), wait_s
        )
        with ExitStack() as lease:
            socket = socket or lease.enter_context(self.pool.lease(self.server))
            socket.send_multipart(sealed(self.secret, call))
            wait_for(partial(poll, socket), self.parts, what, deadline)
            reader = self.operation_of(operation, store).reply
            reply: Done[Any] | Failed = opened(self.secret, socket.recv_multipart(), reader)
        if isinstance(reply, Failed):
            raise reply.error()
        return reply

    def hear(self) -> None:
        """Take in what the server has asked, so that it does not pile up; that it came was the answer."""
        with self._lifeline_lock:
            while self._lifeline.poll(0):
                self._lifeline.recv_multipart()

    def close(self) -> None:
        self._lifeline.close(linger=0)
        self.pool.close()
        self._context.destroy(linger=0)


class StorageUnits:
    """A process's connections to the simple storage units; safe to use from several threads.

    A block is sent as its two frames, so neither side copies it into a message.
    """

    def __init__(self, infos: Mapping[str, ZMQServerInfo], parts: Sequence[Part]) -> None:
        # A slot's unit is the one that TransferQueue's own client would choose, since that one clears.
        self._units, self._parts = list(infos.values()), parts
        self._context = zmq.Context()
        self._pool = ZMQSocketPool(self._context, _UNIT_CLIENT, "put_get_socket")

    def put(self, slots: Sequence[int], frames: Sequence[Frames], what: str, deadline: Deadline) -> None:
        """Store blocks; their memory is read until this returns."""
        bodies = {
            unit: {
                "global_indexes": [slots[i] for i in mine],
                "data": {FIELD: [list(frames[i]) for i in mine]},
                "data_parser": None,
            }
            for unit, mine in self._by_unit(slots).items()
        }
        self._request(ZMQRequestType.PUT_DATA, bodies, what, deadline)

    def get(
        self, blocks: Sequence[BlockInfo], rows: Sequence[Rows | None], what: str, deadline: Deadline
    ) -> list[Frames]:
        """Return blocks, or those `rows` of them; raises BlockError: a unit does not have all of them."""
        groups, bodies = self._by_unit([block.slot for block in blocks]), {}
        for unit, mine in groups.items():
            some = [wanted for i in mine if (wanted := rows[i]) is not None]
            counts = [None if (wanted := rows[i]) is None else len(wanted) for i in mine]
            fields = {FIELD: [counts, np.concatenate(some)]} if some else [FIELD]
            bodies[unit] = {"global_indexes": [blocks[i].slot for i in mine], "fields": fields}
        got: list[Any] = [None] * len(blocks)
        for unit, body in self._request(ZMQRequestType.GET_DATA, bodies, what, deadline).items():
            for i, block in zip(groups[unit], body["data"][FIELD], strict=True):
                got[i] = Frames(*block)
        return got

    def _by_unit(self, slots: Sequence[int]) -> dict[int, list[int]]:
        groups: dict[int, list[int]] = {}
        for position, slot in enumerate(slots):
            groups.setdefault(slot % len(self._units), []).append(position)
        return groups

    def _request(
        self, kind: ZMQRequestType, bodies: Mapping[int, dict[str, Any]], what: str, deadline: Deadline
    ) -> dict[int, dict[str, Any]]:
        """Ask units at the same time and return what each answers."""
        answered: dict[int, dict[str, Any]] = {}
        # A lease that is left by an error closes its socket, so a late answer reaches nobody.
        with ExitStack() as leases:
            sockets = {unit: leases.enter_context(self._pool.lease(self._units[unit])) for unit in bodies}
            for unit, body in bodies.items():
                request = ZMQMessage.create(kind, _UNIT_CLIENT, body, self._units[unit].id)
                sockets[unit].send_multipart(request.serialize(), copy=False)
            for unit, socket in sockets.items():
                wait_for(partial(poll, socket), self._parts, what, deadline)
                message = ZMQMessage.deserialize(socket.recv_multipart(copy=False))
                answered[unit] = message.body
                if message.request_type != ZMQRequestType[f"{kind.name}_RESPONSE"]:
                    text = str(message.body.get("message", message.request_type))
                    error = BlockError if KEY_NOT_FOUND_MARKER in text else TransportError
                    raise error(f"{what}: a storage unit refused: {text}")
        return answered

    def close(self) -> None:
        self._pool.close()
        self._context.destroy(linger=0)


class Blocks:
    """A process's connection to TransferQueue: blocks are put, fetched and dropped, each within a time limit.

    TransferQueue's calls have no time-out of their own, drop missing keys silently, and report a put as done
    whose notice to the controller was lost. So every call of its client runs on its event loop and is
    given up after a time, or when Ray says who died; a fetch checks that all blocks came. Its simple storage units are
    asked directly; elsewhere a block is one flat uint8 row of one field, which no backend reshapes or casts.
    """

    def __init__(self, connection: Connection, deadline: Deadline) -> None:
        """Connect; raises TransportError: no answer by the deadline, or a process is gone."""
        self._unit_parts = connection.unit_parts
        self._parts = [connection.controller_part, *connection.unit_parts]
        self._client: TransferQueueClient | None = None
        self._units: StorageUnits | None = None
        # Whether `get` can give some rows of a block.
        self.gives_rows = connection.backend == "simple"
        name, kind = f"headrace_{os.getpid()}_{id(self):x}", BACKENDS[connection.backend]
        client = TransferQueueClient(name, connection.controller, zmq_io_threads=1)
        self._loop = client._loop
        with ExitStack() as undo:
            # The client is not closed while a thread may still shake hands: its sockets are no other thread's.
            undo.callback(self._loop.call_soon_threadsafe, self._loop.stop)
            if self.gives_rows:
                self._units = StorageUnits(connection.storage["zmq_info"], self._unit_parts)
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
        slots = self._result(self._reserve(partition, [block.number for block in blocks]), what, deadline)
        if self._units is None:
            self._result(mooncake.put_blocks(self._client, partition, slots, packed), what, deadline)
            return slots
        for first, last in call_bounds(sizes):
            self._units.put(slots[first:last], packed.frames[first:last], what, deadline)
        return slots

    async def _reserve(self, partition: str, numbers: list[int]) -> list[int]:
        slots: list[int] = []
        for first, last in call_bounds([0] * len(numbers)):
            keys = list(map(str, numbers[first:last]))
            meta = await self._open().async_kv_retrieve_meta(keys, partition, create=True)
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

    def drop(self, partition: str, numbers: list[int], deadline: Deadline) -> None:
        """Remove blocks by number; those that are not there are ignored.

        Once a process is known to be lost, nothing is done: that error has been told, and the blocks end with the
        store.
        """
        if not self._has_lost:
            what = f"dropping {len(numbers)} blocks from TransferQueue"
            self._result(self._drop(partition, numbers), what, deadline)

    def drop_later(
        self, partition: str, numbers: list[int], limit_s: float, then: Callable[[], None]
    ) -> None:
        """Try to remove blocks by number, without waiting and without an error; `then` is called if that succeeds."""

        async def attempt() -> None:
            try:
                await asyncio.wait_for(self._drop(partition, numbers), limit_s)
                then()
            except (TransportError, *_FAULTS) as error:
                _log.warning("%d blocks of %s are left in TransferQueue: %r", len(numbers), partition, error)

        if self._client is not None and not self._has_lost:
            asyncio.run_coroutine_threadsafe(attempt(), self._loop)

    async def _drop(self, partition: str, numbers: list[int]) -> None:
        for first, last in call_bounds([0] * len(numbers)):
            keys = list(map(str, numbers[first:last]))
            known = await self._open().async_kv_retrieve_meta(keys, partition, create=False)
            if known.size:
                # Of our own making, since TransferQueue's lists no field of which a notice was lost.
                meta = mooncake.batch_meta(partition, list(known.global_indexes), [0] * known.size)
                await self._open().async_clear_samples(meta)

    def drop_partition(self, partition: str, deadline: Deadline) -> None:
        """Remove a partition with all its blocks."""

        async def attempt() -> None:
            # Its call for a partition warns of one without blocks, and leaves that where it is.
            known = (await self._open().async_kv_list(partition)).get(partition, {})
            await self._drop(partition, list(map(int, known)))
            if partition in await self._open().async_get_partition_list():
                await self._open()._clear_partition_in_controller(partition)

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


def poll(socket: Any, seconds: float) -> bool:
    """Wait for a message; return whether there is one."""
    # In whole milliseconds, rounded up: a poll must not end before its time.
    return bool(socket.poll(math.ceil(1000 * seconds)))

"""The index of a TransferQueue store: which block holds each row, tags, claims. No bulk passes through it.

One Ray actor keeps the indexes of all stores of an engine. Messages are msgspec structs; a call names a method, whose
annotations are the types of its arguments and answer. Nothing is unpickled, and a message that is not signed with a
secret, which Ray has carried, is not read.

Blocks in transit are leased to one process: those of a put before they are stored, until it is committed; and garbage,
which no row refers to, once it is handed to a caller who drops it, until that has happened. What a process leaves
behind that dies, or that goes silent, is so freed by another one.
"""

import functools
import hmac
import itertools
import logging
import math
import secrets
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar, get_type_hints

import msgspec
import numpy as np
import torch

from headrace.data_plane.claim_terms import PartitionReport
from headrace.data_plane.object_codec import SCALARS, from_ext, to_wire
from headrace.data_plane.store.blocks import BlockInfo, placed
from headrace.data_plane.store.claims import ClaimRequest, Registration
from headrace.data_plane.store.columns import Form, Places, Put, RowFacts, Rows
from headrace.data_plane.store.sample_store import SampleStore
from headrace.errors import DataPlaneError, HeadraceError, SchemaError, TransportError

_log = logging.getLogger(__name__)

# How often processes that hold leases, or wait, are looked for; when a caller that has not dropped garbage loses it.
LOOK_S, _DROP_S = 1.0, 60.0
# The msgpack extension of an array of one dimension: its dtype in 4 bytes, then its elements.
_EXT_NUMBERS = 16

Answer = TypeVar("Answer")
BlockColumns = dict[str, list[BlockInfo]]


class Located(NamedTuple):
    """Where rows of a column lie: all rows of `blocks`, in order; or row i is row `places[1][i]` of `places[0][i]`."""

    form: Form
    blocks: list[BlockInfo]
    places: Places


class Garbage(NamedTuple):
    """Blocks for the caller to drop from TransferQueue, and the ticket that says so."""

    ticket: int
    keys: list[str]


class StoreFacts(NamedTuple):
    """What is known of a store; `holder` says which process opened it."""

    name: str
    holder: str
    is_alive: bool
    rows: int
    nbytes: int


class _Lease(NamedTuple):
    owner: bytes
    ends: float
    keys: list[str]
    put: tuple[Put, BlockColumns] | None


def _is_always_alive(owner: bytes) -> bool:
    return True


class SampleIndex(SampleStore[BlockInfo]):
    """The index of one store, whose blocks lie in TransferQueue; `is_alive`: see `Indexes`."""

    def __init__(self, capacity: int, is_alive: Callable[[bytes], bool] = _is_always_alive) -> None:
        super().__init__(capacity)
        self._is_alive = is_alive
        self._garbage: list[str] = []
        self._leases: dict[int, _Lease] = {}
        self._tickets = itertools.count()
        self._next_look = 0.0

    def register(self, registration: Registration) -> list[BlockInfo]:
        return self._discarded(super().register(registration))

    def clear(
        self, partition_id: str, ids: Sequence[str] | None, claim: str | None = None
    ) -> list[BlockInfo]:
        return self._discarded(super().clear(partition_id, ids, claim))

    def _discarded(self, blocks: Sequence[BlockInfo]) -> list[BlockInfo]:
        """Let blocks be garbage, so that none is left for the caller."""
        self._garbage += [block.key for block in blocks]
        return []

    def begin_put(self, owner: bytes, put: Put, columns: BlockColumns, limit_s: float) -> int | None:
        """Lease the blocks of a put, which are not stored yet, to a client; return the ticket for `commit`.

        None: a put that is to be done once was done before.
        """
        if not self.check_put(put, columns):
            return None
        keys = [block.key for blocks in columns.values() for block in blocks]
        return self._lease(owner, keys, limit_s, (put, columns))

    def commit(self, ticket: int, slots: Sequence[int]) -> RowFacts | None:
        """Commit a put whose blocks are stored in these slots; a refusal leaves blocks and ticket to the client.

        The facts come without the ids, which the caller has. None: another put of these rows, which are to be put once,
        was sooner.
        """
        lease = self._leases.get(ticket)
        if lease is None or lease.put is None:
            raise TransportError(
                "the put took so long that its blocks were dropped, or its process was taken for dead; put again"
            )
        put, columns = lease.put
        facts, gone = self.put(put, placed(columns, slots))
        self._discarded(gone)
        self.end([ticket])
        return facts and facts._replace(sample_ids=[], tags=wire_tags(facts.tags))

    def locate(self, partition_id: str, ids: Sequence[str], names: Sequence[str]) -> dict[str, Located]:
        """Return where columns of rows lie; no rows lie in no blocks."""
        selected = self.select(partition_id, ids, names)
        return {
            name: Located(blocks[0].form, blocks if ids else [], places and _places(blocks, *places))
            for name, (blocks, places) in selected.items()
        }

    def claim(self, request: ClaimRequest, timeout_s: float = 0.0) -> RowFacts | None:
        """Take rows for a task; None if too few are ready."""
        facts = super().claim(request, timeout_s)
        return facts and facts._replace(tags=wire_tags(facts.tags))

    def report(self, partition_id: str, limit: int) -> PartitionReport:
        told = super().report(partition_id, limit)
        return replace(
            told, unconsumed=[replace(row, tags=wire_tags([row.tags])[0]) for row in told.unconsumed]
        )

    def give_back(self, tickets: Sequence[int]) -> None:
        """Take garbage back from a client that has not dropped it."""
        self._garbage += self.end(tickets)

    def end(self, tickets: Sequence[int]) -> list[str]:
        """End leases, and return their keys; a ticket that is not open is ignored."""
        ended = [self._leases.pop(ticket, None) for ticket in tickets]
        return [key for lease in ended if lease is not None for key in lease.keys]

    def hand_out(self, owner: bytes, *, at_once: bool = False) -> Garbage | None:
        """Lease garbage to a client that drops it, if there is some, with what lost leases have left.

        Processes are looked for `at_once`, or once a second.
        """
        now, gone = time.monotonic(), set[bytes]()
        if self._leases and (at_once or now >= self._next_look):
            self._next_look = now + LOOK_S
            gone = {o for o in {lease.owner for lease in self._leases.values()} if not self._is_alive(o)}
        self.give_back([t for t, lease in self._leases.items() if lease.ends <= now or lease.owner in gone])
        keys, self._garbage = self._garbage, []
        return Garbage(self._lease(owner, keys, _DROP_S), keys) if keys else None

    def _lease(
        self, owner: bytes, keys: list[str], limit_s: float, put: tuple[Put, BlockColumns] | None = None
    ) -> int:
        ticket = next(self._tickets)
        self._leases[ticket] = _Lease(owner, time.monotonic() + limit_s, keys, put)
        return ticket


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


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The error that a call ends with: the name of its class in `headrace.errors`, and its text."""

    kind: str
    text: str


class _OpenStore(NamedTuple):
    name: str
    owner: bytes
    holder: str
    rows: SampleIndex


class Indexes:
    """The indexes of an engine's stores; `is_alive` says whether a client's process is.

    A store has a name, which belongs to the process that opened it for as long as that lives, and a handle, which
    belongs to nobody else ever.
    """

    def __init__(self, is_alive: Callable[[bytes], bool] = _is_always_alive) -> None:
        self._is_alive = is_alive
        self._open: dict[str, _OpenStore] = {}
        # Handles of stores that are closed, and whose blocks nobody has dropped yet, with their names.
        self._ended: dict[str, str] = {}

    def run(self, call: Call) -> Done[Any]:
        operation = operation_of(call.operation, call.store)
        arguments = operation.arguments.decode(call.arguments)
        if not call.store:
            return Done(getattr(self, call.operation)(*arguments))
        if call.store not in self._open:
            raise _closed(call.store.rpartition("/")[0])
        index = self._open[call.store].rows
        index.end(call.dropped)
        answer = getattr(index, call.operation)(*arguments)
        if call.operation == "give_back":
            return Done(answer)
        return Done(answer, index.hand_out(call.owner, at_once=call.operation == "clear"))

    def next_end_s(self) -> float:
        """Return how long it is until the next lease of rows ends, in any store."""
        return min((store.rows.next_end_s() for store in self._open.values()), default=math.inf)

    def hello(self) -> None:
        """Answer a new client."""

    def open_store(self, owner: bytes, name: str, capacity: int, holder: str) -> tuple[str, list[str]]:
        """Add a store, in place of one of a process that is gone.

        Returns its handle, and those of closed stores of this name, for the caller to drop and `forget`.
        """
        self._end_store(name, "close it there, attach to it, or set another data_plane.store_name")
        handle = f"{name}/{secrets.token_hex(4)}"
        self._open[handle] = _OpenStore(name, owner, holder, SampleIndex(capacity, self._is_alive))
        return handle, self._ended_of(name)

    def attach(self, name: str) -> str:
        handle = self._handle(name)
        if handle is None:
            raise _closed(name)
        return handle

    def close_store(self, handle: str) -> None:
        """Drop a store's index; its blocks are for the caller to drop, and then to `forget`."""
        closed = self._open.pop(handle, None)
        if closed is not None:
            closed.rows.close()
            self._ended[handle] = closed.name

    def drop_store(self, name: str, force: bool) -> list[str]:
        """Close the store of that name, if there is one; return the handles of those to drop and `forget`."""
        self._end_store(name, "close it there, or add --force", force=force)
        return self._ended_of(name)

    def forget(self, handle: str) -> None:
        self._ended.pop(handle, None)

    def list_stores(self) -> list[StoreFacts]:
        return [
            StoreFacts(
                store.name,
                store.holder,
                self._is_alive(store.owner),
                sum(map(len, store.rows.sample_ids().values())),
                sum(store.rows.stored_bytes().values()),
            )
            for store in self._open.values()
        ]

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


class Operation(NamedTuple):
    """How to read what a method is given, and what comes of it."""

    arguments: msgspec.msgpack.Decoder[Any]
    reply: msgspec.msgpack.Decoder[Any]


_OF_ENGINE = ("hello", "open_store", "attach", "close_store", "drop_store", "forget", "list_stores")
_OF_STORE = (
    *("register", "begin_put", "commit", "locate", "shared_columns", "clear", "claim"),
    *("claim_timeout_text", "has_room", "room", "renew", "release", "finish", "report"),
    *("is_consumed", "sample_ids", "stored_bytes", "give_back"),
)
# After these, no call that waits has to be run again.
READS = (
    *("hello", "begin_put", "locate", "shared_columns", "has_room", "room", "is_consumed"),
    *("report", "claim_timeout_text", "sample_ids", "stored_bytes"),
)


@functools.cache
def operation_of(name: str, store: str = "") -> Operation:
    """Return the operation of that name of a store, or of the engine; only those that are listed can be called."""
    kind, known = (SampleIndex, _OF_STORE) if store else (Indexes, _OF_ENGINE)
    if name not in known:
        raise DataPlaneError(f"the index of a store has no operation '{name}'")
    *arguments, answer = get_type_hints(getattr(kind, name)).values()
    return Operation(_decoder(tuple.__class_getitem__(tuple(arguments))), _decoder(Done[answer] | Failed))  # type: ignore[valid-type]


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


def reply_to(
    secret: bytes, call: Call, run: Callable[[Call], Done[Any]]
) -> tuple[list[bytes], Done[Any] | None]:
    """Return the signed frames of what a call returns, and that; or of the error that it ends with, whatever it is."""
    try:
        done = run(call)
        return sealed(secret, done), done
    except HeadraceError as error:
        failed = Failed(type(error).__name__, str(error))
    except Exception as error:
        # As text: a handler that keeps its records must not keep the frames with what they hold.
        _log.warning("a request to the index failed\n%s", traceback.format_exc().rstrip())
        failed = Failed(DataPlaneError.__name__, f"{type(error).__name__}: {error}")
    return sealed(secret, failed), None


def wire_tags(tags: Sequence[Mapping[str, Any]] | None) -> Any:
    """Return tags as messages carry them: what msgpack has no form for, tuples and tensors, as its extensions."""
    if tags is None or {type(value) for tag in tags for value in tag.values()} <= SCALARS:
        return tags
    return [to_wire(tag) for tag in tags]


def _to_wire(value: object) -> object:
    if isinstance(value, np.ndarray) and value.ndim == 1:
        return msgspec.msgpack.Ext(_EXT_NUMBERS, value.dtype.str.encode().ljust(4) + value.tobytes())
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    raise SchemaError(f"a value of type {type(value).__qualname__} cannot be sent to the index of a store")


def _from_ext(code: int, data: memoryview) -> object:
    # Numbers share the memory of their message.
    return (
        np.frombuffer(data[4:], bytes(data[:4]).decode().strip())
        if code == _EXT_NUMBERS
        else from_ext(code, data)
    )


def _as_typed(kind: type, value: Any) -> Any:
    return getattr(torch, value, None) if kind is torch.dtype else value


def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, ext_hook=_from_ext, dec_hook=_as_typed)


encoder = msgspec.msgpack.Encoder(enc_hook=_to_wire)
calls = _decoder(Call)


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


def _closed(name: str) -> DataPlaneError:
    return DataPlaneError(
        f"store '{name}' is closed, or was never opened; the driver opens it with "
        "build_data_plane_client(cfg, bootstrap=True)"
    )

"""The indexes of TransferQueue stores, and the socket over which they answer their clients.

One Ray actor keeps the indexes of all stores of an engine. No bulk passes through it.
"""

import functools
import logging
import math
import secrets
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, get_type_hints

import msgspec
import zmq
from transfer_queue.utils.zmq_utils import create_zmq_socket, format_zmq_address

from headrace.data_plane.adapters.transfer_queue_rows import LOOK_S, PartIndex, is_always_alive
from headrace.data_plane.adapters.transfer_queue_socket import (
    Call,
    Done,
    Endpoint,
    Failed,
    Operation,
    UnsignedMessage,
    calls,
    decoder_of,
    opened,
    poll,
    sealed,
)
from headrace.data_plane.store.columns import RowFacts
from headrace.data_plane.store.merge import Taken
from headrace.errors import DataPlaneError, HeadraceError

_log = logging.getLogger(__name__)

_BACKLOG = 4096
# What tells that the node of a process is gone. ZeroMQ's own threads answer, so a process may be as busy as it likes.
_HEARTBEAT_MS, _SILENCE_MS = 10_000, 30_000
# An answer does not begin with an empty frame.
_ARE_YOU_THERE = b""


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
    rows: PartIndex
    indexes: int = 1


class Indexes:
    """The indexes of an engine's stores; `is_alive` says whether a client's process is.

    A store has a name, which belongs to the process that opened it for as long as that lives, and a handle, which
    belongs to nobody else ever.
    """

    def __init__(self, is_alive: Callable[[bytes], bool] = is_always_alive) -> None:
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
        return Done(answer, index.hand_out(call.owner, at_once=call.operation.startswith("clear")))

    def undo(self, call: Call, done: Done[Any]) -> None:
        """Give back the rows that a call has claimed of which the caller, who is gone, will not know."""
        facts = done.answer.facts if isinstance(done.answer, Taken) else done.answer
        if isinstance(facts, RowFacts) and call.operation in ("claim", "take"):
            request = operation_of(call.operation, call.store).arguments.decode(call.arguments)[0]
            self._open[call.store].rows.take_back(request, facts)

    def next_end_s(self) -> float:
        """Return how long it is until the next lease of rows ends, in any store."""
        return min((store.rows.next_end_s() for store in self._open.values()), default=math.inf)

    def hello(self) -> None:
        """Answer a new client."""

    def open_store(
        self, owner: bytes, name: str, capacity: int, holder: str, indexes: int = 1
    ) -> tuple[str, list[str]]:
        """Add a store of so many indexes, of which this is the first, in place of one of a process that is gone.

        Returns its handle, and those of closed stores of this name, for the caller to drop and `forget`.
        """
        self._end_store(name, "close it there, attach to it, or set another data_plane.store_name")
        handle = f"{name}/{secrets.token_hex(4)}"
        self._open[handle] = _OpenStore(name, owner, holder, PartIndex(capacity, self._is_alive), indexes)
        return handle, self._ended_of(name)

    def join_store(self, owner: bytes, name: str, capacity: int, holder: str, handle: str) -> None:
        """Be another index of a store that the first has opened."""
        self._end_store(name, "", force=True)
        self._ended.clear()
        self._open[handle] = _OpenStore(name, owner, holder, PartIndex(capacity, self._is_alive))

    def attach(self, name: str) -> tuple[str, int]:
        """Return a store's handle, and how many indexes it has."""
        handle = self._handle(name)
        if handle is None:
            raise _closed(name)
        return handle, self._open[handle].indexes

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


_OF_ENGINE = (
    "hello",
    "open_store",
    "join_store",
    "attach",
    "close_store",
    "drop_store",
    "forget",
    "list_stores",
)
_OF_STORE = (
    *("register", "begin_put", "commit", "locate", "shared_columns", "clear", "claim"),
    *("claim_timeout_text", "has_room", "room", "renew", "release", "finish", "report"),
    *("claimed_ids", "mark_consumed"),
    *("is_consumed", "sample_ids", "stored_bytes", "give_back"),
    # Of one of several indexes.
    *("is_tagged", "begin_part", "beside", "standing", "prepare", "next_numbers", "abandon", "faults"),
    *("check_clear", "clear_part", "hold", "ready", "take", "waiting", "report_part", "consumption"),
    "numbered_ids",
)
# After these, no call that waits has to be run again.
READS = (
    *("hello", "begin_put", "locate", "shared_columns", "has_room", "room", "is_consumed"),
    *("report", "claim_timeout_text", "sample_ids", "stored_bytes", "claimed_ids"),
    *("is_tagged", "begin_part", "beside", "standing", "prepare", "next_numbers", "faults", "check_clear"),
    *("hold", "ready", "waiting", "report_part", "consumption", "numbered_ids"),
)


@functools.cache
def operation_of(name: str, store: str = "") -> Operation:
    """Return the operation of that name of a store, or of the engine; only those that are listed can be called."""
    kind, known = (PartIndex, _OF_STORE) if store else (Indexes, _OF_ENGINE)
    if name not in known:
        raise DataPlaneError(f"the index of a store has no operation '{name}'")
    *arguments, answer = get_type_hints(getattr(kind, name)).values()
    return Operation(decoder_of(tuple.__class_getitem__(tuple(arguments))), decoder_of(Done[answer] | Failed))  # type: ignore[valid-type]


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


class IndexServer:
    """Answers calls one after the other, in a thread of its own.

    A call that may wait, and whose answer is not there yet, is held without keeping others waiting: it is run again
    when another call has changed something, when a lease ends, and at the end of its time. A client that is gone, or
    has given up, waits no longer, and takes nothing.
    """

    def __init__(self, address: str, secret: bytes) -> None:
        self._socket = create_zmq_socket(zmq.Context(), zmq.ROUTER, address)
        self._socket.setsockopt(zmq.BACKLOG, _BACKLOG)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
        # Sending to a process that is gone is an error; one that connects again takes its place.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        port = self._socket.bind_to_random_port(format_zmq_address(address, 0).rpartition(":")[0])
        self.endpoint = Endpoint(address, port, secret)

    def start(self, indexes: Indexes) -> None:
        """Begin to answer calls."""
        threading.Thread(target=self._serve, args=(indexes,), daemon=True, name="headrace-index").start()

    def _serve(self, indexes: Indexes) -> None:
        held: list[_Held] = []
        next_look = 0.0
        while True:
            patience_s = (
                min(LOOK_S, indexes.next_end_s(), *(call.until - time.monotonic() for call in held))
                if held
                else None
            )
            has_changed = True
            if patience_s is None or poll(self._socket, max(patience_s, 0.0)):
                new = self._received()
                if new is None:
                    continue
                if not self._is_answered(new, indexes):
                    held.append(new)
                has_changed = new.call.operation not in READS
            if held and time.monotonic() >= next_look:
                next_look = time.monotonic() + LOOK_S
                held = [waiting for waiting in held if self.is_alive(waiting.call.owner)]
            if has_changed:
                held = [waiting for waiting in held if not self._is_answered(waiting, indexes)]

    def _received(self) -> "_Held | None":
        identity, *frames = self._socket.recv_multipart()
        try:
            call = opened(self.endpoint.secret, frames, calls)
        except UnsignedMessage as error:
            _log.warning("dropped a request to the index: %s", error)
            return None
        except msgspec.MsgspecError as error:
            failed = Failed("DataPlaneError", f"a request that the index cannot read: {error}")
            self._send([identity, *sealed(self.endpoint.secret, failed)])
            return None
        return _Held(identity, call, time.monotonic() + call.wait_s)

    def _is_answered(self, waiting: "_Held", indexes: Indexes) -> bool:
        frames, done = reply_to(self.endpoint.secret, waiting.call, indexes.run)
        is_early = time.monotonic() < waiting.until
        # Garbage has to reach the client, which asks again.
        if is_early and done is not None and not done.answer and done.garbage is None:
            return False
        if not self._send([waiting.identity, *frames]) and done is not None:
            indexes.undo(waiting.call, done)
        return True

    def is_alive(self, owner: bytes) -> bool:
        """Return whether a client's lifeline stands; for the `Indexes`, since it sends something."""
        return self._send([owner, _ARE_YOU_THERE])

    def _send(self, frames: list[bytes]) -> bool:
        try:
            self._socket.send_multipart(frames)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True


class _Held(NamedTuple):
    """A call, the socket that it came from, and when its answer is due, whatever it is."""

    identity: bytes
    call: Call
    until: float


def _closed(name: str) -> DataPlaneError:
    return DataPlaneError(
        f"store '{name}' is closed, or was never opened; the driver opens it with "
        "build_data_plane_client(cfg, bootstrap=True)"
    )

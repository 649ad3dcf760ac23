"""The socket over which clients ask the index of a TransferQueue store: both ends."""

import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import msgspec
import zmq
from transfer_queue.utils.enum_utils import Role
from transfer_queue.utils.zmq_utils import (
    ZMQServerInfo,
    ZMQSocketPool,
    create_zmq_socket,
    format_zmq_address,
)

from headrace import errors
from headrace.data_plane.adapters.transfer_queue_index import (
    LOOK_S,
    READS,
    Call,
    Done,
    Failed,
    UnsignedMessage,
    calls,
    encoder,
    opened,
    operation_of,
    reply_to,
    sealed,
)
from headrace.distributed.ray_connection import Deadline, Part, wait_for

_log = logging.getLogger(__name__)

_SOCKET = "index"
_BACKLOG = 4096
# What tells that the node of a process is gone. ZeroMQ's own threads answer, so a process may be as busy as it likes.
_HEARTBEAT_MS, _SILENCE_MS = 10_000, 30_000
# An answer does not begin with an empty frame.
_ARE_YOU_THERE = b""


@dataclass(frozen=True)
class Endpoint:
    """Where the index listens, and the secret that it shares with its clients."""

    address: str
    port: int
    secret: bytes = field(repr=False)


class IndexServer:
    """Answers calls one after the other, in a thread of its own.

    A call that may wait, and whose answer is not there yet, is held without keeping others waiting: it is run again
    when another call has changed something, when a lease ends, and at the end of its time. A client that is gone waits
    no longer, so it takes nothing.
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

    def start(
        self, run: Callable[[Call], Done[Any]], next_end_s: Callable[[], float] = lambda: math.inf
    ) -> None:
        """Begin to answer calls by what `run` returns; `next_end_s` is how long it is until the next lease ends."""
        threading.Thread(
            target=self._serve, args=(run, next_end_s), daemon=True, name="headrace-index"
        ).start()

    def _serve(self, run: Callable[[Call], Done[Any]], next_end_s: Callable[[], float]) -> None:
        held: list[_Held] = []
        next_look = 0.0
        while True:
            patience_s = (
                min(LOOK_S, next_end_s(), *(call.until - time.monotonic() for call in held)) if held else None
            )
            has_changed = True
            if patience_s is None or poll(self._socket, max(patience_s, 0.0)):
                new = self._received()
                if new is None:
                    continue
                if not self._is_answered(new, run):
                    held.append(new)
                has_changed = new.call.operation not in READS
            if held and time.monotonic() >= next_look:
                next_look = time.monotonic() + LOOK_S
                held = [waiting for waiting in held if self.is_alive(waiting.call.owner)]
            if has_changed:
                held = [waiting for waiting in held if not self._is_answered(waiting, run)]

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

    def _is_answered(self, waiting: "_Held", run: Callable[[Call], Done[Any]]) -> bool:
        frames, done = reply_to(self.endpoint.secret, waiting.call, run)
        is_early = time.monotonic() < waiting.until
        # Garbage has to reach the client, which asks again.
        if is_early and done is not None and not done.answer and done.garbage is None:
            return False
        self._send([waiting.identity, *frames])
        return True

    def is_alive(self, owner: bytes) -> bool:
        """Return whether a client's lifeline stands; for what `start` is given, since it sends something."""
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


class IndexClient:
    """A process's connection to the index; safe to use from several threads.

    The process is alive for as long as a connection that it keeps open, its lifeline, stands: that ends with the
    process, however it does. `owner` is what the index knows the process by.
    """

    def __init__(self, endpoint: Endpoint, parts: Sequence[Part], deadline: Deadline) -> None:
        self._secret, self._parts = endpoint.secret, parts
        ports = {_SOCKET: endpoint.port}
        self._server = ZMQServerInfo(role=Role.CONTROLLER, id=_SOCKET, ip=endpoint.address, ports=ports)
        self._context = zmq.Context()
        self._pool = ZMQSocketPool(self._context, "headrace", _SOCKET)
        self.owner = uuid.uuid4().hex.encode()
        self._lifeline_lock = threading.Lock()
        self._lifeline = create_zmq_socket(self._context, zmq.DEALER, endpoint.address, self.owner)
        self._lifeline.connect(format_zmq_address(endpoint.address, endpoint.port))
        with ExitStack() as undo:
            undo.callback(self.close)
            hello = Call(self.owner, "", "hello", msgspec.Raw(encoder.encode(())))
            self._reply(self._lifeline, hello, "connecting to the index", deadline)
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
    ) -> Done[Any]:
        """Return what an operation of a store, or of the engine, returns, and blocks to drop.

        For up to `wait_s` the index waits until the answer is neither None nor false.
        """
        with self._lifeline_lock:
            # What the server has asked, so that it does not pile up; that it came was the answer.
            while self._lifeline.poll(0):
                self._lifeline.recv_multipart()
        call = Call(
            self.owner, store, operation, msgspec.Raw(encoder.encode(arguments)), list(dropped), wait_s
        )
        with self._pool.lease(self._server) as socket:
            reply = self._reply(socket, call, what, deadline)
        if isinstance(reply, Failed):
            raise getattr(errors, reply.kind)(reply.text)
        return reply

    def _reply(self, socket: Any, call: Call, what: str, deadline: Deadline) -> Done[Any] | Failed:
        socket.send_multipart(sealed(self._secret, call))
        wait_for(partial(poll, socket), self._parts, what, deadline)
        reply = operation_of(call.operation, call.store).reply
        received: Done[Any] | Failed = opened(self._secret, socket.recv_multipart(), reply)
        return received

    def close(self) -> None:
        self._lifeline.close(linger=0)
        self._pool.close()
        self._context.destroy(linger=0)


def poll(socket: Any, seconds: float) -> bool:
    """Wait for a message; return whether there is one."""
    # In whole milliseconds, rounded up: a poll must not end before its time.
    return bool(socket.poll(math.ceil(1000 * seconds)))

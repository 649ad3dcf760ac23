"""Requests to the index and their answers, over a ZeroMQ socket: a tenth of the time of a Ray actor call.

Both ends hold a secret that Ray has carried; what is not signed with it is dropped unread. A client's process is alive
for as long as a connection that it keeps open, its lifeline, stands: that ends with the process, however it does.
"""

import hmac
import logging
import math
import pickle
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import zmq
from ray import cloudpickle
from transfer_queue.utils.enum_utils import Role
from transfer_queue.utils.zmq_utils import (
    ZMQServerInfo,
    ZMQSocketPool,
    create_zmq_socket,
    format_zmq_address,
)

from headrace.errors import DataPlaneError, HeadraceError, TransportError

_log = logging.getLogger(__name__)

KNOB, STARTUP_KNOB = "data_plane.timeout_s", "data_plane.startup_timeout_s"

_SOCKET = "index"
_BACKLOG = 4096
# What tells that the node of a process is gone. ZeroMQ's own threads answer, so a process may be as busy as it likes.
_HEARTBEAT_MS, _SILENCE_MS = 10_000, 30_000
# An answer does not begin with an empty frame.
_ARE_YOU_THERE = b""
PATIENCE_S = 1.0
"""After this long without an answer, a caller asks Ray whether the other end is alive."""


@dataclass(frozen=True)
class Endpoint:
    """Where a server listens, and the secret that it shares with its clients."""

    address: str
    port: int
    secret: bytes = field(repr=False)


class Server:
    """Answers requests one after the other, in a thread of its own."""

    def __init__(self, address: str, secret: bytes, answer: Callable[[Any], Any]) -> None:
        self._secret, self._answer = secret, answer
        self._socket = create_zmq_socket(zmq.Context(), zmq.ROUTER, address)
        self._socket.setsockopt(zmq.BACKLOG, _BACKLOG)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
        # Sending to a process that is gone is an error; one that connects again takes its place.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        port = self._socket.bind_to_random_port(format_zmq_address(address, 0).rpartition(":")[0])
        self.endpoint = Endpoint(address, port, secret)
        threading.Thread(target=self._serve, daemon=True, name="headrace-index").start()

    def _serve(self) -> None:
        while True:
            identity, *frames = self._socket.recv_multipart()
            try:
                body = _verified(self._secret, frames)
            except TransportError as error:
                _log.warning("dropped a request to the index: %s", error)
                continue
            self._send([identity, *self._reply(body)])

    def is_alive(self, owner: bytes) -> bool:
        """Return whether a client's lifeline stands; for `answer` to ask, since it sends something."""
        return self._send([owner, _ARE_YOU_THERE])

    def _send(self, frames: list[bytes]) -> bool:
        try:
            self._socket.send_multipart(frames)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def _reply(self, body: bytes) -> list[bytes]:
        """Return the answer to a request, or the error that it ends with, whatever that is: the thread goes on."""
        try:
            return _sealed(self._secret, (True, self._answer(pickle.loads(body))))
        except HeadraceError as error:
            return _sealed(self._secret, (False, error))
        except Exception as error:
            # As text: a handler that keeps its records must not keep the frames with what they hold.
            _log.warning("a request to the index failed\n%s", traceback.format_exc().rstrip())
            return _sealed(self._secret, (False, DataPlaneError(f"{type(error).__name__}: {error}")))


class Channel:
    """A process's way to a server; safe to use from several threads."""

    def __init__(self, endpoint: Endpoint, check_alive: Callable[[str], None], limit_s: float) -> None:
        """Connect.

        `check_alive` raises TransportError, about an operation, if the server's process is gone.

        Raises:
            TransportError: no answer within `limit_s`.
        """
        self._secret, self._check_alive = endpoint.secret, check_alive
        self._server = ZMQServerInfo(
            role=Role.CONTROLLER, id=_SOCKET, ip=endpoint.address, ports={_SOCKET: endpoint.port}
        )
        self._context = zmq.Context()
        self._pool = ZMQSocketPool(self._context, "headrace", _SOCKET)
        self._identity = uuid.uuid4().hex.encode()
        self._lifeline_lock = threading.Lock()
        self._lifeline = create_zmq_socket(self._context, zmq.DEALER, endpoint.address, self._identity)
        self._lifeline.connect(format_zmq_address(endpoint.address, endpoint.port))
        with ExitStack() as undo:
            undo.callback(self.close)
            self._ask_over(self._lifeline, None, "connecting to the index", limit_s, STARTUP_KNOB)
            undo.pop_all()

    def owner(self) -> bytes:
        """Return what the server knows this process by, as long as it lives and this is not closed."""
        with self._lifeline_lock:
            # What the server has asked, so that it does not pile up; that it came was the answer.
            while self._lifeline.poll(0):
                self._lifeline.recv_multipart()
        return self._identity

    def ask(self, request: object, what: str, limit_s: float) -> Any:
        """Return the server's answer.

        Raises:
            TransportError: no answer within `limit_s`, or the server is gone.
            HeadraceError: what the server raised; a DataPlaneError for what is no HeadraceError there.
        """
        with self._pool.lease(self._server) as socket:
            is_answer, value = self._ask_over(socket, request, what, limit_s)
        if not is_answer:
            raise value
        return value

    def _ask_over(self, socket: Any, request: object, what: str, limit_s: float, knob: str = KNOB) -> Any:
        socket.send_multipart(_sealed(self._secret, request))
        if not has_answer(socket, time.monotonic() + limit_s, partial(self._check_alive, what)):
            raise TransportError(
                f"{what}: no answer within {limit_s:.3g} s; if the cluster is only slow, raise {knob}"
            )
        return _open(self._secret, socket.recv_multipart())

    def close(self) -> None:
        """Disconnect."""
        self._lifeline.close(linger=0)
        self._pool.close()
        self._context.destroy(linger=0)


def has_answer(socket: Any, deadline: float, ask_after: Callable[[], None]) -> bool:
    """Return whether an answer comes by `deadline` (time.monotonic).

    Each time that patience ends before it, `ask_after` is called; what it raises ends the wait.
    """
    while (left := deadline - time.monotonic()) > PATIENCE_S:
        if socket.poll(1000 * PATIENCE_S):
            return True
        ask_after()
    # In whole milliseconds, rounded up: a poll must not end before its time.
    return bool(socket.poll(math.ceil(1000 * max(0.0, left))))


def _sealed(secret: bytes, value: object) -> list[bytes]:
    # By value, where a class is of the caller's own script, which the index does not have.
    body: bytes = cloudpickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return [hmac.digest(secret, body, "sha256"), body]


def _open(secret: bytes, frames: list[bytes]) -> Any:
    return pickle.loads(_verified(secret, frames))


def _verified(secret: bytes, frames: list[bytes]) -> bytes:
    if len(frames) != 2 or not hmac.compare_digest(frames[0], hmac.digest(secret, frames[1], "sha256")):
        raise TransportError("a message that is not signed with the secret of this store")
    return frames[1]

"""Requests to the index and their answers, over a ZeroMQ socket: a tenth of the time of a Ray actor call.

Both ends hold a secret that Ray has carried; what is not signed with it is dropped unread.
"""

import hmac
import logging
import math
import pickle
import threading
import time
import traceback
from collections.abc import Callable
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
            self._socket.send_multipart([identity, *self._reply(body)])

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

    def __init__(self, endpoint: Endpoint, check_alive: Callable[[str], None]) -> None:
        """`check_alive` raises TransportError, about an operation, if the server's process is gone."""
        self._secret, self._check_alive = endpoint.secret, check_alive
        self._server = ZMQServerInfo(
            role=Role.CONTROLLER, id=_SOCKET, ip=endpoint.address, ports={_SOCKET: endpoint.port}
        )
        self._context = zmq.Context()
        self._pool = ZMQSocketPool(self._context, "headrace", _SOCKET)

    def ask(self, request: object, what: str, limit_s: float) -> Any:
        """Return the server's answer.

        Raises:
            TransportError: no answer within `limit_s`, or the server is gone.
            HeadraceError: what the server raised; a DataPlaneError for what is no HeadraceError there.
        """
        with self._pool.lease(self._server) as socket:
            socket.send_multipart(_sealed(self._secret, request))
            if not has_answer(socket, time.monotonic() + limit_s, partial(self._check_alive, what)):
                raise TransportError(
                    f"{what}: no answer within {limit_s:.3g} s; if the cluster is only slow, raise {KNOB}"
                )
            is_answer, value = _open(self._secret, socket.recv_multipart())
        if not is_answer:
            raise value
        return value

    def close(self) -> None:
        """Disconnect."""
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

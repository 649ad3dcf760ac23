"""How a process asks several indexes of a TransferQueue store at the same time, and waits for the first to say more."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import zmq
from msgspec import Raw

from headrace.data_plane.adapters.transfer_queue_socket import (
    Call,
    Done,
    Failed,
    Garbage,
    IndexClient,
    encoder,
    opened,
    poll,
    sealed,
)
from headrace.distributed.ray_connection import Deadline, Part, wait_for
from headrace.errors import HeadraceError

# How long an index holds a call that waits before it is asked again.
HOLD_S = 10.0
KNOB = "data_plane.timeout_s"

IndexCall = tuple[int, str, tuple[object, ...]]
"""The number of an index, the operation, its arguments."""
Drop = Callable[[int, str, Garbage, Deadline], None]


class Asked(NamedTuple):
    """A call that has been sent: the socket of its answer, who gives it, and how to read it."""

    socket: Any
    parts: Sequence[Part]
    read: Callable[[list[bytes]], Done[Any] | Failed]


class IndexAsker:
    """A process's connections to the indexes of one store."""

    def __init__(
        self,
        clients: Sequence[IndexClient],
        store: str,
        name: str,
        timeout_s: float,
        dropped: Callable[[int], list[int]],
        drop: Drop,
    ) -> None:
        """`dropped` gives the tickets of blocks that this process has dropped for an index, `drop` drops others."""
        self.clients, self._store, self._name, self.timeout_s = clients, store, name, timeout_s
        self._take_dropped, self.drop = dropped, drop
        self.count = len(clients)

    def what(self, operation: str) -> str:
        return f"operation '{operation}' of store '{self._name}'"

    def send(self, leases: ExitStack, call: IndexCall, wait_s: float = 0.0) -> Asked:
        """Send a call without waiting for its answer, over a socket that is this call's until `leases` ends.

        If that ends with an error, an answer that is still to come reaches nobody.
        """
        index, operation, arguments = call
        client = self.clients[index]
        client.hear()
        socket = leases.enter_context(client.pool.lease(client.server))
        message = Raw(encoder.encode(arguments))
        told = Call(client.owner, self._store, operation, message, self._take_dropped(index), wait_s)
        socket.send_multipart(sealed(client.secret, told))
        reader = client.operation_of(operation, self._store).reply
        return Asked(socket, client.parts, lambda frames: opened(client.secret, frames, reader))

    def read(self, call: IndexCall, asked: Asked, frames: list[bytes], deadline: Deadline) -> Any:
        done = asked.read(frames)
        if isinstance(done, Failed):
            raise done.error()
        if done.garbage is not None:
            self.drop(call[0], call[1], done.garbage, deadline)
        return done.answer

    def attempt(self, calls: Sequence[IndexCall], deadline: Deadline | None = None) -> list[Any]:
        """Ask at the same time; return the answers, or the errors in their places."""
        deadline = deadline or Deadline(self.timeout_s, KNOB)
        with ExitStack() as leases:
            asked = [self.send(leases, call) for call in calls]
            frames = []
            for call, one in zip(calls, asked):
                wait_for(partial(poll, one.socket), one.parts, self.what(call[1]), deadline)
                frames.append(one.socket.recv_multipart())
        answers: list[Any] = []
        for call, one, reply in zip(calls, asked, frames):
            try:
                answers.append(self.read(call, one, reply, deadline))
            except HeadraceError as error:
                answers.append(error)
        return answers

    def ask(self, calls: Sequence[IndexCall], deadline: Deadline | None = None) -> list[Any]:
        """Ask at the same time; raise the first error when all have answered."""
        return or_error(self.attempt(calls, deadline))

    def all(self, operation: str, *arguments: object) -> list[Any]:
        return self.ask([(index, operation, arguments) for index in range(self.count)])

    def some(self, operation: str, *arguments: object) -> list[Any]:
        """Return the answers of the indexes that know of a partition which nobody has registered, one at least."""
        tried = self.attempt([(index, operation, arguments) for index in range(self.count)])
        known = [answer for answer in tried if not isinstance(answer, HeadraceError)]
        return known or or_error(tried)


class Watch:
    """Calls that indexes hold, one each; those that are open at the end of the block reach nobody any more."""

    def __init__(self, asker: IndexAsker, operation: str) -> None:
        self._asker, self._operation = asker, operation
        self._open: dict[int, tuple[IndexCall, Asked, ExitStack, Deadline]] = {}

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *error: object) -> None:
        self.forget()

    def forget(self) -> None:
        for _, _, leases, _ in self._open.values():
            # As by an error, after which a socket is not used again.
            leases.__exit__(_Abandoned, _Abandoned(), None)
        self._open.clear()

    def ask(self, call: IndexCall, hold_s: float) -> None:
        """Send a call, unless one of this index is open."""
        if call[0] not in self._open:
            leases, deadline = ExitStack(), Deadline(hold_s + self._asker.timeout_s, KNOB)
            self._open[call[0]] = call, self._asker.send(leases, call, hold_s), leases, deadline

    def answers(self) -> dict[int, Any]:
        """Wait for an answer; return those that have come, and are something.

        Raises:
            TransportError: an index has not answered in time, whatever the others do.
        """
        poller, what = zmq.Poller(), self._asker.what(self._operation)
        for _, asked, _, _ in self._open.values():
            poller.register(asked.socket, zmq.POLLIN)
        parts = [part for _, asked, _, _ in self._open.values() for part in asked.parts]
        first = min((deadline for *_, deadline in self._open.values()), key=lambda deadline: deadline.left)
        wait_for(partial(_polled, poller), parts, what, first)
        ready = dict(poller.poll(0))
        found: dict[int, Any] = {}
        for index, (call, asked, leases, deadline) in list(self._open.items()):
            if asked.socket not in ready and deadline.is_over():
                raise deadline.missed(what)
            if asked.socket in ready:
                frames = asked.socket.recv_multipart()
                leases.close()
                del self._open[index]
                answer = self._asker.read(call, asked, frames, deadline)
                if answer is not None:
                    found[index] = answer
        return found


def _polled(poller: zmq.Poller, seconds: float) -> bool:
    return bool(poller.poll(int(1000 * seconds) + 1))


class _Abandoned(Exception):
    """A call whose answer nobody waits for any more."""


def or_error(answers: list[Any]) -> list[Any]:
    for answer in answers:
        if isinstance(answer, HeadraceError):
            raise answer
    return answers

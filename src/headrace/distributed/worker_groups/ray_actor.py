"""One rank as a Ray actor, and the way for its stream to another actor."""

import re
import sys
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from headrace.distributed.worker_groups.failures import WorkerFailure, WorkerTraceback
from headrace.distributed.worker_groups.rank import (
    Answer,
    Call,
    RankInfo,
    RankServer,
    RankSettings,
    Sink,
    open_store,
)
from headrace.distributed.worker_groups.wire import Payload, decode
from headrace.errors import HeadraceError

_IN_FLIGHT = 2
_MESSAGE_BYTES = 16 << 20
"""Items are sent together up to this size: a message costs a millisecond or two, whatever it holds."""


def briefly(error: RayError) -> str:
    """Return what Ray knows of a process that is gone, without its advice.

    Example: "pid 4711 on 10.0.0.2 was killed or crashed, perhaps for memory".
    """
    text = str(error)
    facts = dict(re.findall(r"^\s*(pid|ip): (\S+)$", text, re.MULTILINE))
    if "Worker exit type: SYSTEM_ERROR" in text and "pid" in facts:
        return (
            f"pid {facts['pid']} on {facts.get('ip', 'its node')} was killed or crashed, perhaps for memory"
        )
    return " ".join(text.split())


class RankActor(RankServer):
    """A RankServer behind Ray."""

    def __init__(self) -> None:
        self._meeting: Any = None
        self._offered: list[Payload] = []

    def open_store(self, world_size: int) -> tuple[str, int]:
        """Open the store through which the ranks meet, on this actor's node."""
        host = ray.util.get_node_ip_address()
        self._meeting = open_store(host, world_size)
        return host, self._meeting.port

    def start(
        self, info: RankInfo, settings: RankSettings, spec: list[Any], path: list[str]
    ) -> Iterator[Answer]:
        """Start the rank; what the driver can import from `path`, it can too, where it has the same files."""
        sys.path.extend(entry for entry in path if entry not in sys.path)
        # The reference comes in a list, so that Ray loads the worker's class after the path is set.
        yield self.build(info, settings, partial(ray.get, spec[0]))

    def serve(
        self, arguments: Payload, method: str, streams: bool, keeps: bool, sink: Sink | None
    ) -> Iterator[Answer]:
        yield from self.answers(Call(method, arguments, streams=streams, keeps=keeps, sink=sink))

    def offer(self, items: list[Payload], *, is_first: bool) -> None:
        """Keep items of another actor's stream; the first ones replace what a broken stream has left."""
        if is_first:
            self._offered = []
        self._offered.extend(items)

    def consume(self, method: str, arguments: Payload) -> Answer:
        """Call a method of the worker with the items that were offered."""
        items, self._offered = self._offered, []
        (answer,) = self.answers(Call(method, arguments, keeps=False), map(decode, items))
        return answer


class ActorSink:
    """Sends a stream's items to an actor and has its worker consume them: `method(items, *args)`.

    `name` is what messages call the actor.
    """

    def __init__(self, actor: Any, method: str, arguments: Payload, name: str | None = None) -> None:
        self._name = name or f"the receiver of {method}"
        self._actor = actor
        self._method = method
        self._arguments = arguments
        self._waiting: list[Payload] = []
        self._sent: deque[Any] = deque()
        self._is_first = True

    def put(self, item: Payload) -> None:
        """Send an item, soon; a few messages may be on their way."""
        self._waiting.append(item)
        if sum(waiting.nbytes for waiting in self._waiting) >= _MESSAGE_BYTES:
            self._send()

    def finish(self) -> None:
        """Wait until the other worker has consumed all items; its error is raised here."""
        self._send()
        while self._sent:
            self._get(self._sent.popleft())
        answer = self._get(self._actor.consume.remote(self._method, self._arguments))
        if isinstance(answer, WorkerFailure):
            raise answer.kind(f"{answer.summary} (in {self._method} of the receiver)") from WorkerTraceback(
                f"\n\n{answer.trace}"
            )

    def _send(self) -> None:
        self._sent.append(self._actor.offer.remote(self._waiting, is_first=self._is_first))
        self._waiting, self._is_first = [], False
        if len(self._sent) > _IN_FLIGHT:
            self._get(self._sent.popleft())

    def _get(self, reference: Any) -> Any:
        try:
            return ray.get(reference)
        except RayError as error:
            raise HeadraceError(f"{self._name} has died: {briefly(error)}") from error

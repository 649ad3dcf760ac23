"""One rank as a Ray actor, and the way for its stream to another actor."""

import re
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from functools import partial
from queue import Queue
from threading import Thread
from typing import Any, Self

import ray
from ray.exceptions import RayError

from headrace.distributed.ray_connection import NAMESPACE
from headrace.distributed.worker_groups.failures import WorkerFailure, WorkerTraceback, raise_failures
from headrace.distributed.worker_groups.rank import (
    Answer,
    Call,
    RankInfo,
    RankServer,
    RankSettings,
    Reply,
    Seat,
    open_store,
)
from headrace.distributed.worker_groups.wire import Payload, decode, encode, light, whole
from headrace.errors import HeadraceError

# Answers come in parts; two of them at most wait in the object store for the caller.
ANSWERS: dict[str, Any] = {"num_returns": "streaming", "_generator_backpressure_num_objects": 2}
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
        self._stream: _Incoming | None = None

    def open_store(self, world_size: int) -> tuple[str, int]:
        """Open the store through which the ranks meet, on this actor's node."""
        host = ray.util.get_node_ip_address()
        self._meeting = open_store(host, world_size)
        return host, self._meeting.port

    def seat(self) -> Seat:
        node = ray.get_runtime_context().get_node_id()
        return Seat(node, ",".join(map(str, ray.get_gpu_ids())))

    def start(
        self, info: RankInfo, settings: RankSettings, spec: list[Any], path: list[str]
    ) -> Iterator[Answer]:
        """Start the rank; what the driver can import from `path`, it can too, where it has the same files."""
        sys.path.extend(entry for entry in path if entry not in sys.path)
        # The reference comes in a list, so that Ray loads the worker's class after the path is set.
        yield self.build(info, settings, partial(ray.get, spec[0]))

    def serve(
        self, arguments: bytes | Payload, method: str, streams: bool, keeps: bool, sink: Any
    ) -> Iterator[Answer]:
        yield from self.answers(Call(method, whole(arguments), streams=streams, keeps=keeps, sink=sink))

    def call(
        self, arguments: bytes | Payload, method: str, keeps: bool
    ) -> bytes | Payload | WorkerFailure | None:
        """Answer a call of a method that does not stream, in one part, which is much cheaper for the caller."""
        answer = next(self.answers(Call(method, whole(arguments), keeps=keeps)))
        if isinstance(answer, WorkerFailure):
            return answer
        return None if answer.value is None else light(answer.value)

    def receive(self, method: str, arguments: Payload) -> None:
        """Call a method of the worker with the items of another actor's stream, in a thread, while they come.

        An earlier stream, whose sender has died, is broken off.
        """
        self.end_stream(whole=False)
        self._stream = _Incoming()
        call = Call(method, arguments, keeps=False)
        self._stream.start(lambda items: next(self.answers(call, items)))

    def offer(self, items: list[Payload]) -> None:
        """Hand on items of the stream, once those before are taken."""
        if self._stream is not None:
            self._stream.put(items)

    def end_stream(self, *, whole: bool) -> Answer:
        """Return the worker's answer; a stream that is not `whole` ends for it with an error."""
        stream, self._stream = self._stream, None
        return Reply() if stream is None else stream.end(whole)


class _Incoming:
    """A stream on its way into a thread; a message waits while another is taken."""

    def __init__(self) -> None:
        self._messages: Queue[list[Payload] | None] = Queue(1)
        self._is_whole = False
        self._answer: Answer = Reply()
        self._thread = Thread()

    def start(self, run: Callable[[Iterator[Any]], Answer]) -> None:
        def take() -> None:
            self._answer = run(self._items())
            # What is still to come has no reader.
            while self._messages.get() is not None:
                pass

        self._thread = Thread(target=take, daemon=True)
        self._thread.start()

    def put(self, items: list[Payload] | None) -> None:
        self._messages.put(items)

    def end(self, whole: bool) -> Answer:
        self._is_whole = whole
        self.put(None)
        self._thread.join()
        return self._answer

    def _items(self) -> Iterator[Any]:
        while (items := self._messages.get()) is not None:
            yield from map(decode, items)
        self._messages.put(None)
        if not self._is_whole:
            raise HeadraceError("the sender of a stream broke it off")


class ActorSink:
    """Sends a stream's items to an actor whose worker consumes them meanwhile: `method(items, *args)`.

    `name` is what messages call the actor.
    """

    def __init__(self, actor: Any, method: str, arguments: Payload, name: str | None = None) -> None:
        self._name = name or f"the receiver of {method}"
        self._actor = actor
        self._method = method
        self._arguments = arguments
        self._waiting: list[Payload] = []
        self._is_first = True
        self._sent: deque[Any] = deque()

    def __enter__(self) -> Self:
        self._sent.append(self._actor.receive.remote(self._method, self._arguments))
        return self

    def put(self, item: Payload) -> None:
        """Send an item, the first at once and others soon; a few messages may be on their way."""
        self._waiting.append(item)
        if self._is_first or sum(waiting.nbytes for waiting in self._waiting) >= _MESSAGE_BYTES:
            self._send()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Wait until the other worker has consumed all items, and raise its error, if this one has none of its own."""
        if kind is not None:
            self._actor.end_stream.remote(whole=False)
            return
        self._send()
        while self._sent:
            self._get(self._sent.popleft())
        answer = self._get(self._actor.end_stream.remote(whole=True))
        if isinstance(answer, WorkerFailure):
            raise answer.kind(f"{answer.summary} (in {self._method} of the receiver)") from WorkerTraceback(
                f"\n\n{answer.trace}"
            )

    def _send(self) -> None:
        self._sent.append(self._actor.offer.remote(self._waiting))
        self._waiting, self._is_first = [], False
        if len(self._sent) > _IN_FLIGHT:
            self._get(self._sent.popleft())

    def _get(self, reference: Any) -> Any:
        try:
            return ray.get(reference)
        except RayError as error:
            raise HeadraceError(f"{self._name} has died: {briefly(error)}") from error


class ActorReader:
    """Calls a generator method of an actor's worker from another process of the cluster; one that is read at a time.

    The actor is found by the name that Ray knows it by, also after it has been started again; it takes other calls once
    the stream has been read or closed. `who` is what messages call it.
    """

    def __init__(self, name: str, method: str, who: str) -> None:
        self._name, self._method, self._who = name, method, who

    def __call__(self, *args: Any) -> Generator[Any, None, None]:
        actor, arguments, has_begun = self._found(), encode((args, {})), False
        while True:
            parts = actor.serve.options(**ANSWERS).remote(arguments, self._method, True, True, None)
            try:
                for part in parts:
                    answer: Answer = ray.get(part)
                    if isinstance(answer, WorkerFailure):
                        raise_failures([answer], world_size=1, doing=self._method, alone=self._who)
                    if answer.value is not None:
                        has_begun = True
                        yield decode(answer.value)
                return
            except RayError as error:
                # What this process knows under the name may be the actor of before.
                dead, actor = actor, self._found()
                if has_begun or actor == dead:
                    raise HeadraceError(f"{self._who} has died: {briefly(error)}") from error
            finally:
                # The actor would wait for ever for who takes the rest of a stream that is given up.
                with suppress(RayError):
                    for _ in parts:
                        pass

    def _found(self) -> Any:
        try:
            return ray.get_actor(self._name, namespace=NAMESPACE)
        except ValueError as error:
            raise HeadraceError(f"{self._who} has died, and is not there again yet") from error

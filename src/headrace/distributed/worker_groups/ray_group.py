"""Workers as Ray actors, one per rank, inside the placement group of a RayVirtualCluster."""

import sys
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import ray
from ray.exceptions import RayError

from headrace.distributed.ray_connection import NAMESPACE
from headrace.distributed.topology import RankLayout
from headrace.distributed.virtual_cluster import RayVirtualCluster
from headrace.distributed.worker_groups.failures import WorkerFailure
from headrace.distributed.worker_groups.interfaces import WorkerGroup
from headrace.distributed.worker_groups.rank import (
    Answer,
    Call,
    RankInfo,
    RankSettings,
    Reply,
    Seat,
    WorkerSpec,
)
from headrace.distributed.worker_groups.ray_actor import ANSWERS, ActorReader, ActorSink, RankActor, briefly
from headrace.distributed.worker_groups.remote import GRACE_S, RemoteWorkerGroup
from headrace.distributed.worker_groups.wire import Payload, encode, light, whole
from headrace.errors import HeadraceError

_GENTLE_S = 10.0
_INLINE_BYTES = 64 << 10
"""Arguments up to this size go with their call: an object of their own costs more than their bytes."""


class RayWorkerGroup(RemoteWorkerGroup):
    """One actor per rank of `layout`, with torch.distributed initialised between them.

    Consecutive ranks share a node. The actors belong to the driver's Ray job and end with it, on the running Ray
    cluster, or on one started here; `room` are the keywords of RayVirtualCluster. `alone` is what messages call a group
    of one.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        layout: RankLayout,
        *,
        settings: RankSettings | None = None,
        grace_s: float = GRACE_S,
        alone: str | None = None,
        **room: Any,
    ) -> None:
        super().__init__(layout, grace_s=grace_s, alone=alone)
        self._actors: list[Any] = []
        # By rank what gives its answer: a future, or, of a generator, its parts.
        self._parts: dict[int, Any] = {}
        self._answered: SimpleQueue[int] = SimpleQueue()
        self._spec, self._settings, self._room = spec, settings, room
        self._name = f"headrace-{uuid.uuid4().hex}"
        self.restart()

    def restart(self) -> None:
        if self._is_shut:
            raise HeadraceError(f"cannot start {self._alone or 'the workers'} again: it was shut down")
        self.cluster = RayVirtualCluster(self.world_size, **self._room)
        self._actors, self._ended = [], None
        self._open(self._spec, self._settings)

    def _start(self, spec: WorkerSpec, settings: RankSettings) -> None:
        self._busy = "start-up"
        per_node = self.cluster.workers_per_node
        actor_class = ray.remote(max_restarts=0, max_task_retries=0)(RankActor)
        for rank in range(self.world_size):
            where = self.cluster.place(rank)
            options = {
                "num_cpus": self.cluster.cpus_per_worker,
                "num_gpus": 1 if settings.device == "cuda" else 0,
                "scheduling_strategy": where,
                "runtime_env": self.cluster.runtime_env,
                **({"name": self._name, "namespace": NAMESPACE} if self._alone else {}),
            }
            self._actors.append(actor_class.options(**options).remote())
        carried = [ray.put(spec)]
        try:
            host, port = ray.get(self._actors[0].open_store.remote(self.world_size))
        except RayError as error:
            first = self._alone or "the first worker"
            raise HeadraceError(f"Ray could not start {first}: {briefly(error)}") from error
        for rank, actor in enumerate(self._actors):
            info = RankInfo(rank, self.world_size, rank % per_node, per_node, host, port)
            self._parts[rank] = actor.start.options(**ANSWERS).remote(info, settings, carried, sys.path)
        for _ in self._answers("start-up"):
            pass

    def stream_to(
        self, target: WorkerGroup, method: str, into: str, *args: Any, given: Sequence[Any] = ()
    ) -> None:
        if isinstance(target, RayWorkerGroup) and target.world_size == 1:
            sink = ActorSink(target._actors[0], into, encode((args, {})), target._alone)
            self._begin_stream(method, encode((tuple(given), {})), sink)
            for _ in self._answers(method):
                pass
        else:
            super().stream_to(target, method, into, *args, given=given)

    def seats(self) -> list[Seat]:
        found: list[Seat] = ray.get([actor.seat.remote() for actor in self._actors])
        return found

    def reader(self, method: str) -> ActorReader:
        if self._alone is None:
            raise ValueError(f"{method} of a group of several workers cannot be read; build it with `alone`")
        return ActorReader(self._name, method, self._alone)

    def _post(self, calls: Mapping[int, Call]) -> None:
        carried = self._carried([call.arguments for call in calls.values()])
        self._answered = SimpleQueue()
        for (rank, call), arguments in zip(calls.items(), carried):
            actor = self._actors[rank]
            if call.streams:
                serve = actor.serve.options(**ANSWERS)
                self._parts[rank] = serve.remote(arguments, call.method, call.streams, call.keeps, call.sink)
            else:
                self._parts[rank] = actor.call.remote(arguments, call.method, call.keeps).future()
                self._parts[rank].add_done_callback(partial(self._note_answer, self._answered, rank))

    def _carried(self, arguments: Sequence[Payload]) -> list[Any]:
        """Return what carries the arguments of each call: large ones, which calls share, by way of the object store."""
        shared = Counter(map(id, arguments))
        stored: dict[int, Any] = {}
        for one in arguments:
            if id(one) not in stored and shared[id(one)] > 1 and one.nbytes > _INLINE_BYTES:
                stored[id(one)] = ray.put(one)
        return [stored.get(id(one)) or light(one) for one in arguments]

    @staticmethod
    def _note_answer(answered: "SimpleQueue[int]", rank: int, _future: object) -> None:
        answered.put(rank)

    def _wait(self, ranks: set[int], timeout_s: float | None) -> list[tuple[int, Answer]]:
        if any(isinstance(self._parts[rank], Future) for rank in ranks):
            return self._called(ranks, timeout_s)
        waiting = {self._parts[rank]: rank for rank in sorted(ranks)}
        ready, rest = ray.wait(list(waiting), num_returns=1, timeout=timeout_s)
        if ready and rest:
            # All that have come meanwhile: with one at a time, a thousand ranks would be listed a thousand times.
            ready += ray.wait(rest, num_returns=len(rest), timeout=0)[0]
        return [(waiting[parts], self._receive(waiting[parts])) for parts in ready]

    def _called(self, ranks: set[int], timeout_s: float | None) -> list[tuple[int, Answer]]:
        """Return answers of one part each as they come: no rank is looked at before it has answered."""
        ready: list[int] = []
        with suppress(Empty):
            ready.append(self._answered.get(timeout=timeout_s))
            while True:
                ready.append(self._answered.get_nowait())
        return [(rank, self._receive(rank)) for rank in ready if rank in ranks]

    def _receive(self, rank: int) -> Answer:
        part = self._parts[rank]
        try:
            answer: Any = part.result() if isinstance(part, Future) else ray.get(next(part))
        except RayError as error:
            who = self._alone or "a worker actor"
            return WorkerFailure(rank, HeadraceError, f"{who} has died: {briefly(error)}", is_lost=True)
        if isinstance(answer, Reply | WorkerFailure):
            return answer
        return Reply(None if answer is None else whole(answer))

    def _end(self, *, gently: bool) -> None:
        if ray.is_initialized():
            if gently:
                stopping = [actor.stop.remote() for actor in self._actors]
                with suppress(RayError):
                    ray.wait(stopping, num_returns=len(stopping), timeout=_GENTLE_S)
            for actor in self._actors:
                ray.kill(actor)
        self._parts = {}
        self.cluster.shutdown()

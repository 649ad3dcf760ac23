"""Workers as Ray actors, one per rank, inside the placement group of a RayVirtualCluster."""

import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from headrace.distributed.ray_connection import NAMESPACE
from headrace.distributed.topology import RankLayout
from headrace.distributed.virtual_cluster import RayVirtualCluster
from headrace.distributed.worker_groups.failures import WorkerFailure
from headrace.distributed.worker_groups.interfaces import WorkerGroup
from headrace.distributed.worker_groups.rank import Answer, Call, RankInfo, RankSettings, Seat, WorkerSpec
from headrace.distributed.worker_groups.ray_actor import ANSWERS, ActorReader, ActorSink, RankActor, briefly
from headrace.distributed.worker_groups.remote import GRACE_S, RemoteWorkerGroup
from headrace.distributed.worker_groups.wire import encode
from headrace.errors import HeadraceError

_GENTLE_S = 10.0


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
        self._parts: dict[int, Any] = {}
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
        arguments: dict[int, Any] = {}
        for rank, call in calls.items():
            # Siblings of a replica share one copy in the object store.
            key = id(call.arguments)
            if key not in arguments:
                arguments[key] = ray.put(call.arguments)
            serve = self._actors[rank].serve.options(**ANSWERS)
            self._parts[rank] = serve.remote(arguments[key], call.method, call.streams, call.keeps, call.sink)

    def _wait(self, ranks: set[int], timeout_s: float | None) -> list[tuple[int, Answer]]:
        waiting = {self._parts[rank]: rank for rank in sorted(ranks)}
        ready, rest = ray.wait(list(waiting), num_returns=1, timeout=timeout_s)
        if ready and rest:
            # All that have come meanwhile: with one at a time, a thousand ranks would be listed a thousand times.
            ready += ray.wait(rest, num_returns=len(rest), timeout=0)[0]
        return [(waiting[parts], self._receive(waiting[parts])) for parts in ready]

    def _receive(self, rank: int) -> Answer:
        try:
            answer: Answer = ray.get(next(self._parts[rank]))
        except RayError as error:
            who = self._alone or "a worker actor"
            return WorkerFailure(rank, HeadraceError, f"{who} has died: {briefly(error)}", is_lost=True)
        return answer

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

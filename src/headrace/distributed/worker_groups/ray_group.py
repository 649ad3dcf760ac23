"""Workers as Ray actors, one per rank, inside the placement group of a RayVirtualCluster."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from headrace.distributed.named_sharding import NamedSharding
from headrace.distributed.virtual_cluster import RayVirtualCluster
from headrace.distributed.worker_groups.failures import lost
from headrace.distributed.worker_groups.rank import (
    Answer,
    Call,
    RankPlace,
    RankServer,
    RankSettings,
    WorkerSpec,
    open_store,
)
from headrace.distributed.worker_groups.remote import GRACE_S, RemoteWorkerGroup
from headrace.distributed.worker_groups.wire import Payload, encode
from headrace.errors import HeadraceError

_GENTLE_S = 10.0
# Answers come in parts; two of them at most wait in the object store for the driver.
_ANSWERS: dict[str, Any] = {"num_returns": "streaming", "_generator_backpressure_num_objects": 2}


class RayWorkerGroup(RemoteWorkerGroup):
    """One actor per rank of `sharding`, with torch.distributed initialised between them.

    Consecutive ranks share a node. The actors belong to the driver's Ray job and end with it. The group owns
    `cluster`, and shuts it down with itself.

    Raises:
        HeadraceError: a worker cannot be built; its own class where it is one of `headrace.errors`.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        sharding: NamedSharding,
        cluster: RayVirtualCluster,
        *,
        settings: RankSettings | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        super().__init__(sharding, grace_s=grace_s)
        self._cluster = cluster
        self._actors: list[Any] = []
        self._parts: dict[int, Any] = {}
        started = False
        try:
            self._start(spec, settings or RankSettings())
            started = True
        finally:
            if not started:
                self.shutdown()

    def _start(self, spec: WorkerSpec, settings: RankSettings) -> None:
        per_node = self._cluster.workers_per_node
        actor_class = ray.remote(max_restarts=0, max_task_retries=0)(_RankActor)
        for rank in range(self.world_size):
            where = PlacementGroupSchedulingStrategy(
                self._cluster.placement_group, placement_group_bundle_index=rank // per_node
            )
            options = {
                "num_cpus": self._cluster.cpus_per_worker,
                "num_gpus": 1 if settings.device == "cuda" else 0,
                "scheduling_strategy": where,
                "runtime_env": self._cluster.runtime_env,
            }
            self._actors.append(actor_class.options(**options).remote())
        self._busy = "start-up"
        encoded = ray.put(encode(spec))
        try:
            host, port = ray.get(self._actors[0].open_store.remote(self.world_size))
        except RayError as error:
            raise HeadraceError(f"Ray could not start the first worker: {error}") from error
        for rank, actor in enumerate(self._actors):
            place = RankPlace(rank, self.world_size, rank % per_node, per_node, host, port)
            self._parts[rank] = actor.start.options(**_ANSWERS).remote(place, settings, encoded, sys.path)
        for _ in self._answers("start-up"):
            pass

    def _post(self, calls: Mapping[int, Call]) -> None:
        arguments: dict[int, Any] = {}
        for rank, call in calls.items():
            # Siblings of a replica share one copy in the object store.
            key = id(call.arguments)
            if key not in arguments:
                arguments[key] = ray.put(call.arguments)
            serve = self._actors[rank].serve.options(**_ANSWERS)
            self._parts[rank] = serve.remote(arguments[key], call.method, call.streams, call.keeps)

    def _wait(self, ranks: set[int], timeout_s: float | None) -> list[tuple[int, Answer]]:
        waiting = {self._parts[rank]: rank for rank in sorted(ranks)}
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=timeout_s)
        return [(waiting[parts], self._receive(waiting[parts])) for parts in ready]

    def _receive(self, rank: int) -> Answer:
        try:
            answer: Answer = ray.get(next(self._parts[rank]))
        except RayError as error:
            reason = " ".join(str(error).split())
            return lost(rank, f"worker actor of rank {rank} ({reason})", None)
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
        self._cluster.shutdown()


def start_ray_group(
    spec: WorkerSpec,
    sharding: NamedSharding,
    *,
    num_nodes: int = 1,
    gpus_per_node: int = 0,
    settings: RankSettings | None = None,
) -> RayWorkerGroup:
    """Reserve a place for every rank on the running Ray cluster, or on one started here, and start the group.

    Raises: what RayVirtualCluster and RayWorkerGroup raise.
    """
    cluster = RayVirtualCluster(sharding.size, num_nodes=num_nodes, gpus_per_node=gpus_per_node)
    return RayWorkerGroup(spec, sharding, cluster, settings=settings)


class _RankActor:
    """A RankServer behind Ray."""

    def __init__(self) -> None:
        self._server: RankServer | None = None
        self._store: Any = None

    def open_store(self, world_size: int) -> tuple[str, int]:
        """Open the store through which the ranks meet, on this actor's node."""
        host = ray.util.get_node_ip_address()
        self._store = open_store(host, world_size)
        return host, self._store.port

    def start(
        self, place: RankPlace, settings: RankSettings, encoded_spec: Payload, path: list[str]
    ) -> Iterator[Answer]:
        """Start the rank; what the driver can import from `path`, it can too, where it has the same files."""
        sys.path.extend(entry for entry in path if entry not in sys.path)
        self._server = RankServer(place, settings)
        yield self._server.start(encoded_spec)

    def serve(self, arguments: Payload, method: str, streams: bool, keeps: bool) -> Iterator[Answer]:
        assert self._server is not None
        yield from self._server.serve(Call(method, arguments, streams=streams, keeps=keeps))

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
        self._store = None

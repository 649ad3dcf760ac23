"""The processes of a TransferQueue store on Ray: index, controller, storage units; and how to reach them.

A cluster has one engine per backend: a controller, storage units and the index actor, reserving no CPUs, so
that starting them never waits for resources. The first `bootstrap` starts it; stores opened later share it, and the
client that started it ends it.
"""

import logging
import secrets
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from transfer_queue.controller import TransferQueueController
from transfer_queue.storage.simple_storage import (
    SimpleStorageUnit,
    StorageKeyNotFoundError,
    StorageUnitData,
)

from headrace.config import DataPlaneConfig
from headrace.data_plane.adapters import check_version
from headrace.data_plane.adapters import transfer_queue_mooncake as mooncake
from headrace.data_plane.adapters.transfer_queue_index import Indexes, IndexServer
from headrace.data_plane.adapters.transfer_queue_socket import Connection, Endpoint
from headrace.data_plane.store.blocks import BlockError, Frames, select_rows
from headrace.distributed.ray_connection import NAMESPACE, Deadline, Part, answers
from headrace.errors import HeadraceError, TransportError

_log = logging.getLogger(__name__)

STARTUP_KNOB = "data_plane.startup_timeout_s"
_LASTING: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0}
_POLL_S = 0.1
_STOP_TIMEOUT_S = 15.0


class IndexActor:
    """The indexes behind a socket of their node; runs as a Ray actor."""

    def __init__(self) -> None:
        self._connection: Connection | None = None

    def serve(self) -> Endpoint:
        self._server = IndexServer(ray.util.get_node_ip_address(), secrets.token_bytes(32))
        indexes = Indexes(self._server.is_alive)
        self._server.start(indexes)
        return self._server.endpoint

    def set_connection(self, connection: Connection) -> None:
        self._connection = connection

    def connection(self) -> Connection | None:
        """Return how to reach TransferQueue; None: not yet."""
        return self._connection


class BlockTable(StorageUnitData):  # type: ignore[misc]
    """A storage unit's blocks by slot, read whole or by row: the rows of one rank lie scattered over all blocks.

    `fields` of a read by row is {name: [counts, rows]}: how many rows of each block, None for all of them, and the
    rows of all blocks in one array.
    """

    def get_data(self, fields: Any, global_indexes: list[int]) -> dict[str, list[Any]]:
        """Return blocks, or some of their rows."""
        blocks: dict[str, list[Any]] = super().get_data(list(fields), global_indexes)
        if isinstance(fields, dict):
            for name, (counts, rows) in fields.items():
                wanted = iter(np.split(np.array(rows), np.cumsum([n for n in counts if n is not None])))
                try:
                    blocks[name] = [
                        block if count is None else list(select_rows(Frames(*block), next(wanted)))
                        for block, count in zip(blocks[name], counts, strict=True)
                    ]
                except BlockError as error:
                    # A slot that has been used again; the kind of error that a reader takes for a lost block.
                    raise StorageKeyNotFoundError(str(error)) from error
        return blocks


def _serve_rows(unit: Any) -> None:
    """Let a storage unit that has stored nothing yet give single rows; runs in the unit's process."""
    unit.storage_data = BlockTable(unit.storage_data.storage_size)


class Engine:
    """The processes that this client has started."""

    def __init__(self, config: DataPlaneConfig) -> None:
        self._config = config
        self.actors: list[Any] = []
        self._graceful: list[Callable[[], Any]] = []
        self._master: mooncake.MooncakeMaster | None = None
        deadline = Deadline(config.startup_timeout_s, STARTUP_KNOB)
        if config.backend == "mooncake_cpu":
            mooncake.check_installed()
        self.index = _actor(IndexActor, name=_index_name(config.backend), namespace=NAMESPACE)
        self._indexes = [self.index, *(_actor(IndexActor) for _ in range(1, config.indexes))]
        self.actors.extend(self._indexes)
        with ExitStack() as undo:
            undo.callback(self.stop)
            published = self.index.set_connection.remote(self._start(deadline))
            answers(published, "starting the index", deadline)
            undo.pop_all()

    def _start(self, deadline: Deadline) -> Connection:
        backend, starting = self._config.backend, "starting TransferQueue's controller"
        controller = TransferQueueController.options(**_LASTING).remote(polling_mode=True)
        self.actors.append(controller)
        start = self._start_mooncake if backend == "mooncake_cpu" else self._start_simple
        storage, units, addresses = start(deadline)
        answers(controller.__ray_call__.remote(check_version), starting, deadline)
        info = answers(controller.get_zmq_server_info.remote(), starting, deadline)
        endpoints = answers([index.serve.remote() for index in self._indexes], "starting the index", deadline)
        unit_parts = [
            Part(f"storage unit {i} of {len(units)} at {address}", unit)
            for i, (address, unit) in enumerate(zip(addresses, units, strict=True))
        ]
        controller_part = Part("TransferQueue's controller", controller)
        index_parts = [
            Part(f"index {number} of {len(endpoints)}" if number else "the index of the store", index)
            for number, index in enumerate(self._indexes)
        ]
        return Connection(
            uuid.uuid4().hex, backend, info, storage, endpoints, index_parts, controller_part, unit_parts
        )

    def _start_simple(self, deadline: Deadline) -> tuple[dict[str, Any], list[Any], list[str]]:
        settings = {"num_data_storage_units": self._config.num_storage_units, "total_storage_size": None}
        units = [
            SimpleStorageUnit.options(**_LASTING, scheduling_strategy=where).remote(
                config={**settings, "_run_id": uuid.uuid4().hex}
            )
            for where in _spread(self._config.num_storage_units)
        ]
        self.actors.extend(units)
        starting = f"starting {len(units)} TransferQueue storage units"
        infos = answers([unit.get_zmq_server_info.remote() for unit in units], starting, deadline)
        preparing = [unit.__ray_call__.remote(do) for unit in units for do in (check_version, _serve_rows)]
        answers(preparing, f"preparing {len(units)} TransferQueue storage units", deadline)
        # Only of units that are up: others would be waited for.
        self._graceful = [unit.shutdown.remote for unit in units]
        return {"zmq_info": {info.id: info for info in infos}}, units, [info.ip for info in infos]

    def _start_mooncake(self, deadline: Deadline) -> tuple[dict[str, Any], list[Any], list[str]]:
        config, address = self._config, mooncake.routable_address(ray.util.get_node_ip_address())
        self._master = mooncake.MooncakeMaster(address, config.mooncake_master_port, deadline.left)
        units = [
            _actor(
                mooncake.MooncakeUnit,
                self._master.address,
                config.global_segment_size,
                scheduling_strategy=where,
            )
            for where in _spread(config.num_storage_units)
        ]
        self.actors.extend(units)
        starting = f"starting {len(units)} Mooncake storage units"
        addresses = answers([unit.start.remote() for unit in units], starting, deadline)
        self._graceful = [unit.stop.remote for unit in units]
        return mooncake.client_settings(self._master.address, config), units, addresses

    def stop(self) -> None:
        """End all processes; may be called twice."""
        actors, self.actors = self.actors if ray.is_initialized() else [], []
        references = [stop() for stop in self._graceful] if actors else []
        if references:
            ray.wait(references, num_returns=len(references), timeout=_STOP_TIMEOUT_S)
        for actor in actors:
            ray.kill(actor)
        deadline = Deadline(_STOP_TIMEOUT_S, STARTUP_KNOB)
        while actors and find_index(self._config.backend) is not None and not deadline.is_over():
            time.sleep(_POLL_S)
        self._graceful = []
        if self._master is not None:
            self._master.stop()
            self._master = None


def find_index(backend: str) -> ActorHandle[Any] | None:
    """Return the index actor of this cluster's engine, if it has one."""
    try:
        return ray.get_actor(_index_name(backend), namespace=NAMESPACE)
    except ValueError:
        return None


def start_engine(config: DataPlaneConfig) -> tuple[ActorHandle[Any], Engine | None]:
    """Start the cluster's engine, and return its index; no engine if another process has just begun to start it."""
    try:
        engine = Engine(config)
        return engine.index, engine
    except ValueError as error:
        if isinstance(error, HeadraceError):
            raise
        if (index := find_index(config.backend)) is not None:
            return index, None
        given_up = "the process that was starting this cluster's engine has given up; try again"
        raise TransportError(f"{given_up} ({error})") from error


def wait_for_connection(index: ActorHandle[Any], deadline: Deadline) -> Connection:
    """Return how to reach the engine's processes, once they are up."""
    while True:
        connection: Connection | None = answers(
            index.connection.remote(), "asking the index for its connection", deadline
        )
        if connection is not None:
            return connection
        if deadline.is_over():
            raise TransportError(
                f"the store's processes are still starting after {deadline.seconds:.3g} s; raise {deadline.knob}"
            )
        time.sleep(_POLL_S)


def _index_name(backend: str) -> str:
    return f"headrace-index-{backend}"


def _actor(kind: type, *arguments: object, **options: Any) -> Any:
    return ray.remote(**_LASTING)(kind).options(**options).remote(*arguments)


def _spread(count: int) -> list[NodeAffinitySchedulingStrategy]:
    """Return a node for each of `count` actors, the nodes in turn."""
    nodes = sorted(node["NodeID"] for node in ray.nodes() if node.get("Alive"))
    if not nodes:
        raise TransportError("the Ray cluster has no node that is alive")
    return [NodeAffinitySchedulingStrategy(nodes[i % len(nodes)], soft=False) for i in range(count)]

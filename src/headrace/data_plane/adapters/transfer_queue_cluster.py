"""The processes of a TransferQueue store on Ray: controller, storage units, index; and how to reach them.

A cluster has one engine per backend: a controller, storage units and the index actor, reserving no CPUs, so
that starting them never waits for resources. The first `bootstrap` starts it; stores opened later share it, and the
client that started it ends it.
"""

import os
import pickle
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from transfer_queue.controller import TransferQueueController
from transfer_queue.storage.simple_storage import SimpleStorageUnit

from headrace.config import DataPlaneConfig
from headrace.data_plane.adapters import transfer_queue_mooncake as mooncake
from headrace.data_plane.adapters.transfer_queue_channel import KNOB, STARTUP_KNOB, Channel, Endpoint, Server
from headrace.data_plane.adapters.transfer_queue_index import Call, Garbage, Indexes, StoreFacts
from headrace.data_plane.adapters.transfer_queue_payloads import Connection, Part, PayloadClient
from headrace.data_plane.adapters.transfer_queue_units import serve_rows
from headrace.data_plane.adapters.transfer_queue_version import check_version
from headrace.distributed.ray_connection import NAMESPACE, connect
from headrace.errors import DataPlaneError, HeadraceError, TransportError

BACKENDS = {"simple": "SimpleStorage", "mooncake_cpu": "MooncakeStore"}
_POLL_S = 0.1
_STOP_TIMEOUT_S = 15.0
_PING_TIMEOUT_S = 1.0


class Deadline:
    """The moment at which an operation is given up; `knob` is the key that moves it."""

    def __init__(self, seconds: float, knob: str = KNOB) -> None:
        self.seconds, self.knob = seconds, knob
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds left; a little, even when it has passed."""
        return max(self._end - time.monotonic(), 0.001)

    def is_over(self) -> bool:
        return time.monotonic() >= self._end


def ask(reference: Any, what: str, deadline: Deadline) -> Any:
    """Return the value of a Ray reference, or of a list of them.

    Raises:
        TransportError: no answer by the deadline, or the actor is gone.
        HeadraceError: what the actor raised.
    """
    try:
        return ray.get(reference, timeout=deadline.left())
    except GetTimeoutError as error:
        raise TransportError(
            f"{what}: no answer within {deadline.seconds:.3g} s; if the cluster is only slow, raise {deadline.knob}"
        ) from error
    except RayActorError as error:
        raise _gone(what) from error
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, HeadraceError):
            raise cause from None
        raise DataPlaneError(f"{what}: {type(cause).__name__}: {cause}") from error
    except RayError as error:
        raise TransportError(f"{what}: {error}") from error


def connect_ray(config: DataPlaneConfig, *, may_start: bool) -> bool:
    """Connect this process to Ray, unless it is; return whether it was not.

    The cluster is `ray_address`, or else RAY_ADDRESS, or else the one on this machine; a bootstrapping process
    starts a local one where there is none to name.
    """
    if ray.is_initialized():
        return False
    named = {"data_plane.ray_address": config.ray_address, "RAY_ADDRESS": os.environ.get("RAY_ADDRESS")}
    named_by, address = next(((name, a) for name, a in named.items() if a), ("data_plane.ray_address", None))
    connect(address or (None if may_start else "auto"), named_by=named_by)
    return True


def find_index(backend: str) -> ActorHandle[Any] | None:
    """Return the index actor of this cluster's engine, if it has one."""
    try:
        return ray.get_actor(_index_name(backend), namespace=NAMESPACE)
    except ValueError:
        return None


def start_engine(config: DataPlaneConfig) -> "Engine | None":
    """Start the cluster's engine; None if another process has just begun to. Raises what Engine raises."""
    try:
        return Engine(config)
    except ValueError as error:
        if isinstance(error, HeadraceError) or find_index(config.backend) is None:
            raise
        return None


class IndexActor(Indexes):
    """The indexes behind a socket of their node; runs as a Ray actor."""

    def serve(self) -> Endpoint:
        """Begin to answer `run`, one request after the other."""
        address = ray.util.get_node_ip_address()
        server = Server(address, secrets.token_bytes(32), self._answer)
        self._is_alive = server.is_alive
        return server.endpoint

    def _answer(self, call: Call | None) -> Any:
        # A new client says nothing but that it is there.
        return None if call is None else self.run(call)

    def ping(self) -> None:
        """Return, as a process does that is alive."""


class Engine:
    """The processes that this client has started."""

    def __init__(self, config: DataPlaneConfig) -> None:
        """Start them.

        Raises:
            TransportError: they are not up within `startup_timeout_s`.
            ConfigError: a backend that is not installed, or a port that is taken.
        """
        self._config = config
        self._id = uuid.uuid4().hex
        self._actors: list[Any] = []
        self._graceful: list[Callable[[], Any]] = []
        self._master: mooncake.MooncakeMaster | None = None
        deadline = Deadline(config.startup_timeout_s, STARTUP_KNOB)
        if config.backend == "mooncake_cpu":
            mooncake.check_installed()
        self.index = _actor(IndexActor, name=_index_name(config.backend), namespace=NAMESPACE)
        self._actors.append(self.index)
        with ExitStack() as undo:
            undo.callback(self.stop)
            connection = self._start(deadline)
            published = self.index.set_connection.remote(pickle.dumps(connection))
            ask(published, "starting the index", deadline)
            undo.pop_all()

    def _start(self, deadline: Deadline) -> Connection:
        named = self._named("controller")
        controller = TransferQueueController.options(**named, num_cpus=0, max_restarts=0).remote(
            polling_mode=True
        )
        self._actors.append(controller)
        start = self._start_mooncake if self._config.backend == "mooncake_cpu" else self._start_simple
        backend, storage, addresses = start(deadline)
        starting = "starting TransferQueue's controller"
        ask(controller.__ray_call__.remote(check_version), starting, deadline)
        info = ask(controller.get_zmq_server_info.remote(), starting, deadline)
        endpoint = ask(self.index.serve.remote(), "starting the index", deadline)
        count = len(addresses)
        return Connection(
            self._id,
            backend,
            info,
            storage,
            endpoint,
            Part("TransferQueue's controller", named["name"]),
            tuple(
                Part(f"storage unit {i} of {count} at {address}", self._named(f"unit-{i}")["name"])
                for i, address in enumerate(addresses)
            ),
        )

    def _named(self, part: str) -> dict[str, str]:
        return {"name": f"headrace-{part}-{self._id}", "namespace": NAMESPACE}

    def _start_simple(self, deadline: Deadline) -> tuple[str, dict[str, Any], list[str]]:
        settings = {
            "num_data_storage_units": self._config.num_storage_units,
            "total_storage_size": None,
            "_run_id": uuid.uuid4().hex,
        }
        units = [
            SimpleStorageUnit.options(
                **self._named(f"unit-{i}"), num_cpus=0, scheduling_strategy=where
            ).remote(config=settings)
            for i, where in enumerate(_spread(self._config.num_storage_units))
        ]
        self._actors.extend(units)
        infos = ask(
            [unit.get_zmq_server_info.remote() for unit in units],
            f"starting {len(units)} TransferQueue storage units",
            deadline,
        )
        preparing = [unit.__ray_call__.remote(do) for unit in units for do in (check_version, serve_rows)]
        ask(preparing, f"preparing {len(units)} TransferQueue storage units", deadline)
        # Only of units that are up: others would be waited for.
        self._graceful = [unit.shutdown.remote for unit in units]
        return BACKENDS["simple"], {"zmq_info": {info.id: info for info in infos}}, [i.ip for i in infos]

    def _start_mooncake(self, deadline: Deadline) -> tuple[str, dict[str, Any], list[str]]:
        config = self._config
        address = mooncake.routable_address(ray.util.get_node_ip_address())
        self._master = mooncake.MooncakeMaster(address, config.mooncake_master_port, deadline.left())
        sizes = (config.global_segment_size, 16 * 1024 * 1024)
        units = [
            _actor(
                mooncake.MooncakeUnit,
                self._master.address,
                *sizes,
                **self._named(f"unit-{i}"),
                scheduling_strategy=where,
            )
            for i, where in enumerate(_spread(config.num_storage_units))
        ]
        self._actors.extend(units)
        starting = f"starting {len(units)} Mooncake storage units"
        addresses = ask([unit.start.remote() for unit in units], starting, deadline)
        self._graceful = [unit.stop.remote for unit in units]
        return BACKENDS["mooncake_cpu"], mooncake.client_settings(self._master.address, config), addresses

    @property
    def actors(self) -> Sequence[Any]:
        return tuple(self._actors)

    def stop(self) -> None:
        """End all processes; may be called twice."""
        if not ray.is_initialized():
            actors: list[Any] = []
        else:
            actors, references = self._actors, [stop() for stop in self._graceful]
            if references:
                ray.wait(references, num_returns=len(references), timeout=_STOP_TIMEOUT_S)
        for actor in actors:
            ray.kill(actor)
        deadline = Deadline(_STOP_TIMEOUT_S)
        while actors and find_index(self._config.backend) is not None and not deadline.is_over():
            time.sleep(_POLL_S)
        self._actors, self._graceful = [], []
        if self._master is not None:
            self._master.stop()
            self._master = None


def wait_for_connection(index: ActorHandle[Any], deadline: Deadline) -> Connection:
    """Return how to reach the engine's TransferQueue, once it is up."""
    while True:
        data = ask(index.connection.remote(), "asking the index for its connection", deadline)
        if data is not None:
            connection: Connection = pickle.loads(data)
            return connection
        if deadline.is_over():
            raise TransportError(
                f"the store's processes are still starting after {deadline.seconds:.3g} s; raise {deadline.knob}"
            )
        time.sleep(_POLL_S)


class Link(NamedTuple):
    """A process's ways to the bulk and to the books."""

    payloads: PayloadClient
    books: Channel

    def call(
        self,
        store: str,
        operation: str,
        arguments: Sequence[object],
        what: str,
        limit_s: float,
        dropped: Sequence[int] = (),
    ) -> tuple[Any, Garbage | None]:
        """Return what an operation of a store, or of all (""), returns, and blocks to drop.

        Raises what `Channel.ask` raises.
        """
        request = Call(self.books.owner(), store, operation, tuple(arguments), dropped)
        answer: tuple[Any, Garbage | None] = self.books.ask(request, what, limit_s)
        return answer

    def open_store(self, config: DataPlaneConfig, deadline: Deadline) -> str:
        """Open a store, in place of one whose process is gone, and return its handle."""
        what = f"opening store '{config.store_name}'"
        holder = f"process {os.getpid()} on {ray.util.get_node_ip_address()}"
        arguments = (self.books.owner(), config.store_name, config.storage_capacity, holder)
        (handle, ended), _ = self.call("", "open_store", arguments, what, deadline.left())
        self.drop_ended(ended, what, deadline)
        return str(handle)

    def list_stores(self, deadline: Deadline) -> list[StoreFacts]:
        """Return the stores that are open."""
        facts: list[StoreFacts]
        facts, _ = self.call("", "list_stores", (), "listing stores", deadline.left())
        return facts

    def drop_store(self, name: str, force: bool, deadline: Deadline) -> bool:
        """Close a store and drop its blocks; return whether there was one of that name.

        Raises:
            DataPlaneError: its process lives, and it is not to be dropped by `force`.
        """
        what = f"dropping store '{name}'"
        ended, _ = self.call("", "drop_store", (name, force), what, deadline.left())
        self.drop_ended(ended, what, deadline)
        return bool(ended)

    def drop_ended(self, handles: Sequence[str], what: str, deadline: Deadline) -> None:
        """Drop the blocks of stores that are closed."""
        for handle in handles:
            self.payloads.drop_partition(queue_partition(handle), deadline.left())
            self.call("", "forget", ([handle],), what, deadline.left())

    def close(self) -> None:
        self.books.close()
        self.payloads.close()


def queue_partition(handle: str) -> str:
    """Return the one TransferQueue partition of a store; partitions of the data plane live in the index."""
    return f"headrace/{handle}"


@contextmanager
def visit(config: DataPlaneConfig) -> Iterator[dict[str, Link]]:
    """Connect to the engines that a cluster has, by backend, until the block ends.

    Raises:
        TransportError: no cluster, or no answer within `startup_timeout_s`.
    """
    deadline = Deadline(config.startup_timeout_s, STARTUP_KNOB)
    with ExitStack() as undo:
        if connect_ray(config, may_start=False):
            undo.callback(ray.shutdown)
        links: dict[str, Link] = {}
        for backend in BACKENDS:
            index = find_index(backend)
            if index is not None:
                connection = wait_for_connection(index, deadline)
                links[backend] = shared_links.acquire(connection, index, deadline)
                undo.callback(shared_links.release, connection)
        yield links


class _SharedLinks:
    """One Link per engine and process, shared by the process's clients."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: dict[str, tuple[Link, int]] = {}

    def acquire(self, connection: Connection, index: ActorHandle[Any], deadline: Deadline) -> Link:
        with self._lock:
            link, users = self._links.get(connection.engine_id, (None, 0))
            if link is None:
                if connection.backend == BACKENDS["mooncake_cpu"]:
                    mooncake.prepare_process(ray.util.get_node_ip_address())
                link = _connect(connection, index, deadline)
            self._links[connection.engine_id] = link, users + 1
            return link

    def release(self, connection: Connection) -> None:
        with self._lock:
            link, users = self._links.pop(connection.engine_id)
            if users > 1:
                self._links[connection.engine_id] = link, users - 1
                return
        link.close()


def _connect(connection: Connection, index: ActorHandle[Any], deadline: Deadline) -> Link:
    with ExitStack() as undo:
        payloads = PayloadClient(connection, deadline.left(), find_lost)
        undo.callback(payloads.close)
        books = Channel(connection.index, lambda what: _check_alive(index, what), deadline.left())
        undo.pop_all()
    return Link(payloads, books)


def _check_alive(index: ActorHandle[Any], what: str) -> None:
    """Raise TransportError if the index's process is gone."""
    try:
        ray.get(index.ping.remote(), timeout=_PING_TIMEOUT_S)
    except GetTimeoutError:
        return
    except RayError as error:
        raise _gone(what) from error


def find_lost(parts: Sequence[Part]) -> Part | None:
    """Return the first of `parts` that Ray knows to be gone; None also where Ray does not say soon."""
    pings: dict[Any, Part] = {}
    for part in parts:
        try:
            actor = ray.get_actor(part.actor, namespace=NAMESPACE)
        except ValueError:
            return part
        except RayError:
            return None
        pings[actor.__ray_ready__.remote()] = part
    if not pings:
        return None
    answered, _ = ray.wait(list(pings), num_returns=len(pings), timeout=_PING_TIMEOUT_S)
    for ping in answered:
        try:
            ray.get(ping)
        except RayError:
            return pings[ping]
    return None


def _gone(what: str) -> TransportError:
    return TransportError(
        f"{what}: the process that answers is gone; the store was closed by the client that started it, or it died"
    )


shared_links = _SharedLinks()


def _index_name(backend: str) -> str:
    return f"headrace-index-{backend}"


def _actor(kind: type, *arguments: object, **options: Any) -> Any:
    return ray.remote(num_cpus=0, max_restarts=0)(kind).options(**options).remote(*arguments)


def _spread(count: int) -> list[NodeAffinitySchedulingStrategy]:
    """Return a node for each of `count` actors, the nodes in turn."""
    nodes = sorted(node["NodeID"] for node in ray.nodes() if node.get("Alive"))
    if not nodes:
        raise TransportError("the Ray cluster has no node that is alive")
    return [NodeAffinitySchedulingStrategy(nodes[i % len(nodes)], soft=False) for i in range(count)]

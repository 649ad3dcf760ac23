"""How new weights get from this process to engines in others: through shared memory, or by a broadcast."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate
from multiprocessing.connection import wait
from threading import Event
from typing import Any, NoReturn, Protocol

import torch

from headrace.distributed.worker_groups import wire
from headrace.distributed.worker_groups.failures import WorkerFailure
from headrace.distributed.worker_groups.rank import Answer, Reply
from headrace.errors import HeadraceError, TransportError
from headrace.models.generation.engine import EngineHandle, EngineSpec
from headrace.models.generation.engine_process import EngineProcess
from headrace.models.generation.weight_buckets import Bucket, NamedTensors, pack
from headrace.models.generation.weight_group import Meeting, WeightGroup, WeightRoute
from headrace.models.generation.weight_memory import DeviceMemory, HostMemory
from headrace.models.generation.weights import WeightStream
from headrace.utils.background import in_background

_GRACE_S, _LOOK_S = 5.0, 0.2
"""How long engines may take to notice that an update has failed."""


class Engines(Protocol):
    """What a way sees of an `EnginePool`: the engines that answer, by number, and what becomes of others."""

    engines: dict[int, EngineHandle]

    def ready(self, engines: Iterable[int], timeout_s: float | None = None) -> list[int]: ...

    def collect(self, method: str) -> list[Any]: ...

    def lose(self, index: int, failure: WorkerFailure, then: str) -> None: ...

    def fail(self, index: int, failure: WorkerFailure, doing: str) -> NoReturn: ...


class MemoryWay:
    """Engines beside the policy look into memory that is written here. `devices` has the GPU of each, if any."""

    def __init__(self, spec: EngineSpec, capacity: int, devices: Sequence[int]) -> None:
        self._dtype, self._capacity = getattr(torch, spec.cfg.precision), capacity
        self._devices = devices
        self._memory = HostMemory(0 if devices else capacity)
        self.file = self._memory.file

    def update(self, pool: Engines, named_tensors: NamedTensors, version: int) -> dict[str, float]:
        with ExitStack() as undo:
            undo.callback(self._end, pool)
            found = self._send(pool, named_tensors, version)
            undo.pop_all()
        return found

    def _send(self, pool: Engines, named_tensors: NamedTensors, version: int) -> dict[str, float]:
        sent, pack_s = 0, 0.0
        memories = self._memories(pool)
        for index, engine in pool.engines.items():
            engine.post("update_weights", version)
            self._tell(pool, index, memories[self._device(index)].handle())
        first, *others = memories.values()
        unread: list[set[int]] = []
        packing = time.perf_counter()
        for bucket in pack(named_tensors, first.data, self._capacity, self._dtype):
            part = slice(bucket.start, bucket.start + bucket.nbytes)
            for other in others:
                other.data[part].copy_(first.data[part])
            _synchronize(memories)
            pack_s += time.perf_counter() - packing
            sent += bucket.nbytes
            for index in pool.engines:
                self._tell(pool, index, bucket)
            unread.append(set(pool.engines))
            # The next bucket is written where the one before this one lies.
            if len(unread) > 1:
                self._await_copies(pool, unread.pop(0))
            packing = time.perf_counter()
        for engines in unread:
            self._await_copies(pool, engines)
        for index in list(pool.engines):
            self._tell(pool, index, None)
        copy_s = max(pool.collect("update_weights"), default=0.0)
        del first, others, memories
        if self._devices:
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        return {"weights_gb": sent / 1e9, "weights_pack_seconds": pack_s, "weights_copy_seconds": copy_s}

    def close(self) -> None:
        self._memory.close()

    def _end(self, pool: Engines) -> None:
        """End engines that wait for the rest of an update; the next one starts them again."""
        while pool.engines:
            pool.engines.popitem()[1].end()

    def _memories(self, pool: Engines) -> dict[int, HostMemory | DeviceMemory]:
        """Return the memory of the host, or one on each device that engines have."""
        if not self._devices:
            return {-1: self._memory}
        return {device: DeviceMemory(self._capacity, device) for device in map(self._device, pool.engines)}

    def _device(self, index: int) -> int:
        return self._devices[index] if self._devices else -1

    def _tell(self, pool: Engines, index: int, message: Bucket | list[Any] | None) -> None:
        engine = pool.engines[index]
        assert isinstance(engine, EngineProcess)
        with suppress(ConnectionError):  # noticed where its answer is awaited
            wire.send(engine.weights, message)

    def _await_copies(self, pool: Engines, engines: set[int]) -> None:
        """Wait until engines have copied a bucket; one that answers its call before has failed."""
        for index in sorted(engines & pool.engines.keys()):
            engine = pool.engines[index]
            assert isinstance(engine, EngineProcess)
            ready = wait([engine.weights, engine.calls])
            if engine.weights in ready:
                try:
                    wire.receive(engine.weights)
                    continue
                except (EOFError, ConnectionError):
                    pass
            answer = engine.receive()
            assert isinstance(answer, WorkerFailure)
            pool.lose(index, answer, "it died while it got weights")


def _synchronize(devices: Iterable[int]) -> None:
    """Wait for what this thread has asked of some GPUs, and not for a trainer that works there beside it."""
    for device in devices:
        if device >= 0:
            torch.cuda.current_stream(device).synchronize()


class GroupWay:
    """All ranks of all engines get a broadcast: of this process, or of another one to which `route` was given.

    Engines that have joined ranks of the policy get what `route` sends through memory, each of its own rank.
    """

    file: int | None = None

    def __init__(self, spec: EngineSpec, capacity: int, host: str, here: str, lanes: int = 0) -> None:
        """`here` is where this process has weights that it sends itself, `lanes` counts those ranks."""
        self._spec, self._meeting, self._group = spec, Meeting(host), WeightGroup()
        self._here, self._lanes = here, lanes
        self._members: list[Any] = []
        self._count = 0
        self._route = WeightRoute(
            host=host,
            port=self._meeting.port,
            name="",
            ranks=0,
            device=spec.device,
            capacity=capacity,
            dtype=getattr(torch, spec.cfg.precision),
            splits_experts=spec.cfg.backend == "vllm",
            timeout_s=spec.cfg.weights_timeout_s,
        )

    def route(self, pool: Engines, own_device: str | None = None) -> WeightRoute:
        """Return the route of the next update, of a sender elsewhere, or of this process with weights on `own_device`.

        A sender elsewhere has them where engines do, and is the same one each time.
        """
        device = own_device or self._spec.device
        members = [own_device, *pool.engines.values()]
        if members != self._members:
            self._members, self._count = members, self._count + 1
            name, ranks = f"weights-{self._count}", 1 + self._spec.ranks * len(pool.engines)
            lanes = range(self._lanes if own_device is None else 0)
            takers = tuple(sum(index % self._lanes == lane for index in pool.engines) for lane in lanes)
            self._route = replace(self._route, name=name, ranks=ranks, device=device, update=0, takers=takers)
        else:
            self._route = replace(self._route, update=self._route.update + 1)
        return self._route

    def update(self, pool: Engines, named_tensors: NamedTensors, version: int) -> dict[str, float]:
        stream = (
            named_tensors if isinstance(named_tensors, WeightStream) and named_tensors.is_routed else None
        )
        route = self._route if stream else self.route(pool, self._here)
        firsts = accumulate([1] + [self._spec.ranks] * len(pool.engines))
        for (index, engine), rank in zip(pool.engines.items(), firsts):
            engine.post("receive_weights", route, index % self._lanes if route.takers else rank, version)
        broken, over = Event(), Event()
        # In a thread: an engine's failure has to end what this one waits for.
        answering = in_background(partial(self._answers, pool, route, broken, over), "weights")
        error: HeadraceError | None = None
        sent: dict[str, float] = {}
        with ExitStack() as undo:
            undo.callback(answering.result)
            undo.callback(broken.set)
            undo.callback(self.give_up, "the sender has given up")
            try:
                sent = stream.sent() if stream else self._group.send(route, named_tensors)
            except HeadraceError as problem:
                error = problem
            else:
                undo.pop_all()
                over.set()
        seconds = self._settled(pool, answering.result(), error)
        self._meeting.forget(route)
        copy_s = max(map(sum, seconds)) if route.takers else sum(map(min, zip(*seconds)))
        return {**sent, "weights_copy_seconds": copy_s}

    def give_up(self, why: str) -> None:
        """End the update that has been announced."""
        self._meeting.give_up(self._route, why)
        self._members = []  # the next one has a group of its own

    def close(self) -> None:
        self._group.leave()

    def _answers(self, pool: Engines, route: WeightRoute, broken: Event, over: Event) -> dict[int, Answer]:
        """Return what engines say.

        Those that say nothing for long are given up, once the update is `broken`, or is `over` for the sender.
        """
        waiting, found = set(pool.engines), dict[int, Answer]()
        limits = ((broken, _GRACE_S), (over, route.timeout_s))
        deadline = math.inf
        while waiting and time.monotonic() < deadline:
            for index in pool.ready(waiting, _LOOK_S):
                found[index] = answer = pool.engines[index].receive()
                waiting.discard(index)
                if isinstance(answer, WorkerFailure):
                    self._meeting.give_up(route, answer.summary)
                    broken.set()
            happened = [time.monotonic() + limit for event, limit in limits if event.is_set()]
            deadline = min(deadline, *happened, math.inf)
        for index in waiting:
            summary = f"{pool.engines[index].name} did not answer, while weights were on their way"
            found[index] = WorkerFailure(0, HeadraceError, summary, is_lost=True)
        return found

    def _settled(
        self, pool: Engines, answers: Mapping[int, Answer], error: HeadraceError | None
    ) -> list[list[float]]:
        """Return the seconds of each bucket, by rank; or raise what explains the failures best."""
        failures = {i: answer for i, answer in answers.items() if isinstance(answer, WorkerFailure)}
        if not failures and error is None:
            values = [wire.decode(a.value) for a in answers.values() if isinstance(a, Reply) and a.value]
            return [seconds for ranks in values for seconds in ranks]
        self._members = []
        self._group.leave()
        lost = {index: failure for index, failure in failures.items() if failure.is_lost}
        for index, failure in lost.items():
            pool.lose(index, failure, "the engines' weights are not whole")
        for index, failure in failures.items():
            if not failure.is_lost and not (failure.is_echo and (lost or error)):
                pool.fail(index, failure, "receive_weights")
        if lost:
            raise TransportError(
                f"{next(iter(lost.values())).summary}, while weights were on their way: the other engines have parts "
                "of them. Update them again, or start the run again from its newest checkpoint"
            ) from error
        assert error is not None
        raise error

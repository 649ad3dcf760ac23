"""Engines in processes of their own, as one: prompts are dealt to them, and what one leaves behind goes to others."""

import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from headrace.distributed.worker_groups import wire
from headrace.distributed.worker_groups.failures import WorkerFailure, raise_failures
from headrace.distributed.worker_groups.rank import Answer
from headrace.errors import ConfigError, GenerationError, GeneratorLost
from headrace.models.generation.dealing import LengthBook, deal
from headrace.models.generation.engine import (
    Completions,
    EngineHandle,
    EngineSpec,
    RayRoom,
    Request,
    sum_metrics,
)
from headrace.models.generation.engine_process import EngineProcess
from headrace.models.generation.engine_weights import GroupWay, MemoryWay
from headrace.models.generation.weight_buckets import BUCKET_BYTES, bucket_capacity
from headrace.models.generation.weight_group import WeightRoute

if TYPE_CHECKING:
    from headrace.models.generation.engine_actor import EngineCluster

_log = logging.getLogger(__name__)
_GRACE_S, _GENTLE_S = 5.0, 10.0
_HOST = "127.0.0.1"
_RESTARTS = 3
"""How often each engine is started again."""


class EnginePool:
    """An Engine made of `generation.engines` processes.

    A process that dies is said, counted, and started again; it takes part again after the next update of the weights.
    When the last one dies, that update starts them again and waits for them.
    """

    def __init__(
        self,
        spec: EngineSpec,
        sizes: Sequence[int],
        bucket_bytes: int = BUCKET_BYTES,
        room: RayRoom | None = None,
    ) -> None:
        """Start the processes, or Ray actors where they have a `room`, and wait for them.

        `sizes` are the bytes of each weight on its way.

        Raises:
            ConfigError: too few GPUs, an interpreter that cannot be run, or what the engine refuses.
        """
        self._spec, count = spec, spec.cfg.engines
        self._devices = [] if room else _devices(spec)
        self._lengths = LengthBook()
        self._homes: dict[int, int] = {}
        """The engine that keeps keys and values of an unfinished answer, by a hash of prompt and answer so far."""
        self._lost = 0
        self._restarts = [_RESTARTS] * count
        self._is_whole = True
        capacity = bucket_capacity(sizes, bucket_bytes)
        self._cluster: Any = None
        if room is not None:
            self._cluster = _on_ray(spec, room)
        self._way: MemoryWay | GroupWay
        if room is not None:
            here = "cuda" if self._cluster.gives_gpu and spec.device == "cuda" else "cpu"
            self._way = GroupWay(spec, capacity, self._cluster.host, here, len(room.seats))
        elif spec.cfg.placement == "apart":
            self._way = GroupWay(spec, capacity, _HOST, spec.device)
        else:
            self._way = MemoryWay(spec, capacity, [devices[0] for devices in self._devices])
        self.engines: dict[int, EngineHandle] = {}
        self._starting: dict[int, EngineHandle] = {}
        with ExitStack() as undo:
            undo.callback(self.shutdown)
            for index in range(count):
                self._launch(index)
            for index in range(count):
                self._admit(index, self._starting.pop(index))
            undo.pop_all()

    @property
    def pids(self) -> list[int]:
        """Of the engines that answer."""
        return [engine.pid for engine in self.engines.values()]

    # The interface of an engine.

    def answer(self, request: Request) -> Iterator[Completions]:
        """Yield completions as they finish; what a dead engine leaves unfinished is dealt to the others."""
        self._require_engines()
        if not self._is_whole:
            raise GenerationError(
                "the engines hold parts of old and new weights, since their last update broke off; update them again"
            )
        at = dict(zip(request.places, request.prompts))
        limits = {place: request.params.limit(len(prompt)) for place, prompt in at.items()}
        expected = {place: self._lengths.expected(at[place], limit) for place, limit in limits.items()}
        # Per engine, the places of each request that it has not answered to the end.
        left: dict[int, list[list[int]]] = {index: [] for index in self.engines}
        keeps, homes = request.params.cache_version is not None, self._homes
        home = {place: homes.get(hash(tuple(prompt))) for place, prompt in at.items() if keeps}
        self._homes = {}

        def ask(index: int) -> None:
            # One request at a time: an engine that answers reads nothing, and would wait for us as we for it.
            part = request.subset(left[index][0])
            self.engines[index].post(
                "answer", part.prompts, part.places, part.params, part.seed, streams=True
            )

        def send(places: list[int]) -> None:
            new = [p for p in places if home.get(p) not in self.engines]
            dealt = deal({p: at[p] for p in new}, {p: expected[p] for p in new}, len(self.engines))
            for index, more in zip(list(self.engines), dealt):
                if own := [p for p in places if home.get(p) == index] + more:
                    left[index].append(own)
                    if len(left[index]) == 1:
                        ask(index)

        lengths: dict[int, int] = {}
        try:
            send(list(request.places))
            while any(left.values()):
                for index in self.ready([i for i, own in left.items() if own]):
                    answer = self.engines[index].receive()
                    if isinstance(answer, WorkerFailure):
                        lacking = [place for own in left.pop(index) for place in own]
                        self.lose(index, answer, f"its {len(lacking)} unfinished prompts go to the others")
                        send(lacking)
                        break  # the others have more to do now
                    if answer.value is None:
                        left[index].pop(0)
                        if left[index]:
                            ask(index)
                        continue
                    part: Completions = wire.decode(answer.value)
                    left[index][0] = [p for p in left[index][0] if p not in set(part.places)]
                    lengths.update(zip(part.places, part.lengths.tolist()))
                    if keeps:
                        self._homes |= {hash((*at[row[0]], *row[1])): index for row in part.rows() if row[3]}
                    yield part
        finally:
            self._drain([index for index, own in left.items() if own])
        self._lengths.note([at[place] for place in lengths], list(lengths.values()))

    def weight_route(self) -> WeightRoute | None:
        """Return how another process sends the next weights to all engines, which does not wait for them here.

        None: they have to come through `update_weights`.
        """
        self._gather()
        return self._way.route(self) if isinstance(self._way, GroupWay) else None

    def refuse_route(self, why: str) -> None:
        """Tell whoever sends by the route that was given last that nobody will receive."""
        if isinstance(self._way, GroupWay):
            self._way.give_up(why)

    def update_weights(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> dict[str, float]:
        """Send the weights to all engines, those that have been started again included.

        Returns:
            `weights_gb` sent to each, and the seconds that packing them, and the slowest engine's copies, took.

        Raises:
            GenerationError: weights that did not arrive as they were sent, or no engine left.
            TransportError: a broadcast that broke off.
        """
        self._gather()
        self._is_whole = False
        metrics = self._way.update(self, named_tensors, version)
        self._is_whole = True
        return metrics

    def release(self, *, weights_follow: bool = False) -> None:
        self._call("release", weights_follow)

    def take_metrics(self) -> dict[str, float]:
        metrics = sum_metrics(self._call("take_metrics"))
        lost, self._lost = self._lost, 0
        return {**metrics, "engines_lost": float(lost)}

    def shutdown(self) -> None:
        deadline = time.monotonic() + _GENTLE_S
        for engine in self.engines.values():
            engine.ask_to_end()
        for engine in self._starting.values():
            engine.end()
        for engine in self.engines.values():
            engine.end(timeout_s=max(0.0, deadline - time.monotonic()))
        self._starting, self.engines = {}, {}
        self._way.close()
        if self._cluster is not None:
            self._cluster.close()

    # Processes.

    def _gather(self) -> None:
        """Take in engines that have been started again, and notice those that have died meanwhile."""
        is_empty = not self.engines
        if is_empty:
            self._is_whole = False
            for index in [i for i, left in enumerate(self._restarts) if left and i not in self._starting]:
                self._relaunch(index)
            if self._starting:
                again, count = len(self._starting), len(self._restarts)
                _log.warning("no engine is left; %d of %d are started again and waited for", again, count)
        for index in [i for i, engine in self._starting.items() if is_empty or engine.ready([engine], 0)]:
            self._admit(index, self._starting.pop(index), at_start=False)
        self._require_engines()
        self._call("ping")

    def _relaunch(self, index: int) -> None:
        self._restarts[index] -= 1
        self._launch(index)

    def _launch(self, index: int) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = max(1, min(torch.get_num_threads(), cores // len(self._restarts)))
        if self._cluster is not None:
            self._starting[index] = self._cluster.launch(f"engine {index}", index, threads)
            return
        self._starting[index] = EngineProcess(
            f"engine {index}",
            self._spec,
            memory=self._way.file,
            devices=_visible(self._devices[index]) if self._devices else None,
            threads=threads,
        )

    def _admit(self, index: int, engine: EngineHandle, *, at_start: bool = True) -> None:
        """Take an engine in that has been built, or raise why it has not."""
        answer = engine.receive()
        self.engines[index] = engine
        if isinstance(answer, WorkerFailure):
            if at_start:
                self.fail(index, answer, "its start")
            self.lose(index, answer, "it could not be started again")

    def ready(self, engines: Iterable[int], timeout_s: float | None = None) -> list[int]:
        """Return those of some engines that have answered; wait for one at least, or so long."""
        by_engine = {self.engines[index]: index for index in engines}
        first = next(iter(by_engine))
        return [by_engine[engine] for engine in first.ready(list(by_engine), timeout_s)]

    def _drain(self, busy: Iterable[int]) -> None:
        """Read what engines still send of a call that nobody waits for; end those that take long."""
        deadline = time.monotonic() + _GRACE_S
        for index in busy:
            engine, is_over = self.engines[index], False
            while not is_over and engine.ready([engine], max(0.0, deadline - time.monotonic())):
                answer = engine.receive()
                is_over = isinstance(answer, WorkerFailure) or answer.is_last
            if not is_over:
                self.engines.pop(index).end()

    def _call(self, method: str, *args: Any) -> list[Any]:
        for engine in self.engines.values():
            engine.post(method, *args)
        return self.collect(method)

    def collect(self, method: str) -> list[Any]:
        """Return the answers of all engines to a call; one that is lost is missing."""
        values = []
        for index in list(self.engines):
            answer: Answer = self.engines[index].receive()
            if isinstance(answer, WorkerFailure):
                self.lose(index, answer, f"it was busy with {method}")
            elif answer.value is not None:
                values.append(wire.decode(answer.value))
        return values

    def lose(self, index: int, failure: WorkerFailure, then: str) -> None:
        """Say that an engine is lost and start it again; an engine that lives and refuses is the run's error.

        Raises:
            GenerationError: it was the last one; a GeneratorLost if none can be started again.
        """
        if not failure.is_lost:
            self.fail(index, failure, "an engine's work")
        self.engines.pop(index).end()
        self._lost += 1
        if not self.engines:
            raise self._without_engines(
                f"no engine is left: {failure.summary}; look at what it wrote above. For memory, lower "
                "generation.vllm.args.gpu_memory_utilization or generation.batch_size"
            )
        again = self._restarts[index] > 0
        _log.warning(
            "%s; %s, and it is %s", failure.summary, then, "started again" if again else "left out for good"
        )
        if again:
            self._relaunch(index)

    def _require_engines(self) -> None:
        if not self.engines:
            raise self._without_engines(
                "no engine is left; an earlier call was broken off, or ended the last one"
            )

    def _without_engines(self, why: str) -> GenerationError:
        return GenerationError(why) if self._starting or any(self._restarts) else GeneratorLost(why)

    def fail(self, index: int, failure: WorkerFailure, doing: str) -> NoReturn:
        name = self.engines[index].name
        raise_failures([failure], world_size=1, doing=doing, alone=name)


def _devices(spec: EngineSpec) -> list[list[int]]:
    """Return the GPUs of each engine as this process numbers them: the policy's, or those after it."""
    if spec.device != "cuda":
        return []
    count, engines, ranks = torch.cuda.device_count(), spec.cfg.engines, spec.ranks
    if spec.cfg.placement == "beside":
        return [[index % count] for index in range(engines)]
    if (needed := engines * ranks) >= count:
        each = "a GPU each" if ranks == 1 else f"{ranks} GPUs each (generation.vllm.tensor_parallel)"
        raise ConfigError(
            f"generation.placement=apart: generation.engines={engines} take {each}, and of the {count} here one at "
            "least is the policy's; lower generation.engines, or set generation.placement=beside"
        )
    first = count - needed
    return [list(range(begin, begin + ranks)) for begin in range(first, count, ranks)]


def _visible(devices: Sequence[int]) -> str:
    """Return how the environment names GPUs of this process."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return ",".join(names[device].strip() if names != [""] else str(device) for device in devices)


def _on_ray(spec: EngineSpec, room: RayRoom) -> "EngineCluster":
    from headrace.models.generation.engine_actor import EngineCluster  # noqa: PLC0415  (loads Ray)

    return EngineCluster(spec, room)

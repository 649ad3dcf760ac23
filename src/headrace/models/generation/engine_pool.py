"""Engines in processes of their own, as one: prompts are dealt to them, and what one leaves behind goes to others."""

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import wait
from typing import Any

import torch

from headrace.distributed.worker_groups import wire
from headrace.distributed.worker_groups.failures import WorkerFailure, raise_failures
from headrace.distributed.worker_groups.rank import Answer
from headrace.errors import ConfigError, GenerationError
from headrace.models.generation.dealing import LengthBook, deal
from headrace.models.generation.engine import Completions, EngineSpec, Request, sum_metrics
from headrace.models.generation.engine_process import EngineProcess
from headrace.models.generation.weight_buckets import (
    BUCKET_BYTES,
    Bucket,
    DeviceMemory,
    HostMemory,
    bucket_capacity,
    pack,
)

_log = logging.getLogger(__name__)
_GRACE_S, _GENTLE_S = 5.0, 10.0
_RESTARTS = 3
"""How often each engine is started again."""


class EnginePool:
    """An Engine made of `generation.engines` processes.

    A process that dies is said, counted, and started again; it takes part again after the next update of the weights.
    """

    def __init__(self, spec: EngineSpec, sizes: Sequence[int], bucket_bytes: int = BUCKET_BYTES) -> None:
        """Start the processes and wait for them. `sizes` are the bytes of each weight on its way.

        Raises:
            ConfigError: too few GPUs, an interpreter that cannot be run, or what the engine refuses.
        """
        self._spec, count = spec, spec.cfg.engines
        self._dtype = getattr(torch, spec.cfg.precision)
        self._devices = _devices(spec)
        self._lengths = LengthBook()
        self._lost = 0
        self._restarts = [_RESTARTS] * count
        self._capacity = bucket_capacity(sizes, bucket_bytes)
        self._memory = HostMemory(self._capacity if spec.device == "cpu" else 0)
        self._engines: dict[int, EngineProcess] = {}
        self._starting: dict[int, EngineProcess] = {}
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
        return [engine.pid for engine in self._engines.values()]

    # The interface of an engine.

    def answer(self, request: Request) -> Iterator[Completions]:
        """Yield completions as they finish; what a dead engine leaves unfinished is dealt to the others."""
        self._require_engines()
        at = dict(zip(request.places, request.prompts))
        limits = {place: request.params.limit(len(prompt)) for place, prompt in at.items()}
        expected = {place: self._lengths.expected(at[place], limit) for place, limit in limits.items()}
        # Per engine, the places of each request that it has not answered to the end.
        left: dict[int, list[list[int]]] = {index: [] for index in self._engines}

        def send(places: list[int]) -> None:
            dealt = deal({p: at[p] for p in places}, {p: expected[p] for p in places}, len(self._engines))
            for index, own in zip(list(self._engines), dealt):
                if own:
                    left[index].append(own)
                    part = request.subset(own)
                    self._engines[index].post(
                        "answer", part.prompts, part.places, part.params, part.seed, streams=True
                    )

        lengths: dict[int, int] = {}
        try:
            send(list(request.places))
            while any(left.values()):
                for index in self._ready([i for i, own in left.items() if own]):
                    answer = self._engines[index].receive()
                    if isinstance(answer, WorkerFailure):
                        lacking = [place for own in left.pop(index) for place in own]
                        self._lose(index, answer, f"its {len(lacking)} unfinished prompts go to the others")
                        send(lacking)
                        break  # the others have more to do now
                    if answer.value is None:
                        left[index].pop(0)
                        continue
                    part: Completions = wire.decode(answer.value)
                    left[index][0] = [p for p in left[index][0] if p not in set(part.places)]
                    lengths.update(zip(part.places, part.lengths.tolist()))
                    yield part
        finally:
            self._drain({index: len(own) for index, own in left.items() if own})
        self._lengths.note([at[place] for place in lengths], list(lengths.values()))

    def update_weights(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> dict[str, float]:
        """Send the weights to all engines, those that have been started again included.

        Returns:
            `weights_gb` sent to each, and the seconds that packing them, and the slowest engine's copies, took.

        Raises:
            GenerationError: weights that did not arrive as they were sent, or no engine left.
        """
        for index in [i for i, engine in self._starting.items() if engine.calls.poll()]:
            self._admit(index, self._starting.pop(index), at_start=False)
        self._require_engines()
        sent, pack_s = 0, 0.0
        memories = self._memories()
        for index, engine in self._engines.items():
            engine.post("update_weights", version)
            self._tell(index, memories[self._device(index)].handle())
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
            for index in self._engines:
                self._tell(index, bucket)
            unread.append(set(self._engines))
            # The next bucket is written where the one before this one lies.
            if len(unread) > 1:
                self._await_copies(unread.pop(0))
            packing = time.perf_counter()
        for engines in unread:
            self._await_copies(engines)
        for index in list(self._engines):
            self._tell(index, None)
        copy_s = max(self._collect("update_weights"), default=0.0)
        del first, others, memories
        if self._spec.device == "cuda":
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        return {
            "weights_gb": sent / 1e9,
            "weights_pack_seconds": pack_s,
            "weights_copy_seconds": copy_s,
        }

    def release(self) -> None:
        self._call("release")

    def take_metrics(self) -> dict[str, float]:
        metrics = sum_metrics(self._call("take_metrics"))
        lost, self._lost = self._lost, 0
        return {**metrics, "engines_lost": float(lost)}

    def shutdown(self) -> None:
        deadline = time.monotonic() + _GENTLE_S
        for engine in self._engines.values():
            engine.ask_to_end()
        for engine in self._starting.values():
            engine.end()
        for engine in self._engines.values():
            engine.end(timeout_s=max(0.0, deadline - time.monotonic()))
        self._starting, self._engines = {}, {}
        self._memory.close()

    # Weights.

    def _memories(self) -> dict[int, HostMemory | DeviceMemory]:
        """Return the memory of the host, or one on each device that engines have."""
        if self._spec.device == "cpu":
            return {-1: self._memory}
        return {device: DeviceMemory(self._capacity, device) for device in map(self._device, self._engines)}

    def _device(self, index: int) -> int:
        return self._devices[index] if self._devices else -1

    def _tell(self, index: int, message: Bucket | list[Any] | None) -> None:
        with suppress(ConnectionError):  # noticed where its answer is awaited
            wire.send(self._engines[index].weights, message)

    def _await_copies(self, engines: set[int]) -> None:
        """Wait until engines have copied a bucket; one that answers its call before has failed."""
        for index in sorted(engines & self._engines.keys()):
            engine = self._engines[index]
            ready = wait([engine.weights, engine.calls])
            if engine.weights in ready:
                try:
                    wire.receive(engine.weights)
                    continue
                except (EOFError, ConnectionError):
                    pass
            answer = engine.receive()
            assert isinstance(answer, WorkerFailure)
            self._lose(index, answer, "it died while it got weights")

    # Processes.

    def _launch(self, index: int) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._starting[index] = EngineProcess(
            f"engine {index}",
            self._spec,
            memory=self._memory.file,
            devices=_visible(self._devices[index]) if self._devices else None,
            threads=max(1, min(torch.get_num_threads(), cores // len(self._restarts))),
        )

    def _admit(self, index: int, engine: EngineProcess, *, at_start: bool = True) -> None:
        """Take an engine in that has been built, or raise why it has not."""
        answer = engine.receive()
        self._engines[index] = engine
        if isinstance(answer, WorkerFailure):
            if at_start:
                self._raise(index, answer, "its start")
            self._lose(index, answer, "it could not be started again")

    def _ready(self, engines: list[int]) -> list[int]:
        ready = wait([self._engines[index].calls for index in engines])
        return [index for index in engines if self._engines[index].calls in ready]

    def _drain(self, busy: dict[int, int]) -> None:
        """Read what engines still send of so many calls that nobody waits for; end those that take long."""
        deadline = time.monotonic() + _GRACE_S
        for index, calls in busy.items():
            engine = self._engines[index]
            while calls and engine.calls.poll(max(0.0, deadline - time.monotonic())):
                answer = engine.receive()
                calls -= isinstance(answer, WorkerFailure) or answer.is_last
                if isinstance(answer, WorkerFailure) and answer.is_lost:
                    break
            if calls:
                self._engines.pop(index).end()

    def _call(self, method: str, *args: Any) -> list[Any]:
        for engine in self._engines.values():
            engine.post(method, *args)
        return self._collect(method)

    def _collect(self, method: str) -> list[Any]:
        """Return the answers of all engines to a call; one that is lost is missing."""
        values = []
        for index in list(self._engines):
            answer: Answer = self._engines[index].receive()
            if isinstance(answer, WorkerFailure):
                self._lose(index, answer, f"it was busy with {method}")
            elif answer.value is not None:
                values.append(wire.decode(answer.value))
        return values

    def _lose(self, index: int, failure: WorkerFailure, then: str) -> None:
        """Say that an engine is lost and start it again; an engine that lives and refuses is the run's error.

        Raises:
            GenerationError: it was the last one.
        """
        if not failure.is_lost:
            self._raise(index, failure, "an engine's work")
        self._engines.pop(index).end()
        self._lost += 1
        if not self._engines:
            raise GenerationError(
                f"no engine is left: {failure.summary}; look at what it wrote above. For memory, lower "
                "generation.vllm.args.gpu_memory_utilization or generation.batch_size"
            )
        again = self._restarts[index] > 0
        _log.warning(
            "%s; %s, and it is %s", failure.summary, then, "started again" if again else "left out for good"
        )
        if again:
            self._restarts[index] -= 1
            self._launch(index)

    def _require_engines(self) -> None:
        if not self._engines:
            raise GenerationError("no engine is left; an earlier call was broken off, or ended the last one")

    def _raise(self, index: int, failure: WorkerFailure, doing: str) -> None:
        name = self._engines[index].name
        raise_failures([failure], world_size=1, doing=doing, alone=name)


def _synchronize(memories: Mapping[int, HostMemory | DeviceMemory]) -> None:
    for device in memories:
        if device >= 0:
            torch.cuda.synchronize(device)


def _devices(spec: EngineSpec) -> list[int]:
    """Return the GPU of each engine as this process numbers them: the policy's, or those after it."""
    if spec.device != "cuda":
        return []
    count, engines = torch.cuda.device_count(), spec.cfg.engines
    if spec.cfg.placement == "beside":
        return [index % count for index in range(engines)]
    if engines >= count:
        raise ConfigError(
            f"generation.placement=apart: generation.engines={engines} take a GPU each, and of the {count} here one at "
            "least is the policy's; lower generation.engines, or set generation.placement=beside"
        )
    return list(range(count - engines, count))


def _visible(device: int) -> str:
    """Return how the environment names a GPU of this process."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return names[device].strip() if names != [""] else str(device)

"""One rank of a group, seen from its own process: process group, worker, and answers to calls."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from headrace.distributed.worker_groups.failures import WorkerFailure, describe_error
from headrace.distributed.worker_groups.wire import Payload, decode, encode

DeviceType = Literal["cpu", "cuda"]
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class WorkerSpec:
    """How each rank builds its worker: `factory(*args, **kwargs)`; multiprocessing or Ray carry it, so it pickles."""

    factory: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RankInfo:
    """A rank's numbers in the job, and how it meets the others: the store at `host`:`port`."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    port: int


@dataclass(frozen=True)
class Seat:
    """Where a rank is: the id of its Ray node, and its GPUs as CUDA_VISIBLE_DEVICES has them; none on a CPU."""

    node: str
    devices: str


@dataclass(frozen=True)
class RankSettings:
    """What all ranks of a group have in common.

    `threads` bounds the CPU threads of a rank, as does its share of the machine's cores. `timeout_s` is
    the longest that a collective waits for another rank.
    """

    device: DeviceType = "cpu"
    threads: int | None = None
    timeout_s: float = 1800.0


@dataclass(frozen=True)
class Call:
    """One command to a rank: a method of its worker and its encoded (args, kwargs).

    `streams`: the method is a generator, whose items go to `sink` (an `ActorSink`) if there is one. `keeps`: the
    driver wants the result of this rank.
    """

    method: str
    arguments: Payload
    streams: bool = False
    keeps: bool = True
    sink: Any = None


@dataclass(frozen=True)
class Reply:
    """One part of an answer; `value` None: nothing to tell."""

    value: Payload | None = None
    is_last: bool = True


Answer = Reply | WorkerFailure


class RankServer:
    """Serves one rank's worker."""

    _worker: Any = None
    _store: TCPStore | None = None
    _rank = 0

    def build(self, info: RankInfo | None, settings: RankSettings, load: Callable[[], WorkerSpec]) -> Answer:
        """Join the process group, if the rank is in one, and build the worker."""
        self._rank = info.rank if info is not None else 0
        try:
            spec = load()
            if info is not None:
                self._store = join_process_group(info, settings)
            self._worker = spec.factory(*spec.args, **spec.kwargs)
        except Exception as error:
            return describe_error(self._rank, error)
        return Reply()

    def answers(self, call: Call, *first: Any) -> Iterator[Answer]:
        """Run a call, `first` before its other arguments; yield its answer, of several parts where it streams."""
        try:
            yield from self._run(call, first)
        except Exception as error:
            failure = describe_error(self._rank, error)
        else:
            return
        # Outside the handler: the error, and all that its frames hold, is freed before anyone waits.
        yield failure

    def _run(self, call: Call, first: tuple[Any, ...]) -> Iterator[Reply]:
        args, kwargs = decode(call.arguments)
        result = getattr(self._worker, call.method)(*first, *args, **kwargs)
        if not call.streams:
            yield Reply(encode(result) if call.keeps else None)
            return
        if call.sink is not None:
            with call.sink as sink:
                try:
                    for item in result:
                        sink.put(encode(item))
                finally:
                    for _ in result:  # other ranks gather each item with this one
                        pass
        else:
            for item in result:
                if call.keeps:
                    yield Reply(encode(item), is_last=False)
        yield Reply()

    def stop(self) -> None:
        """Drop the worker and leave the process group; may be called twice."""
        self._worker = self._store = None
        leave_process_group()


def open_store(host: str, world_size: int) -> TCPStore:
    """Open the store through which `world_size` ranks meet, on a free port of this machine."""
    return TCPStore(host, 0, world_size, is_master=True, wait_for_workers=False)


def join_process_group(info: RankInfo, settings: RankSettings) -> TCPStore:
    """Set threads, device and the usual environment variables, and initialise torch.distributed."""
    values = (info.rank, info.world_size, info.local_rank, info.local_world_size, info.host, info.port)
    os.environ.update({name: str(value) for name, value in zip(_NAMES, values)})
    _set_up_process(info.local_rank, info.local_world_size, settings)
    timeout = timedelta(seconds=settings.timeout_s)
    store = TCPStore(info.host, info.port, info.world_size, is_master=False, timeout=timeout)
    dist.init_process_group(
        _BACKENDS[settings.device], store=store, rank=info.rank, world_size=info.world_size, timeout=timeout
    )
    return store


def leave_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _set_up_process(local_rank: int, local_world_size: int, settings: RankSettings) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = max(1, cores // local_world_size)
    torch.set_num_threads(min(share, settings.threads or share))
    if settings.device == "cuda":
        torch.cuda.set_device(local_rank % torch.cuda.device_count())

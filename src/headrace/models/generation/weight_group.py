"""Weights by broadcast: one sender and all ranks of all engines, in a process group of their own.

The group is gloo's on CPUs and NCCL's on GPUs, beside whatever groups the processes are in already. Its ranks meet at a
store (TCP), which also says what each bucket holds, and whether somebody has given up. So whoever waits for another
rank hears of its failure, or comes to the route's time limit.

Source: torch.distributed, TCPStore, ProcessGroupGloo and ProcessGroupNCCL.
"""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from headrace.distributed.worker_groups.rank import open_store
from headrace.distributed.worker_groups.wire import Payload, decode, encode
from headrace.errors import TransportError
from headrace.models.generation.weight_buckets import HALVES, Bucket, NamedTensors, pack, unpack
from headrace.utils.background import in_background

_SOON_S, _SHORT_S, _LONG_S = 0.1, 0.0001, 0.002
_GIVEN_UP_S = 0.05
"""How often somebody who waits looks whether another has given up."""
_FAILED, _HERE = "failed", "here"


@dataclass(frozen=True)
class WeightRoute:
    """Where the ranks of one update meet, and what they have to agree on.

    `name` is the group's, new with each set of engines; `update` counts within it. Rank 0 of the `ranks` sends.
    `device` is where the bytes lie on the way: "cuda" for NCCL, "cpu" for gloo, which serves engines on GPUs too.
    `capacity` are the bytes of a bucket, `dtype` is that of matrices. With `splits_experts`, weights go by the names
    of a checkpoint. `timeout_s` bounds the wait for any one step of another rank.
    """

    host: str
    port: int
    name: str
    ranks: int
    device: str
    capacity: int
    dtype: torch.dtype
    splits_experts: bool
    timeout_s: float
    update: int = 0

    def key(self, what: str | int) -> str:
        return f"{self.name}/{self.update}/{what}"


class Meeting:
    """The store where ranks meet, in the process that owns the engines. `host` is how others reach this one."""

    def __init__(self, host: str) -> None:
        self.host = host
        self._store = open_store(host, 1)
        self.port: int = self._store.port

    def give_up(self, route: WeightRoute, why: str) -> None:
        """Tell all ranks of an update that it has failed."""
        self._store.set(route.key(_FAILED), why)

    def forget(self, route: WeightRoute) -> None:
        """Delete what an update that is over has left in the store."""
        index = 0
        while self._store.delete_key(route.key(index)):
            index += 1


class WeightGroup:
    """This process's place in the group, which it joins with the first update by a route and keeps for the next.

    `seconds` has those of each bucket of the last update that came here, between asking for it and having it.
    """

    def __init__(self) -> None:
        self._route: WeightRoute | None = None
        self._store: Any = None
        self._group: Any = None
        self.seconds: list[float] = []

    def send(self, route: WeightRoute, named_tensors: NamedTensors) -> dict[str, float]:
        """Send weights to all other ranks; return `weights_gb`, and the seconds that packing them took.

        Raises:
            TransportError: another rank has given up, or did not come in time.
        """
        with self._taking_part(route, 0):
            memory = torch.empty(HALVES * route.capacity, dtype=torch.uint8, device=route.device)
            sent, pack_s, pending = 0, 0.0, None
            packing = time.perf_counter()
            for bucket in pack(named_tensors, memory, route.capacity, route.dtype):
                pack_s += time.perf_counter() - packing
                self._say(bucket.index, bucket)
                passing = _Passing(self._group, bucket, memory[bucket.start : bucket.start + bucket.nbytes])
                if pending is not None:  # the next bucket is written where it lies
                    self._finish(pending)
                pending, sent = passing, sent + bucket.nbytes
                packing = time.perf_counter()
            self._say(0 if pending is None else pending.bucket.index + 1, None)
            if pending is not None:
                self._finish(pending)
        return {"weights_gb": sent / 1e9, "weights_pack_seconds": pack_s}

    @contextmanager
    def receiving(self, route: WeightRoute, rank: int) -> Iterator[NamedTensors]:
        """Return a context with the weights that come; an error inside it ends the update for all ranks.

        Raises:
            TransportError: as `send`.
            GenerationError: bytes that are not those that were sent.
        """
        with self._taking_part(route, rank):
            self.seconds = []
            yield unpack(self._arrivals())

    def leave(self) -> None:
        """Leave the group; what is on its way is broken off."""
        if (group := self._group) is not None:
            last = [group]
            del group
            self._group = None
            # In a thread: gloo's destructor waits for what is on its way, as long as the route allows.
            in_background(lambda: last.pop().abort(), "weights")
        self._store = self._route = None

    def _arrivals(self) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Yield buckets with their bytes; the next one comes meanwhile."""
        ahead = self._ask(0)
        while (passing := ahead) is not None:
            ahead = self._ask(passing.bucket.index + 1)
            self._finish(passing)
            self.seconds.append(passing.seconds())
            yield passing.bucket, passing.data

    def _ask(self, index: int) -> "_Passing | None":
        bucket: Bucket | None = self._hear(index)
        if bucket is None:
            return None
        assert self._route is not None
        data = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._route.device)
        return _Passing(self._group, bucket, data)

    # Joining.

    @contextmanager
    def _taking_part(self, route: WeightRoute, rank: int) -> Iterator[None]:
        """Join, and on an error tell the others and leave."""
        with ExitStack() as undo:
            undo.callback(self._break_off, f"rank {rank} (pid {os.getpid()}) failed")
            self._join(route, rank)
            yield
            undo.pop_all()

    def _break_off(self, why: str) -> None:
        if self._store is not None and self._route is not None:
            with ExitStack() as anyhow:
                anyhow.callback(self.leave)
                if not self._store.check([self._route.key(_FAILED)]):
                    self._store.set(self._route.key(_FAILED), why)

    def _join(self, route: WeightRoute, rank: int) -> None:
        if self._route is not None and replace(self._route, update=route.update) == route:
            self._route = route
            return
        self.leave()
        timeout = timedelta(seconds=route.timeout_s)
        try:
            self._store = TCPStore(route.host, route.port, is_master=False, timeout=timeout)
        except dist.DistError as error:
            raise TransportError(
                f"the weights' ranks meet at {route.host}:{route.port}, which cannot be reached from here: {error}"
            ) from error
        self._route = route
        # NCCL waits for ever where a rank is not there at all.
        self._store.add(f"{route.name}/{_HERE}", 1)
        self._until(lambda: int(self._store.add(f"{route.name}/{_HERE}", 0)) >= route.ranks, "all ranks")
        prefixed = PrefixStore(f"{route.name}/group", self._store)
        try:
            self._group = (_nccl if route.device == "cuda" else _gloo)(prefixed, rank, route, timeout)
        except RuntimeError as error:
            raise TransportError(
                f"the weights' ranks could not connect: {' '.join(str(error).split())}"
            ) from error

    # Words and waiting.

    def _say(self, index: int, bucket: Bucket | None) -> None:
        assert self._route is not None
        self._store.set(self._route.key(index), encode(bucket).head)

    def _hear(self, index: int) -> Any:
        assert self._route is not None
        key = self._route.key(index)
        self._until(lambda: self._store.check([key]), f"word of bucket {index}")
        return decode(Payload(self._store.get(key), []))

    def _finish(self, passing: "_Passing") -> None:
        what = f"bucket {passing.bucket.index}"
        self._until(passing.is_over, what)
        try:
            passing.check()
        except RuntimeError as error:
            self._until(lambda: False, what, seconds=2 * _GIVEN_UP_S)  # whoever ended it may say why
            raise TransportError(
                f"the transfer of weights broke off at {what}: {' '.join(str(error).split())}"
            ) from error

    def _until(self, has_come: Callable[[], bool], what: str, seconds: float | None = None) -> None:
        """Wait until something has come; for so many seconds, or as long as the route allows at most."""
        assert self._route is not None
        route, started = self._route, time.monotonic()
        looked = started
        while not has_come():
            now = time.monotonic()
            if now - looked > _GIVEN_UP_S:
                looked = now
                if self._store.check([route.key(_FAILED)]):
                    why = self._store.get(route.key(_FAILED)).decode()
                    raise TransportError(f"the transfer of weights was given up: {why}")
            if seconds is not None and now - started > seconds:
                return
            if now - started > route.timeout_s:
                raise TransportError(
                    f"the transfer of weights waited {route.timeout_s:.3g} s for {what} in vain; if sender and engines "
                    "are only slow, raise generation.weights_timeout_s"
                )
            time.sleep(_SHORT_S if now - started < _SOON_S else _LONG_S)


class _Passing:
    """A bucket on its way."""

    def __init__(self, group: Any, bucket: Bucket, data: torch.Tensor) -> None:
        self.bucket, self.data = bucket, data
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._seconds = 0.0
        if data.device.type == "cpu":
            started = time.perf_counter()
            self._work = group.broadcast([data], options)
            self._work.get_future().add_done_callback(lambda _: self._stop(started))
            return
        # A stream of its own has the time of the broadcast alone.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            self._begin.record()
            self._work = group.broadcast([data], options)
            self._work.wait()
            self._end.record()

    def _stop(self, started: float) -> None:
        self._seconds = time.perf_counter() - started

    def is_over(self) -> bool:
        return bool(self._work.is_completed())

    def check(self) -> None:
        """Raise a RuntimeError where the bytes did not come."""
        self._work.wait()
        if self.data.device.type == "cuda":
            self._end.synchronize()

    def seconds(self) -> float:
        return self._seconds if self.data.device.type == "cpu" else self._begin.elapsed_time(self._end) / 1e3


def _gloo(store: Any, rank: int, route: WeightRoute, timeout: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    with socket.create_connection((route.host, route.port), timeout.total_seconds()) as way:
        own = way.getsockname()[0]  # the address by which others reach this host, if they reach that one
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, route.ranks, options)


def _nccl(store: Any, rank: int, route: WeightRoute, timeout: timedelta) -> Any:
    # Else its kernels wait for the trainer's, where weights go out beside training.
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    # Its own watchdog would end the process; `WeightGroup` waits no longer than the route allows.
    options._timeout = 2 * timeout + timedelta(hours=1)
    return dist.ProcessGroupNCCL(store, rank, route.ranks, options)

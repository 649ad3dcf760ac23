"""Weights from a policy's ranks straight to engines: by broadcast, or through memory that both see.

By broadcast, one sender and all ranks of all engines are in a process group of their own, gloo's on CPUs and NCCL's on
GPUs, beside whatever groups the processes are in already. Through memory, each sender has a lane: engines on its GPU,
or its host, copy what it shows. All meet at a store (TCP), which says what each bucket holds, and whether somebody has
given up. So whoever waits for another rank hears of its failure, or comes to the route's time limit.

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
from headrace.models.generation.weight_buckets import Bucket, NamedTensors, pack, unpack
from headrace.models.generation.weight_memory import DeviceMemory, HostMemory, opened_memory
from headrace.utils.background import in_background

_SOON_S, _SHORT_S, _LONG_S = 0.1, 0.0001, 0.002
_GIVEN_UP_S = 0.05
"""How often somebody who waits looks whether another has given up."""
_FAILED, _HERE, _MEMORY, _OPENED, _TAKEN = "failed", "here", "memory", "opened", "taken"


@dataclass(frozen=True)
class WeightRoute:
    """Where the ranks of one update meet, and what they have to agree on.

    `name` is the group's, new with each set of engines; `update` counts within it. Rank 0 of the `ranks` sends.
    `device` is where the bytes lie on the way: "cuda" for NCCL, "cpu" for gloo, which serves engines on GPUs too.
    `capacity` are the bytes of a bucket, `dtype` is that of matrices. With `splits_experts`, weights go by the names
    of a checkpoint. `timeout_s` bounds the wait for any one step of another rank.

    Through memory, `takers` has the number of engines in the lane of each sender; it is empty for a broadcast.
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
    takers: tuple[int, ...] = ()

    def key(self, what: str) -> str:
        return f"{self.name}/{self.update}/{what}"

    def sends(self, rank: int) -> bool:
        """Return whether a rank of the policy has weights to send; all gather them."""
        return rank == 0 if not self.takers else rank < len(self.takers) and self.takers[rank] > 0


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
        for lane in range(max(1, len(route.takers))):
            index = 0
            while self._store.delete_key(route.key(f"{lane}.{index}")):
                self._store.delete_key(route.key(f"{lane}.{index}.{_TAKEN}"))
                index += 1
            for what in (_MEMORY, _OPENED):
                self._store.delete_key(route.key(f"{lane}.{what}"))


class WeightGroup:
    """This process's place in the group, which it joins with the first update by a route and keeps for the next.

    `seconds` has those of each bucket of the last update that came here, between asking for it and having it.
    """

    def __init__(self) -> None:
        self._route: WeightRoute | None = None
        self._store: Any = None
        self._group: Any = None
        self._lane = 0
        self.seconds: list[float] = []

    def send(self, route: WeightRoute, named_tensors: NamedTensors, lane: int = 0) -> dict[str, float]:
        """Send weights to all other ranks, or to the engines of a lane.

        Returns:
            `weights_gb`, and the seconds that packing them took.

        Raises:
            TransportError: another rank has given up, or did not come in time.
        """
        self._lane = lane
        with self._taking_part(route, lane), self._memory(route) as memory:
            sent, pack_s, pending = 0, 0.0, None
            packing = time.perf_counter()
            for bucket in pack(named_tensors, memory.data, route.capacity, route.dtype):
                pack_s += time.perf_counter() - packing
                passing = self._pass_on(bucket, memory.data[bucket.start : bucket.start + bucket.nbytes])
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

        `rank` is this one's in the broadcast's group, or the lane.

        Raises:
            TransportError: as `send`.
            GenerationError: bytes that are not those that were sent.
        """
        self._lane = rank if route.takers else 0
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
        assert self._route is not None
        shown = self._opened() if self._route.takers else None
        ahead = self._ask(0, shown)
        while (passing := ahead) is not None:
            index = passing.bucket.index
            ahead = self._ask(index + 1, shown)
            self._finish(passing)
            self.seconds.append(passing.seconds())
            if ahead is None:
                shown = None  # the sender frees it once the last bucket is taken
            if self._route.takers:
                self._store.add(self._key(f"{index}.{_TAKEN}"), 1)
            yield passing.bucket, passing.data

    def _ask(self, index: int, shown: torch.Tensor | None) -> "_Passing | None":
        bucket: Bucket | None = self._hear(index)
        if bucket is None:
            return None
        assert self._route is not None
        data = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._route.device)
        if shown is None:
            return _Passing(bucket, data, group=self._group)
        return _Passing(bucket, data, source=shown[bucket.start : bucket.start + bucket.nbytes])

    def _opened(self) -> torch.Tensor:
        """Return the memory of this lane's sender."""
        ways = self._hear(_MEMORY)
        return opened_memory(ways[self._store.add(self._key(_OPENED), 1) - 1])

    @contextmanager
    def _memory(self, route: WeightRoute) -> Iterator[HostMemory | DeviceMemory]:
        """Return a context with memory for two buckets, which the lane's engines see, if there are lanes."""
        if route.takers and route.device == "cuda":
            torch.cuda.empty_cache()  # for the engines that wake on this GPU
        memory = (HostMemory if route.device == "cpu" else DeviceMemory)(route.capacity)
        try:
            if route.takers:
                self._say(_MEMORY, memory.ways(route.takers[self._lane]))
            yield memory
        finally:
            memory.close()

    def _pass_on(self, bucket: Bucket, data: torch.Tensor) -> "_Passing | _Shown":
        assert self._route is not None
        if not self._route.takers:
            self._say(bucket.index, bucket)
            return _Passing(bucket, data, group=self._group)
        if data.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # others read it, whom no event reaches
        self._say(bucket.index, bucket)
        takers, key = self._route.takers[self._lane], self._key(f"{bucket.index}.{_TAKEN}")
        return _Shown(bucket, lambda: int(self._store.add(key, 0)) >= takers)

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
        if route.takers:
            return
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

    def _key(self, what: str | int) -> str:
        assert self._route is not None
        return self._route.key(f"{self._lane}.{what}")

    def _say(self, what: str | int, value: Any) -> None:
        self._store.set(self._key(what), encode(value).head)

    def _hear(self, what: str | int) -> Any:
        key = self._key(what)
        self._until(lambda: self._store.check([key]), f"word of {what}")
        return decode(Payload(self._store.get(key), []))

    def _finish(self, passing: "_Passing | _Shown") -> None:
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


class _Shown:
    """A bucket that engines copy, or have copied."""

    def __init__(self, bucket: Bucket, is_over: Callable[[], bool]) -> None:
        self.bucket, self.is_over = bucket, is_over

    def check(self) -> None:
        """Do nothing: who fails to copy it says so at the meeting."""


class _Passing:
    """A bucket on its way into `data`: by a broadcast in `group`, or by a copy of `source`."""

    def __init__(
        self, bucket: Bucket, data: torch.Tensor, *, group: Any = None, source: torch.Tensor | None = None
    ) -> None:
        self.bucket, self.data = bucket, data
        self._work: Any = None
        self._seconds = 0.0
        if data.device.type == "cpu":
            started = time.perf_counter()
            self._start(group, source)
            if self._work is None:
                self._stop(started)
            else:
                self._work.get_future().add_done_callback(lambda _: self._stop(started))
            return
        # A stream of its own has the time of the transfer alone.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            self._begin.record()
            self._start(group, source)
            if self._work is not None:
                self._work.wait()
            self._end.record()

    def _start(self, group: Any, source: torch.Tensor | None) -> None:
        if source is not None:
            self.data.copy_(source, non_blocking=True)
            return
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._work = group.broadcast([self.data], options)

    def _stop(self, started: float) -> None:
        self._seconds = time.perf_counter() - started

    def is_over(self) -> bool:
        if self._work is not None:
            return bool(self._work.is_completed())
        return self.data.device.type == "cpu" or bool(self._end.query())  # type: ignore[no-untyped-call]

    def check(self) -> None:
        """Raise a RuntimeError where the bytes did not come."""
        if self._work is not None:
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

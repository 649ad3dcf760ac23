"""Workers in processes of this machine, started by multiprocessing and driven over pipes."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any

from headrace.distributed.topology import RankLayout
from headrace.distributed.worker_groups import wire
from headrace.distributed.worker_groups.failures import lost
from headrace.distributed.worker_groups.rank import (
    Answer,
    Call,
    RankInfo,
    RankServer,
    RankSettings,
    WorkerSpec,
    open_store,
)
from headrace.distributed.worker_groups.remote import GRACE_S, RemoteWorkerGroup
from headrace.utils.interrupt import TERMINAL_SIGNALS, held_back

_HOST = "127.0.0.1"
_GENTLE_S = 10.0
_FORCED_S = 3.0


@contextmanager
def _main_left_alone(spec: WorkerSpec) -> Iterator[None]:
    """Keep processes that start meanwhile from running this one's script again, unless the workers are of it."""
    main = sys.modules["__main__"]
    if b"__main__" in bytes(ForkingPickler.dumps(spec)):
        yield
        return
    kept: dict[str, object] = {
        name: vars(main)[name] for name in ("__spec__", "__file__") if name in vars(main)
    }
    for name in kept:
        setattr(main, name, None)
    try:
        yield
    finally:
        vars(main).update(kept)


class SpawnWorkerGroup(RemoteWorkerGroup):
    """One process per rank of `layout`, with torch.distributed initialised between them.

    Ctrl-C reaches the driver only. The workers end with the driver, however it ends.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        layout: RankLayout,
        *,
        settings: RankSettings | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        super().__init__(layout, grace_s=grace_s)
        self._store = open_store(_HOST, self.world_size)
        self._pipes: list[Connection[Any, Any]] = []
        self._processes: list[SpawnProcess] = []
        self._open(spec, settings)

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    def _start(self, spec: WorkerSpec, settings: RankSettings) -> None:
        context = multiprocessing.get_context("spawn")
        with _main_left_alone(spec):
            for rank in range(self.world_size):
                info = RankInfo(rank, self.world_size, rank, self.world_size, _HOST, self._store.port)
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve,
                    args=(theirs, info, settings, spec),
                    name=f"headrace-worker-{rank}",
                    daemon=True,
                )
                with held_back(TERMINAL_SIGNALS):
                    process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)
        self._busy = "start-up"
        for _ in self._answers("start-up"):
            pass

    def _post(self, calls: Mapping[int, Call]) -> None:
        for rank, call in calls.items():
            # A pipe that is closed shows in `_wait`, with the reason.
            with suppress(ConnectionError):
                wire.send(self._pipes[rank], call)

    def _wait(self, ranks: set[int], timeout_s: float | None) -> list[tuple[int, Answer]]:
        handles: list[Any] = [self._pipes[r] for r in ranks] + [self._processes[r].sentinel for r in ranks]
        ready = set(wait(handles, timeout_s))
        return [
            (rank, self._receive(rank))
            for rank in sorted(ranks)
            if self._pipes[rank] in ready or self._processes[rank].sentinel in ready
        ]

    def _receive(self, rank: int) -> Answer:
        """Return a rank's next answer; of a process that has ended, what it still sent."""
        try:
            answer: Answer = wire.receive(self._pipes[rank])
        except (EOFError, ConnectionError):
            process = self._processes[rank]
            process.join(_FORCED_S)
            return lost(rank, f"worker process {process.pid}", process.exitcode)
        return answer

    def _end(self, *, gently: bool) -> None:
        if gently:
            for pipe in self._pipes:
                with suppress(ConnectionError):
                    wire.send(pipe, None)
            _join(self._processes, _GENTLE_S)
        for stop in (SpawnProcess.terminate, SpawnProcess.kill):
            for process in (p for p in self._processes if p.is_alive()):
                stop(process)
            _join(self._processes, _FORCED_S)
        for pipe in self._pipes:
            pipe.close()
        vars(self).pop("_store", None)  # it listens as long as it is there


def _join(processes: list[SpawnProcess], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def _serve(pipe: "Connection[Any, Any]", info: RankInfo, settings: RankSettings, spec: WorkerSpec) -> None:
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    serve(pipe, info, settings, lambda: spec)


def serve(
    pipe: "Connection[Any, Any]",
    info: RankInfo | None,
    settings: RankSettings,
    load: Callable[[], WorkerSpec],
) -> None:
    """Serve one rank, or a worker alone, until the driver says stop or is gone."""
    for number in TERMINAL_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    server = RankServer()
    # A closed pipe means that there is nobody left to tell.
    with suppress(EOFError, ConnectionError):
        wire.send(pipe, server.build(info, settings, load))
        while (call := wire.receive(pipe)) is not None:
            for answer in server.answers(call):
                wire.send(pipe, answer)
    server.stop()

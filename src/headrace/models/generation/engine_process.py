"""An engine in a process of its own, and the trainer's end of it.

The process may run another interpreter. It inherits a socket for calls, one for weights, a pipe that closes when the
trainer ends, and the memory that weights come through: there is no address that others could reach. Messages are
msgpack values.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import headrace
from headrace.distributed.worker_groups import RankSettings, WorkerSpec, wire
from headrace.distributed.worker_groups.failures import lost
from headrace.distributed.worker_groups.rank import Answer, Call
from headrace.distributed.worker_groups.spawn import serve
from headrace.errors import ConfigError
from headrace.models.generation import weight_memory
from headrace.models.generation.engine import Completions, EngineSpec, ProcessEngine, Request
from headrace.models.generation.weight_group import WeightRoute
from headrace.utils.interrupt import TERMINAL_SIGNALS, held_back

_KILLED_S = 3.0


class EngineProcess:
    """The trainer's end: it starts the process, and sends calls. An answer to the start comes first.

    `devices` are the values of CUDA_VISIBLE_DEVICES, None: all that this process sees. `memory` is the file of
    `weight_memory.HostMemory`; None: weights come by a route.
    """

    def __init__(
        self, name: str, spec: EngineSpec, *, memory: int | None, devices: str | None, threads: int
    ) -> None:
        """Start it, and do not wait for it.

        Raises:
            ConfigError: the interpreter of `generation.python` cannot be run.
        """
        self.name = name
        self.calls, calls = _pair()
        self.weights, weights = _pair()
        theirs, self._lifeline = os.pipe()
        given = (calls.fileno(), weights.fileno(), theirs, *(() if memory is None else (memory,)))
        try:
            with held_back(TERMINAL_SIGNALS):
                self._process = subprocess.Popen(
                    [spec.cfg.python or sys.executable, "-m", __name__, *map(str, given)],
                    pass_fds=given,
                    env=_environment(spec, devices, threads),
                    stdin=subprocess.DEVNULL,
                )
        except OSError as error:
            os.close(self._lifeline)
            raise ConfigError(
                f"generation.python={spec.cfg.python}: cannot be run ({error.strerror}); name the Python of an "
                "environment that has the engine"
            ) from error
        finally:
            os.close(theirs)
            calls.close()
            weights.close()
        with suppress(ConnectionError):
            wire.send(self.calls, spec)

    @property
    def pid(self) -> int:
        return self._process.pid

    def post(self, method: str, *args: Any, streams: bool = False) -> None:
        with suppress(ConnectionError):
            wire.send(self.calls, Call(method, wire.encode((args, {})), streams=streams))

    @staticmethod
    def ready(engines: "Sequence[EngineProcess]", timeout_s: float | None = None) -> "list[EngineProcess]":
        found = set(wait([engine.calls for engine in engines], timeout_s))
        return [engine for engine in engines if engine.calls in found]

    def receive(self) -> Answer:
        try:
            answer: Answer = wire.receive(self.calls)
        except (EOFError, ConnectionError):
            return self.loss()
        return answer

    def loss(self) -> Answer:
        """Return how the process has ended, which has closed its sockets."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILLED_S)
        return lost(0, f"{self.name} (pid {self.pid})", self._process.returncode)

    def ask_to_end(self) -> None:
        self.weights.close()  # it may wait for more
        self.post("shutdown")
        with suppress(ConnectionError):
            wire.send(self.calls, None)

    def end(self, *, timeout_s: float = 0.0) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        self._process.kill()
        self._process.wait()
        self.calls.close()
        self.weights.close()
        os.close(self._lifeline)


def _pair() -> "tuple[Connection[Any, Any], Connection[Any, Any]]":
    ours, theirs = socket.socketpair()
    return Connection(ours.detach()), Connection(theirs.detach())


def _environment(spec: EngineSpec, devices: str | None, threads: int) -> dict[str, str]:
    # The folder has a link to this package and nothing else, so that the engine's environment stays its own.
    places = [str(spec.folder / "path")]
    if spec.cfg.python is None and (own := os.environ.get("PYTHONPATH")):
        places.append(own)
    link = spec.folder / "path" / "headrace"
    if not link.exists():
        link.parent.mkdir()
        link.symlink_to(Path(headrace.__file__).parent)
    env = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(places),
        "OMP_NUM_THREADS": str(threads),
    }
    return env if devices is None else {**env, "CUDA_VISIBLE_DEVICES": devices}


class EngineServer:
    """The engine's end: its methods are what the trainer calls."""

    def __init__(self, spec: EngineSpec, memory: weight_memory.Receiver | None) -> None:
        self._memory = memory
        self._engine = build_engine(spec)

    def ping(self) -> None:
        """Answer."""

    def answer(
        self, prompts: Sequence[Sequence[int]], places: Sequence[int], params: Any, seed: int
    ) -> Iterator[Completions]:
        yield from self._engine.answer(Request(prompts, places, params, seed))

    def update_weights(self, version: int) -> float:
        """Load what comes through memory, and return the seconds that copies of it took."""
        assert self._memory is not None
        self._memory.copy_s = 0.0
        self._engine.update_weights(self._memory.tensors(), version)
        return self._memory.copy_s

    def receive_weights(self, route: WeightRoute, rank: int, version: int) -> list[list[float]]:
        return self._engine.receive_weights(route, rank, version)

    def release(self, weights_follow: bool) -> None:
        self._engine.release(weights_follow=weights_follow)

    def take_metrics(self) -> dict[str, float]:
        return self._engine.take_metrics()

    def shutdown(self) -> None:
        self._engine.shutdown()


def build_engine(spec: EngineSpec) -> ProcessEngine:
    """Return the engine of `generation.backend`; what others need is not imported."""
    if spec.cfg.backend == "vllm":
        from headrace.models.generation.vllm import VLLMEngine  # noqa: PLC0415  (loads none of transformers)

        return VLLMEngine(spec)
    from headrace.models.generation.hf_engine import HFEngine  # noqa: PLC0415  (loads transformers)

    return HFEngine(spec)


def main(descriptors: Iterable[str]) -> None:
    """Serve one engine until the trainer says stop or is gone."""
    calls, weights, lifeline, *memory = map(int, descriptors)
    pipe: Connection[Any, Any] = Connection(calls)
    folders: list[Path] = []

    def load() -> WorkerSpec:
        spec: EngineSpec = wire.receive(pipe)
        folders.append(spec.folder)
        threading.Thread(target=_end_with, args=(lifeline, spec.folder), daemon=True).start()
        receiver = weight_memory.Receiver(Connection(weights), memory[0]) if memory else None
        return WorkerSpec(EngineServer, (spec, receiver))

    serve(pipe, None, RankSettings(), load)
    for folder in folders:  # a trainer that was killed leaves it
        shutil.rmtree(folder, ignore_errors=True)
    # An interpreter with these libraries takes seconds to take itself apart.
    sys.stdout.flush()
    os._exit(0)


def _end_with(lifeline: int, folder: Path) -> None:
    """End this process with its trainer, whatever it does; the folder is the engines' own."""
    os.read(lifeline, 1)
    shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])

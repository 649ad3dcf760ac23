"""Engines as Ray actors, so that they may live on other hosts than the one that asks them."""

import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from headrace.distributed.virtual_cluster import RayVirtualCluster
from headrace.distributed.worker_groups import RankSettings, WorkerSpec
from headrace.distributed.worker_groups.failures import WorkerFailure
from headrace.distributed.worker_groups.rank import Answer
from headrace.distributed.worker_groups.ray_actor import ANSWERS, RankActor, briefly
from headrace.distributed.worker_groups.wire import encode
from headrace.errors import ConfigError, HeadraceError
from headrace.models.generation.engine import EngineSpec, RayRoom
from headrace.models.generation.engine_process import EngineServer

_GENTLE_S = 10.0


class EngineCluster:
    """The room of engines on a Ray cluster, whose processes this one can reach.

    `host` is this node's address; `gives_gpu`: this process has a GPU of its own.
    """

    def __init__(self, spec: EngineSpec, room: RayRoom) -> None:
        """Wait for room.

        Raises:
            ConfigError: GPUs that the cluster has not, or an interpreter that is not Ray's.
            HeadraceError: no room within the time.
        """
        if spec.cfg.python is not None:
            raise ConfigError(
                f"generation.python={spec.cfg.python}: engines apart are Ray actors where the policy's workers are, "
                "and run Ray's interpreter; remove it, or set generation.placement=beside"
            )
        self._spec, self._seats = spec, room.seats
        self._files = {file.name: file.read_bytes() for file in spec.folder.iterdir() if file.is_file()}
        self._gpus = spec.ranks if room.device == "cuda" and not room.seats else 0
        self._cluster = RayVirtualCluster(
            spec.cfg.engines,
            num_nodes=spec.cfg.engines,
            gpus_per_node=self._gpus,
            gpus_per_worker=spec.ranks,
            cpus_per_worker=0,
            spread="PACK",
            asked_by="generation.engines times generation.vllm.tensor_parallel",
            startup_timeout_s=room.startup_timeout_s,
            autoscales=room.autoscales,
        )
        self.host: str = ray.util.get_node_ip_address()
        # Others can be seen, and are those of the policy or of engines.
        self.gives_gpu = bool(ray.get_gpu_ids())

    def launch(self, name: str, index: int, threads: int) -> "EngineActor":
        """Start an engine, and do not wait for it."""
        options = {
            "num_cpus": 0,
            "num_gpus": self._gpus,
            "scheduling_strategy": self._cluster.place(index),
            "runtime_env": self._cluster.runtime_env,
        }
        if self._seats:
            seat = self._seats[index % len(self._seats)]
            options |= {
                "scheduling_strategy": NodeAffinitySchedulingStrategy(seat.node, soft=False),
                "runtime_env": {**(self._cluster.runtime_env or {}), "env_vars": _sees(seat.devices)},
            }
        return EngineActor(name, WorkerSpec(_Server, (self._spec, self._files, threads)), options)

    def close(self) -> None:
        self._cluster.shutdown()


class EngineActor:
    """The asking end of an engine in a Ray actor; it answers as an `EngineProcess` does."""

    def __init__(self, name: str, spec: WorkerSpec, options: Mapping[str, Any]) -> None:
        self.name = name
        actor_class = ray.remote(max_restarts=0, max_task_retries=0)(RankActor)
        self._actor = actor_class.options(**options).remote()
        start = self._actor.start.options(**ANSWERS)
        # What comes of each call, one after the other.
        self._answers = deque([start.remote(None, RankSettings(), [ray.put(spec)], sys.path)])

    @property
    def pid(self) -> int:
        pid: int = ray.get(self._actor.__ray_call__.remote(lambda _: os.getpid()))
        return pid

    def post(self, method: str, *args: Any, streams: bool = False) -> None:
        serve = self._actor.serve.options(**ANSWERS)
        self._answers.append(serve.remote(encode((args, {})), method, streams, True, None))

    @staticmethod
    def ready(engines: "Sequence[EngineActor]", timeout_s: float | None = None) -> "list[EngineActor]":
        waiting = {engine._answers[0]: engine for engine in engines if engine._answers}
        found = ray.wait(list(waiting), num_returns=1, timeout=timeout_s)[0]
        return [waiting[answers] for answers in found]

    def receive(self) -> Answer:
        try:
            answer: Answer = ray.get(next(self._answers[0]))
        except RayError as error:
            self._answers.clear()
            return WorkerFailure(0, HeadraceError, f"{self.name} has died: {briefly(error)}", is_lost=True)
        if isinstance(answer, WorkerFailure) or answer.is_last:
            self._answers.popleft()
        return answer

    def ask_to_end(self) -> None:
        self.post("shutdown")

    def end(self, *, timeout_s: float = 0.0) -> None:
        deadline = time.monotonic() + timeout_s
        if ray.is_initialized():
            while self._answers and self.ready([self], max(0.0, deadline - time.monotonic())):
                self.receive()
            ray.kill(self._actor)


def _sees(devices: str) -> dict[str, str]:
    """Return the environment of a process that has no GPU of its own by Ray's count, and sees another one's."""
    if not devices:
        return {}
    return {"CUDA_VISIBLE_DEVICES": devices, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


class _Server(EngineServer):
    """An engine in an actor, from the files that describe its model; they are there as long as it is."""

    def __init__(self, spec: EngineSpec, files: Mapping[str, bytes], threads: int) -> None:
        torch.set_num_threads(threads)
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-engine-")
        folder = Path(self._folder.name)
        for name, data in files.items():
            (folder / name).write_bytes(data)
        super().__init__(EngineSpec(**{**vars(spec), "folder": folder}), None)

    def shutdown(self) -> None:
        super().shutdown()
        self._folder.cleanup()

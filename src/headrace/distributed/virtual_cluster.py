"""The part of a Ray cluster that a group of workers runs on."""

import importlib.metadata
import logging
import math
import pkgutil
import re
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

import headrace
from headrace.distributed.ray_connection import connect_until
from headrace.errors import ConfigError, HeadraceError

_PACKAGE = "headrace"
_EXTRAS = ("", "train", "ray")
_log = logging.getLogger(__name__)
# Room that is there is given sooner.
_SOON_S = 5.0


class RayVirtualCluster:
    """Room for `workers` processes on `num_nodes` nodes, as one placement group with a bundle per node.

    Uses the cluster that this process is connected to, or else that of RAY_ADDRESS, or else starts a local one
    with `num_cpus` CPUs (None: those of the machine). `shutdown` ends what was started here and leaves any other
    cluster as it was. Each worker reserves a GPU where there are `gpus_per_node`, and `cpus_per_worker` (None:
    one, or its share where there are fewer CPUs than workers). The cluster must have `gpus_beside` GPUs more, for the
    run's rollout actor and engines. `spread` is Ray's strategy for bundles: "PACK" lets them share a node. A worker has
    `gpus_per_worker`, where there are GPUs, and `asked_by` is the key that says how many workers there are.

    What the cluster lacks altogether is an error at once, unless it `autoscales`: then it is asked for, and waited for
    like room that others hold, with a warning after a few seconds.

    Raises:
        ConfigError: a cluster with too few nodes or GPUs, or workers that the nodes cannot share evenly.
        TransportError: no cluster at RAY_ADDRESS.
        HeadraceError: no room within `startup_timeout_s`.
    """

    def __init__(
        self,
        workers: int,
        *,
        num_nodes: int = 1,
        gpus_per_node: int = 0,
        num_cpus: int | None = None,
        cpus_per_worker: float | None = None,
        gpus_per_worker: int = 1,
        gpus_beside: int = 0,
        spread: str = "STRICT_SPREAD",
        asked_by: str = "policy.workers",
        startup_timeout_s: float = 180.0,
        autoscales: bool = False,
    ) -> None:
        if workers % num_nodes or (gpus_per_node and workers > num_nodes * gpus_per_node):
            raise ConfigError(
                f"policy.workers={workers} cannot share cluster.num_nodes={num_nodes} with "
                f"cluster.gpus_per_node={gpus_per_node} evenly; each worker takes a GPU, if there are any"
            )
        self.workers_per_node = workers // num_nodes
        self._connection = ExitStack()
        starts_ray = connect_until(self._connection, num_cpus=num_cpus)
        self.placement_group: Any = None
        with ExitStack() as undo:
            undo.callback(self.shutdown)
            if cpus_per_worker is None:
                cpus_per_worker = _cpu_fraction(self.workers_per_node, num_nodes, gpus_per_node, autoscales)
            self.cpus_per_worker = cpus_per_worker
            if not autoscales:
                _check_gpus(workers * gpus_per_worker if gpus_per_node else 0, gpus_beside, asked_by)
            # Processes of a cluster started here run this interpreter.
            self.runtime_env = None if starts_ray else _needed_runtime_env(startup_timeout_s)
            gpus = float(gpus_per_worker if gpus_per_node else 0)
            self._reserve(num_nodes, gpus, spread, startup_timeout_s)
            undo.pop_all()

    def _reserve(self, num_nodes: int, gpus: float, spread: str, startup_timeout_s: float) -> None:
        per_worker = {"CPU": self.cpus_per_worker, "GPU": gpus}
        bundle = {name: n * self.workers_per_node for name, n in per_worker.items() if n}
        if not bundle:
            return
        self.placement_group = placement_group([dict(bundle) for _ in range(num_nodes)], spread)
        ready, wanted = self.placement_group.ready(), f"{num_nodes} x {_listed(bundle)}"
        soon_s = min(_SOON_S, startup_timeout_s)
        if not ray.wait([ready], timeout=soon_s)[0]:
            free = _listed(ray.available_resources())
            _log.warning(
                "Ray has no room yet for %s (free: %s); waiting up to %.3g s (cluster.startup_timeout_s)",
                *(wanted, free, startup_timeout_s),
            )
        try:
            ray.get(ready, timeout=startup_timeout_s - soon_s)
        except GetTimeoutError as error:
            raise HeadraceError(
                f"Ray found no room for {wanted} within {startup_timeout_s:.3g} s; it has "
                f"{_listed(ray.cluster_resources())} in all, free: {_listed(ray.available_resources())}. End what "
                "holds the rest, ask for less (policy.workers, cluster.rollout_gpus), or wait longer "
                "(cluster.startup_timeout_s)"
            ) from error

    def place(self, rank: int) -> Any:
        """Return Ray's scheduling strategy for a worker; consecutive ranks share a node."""
        if self.placement_group is None:
            return "SPREAD"
        bundle = rank // self.workers_per_node
        return PlacementGroupSchedulingStrategy(self.placement_group, placement_group_bundle_index=bundle)

    def shutdown(self) -> None:
        """Give the room back, and end the cluster if it was started here; may be called twice."""
        if self.placement_group is not None and ray.is_initialized():
            remove_placement_group(self.placement_group)
        self.placement_group = None
        self._connection.close()


def _listed(resources: Mapping[str, float]) -> str:
    """Return CPUs and GPUs in words, such as "2 CPU, 1 GPU"."""
    return ", ".join(f"{resources.get(name, 0.0):.4g} {name}" for name in ("CPU", "GPU"))


def _check_gpus(for_workers: int, beside: int, asked_by: str) -> None:
    """Raise ConfigError if the cluster has fewer GPUs than the run needs, whoever uses them now."""
    needed, there = for_workers + beside, int(ray.cluster_resources().get("GPU", 0))
    if needed > there:
        raise ConfigError(
            f"the run needs {needed} GPUs and the Ray cluster has {there}: the workers take {for_workers} "
            f"({asked_by}), the rollout actor {beside} beside them (cluster.rollout_gpus). Lower one of the two, "
            "set cluster.rollout=driver, or add nodes; where the cluster adds nodes by itself, set "
            "cluster.autoscales=true"
        )


def _cpu_fraction(workers_per_node: int, num_nodes: int, gpus_per_node: int, autoscales: bool) -> float:
    """Return the CPUs that each worker may reserve on the nodes that have room for it, or will come."""
    gpus_needed = workers_per_node if gpus_per_node else 0
    nodes = [node["Resources"] for node in ray.nodes() if node.get("Alive")]
    cpus = sorted(
        (n["CPU"] for n in nodes if n.get("CPU", 0) > 0 and n.get("GPU", 0) >= gpus_needed), reverse=True
    )
    if len(cpus) < num_nodes and autoscales:
        return 1.0
    if len(cpus) < num_nodes:
        raise ConfigError(
            f"cluster.num_nodes={num_nodes} with cluster.gpus_per_node={gpus_per_node}: the Ray cluster has "
            f"{len(cpus)} nodes with CPUs and {gpus_needed} GPUs, of {len(nodes)} in all; lower one of the two "
            "or add nodes; where the cluster adds nodes by itself, set cluster.autoscales=true"
        )
    # Ray counts resources in ten-thousandths.
    share = math.floor(float(cpus[num_nodes - 1]) / workers_per_node * 1e4) / 1e4
    return min(1.0, share)


def _needed_runtime_env(timeout_s: float) -> dict[str, Any] | None:
    """Return None where every node has this version of headrace, else the environment that gives it to them."""
    # A checkout on PYTHONPATH has a version, and no metadata of an installation.
    probe = ray.remote(num_cpus=0)(pkgutil.resolve_name)
    answers = [
        probe.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(
            f"{_PACKAGE}:__version__"
        )
        for node in ray.nodes()
        if node.get("Alive")
    ]
    try:
        if all(version == headrace.__version__ for version in ray.get(answers, timeout=timeout_s)):
            return None
    except RayTaskError:
        pass  # not installed on a node
    except RayError as error:
        raise HeadraceError(f"cannot ask the nodes of the Ray cluster for their packages: {error}") from error
    return project_runtime_env()


def project_runtime_env() -> dict[str, Any]:
    """Return a Ray runtime environment with this headrace and what it requires, in the versions installed here.

    Example: `{"py_modules": ["/src/headrace"], "pip": ["torch==2.13.0", "ray==2.60.0", ...]}`.
    """
    try:
        requirements = importlib.metadata.requires(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(
            f"a node of the Ray cluster has no headrace {headrace.__version__}, and cannot be given the one here, "
            "which is not installed but on PYTHONPATH; run `pip install -e .` in its checkout, or install it on "
            "every node"
        ) from error
    names = [
        re.split(r"[^A-Za-z0-9._-]", text, maxsplit=1)[0]
        for text in requirements
        if (text.split("extra ==")[1].strip(" '\"") if "extra ==" in text else "") in _EXTRAS
    ]
    pinned = []
    for name in dict.fromkeys(names):
        with suppress(importlib.metadata.PackageNotFoundError):
            # Without a local label such as +cpu, which indexes do not serve.
            pinned.append(f"{name}=={importlib.metadata.version(name).split('+')[0]}")
    return {"py_modules": [str(Path(headrace.__file__).parent)], "pip": pinned}

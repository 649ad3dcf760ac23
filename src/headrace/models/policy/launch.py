"""From the policy's section to its workers: how many processes, started by what."""

from collections.abc import Sequence
from typing import Any, Literal

import torch

from headrace.config import ClusterConfig, GenerationConfig, PolicyConfig, RecipeConfig
from headrace.distributed.topology import RankLayout, lay_out_ranks
from headrace.distributed.worker_groups import (
    LocalWorkerGroup,
    RankSettings,
    SpawnWorkerGroup,
    WorkerGroup,
    WorkerSpec,
)
from headrace.distributed.worker_groups.rank import DeviceType, Seat
from headrace.errors import ConfigError
from headrace.models.generation.engine import RayRoom
from headrace.models.policy.workers.automodel_worker import AutomodelPolicyWorker

Launcher = Literal["spawn", "ray"]


def build_worker_group(
    cfg: PolicyConfig,
    generation: GenerationConfig,
    *,
    tokenizer: Any,
    seed: int,
    with_reference: bool,
    cluster: ClusterConfig,
    auto_launcher: Launcher,
) -> WorkerGroup:
    """Return the policy's workers: one in this process, or `policy.workers` processes.

    `auto_launcher` is what `policy.parallel.launcher=auto` means. With `cluster.rollout=actor`, Ray has to have GPUs
    for the rollout actor as well. A process has at most as many CPU threads as
    this one, and no more than its share of the cores.

    Raises:
        ConfigError: workers, parallel sizes or devices that do not fit together, or a launcher that is not
            installed.
    """
    spec = WorkerSpec(
        AutomodelPolicyWorker,
        (cfg, generation),
        {"tokenizer": tokenizer, "seed": seed, "with_reference": with_reference},
    )
    layout = lay_out_ranks(cfg.workers, context=cfg.parallel.context, tensor=cfg.parallel.tensor)
    place = worker_place(cfg, auto_launcher)
    if place != "ray":
        _check_this_machine(cluster)
    match place:
        case "driver":
            return LocalWorkerGroup(spec.factory(*spec.args, **spec.kwargs))
        case "spawn":
            settings = RankSettings(_spawn_device(cfg), torch.get_num_threads())
            return SpawnWorkerGroup(spec, layout, settings=settings)
        case "ray":
            on_gpus = _on_gpus(cfg, cluster)
            return start_on_ray(
                spec,
                layout,
                device="cuda" if on_gpus else "cpu",
                num_nodes=cluster.num_nodes,
                gpus_per_node=cluster.gpus_per_node if on_gpus else 0,
                gpus_beside=_gpus_beside(cfg, generation, cluster),
                startup_timeout_s=cluster.startup_timeout_s,
                autoscales=cluster.autoscales,
            )


def rollout_gpus(recipe: RecipeConfig) -> int:
    """Return the GPUs of the rollout actor, if there is one; it needs none where engines have their own."""
    if recipe.cluster.rollout_gpus is not None:
        return recipe.cluster.rollout_gpus
    return int(_on_gpus(recipe.policy, recipe.cluster) and not _has_engine_actors(recipe))


def engine_room(recipe: RecipeConfig, seats: Sequence[Seat] = ()) -> RayRoom | None:
    """Return where engines live as Ray actors, which they are if the policy's workers are; None: in processes.

    `seats` are those of the policy's ranks, which engines beside it join.
    """
    if not _has_engine_actors(recipe):
        return None
    cluster = recipe.cluster
    device = "cuda" if _on_gpus(recipe.policy, cluster) else "cpu"
    joined = seats if recipe.generation.placement == "beside" else ()
    return RayRoom(device, cluster.startup_timeout_s, cluster.autoscales, tuple(joined))


def _has_engine_actors(recipe: RecipeConfig) -> bool:
    launcher: Launcher = "ray" if recipe.data_plane.impl == "transfer_queue" else "spawn"
    generation = recipe.generation
    if generation.placement == "in_place" or generation.backend == "sglang" or not recipe.uses_store:
        return False
    # Beside a policy that trains meanwhile, or with an interpreter of their own, they are the rollout's processes.
    rollouts_own = generation.placement == "beside" and (
        recipe.asynchrony.enabled or generation.python is not None
    )
    return worker_place(recipe.policy, launcher) == "ray" and not rollouts_own


def _has_engines_apart(generation: GenerationConfig) -> bool:
    return generation.placement == "apart" and generation.backend != "sglang"


def _on_gpus(cfg: PolicyConfig, cluster: ClusterConfig) -> bool:
    return cluster.gpus_per_node > 0 and cfg.device != "cpu"


def _gpus_beside(cfg: PolicyConfig, generation: GenerationConfig, cluster: ClusterConfig) -> int:
    """Return the GPUs that a run on Ray needs beside those of its workers."""
    on_gpus = _on_gpus(cfg, cluster)
    apart = on_gpus and _has_engines_apart(generation)
    rollout = on_gpus and not apart if cluster.rollout_gpus is None else cluster.rollout_gpus
    ranks = generation.vllm.tensor_parallel if generation.backend == "vllm" else 1
    return int(rollout) * (cluster.rollout == "actor") + generation.engines * ranks * apart


def worker_place(cfg: PolicyConfig, auto_launcher: Launcher) -> Literal["driver", "spawn", "ray"]:
    """Return where the policy's workers run: in the driver's process, in others of this machine, or on Ray."""
    if cfg.workers == 1 and cfg.parallel.launcher != "ray":
        return "driver"
    return auto_launcher if cfg.parallel.launcher == "auto" else cfg.parallel.launcher


def _check_this_machine(cluster: ClusterConfig) -> None:
    """Hold the one machine of workers outside Ray to the nodes and GPUs that are asked for."""
    here = "the policy's workers run outside Ray, on this machine"
    if cluster.num_nodes > 1:
        raise ConfigError(
            f"cluster.num_nodes={cluster.num_nodes}: {here} alone; set cluster.num_nodes=1, or "
            "policy.parallel.launcher=ray"
        )
    if cluster.gpus_per_node and (devices := torch.cuda.device_count()) < cluster.gpus_per_node:
        raise ConfigError(
            f"cluster.gpus_per_node={cluster.gpus_per_node}: {here}, which has {devices} CUDA devices; set "
            f"cluster.gpus_per_node={devices}, or policy.parallel.launcher=ray"
        )


def _spawn_device(cfg: PolicyConfig) -> DeviceType:
    if cfg.device == "cpu" or (cfg.device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if torch.cuda.device_count() < cfg.workers:
        raise ConfigError(
            f"policy.workers={cfg.workers} need a CUDA device each and this machine has "
            f"{torch.cuda.device_count()}; set policy.device=cpu, or fewer workers"
        )
    return "cuda"


def start_on_ray(
    spec: WorkerSpec,
    layout: RankLayout,
    *,
    device: DeviceType = "cpu",
    alone: str | None = None,
    **room: Any,
) -> WorkerGroup:
    """Start a group of Ray actors; see `RayWorkerGroup`."""
    try:
        from headrace.distributed.worker_groups.ray_group import (  # noqa: PLC0415  (loads Ray)
            RayWorkerGroup,
        )
    except ImportError as error:
        raise ConfigError(
            f"policy.parallel.launcher=ray cannot be used: {error}. Install headrace[ray], or set "
            "policy.parallel.launcher=spawn"
        ) from error
    return RayWorkerGroup(
        spec,
        layout,
        settings=RankSettings(device, torch.get_num_threads()),
        alone=alone,
        **room,
    )

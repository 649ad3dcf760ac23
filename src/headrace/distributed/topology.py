"""Where a rank stands: data, context and tensor axes, their process groups, and the mesh that weights lie on."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from headrace.distributed.named_sharding import NamedSharding
from headrace.errors import ConfigError

PIPELINE, DATA, CONTEXT, TENSOR = "pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"


def policy_sharding(workers: int, *, context: int = 1, tensor: int = 1) -> NamedSharding:
    """Lay ranks 0 to `workers` - 1 out on (pipeline, data, context, tensor); tensor ranks are neighbours.

    Raises:
        ConfigError: `workers` that context x tensor does not divide.

    >>> policy_sharding(4, tensor=2).get_worker_coords(3)
    {'pipeline_parallel': 0, 'data_parallel': 1, 'context_parallel': 0, 'tensor_parallel': 1}
    """
    data, rest = divmod(workers, context * tensor)
    if rest or not data:
        raise ConfigError(
            f"{workers} workers do not make whole replicas of policy.parallel.context={context} x "
            f"policy.parallel.tensor={tensor}; make policy.workers a multiple of {context * tensor}"
        )
    layout = np.arange(workers).reshape(1, data, context, tensor)
    return NamedSharding(layout, [PIPELINE, DATA, CONTEXT, TENSOR])


@dataclass(frozen=True)
class Topology:
    """This rank's groups; `replica` spans context x tensor.

    `weights` is a mesh (weights, tensor): weights are split over all data and context ranks, and what tensor
    parallelism splits over the tensor ranks too.
    """

    sharding: NamedSharding
    data: dist.ProcessGroup
    context: dist.ProcessGroup
    tensor: dist.ProcessGroup
    replica: dist.ProcessGroup
    weights: DeviceMesh

    @property
    def data_size(self) -> int:
        return self.sharding.get_axis_size(DATA)

    @property
    def context_size(self) -> int:
        return self.sharding.get_axis_size(CONTEXT)

    @property
    def tensor_size(self) -> int:
        return self.sharding.get_axis_size(TENSOR)

    @property
    def replica_size(self) -> int:
        return self.context_size * self.tensor_size


def build_topology(device_type: str, *, context: int = 1, tensor: int = 1) -> Topology:
    """Make the groups of all ranks of the initialised process group; every rank calls this together.

    Raises:
        ConfigError: a world size that context x tensor does not divide.
    """
    sharding = policy_sharding(dist.get_world_size(), context=context, tensor=tensor)
    data = sharding.get_axis_size(DATA)
    axes = init_device_mesh(device_type, (data, context, tensor), mesh_dim_names=(DATA, CONTEXT, TENSOR))
    replicas = init_device_mesh(device_type, (data, context * tensor), mesh_dim_names=(DATA, "replica"))
    weights: Any = init_device_mesh(device_type, (data * context, tensor), mesh_dim_names=("weights", TENSOR))
    return Topology(
        sharding,
        axes.get_group(DATA),
        axes.get_group(CONTEXT),
        axes.get_group(TENSOR),
        replicas.get_group("replica"),
        weights,
    )

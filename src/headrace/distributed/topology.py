"""Where a rank stands: data, context and tensor axes, their process groups, and the mesh that weights lie on."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from headrace.errors import ConfigError

DATA, CONTEXT, TENSOR, EXPERT = "data_parallel", "context_parallel", "tensor_parallel", "expert_parallel"


class RankLayout(NamedTuple):
    """How many ranks each axis has; rank r is place r of (data, context, tensor), so tensor ranks are neighbours."""

    data: int
    context: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        return self.data * self.replica_size

    @property
    def replica_size(self) -> int:
        return self.context * self.tensor

    @property
    def replicas(self) -> list[list[int]]:
        """The ranks of each replica, in order along the data axis; the first of each is its leader."""
        return [[*range(r, r + self.replica_size)] for r in range(0, self.size, self.replica_size)]


def lay_out_ranks(workers: int, *, context: int = 1, tensor: int = 1) -> RankLayout:
    """Lay ranks 0 to `workers` - 1 out.

    >>> lay_out_ranks(4, tensor=2).replicas
    [[0, 1], [2, 3]]
    """
    data, rest = divmod(workers, context * tensor)
    if rest or not data:
        raise ConfigError(
            f"{workers} workers do not make whole replicas of policy.parallel.context={context} x "
            f"policy.parallel.tensor={tensor}; make policy.workers a multiple of {context * tensor}"
        )
    return RankLayout(data, context, tensor)


@dataclass(frozen=True)
class Topology:
    """This rank's groups; `replica` spans context x tensor.

    `weights` is a mesh (weights, tensor): weights are split over all data and context ranks, and what tensor
    parallelism splits over the tensor ranks too. `experts` is a mesh (weights, expert) of the same ranks, where data
    and context ranks share experts: those of one expert group are neighbours.
    """

    layout: RankLayout
    data: dist.ProcessGroup
    context: dist.ProcessGroup
    tensor: dist.ProcessGroup
    replica: dist.ProcessGroup
    weights: DeviceMesh
    experts: DeviceMesh | None = None


def build_topology(device_type: str, *, context: int = 1, tensor: int = 1, expert: int = 1) -> Topology:
    """Make the groups of all ranks of the initialised process group; every rank calls this together.

    `expert` ranks, which divide data x context, share experts; it is 1 with tensor ranks.
    """
    layout = lay_out_ranks(dist.get_world_size(), context=context, tensor=tensor)
    data = layout.data
    axes = init_device_mesh(device_type, (data, context, tensor), mesh_dim_names=(DATA, CONTEXT, TENSOR))
    replicas = init_device_mesh(device_type, (data, context * tensor), mesh_dim_names=(DATA, "replica"))
    weights: Any = init_device_mesh(device_type, (data * context, tensor), mesh_dim_names=("weights", TENSOR))
    experts = None
    if expert > 1:
        shape = (data * context // expert, expert)
        experts = init_device_mesh(device_type, shape, mesh_dim_names=("weights", EXPERT))
    own = [axes.get_group(name) for name in (DATA, CONTEXT, TENSOR)]
    return Topology(layout, own[0], own[1], own[2], replicas.get_group("replica"), weights, experts)

"""Experts shared out over data and context ranks: which a model has, and how a rank holds its part.

It works for stacks of experts that run through transformers' experts interface, in any family: a rank holds consecutive
experts, whole, and `experts` sends every token where its experts are.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard, distribute_tensor

from headrace.errors import ConfigError
from headrace.models.automodel.experts import DISPATCH_GROUP, GROUPED_EXPERTS

_KEY = "policy.parallel.expert"


def share_experts(model: Any, mesh: DeviceMesh) -> list[nn.Module]:
    """Share the experts of a skeleton out over the ranks of a one-axis `mesh`, and return their modules.

    Raises:
        ConfigError: a model without experts, with some that cannot be shared out, or with a number of them that the
            ranks do not divide.
    """
    ranks, kind = mesh.size(), model.config.get_text_config().model_type
    # The experts interface of transformers says this of a stack of weights.
    found = {name: m for name, m in model.named_modules() if hasattr(m, "is_transposed")}
    others = [
        name
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "experts" and name not in found
    ]
    if not found or others:
        what = f"{others[0]} does not" if others else "it has no experts that"
        raise ConfigError(
            f"{_KEY}={ranks}: not for model_type={kind}: {what} run through transformers' experts interface; "
            f"set {_KEY}=1"
        )
    check_grouped(model, f"{_KEY}={ranks}")
    for name, module in found.items():
        count = module.num_experts
        if any(weight.shape[0] != count or "." in own for own, weight in module.named_parameters()):
            raise ConfigError(
                f"{_KEY}={ranks}: not for model_type={kind}: {name} has weights that its experts share; set {_KEY}=1"
            )
        if count % ranks:
            raise ConfigError(
                f"{_KEY}={ranks} does not divide the {count} experts of {name}; choose a divisor"
            )
        hold_experts(module, mesh)
        setattr(module, DISPATCH_GROUP, mesh.get_group())
    return list(found.values())


def check_grouped(model: Any, key: str) -> None:
    """Check that the model's experts run as grouped products."""
    implementation = model.config._experts_implementation
    if implementation != GROUPED_EXPERTS:
        raise ConfigError(
            f"{key}: policy.model.experts_implementation={implementation} cannot share them out; use grouped_mm"
        )


def hold_experts(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Keep this rank's part of the experts of a module."""
    for name, weight in list(experts.named_parameters(recurse=False)):
        part = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None)
        experts.register_parameter(name, nn.Parameter(part, requires_grad=weight.requires_grad))


def prefetch_experts(layers: Sequence[nn.Module]) -> None:
    """Have sharded layers gather what runs next early: the host waits for split sizes in the middle of each."""
    for layer, following in pairwise([*layers, None]):
        own = [m for m in cast(nn.Module, layer).modules() if hasattr(m, DISPATCH_GROUP)]
        wanted = [m for m in (*own, following) if m is not None]
        cast(FSDPModule, layer).set_modules_to_forward_prefetch(cast(list[FSDPModule], wanted))

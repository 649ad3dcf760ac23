"""A model whose weights, gradients and optimizer state are split over ranks.

Tensor-parallel matrices are split over tensor ranks first; then every weight is split by rows over all data and
context ranks (FSDP2), those of an expert over the ranks that hold it. Layers compute in the policy's precision;
embeddings, the output head, all reductions and the weights themselves are float32. Gradients are summed, never
averaged: losses are shares of the global batch.

Weights and gradients of a small model stay whole from a step's first microbatch to its last, and its layers are
gathered in few groups: what FSDP2 does around each layer takes the host longer than such a layer's kernels take the
GPU. Of any other model the weights outside of layers stay whole.

Source: PyTorch FSDP2, torch.distributed.fsdp.fully_shard.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.modeling_layers import GradientCheckpointingLayer

from headrace.config import PolicyConfig
from headrace.distributed.topology import EXPERT, TENSOR, Topology
from headrace.errors import ConfigError
from headrace.models.automodel.expert_parallel import prefetch_experts, share_experts
from headrace.models.automodel.setup import COMPUTE_DTYPES
from headrace.models.automodel.tensor_parallel import split_matrices

_FEW = 4
"""Groups of a small model's layers: so many that the first gathering and the last reduction overlap the rest."""


def for_norm(gradient: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the 2-norm of `gradient`: on a CPU its rows' norms, float32; else `gradient` itself.

    Over a whole tensor torch adds squares in few float32 sums on a CPU: of 50 million elements they are 0.4 % short.
    """
    return torch.linalg.vector_norm(gradient, dim=-1, dtype=torch.float32) if gradient.is_cpu else gradient


class ShardedModel:
    """A model that `fully_shard` has split, with what has to be done on all ranks together.

    Every method but `run` is a collective unless it says otherwise: all ranks call it, in the same order. `is_small`:
    its whole weights fit beside everything else (`policy.parallel.gathered_gib`).
    """

    def __init__(
        self, model: Any, topology: Topology, partial: set[str], device: torch.device, *, is_small: bool
    ) -> None:
        self.model = model
        self.topology = topology
        self._partial = partial
        self._device = device
        self._is_small = is_small
        model.run_inside = MethodType(lambda _model, call: call(), model)
        register_fsdp_forward_method(model, "run_inside")

    def run(self, call: Callable[[], Any]) -> Any:
        """Return what `call`, which uses the model and its head, returns: tensors that the caller may use.

        In a context of `gathered`, whose end splits again what is whole by then.
        """
        return self.model.run_inside(call)

    def reduce_next(self, now: bool) -> None:
        """Say whether the next backward also adds gradients up over ranks; of a larger model each does. No collective.

        Until then a rank keeps those of its own rows whole, in float32.
        """
        if self._is_small:
            self.model.set_requires_gradient_sync(now)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Return a context in which weights, once gathered, stay whole: all of a small model; no collective.

        Of a larger one those outside of layers, which every microbatch needs from its start to nearly its end. Nothing
        but forwards and backwards may happen in it: weights do not change there.
        """
        if self._is_small:
            self.model.set_reshard_after_forward(False)
        self.model.set_reshard_after_backward(False, recurse=self._is_small)
        try:
            yield
        finally:
            self.model.set_reshard_after_backward(True)
            # A forward that failed is under way still, and frees nothing without this.
            self.model.set_reshard_after_forward(True)
            self.reduce_next(True)
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
                    _drop_unreduced(module)
            # The root holds what the head needs after the model's own forward.
            self.model.set_reshard_after_forward(False, recurse=False)

    # Gradients.

    def sum_replicated_gradients(self) -> None:
        """Make the gradients of weights that tensor ranks hold alike whole, and bit for bit the same."""
        if self.topology.layout.tensor == 1:
            return
        group = self.topology.tensor
        for name, weight in self.model.named_parameters():
            if weight.grad is None or _tensor_dim(weight) is not None:
                continue
            local = weight.grad.to_local()
            total = local.to(self._device)
            dist.all_reduce(total, group=group)
            # A whole gradient on every rank is averaged, so that rounding cannot drive the ranks apart.
            local.copy_(total if name in self._partial else total / self.topology.layout.tensor)

    def gradient_norm(self, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the 2-norm of the whole gradient, and the sum of all ranks' `loss`; 0-D float32, on the device.

        In the sum, ranks that hold the same rows count each; it says whether any rank's loss is not finite.
        """
        whole: list[torch.Tensor] = []
        shared: list[torch.Tensor] = []
        for weight in self.model.parameters():
            if weight.grad is not None:
                norm = torch.linalg.vector_norm(for_norm(weight.grad.to_local()), dtype=torch.float32)
                (shared if _tensor_dim(weight) is None else whole).append(norm.to(self._device))
        squares = torch.zeros((), device=self._device)
        for norms, holders in ((whole, 1), (shared, self.topology.layout.tensor)):
            if norms:
                squares = squares + torch.stack(norms).square().sum() / holders
        sums = torch.stack([squares, loss.to(squares)])
        dist.all_reduce(sums)
        return sums[0].sqrt(), sums[1]

    def scale_gradients(self, factor: torch.Tensor) -> None:
        """Multiply every gradient by a 0-D `factor`; no collective."""
        for weight in self.model.parameters():
            if weight.grad is not None:
                local = weight.grad.to_local()
                local.mul_(factor.to(local.device))

    # Weights.

    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every weight and persistent buffer once, whole, on the device, by its name; one is whole at a time."""
        for name, tensor in named_tensors(self.model):
            yield name, whole_tensor(tensor.detach(), self._device)

    def check_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Hold whole weights, given under their names, to the model's; no collective."""
        for name, target in named_tensors(self.model):
            given = weights.get(name)
            if given is None or given.shape != target.shape:
                raise ConfigError(
                    f"{name}: expected {tuple(target.shape)}, got {None if given is None else tuple(given.shape)}; "
                    "the weights must be of the recipe's policy.model"
                )

    @torch.no_grad()
    def take_full_weights(self, weights: Mapping[str, torch.Tensor] | None) -> None:
        """Give every rank its part of whole weights, which rank 0 holds under their names (None elsewhere).

        One weight after the other is whole on the ranks' devices.
        """
        for name, target in named_tensors(self.model):
            whole = torch.empty(target.shape, dtype=target.dtype, device=self._device)
            if weights is not None:
                whole.copy_(weights[name])
            # As bytes: not every backend has every dtype.
            dist.broadcast(whole.view(-1).view(torch.uint8), src=0)
            local_part(target).copy_(own_part(whole, target) if isinstance(target, DTensor) else whole)

    @torch.no_grad()
    def copy_weights_of(self, other: "ShardedModel") -> None:
        """Take over the weights of a model that is split alike; no collective."""
        theirs = other.model.state_dict(keep_vars=True)
        for name, target in self.model.state_dict(keep_vars=True).items():
            local_part(target).copy_(local_part(theirs[name]))


def _drop_unreduced(module: FSDPModule) -> None:
    """Drop gradients that no backward has added up over ranks, because a later microbatch failed.

    torch has no call for it: the next step would add them to its own.
    """
    group = module._get_fsdp_state()._fsdp_param_group
    for weight in group.fsdp_params if group is not None else ():
        weight.unsharded_accumulated_grad = None
        if hasattr(weight, "_unsharded_param"):
            weight._unsharded_param.grad = None


def named_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a model's parameters and persistent buffers as they are, tied ones once."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def shard_model(model: Any, topology: Topology, cfg: PolicyConfig, device: torch.device) -> ShardedModel:
    """Split a skeleton over all ranks; its weights are then on `device`, or the CPU, and have no values yet."""
    partial: set[str] = set()
    if topology.layout.tensor > 1:
        mesh = topology.weights[TENSOR]
        partial = split_matrices(model, mesh, sequence_parallel=cfg.parallel.sequence_parallel)
    offload = device.type == "cuda" and cfg.parallel.cpu_offload
    options: dict[str, Any] = {
        "mesh": topology.weights["weights"],
        "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
    }
    # Inputs stay as they are: the residual stream is float32, as without sharding.
    dtypes: dict[str, Any] = {"reduce_dtype": torch.float32, "cast_forward_inputs": False}
    compute = MixedPrecisionPolicy(param_dtype=COMPUTE_DTYPES[cfg.precision], **dtypes)
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    is_small = cfg.parallel.keeps_gathered(_whole_bytes(model, COMPUTE_DTYPES[cfg.precision]))
    if topology.experts is not None:
        for experts in share_experts(model, topology.experts[EXPERT]):
            fully_shard(experts, mp_policy=compute, **{**options, "mesh": topology.experts["weights"]})
    # Experts are gathered in between, in each layer by itself.
    for group in _groups(model, few=is_small and topology.experts is None):
        fully_shard(group, mp_policy=compute, **options)
    outside = MixedPrecisionPolicy(param_dtype=torch.float32, **dtypes)
    fully_shard(model, mp_policy=outside, reshard_after_forward=False, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    if topology.experts is not None:
        prefetch_experts(layers)
    # As `Module.to_empty` does; buffers, which have values already, stay.
    target = torch.device("cpu") if offload else device
    model._apply(lambda tensor: torch.empty_like(tensor, device=target) if tensor.is_meta else tensor)
    return ShardedModel(model, topology, partial, device, is_small=is_small)


def _whole_bytes(model: Any, compute: torch.dtype) -> int:
    """Return the bytes of the weights that this rank computes with, when they are whole."""
    return sum(local_part(weight).numel() for weight in model.parameters()) * compute.itemsize


def _groups(model: Any, *, few: bool) -> Iterator[list[nn.Module]]:
    """Yield the layers that are gathered together: each by itself, or in `few` groups of neighbours."""
    for stack in model.modules():
        layers = [child for child in stack.children() if isinstance(child, GradientCheckpointingLayer)]
        size = math.ceil(len(layers) / _FEW) if few else 1
        yield from (layers[start : start + size] for start in range(0, len(layers), max(size, 1)))


def whole_tensor(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the whole of what the ranks hold parts of, on `device`; a plain tensor as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    moved = tensor.to(device)
    assert isinstance(moved, DTensor)
    if moved.device_mesh.ndim == 2:
        # Rows first: torch warns of two gathers at once.
        moved = moved.redistribute(placements=[Replicate(), moved.placements[1]])
    return moved.full_tensor()


def own_part(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Return the part of `whole` that this rank holds of `like`."""
    mesh, split = like.device_mesh, _tensor_dim(like)
    if split is not None:
        whole = whole.chunk(mesh.size(1), dim=split)[mesh.get_local_rank(1)]
    size = math.ceil(whole.shape[0] / mesh.size(0))
    start = mesh.get_local_rank(0) * size
    return whole[start : start + size]


@torch.no_grad()
def part_like(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Return `whole` split as `like` is; a tensor of another shape (a step count) as it is."""
    if whole.shape != like.shape:
        return whole
    part = torch.zeros_like(like)
    local_part(part).copy_(own_part(whole, like))
    return part


def _tensor_dim(tensor: torch.Tensor) -> int | None:
    """Return the dim that tensor ranks, or ranks that share experts, split, if they do."""
    if not isinstance(tensor, DTensor) or tensor.device_mesh.ndim == 1:
        return None
    placement = tensor.placements[1]
    return cast(Shard, placement).dim if placement.is_shard() else None


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

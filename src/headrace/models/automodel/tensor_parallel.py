"""Tensor parallelism: which matrices of a model are split over tensor ranks, and how.

Attention and dense MLPs are split by torch's ColwiseParallel and RowwiseParallel; experts are shared out whole.
Everything else is held alike by all ranks: of these weights some get their whole gradient on every rank, and
some (`partial`) only the part of this rank's heads or tokens.

Source: Shoeybi et al., Megatron-LM (arXiv 1909.08053), section 3; Korthikanti et al., Reducing Activation
Recomputation (arXiv 2205.05198), section 4.2.2, for sequence parallelism.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from headrace.errors import ConfigError
from headrace.models.automodel.exchange import gather_tokens, scatter_tokens
from headrace.models.automodel.expert_parallel import check_grouped, hold_experts
from headrace.models.automodel.experts import EXPERT_GROUP

FAMILIES = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma",
    "gemma2",
    "gemma3_text",
)
_PARTIAL = "replicated_with_grad_allreduce"
_EXPERTS = "moe_tp_experts"
# Where a norm over all heads stands between projections and attention, every rank attends with all heads.
_GATHER, _SPLIT = "colwise_gather_output", "rowwise_split_input"
_KNOWN = ("colwise", "rowwise", _GATHER, _SPLIT, _PARTIAL, _EXPERTS)
# Every rank holds the embedding whole, so that it can be tied to the output head.
_WHOLE = "embedding_rowwise"
FAMILY_PLAN = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.q_norm": _PARTIAL,
    "layers.*.self_attn.k_norm": _PARTIAL,
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
    "layers.*.mlp.experts": _EXPERTS,
}


def split_matrices(model: Any, mesh: DeviceMesh, *, sequence_parallel: bool) -> set[str]:
    """Split a model over the one-axis `mesh`; return the names of the weights with partial gradients.

    The model's forward then takes and gives what it did before, but that with `sequence_parallel` the last
    hidden states are this rank's part of the tokens.
    """
    plan = resolve_plan(model, sequence_parallel=sequence_parallel)
    check_sizes(model, plan, mesh.size())
    inner: Any = Shard(1) if sequence_parallel else Replicate()
    styles: dict[str, ParallelStyle] = {
        # A family's blocks hand their input over once for all of their projections.
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(output_layouts=inner),
        _GATHER: ColwiseParallel(output_layouts=Replicate()),
        _SPLIT: RowwiseParallel(input_layouts=Replicate()),
    }
    for name, style in plan.items():
        module = model.base_model.get_submodule(name)
        if style in styles:
            # Every rank holds the same weights already, so that nothing is sent.
            parallelize_module(module, mesh, styles[style], src_data_rank=None)
        elif style == _EXPERTS:
            hold_experts(module, mesh)
            setattr(module, EXPERT_GROUP, mesh.get_group())
    if is_family(model):
        _hook_blocks(model, mesh, inner)
    if not sequence_parallel:
        _divide_embedding_gradient(model, mesh)
    return _partial_names(model, plan, sequence_parallel=sequence_parallel)


def resolve_plan(model: Any, *, sequence_parallel: bool = False) -> dict[str, str]:
    """Return the style of every module (by its name in the base model) that takes part.

    Raises:
        ConfigError: no plan for this model, or one with a style that is not supported.
    """
    config = model.config.get_text_config()
    if sequence_parallel and not is_family(model):
        raise ConfigError(
            f"policy.parallel.sequence_parallel: not for model_type={config.model_type}; it is for "
            f"{', '.join(FAMILIES)}; switch it off"
        )
    patterns = FAMILY_PLAN if is_family(model) else _transformers_plan(config)
    if not patterns:
        raise ConfigError(
            f"policy.parallel.tensor: transformers has no tensor-parallel plan for model_type={config.model_type}; "
            "set policy.parallel.tensor=1"
        )
    compiled = [
        (re.compile(p.replace(".", r"\.").replace("*", r"\d+")), style) for p, style in patterns.items()
    ]
    plan = {
        name: style
        for name, _ in model.base_model.named_modules()
        for pattern, style in compiled
        if pattern.fullmatch(name)
    }
    for name, style in plan.items():
        if style not in _KNOWN:
            raise ConfigError(
                f"policy.parallel.tensor: {name} of model_type={config.model_type} is planned as '{style}', which "
                f"is not supported (supported: {', '.join(_KNOWN)}); set policy.parallel.tensor=1"
            )
    return plan


def _transformers_plan(config: Any) -> dict[str, str]:
    """Return transformers' tensor-parallel plan, and the experts that only its expert-parallel plan names."""
    matrices, experts = config.base_model_tp_plan or {}, config.base_model_ep_plan or {}
    plan = {pattern: style for pattern, style in matrices.items() if style != _WHOLE}
    return plan | {pattern: _EXPERTS for pattern in experts if pattern.endswith(".experts")}


def check_sizes(model: Any, plan: dict[str, str], ranks: int) -> None:
    """Check that the ranks divide heads, intermediate sizes and experts."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
    }
    for name, style in plan.items():
        module = model.base_model.get_submodule(name)
        if style == _EXPERTS:
            sizes["the number of experts"] = module.num_experts
            check_grouped(model, "policy.parallel.tensor with experts")
        elif isinstance(module, nn.Linear):
            column = style in ("colwise", _GATHER)
            sizes[f"{name}.{'out' if column else 'in'}_features"] = (
                module.out_features if column else module.in_features
            )
    for name, size in sizes.items():
        if size % ranks:
            raise ConfigError(
                f"policy.parallel.tensor={ranks} does not divide {name}={size} of this model; choose a divisor"
            )


def is_family(model: Any) -> bool:
    """Return whether the model is of a family whose plan stands here; others take transformers' own."""
    return model.config.get_text_config().model_type in FAMILIES


# Blocks: what a layer hands to attention and MLP, and what it gets back.


def _hook_blocks(model: Any, mesh: DeviceMesh, outer: Any) -> None:
    group = mesh.get_group()
    split = isinstance(outer, Shard)
    for layer in model.base_model.layers:
        _share_input(layer.self_attn, mesh, outer)
        if not hasattr(layer.mlp, "experts"):
            _share_input(layer.mlp, mesh, outer)
        elif split:
            # A router wants all tokens, so that its gradient is whole on every rank.
            _map_input(layer.mlp, lambda x: gather_tokens(x, group))
            layer.mlp.register_forward_hook(lambda _module, _args, out: scatter_tokens(out, group))
    if split:
        # Rotary embeddings and masks are made before this, from all tokens.
        _map_input(model.base_model.layers[0], lambda x: _own_part(x, group))


def _share_input(block: nn.Module, mesh: DeviceMesh, outer: Any) -> None:
    """Have a block's projections read one input, whose gradient is summed over ranks once."""

    def share(x: torch.Tensor) -> torch.Tensor:
        given = DTensor.from_local(x, mesh, [outer], run_check=False)
        return given.redistribute(placements=[Replicate()])

    _map_input(block, share)


def _map_input(module: nn.Module, change: Any) -> None:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _own_part(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    # Plain slicing: the embedding's gradient is then that of this rank's tokens alone.
    return x.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)].contiguous()


def _divide_embedding_gradient(model: Any, mesh: DeviceMesh) -> None:
    """Make the embedding's gradient a part on every rank, as that of the output head, which may be tied to it."""
    share = 1.0 / mesh.size()

    def hook(_module: nn.Module, _args: Any, out: torch.Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda gradient: gradient * share)  # type: ignore[no-untyped-call]

    model.get_input_embeddings().register_forward_hook(hook)


# Weights that all ranks hold alike.


def _partial_names(model: Any, plan: dict[str, str], *, sequence_parallel: bool) -> set[str]:
    partial = set(_names(model, model.get_input_embeddings(), model.get_output_embeddings()))
    marked = [model.base_model.get_submodule(name) for name, style in plan.items() if style == _PARTIAL]
    partial.update(_names(model, *marked))
    if sequence_parallel:
        routed = [layer.mlp for layer in model.base_model.layers if hasattr(layer.mlp, "experts")]
        whole = set(_names(model, *routed))
        partial.update(name for name, _ in model.named_parameters() if name not in whole)
    return partial


def _names(model: nn.Module, *modules: nn.Module) -> Iterator[str]:
    inside = {id(weight) for module in modules for weight in module.parameters()}
    return (name for name, weight in model.named_parameters() if id(weight) in inside)

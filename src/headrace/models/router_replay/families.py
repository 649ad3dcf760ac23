"""Which modules of a transformers model are routers, and which mixtures of experts cannot be replayed.

A router is a module whose own code calls `topk` and that knows k and the number of experts. It chooses with one top-k
over the experts; other top-k calls in it (over groups of experts, say) have another k or width. The modules of this
kind inside the decoder's layers, in the order of the layers, are the model's router slots.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from inspect import isfunction, unwrap
from typing import Any, cast

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from headrace.errors import ReplayError
from headrace.models.router_replay.handle import LayerMap, RouterReplay, RouterSpec

# Widest first: a router may choose among more classes than there are experts with weights (skip or zero experts).
_WIDTH_NAMES = ("num_router_classes", "n_routed_experts", "num_experts", "num_local_experts")
_K_NAMES = ("top_k", "top_k_experts", "num_experts_per_tok")

# Routers whose choice is a function of the token alone: index of the ids in what their forward returns.
_FIXED = {"DeepseekV4HashRouter": 2}

_LOOPED = "it runs several times in one forward, and each of its tokens has one row of routes"

_REFUSED = {
    "DbrxFFN": "it chooses in the block around the router",
    "DiffusionGemmaTextRouter": "a block of tokens is routed anew in every denoising step",
    "DogeCDMoE": "it chooses product keys in two top-k steps, and mixes the scores of different tokens",
    "Ernie4_5_VLMoeMoeBlock": "its routers see the tokens of one modality each, not all tokens in order",
    "Inkling2LoopFullLoopDecoderLayer": _LOOPED,
    "Inkling2LoopSlidingLoopDecoderLayer": _LOOPED,
    "NllbMoeTop2Router": "it samples the second expert and drops tokens beyond an expert's capacity",
    "PhimoeTopKRouter": "its sparse mixer takes one maximum after another, with a gradient of its own",
    "SwitchTransformersTop1Router": "it drops tokens beyond an expert's capacity",
}

_OUTSIDE = "it is not inside a decoder layer, so routes cannot reach it"
_NO_TOPK = "it has experts, but no router that chooses with one topk call"


def find_routers(decoder: torch.nn.Module, prefix: str) -> RouterReplay:
    """Return the router slots of `decoder`, whose path in the model is `prefix`."""
    modules = dict(_modules(decoder, prefix))
    layers = [name for name, m in modules.items() if isinstance(m, GradientCheckpointingLayer)]
    layers = [name for name in layers if not any(name.startswith(f"{other}.") for other in layers)]
    routers = tuple(
        _spec(name, module, sizes, layers)
        for name, module in modules.items()
        if (sizes := _router_sizes(name, module)) is not None
    )
    with_router = {r.layer_name for r in routers}
    for name, module in modules.items():
        has_experts = isinstance(getattr(module, "experts", None), torch.nn.Module)
        if has_experts and not any(f"{name}.".startswith(f"{layer}.") for layer in with_router):
            raise _refusal(name, module, _NO_TOPK)
    _refuse_none_and_mixed(decoder, routers, len(layers))
    return RouterReplay(routers, LayerMap(len(layers), tuple(r.layer for r in routers)))


def _refuse_none_and_mixed(decoder: torch.nn.Module, routers: Sequence[RouterSpec], layers: int) -> None:
    name = type(decoder).__name__
    if not routers:
        raise ReplayError(
            f"{name} has no router in its {layers} decoder layers; router replay needs a mixture of experts (for a "
            "dense model, policy.router_replay.enabled=false)"
        )
    if all(r.fixed_output is not None for r in routers):
        raise ReplayError(f"{name}: all {len(routers)} routers are functions of the token id")
    if len({r.top_k for r in routers}) > 1:
        ks = ", ".join(f"{r.name}: {r.top_k}" for r in routers)
        raise ReplayError(
            f"routers that choose different numbers of experts do not fit one (T, L, k) tensor: {ks}"
        )


def _modules(decoder: torch.nn.Module, prefix: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the decoder's modules but those of draft (multi-token prediction) models in it."""
    drafts: list[str] = []
    for name, module in decoder.named_modules(prefix=prefix):
        if any(name.startswith(f"{draft}.") for draft in drafts):
            continue
        if _class_name(module).startswith("Mtp"):
            drafts.append(name)
            continue
        yield name, module


def _router_sizes(name: str, module: torch.nn.Module) -> tuple[int, int] | None:
    """Return (k, number of classes) of a router, None for any other module."""
    kind = _class_name(module)
    if kind in _REFUSED:
        raise _refusal(name, module, _REFUSED[kind])
    if kind not in _FIXED and not _calls_topk(cast(Any, type(module))):
        return None
    sources = [module, module.config] if "Router" in kind and hasattr(module, "config") else [module]
    top_k, width = _first(sources, _K_NAMES), _first(sources, _WIDTH_NAMES)
    return None if top_k is None or width is None else (top_k, width)


def _first(sources: list[Any], names: tuple[str, ...]) -> int | None:
    values = (getattr(source, name, None) for source in sources for name in names)
    return next((value for value in values if isinstance(value, int)), None)


def _spec(name: str, module: torch.nn.Module, sizes: tuple[int, int], layers: list[str]) -> RouterSpec:
    around = next((layer for layer in layers if name.startswith(f"{layer}.")), None)
    if around is None:
        raise _refusal(name, module, _OUTSIDE)
    top_k, width = sizes
    grouped = getattr(module, "num_group", None) is not None
    return RouterSpec(
        name, around, layers.index(around), width, top_k, grouped, _FIXED.get(_class_name(module))
    )


def _refusal(name: str, module: torch.nn.Module, reason: str) -> ReplayError:
    return ReplayError(
        f"{name} ({_class_name(module)}) cannot be replayed: {reason}; docs/router_replay.md lists the model families "
        "that can"
    )


def _class_name(module: torch.nn.Module) -> str:
    return type(module).__name__.removeprefix("FSDP")


@lru_cache(maxsize=256)
def _calls_topk(kind: Any) -> bool:
    own = (c for c in kind.__mro__ if not c.__module__.startswith("torch."))
    functions = (unwrap(f) for c in own for f in vars(c).values() if isfunction(f))
    return any("topk" in f.__code__.co_names for f in functions if isfunction(f))

"""Router replay on Megatron-Core by functions, over the replay objects of `headrace.models.megatron.router_replay`.

A step is `set_router_replay_forward(model, routes)`, the forward, `set_router_replay_backward(model)`, the backward,
and `clear_router_replay(model)`. `model` is a module or a list of (virtual) pipeline chunks. Without megatron-core,
what reads a recipe works, and the others raise ImportError.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from headrace.data_plane.routes_codec import check_routes, signed_routes
from headrace.errors import ConfigError, SchemaError

if TYPE_CHECKING:
    from headrace.models.megatron.router_replay import GapReplay

_ROUTER_REPLAY_VALIDATE_ENV = "NRL_ROUTER_REPLAY_VALIDATE"
_MISSING_ROUTE_SENTINEL = -1
_MISSING_ROUTE_FALLBACK_PATCH_ATTR = "_nrl_missing_route_fallback_patch"
"""Missing rows are routed natively by the replay objects themselves: nothing is patched, and nothing has this mark."""

Model = torch.nn.Module | Sequence[torch.nn.Module]

# A recipe.


def router_replay_enabled(config: Mapping[str, Any]) -> bool:
    return bool((config.get("router_replay") or {}).get("enabled", False))


def configure_vllm_for_router_replay(config: MutableMapping[str, Any]) -> None:
    """Have vLLM return the experts that it chose, in place, where replay is on and vLLM generates."""
    generation = config.get("generation") or {}
    if router_replay_enabled(config) and generation.get("backend") == "vllm":
        if generation.get("vllm_kwargs") is None:
            generation["vllm_kwargs"] = {}
        generation["vllm_kwargs"]["enable_return_routed_experts"] = True


def validate_router_replay_config(config: Mapping[str, Any]) -> None:
    """Refuse replay without an engine that records routes, or without Megatron.

    Raises:
        ConfigError: which key to change.
    """
    if not router_replay_enabled(config):
        return
    backend = (config.get("generation") or {}).get("backend")
    if backend != "vllm":
        raise ConfigError(
            f"router_replay.enabled=true with generation.backend={backend}; routes are recorded by vllm alone: set "
            "generation.backend=vllm, or router_replay.enabled=false"
        )
    if not (config.get("megatron_cfg") or {}).get("enabled", False):
        raise ConfigError(
            "router_replay.enabled=true without megatron_cfg.enabled=true; headrace's own workers replay by "
            "policy.router_replay.enabled"
        )


# A model.


def build_router_replay_tensors(model: Model, routed_experts: torch.Tensor) -> list[torch.Tensor]:
    """Return (tokens of this rank, k) int64 for each router of this rank; missing rows are -1."""
    return [target for _, target in build_router_replay_assignments(model, routed_experts)]


def build_router_replay_assignments(
    model: Model, routed_experts: torch.Tensor
) -> "list[tuple[GapReplay, torch.Tensor]]":
    """Return the replay object of each router of this rank, in the order of its modules, with its rows.

    Args:
        routed_experts: (B, S, L, k), or (tokens, L, k) in Megatron's order; L counts the model's MoE layers, or all its
            layers. With `config.sequence_parallel`, rows of all tensor ranks, of which this rank's are taken.

    Raises:
        SchemaError: another number of layers, MoE layers here whose routers have no replay object, or, with the
            environment variable `NRL_ROUTER_REPLAY_VALIDATE=1`, routes that no router can have chosen.
    """
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    config: Any = next(module.config for module in _modules(chunks) if hasattr(module, "config"))
    moe = _core().moe_layers(config)
    routers, local = _local_layers(chunks)
    if lacking := sorted((local & set(moe)) - {layer for layer, _ in routers}):
        raise SchemaError(
            f"local MoE layers {[layer + 1 for layer in lacking]} have no replay object; build the model with "
            "moe_enable_routing_replay=True"
        )
    if not routers:
        return []
    rows = _rows_of_rank(routed_experts, config)
    slots = _slots(rows.shape[1], moe, config.num_layers)
    if os.environ.get(_ROUTER_REPLAY_VALIDATE_ENV) == "1":
        kept = rows[:, [slots[layer] for layer in moe]]
        check_routes(kept, num_experts=config.num_moe_experts, num_layers=len(moe), top_k=rows.shape[-1])
    return [(replay, signed_routes(rows[:, slots[layer]]).contiguous()) for layer, replay in routers]


def set_router_replay_forward(model: Model, routed_experts: torch.Tensor) -> None:
    """Have the next forward of the model's routers replay these routes; arguments and errors as above."""
    core = _core()
    for replay, target in build_router_replay_assignments(model, routed_experts):
        replay.__class__ = core.GapReplay
        replay.start(target, keeps=True)
        replay.set_router_replay_action(core.RouterReplayAction.REPLAY_FORWARD)


def set_router_replay_backward(model: Model) -> None:
    """Have recomputes of the model's layers, in the backward pass, replay what their forwards did."""
    action = _core().RouterReplayAction.REPLAY_BACKWARD
    for _, replay in _local_layers([model] if isinstance(model, torch.nn.Module) else model)[0]:
        replay.set_router_replay_action(action)


def clear_router_replay(model: Model | None = None) -> None:
    """Let the routers choose for themselves, and drop the routes that they hold; of all models, if none is given."""
    if model is None:
        replays = list(_core().RouterReplay.global_router_replay_instances)
    else:
        chunks = [model] if isinstance(model, torch.nn.Module) else model
        replays = [replay for _, replay in _local_layers(chunks)[0]]
    for replay in replays:
        replay.clear_indices()
        replay.clear_router_replay_action()


def clear_global_router_replay_instances() -> None:
    """Have Megatron forget the replay objects that it lists, so that models which are gone are freed."""
    _core().RouterReplay.clear_global_router_replay_instances()


def _core() -> Any:
    from headrace.models.megatron import router_replay  # noqa: PLC0415

    return router_replay


def _modules(chunks: Iterable[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    """Yield the modules of the chunks but those of multi-token prediction, whose routers are not replayed."""
    drafts = _core().MultiTokenPredictionLayer
    for chunk in chunks:
        drafting = {m for layer in chunk.modules() if isinstance(layer, drafts) for m in layer.modules()}
        yield from (module for module in chunk.modules() if module not in drafting)


def _local_layers(chunks: Iterable[torch.nn.Module]) -> tuple[list[tuple[int, Any]], set[int]]:
    """Return layer (from 0, over the whole model) and replay object of each router, and all layers of this rank."""
    routers: list[tuple[int, Any]] = []
    layers: set[int] = set()
    kind = _core().RouterReplay
    for module in _modules(chunks):
        number = getattr(module, "layer_number", None)
        if number is None:
            continue
        layers.add(int(number) - 1)
        replay = getattr(module, "router_replay", None)
        if isinstance(replay, kind):
            routers.append((int(number) - 1, replay))
    return routers, layers


def _slots(given: int, moe: Sequence[int], layers: int) -> dict[int, int]:
    """Return where each MoE layer stands on the routes' layer axis."""
    if given == len(moe):
        return {layer: slot for slot, layer in enumerate(moe)}
    if given == layers:
        return {layer: layer for layer in moe}
    raise SchemaError(
        f"routes of {given} layers. Expected exactly {len(moe)} layers for compressed MoE-layer layout or {layers} "
        "layers for vLLM full-transformer-layer layout"
    )


def _rows_of_rank(routes: torch.Tensor, config: Any) -> torch.Tensor:
    """Return the routes (tokens, layers, k) of this rank, in the order of its router's inputs."""
    if routes.dim() == 4:
        routes = routes.transpose(0, 1).flatten(0, 1)
    if routes.dim() != 3:
        raise SchemaError(
            f"routed_experts have shape {tuple(routes.shape)}; expected (B, S, layers, k) or (tokens, layers, k)"
        )
    ranks = _get_tensor_model_parallel_world_size() if getattr(config, "sequence_parallel", False) else 1
    if len(routes) % ranks:
        raise SchemaError(f"{len(routes)} tokens do not divide among {ranks} tensor ranks; pad the sequences")
    size = len(routes) // ranks
    first = size * _get_tensor_model_parallel_rank() if ranks > 1 else 0
    return routes[first : first + size]


def _parallel_state() -> Any:
    from megatron.core import parallel_state  # noqa: PLC0415

    return parallel_state


def _get_tensor_model_parallel_world_size() -> int:
    return int(_parallel_state().get_tensor_model_parallel_world_size())


def _get_tensor_model_parallel_rank() -> int:
    return int(_parallel_state().get_tensor_model_parallel_rank())

"""Installing router replay on a transformers model."""

from collections.abc import Mapping
from typing import cast

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from headrace.errors import ReplayError
from headrace.models.router_replay.families import find_routers
from headrace.models.router_replay.handle import RouterReplay
from headrace.models.router_replay.modules import (
    RoutedLayer,
    RoutedModel,
    RoutedRouter,
    become,
    refuse_own_forward,
)


def install(model: torch.nn.Module) -> RouterReplay:
    """Let `model` record and replay the choices of its routers: its forward takes `routes`.

    The model may be sharded by FSDP2 or wrapped; every `PreTrainedModel` between it and the decoder layers takes
    `routes` too. Without `routes` a forward is what it was. All state belongs to the model: a copy has its own, and a
    second install returns the handle of the first.

    >>> replay = install(model)
    >>> routes = Routes.record()
    >>> model(input_ids=ids, routes=routes)
    >>> model(input_ids=ids, routes=Routes.replay(routes.ids))

    Raises:
        ReplayError: not a transformers model, a dense one, or one with a router that cannot be replayed (the message
            names its class and the reason).
    """
    models = {name: m for name, m in model.named_modules() if isinstance(m, PreTrainedModel)}
    if not models:
        raise ReplayError(f"router replay expects a transformers PreTrainedModel; got {type(model).__name__}")
    installed = (m._replay_handle for m in models.values() if isinstance(m, RoutedModel))
    handle = next(installed, None) or _install_layers(model, models)
    for part in _around(models, handle.routers[0].layer_name):
        become(part, RoutedModel)
        cast(RoutedModel, part)._replay_handle = handle
    return handle


def _around(models: Mapping[str, PreTrainedModel], layer_name: str) -> list[PreTrainedModel]:
    return [m for name, m in models.items() if layer_name.startswith(f"{name}." if name else "")]


def _install_layers(model: torch.nn.Module, models: Mapping[str, PreTrainedModel]) -> RouterReplay:
    decoder = next(iter(models.values())).get_decoder()
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    handle = find_routers(decoder, prefix)
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    routers = [cast(RoutedRouter, model.get_submodule(r.name)) for r in handle.routers]
    refuse_own_forward([*_around(models, handle.routers[0].layer_name), *layers, *routers])
    for layer in layers:
        become(layer, RoutedLayer)
    for router, spec in zip(routers, handle.routers):
        become(router, RoutedRouter)
        router.take_spec(spec)
    for layer_name in dict.fromkeys(r.layer_name for r in handle.routers):
        slots = tuple(i for i, r in enumerate(handle.routers) if r.layer_name == layer_name)
        routed = cast(RoutedLayer, model.get_submodule(layer_name))
        routed._replay_slots, routed._replay_routers = slots, tuple(routers[i] for i in slots)
    return handle

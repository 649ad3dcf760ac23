"""Installing router replay: a `routes` keyword on a model's forward, and rows for its layers and routers.

Instances get a subclass of their own class, of the same name, as FSDP2 does; so copies, hooks, compilation and
sharding before or after installation keep working. The way of the routes: model forward (opens a call) -> keyword
arguments, through transformers' own code -> decoder layer (takes its rows from the call, as tensors) -> layer forward
(binds them for the router it is about to run) -> router forward. The layer's rows are arguments of its forward, so an
activation checkpoint keeps them with the other inputs and the recompute sees the same ones, whatever ran in between.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from inspect import Parameter, signature
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from headrace.errors import ReplayError
from headrace.models.router_replay.families import find_routers
from headrace.models.router_replay.handle import RouterReplay
from headrace.models.router_replay.interception import ChoiceSizes, InterceptTopK, LayerRows, RouterChoice
from headrace.models.router_replay.routes import RoutedCall, Routes


def install(model: torch.nn.Module) -> RouterReplay:
    """Let `model` record and replay the choices of its routers: its forward takes `routes`.

    The model may be sharded by FSDP2 or wrapped; every `PreTrainedModel` between it and the decoder layers takes
    `routes` too. Without `routes` a forward is what it was. All state belongs to the model: a copy has its own, and a
    second install returns the handle of the first.

    >>> replay = install(model)
    >>> routes = Routes.record()
    >>> recorded = model(input_ids=ids, routes=routes)
    >>> replayed = model(input_ids=ids, routes=Routes.replay(routes.ids))

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
        _become(part, RoutedModel)
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
    _refuse_own_forward([*_around(models, handle.routers[0].layer_name), *layers, *routers])
    for layer in layers:
        _become(layer, RoutedLayer)
    for router, spec in zip(routers, handle.routers):
        _become(router, RoutedRouter)
        router._replay_name, router._replay_fixed_output = spec.name, spec.fixed_output
        router._replay_sizes = ChoiceSizes(spec.top_k, spec.num_experts, spec.grouped)
    for layer_name in dict.fromkeys(r.layer_name for r in handle.routers):
        slots = tuple(i for i, r in enumerate(handle.routers) if r.layer_name == layer_name)
        routed = cast(RoutedLayer, model.get_submodule(layer_name))
        routed._replay_slots, routed._replay_routers = slots, tuple(routers[i] for i in slots)
    return handle


class Routed(torch.nn.Module):
    """A module whose class `become` has made, which no other process can look up: a pickle holds its parts."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return what builds this module again; that of a class derived from it later (FSDP2's) is Python's own."""
        parts = vars(type(self)).get("_replay_parts")
        if parts is None:
            return super().__reduce_ex__(protocol)
        return _blank, parts, cast(Any, self).__getstate__()


class RoutedRouter(Routed):
    """A router that takes its choice from the rows bound to it, once per binding."""

    _replay_name: str
    _replay_sizes: ChoiceSizes
    _replay_fixed_output: int | None
    _replay_rows: LayerRows | None = None
    _replay_ran: bool = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the router's own forward, its choice of experts replaced or written down."""
        rows = self._replay_rows
        if rows is None:
            return super().forward(*args, **kwargs)
        if self._replay_ran:
            raise ReplayError(f"router {self._replay_name} ran twice in one forward of its layer")
        self._replay_ran = True
        if self._replay_fixed_output is not None:
            output = super().forward(*args, **kwargs)
            for written in (rows.used, rows.native):
                if written is not None:
                    written.copy_(output[self._replay_fixed_output].reshape(written.shape))
            return output
        choice = RouterChoice(self, rows)
        with InterceptTopK(choice):
            output = super().forward(*args, **kwargs)
        if choice.choices != 1:
            raise ReplayError(
                f"router {self._replay_name} ({type(self).__name__}) chose {choice.choices} times "
                f"{self._replay_sizes.top_k} of {self._replay_sizes.num_experts}; expected once"
            )
        return output


class RoutedLayer(Routed):
    """A decoder layer whose `routes` are a call on the way in, and its routers' rows in its forward."""

    _replay_slots: tuple[int, ...] = ()
    _replay_routers: tuple[RoutedRouter, ...] = ()

    def __call__(self, *args: Any, routes: RoutedCall | None = None, **kwargs: Any) -> Any:
        """Take this layer's rows from the call and run the layer."""
        if routes is None or not self._replay_slots:
            return super().__call__(*args, **kwargs)
        hidden = args[0] if args else kwargs["hidden_states"]
        return super().__call__(*args, routes=routes.rows(self._replay_slots, hidden.device), **kwargs)

    def forward(self, *args: Any, routes: tuple[LayerRows, ...] = (), **kwargs: Any) -> Any:
        """Run the layer's own forward with `routes`, one entry per router, bound to its routers."""
        if not routes:
            return super().forward(*args, **kwargs)
        for router, rows in zip(self._replay_routers, routes):
            router._replay_rows, router._replay_ran = rows, False
        try:
            output = super().forward(*args, **kwargs)
            for router in self._replay_routers:
                if not router._replay_ran:
                    raise ReplayError(
                        f"router {router._replay_name} did not run in the forward of its layer; a fused kernel "
                        "or a wrapper may have taken its place"
                    )
        finally:
            for router in self._replay_routers:
                router._replay_rows = None
        return output


class RoutedModel(Routed):
    """A model whose forward takes `routes`."""

    _replay_handle: RouterReplay

    def forward(self, *args: Any, routes: Routes | RoutedCall | None = None, **kwargs: Any) -> Any:
        """Run the model's own forward; `routes` records the experts that its tokens use, or says which to use."""
        if routes is None:
            return super().forward(*args, **kwargs)
        if isinstance(routes, RoutedCall):
            return super().forward(*args, routes=routes, **kwargs)
        if not isinstance(routes, Routes):
            raise ReplayError(
                f"routes are a {type(routes).__name__}; pass routes=Routes.replay(ids) to use expert ids, or "
                "routes=Routes.record() to write them down"
            )
        tokens, device = _tokens(args, kwargs)
        call = routes.open(self._replay_handle.routers, tokens, device)
        output = super().forward(*args, routes=call, **kwargs)
        routes.close(call)
        return output


def _tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, torch.device]:
    ids = args[0] if args else kwargs.get("input_ids")
    if ids is not None:
        return ids.numel(), ids.device
    embeddings = kwargs.get("inputs_embeds")
    if embeddings is None:
        raise ReplayError(
            "routes need input_ids or inputs_embeds beside them, to count the tokens of the call"
        )
    return embeddings.shape[:-1].numel(), embeddings.device


def _refuse_own_forward(modules: Iterable[torch.nn.Module]) -> None:
    """Refuse modules whose forward is an attribute of the instance, which would hide that of their class."""
    for module in modules:
        if "forward" in vars(module):
            raise ReplayError(
                f"{type(module).__name__} has a forward of its own on the instance (a device map's hooks, say); "
                "install router replay before what sets it"
            )


def _become(module: torch.nn.Module, kind: type[torch.nn.Module]) -> None:
    """Make `module` an instance of `kind` too; a second time changes nothing."""
    if not isinstance(module, kind):
        module.__class__ = _subclass(cast(Any, type(module)), cast(Any, kind))


@lru_cache(maxsize=256)
def _subclass(original: type, kind: type) -> Any:
    # The same name and module: transformers and FSDP wrapping policies look classes up by name.
    names = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_replay_parts": (original, kind),
    }
    if kind is RoutedModel:
        names["forward"] = _with_signature(original)
    return type(original.__name__, (kind, original), names)


def _blank(original: type, kind: type) -> Any:
    # An instance without state, for a copy or a pickle to fill.
    made = _subclass(original, kind)
    return made.__new__(made)


def _with_signature(original: Any) -> Any:
    """Return a forward for a model class that shows the original's parameters, and `routes`."""

    def forward(self: RoutedModel, *args: Any, **kwargs: Any) -> Any:
        return RoutedModel.forward(self, *args, **kwargs)

    shown = signature(original.forward)
    parameters = [p for p in shown.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
    rest = [p for p in shown.parameters.values() if p.kind is Parameter.VAR_KEYWORD]
    routes = Parameter("routes", Parameter.KEYWORD_ONLY, default=None, annotation=Routes | None)
    forward.__signature__ = shown.replace(parameters=[*parameters, routes, *rest])  # type: ignore[attr-defined]
    forward.__doc__ = original.forward.__doc__
    return forward

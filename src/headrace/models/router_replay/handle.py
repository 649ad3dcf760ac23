"""What a model's routes look like: its router slots, and the decoder layers that they are in."""

from dataclasses import dataclass

import torch

from headrace.data_plane.routes_codec import RouteShape
from headrace.errors import ReplayError


@dataclass(frozen=True)
class RouterSpec:
    """One router slot: a router of the decoder.

    `name` and `layer_name` are module paths in the model; `layer` counts decoder layers. `num_experts` counts the
    classes that the router chooses among. `grouped` is True where groups of experts are ranked first. `fixed_output`
    is not None for a router whose choice is a function of the token id: it keeps its slot, and is never replayed; the
    ids are at that index of its output.
    """

    name: str
    layer_name: str
    layer: int
    num_experts: int
    top_k: int
    grouped: bool = False
    fixed_output: int | None = None


@dataclass(frozen=True)
class LayerMap:
    """A model's routers by decoder layer: `moe_layers[i]` is the decoder layer of router slot i.

    Routes have one slot per router. Some engines send a slot per decoder layer instead, dense ones included; such a
    payload goes through `select`. Example: of 4 layers the first is dense, so `LayerMap(4, (1, 2, 3))`.
    """

    num_layers: int
    moe_layers: tuple[int, ...]

    @property
    def is_sparse(self) -> bool:
        """Whether every decoder layer has one router, so that both layer axes are the same."""
        return self.moe_layers == tuple(range(self.num_layers))

    @property
    def has_one_router_per_layer(self) -> bool:
        return len(set(self.moe_layers)) == len(self.moe_layers)

    def select(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the router slots (T, MoE layers, k) of a payload over all decoder layers (T, layers, k).

        Raises:
            ReplayError: another number of layers, or a layer with several routers, which such a payload cannot hold.
        """
        if not self.has_one_router_per_layer:
            raise ReplayError(
                f"routers in decoder layers {list(self.moe_layers)}: several in one layer have one slot"
            )
        if ids.shape[1] != self.num_layers:
            raise ReplayError(
                f"routes have {ids.shape[1]} layers; expected all {self.num_layers} decoder layers of the model, of "
                f"which {len(self.moe_layers)} are mixtures of experts"
            )
        return ids if self.is_sparse else ids[:, list(self.moe_layers)]

    def payload_axis(self, layers: int) -> str:
        """Return "moe" or "all": what a payload of this many layers can only be.

        Raises:
            ReplayError: it can be neither, or both with different meanings.
        """
        moe, everything = layers == len(self.moe_layers), layers == self.num_layers
        if moe and (not everything or self.is_sparse):
            return "moe"
        if everything and not moe:
            return "all"
        problem = "could be either" if moe else "is neither"
        raise ReplayError(
            f"a payload of {layers} layers {problem}: the model has {self.num_layers} decoder layers and "
            f"{len(self.moe_layers)} routers, in layers {list(self.moe_layers)}; say which one the engine sends"
        )


@dataclass(frozen=True)
class RouterReplay:
    """A model's router slots, in the order of the routes' layer axis."""

    routers: tuple[RouterSpec, ...]
    layer_map: LayerMap

    @property
    def num_moe_layers(self) -> int:
        return len(self.routers)

    @property
    def top_k(self) -> int:
        return self.routers[0].top_k

    @property
    def num_experts(self) -> int:
        return max(r.num_experts for r in self.routers)

    @property
    def shape(self) -> RouteShape:
        return RouteShape(self.num_moe_layers, self.top_k, self.num_experts)

    @property
    def dtype(self) -> torch.dtype:
        return self.shape.dtype

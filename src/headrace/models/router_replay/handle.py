"""What a model's routes look like."""

from dataclasses import dataclass

import torch

from headrace.data_plane.routes_codec import RouteShape
from headrace.models.router_replay.families import RouterSpec
from headrace.models.router_replay.layer_map import LayerMap


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
    def dtype(self) -> torch.dtype:
        return self.shape.dtype

    @property
    def shape(self) -> RouteShape:
        return RouteShape(self.num_moe_layers, self.top_k, self.num_experts)

"""Which decoder layers the layer axis of routes stands for."""

from dataclasses import dataclass

import torch

from headrace.data_plane.routes_codec import missing_mark
from headrace.errors import ReplayError


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
        self._one_router_per_layer()
        if ids.shape[1] != self.num_layers:
            raise ReplayError(
                f"routes have {ids.shape[1]} layers; expected all {self.num_layers} decoder layers of the model, of "
                f"which {len(self.moe_layers)} are mixtures of experts"
            )
        return ids if len(self.moe_layers) == self.num_layers else ids[:, list(self.moe_layers)]

    def spread(self, ids: torch.Tensor) -> torch.Tensor:
        """Return routes (T, MoE layers, k) as a payload over all decoder layers; rows of dense layers are missing.

        Raises:
            ReplayError: another number of layers, or a layer with several routers.
        """
        self._one_router_per_layer()
        if ids.shape[1] != len(self.moe_layers):
            raise ReplayError(
                f"routes have {ids.shape[1]} layers; expected the model's {len(self.moe_layers)} routers"
            )
        shape = (len(ids), self.num_layers, ids.shape[2])
        out = torch.full(shape, missing_mark(ids.dtype), dtype=ids.dtype, device=ids.device)
        out[:, list(self.moe_layers)] = ids
        return out

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

    def _one_router_per_layer(self) -> None:
        if not self.has_one_router_per_layer:
            raise ReplayError(
                f"routers in decoder layers {list(self.moe_layers)}: several in one layer have one slot"
            )

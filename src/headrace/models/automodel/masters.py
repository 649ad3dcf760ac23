"""float32 weights and AdamW's state in host memory, of a model that one process trains.

The device holds what a forward reads: weights of matrix products in the compute dtype, the others in float32, and
float32 gradients. Autocast would round the same weights alike at each use, so that a step is that of float32 weights
on the device.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def hold_in_half(model: Any) -> None:
    """Hold frozen weights of products in bfloat16; what a forward under autocast computes stays the same bit for bit.

    Autocast rounds those weights alike at each use. Embeddings, norms and routers stay float32.
    """
    for weight in product_weights(model):
        if not weight.requires_grad:
            weight.data = weight.data.to(torch.bfloat16)


def train_in_half(model: Any) -> None:
    """Hold weights of products in bfloat16, with float32 gradients."""
    for weight in product_weights(model):
        weight.data = weight.data.to(torch.bfloat16)
        weight.grad_dtype = torch.float32


def product_weights(model: Any) -> list[torch.nn.Parameter]:
    """Return the weights that are read by matrix products alone, and so always in the compute dtype."""
    strict = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    found: dict[int, torch.nn.Parameter] = {}
    others: set[int] = set()
    for name, module in model.named_modules():
        for weight in module.parameters(recurse=False):
            # Fused experts are the only weights of three dimensions.
            product = isinstance(module, torch.nn.Linear) or weight.dim() == 3
            if product and not any(part in name for part in strict):
                found[id(weight)] = weight
            else:
                others.add(id(weight))  # an output head is tied to the embedding
    return [weight for key, weight in found.items() if key not in others]


class Masters:
    """The float32 weights of a model's parameters, by name, and what it computes with."""

    def __init__(self, model: Any, *, half: bool) -> None:
        """Copy the model's weights to the host; with `half`, those of products become bfloat16 on the device."""
        self._model = model
        self.parameters: dict[str, torch.nn.Parameter] = {}
        for name, weight in model.named_parameters():
            master = weight.detach().to("cpu", torch.float32, copy=True)
            self.parameters[name] = torch.nn.Parameter(master.pin_memory() if weight.is_cuda else master)
        if half:
            train_in_half(model)

    def pairs(self) -> Iterator[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
        for name, weight in self._model.named_parameters():
            yield weight, self.parameters[name]

    def weights(self) -> dict[str, torch.Tensor]:
        """Return masters and persistent buffers by their names in `model.state_dict()`, tied ones once."""
        buffers = {
            n: b for n, b in self._model.state_dict().items() if n in dict(self._model.named_buffers())
        }
        return {**{name: master.detach() for name, master in self.parameters.items()}, **buffers}

    @torch.no_grad()
    def take(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy weights, by name, into masters and model."""
        self._model.load_state_dict(weights)
        for name, master in self.parameters.items():
            master.copy_(weights[name])


class HostAdamW(torch.optim.AdamW):
    """AdamW over masters, weight by weight: a gradient goes to the host, the new weight to the device.

    One gradient at a time is in host memory, and the gradients on the device are freed as the step goes on.
    """

    def __init__(self, masters: Masters, groups: Any, **options: Any) -> None:
        super().__init__(groups, **options)
        self.masters = masters

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for weight, master in self.masters.pairs():
            if weight.grad is None:
                continue
            master.grad = weight.grad.to("cpu", torch.float32)
            weight.grad = None
            super().step(closure)
            master.grad = None
            weight.copy_(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for weight, _ in self.masters.pairs():
            weight.grad = None

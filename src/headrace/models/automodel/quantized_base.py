"""The frozen matrices below an adapter, held in 8 or 4 bits by torchao; products are with their values of then.

A forward makes a matrix whole for its product and drops it, and a backward does so again: no whole copy is kept.

Source: Dettmers et al., QLoRA (arXiv 2305.14314), for `nf4`.
"""

from math import gcd
from typing import Any

import torch

from headrace.config import LoraConfig
from headrace.errors import ConfigError
from headrace.models.automodel.lora import target_layers
from headrace.utils.targets import load_optional

_BLOCK, _SCALES = 64, 256


def quantized(weight: torch.Tensor, kind: str) -> Any:
    """Return a matrix as torchao's tensor of `kind`: int8 with a scale for each row, or nf4 with one for 64 values."""
    quantization = load_optional(
        "torchao.quantization",
        "policy.lora.base needs torchao ({error}); pip install 'headrace[torchao]', or set policy.lora.base=plain",
    )
    if kind == "int8":
        return quantization.Int8Tensor.from_hp(weight.detach(), quantization.PerRow())
    if weight.numel() % _BLOCK:
        raise ConfigError(
            f"policy.lora.base=nf4: a matrix of {tuple(weight.shape)} is no multiple of {_BLOCK} values; set "
            "policy.lora.base=int8"
        )
    return quantization.to_nf4(weight.detach(), _BLOCK, gcd(weight.numel() // _BLOCK, _SCALES))


def whole(weight: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of a quantized matrix."""
    original = getattr(weight, "get_original_weight", None)
    values: torch.Tensor = weight.dequantize() if original is None else original()
    return values.to(dtype)


def quantized_bytes(weight: torch.Tensor, kind: str) -> int:
    """Return what a matrix takes: its values, and their scales."""
    if kind == "int8":
        return weight.numel() + 4 * weight.shape[0]
    return weight.numel() // 2 + weight.numel() // _BLOCK


class _Product(torch.autograd.Function):
    """x W^T, which keeps W as it is held for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any) -> torch.Tensor:
        ctx.weight = weight
        return torch.nn.functional.linear(x, whole(weight, x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad @ whole(ctx.weight, grad.dtype), None


class QuantizedLinear(torch.nn.Module):
    """A frozen linear layer whose matrix is quantized."""

    def __init__(self, layer: torch.nn.Linear, kind: str) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = layer.in_features, layer.out_features, layer.bias
        self.weight = torch.nn.Parameter(quantized(layer.weight, kind), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Product.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + self.bias.to(out.dtype)


def quantize_base(model: Any, cfg: LoraConfig) -> None:
    """Quantize the matrices below the adapter of a model."""
    if cfg.base == "plain":
        return
    for module in model.modules():
        if hasattr(module, "lora_A") and isinstance(getattr(module, "base_layer", None), torch.nn.Linear):
            module.base_layer = QuantizedLinear(module.base_layer, cfg.base)


@torch.no_grad()
def round_base(model: Any, cfg: LoraConfig, held: torch.dtype) -> None:
    """Give a model without an adapter the values that a trainer has whose base is quantized from `held`."""
    if cfg.rank is None or cfg.base == "plain":
        return
    for _, layer in target_layers(model, cfg):
        layer.weight.copy_(whole(quantized(layer.weight.to(held), cfg.base), held))

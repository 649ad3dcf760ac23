"""AdamW with 8-bit moments, through torchao: a byte a value, and a float32 scale for each block of 256.

Tensors of fewer than 4,096 values on a rank, or that blocks do not divide, keep moments in their own dtype. Weights in
bfloat16 have no float32 masters: an update is rounded up or down by chance, so that small ones count on average.

Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization (arXiv 2110.02861).
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from headrace.config import OptimizerConfig
from headrace.utils.targets import load_optional

_PARTS = ("codes", "scale", "qmap")
_LEAST, BLOCK = 4096, 256


def build_adamw_8bit(groups: Iterable[Mapping[str, Any]], cfg: OptimizerConfig) -> torch.optim.Optimizer:
    """Return AdamW over groups of parameters.

    Raises:
        ConfigError: torchao is not installed.
    """
    base: Any = load_optional(
        "torchao.optim",
        "policy.optimizer.kind=adamw_8bit needs torchao ({error}); pip install 'headrace[torchao]', or set "
        "policy.optimizer.kind=adamw",
    ).AdamW8bit

    class AdamW8bit(base):  # type: ignore[misc]
        """On a CPU without torch.compile, which takes longer there than all steps of a small model."""

        def step(self, closure: Callable[[], float] | None = None) -> Any:
            on_host = all(p.device.type == "cpu" for group in self.param_groups for p in group["params"])
            with torch.compiler.set_stance("force_eager") if on_host else nullcontext():
                result = super().step(closure)
            for slots in self.state.values():
                forget_lost(slots)
            return result

    options = {"lr": cfg.lr, "betas": cfg.betas, "eps": cfg.eps}
    made: torch.optim.Optimizer = AdamW8bit(
        groups, **options, block_size=BLOCK, bf16_stochastic_round=cfg.stochastic_rounding
    )
    return made


@torch.no_grad()
def forget_lost(slots: Mapping[str, Any]) -> None:
    """Make a first moment 0 where the second one is rounded to 0.

    A value that gets a far smaller gradient next time would otherwise be moved by hundreds of times the rate.
    """
    first, second = (getattr(slots[n], "_local_tensor", slots[n]) for n in ("exp_avg", "exp_avg_sq"))
    if hasattr(second, "codes"):
        (zero, none) = (int((moment.qmap == 0).nonzero()) for moment in (first, second))
        first.codes.masked_fill_(second.codes == none, zero)


def state_bytes(parameter: torch.Tensor, ranks: int = 1) -> int:
    """Return what both moments of a parameter take on one of the ranks that share it."""
    values = parameter.numel() // ranks
    if values < _LEAST or values % BLOCK:
        return 2 * values * parameter.dtype.itemsize
    return 2 * (values + 4 * values // BLOCK)


# State.


def new_moments(optimizer: Any, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """Return the state that the first step makes."""
    signs = {"exp_avg": True, "exp_avg_sq": False}
    return {
        "step": torch.zeros(()),
        **{name: optimizer._new_buffer(parameter, signed) for name, signed in signs.items()},
    }


def is_8bit(optimizer: torch.optim.Optimizer) -> bool:
    return hasattr(optimizer, "bf16_stochastic_round")


class Quantized(NamedTuple):
    """8-bit values as plain tensors: codes, each block's scale, and what each code stands for."""

    codes: torch.Tensor
    scale: torch.Tensor
    qmap: torch.Tensor

    def whole(self) -> torch.Tensor:
        blocks = self.qmap[self.codes.flatten().int()].view(self.scale.numel(), -1)
        return (blocks * self.scale[:, None]).view(self.codes.shape)

    def fill(self, moment: Any) -> None:
        """Copy the values into a moment, bit for bit if it has the same blocks."""
        if getattr(moment, "codes", None) is not None and moment.scale.shape == self.scale.shape:
            moment.codes.copy_(self.codes)
            moment.scale.copy_(self.scale)
        else:
            moment.copy_(self.whole())


def as_plain(slots: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return state by name with each 8-bit tensor as its parts, `NAME.codes` and so on."""
    plain = {}
    for name, value in slots.items():
        parts = (
            {f"{name}.{p}": getattr(value, p) for p in _PARTS} if hasattr(value, "codes") else {name: value}
        )
        plain.update(parts)
    return plain


def from_plain(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | Quantized]:
    """Return what `as_plain` was made of."""
    names = [n.removesuffix(".codes") for n in tensors if n.endswith(".codes")]
    found: dict[str, torch.Tensor | Quantized] = {
        n: Quantized(*(tensors[f"{n}.{part}"] for part in _PARTS)) for n in names
    }
    used = {f"{n}.{part}" for n in names for part in _PARTS}
    return found | {n: t for n, t in tensors.items() if n not in used}

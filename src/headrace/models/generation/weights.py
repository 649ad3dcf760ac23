"""A generator's weights: their dtype, and their replacement by the trainer's."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

from headrace.errors import GenerationError

_NAMES_SHOWN = 5


def cast_parameters(model: Any, dtype: torch.dtype) -> None:
    """Cast floating-point parameters in place; buffers, and parameters a model keeps in float32, stay.

    Rotary frequencies are buffers: rounded to bfloat16 they would misplace distant tokens.
    """
    kept = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not any(part in name for part in kept):
            parameter.data = parameter.data.to(dtype)


@torch.no_grad()
def copy_weights(
    model: Any,
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    below: dict[str, torch.Tensor] | None = None,
) -> None:
    """Copy tensors into the parameters and persistent buffers of their names, or change nothing.

    Names are those of `model.state_dict()`. Every parameter must be there; of tied ones one name is enough. Or all are
    of an adapter, `NAME.lora_A.weight` and `NAME.lora_B.weight`: then the matrix NAME.weight becomes W + B A, where W
    is what it was at the first such update; `below` keeps it for the next ones.

    Raises:
        GenerationError: unknown, missing or repeated names, wrong shapes, or tied names that differ.
    """
    tensors: dict[str, torch.Tensor] = {}
    faults: dict[str, list[str]] = defaultdict(list)
    for name, tensor in named_tensors:
        if name in tensors:
            faults["given twice"].append(name)
        tensors[name] = tensor.detach()
    targets: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    if below is not None and any(".lora_" in name for name in tensors):
        _merge(model, targets, tensors, below, faults)
        return
    aliases: dict[int, list[str]] = defaultdict(list)
    for name, target in targets.items():
        aliases[id(target)].append(name)
    faults["unknown"] += [name for name in tensors if name not in targets]
    for names in aliases.values():
        given = [name for name in names if name in tensors]
        target = targets[names[0]]
        if not given and isinstance(target, torch.nn.Parameter):
            faults["missing"].append(" = ".join(names))
        faults["of the wrong shape"] += [
            f"{name} {tuple(tensors[name].shape)} (expected {tuple(target.shape)})"
            for name in given
            if tensors[name].shape != target.shape
        ]
        if any(not _same(tensors[given[0]], tensors[name]) for name in given[1:]):
            faults["tied here but different in the update"].append(" = ".join(given))
    _raise_faults(model, faults)
    for name, tensor in tensors.items():
        targets[name].copy_(tensor)


def _merge(
    model: Any,
    targets: dict[str, torch.Tensor],
    tensors: dict[str, torch.Tensor],
    below: dict[str, torch.Tensor],
    faults: dict[str, list[str]],
) -> None:
    parts: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".lora_")
        parts[f"{module}.weight"][part] = tensor
    pairs = {name: (found.get("A.weight"), found.get("B.weight")) for name, found in parts.items()}
    for name, (a, b) in pairs.items():
        if name not in targets:
            faults["unknown"].append(name)
        elif a is None or b is None:
            faults["missing"].append(f"{name.removesuffix('weight')}lora_{'B' if b is None else 'A'}.weight")
        elif (b.shape[0], a.shape[1]) != targets[name].shape or a.shape[0] != b.shape[1]:
            faults["of the wrong shape"].append(f"{name} {tuple(b.shape)} x {tuple(a.shape)}")
    _raise_faults(model, faults)
    for name, found in parts.items():
        target, a, b = targets[name], found["A.weight"], found["B.weight"]
        if name not in below:
            below[name] = target.detach().clone()
        first = below[name]
        a, b = (x.to(target.device, torch.float32) for x in (a, b))
        target.copy_(torch.addmm(first.float(), b, a))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() or (a.shape == b.shape and torch.equal(a, b))


def _raise_faults(model: Any, faults: dict[str, list[str]]) -> None:
    parts = []
    for kind, names in faults.items():
        if names:
            more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
            parts.append(f"{kind}: {', '.join(names[:_NAMES_SHOWN])}{more}")
    if parts:
        raise GenerationError(
            f"weight update of {type(model).__name__} refused, nothing was changed. "
            f"Names {'; '.join(parts)}. Send each name of the trained model's state_dict once, "
            "from a model of the same config"
        )

"""A generator's weights: their dtype, and their replacement by the trainer's."""

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion

from headrace.errors import GenerationError
from headrace.models.generation.weight_group import WeightGroup, WeightRoute

_NAMES_SHOWN = 5
NamedTensors = Iterable[tuple[str, torch.Tensor]]
_LAYER = re.compile(r".*\.layers\.\d+\.")


def cast_parameters(model: Any, dtype: torch.dtype) -> None:
    """Cast floating-point parameters in place; buffers, and parameters a model keeps in float32, stay.

    Rotary frequencies are buffers: rounded to bfloat16 they would misplace distant tokens.
    """
    kept = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not any(part in name for part in kept):
            parameter.data = parameter.data.to(dtype)


def checkpoint_names(model: Any, named_tensors: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights as a checkpoint has them: fused experts of transformers are split again, layer by layer."""

    def layer(pair: tuple[str, torch.Tensor]) -> str:
        found = _LAYER.match(pair[0])
        return found[0] if found else ""

    for _, weights in groupby(named_tensors, key=layer):
        yield from revert_weight_conversion(model, dict(weights)).items()


def tied_names(targets: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Return the names in a `state_dict(keep_vars=True)`, those of one weight together."""
    groups: dict[int, list[str]] = defaultdict(list)
    for name, target in targets.items():
        groups[id(target)].append(name)
    return [*groups.values()]


@dataclass(frozen=True)
class Opening:
    """The first item of a policy's stream of weights: the shapes of all that follow, None for an adapter's.

    `is_routed`: figures follow in place of the weights, which go another way.
    """

    shapes: dict[str, tuple[int, ...]] | None
    is_routed: bool = False


class WeightStream:
    """Weights by name, each made when it is asked for, whose names and shapes are all known ahead of the first.

    With `is_routed` the tensors go from another process straight to engines. Then this stream has figures of that in
    their place, and ends when they have been sent.
    """

    def __init__(
        self, shapes: Mapping[str, Sequence[int]], named_tensors: Iterable[Any], *, is_routed: bool = False
    ) -> None:
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.is_routed = is_routed
        self._named_tensors = named_tensors

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights.

        Raises:
            GenerationError: another weight than was announced, or none in its place.
        """
        missing = dict(self.shapes)
        for name, tensor in self._named_tensors:
            if missing.pop(name, None) != tuple(tensor.shape):
                raise GenerationError(
                    f"a stream of weights holds {name} {tuple(tensor.shape)}, not announced"
                )
            yield name, tensor
        if missing:
            raise GenerationError(f"a stream of weights ended before {', '.join([*missing][:_NAMES_SHOWN])}")

    def sent(self) -> dict[str, float]:
        """Wait until all weights are sent by their route, and return the figures."""
        return {name: value for figures in self._named_tensors for name, value in figures.items()}


def weight_stream(
    model: Any,
    shapes: dict[str, tuple[int, ...]] | None,
    weights: Iterator[tuple[str, torch.Tensor]],
    group: WeightGroup,
    route: WeightRoute | None,
    rank: int,
) -> Iterator[Any]:
    """Yield an `Opening` and then the weights; by a route, figures of the transfer when they have been sent.

    `shapes` are None for an adapter's, which take no route. Ranks that send nothing only gather with those that do.

    Raises:
        TransportError: a receiver failed, or did not come in time.
    """
    if route is None or shapes is None:
        yield Opening(shapes)
        yield from weights
        return
    yield Opening(shapes, is_routed=True)
    with ExitStack() as anyhow:
        # Other ranks gather with this one, to the end.
        anyhow.callback(lambda: deque(weights, maxlen=0))
        if route.sends(rank):
            named = checkpoint_names(model, weights) if route.splits_experts else weights
            yield group.send(route, named, lane=rank if route.takers else 0)


def whole_weights(named_tensors: NamedTensors, taker: str, remedy: str) -> NamedTensors:
    """Return the weights, which raise a GenerationError where they are those of an adapter."""

    def refusing() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in named_tensors:
            if ".lora_" in name:
                raise GenerationError(
                    f"{taker} takes whole weights, and got those of an adapter ({name}); {remedy}"
                )
            yield name, tensor

    # A stream, which no adapter is, stays one: its names are known without reading it.
    return named_tensors if isinstance(named_tensors, WeightStream) else refusing()


def checked_weights(
    model: Any, named_tensors: NamedTensors, below: dict[str, torch.Tensor] | None = None
) -> NamedTensors:
    """Return weights that fit the parameters and persistent buffers of their names; nothing is copied yet.

    Names are those of `model.state_dict()`. Every parameter must be there; of tied ones one name is enough. Or all are
    of an adapter, `NAME.lora_A.weight` and `NAME.lora_B.weight`: then the matrix NAME.weight becomes W + B A, where W
    is what it was at the first such update; `below` keeps it for the next ones.

    A `WeightStream`, which no adapter is, is looked at without being read; others are read to their end.

    Raises:
        GenerationError: unknown, missing or repeated names, wrong shapes, or tied names that differ.
    """
    targets: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    faults: dict[str, list[str]] = defaultdict(list)
    if isinstance(named_tensors, WeightStream):
        shapes, tensors = named_tensors.shapes, None
    else:
        tensors = {}
        for name, tensor in named_tensors:
            if name in tensors:
                faults["given twice"].append(name)
            tensors[name] = tensor.detach()
        if below is not None and any(".lora_" in name for name in tensors):
            return _merged(model, targets, tensors, below, faults)
        shapes, named_tensors = {name: tuple(t.shape) for name, t in tensors.items()}, tensors.items()
    faults["unknown"] += [name for name in shapes if name not in targets]
    for names in tied_names(targets):
        given = [name for name in names if name in shapes]
        target = targets[names[0]]
        if not given and isinstance(target, torch.nn.Parameter):
            faults["missing"].append(" = ".join(names))
        faults["of the wrong shape"] += [
            f"{name} {shapes[name]} (expected {tuple(target.shape)})"
            for name in given
            if shapes[name] != tuple(target.shape)
        ]
        # What a stream sends twice, the trainer does not tie.
        if len(given) > 1 and not (tensors and _all_same([tensors[name] for name in given])):
            faults["tied here but different in the update"].append(" = ".join(given))
    _raise_faults(model, faults)
    return named_tensors


@torch.no_grad()
def copy_weights(model: Any, checked: NamedTensors) -> None:
    """Copy weights in as they come; a stream that breaks leaves old and new ones side by side."""
    targets = model.state_dict(keep_vars=True)
    for name, tensor in checked:
        targets[name].copy_(tensor)


def _merged(
    model: Any,
    targets: dict[str, torch.Tensor],
    tensors: dict[str, torch.Tensor],
    below: dict[str, torch.Tensor],
    faults: dict[str, list[str]],
) -> NamedTensors:
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
    for name in parts:
        if name not in below:
            below[name] = targets[name].detach().clone()

    def merged(name: str) -> torch.Tensor:
        first = below[name].float()
        return torch.addmm(
            first, *(parts[name][p].to(first.device, torch.float32) for p in ("B.weight", "A.weight"))
        )

    return ((name, merged(name)) for name in parts)


def _all_same(tensors: Sequence[torch.Tensor]) -> bool:
    first = tensors[0]
    return all(t.data_ptr() == first.data_ptr() or torch.equal(t, first) for t in tensors)


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

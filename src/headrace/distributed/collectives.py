"""Collectives over columns, a few flat buffers in place of one message per column, and what rank 0 does for all.

Source: torch.distributed's broadcast_object_list and broadcast.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from headrace.distributed.worker_groups.failures import describe_error
from headrace.errors import TransportError

Columns = Mapping[str, Any]
T = TypeVar("T")


def from_first_rank(call: Callable[[], T]) -> T:
    """Return on every rank what `call`, which rank 0 alone runs, returns there: something small that pickles.

    Raises:
        HeadraceError: on every rank, what `call` raises on rank 0, so that nobody waits; rank 0 raises it as it is.
    """
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            answer = [(call(), None)]
        except Exception as error:
            dist.broadcast_object_list([(None, describe_error(0, error))], src=0)
            raise
    dist.broadcast_object_list(answer, src=0)
    value, failure = answer[0]
    if failure is not None:
        raise failure.kind(failure.summary)
    result: T = value
    return result


def broadcast_failure(reason: str, *, src: int, group: dist.ProcessGroup) -> None:
    """Tell the siblings that wait in `broadcast_columns` that the leader, this rank, has no columns for them."""
    dist.broadcast_object_list([reason], src=src, group=group)


def broadcast_columns(columns: Columns | None, *, src: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """Send dense columns from global rank `src` to every rank of `group`; each rank returns them all.

    Tensors travel as one flat byte buffer per dtype, on the device of the group's backend; other values travel
    with the description. The leader passes `columns`, its siblings None; a leader that has none calls
    `broadcast_failure` in place of this, so that nobody waits.

    Raises:
        TransportError: on the siblings of a leader that failed, with its reason.
    """
    leader = dist.get_rank() == src
    message: list[Any] = [_describe(columns) if columns is not None else None]
    dist.broadcast_object_list(message, src=src, group=group)
    description = message[0]
    if isinstance(description, str):
        raise TransportError(f"rank {src} could not fetch for its replica: {description}")
    received: dict[str, Any] = dict(description["objects"])
    device = _device_of(group)
    for dtype, shapes in description["tensors"].items():
        flat = _flatten(columns, shapes, dtype, device) if leader else _empty(shapes, dtype, device)
        dist.broadcast(flat, src=src, group=group)
        received.update(_split(flat.view(dtype), shapes))
    if leader and columns is not None:
        return dict(columns)
    return {name: received[name] for name in description["order"]}


def _describe(columns: Columns) -> dict[str, Any]:
    tensors: dict[torch.dtype, dict[str, tuple[int, ...]]] = {}
    objects: dict[str, Any] = {}
    for name, value in columns.items():
        if isinstance(value, torch.Tensor):
            tensors.setdefault(value.dtype, {})[name] = tuple(value.shape)
        else:
            objects[name] = value
    return {"order": list(columns), "tensors": tensors, "objects": objects}


def _device_of(group: dist.ProcessGroup) -> torch.device:
    if "nccl" in str(dist.get_backend(group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _flatten(
    columns: Columns | None, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    assert columns is not None
    # As bytes: not every backend has every dtype (gloo has no uint16, NCCL no bool).
    return torch.cat([columns[name].to(device).reshape(-1) for name in shapes]).view(dtype).view(torch.uint8)


def _empty(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    count = sum(torch.Size(s).numel() for s in shapes.values())
    return torch.empty(count, dtype=dtype, device=device).view(torch.uint8)


def _split(flat: torch.Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    sizes = [torch.Size(s).numel() for s in shapes.values()]
    return {name: part.view(shapes[name]) for name, part in zip(shapes, torch.split(flat, sizes))}

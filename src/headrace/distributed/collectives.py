"""Collectives over columns, a few flat buffers in place of one message per column, and what rank 0 does for all.

Source: torch.distributed's broadcast_object_list and broadcast.
"""

import pickle
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from headrace.distributed.worker_groups.failures import describe_error
from headrace.errors import SchemaError, TransportError

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
            answer = [(pickle.dumps(call()), None)]
        except Exception as error:
            dist.broadcast_object_list([(None, describe_error(0, error))], src=0)
            raise
    dist.broadcast_object_list(answer, src=0)
    pickled, failure = answer[0]
    if failure is not None:
        raise failure.kind(failure.summary)
    result: T = pickle.loads(pickled)
    return result


def broadcast_columns(read: Callable[[], Columns], *, src: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """Return on every rank of `group` the columns that `read`, which global rank `src` alone calls, returns there.

    Dense tensors travel as one flat byte buffer per dtype, on the device of the group's backend; other values
    pickled. All of it is made before any is sent: whatever fails on the leader, no sibling waits.

    Raises:
        SchemaError: on the leader, a column that cannot be sent; and whatever `read` raises.
        TransportError: on the siblings of a leader that failed, with its reason.
    """
    device = _device_of(group)
    if dist.get_rank() == src:
        return _send(read, src, group, device)
    message: list[Any] = [None]
    dist.broadcast_object_list(message, src=src, group=group)
    if isinstance(message[0], str):
        raise TransportError(f"rank {src} could not fetch for its replica: {message[0]}")
    order, tensors, pickled = message[0]
    received: dict[str, Any] = {name: pickle.loads(value) for name, value in pickled.items()}
    for dtype, shapes in tensors.items():
        flat = _empty(shapes, dtype, device)
        dist.broadcast(flat, src=src, group=group)
        received.update(_split(flat.view(dtype), shapes))
    return {name: received[name] for name in order}


def _send(
    read: Callable[[], Columns], src: int, group: dist.ProcessGroup, device: torch.device
) -> dict[str, Any]:
    flats: list[torch.Tensor] | None = None
    message: Any = None
    try:
        columns = read()
        tensors: dict[torch.dtype, dict[str, tuple[int, ...]]] = {}
        for name, value in columns.items():
            if _is_dense(value):
                tensors.setdefault(value.dtype, {})[name] = tuple(value.shape)
        pickled = {name: _pickled(name, value) for name, value in columns.items() if not _is_dense(value)}
        flats = [_flatten(columns, shapes, dtype, device) for dtype, shapes in tensors.items()]
        message = (list(columns), tensors, pickled)
    finally:
        # None of it: an error, an interrupt included, is on its way, and the siblings learn of it.
        told = repr(sys.exception()) if flats is None else message
        dist.broadcast_object_list([told], src=src, group=group)
    for flat in flats:
        dist.broadcast(flat, src=src, group=group)
    return dict(columns)


def _is_dense(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_nested


def _pickled(name: str, value: object) -> bytes:
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise SchemaError(
            f"column '{name}' is a {type(value).__name__} that cannot be sent: {error}"
        ) from error


def _device_of(group: dist.ProcessGroup) -> torch.device:
    if "nccl" in str(dist.get_backend(group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _flatten(
    columns: Columns, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    # As bytes: not every backend has every dtype (gloo has no uint16, NCCL no bool).
    return torch.cat([columns[name].to(device).reshape(-1) for name in shapes]).view(dtype).view(torch.uint8)


def _empty(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    count = sum(torch.Size(s).numel() for s in shapes.values())
    return torch.empty(count, dtype=dtype, device=device).view(torch.uint8)


def _split(flat: torch.Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    sizes = [torch.Size(s).numel() for s in shapes.values()]
    return {name: part.view(shapes[name]) for name, part in zip(shapes, torch.split(flat, sizes))}

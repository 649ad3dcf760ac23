"""Collectives over columns, one flat buffer in place of a message per column, and what rank 0 does for all.

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
Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
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

    Dense tensors travel as one flat byte buffer, on the device of the group's backend; other values
    pickled. All of it is made before any is sent: whatever fails on the leader, no sibling waits.

    Raises:
        SchemaError: on the leader, a column that cannot be sent; and whatever `read` raises.
        TransportError: on the siblings of a leader that failed, with its reason.
    """
    on_cuda = "nccl" in str(dist.get_backend(group))
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    if dist.get_rank() == src:
        return _send(read, src, group, device)
    message: list[Any] = [None]
    dist.broadcast_object_list(message, src=src, group=group)
    if isinstance(message[0], str):
        raise TransportError(f"rank {src} could not fetch for its replica: {message[0]}")
    order, shapes, pickled = message[0]
    flat = _buffer(shapes, device)
    dist.broadcast(flat, src=src, group=group)
    received = {name: pickle.loads(value) for name, value in pickled.items()} | _views(flat, shapes)
    return {name: received[name] for name in order}


def _send(
    read: Callable[[], Columns], src: int, group: dist.ProcessGroup, device: torch.device
) -> dict[str, Any]:
    flat: torch.Tensor | None = None
    message: Any = None
    try:
        columns = read()
        # Wide numbers first, so that each column begins at a multiple of its own.
        tensors = [c for c in columns.items() if isinstance(c[1], torch.Tensor)]
        strided = [c for c in tensors if c[1].layout == torch.strided and not c[1].is_nested]
        dense = sorted(strided, key=lambda c: -c[1].element_size())
        shapes = {name: (column.dtype, tuple(column.shape)) for name, column in dense}
        flat = _buffer(shapes, device)
        for name, view in _views(flat, shapes).items():
            view.copy_(columns[name].detach())
        pickled = {name: _pickled(name, value) for name, value in columns.items() if name not in shapes}
        message = (list(columns), shapes, pickled)
    finally:
        # None of it: an error, an interrupt included, is on its way, and the siblings learn of it.
        told = repr(sys.exception()) if message is None else message
        dist.broadcast_object_list([told], src=src, group=group)
    dist.broadcast(flat, src=src, group=group)
    return dict(columns)


def _pickled(name: str, value: object) -> bytes:
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise SchemaError(
            f"column '{name}' is a {type(value).__name__} that cannot be sent: {error}"
        ) from error


def _buffer(shapes: Shapes, device: torch.device) -> torch.Tensor:
    # Of bytes: not every backend has every dtype (gloo has no uint16, NCCL no bool).
    size = sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape in shapes.values())
    return torch.empty(size, dtype=torch.uint8, device=device)


def _views(flat: torch.Tensor, shapes: Shapes) -> dict[str, torch.Tensor]:
    """Return the columns that lie in a buffer, which they share."""
    parts = torch.split(
        flat, [torch.Size(shape).numel() * dtype.itemsize for dtype, shape in shapes.values()]
    )
    return {name: part.view(dtype).view(shape) for part, (name, (dtype, shape)) in zip(parts, shapes.items())}

"""Expert routes as text for JSON replies: `nrlre1:<dtype>:<tokens>x<layers>x<k>:<base64 of the elements>`."""

import base64
import binascii
from math import prod
from typing import Any

import numpy as np
import torch

from headrace.data_plane.routes_codec import (
    RouteShape,
    check_routes,
    holds_experts,
    missing_mark,
    missing_rows,
    most_experts,
    pack_routes,
    route_digest,
    row_digests,
    signed_routes,
    wire_dtype,
)
from headrace.distributed.ragged import byte_view
from headrace.errors import SchemaError

__all__ = [
    "RouteShape",
    "check_routes",
    "decode_routed_experts",
    "encode_routed_experts",
    "holds_experts",
    "missing_mark",
    "missing_rows",
    "most_experts",
    "pack_routes",
    "route_digest",
    "row_digests",
    "signed_routes",
    "wire_dtype",
]

_MAGIC = "nrlre1"
_WIRE_TORCH_DTYPES = {
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    # headrace's own, beside those that callers know.
    "uint8": torch.uint8,
    "uint16": torch.uint16,
}
_TORCH_DTYPE_NAMES = {dtype: name for name, dtype in _WIRE_TORCH_DTYPES.items()}


def encode_routed_experts(routed_experts: torch.Tensor) -> str:
    """Return routes (tokens, layers, k) as text; elements are in little-endian order.

    >>> encode_routed_experts(torch.tensor([[[1, 2]]], dtype=torch.int16))
    'nrlre1:int16:1x1x2:AQACAA=='

    Raises:
        SchemaError: another shape, or a dtype that is not carried.
    """
    if routed_experts.dim() != 3:
        raise SchemaError(
            f"routed_experts have shape {tuple(routed_experts.shape)}; expected (tokens, layers, k)"
        )
    name = _TORCH_DTYPE_NAMES.get(routed_experts.dtype)
    if name is None:
        known = ", ".join(_WIRE_TORCH_DTYPES)
        raise SchemaError(f"routed_experts have dtype {routed_experts.dtype}; expected one of {known}")
    shape = "x".join(map(str, routed_experts.shape))
    data = byte_view(routed_experts.detach().cpu().contiguous()).tobytes()
    return ":".join((_MAGIC, name, shape, base64.b64encode(data).decode("ascii")))


def decode_routed_experts(payload: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return routes (tokens, layers, k) of `dtype`, from what `encode_routed_experts` made or from nested lists.

    Raises:
        SchemaError: text or bytes of another form, or ids that `dtype` cannot hold.
    """
    if isinstance(payload, bytes | bytearray | memoryview):
        payload = bytes(payload).decode("ascii", errors="replace")
    routes = _from_text(payload) if isinstance(payload, str) else _from_lists(payload)
    if routes.dim() != 3 or routes.is_floating_point():
        raise SchemaError(
            f"routed_experts have shape {tuple(routes.shape)} and dtype {routes.dtype}; expected integers "
            "(tokens, layers, k)"
        )
    cast = routes.to(dtype)
    # In 64 bits, since torch compares few of the unsigned dtypes.
    if not bool((cast.to(torch.int64) == routes.to(torch.int64)).all()):
        raise SchemaError(f"routed_experts have ids that {dtype} cannot hold; decode them as a wider dtype")
    return cast


def _from_lists(payload: Any) -> torch.Tensor:
    try:
        return torch.as_tensor(payload)
    except (TypeError, ValueError, RuntimeError) as error:
        raise SchemaError(
            f"routed_experts are neither text nor nested lists of integers (tokens, layers, k): {error}"
        ) from error


def _from_text(payload: str) -> torch.Tensor:
    parts = payload.split(":")
    if len(parts) != 4 or parts[0] != _MAGIC:
        raise SchemaError(
            f"routed_experts {payload[:40]!r} are no envelope; expected '{_MAGIC}:<dtype>:<shape>:<base64>'"
        )
    _, name, shape_text, encoded = parts
    if name not in _WIRE_TORCH_DTYPES:
        known = ", ".join(_WIRE_TORCH_DTYPES)
        raise SchemaError(f"routed_experts have dtype {name!r}; expected one of {known}")
    try:
        shape = [int(size) for size in shape_text.split("x")]
        data = base64.b64decode(encoded, validate=True)
    except (ValueError, binascii.Error) as error:
        raise SchemaError(f"routed_experts envelope with shape {shape_text!r} is damaged: {error}") from error
    itemsize = _WIRE_TORCH_DTYPES[name].itemsize
    if len(shape) != 3 or min(shape) < 0 or len(data) != prod(shape) * itemsize:
        raise SchemaError(
            f"routed_experts of shape {shape_text} have {len(data)} bytes; expected {itemsize} for each element"
        )
    values = np.frombuffer(data, dtype=np.dtype(name).newbyteorder("<")).astype(name)
    return torch.from_numpy(values).reshape(shape)

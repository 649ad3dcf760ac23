"""Objects of columns and tags as bytes: msgpack, one message per row of a column, no pickle.

A value may be None, bool, int (64 bits), float, str, bytes, list, tuple or dict (scalar keys), and inside
them torch tensors, numeric NumPy arrays and scalars, and one-row PackedTensors. It comes back equal and of
the same type, except that NumPy scalars come back as Python numbers and tensors on the CPU. Anything else is
refused.

Wire: plain msgpack, with extension types for the rest. A tensor or array is its dtype and shape as a
msgpack message, preceded by the message's length in two bytes, and followed by the elements in C order.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from headrace.distributed.columns import object_array
from headrace.distributed.multimodal import PackedTensor
from headrace.distributed.ragged import byte_view, no_bytes
from headrace.errors import SchemaError
from headrace.utils.arguments import names_list

ObjectArray = NDArray[np.object_]


# msgpack extension codes.
EXT_TENSOR = 1
EXT_ARRAY = 2
EXT_TUPLE = 3
EXT_PACKED_TENSOR = 4


class _NotStorableError(Exception):
    """A value that has no wire form; the message says which and why."""


SCALARS = frozenset({type(None), bool, int, float, str, bytes})
# Not int, which may be too large to store; of texts, those of ASCII alone.
_UNCHANGING = SCALARS - {int, str}
_STORABLE = (
    "Objects are made of None, bool, int, float, str, bytes, list, tuple, dict, tensors and numeric arrays; convert "
    "the value before the put"
)
_encoder = msgspec.msgpack.Encoder()


def encode_column(
    name: str, column: Iterable[object], sample_ids: Sequence[str] | None = None
) -> list[bytes]:
    messages: list[bytes] = []
    for row, value in enumerate(column):
        try:
            messages.append(encode(value))
        except _NotStorableError as error:
            sample = f" (sample '{sample_ids[row]}')" if sample_ids else ""
            raise SchemaError(f"column '{name}', row {row}{sample}: {error}. {_STORABLE}") from error
    return messages


def checked_tags(tags: Sequence[Mapping[str, Any]], rows: int) -> list[dict[str, Any]]:
    """Return copies of the tags of a put."""
    if len(names_list("tags", tags)) != rows:
        raise SchemaError(f"{len(tags)} tags for {rows} sample ids; give one per sample")
    other = next((tag for tag in tags if not isinstance(tag, Mapping)), None)
    if other is not None:
        raise SchemaError(
            f"tags hold a {type(other).__name__}; expected a mapping of names to values per sample"
        )
    return [copied_tag(tag, row) for row, tag in enumerate(tags)]


def copied_tag(tag: Mapping[str, object], row: int) -> dict[str, Any]:
    """Return a tag of a put with values as a store gives them back, which share nothing with the caller's."""
    copied: dict[str, Any] = {}
    for name, value in tag.items():
        if not isinstance(name, str):
            raise SchemaError(f"tag {name!r} of row {row} has a name that is no text")
        try:
            copied[_copied(name)] = _copied(value)
        except _NotStorableError as error:
            raise SchemaError(f"tag {name!r} of row {row}: {error}. {_STORABLE}") from error
    return copied


def _copied(value: Any) -> Any:
    kind = type(value)
    is_plain = value.isascii() if kind is str else kind in _UNCHANGING
    return value if is_plain else decode(encode(value))


def decode_column(messages: Iterable[bytes | memoryview]) -> ObjectArray:
    return object_array([decode(message) for message in messages])


def encode(value: object) -> bytes:
    """Return a value's message; raises what `encode_column` turns into a SchemaError."""
    try:
        return _encoder.encode(to_wire(value))
    except RecursionError as error:
        raise _NotStorableError("a value that contains itself, or is nested too deeply") from error
    except (OverflowError, ValueError) as error:
        raise _NotStorableError(f"a value that msgpack cannot carry ({error})") from error


def decode(message: bytes | memoryview) -> Any:
    return _decoder.decode(message)


def to_wire(value: object) -> object:
    kind = type(value)
    if kind in SCALARS:
        return value
    if isinstance(value, dict) and kind is dict:
        return {_key(key): to_wire(item) for key, item in value.items()}
    if isinstance(value, list) and kind is list:
        return [to_wire(item) for item in value]
    if isinstance(value, tuple) and kind is tuple:
        return msgspec.msgpack.Ext(EXT_TUPLE, _encoder.encode([to_wire(item) for item in value]))
    if isinstance(value, np.generic) and type(value.item()) in SCALARS:
        return value.item()
    if isinstance(value, torch.Tensor):
        return _tensor_to_wire(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return _buffer(EXT_ARRAY, value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes())
    if isinstance(value, PackedTensor) and len(value) == 1:
        row = to_wire(value.as_tensor())
        return msgspec.msgpack.Ext(EXT_PACKED_TENSOR, _encoder.encode([value.dim_to_pack, row]))
    detail = f" of dtype {value.dtype}" if isinstance(value, np.ndarray) else ""
    raise _NotStorableError(f"a value of type {kind.__module__}.{kind.__qualname__}{detail} cannot be stored")


def _key(key: object) -> object:
    plain = key.item() if isinstance(key, np.generic) else key
    if type(plain) not in SCALARS:
        raise _NotStorableError(f"a dict key of type {type(key).__qualname__} cannot be stored")
    return plain


def _tensor_to_wire(tensor: torch.Tensor) -> msgspec.msgpack.Ext:
    fault = "nested" if tensor.is_nested else no_bytes(tensor)
    if fault:
        raise _NotStorableError(f"a tensor that is {fault} cannot be stored inside an object")
    data = byte_view(tensor.cpu()).tobytes()
    return _buffer(EXT_TENSOR, str(tensor.dtype).removeprefix("torch."), tensor.shape, data)


def _buffer(code: int, dtype: str, shape: Sequence[int], data: bytes) -> msgspec.msgpack.Ext:
    header = _encoder.encode([dtype, list(shape)])
    return msgspec.msgpack.Ext(code, b"".join((len(header).to_bytes(2, "big"), header, data)))


def from_ext(code: int, data: memoryview) -> object:
    if code == EXT_TUPLE:
        return tuple(_decoder.decode(data))
    if code == EXT_PACKED_TENSOR:
        dim_to_pack, row = _decoder.decode(data)
        return PackedTensor([row], dim_to_pack)
    start = 2 + int.from_bytes(data[:2], "big")
    dtype, shape = _decoder.decode(data[2:start])
    # A bytearray, since a tensor or array around bytes could not be written to.
    if code == EXT_ARRAY:
        return np.frombuffer(bytearray(data[start:]), dtype=dtype).reshape(shape)
    kind: torch.dtype = getattr(torch, dtype)
    if start == len(data):
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(data[start:]), dtype=torch.uint8).view(kind).view(shape)


_decoder = msgspec.msgpack.Decoder(ext_hook=from_ext)

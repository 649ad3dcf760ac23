"""Values on their way to another process: a msgpack tree, tensors and arrays beside it as raw bytes; no pickle.

A value is made of None, bool, int (64 bits), float, str, bytes, Path, lists, tuples, sets, dicts, tensors, arrays,
objects of headrace's own classes, and functions and classes that are `registered`. An object goes by its state, and
no constructor runs on the other side. A tensor sends the elements it shows, not the storage behind it, and arrives
detached, contiguous, on the CPU; a jagged one with its rows back to back. Masked arrays and arrays of records are
refused.
"""

import errno
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path, PurePath
from pkgutil import resolve_name
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel

from headrace.distributed.columns import object_array
from headrace.distributed.offsets_reader import OffsetsReader
from headrace.distributed.ragged import byte_view, nested_from_ragged, take_apart

_FILE_BYTES = 1 << 20
_ROOM_S, _LOOK_S = 10.0, 0.02
"""How long a lack of file descriptors is waited for, and how often it is looked at."""
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_COLLECTIONS: dict[type, str] = {kind: kind.__name__ for kind in (list, tuple, set, frozenset)}
_BUILDERS: dict[str, Callable[[Any], Any]] = {name: kind for kind, name in _COLLECTIONS.items()}
_REGISTERED: set[Any] = set()
Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")


def registered(named: T) -> T:
    """Let a function or class of a module go to workers by its name, and objects of the class by their state.

    A loss of your own that several workers are to run needs this decorator.
    """
    _REGISTERED.add(named)
    return named


@dataclass(frozen=True)
class Payload:
    """An encoded value; `buffers` are its tensors and arrays in the order of their appearance."""

    head: bytes
    buffers: Sequence[Bytes]

    @property
    def nbytes(self) -> int:
        return len(self.head) + sum(b.nbytes for b in self.buffers)


def light(payload: Payload) -> "bytes | Payload":
    """Return a payload as mere bytes where it has no buffers: Ray pickles objects, and does not pickle bytes."""
    return payload if payload.buffers else payload.head


def whole(carried: "bytes | Payload") -> Payload:
    """Return the payload that `light` was given."""
    return Payload(carried, []) if isinstance(carried, bytes) else carried


def encode(value: Any) -> Payload:
    """Encode a value; buffers share memory with it where they can.

    Raises:
        TypeError: a value that cannot be sent, with its type.
    """
    packer = _Packer()
    return Payload(msgspec.msgpack.encode(packer.pack(value)), packer.buffers)


def decode(payload: Payload) -> Any:
    """Return the value; its tensors own their memory or share the payload's, and can be written to."""
    return _Unpacker(payload.buffers).unpack(msgspec.msgpack.decode(payload.head))


def send(connection: "Connection[Any, Any]", message: Any) -> None:
    """Send one message; `receive` on the other end returns it.

    A buffer of _FILE_BYTES or more goes as the descriptor of an anonymous memory file, which has no name to
    leave behind: two copies of the bytes in place of many small ones through the pipe.
    """
    payload = encode(message)
    connection.send_bytes(msgspec.msgpack.encode((payload.head, [b.nbytes for b in payload.buffers])))
    for buffer in payload.buffers:
        if _as_file(buffer.nbytes):
            _send_memory(connection, buffer)
        elif buffer.nbytes:
            connection.send_bytes(buffer.data)


def receive(connection: "Connection[Any, Any]") -> Any:
    """Wait for one message and return it.

    Raises:
        EOFError, ConnectionError: the other end is gone.
    """
    head, sizes = msgspec.msgpack.decode(connection.recv_bytes(), type=tuple[bytes, list[int]])
    return decode(Payload(head, [_receive_buffer(connection, size) for size in sizes]))


def _as_file(nbytes: int) -> bool:
    return nbytes >= _FILE_BYTES and hasattr(os, "memfd_create")


def _send_memory(connection: "Connection[Any, Any]", buffer: Bytes) -> None:
    file = _with_room(lambda: os.memfd_create("headrace"))
    try:
        rest = buffer.data
        while rest.nbytes:
            rest = rest[os.write(file, rest) :]
        _with_room(lambda: send_handle(connection, file, None))
    finally:
        os.close(file)


def _receive_buffer(connection: "Connection[Any, Any]", nbytes: int) -> Bytes:
    buffer = np.empty(nbytes, dtype=np.uint8)
    if _as_file(nbytes):
        connection.poll(None)
        _with_room(_try_two)  # a descriptor that is taken where there is no room for it is lost
        file = recv_handle(connection)
        try:
            done = 0
            while done < nbytes:
                done += os.preadv(file, [buffer.data[done:]], done)
        finally:
            os.close(file)
    elif nbytes:
        connection.recv_bytes_into(buffer.data)
    return buffer


def _with_room(do: Callable[[], T]) -> T:
    """Do what takes descriptors; where this process or the system has none left, wait a while for some."""
    deadline = time.monotonic() + _ROOM_S
    while True:
        try:
            return do()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or time.monotonic() > deadline:
                raise
        time.sleep(_LOOK_S)


def _try_two() -> None:
    """Raise where there is no room for what `recv_handle` takes."""
    for file in os.pipe():
        os.close(file)


# A name is looked up by importing its module, a loss's of any layer; what is not registered there is refused.
# A node of the tree is a plain value, or a list of a kind and what belongs to it.


class _Packer:
    def __init__(self) -> None:
        self.buffers: list[Bytes] = []
        self._tensors: dict[int, tuple[torch.Tensor, Any]] = {}
        self._read = OffsetsReader()

    def pack(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is list and (names := _shared_keys(value)):
            # Tags of rows, above all: each name goes once.
            return ["records", self.pack(names), [self.pack([row[n] for row in value]) for n in names]]
        if kind in _COLLECTIONS:
            if _is_plain(value):
                return [_COLLECTIONS[kind], True, list(value)]
            return [_COLLECTIONS[kind], False, [self.pack(item) for item in value]]
        if kind is dict:
            return ["dict", self.pack(list(value)), self.pack(list(value.values()))]
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray | np.generic):
            return self._array(value)
        return self._object(value)

    def _object(self, value: Any) -> Any:
        if isinstance(value, PurePath):
            return ["path", str(value)]
        if isinstance(value, torch.dtype):
            return ["dtype", str(value).removeprefix("torch.")]
        if isinstance(value, partial):
            return ["partial", self.pack(value.func), self.pack(value.args), self.pack(value.keywords)]
        if _may_be_named(value):
            return ["named", _name_of(value)]
        kind = type(value)
        if not _is_data(kind):
            name = getattr(value, "__qualname__", None)
            raise TypeError(
                f"{name or f'a {kind.__qualname__}'} cannot be sent to a worker; send plain values, tensors, arrays, "
                "or decorate the function or class with headrace.distributed.worker_groups.registered"
            )
        state = value.value if isinstance(value, Enum) else value.__getstate__()
        return ["object", _name_of(kind), self.pack(state)]

    def _tensor(self, value: torch.Tensor) -> Any:
        """Return a tensor's node; one that appears twice has one."""
        if id(value) not in self._tensors:
            self._tensors[id(value)] = (value, self._new_tensor(value))
        return self._tensors[id(value)][1]

    def _new_tensor(self, value: torch.Tensor) -> Any:
        if value.is_nested and value.layout == torch.jagged:
            values, offsets, ragged_dim, _ = take_apart(value, self._read)
            return ["jagged", self.pack(values), self.pack(offsets), ragged_dim]
        plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided
        if not plain or value.is_nested or value.is_quantized:
            raise TypeError(
                f"a {type(value).__qualname__} of layout {value.layout} cannot be sent to a worker"
            )
        self.buffers.append(byte_view(value.detach().cpu()))
        return ["tensor", len(self.buffers) - 1, str(value.dtype).removeprefix("torch."), list(value.shape)]

    def _array(self, value: Any) -> Any:
        array = np.asarray(value)
        is_masked = isinstance(value, np.ma.MaskedArray)
        if array.dtype == object and not is_masked:
            return ["objects", list(array.shape), self.pack(array.ravel().tolist())]
        # What goes is the dtype's short name, which says nothing of fields.
        if is_masked or array.dtype.hasobject or np.dtype(array.dtype.str) != array.dtype:
            kind = "a masked array" if is_masked else "an array"
            raise TypeError(f"{kind} of dtype {array.dtype} cannot be sent to a worker")
        # A copy where there are no dimensions, which have no other view as bytes.
        flat = array.tobytes() if array.ndim == 0 else np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.buffers.append(np.frombuffer(flat, np.uint8))
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return [kind, len(self.buffers) - 1, array.dtype.str, list(array.shape)]


class _Unpacker:
    def __init__(self, buffers: Sequence[Bytes]) -> None:
        self._buffers = buffers
        self._tensors: dict[int, torch.Tensor] = {}

    def unpack(self, node: Any) -> Any:
        if type(node) is not list:
            return node
        kind, *rest = node
        if kind in _BUILDERS:
            is_plain, items = rest
            return _BUILDERS[kind](items if is_plain else map(self.unpack, items))
        return getattr(self, f"_{kind}")(*rest)

    def _dict(self, keys: Any, values: Any) -> Any:
        return dict(zip(self.unpack(keys), self.unpack(values)))

    def _records(self, names: Any, columns: Any) -> Any:
        keys = self.unpack(names)
        return [dict(zip(keys, row)) for row in zip(*map(self.unpack, columns), strict=True)]

    def _path(self, text: str) -> Any:
        return Path(text)

    def _dtype(self, name: str) -> Any:
        return getattr(torch, name)

    def _partial(self, function: Any, args: Any, keywords: Any) -> Any:
        return partial(self.unpack(function), *self.unpack(args), **self.unpack(keywords))

    def _named(self, name: str) -> Any:
        if not _may_be_named(found := _look_up(name)):
            raise TypeError(f"'{name}' came from another process and is not registered here")
        return found

    def _object(self, name: str, state: Any) -> Any:
        if not _is_data(kind := _look_up(name)):
            raise TypeError(
                f"an object of '{name}' came from another process; the class is not registered here"
            )
        if issubclass(kind, Enum):
            return kind(self.unpack(state))
        made = kind.__new__(kind)
        if issubclass(kind, BaseModel):
            made.__setstate__(self.unpack(state))
        else:
            made.__dict__.update(self.unpack(state) or {})
        return made

    def _tensor(self, index: int, dtype: str, shape: list[int]) -> torch.Tensor:
        if index not in self._tensors:
            kind, buffer = getattr(torch, dtype), _writable(self._buffers[index])
            empty = torch.empty(shape, dtype=kind)
            self._tensors[index] = torch.from_numpy(buffer).view(kind).view(shape) if buffer.nbytes else empty
        return self._tensors[index]

    def _jagged(self, values: Any, offsets: Any, ragged_dim: int) -> torch.Tensor:
        return nested_from_ragged(self.unpack(values), self.unpack(offsets), ragged_dim)

    def _array(self, index: int, dtype: str, shape: list[int]) -> Any:
        return _writable(self._buffers[index]).view(np.dtype(dtype)).reshape(shape)

    def _scalar(self, index: int, dtype: str, shape: list[int]) -> Any:
        return self._array(index, dtype, shape)[()]

    def _objects(self, shape: list[int], items: Any) -> Any:
        return object_array(self.unpack(items)).reshape(shape)


def _is_plain(items: Collection[Any]) -> bool:
    """Return whether there are but plain values and lists of such, which msgpack takes as they are."""
    kinds = set(map(type, items)) - _PLAIN
    return not kinds or (kinds == {list} and _is_plain([x for i in items if type(i) is list for x in i]))


def _name_of(value: Any) -> str:
    name = f"{value.__module__}:{value.__qualname__}"
    return name.removeprefix("headrace") if name.startswith("headrace.") else name


def _look_up(name: str) -> Any:
    return resolve_name(f"headrace{name}" if name.startswith(".") else name)


def _shared_keys(items: list[Any]) -> list[Any]:
    """Return the keys, texts, of two dicts or more that have the same in the same order; none if others are there."""
    if len(items) < 2 or any(type(item) is not dict for item in items):
        return []
    keys = list(items[0])
    # Others may be equal and not the same, as 1 and True are.
    are_texts = set(map(type, keys)) == {str}
    return keys if are_texts and all(map(keys.__eq__, map(list, items))) else []


def _may_be_named(value: Any) -> bool:
    """Return whether a function or class is registered; errors of Python and headrace are."""
    if isinstance(value, type) and issubclass(value, Exception):
        return value.__module__ in ("builtins", "headrace.errors")
    return callable(value) and hasattr(value, "__qualname__") and value in _REGISTERED


def _is_data(kind: Any) -> bool:
    if not isinstance(kind, type):
        return False
    return kind.__module__.startswith("headrace.") or kind in _REGISTERED


def _writable(buffer: Bytes) -> Bytes:
    return buffer if buffer.flags.writeable else buffer.copy()

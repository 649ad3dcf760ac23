"""Values on their way to another process: a pickle of the structure, tensors and arrays beside it as raw bytes.

A tensor sends the elements it shows, not the storage behind it, and arrives detached, contiguous, on the CPU.
"""

import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_FILE_BYTES = 1 << 20
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Payload:
    """An encoded value; `buffers` are its tensors and arrays in the order of their appearance."""

    head: bytes
    buffers: Sequence[Bytes]

    @property
    def nbytes(self) -> int:
        return len(self.head) + sum(b.nbytes for b in self.buffers)


def encode(value: Any) -> Payload:
    """Encode a value; buffers share memory with it where they can.

    Raises:
        pickle.PicklingError, TypeError, AttributeError: a value that cannot be pickled.
    """
    buffers: list[Bytes] = []

    def keep(buffer: pickle.PickleBuffer) -> None:
        buffers.append(np.frombuffer(buffer.raw(), dtype=np.uint8))

    head = BytesIO()
    _Pickler(head, protocol=5, buffer_callback=keep).dump(value)
    return Payload(head.getvalue(), buffers)


def decode(payload: Payload) -> Any:
    """Return the value; its tensors own their memory or share the payload's, and can be written to."""
    return pickle.loads(payload.head, buffers=[_writable(b) for b in payload.buffers])


def send(connection: "Connection[Any, Any]", message: Any) -> None:
    """Send one message; `receive` on the other end returns it.

    A buffer of _FILE_BYTES or more goes as the descriptor of an anonymous memory file, which has no name to
    leave behind: two copies of the bytes in place of many small ones through the pipe.
    """
    payload = encode(message)
    connection.send_bytes(pickle.dumps((payload.head, [b.nbytes for b in payload.buffers])))
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
    head, sizes = pickle.loads(connection.recv_bytes())
    return decode(Payload(head, [_receive_buffer(connection, size) for size in sizes]))


def _as_file(nbytes: int) -> bool:
    return nbytes >= _FILE_BYTES and hasattr(os, "memfd_create")


def _send_memory(connection: "Connection[Any, Any]", buffer: Bytes) -> None:
    file = os.memfd_create("headrace")
    try:
        rest = buffer.data
        while rest.nbytes:
            rest = rest[os.write(file, rest) :]
        send_handle(connection, file, None)
    finally:
        os.close(file)


def _receive_buffer(connection: "Connection[Any, Any]", nbytes: int) -> Bytes:
    buffer = np.empty(nbytes, dtype=np.uint8)
    if _as_file(nbytes):
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


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        plain = type(value) is torch.Tensor and value.layout == torch.strided
        if not plain or value.is_nested or value.is_quantized:
            return NotImplemented
        dense = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        flat = dense.reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(flat), dense.dtype, tuple(dense.shape))


def _tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not memoryview(buffer).nbytes:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(shape)


def _writable(buffer: Bytes) -> Bytes:
    return buffer if buffer.flags.writeable else buffer.copy()

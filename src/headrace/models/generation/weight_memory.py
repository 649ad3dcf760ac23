"""Memory that trainer and engine both see, on one host, for weights.

The bytes lie in an anonymous memory file or, for engines on a GPU, in memory of that GPU, which the engine opens by
CUDA's IPC. Messages beside it say what lies where. A half is written again when all engines have taken a copy.

Source: torch.multiprocessing.reductions, for CUDA's IPC handles.
"""

import mmap
import os
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from headrace.distributed.worker_groups import wire
from headrace.models.generation.weight_buckets import ALIGNMENT, HALVES, Bucket, unpack


class HostMemory:
    """Memory of this host that processes see who inherit `file`."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.file = _anonymous_file()
        os.ftruncate(self.file, max(HALVES * capacity, ALIGNMENT))  # there is no map of nothing
        self.data = _mapped(self.file)

    def handle(self) -> None:
        """Return what tells an engine where to look beyond the file that it has."""

    def ways(self, count: int) -> list[str]:
        """Return the path by which processes of this user that have not inherited the file can open it, for each."""
        return [f"/proc/{os.getpid()}/fd/{self.file}"] * count

    def close(self) -> None:
        os.close(self.file)


class DeviceMemory:
    """Memory of a GPU that processes see who get its handle; freed when they and this have let go of it."""

    def __init__(self, capacity: int, device: int | None = None) -> None:
        """Take memory of a device, None: of the current one."""
        self.capacity = capacity
        on = torch.cuda.current_device() if device is None else device
        self.data = torch.empty(HALVES * capacity, dtype=torch.uint8, device=torch.device("cuda", on))

    def ways(self, count: int) -> list[list[Any]]:
        # A handle counts who has let go of it, and so is for one process.
        return [self.handle() for _ in range(count)]

    def close(self) -> None:
        """Let go of the memory."""
        del self.data
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]

    def handle(self) -> list[Any]:
        _, arguments = reduce_tensor(self.data)  # type: ignore[no-untyped-call]
        # Without the classes and the dtype, which are known, and the device, which the other side numbers for itself.
        return [tuple(arguments[1]), tuple(arguments[2]), arguments[3], *arguments[7:]]


def opened_memory(way: str | list[Any]) -> torch.Tensor:
    """Return the memory of another process, of which `way` came."""
    if isinstance(way, list):
        return _opened(way)
    file = os.open(way, os.O_RDWR)
    try:
        return _mapped(file)
    finally:
        os.close(file)


def _opened(handle: list[Any]) -> torch.Tensor:
    size, stride, offset, *rest = handle
    device = torch.cuda.current_device()
    opened: torch.Tensor = rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
        torch.Tensor,
        tuple(size),
        tuple(stride),
        offset,
        torch.storage.TypedStorage,
        torch.uint8,
        device,
        *rest,
    )
    return opened


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("headrace-weights")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _mapped(file: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)


class Receiver:
    """The engine's end. `copy_s` are the seconds that its copies have taken."""

    def __init__(self, connection: "Connection[Any, Any]", file: int) -> None:
        self._connection, self._file = connection, file
        self.copy_s = 0.0

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that come through the memory of an opening message, copied, until there is a None."""
        return unpack(self._arrivals())

    def _arrivals(self) -> Iterator[tuple[Bucket, torch.Tensor]]:
        handle = wire.receive(self._connection)
        memory = _mapped(self._file) if handle is None else _opened(handle)
        while (bucket := wire.receive(self._connection)) is not None:
            data = self._copy(memory[bucket.start : bucket.start + bucket.nbytes])
            wire.send(self._connection, bucket.index)
            yield bucket, data

    def _copy(self, data: torch.Tensor) -> torch.Tensor:
        _wait_for(data.device)
        started = time.perf_counter()
        copied = data.clone()
        _wait_for(data.device)
        self.copy_s += time.perf_counter() - started
        return copied


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""Weights on their way to engines of this host: buckets in memory that both sides see, with checksums.

The bytes lie in an anonymous memory file or, for engines on a GPU, in memory of that GPU, which the engine opens by
CUDA's IPC. Messages beside it say what lies where. A bucket is written again when all engines have taken a copy.

Source: torch.multiprocessing.reductions, for CUDA's IPC handles.
"""

import mmap
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from headrace.distributed.worker_groups import wire
from headrace.errors import GenerationError

BUCKET_BYTES = 256 << 20
_HALVES = 2
_ALIGNMENT = 256
_COLUMNS = 4096
NamedTensors = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies in its bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Bucket:
    """Tensors that lie together, from byte `start` of the memory on; `checksum` is of these `nbytes`."""

    index: int
    start: int
    nbytes: int
    entries: list[Entry]
    checksum: tuple[int, int]


def checksum(data: torch.Tensor) -> tuple[int, int]:
    """Return two sums over bytes (n, a multiple of 8) as 64-bit words, each weighted by where they stand.

    Words stand in rows; one sum is weighted by column, the other by row, so that changed words and words in another
    place show.
    """
    words = data.view(torch.int64)
    whole = len(words) // _COLUMNS * _COLUMNS
    table, rest = words[:whole].view(-1, _COLUMNS), words[whole:]
    by_column, by_row = table.sum(0), table.sum(1)
    return _weighted(by_column) + _weighted(rest), _weighted(by_row) + 3 * _weighted(rest)


def _weighted(words: torch.Tensor) -> int:
    weights = torch.arange(1, 2 * len(words) + 1, 2, device=words.device)
    return int((words * weights).sum()) % 2**61


def bucket_capacity(sizes: Sequence[int], bucket_bytes: int = BUCKET_BYTES) -> int:
    """Return the bytes of a bucket that holds the largest of tensors of `sizes` bytes, or all of them if they fit."""
    aligned = [_aligned(size) for size in sizes]
    return max(min(bucket_bytes, sum(aligned)), max(aligned, default=0), _ALIGNMENT)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class HostMemory:
    """Memory of this host that processes see who inherit `file`."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.file = _anonymous_file()
        os.ftruncate(self.file, max(_HALVES * capacity, _ALIGNMENT))  # there is no map of nothing
        self.data = _mapped(self.file)

    def handle(self) -> None:
        """Return what tells an engine where to look beyond the file that it has."""

    def close(self) -> None:
        os.close(self.file)


class DeviceMemory:
    """Memory of a GPU that processes see who get its handle; freed when they and this have let go of it."""

    def __init__(self, capacity: int, device: int) -> None:
        self.capacity = capacity
        self.data = torch.empty(_HALVES * capacity, dtype=torch.uint8, device=torch.device("cuda", device))

    def handle(self) -> list[Any]:
        _, arguments = reduce_tensor(self.data)  # type: ignore[no-untyped-call]
        # Without the classes and the dtype, which are known, and the device, which the other side numbers for itself.
        return [tuple(arguments[1]), tuple(arguments[2]), arguments[3], *arguments[7:]]


def _opened(file: int, handle: list[Any] | None) -> torch.Tensor:
    if handle is None:
        return _mapped(file)
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


def sent_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return `dtype` for matrices; vectors, such as norms and biases, keep theirs."""
    return dtype if tensor.is_floating_point() and tensor.ndim > 1 else tensor.dtype


def pack(
    named_tensors: NamedTensors, memory: torch.Tensor, capacity: int, dtype: torch.dtype
) -> Iterator[Bucket]:
    """Write tensors into the halves of `memory` by turns, and yield a bucket when one is full.

    They become what `sent_dtype` says. A half is written again after two more
    steps of the iterator.
    """
    index, used, entries = 0, 0, list[Entry]()

    def finished() -> Bucket:
        data = memory[start : start + used]
        return Bucket(index, start, used, entries, checksum(data))

    start = 0
    for name, tensor in named_tensors:
        kind = sent_dtype(tensor, dtype)
        nbytes = tensor.numel() * kind.itemsize
        if nbytes > capacity:
            raise GenerationError(f"weight {name} has {nbytes} bytes, more than a bucket's {capacity}")
        if entries and used + nbytes > capacity:
            yield finished()
            index, used, entries = index + 1, 0, []
            start = index % _HALVES * capacity
        part = memory[start + used : start + used + nbytes]
        part.view(kind).view(tensor.shape).copy_(tensor, non_blocking=False)
        entries.append(Entry(name, kind, tuple(tensor.shape), used))
        end = _aligned(used + nbytes)
        memory[start + used + nbytes : start + end].zero_()
        used = end
    if entries:
        yield finished()


class Receiver:
    """The engine's end. `copy_s` are the seconds that its copies have taken."""

    def __init__(self, connection: "Connection[Any, Any]", file: int) -> None:
        self._connection, self._file = connection, file
        self.copy_s = 0.0

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that come through the memory of an opening message, copied, until there is a None.

        Raises:
            GenerationError: bytes that are not those that were sent.
        """
        memory = _opened(self._file, wire.receive(self._connection))
        while (bucket := wire.receive(self._connection)) is not None:
            data = self._copy(memory[bucket.start : bucket.start + bucket.nbytes])
            if (found := checksum(data)) != tuple(bucket.checksum):
                raise GenerationError(
                    f"weights of bucket {bucket.index} ({bucket.entries[0].name} and {len(bucket.entries) - 1} more) "
                    f"arrived with checksum {found} in place of {tuple(bucket.checksum)}; the memory between trainer "
                    "and engine is damaged, or was written too early"
                )
            wire.send(self._connection, bucket.index)
            for entry in bucket.entries:
                size = torch.Size(entry.shape).numel() * entry.dtype.itemsize
                flat = data[entry.offset : entry.offset + size].view(entry.dtype)
                yield entry.name, flat.view(entry.shape)

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

"""Weights on their way to engines: tensors side by side in buckets, with checksums.

`pack` fills buckets of memory that has two halves, by turns; `unpack` is the other end. How the bytes go is a matter of
`weight_memory` (both ends see the same memory) or `weight_group` (a broadcast).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from headrace.errors import GenerationError

BUCKET_BYTES = 256 << 20
HALVES = 2
ALIGNMENT = 256
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
    sums = torch.stack([_weighted(part) for part in (table.sum(0), table.sum(1), rest)])
    by_column, by_row, left = (value % 2**61 for value in sums.tolist())  # the one wait for a GPU
    return by_column + left, by_row + 3 * left


def _weighted(words: torch.Tensor) -> torch.Tensor:
    return (words * torch.arange(1, 2 * len(words) + 1, 2, device=words.device)).sum()


def bucket_capacity(sizes: Sequence[int], bucket_bytes: int = BUCKET_BYTES) -> int:
    """Return the bytes of a bucket that holds the largest of tensors of `sizes` bytes, or all of them if they fit."""
    aligned = [_aligned(size) for size in sizes]
    return max(min(bucket_bytes, sum(aligned)), max(aligned, default=0), ALIGNMENT)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def sent_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return `dtype` for matrices; vectors, such as norms and biases, keep theirs."""
    return dtype if tensor.is_floating_point() and tensor.ndim > 1 else tensor.dtype


def pack(
    named_tensors: NamedTensors, memory: torch.Tensor, capacity: int, dtype: torch.dtype
) -> Iterator[Bucket]:
    """Write tensors into the halves of `memory` by turns, and yield a bucket when one is full.

    They become what `sent_dtype` says. A half is written again after two more
    steps of the iterator. A bucket is full with BUCKET_BYTES, also where one of `capacity` bytes holds a larger tensor.
    """
    index, used, entries = 0, 0, list[Entry]()
    full = min(capacity, BUCKET_BYTES)

    def finished() -> Bucket:
        data = memory[start : start + used]
        return Bucket(index, start, used, entries, checksum(data))

    start = 0
    for name, tensor in named_tensors:
        kind = sent_dtype(tensor, dtype)
        nbytes = tensor.numel() * kind.itemsize
        if nbytes > capacity:
            raise GenerationError(f"weight {name} has {nbytes} bytes, more than a bucket's {capacity}")
        if entries and used + nbytes > full:
            yield finished()
            index, used, entries = index + 1, 0, []
            start = index % HALVES * capacity
        part = memory[start + used : start + used + nbytes]
        part.view(kind).view(tensor.shape).copy_(tensor, non_blocking=False)
        entries.append(Entry(name, kind, tuple(tensor.shape), used))
        end = _aligned(used + nbytes)
        memory[start + used + nbytes : start + end].zero_()
        used = end
    if entries:
        yield finished()


def unpack(arrivals: Iterable[tuple[Bucket, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of buckets that have come with their bytes, as views of these.

    Raises:
        GenerationError: bytes that are not those that were sent.
    """
    for bucket, data in arrivals:
        if (found := checksum(data)) != tuple(bucket.checksum):
            raise GenerationError(
                f"weights of bucket {bucket.index} ({bucket.entries[0].name} and {len(bucket.entries) - 1} more) "
                f"arrived with checksum {found} in place of {tuple(bucket.checksum)}; they were damaged on their way, "
                "or written too early"
            )
        for entry in bucket.entries:
            size = torch.Size(entry.shape).numel() * entry.dtype.itemsize
            yield entry.name, data[entry.offset : entry.offset + size].view(entry.dtype).view(entry.shape)

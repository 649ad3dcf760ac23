"""A put's columns as one flat buffer, cut into blocks that can be stored and fetched one by one.

A block holds consecutive rows of one column; a column has as many blocks as keep the bytes of a block between
`MIN_BLOCK_BYTES` and `MAX_BLOCK_BYTES` and a sixteenth of the column, so that a reader of some rows moves
little more than it needs. What the rows are (dtype, shape, kind) is not in the block: a `BlockInfo` says it.

Wire, little-endian, every part padded to 16 bytes so that any dtype can be viewed in place: header (magic,
version, whether there are offsets, rows, bytes of values, a number drawn for this block), row offsets (int64,
rows + 1; ragged and object rows only), values.
"""

import secrets
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.data_plane.adapters.local_chunks import Buffers, Chunk, Form, chunk_from_buffers
from headrace.data_plane.schema import INPUT_IDS, INPUT_LENGTHS
from headrace.errors import TransportError

MIN_BLOCK_BYTES = 512 * 1024
MAX_BLOCK_BYTES = 4 * 1024 * 1024
_BLOCKS_PER_COLUMN = 16

_HEADER = struct.Struct("<4sHHqqQ")
_MAGIC, _VERSION = b"HRPB", 1
_ALIGN = 16

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]


class BlockError(TransportError):
    """A block that the transport does not have, or whose bytes are not its own."""


class BlockInfo(NamedTuple):
    """What a reader needs to know of a block before it has its bytes.

    `key` names it for good, `slot` is where the transport put it: a slot may be used again after a drop, which
    `number`, drawn for this block, tells.
    """

    key: str
    number: int
    form: Form
    rows: int
    nbytes: int
    slot: int = -1
    row_lengths: Ints | None = None
    """Tokens per row, of the columns that say how long samples are."""


@dataclass(frozen=True)
class PackedColumns:
    """The blocks of a put: block i of `blocks` is `buffer[bounds[i] : bounds[i + 1]]`."""

    buffer: torch.Tensor
    bounds: list[int]
    columns: dict[str, list[BlockInfo]]

    def placed(self, slots: Sequence[int]) -> dict[str, list[BlockInfo]]:
        """Return the columns' blocks with the slots that the transport gave, in the order of `blocks`."""
        given = iter(slots)
        return {
            name: [block._replace(slot=next(given)) for block in blocks]
            for name, blocks in self.columns.items()
        }

    @property
    def blocks(self) -> list[BlockInfo]:
        """All blocks, in the order of their bytes."""
        return [block for blocks in self.columns.values() for block in blocks]


def pack(chunks: Mapping[str, Chunk], key_prefix: str) -> PackedColumns:
    """Copy columns into one buffer; block i gets the key `<key_prefix>.<i>`."""
    plans = [(name, chunk, part) for name, chunk in chunks.items() for part in _parts(chunk)]
    bounds = np.cumsum([0, *(part.nbytes for _, _, part in plans)]).tolist()
    buffer = np.empty(bounds[-1], np.uint8)
    columns: dict[str, list[BlockInfo]] = {name: [] for name in chunks}
    for index, (name, chunk, part) in enumerate(plans):
        number = secrets.randbits(64)
        part.write(buffer[bounds[index] : bounds[index + 1]], number)
        lengths = _row_lengths(name, chunk, part)
        block = BlockInfo(
            f"{key_prefix}.{index}", number, chunk.form, part.rows, part.nbytes, row_lengths=lengths
        )
        columns[name].append(block)
    return PackedColumns(torch.from_numpy(buffer), bounds, columns)


def unpack(block: BlockInfo, data: torch.Tensor) -> Chunk:
    """Return the rows of a block around its bytes.

    Raises:
        BlockError: bytes that are not those of this block.
    """
    if data.dtype != torch.uint8 or data.dim() != 1 or len(data) != block.nbytes:
        raise BlockError(
            f"block '{block.key}' came back as {data.dtype} of shape {tuple(data.shape)}; expected {block.nbytes} bytes"
        )
    header = _HEADER.unpack(data[: _HEADER.size].numpy().tobytes())
    magic, version, has_offsets, rows, value_bytes, number = header
    if (magic, version, rows, number) != (_MAGIC, _VERSION, block.rows, block.number):
        raise BlockError(f"block '{block.key}' came back with the bytes of another block")
    start, offsets = _HEADER.size, None
    if has_offsets:
        offsets = data[start : start + 8 * (rows + 1)].view(torch.int64)
        start += _padded(8 * (rows + 1))
    return chunk_from_buffers(block.form, rows, data[start : start + value_bytes], offsets)


class _Part(NamedTuple):
    """Rows start .. stop - 1 of a column's buffers."""

    source: Buffers
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def offsets(self) -> torch.Tensor | None:
        """Return the row offsets, counted from the part's first row."""
        if self.source.offsets is None:
            return None
        mine = self.source.offsets[self.start : self.stop + 1]
        return mine - mine[0]

    @property
    def span(self) -> tuple[int, int]:
        """Return the bytes of `values` that are the part's."""
        offsets, unit = self.source.offsets, self.source.unit
        if offsets is None:
            return self.start * unit, self.stop * unit
        return int(offsets[self.start]) * unit, int(offsets[self.stop]) * unit

    @property
    def nbytes(self) -> int:
        start, stop = self.span
        offset_bytes = 0 if self.source.offsets is None else _padded(8 * (self.rows + 1))
        return _HEADER.size + offset_bytes + _padded(stop - start)

    def write(self, target: Bytes, number: int) -> None:
        """Fill `target`, which has `nbytes`."""
        first, last = self.span
        offsets = self.offsets
        fields = (_MAGIC, _VERSION, int(offsets is not None), self.rows, last - first, number)
        target[: _HEADER.size] = np.frombuffer(_HEADER.pack(*fields), np.uint8)
        start = _HEADER.size
        if offsets is not None:
            size = 8 * (self.rows + 1)
            target[start : start + size] = offsets.numpy().view(np.uint8)
            target[start + size : start + _padded(size)] = 0
            start += _padded(size)
        # NumPy's copy is one memcpy; torch's wakes its thread pool.
        target[start : start + last - first] = self.source.values[first:last].numpy()
        target[start + last - first :] = 0


def _parts(chunk: Chunk) -> Iterator[_Part]:
    source = chunk.buffers()
    if source.offsets is None:
        ends = np.arange(len(chunk) + 1, dtype=np.int64) * source.unit
    else:
        ends = source.offsets.numpy() * source.unit
    for start, stop in pairwise(_cuts(ends - ends[0])):
        yield _Part(source, start, stop)


def _cuts(ends: Ints) -> Sequence[int]:
    """Return the rows at which blocks start, and the number of rows."""
    rows, total = len(ends) - 1, int(ends[-1])
    size = min(max(total // _BLOCKS_PER_COLUMN, MIN_BLOCK_BYTES), MAX_BLOCK_BYTES)
    inner = np.searchsorted(ends, np.arange(size, total, size), side="left")
    cuts: list[int] = np.unique(np.concatenate([[0], inner, [rows]])).tolist()
    return cuts


def _row_lengths(name: str, chunk: Chunk, part: _Part) -> Ints | None:
    if name == INPUT_IDS and chunk.form.kind == "ragged" and part.offsets is not None:
        return part.offsets.diff().numpy()
    if name == INPUT_LENGTHS and chunk.form.kind == "dense" and chunk.form.dtype is not None:
        return part.source.values[slice(*part.span)].view(chunk.form.dtype).to(torch.int64).numpy()
    return None


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN

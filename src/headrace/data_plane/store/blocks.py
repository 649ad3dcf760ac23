"""A put's columns cut into blocks, which are stored and fetched one by one.

A block holds consecutive rows of one column; a column has as many blocks as keep the bytes of a block between
`MIN_BLOCK_BYTES` and `MAX_BLOCK_BYTES` and a sixteenth of the column, so that a reader of some rows moves
little more than it needs. What the rows are (dtype, shape, kind) is not in the block: a `BlockInfo` says it.

A block is two frames of bytes, a head and the values, which are the caller's own memory: a transport that sends
both copies nothing. Head, little-endian, every part padded to 16 bytes: magic, version, whether there are offsets,
rows, bytes of values, a number drawn for this block, bytes of a token (or of a row, if all are alike); then the
row offsets in tokens (int64, rows + 1; ragged and object rows only).
"""

import secrets
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.data_plane.store.columns import (
    Chunk,
    Column,
    Form,
    Places,
    Rows,
    Slots,
    chunk_of_bytes,
    read_rows,
)
from headrace.distributed.ragged import gather_spans, offsets_from_lengths
from headrace.distributed.ragged_cpu import Bytes, Ints
from headrace.errors import TransportError

MIN_BLOCK_BYTES = 512 * 1024
MAX_BLOCK_BYTES = 4 * 1024 * 1024
_BLOCKS_PER_COLUMN = 16
_BLOCKS_PER_CALL = 4096
_BYTES_PER_CALL = 256 * 1024 * 1024

_HEADER = struct.Struct("<4sHHqqQq")
_MAGIC, _VERSION = b"HRPB", 2
_ALIGN = 16


class BlockError(TransportError):
    """A block that the transport does not have, or whose bytes are not its own."""


class BlockInfo(NamedTuple):
    """What a reader needs to know of a block before it has its bytes.

    `number`, drawn for this block, names it for good; `slot` is where the transport put it, and may be used again after
    a drop.
    """

    number: int
    form: Form
    rows: int
    nbytes: int
    slot: int = -1

    @property
    def flat_bytes(self) -> int:
        return _padded(self.nbytes)

    def shrunk(self, rows: Rows) -> None:
        """Return None: a block goes as a whole."""


BLOCK_FACTS = np.dtype([("number", "<u8"), ("rows", "<i8"), ("nbytes", "<i8"), ("slot", "<i8")])
BlockTable = NDArray[np.void]
"""Blocks of one form as an array of `BLOCK_FACTS`, which costs nothing per block to pick from and to send."""


class BlockColumn(Column[BlockInfo]):
    """A column whose blocks lie elsewhere, with a table of them by the numbers that the column gives them."""

    def __init__(self) -> None:
        super().__init__()
        self._table: BlockTable = np.empty(0, BLOCK_FACTS)

    def _keep(self, number: int, block: BlockInfo) -> None:
        super()._keep(number, block)
        if number >= len(self._table):
            self._table = np.concatenate([self._table, np.empty(max(number, 16), BLOCK_FACTS)])
        self._table[number] = (block.number, block.rows, block.nbytes, block.slot)

    def told(self, slots: Slots) -> tuple[BlockTable, Places]:
        """Return what `select` returns, the blocks as a table."""
        numbers, places = self.find(slots)
        return self._table[numbers], places


class Frames(NamedTuple):
    """The bytes of a block, flat uint8 each."""

    head: torch.Tensor
    values: torch.Tensor

    @classmethod
    def split(cls, flat: torch.Tensor) -> Self:
        """Return the frames of a block that lies in one piece, sharing its memory.

        Raises:
            BlockError: bytes that are none of a block.
        """
        start = _Head.read(flat).size
        return cls(flat[:start], flat[start:])


@dataclass(frozen=True)
class PackedColumns:
    """The blocks of a put, and the frames of each in the order of `blocks`; values share the columns' memory."""

    columns: dict[str, list[BlockInfo]]
    blocks: list[BlockInfo]
    frames: list[Frames]

    @cached_property
    def bounds(self) -> list[int]:
        """Where each block begins in `buffer`, and its end."""
        return [0, *accumulate(block.flat_bytes for block in self.blocks)]

    @cached_property
    def buffer(self) -> torch.Tensor:
        """A copy of all blocks in one piece each: block i is `buffer[bounds[i] : bounds[i + 1]]`."""
        buffer = np.empty(self.bounds[-1], np.uint8)
        for (start, stop), (head, values) in zip(pairwise(self.bounds), self.frames, strict=True):
            middle, end = start + len(head), start + len(head) + len(values)
            # NumPy's copy is one memcpy; torch's wakes its thread pool.
            buffer[start:middle], buffer[middle:end], buffer[end:stop] = head.numpy(), values.numpy(), 0
        return torch.from_numpy(buffer)


def placed(columns: Mapping[str, Sequence[BlockInfo]], slots: Sequence[int]) -> dict[str, list[BlockInfo]]:
    """Return the blocks of columns with the slots that the transport gave, in the order of `PackedColumns.blocks`."""
    given = iter(slots)
    return {name: [block._replace(slot=next(given)) for block in blocks] for name, blocks in columns.items()}


def pack(chunks: Mapping[str, Chunk], *, gives_rows: bool = False) -> PackedColumns:
    """Cut columns of a put into blocks.

    Blocks are as large as may be for a transport that gives single rows of them.
    """
    columns: dict[str, list[BlockInfo]] = {name: [] for name in chunks}
    blocks: list[BlockInfo] = []
    frames: list[Frames] = []
    smallest = MAX_BLOCK_BYTES if gives_rows else MIN_BLOCK_BYTES
    for name, chunk in chunks.items():
        data, unit, offsets = chunk.flat_bytes(), chunk.unit, chunk.offsets
        rows = np.arange(chunk.rows + 1, dtype=np.int64) if offsets is None else offsets.numpy()
        ends = rows * unit
        size = min(max(int(ends[-1] - ends[0]) // _BLOCKS_PER_COLUMN, smallest), MAX_BLOCK_BYTES)
        inner = np.searchsorted(ends, np.arange(ends[0] + size, ends[-1], size))
        for start, stop in pairwise(np.unique([0, *inner, len(ends) - 1]).tolist()):
            number, values = secrets.randbits(64), data[int(ends[start]) : int(ends[stop])]
            own = None if offsets is None else offsets[start : stop + 1] - offsets[start]
            head = torch.from_numpy(_head(stop - start, len(values), number, unit, own))
            blocks.append(BlockInfo(number, chunk.form, stop - start, len(head) + len(values)))
            columns[name].append(blocks[-1])
            frames.append(Frames(head, values))
    return PackedColumns(columns, blocks, frames)


def call_bounds(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Cut blocks into runs of bounded size, one for each call of a transport: (first, past last)."""
    runs, first, held = [], 0, 0
    for last, size in enumerate(sizes):
        if last > first and (last - first == _BLOCKS_PER_CALL or held + size > _BYTES_PER_CALL):
            runs.append((first, last))
            first, held = last, 0
        held += size
    return [*runs, (first, len(sizes))] if sizes else runs


def unpack(block: BlockInfo, data: torch.Tensor | Frames, rows: int | None = None) -> Chunk:
    """Return the rows of a block around its bytes; `rows` is how many `select_rows` has left of them.

    Raises:
        BlockError: bytes that are not those of this block.
    """
    if isinstance(data, torch.Tensor):
        if data.dtype != torch.uint8 or data.dim() != 1 or len(data) != block.flat_bytes:
            raise BlockError(
                f"block {block.number} came back as {data.dtype} of shape {tuple(data.shape)}; expected "
                f"{block.flat_bytes} bytes"
            )
        data = Frames.split(data)
    head = _Head.read(data.head)
    if (head.number, head.rows) != (block.number, block.rows if rows is None else rows):
        raise BlockError(f"block {block.number} came back with the bytes of another block")
    if len(data.values) < head.value_bytes or len(data.head) != head.size:
        raise BlockError(
            f"block {block.number} came back with {len(data.values)} bytes of values; expected {head.value_bytes}"
        )
    return chunk_of_bytes(block.form, head.rows, data.values[: head.value_bytes], head.offsets)


class BlockRead(NamedTuple):
    """How to read rows of a column: of each block all rows, or some; None in `places`: all, in order.

    Row i of the result is row `places[1][i]` of what comes of block `places[0][i]`.
    """

    form: Form
    blocks: list[BlockInfo]
    rows: list[Rows | None]
    places: Places

    @classmethod
    def of(cls, form: Form, table: BlockTable, places: Places, *, gives_rows: bool) -> Self:
        """Read from the blocks of a table.

        Single rows of a block are asked for if they are at most half of it, and the transport `gives_rows`.
        """
        blocks = [BlockInfo(number, form, *facts) for number, *facts in table.tolist()]
        rows: list[Rows | None] = [None] * len(blocks)
        if places is None:
            return cls(form, blocks, rows, None)
        block_of, row_of = (numbers.astype(np.int64) for numbers in places)
        if gives_rows:
            order = np.argsort(block_of, kind="stable")
            ends = np.cumsum(np.bincount(block_of, minlength=len(rows))).tolist()
            for number, (start, end) in enumerate(pairwise([0, *ends])):
                if 2 * (end - start) <= blocks[number].rows:
                    mine = order[start:end]
                    rows[number], row_of[mine] = row_of[mine], np.arange(end - start)
        return cls(form, blocks, rows, (block_of, row_of))

    def gather(self, data: Iterator[torch.Tensor | Frames]) -> Chunk:
        """Return the rows, in fresh memory, out of the next of the blocks that came.

        Raises:
            BlockError: bytes that are not those of a block.
        """
        chunks = [
            unpack(block, next(data), None if some is None else len(some))
            for block, some in zip(self.blocks, self.rows, strict=True)
        ]
        if not chunks:
            return chunk_of_bytes(self.form, 0, torch.empty(0, dtype=torch.uint8), None)
        return read_rows(chunks, self.places)


def select_rows(frames: Frames, rows: Ints) -> Frames:
    """Return a block of the same number with only `rows` of it, in that order.

    Raises:
        BlockError: bytes that are none of a block, or of one that does not have these rows.
    """
    head = _Head.read(frames.head)
    try:
        taken, offsets = _taken(frames.values, head, rows)
    except IndexError as error:
        raise BlockError(f"a block of {head.rows} rows is asked for others: {error}") from error
    new_head = _head(len(rows), len(taken), head.number, head.unit, offsets)
    return Frames(torch.from_numpy(new_head), taken)


def _taken(values: torch.Tensor, head: "_Head", rows: Ints) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the bytes of some rows of a block, and their offsets."""
    if head.offsets is None:
        whole = values.numpy()[: head.value_bytes].reshape(head.rows, head.unit)
        return torch.from_numpy(whole[rows].reshape(-1)), None
    bounds = head.offsets.numpy()
    starts, lengths = (torch.from_numpy(x) for x in (bounds[rows], bounds[rows + 1] - bounds[rows]))
    new_offsets = offsets_from_lengths(lengths)
    if not head.unit or not head.value_bytes:
        return values[:0], new_offsets
    tokens = values[: head.value_bytes].view(-1, head.unit)
    return gather_spans(tokens, starts, lengths).view(-1), new_offsets


class _Head(NamedTuple):
    """What the head of a block says."""

    size: int
    offsets: torch.Tensor | None
    rows: int
    value_bytes: int
    number: int
    unit: int

    @classmethod
    def read(cls, data: torch.Tensor) -> "_Head":
        if len(data) >= _HEADER.size:
            magic, version, has_offsets, rows, *rest = _HEADER.unpack(data[: _HEADER.size].numpy().tobytes())
            start, count = _padded(_HEADER.size), 8 * (rows + 1) if has_offsets else 0
            if (magic, version) == (_MAGIC, _VERSION) and len(data) >= start + count:
                offsets = data[start : start + count].view(torch.int64) if has_offsets else None
                return cls(start + _padded(count), offsets, rows, *rest)
        raise BlockError(f"{len(data)} bytes came back that are no block")


def _head(rows: int, value_bytes: int, number: int, unit: int, offsets: torch.Tensor | None) -> Bytes:
    start = _padded(_HEADER.size)
    head = np.zeros(start + (0 if offsets is None else _padded(8 * (rows + 1))), np.uint8)
    fields = (_MAGIC, _VERSION, int(offsets is not None), rows, value_bytes, number, unit)
    head[: _HEADER.size] = np.frombuffer(_HEADER.pack(*fields), np.uint8)
    if offsets is not None:
        head[start : start + 8 * (rows + 1)] = offsets.numpy().view(np.uint8)
    return head


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN

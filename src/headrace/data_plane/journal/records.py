"""Records of a journal as bytes: a frame, a head in msgpack, and the raw buffers of columns.

A frame is little-endian: bytes of the head (uint32), of the body (uint64), CRC-32 of the body, CRC-32 of the frame so
far and the head. Buffers begin at multiples of 16 bytes of the body: offsets first, then the values of each column.
"""

import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

import msgspec
import numpy as np
import torch

from headrace.data_plane.object_codec import decode
from headrace.data_plane.store.columns import Chunk, Form, Rows, chunk_of_bytes

_FRAME = struct.Struct("<IQII")
FRAME_BYTES = _FRAME.size
_CHECKED = _FRAME.size - 4
_ALIGN = 16


class ColumnHead(msgspec.Struct, array_like=True, frozen=True):
    """A column of a put: its form, which of the put's offsets it has, and the bytes of its values."""

    name: str
    kind: str
    dtype: str | None
    trailing: tuple[int, ...]
    ragged_dim: int
    offsets: int | None
    nbytes: int


class Head(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag=True):
    """What all records say: when they were written (ns since 1970, no two of a process alike), and the partition."""

    at: int
    partition: str


class Opened(Head, frozen=True, kw_only=True):
    """A partition was registered, which emptied it of what was put `before` that time.

    `enums` is a message of `object_codec`. `first`: it is the registration of then once more, which empties nothing.
    """

    before: int
    fields: list[str]
    num_samples: int
    tasks: list[str]
    group_size: int | None
    enums: bytes | None
    group_tag: str | None
    first: int | None = None


class Written(Head, frozen=True, kw_only=True):
    """Rows were put; `tags` is a message of `object_codec`, `offsets` the bytes of each."""

    ids: list[str]
    columns: list[ColumnHead]
    offsets: list[int]
    tags: bytes | None = None
    producer: str | None = None
    once: bool = False


class Undone(Head, frozen=True, kw_only=True):
    """The store did not take the put of time `of`."""

    ids: list[str]
    of: int


class Taken(Head, frozen=True, kw_only=True):
    """The store took the put of time `of`, by the same writer; of a put without it, nobody knows."""

    of: int


class Cleared(Head, frozen=True, kw_only=True):
    """Rows that were put `before` that time were cleared; `ids` None: the partition."""

    before: int
    ids: list[str] | None


class Consumed(Head, frozen=True, kw_only=True):
    """A task has had rows for good."""

    task: str
    ids: list[str]


class Listed(Head, frozen=True, kw_only=True):
    """The rows that are left of those that were put in files before the numbers `until`, by writer.

    `rows` are by partition and id, each with the tasks that have consumed it; `spent` are ids of rows that were put
    `once` and are gone, the latest of each partition. `partition` is none.
    """

    until: dict[str, int]
    rows: dict[str, dict[str, list[str]]]
    spent: dict[str, list[str]]


AnyHead = Opened | Written | Undone | Taken | Cleared | Consumed | Listed
HEAD_START = re.compile(
    rb"[\x90-\x9f](?:" + b"|".join(msgspec.msgpack.encode(kind.__name__) for kind in get_args(AnyHead)) + b")"
)
"""What every head begins with: an array, which names its kind first."""
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyHead] = msgspec.msgpack.Decoder(AnyHead)


class Frame(NamedTuple):
    """The sizes and checksum that a record begins with."""

    head_bytes: int
    body_bytes: int
    body_crc: int
    head_crc: int

    @property
    def nbytes(self) -> int:
        return FRAME_BYTES + self.head_bytes + self.body_bytes


def framed(head: AnyHead, body: Sequence[memoryview] = ()) -> list[memoryview]:
    """Return the buffers of a whole record."""
    packed = _encoder.encode(head)
    crc = 0
    for buffer in body:
        crc = zlib.crc32(buffer, crc)
    start = _FRAME.pack(len(packed), sum(len(buffer) for buffer in body), crc, 0)[:_CHECKED]
    checked = start + zlib.crc32(packed, zlib.crc32(start)).to_bytes(4, "little")
    return [memoryview(checked), memoryview(packed), *body]


def read_frame(data: bytes) -> Frame:
    return Frame(*_FRAME.unpack(data))


def read_head(frame: Frame, frame_data: bytes, packed: bytes) -> AnyHead | None:
    """Return the head; None if it is not what was written."""
    if zlib.crc32(packed, zlib.crc32(frame_data[:_CHECKED])) != frame.head_crc:
        return None
    try:
        return _decoder.decode(packed)
    except msgspec.MsgspecError:
        return None


def put_body(chunks: Mapping[str, Chunk]) -> tuple[list[ColumnHead], list[int], list[memoryview]]:
    """Return the columns of a put as they go into its head, the bytes of each offsets, and all buffers."""
    offsets: list[torch.Tensor] = []
    columns, values = [], []
    for name, chunk in chunks.items():
        place = None
        if chunk.offsets is not None:
            place = next((i for i, known in enumerate(offsets) if known is chunk.offsets), len(offsets))
            if place == len(offsets):
                offsets.append(chunk.offsets)
        data = chunk.flat_bytes().numpy().data
        values.append(data)
        form = chunk.form
        dtype = None if form.dtype is None else str(form.dtype).removeprefix("torch.")
        columns.append(ColumnHead(name, form.kind, dtype, form.trailing, form.ragged_dim, place, len(data)))
    own = [one.contiguous().view(torch.uint8).numpy().data for one in offsets]
    return columns, [len(one) for one in own], [part for one in (*own, *values) for part in _aligned(one)]


def _aligned(buffer: memoryview) -> list[memoryview]:
    gap = -len(buffer) % _ALIGN
    return [buffer, memoryview(bytes(gap))] if gap else [buffer]


def is_whole(frame: Frame, body: bytearray) -> bool:
    return zlib.crc32(body) == frame.body_crc


def read_put(
    head: Written, body: bytearray, rows: Rows
) -> tuple[list[str], dict[str, Chunk], list[dict[str, Any]] | None]:
    """Return ids, columns and tags of some rows of a put; columns may share the memory of `body`."""
    at, offsets = 0, []
    for size in head.offsets:
        offsets.append(torch.from_numpy(np.frombuffer(body, np.int64, size // 8, at)))
        at += size + -size % _ALIGN
    chunks = {}
    for column in head.columns:
        dtype = None if column.dtype is None else getattr(torch, column.dtype)
        form = Form(column.kind, dtype, column.trailing, column.ragged_dim)
        data = torch.from_numpy(np.frombuffer(body, np.uint8, column.nbytes, at))
        own = None if column.offsets is None else offsets[column.offsets]
        chunk = chunk_of_bytes(form, len(head.ids), data, own)
        chunks[column.name] = chunk if len(rows) == len(head.ids) else chunk.picked(rows)
        at += column.nbytes + -column.nbytes % _ALIGN
    tags = None if head.tags is None else decode(head.tags)
    kept = rows.tolist()
    return [head.ids[i] for i in kept], chunks, None if tags is None else [tags[i] for i in kept]

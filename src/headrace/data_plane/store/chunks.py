"""The rows of one put of one column, in one buffer: a chunk. Chunks never change, so readers need no lock."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from math import prod
from typing import ClassVar, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.data_plane.encoded_objects import messages_of
from headrace.data_plane.leaves import Leaf, Ragged, place_of
from headrace.data_plane.object_codec import ObjectArray, decode_column
from headrace.distributed.multimodal import PackedTensor
from headrace.distributed.ragged import byte_view, gather_dense, gather_rows, offsets_from_lengths, own_copy
from headrace.distributed.ragged_kernel import load_kernel

Rows = NDArray[np.int64]


class Form(NamedTuple):
    """What all rows of a column have in common."""

    kind: str
    dtype: torch.dtype | None = None
    trailing: tuple[int, ...] = ()
    ragged_dim: int = 1

    def __str__(self) -> str:
        if self.dtype is None:
            return self.kind
        shape = [str(size) for size in self.trailing]
        if self.kind == "ragged":
            shape.insert(self.ragged_dim - 1, "L")
        return f"{self.kind} {self.dtype} rows of shape ({', '.join(shape)})"


class RowBlock(ABC):
    """Rows of one form, here or elsewhere: what the bookkeeping of a store needs to know of them."""

    @property
    @abstractmethod
    def form(self) -> Form:
        """What the rows have in common."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that the rows occupy."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def shrunk(self, rows: Rows) -> Self | None:
        """Return only `rows`, in memory of their own; None if the block can only go as a whole."""


class Buffers(NamedTuple):
    """Rows as bytes: row i is `values[unit * offsets[i] : unit * offsets[i + 1]]`.

    `values` is flat uint8 in C order. Without `offsets` every row has `unit` bytes.
    """

    values: torch.Tensor
    offsets: torch.Tensor | None
    unit: int


class OwnOffsets:
    """Copies of offsets that several columns have in common: each is copied once, and the copy is shared."""

    def __init__(self) -> None:
        self._given: list[torch.Tensor] = []
        self._own: list[torch.Tensor] = []

    def copy_of(self, offsets: torch.Tensor) -> torch.Tensor:
        """Return offsets equal to these in fresh memory, or those that were returned for equal ones."""
        place = place_of(offsets, self._given)
        if place == len(self._own):
            self._own.append(offsets.clone())
        return self._own[place]


class Chunk(RowBlock):
    """Rows of one form, in memory; `kind` is that of the form."""

    kind: ClassVar[str]

    @property
    def ragged_dim(self) -> int:
        return 1

    @abstractmethod
    def buffers(self) -> Buffers:
        """Return the rows as CPU bytes, shared where they are contiguous there."""

    @abstractmethod
    def span(self, start: int, stop: int) -> Self:
        """Return rows start .. stop - 1, sharing memory."""

    @abstractmethod
    def gather(self, rows: Rows) -> Self:
        """Return rows in any order, repeats included, in fresh memory."""

    @abstractmethod
    def copy(self, shared: OwnOffsets | None = None) -> Self:
        """Return the same rows in CPU memory that is fresh, but for offsets that are `shared` with other copies."""

    @abstractmethod
    def join(self, others: Sequence[Self]) -> Self:
        """Return these rows and then those of `others` (one at least), in fresh memory."""

    def pick(self, others: Sequence[Self], chunk_of: Rows, row_of: Rows) -> Self | None:
        """Return row `row_of[i]` of chunk `chunk_of[i]`, 0 being these rows and 1 the first of `others`, in one copy.

        None: that takes more than one copy here.
        """
        return None

    @abstractmethod
    def leaf(self) -> torch.Tensor | ObjectArray | PackedTensor:
        """Return the column as a TensorDict carries it; tensors share memory."""

    @property
    def offsets(self) -> torch.Tensor | None:
        """Where rows of different lengths begin, and the last ends, in tokens; None: their length is not told so."""
        return None

    @abstractmethod
    def lengths(self) -> Rows:
        """Return one number per row: its length if the rows are ragged, else the rows as they are."""

    def shrunk(self, rows: Rows) -> Self | None:
        """Return only `rows`, in fresh memory."""
        return self.gather(rows)

    def with_shared_offsets(self, known: list[torch.Tensor]) -> Self:
        """Return the rows around an equal one of the `known` offsets objects, which learn of new ones."""
        return self


@dataclass(frozen=True)
class _DenseChunk(Chunk):
    """Rows of one shape: (n, ...)."""

    values: torch.Tensor
    kind = "dense"

    @cached_property
    def form(self) -> Form:
        return Form(self.kind, self.values.dtype, tuple(self.values.shape[1:]))

    @property
    def nbytes(self) -> int:
        return self.values.numel() * self.values.element_size()

    def __len__(self) -> int:
        return int(self.values.shape[0])

    def span(self, start: int, stop: int) -> "_DenseChunk":
        return _DenseChunk(self.values[start:stop])

    def gather(self, rows: Rows) -> "_DenseChunk":
        return _DenseChunk(gather_dense(self.values, torch.from_numpy(rows)))

    def copy(self, shared: OwnOffsets | None = None) -> "_DenseChunk":
        return _DenseChunk(own_copy(self.values))

    def join(self, others: Sequence[Self]) -> "_DenseChunk":
        return _DenseChunk(torch.cat([self.values, *(other.values for other in others)]))

    def pick(self, others: Sequence[Self], chunk_of: Rows, row_of: Rows) -> "_DenseChunk | None":
        unit = prod(self.values.shape[1:]) * self.values.element_size()
        sources = [chunk.values for chunk in (self, *others)]
        picked = _picked(sources, chunk_of, row_of * unit, np.full(len(row_of), unit))
        if picked is None:
            return None
        return _DenseChunk(picked.view(self.values.dtype).view(len(row_of), *self.values.shape[1:]))

    def leaf(self) -> torch.Tensor:
        return self.values

    def lengths(self) -> Rows:
        numbers: Rows = self.values.detach().cpu().reshape(-1).numpy()
        return numbers

    def buffers(self) -> Buffers:
        unit = prod(self.values.shape[1:]) * self.values.element_size()
        return Buffers(_as_bytes(self.values), None, unit)


@dataclass(frozen=True)
class _RaggedChunk(Chunk):
    """Rows of different lengths."""

    rows: Ragged
    kind = "ragged"

    @property
    def ragged_dim(self) -> int:
        return self.rows.ragged_dim

    @cached_property
    def form(self) -> Form:
        values = self.rows.values
        return Form(self.kind, values.dtype, tuple(values.shape[1:]), self.rows.ragged_dim)

    @property
    def nbytes(self) -> int:
        offsets, values = self.rows.offsets, self.rows.values
        return values.numel() * values.element_size() + offsets.numel() * offsets.element_size()

    def __len__(self) -> int:
        return self.rows.offsets.shape[0] - 1

    def span(self, start: int, stop: int) -> "_RaggedChunk":
        offsets = self.rows.offsets[start : stop + 1]
        values = self.rows.values[int(offsets[0]) : int(offsets[-1])]
        return self._with(values, offsets - offsets[0])

    def gather(self, rows: Rows) -> "_RaggedChunk":
        return self._with(*gather_rows(self.rows.values, self.rows.offsets, torch.from_numpy(rows)))

    def copy(self, shared: OwnOffsets | None = None) -> "_RaggedChunk":
        offsets = self.rows.offsets
        return self._with(own_copy(self.rows.values), shared.copy_of(offsets) if shared else offsets.clone())

    def join(self, others: Sequence[Self]) -> "_RaggedChunk":
        values = torch.cat([self.rows.values, *(other.rows.values for other in others)])
        lengths = torch.cat([chunk.rows.offsets.diff() for chunk in (self, *others)])
        return self._with(values, offsets_from_lengths(lengths))

    def pick(self, others: Sequence[Self], chunk_of: Rows, row_of: Rows) -> "_RaggedChunk | None":
        values, chunks = self.rows.values, (self, *others)
        unit = prod(values.shape[1:]) * values.element_size()
        bounds = np.concatenate([chunk.rows.offsets.numpy() for chunk in chunks])
        first = np.cumsum([0, *(len(chunk) + 1 for chunk in chunks[:-1])])
        at = first[chunk_of] + row_of
        starts, lengths = bounds[at], bounds[at + 1] - bounds[at]
        picked = _picked([chunk.rows.values for chunk in chunks], chunk_of, starts * unit, lengths * unit)
        if picked is None:
            return None
        tokens = picked.view(values.dtype).view(int(lengths.sum()), *values.shape[1:])
        return self._with(tokens, offsets_from_lengths(torch.from_numpy(lengths)))

    def leaf(self) -> torch.Tensor:
        return self.rows.nested()

    def buffers(self) -> Buffers:
        values = self.rows.values
        return Buffers(_as_bytes(values), self.rows.offsets, prod(values.shape[1:]) * values.element_size())

    @property
    def offsets(self) -> torch.Tensor:
        return self.rows.offsets

    def lengths(self) -> Rows:
        bounds: Rows = self.rows.offsets.numpy()
        return bounds[1:] - bounds[:-1]

    def with_shared_offsets(self, known: list[torch.Tensor]) -> "_RaggedChunk":
        shared = known[place_of(self.rows.offsets, known)]
        return self if shared is self.rows.offsets else self._with(self.rows.values, shared)

    def _with(self, values: torch.Tensor, offsets: torch.Tensor) -> "_RaggedChunk":
        return _RaggedChunk(Ragged(values, offsets, self.rows.ragged_dim))


@dataclass(frozen=True)
class _ObjectChunk(Chunk):
    """Objects, one msgpack message per row."""

    messages: tuple[bytes, ...]
    kind = "objects"

    @property
    def form(self) -> Form:
        return Form(self.kind)

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.messages))

    def __len__(self) -> int:
        return len(self.messages)

    def span(self, start: int, stop: int) -> "_ObjectChunk":
        return replace(self, messages=self.messages[start:stop])

    def gather(self, rows: Rows) -> "_ObjectChunk":
        return replace(self, messages=tuple(self.messages[row] for row in rows.tolist()))

    def copy(self, shared: OwnOffsets | None = None) -> "_ObjectChunk":
        return self

    def join(self, others: Sequence[Self]) -> "_ObjectChunk":
        return replace(self, messages=tuple(chain(self.messages, *(other.messages for other in others))))

    def leaf(self) -> ObjectArray | PackedTensor:
        return decode_column(self.messages)

    def lengths(self) -> Rows:
        return np.array(list(map(len, self.messages)), np.int64)

    def buffers(self) -> Buffers:
        lengths = torch.tensor(list(map(len, self.messages)), dtype=torch.int64)
        joined = torch.frombuffer(bytearray(b"".join((*self.messages, b"\0"))), dtype=torch.uint8)
        return Buffers(joined[:-1], offsets_from_lengths(lengths), 1)


@dataclass(frozen=True)
class _MediaChunk(_ObjectChunk):
    """Rows of a PackedTensor: objects that say what they are also where there are none."""

    dim_to_pack: int = 0
    kind = "media"

    @property
    def form(self) -> Form:
        return Form(self.kind, ragged_dim=self.dim_to_pack)

    def leaf(self) -> ObjectArray | PackedTensor:
        return decode_column(self.messages) if self.messages else PackedTensor([], self.dim_to_pack)


def chunk_from_leaf(name: str, leaf: Leaf, sample_ids: Sequence[str]) -> Chunk:
    """Return a column as a chunk that shares its memory.

    Raises:
        SchemaError: an object that cannot be stored, with its column, row and sample.
    """
    if isinstance(leaf, Ragged):
        return _RaggedChunk(leaf)
    if isinstance(leaf, torch.Tensor):
        return _DenseChunk(leaf)
    messages, first = messages_of(name, leaf, sample_ids), leaf[0] if len(leaf) else None
    if isinstance(first, PackedTensor) and all(isinstance(value, PackedTensor) for value in leaf):
        return _MediaChunk(messages, first.dim_to_pack)
    return _ObjectChunk(messages)


def chunk_from_buffers(form: Form, rows: int, values: torch.Tensor, offsets: torch.Tensor | None) -> Chunk:
    """Return the chunk of `rows` rows whose `buffers` these are, sharing their memory."""
    if form.dtype is None:
        data, bounds = values.numpy().tobytes(), offsets.tolist() if offsets is not None else [0]
        messages = tuple(data[start:stop] for start, stop in pairwise(bounds))
        return (
            _MediaChunk(messages, form.ragged_dim)
            if form.kind == _MediaChunk.kind
            else _ObjectChunk(messages)
        )
    typed = values.view(form.dtype) if values.numel() else values.new_empty(0, dtype=form.dtype)
    if offsets is None:
        return _DenseChunk(typed.view(rows, *form.trailing))
    return _RaggedChunk(Ragged(typed.view(int(offsets[-1]), *form.trailing), offsets, form.ragged_dim))


def empty_chunk(form: Form) -> Chunk:
    offsets = None if form.kind == "dense" else torch.zeros(1, dtype=torch.int64)
    return chunk_from_buffers(form, 0, torch.empty(0, dtype=torch.uint8), offsets)


def read_rows(
    chunks: Sequence[Chunk], chunk_of: Rows, row_of: Rows, shared: OwnOffsets | None = None
) -> Chunk:
    """Return rows `row_of[i]` of `chunks[chunk_of[i]]`, in order, in fresh memory; one chunk at least.

    Offsets are fresh, too, but for those that are `shared` with other columns.
    """
    if len(chunks) == 1:
        only, is_fresh = _part(chunks[0], row_of)
        return only if is_fresh else only.copy(shared)
    turns = np.flatnonzero(chunk_of[1:] != chunk_of[:-1]) + 1
    if len(turns) > 2 * len(chunks):
        picked = chunks[0].pick(chunks[1:], chunk_of, row_of)
        if picked is not None:
            return picked
        order = np.argsort(chunk_of, kind="stable")
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return read_rows(chunks, chunk_of[order], row_of[order]).gather(back)
    bounds = [0, *turns.tolist(), len(chunk_of)]
    first = int(chunk_of[0]) if len(chunk_of) else 0
    parts = [_part(chunks[first], row_of[: bounds[1]])]
    parts += [_part(chunks[int(chunk_of[a])], row_of[a:b]) for a, b in pairwise(bounds[1:])]
    chunk, is_fresh = parts[0]
    if len(parts) > 1:
        return chunk.join([part for part, _ in parts[1:]])
    return chunk if is_fresh else chunk.copy(shared)


def _part(chunk: Chunk, rows: Rows) -> tuple[Chunk, bool]:
    """Return rows of a chunk, and whether they are a copy."""
    start, count = int(rows[0]) if len(rows) else 0, len(rows)
    if not count or (int(rows[-1]) == start + count - 1 and (rows[1:] > rows[:-1]).all()):
        return (chunk, False) if count == len(chunk) else (chunk.span(start, start + count), False)
    return chunk.gather(rows), True


def _as_bytes(values: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(byte_view(values.detach().cpu()))


def _picked(
    sources: Sequence[torch.Tensor], source_of: Rows, starts: Rows, lengths: Rows
) -> torch.Tensor | None:
    """Return byte spans of several CPU tensors back to back; None: there is no kernel, or nothing to copy."""
    kernel, total = load_kernel(), int(lengths.sum())
    if kernel is None or not total:
        return None
    held = [source.detach().contiguous() for source in sources]
    addresses = np.array([source.data_ptr() for source in held], np.int64)
    # The kernel counts from one address; spans of the other tensors lie at their distance from it.
    spans = starts + (addresses - addresses[0])[source_of]
    out = torch.from_numpy(np.empty(total, np.uint8))
    kernel.gather(held[0].data_ptr(), spans.ctypes.data, lengths.ctypes.data, len(spans), 1, out.data_ptr())
    return out

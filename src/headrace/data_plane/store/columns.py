"""What every store keeps of a put: columns as chunks, which never change; and which chunk has which row."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch.nested._internal.nested_tensor import NestedTensor

from headrace.data_plane.interfaces import KVBatchMeta
from headrace.data_plane.object_codec import checked_tags, decode_column, encode_column
from headrace.data_plane.schema import INPUT_LENGTHS, PER_TOKEN_FIELDS
from headrace.data_plane.store.forms import Form as Form
from headrace.data_plane.store.forms import RowBlock
from headrace.data_plane.store.forms import Rows as Rows
from headrace.data_plane.wire import Leaf, check_declared, leaf_rows, read_wire
from headrace.distributed.bin_packing import LONGEST_ROW
from headrace.distributed.columns import object_array
from headrace.distributed.multimodal import PackedTensor
from headrace.distributed.offsets_reader import OffsetsReader
from headrace.distributed.ragged import (
    byte_view,
    gather_dense,
    gather_rows,
    nested_from_ragged,
    offsets_from_lengths,
    own_copy,
    take_apart,
)
from headrace.distributed.ragged_kernel import load_kernel
from headrace.errors import SchemaError
from headrace.utils.arguments import shown, texts

Array = TypeVar("Array", bound=NDArray[Any])
Lengths = NDArray[np.int32]
Known = list[tuple[torch.Tensor, torch.Tensor]]
"""Offsets that a call has met, each with the store's or the caller's own copy."""
_NOWHERE = -1
_NO_ROWS: Rows = np.empty(0, np.int64)


def grown(array: Array, size: int, fill: int) -> Array:
    """Return an array of at least `size`, with room for as much again where it grows; `fill` is what is new."""
    if size <= len(array):
        return array
    more = max(size, 2 * len(array)) - len(array)
    return np.concatenate([array, np.full(more, fill, array.dtype)])  # type: ignore[return-value]


Block = TypeVar("Block", bound=RowBlock)


@dataclass(frozen=True)
class Chunk:
    """Rows of one form, in memory.

    Dense: `values` (n, ...). Ragged: `values` (sum of lengths, ...) and `offsets` (n + 1). Objects and media: the bytes
    of all messages, one per row, and their offsets.
    """

    form: Form
    values: torch.Tensor
    offsets: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        return len(self.values if self.offsets is None else self.offsets) - (self.offsets is not None)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (
            self.offsets.nbytes if self.offsets is not None and self.form.dtype else 0
        )

    @property
    def unit(self) -> int:
        """Bytes of a token, or of a row where `offsets` are None."""
        return prod(self.form.trailing) * self.values.element_size()

    def copy(self) -> "Chunk":
        """Return the rows with values in fresh CPU memory, around the same offsets."""
        return Chunk(self.form, own_copy(self.values), self.offsets)

    def shrunk(self, rows: Rows) -> "Chunk":
        """Return rows in any order, repeats included, in fresh memory."""
        index = torch.from_numpy(rows)
        if self.offsets is None:
            return Chunk(self.form, gather_dense(self.values, index))
        return Chunk(self.form, *gather_rows(self.values, self.offsets, index))

    def _span(self, start: int, stop: int) -> "Chunk":
        if self.offsets is None:
            return Chunk(self.form, self.values[start:stop])
        offsets = self.offsets[start : stop + 1]
        return Chunk(self.form, self.values[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])

    def picked(self, rows: Rows, *, copy: bool = False) -> "Chunk":
        """Return rows in any order; unless it is to be a `copy`, sharing memory where they lie side by side."""
        count = len(rows)
        if count and (rows[-1] != rows[0] + count - 1 or not (rows[1:] > rows[:-1]).all()):
            return self.shrunk(rows)
        start = int(rows[0]) if count else 0
        part = self if count == self.rows else self._span(start, start + count)
        return part.copy() if copy else part

    def leaf(self, known: Known) -> Leaf | PackedTensor:
        """Return the column for `wire_tensordict`; values share memory, offsets are copies `known` to a call."""
        if self.offsets is None:
            return self.values
        if self.form.dtype is not None:
            return nested_from_ragged(self.values, own_offsets(self.offsets, known), self.form.ragged_dim)
        if self.form.kind == "media" and not self.rows:
            return PackedTensor([], self.form.ragged_dim)
        data = self.values.numpy().data
        return decode_column(data[start:stop] for start, stop in pairwise(self.offsets.tolist()))

    def flat_bytes(self) -> torch.Tensor:
        """Return the values as flat CPU bytes in C order, shared where they are contiguous there."""
        return torch.from_numpy(byte_view(self.values.detach().cpu()))


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """Return the rows of chunks, one at least, one after the other; those of a single chunk share its memory."""
    if len(chunks) == 1:
        return chunks[0]
    values = torch.cat([chunk.values for chunk in chunks])
    lengths = [chunk.offsets.diff() for chunk in chunks if chunk.offsets is not None]
    return Chunk(chunks[0].form, values, offsets_from_lengths(torch.cat(lengths)) if lengths else None)


def read_rows(chunks: Sequence[Chunk], places: "Places") -> Chunk:
    """Return rows of chunks (one at least) with values in fresh memory; offsets may be those of a chunk."""
    if places is None:
        return joined(chunks) if len(chunks) > 1 else chunks[0].copy()
    chunk_of, row_of = places
    if len(chunks) == 1 or not len(row_of):
        return chunks[0].picked(row_of, copy=True)
    turns = np.flatnonzero(chunk_of[1:] != chunk_of[:-1]) + 1
    if not len(turns):
        return chunks[int(chunk_of[0])].picked(row_of, copy=True)
    if len(turns) > 2 * len(chunks):
        picked = _picked(chunks, chunk_of, row_of)
        if picked is not None:
            return picked
        order = np.argsort(chunk_of, kind="stable")
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return read_rows(chunks, (chunk_of[order], row_of[order])).shrunk(back)
    bounds = [0, *turns.tolist(), len(chunk_of)]
    return joined([chunks[int(chunk_of[a])].picked(row_of[a:b]) for a, b in pairwise(bounds)])


def _picked(chunks: Sequence[Chunk], chunk_of: Rows, row_of: Rows) -> Chunk | None:
    """Return rows of several chunks in one copy; None: there is no kernel, or nothing to copy."""
    unit, kernel, offsets = chunks[0].unit, load_kernel(), None
    starts, lengths = row_of, np.ones(len(row_of), np.int64)
    if chunks[0].offsets is not None:
        all_bounds = [chunk.offsets.numpy() for chunk in chunks if chunk.offsets is not None]
        bounds, first = np.concatenate(all_bounds), np.cumsum([0, *map(len, all_bounds[:-1])])
        at = first[chunk_of] + row_of
        starts = bounds[at]
        lengths = bounds[at + 1] - starts
        offsets = offsets_from_lengths(torch.from_numpy(lengths))
    lengths = lengths * unit
    total = int(lengths.sum())
    if kernel is None or not total:
        return None
    held = [chunk.values.detach().contiguous() for chunk in chunks]
    addresses = np.array([values.data_ptr() for values in held], np.int64)
    # The kernel counts from one address; spans of the other chunks lie at their distance from it.
    starts = starts * unit + (addresses - addresses[0])[chunk_of]
    out = torch.from_numpy(np.empty(total, np.uint8))
    kernel.gather(held[0].data_ptr(), starts.ctypes.data, lengths.ctypes.data, len(starts), 1, out.data_ptr())
    return chunk_of_bytes(chunks[0].form, len(row_of), out, offsets)


def own_offsets(offsets: torch.Tensor, known: Known) -> torch.Tensor:
    """Return a copy of offsets; of equal ones that a call has met the same."""
    for met, own in known:
        if met is offsets or torch.equal(met, offsets):
            return own
    known.append((offsets, offsets.clone()))
    return known[-1][1]


def chunk_of_leaf(
    name: str, leaf: Leaf, sample_ids: Sequence[str], known: Known, read: OffsetsReader | None = None
) -> Chunk:
    """Return a column as a chunk that shares its values' memory, with offsets of its own, brought here by `read`."""
    if isinstance(leaf, NestedTensor):
        values, offsets, ragged_dim, _ = take_apart(leaf, read or OffsetsReader((leaf,)))
        form = Form("ragged", values.dtype, tuple(values.shape[1:]), ragged_dim)
        return Chunk(form, values, own_offsets(offsets, known))
    if isinstance(leaf, torch.Tensor):
        return Chunk(Form("dense", leaf.dtype, tuple(leaf.shape[1:])), leaf)
    messages = encode_column(name, leaf, sample_ids)
    lengths = torch.tensor([len(message) for message in messages], dtype=torch.int64)
    # One byte more, since torch takes no empty buffer.
    values = torch.frombuffer(bytearray(b"".join((*messages, b"\0"))), dtype=torch.uint8)[:-1]
    form = Form("objects")
    if len(leaf) and all(isinstance(value, PackedTensor) for value in leaf):
        form = Form("media", ragged_dim=leaf[0].dim_to_pack)
    return Chunk(form, values, offsets_from_lengths(lengths))


def chunk_of_bytes(form: Form, rows: int, data: torch.Tensor, offsets: torch.Tensor | None) -> Chunk:
    """Return the chunk of `rows` rows whose `flat_bytes` and offsets these are, sharing their memory."""
    if form.dtype is None:
        return Chunk(form, data, torch.zeros(1, dtype=torch.int64) if offsets is None else offsets)
    if form.kind == "ragged" and offsets is None:
        offsets = torch.zeros(1, dtype=torch.int64)
    tokens = rows if offsets is None else int(offsets[-1])
    values = data.view(form.dtype) if data.numel() else data.new_empty(0, dtype=form.dtype)
    return Chunk(form, values.view(tokens, *form.trailing), offsets)


class Put(NamedTuple):
    """What a store is told of a put beside its columns.

    `lengths` are the tokens of each row by the columns that say them; columns that agree share one array. `part_of`
    names the rows of a put that other stores share, whose caller looks for room; by `order`, numbers, claims compare
    rows of them all. Unless it `tells`, nobody asks for the rows' tags; `known` is for `check_put` to know.
    """

    partition_id: str
    ids: list[str]
    tags: Sequence[Mapping[str, Any]] | None
    lengths: Mapping[str, Lengths]
    claim: str | None = None
    producer: str | None = None
    once: bool = False
    part_of: str = ""
    order: Rows | None = None
    tells: bool = True
    known: Any = None


class RowFacts(NamedTuple):
    """What a store says of rows, and a meta of them; `claim` is that of rows that are leased."""

    sample_ids: list[str]
    sequence_lengths: list[int] | None
    tags: list[dict[str, Any]] | None
    claim: str | None = None

    def meta(
        self, partition_id: str, task_name: str, fields: list[str], extra_info: dict[str, Any] | None = None
    ) -> KVBatchMeta:
        """Return the meta of the rows; what it is given is what it asks for, and is neither checked nor copied."""
        meta = object.__new__(KVBatchMeta)
        meta.partition_id, meta.task_name, meta.sample_ids = partition_id, task_name, self.sample_ids
        meta.fields, meta.sequence_lengths, meta.tags = fields, self.sequence_lengths, self.tags
        meta.extra_info = extra_info or {}
        return meta


def checked_put(
    sample_ids: Sequence[str],
    partition_id: str,
    fields: TensorDict | None,
    tags: Sequence[Mapping[str, Any]] | None,
    producer: str | None = None,
) -> tuple[Put, dict[str, Chunk]]:
    """Return a put, and its columns as chunks, which share the memory of their values."""
    ids = texts("sample_ids", sample_ids)
    if len(set(ids)) != len(ids):
        repeated = [sample_id for sample_id, count in Counter(ids).items() if count > 1]
        raise SchemaError(f"a put needs every sample id once; repeated: {shown(repeated)}")
    own_tags = None if tags is None else checked_tags(tags, len(ids))
    known, chunks = Known(), dict[str, Chunk]()
    columns = read_wire(fields) if fields is not None else {}
    texts("partition, columns and producer", [partition_id, *columns, producer or ""])
    read = OffsetsReader(columns.values())
    for name, column in columns.items():
        leaf = object_array([]) if isinstance(column, PackedTensor) else column
        count = leaf_rows(leaf)
        if count != len(ids):
            got = "is a single number" if count < 0 else f"has {count} rows"
            raise SchemaError(f"column '{name}' {got}; expected {len(ids)} rows, one per sample id")
        check_declared(name, leaf)
        chunks[name] = chunk_of_leaf(name, leaf, ids, known, read)
    return Put(partition_id, ids, own_tags, said_lengths(chunks), producer=producer), chunks


def said_lengths(chunks: Mapping[str, Chunk]) -> dict[str, Lengths]:
    """Return how many tokens each row has by the columns that say so: `input_lengths`, and declared per-token ones.

    One value per sample, which holds for all its tokens, says nothing. `input_lengths` speak first.
    """
    said: dict[str, Lengths] = {}
    by_offsets: dict[int, Lengths] = {}
    for name in sorted(chunks, key=INPUT_LENGTHS.__ne__):
        form, values, offsets = chunks[name].form, chunks[name].values, chunks[name].offsets
        if name == INPUT_LENGTHS and form.kind == "dense":
            numbers = values.detach().cpu().reshape(-1).numpy()
            wrong = np.flatnonzero((numbers < 0) | (numbers > LONGEST_ROW))
            if len(wrong):
                row = wrong[0]
                raise SchemaError(
                    f"column '{name}' is {numbers[row]} in row {row}; expected tokens, 0 to {LONGEST_ROW}"
                )
            found = numbers.astype(np.int32)
        elif name not in PER_TOKEN_FIELDS or form.dtype is None or form.ragged_dim != 1:
            continue
        elif offsets is not None:
            if id(offsets) in by_offsets:
                said[name] = by_offsets[id(offsets)]
                continue
            found = np.diff(offsets.numpy()).astype(np.int32)
        elif form.trailing:
            found = np.full(len(values), form.trailing[0], np.int32)
        else:
            continue
        said[name] = next((known for known in said.values() if np.array_equal(known, found)), found)
        if offsets is not None:
            by_offsets[id(offsets)] = said[name]
    return said


class Slots(NamedTuple):
    """Rows of a partition by slot, a small number that it gives each sample.

    `version` is the partition's if these are all its slots, in order: it changes when samples come or go.
    """

    at: Rows
    version: int | None = None


Places = tuple[Rows, Rows] | None
"""Row i is row `places[1][i]` of block `places[0][i]`; None: they are all rows of all blocks, in order."""


Columns = Mapping[str, Sequence[Block]]
"""The columns of a put; the blocks of each together have one row per id."""

Selection = tuple[list[Block], Places]
"""Rows of a column, fixed at one moment: the blocks, one at least, and where the rows are in them."""


@dataclass
class Column(Generic[Block]):
    """Blocks by the numbers that it gives them, and by slot the block of a row and its place there.

    Where a column is put whole, as most are, its blocks are the rows of all slots in order, and nothing is kept per
    row; `_version` is that of the slots it was written for.
    """

    _blocks: dict[int, Block] = field(default_factory=dict)
    _in_use: dict[int, int] = field(default_factory=dict)
    # Numbers of blocks that are gone, which the next blocks get.
    _unused: list[int] = field(default_factory=list)
    _version: int = _NOWHERE
    _block_of: Rows = field(default_factory=_NO_ROWS.copy)
    _row_of: Rows = field(default_factory=_NO_ROWS.copy)

    @property
    def form(self) -> Form | None:
        """What its rows have in common; None: it holds no rows."""
        return next(iter(self._blocks.values())).form if self._blocks else None

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self._blocks.values())

    @property
    def blocks(self) -> list[Block]:
        return list(self._blocks.values())

    def held(self, slots: Rows) -> NDArray[np.bool_]:
        """Return which slots it has a row for."""
        if self._version != _NOWHERE:
            return slots < sum(self._in_use.values())
        held = np.zeros(len(slots), bool)
        known: Any = slots < len(self._block_of)
        if known.all():
            known = slice(None)
        held[known] = self._block_of[slots[known]] != _NOWHERE
        return held

    def holds_all(self, slots: Slots) -> bool:
        return slots.version == self._version or bool(self.held(slots.at).all())

    def holds_only(self, slots: Rows) -> bool:
        """Return whether it has rows for these (distinct) slots at most."""
        return sum(self._in_use.values()) == int(np.count_nonzero(self.held(slots)))

    def write(self, slots: Slots, blocks: Sequence[Block]) -> list[Block]:
        """Let row i of all `blocks` together be the row of slot i; return the blocks that no row is left of."""
        if slots.version is not None:
            gone = list(self._blocks.values())
            self._blocks, self._in_use, self._unused = {}, {}, []
            self._block_of, self._row_of, self._version = _NO_ROWS, _NO_ROWS, slots.version
            for number, block in enumerate(blocks):
                self._keep(number, block)
            return gone
        self._spread()
        self._grow(int(slots.at.max(initial=-1)) + 1)
        touched = self._detach(slots.at)
        start = 0
        for block in blocks:
            number = self._unused.pop() if self._unused else len(self._blocks)
            mine = slots.at[start : start + block.rows]
            self._keep(number, block)
            self._block_of[mine], self._row_of[mine] = number, np.arange(block.rows)
            start += block.rows
        return self._compact(touched)

    def _keep(self, number: int, block: Block) -> None:
        """Take in a block, all rows of which are in use."""
        self._blocks[number], self._in_use[number] = block, block.rows

    def drop(self, slots: Rows) -> list[Block]:
        """Remove rows; return the blocks that none is left of. A block less than half in use shrinks to what is."""
        self._spread()
        return self._compact(self._detach(slots[slots < len(self._block_of)]))

    def select(self, slots: Slots) -> Selection[Block]:
        """Return how to read rows, all of which it holds; valid whatever is written later."""
        if slots.version == self._version:
            return list(self._blocks.values()), None
        numbers, places = self.find(slots)
        return [self._blocks[number] for number in numbers.tolist()], places

    def find(self, slots: Slots) -> tuple[Rows, Places]:
        """Return the numbers of the blocks that hold rows, and where the rows are in these blocks."""
        if slots.version == self._version:
            return np.fromiter(self._blocks, np.int64, len(self._blocks)), None
        self._spread()
        if not len(slots.at):
            return np.array([next(iter(self._blocks))]), (_NO_ROWS, _NO_ROWS)
        block_of, row_of = self._block_of[slots.at], self._row_of[slots.at]
        is_met = np.zeros(len(self._blocks) + len(self._unused), bool)
        is_met[block_of] = True
        numbers = np.flatnonzero(is_met)
        return numbers, (np.searchsorted(numbers, block_of), row_of)

    def renumber(self, slots: Rows) -> None:
        """Let what is slot `slots[i]` now be slot i; all other slots are free."""
        self._spread()
        self._grow(int(slots.max(initial=-1)) + 1)
        self._block_of, self._row_of = self._block_of[slots], self._row_of[slots]

    def _spread(self) -> None:
        """Begin to keep a block and a row for each slot."""
        if self._version == _NOWHERE:
            return
        numbers, counts = list(self._blocks), [block.rows for block in self._blocks.values()]
        self._block_of = np.repeat(np.array(numbers, np.int64), counts)
        self._row_of = np.concatenate([np.arange(count, dtype=np.int64) for count in counts])
        self._version = _NOWHERE

    def _grow(self, slots: int) -> None:
        self._block_of, self._row_of = grown(self._block_of, slots, _NOWHERE), grown(self._row_of, slots, 0)

    def _detach(self, slots: Rows) -> list[int]:
        """Take slots from their blocks and return the blocks' numbers."""
        if (self._block_of[slots] == _NOWHERE).all():
            return []
        numbers, counts = np.unique(self._block_of[slots], return_counts=True)
        self._block_of[slots] = _NOWHERE
        touched = [(n, count) for n, count in zip(numbers.tolist(), counts.tolist()) if n != _NOWHERE]
        for number, count in touched:
            self._in_use[number] -= count
        return [number for number, _ in touched]

    def _compact(self, numbers: list[int]) -> list[Block]:
        gone: list[Block] = []
        thin: list[int] = []
        for number in numbers:
            block, in_use = self._blocks[number], self._in_use[number]
            if not in_use:
                gone.append(self._blocks.pop(number))
                del self._in_use[number]
                self._unused.append(number)
            elif 2 * in_use < block.rows:
                thin.append(number)
        if thin:
            self._shrink(thin)
        return gone

    def _shrink(self, numbers: list[int]) -> None:
        """Let blocks, by their numbers in rising order, keep what is in use of them; one look at all slots finds it."""
        is_one = np.zeros(len(self._blocks) + len(self._unused) + 1, bool)
        is_one[numbers] = True  # and the last is that of slots without a block
        slots = np.flatnonzero(is_one[self._block_of])
        slots = slots[np.argsort(self._block_of[slots], kind="stable")]
        start = 0
        for number in numbers:
            mine = slots[start : (start := start + self._in_use[number])]
            shrunk = self._blocks[number].shrunk(self._row_of[mine])
            if shrunk is not None:
                self._keep(number, shrunk)
                self._row_of[mine] = np.arange(len(mine))

"""Which chunk holds each row of one column."""

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.data_plane.adapters.local_chunks import Chunk, Form, OwnOffsets, RowBlock, Rows, read_rows

Block = TypeVar("Block", bound=RowBlock)

_NOWHERE = -1


class Column(Generic[Block]):
    """One column of a partition. Rows are known by slot, a number that the partition gives each sample."""

    def __init__(self) -> None:
        self._chunks: dict[int, Block] = {}
        self._in_use: dict[int, int] = {}
        self._next_chunk = 0
        self._chunk_of: Rows = np.empty(0, np.int64)
        self._row_of: Rows = np.empty(0, np.int64)

    @property
    def form(self) -> Form | None:
        """What its rows have in common; None: it holds no rows."""
        return next(iter(self._chunks.values())).form if self._chunks else None

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks."""
        return sum(chunk.nbytes for chunk in self._chunks.values())

    def held(self, slots: Rows) -> NDArray[np.bool_]:
        """Return which slots it has a row for."""
        held = np.zeros(len(slots), bool)
        known = slots < len(self._chunk_of)
        held[known] = self._chunk_of[slots[known]] != _NOWHERE
        return held

    def holds_only(self, slots: Rows) -> bool:
        """Return whether it has rows for these (distinct) slots at most."""
        return sum(self._in_use.values()) == int(np.count_nonzero(self.held(slots)))

    def write(self, slots: Rows, chunks: Sequence[Block]) -> None:
        """Let row i of all `chunks` together be the row of `slots[i]`."""
        if not len(slots):
            return
        self._grow(int(slots.max()) + 1)
        is_new = (self._chunk_of[slots] == _NOWHERE).all()
        replaced = [] if is_new else self._detach(slots)
        start = 0
        for chunk in chunks:
            mine = slots[start : start + len(chunk)]
            self._chunks[self._next_chunk], self._in_use[self._next_chunk] = chunk, len(mine)
            self._chunk_of[mine] = self._next_chunk
            self._row_of[mine] = np.arange(len(mine))
            self._next_chunk += 1
            start += len(chunk)
        self._compact(replaced)

    def drop(self, slots: Rows) -> None:
        """Forget the rows of `slots`; chunks that are less than half in use shrink to what is."""
        self._compact(self._detach(slots[slots < len(self._chunk_of)]))

    def select(self, slots: Rows) -> "Selection[Block]":
        """Return how to read the rows of `slots`, all of which it holds; valid whatever is written later."""
        chunk_of, row_of = self._chunk_of[slots], self._row_of[slots]
        if not len(slots):
            return Selection([next(iter(self._chunks.values()))], chunk_of, row_of)
        if (chunk_of == chunk_of[0]).all():
            return Selection([self._chunks[int(chunk_of[0])]], np.zeros_like(chunk_of), row_of)
        numbers, local = np.unique(chunk_of, return_inverse=True)
        return Selection([self._chunks[number] for number in numbers.tolist()], local, row_of)

    def renumber(self, slots: Rows) -> None:
        """Let what is slot `slots[i]` now be slot i; all other slots are free."""
        self._grow(int(slots.max()) + 1 if len(slots) else 0)
        self._chunk_of, self._row_of = self._chunk_of[slots], self._row_of[slots]

    def _grow(self, slots: int) -> None:
        if slots > len(self._chunk_of):
            known, size = len(self._chunk_of), max(slots, 2 * len(self._chunk_of))
            chunk_of, row_of = np.full(size, _NOWHERE, np.int64), np.zeros(size, np.int64)
            chunk_of[:known], row_of[:known] = self._chunk_of, self._row_of
            self._chunk_of, self._row_of = chunk_of, row_of

    def _detach(self, slots: Rows) -> list[int]:
        """Take slots from their chunks and return the chunks' numbers."""
        numbers, counts = np.unique(self._chunk_of[slots], return_counts=True)
        self._chunk_of[slots] = _NOWHERE
        touched = [(n, count) for n, count in zip(numbers.tolist(), counts.tolist()) if n != _NOWHERE]
        for number, count in touched:
            self._in_use[number] -= count
        return [number for number, _ in touched]

    def _compact(self, numbers: list[int]) -> None:
        for number in numbers:
            chunk, in_use = self._chunks[number], self._in_use[number]
            if not in_use:
                del self._chunks[number], self._in_use[number]
            elif 2 * in_use < len(chunk):
                slots = np.flatnonzero(self._chunk_of == number)
                shrunk = chunk.shrunk(self._row_of[slots])
                if shrunk is not None:
                    self._chunks[number] = shrunk
                    self._row_of[slots] = np.arange(in_use)


class Selection(NamedTuple, Generic[Block]):
    """Rows of a column, fixed at one moment: row i is row `row_of[i]` of `chunks[chunk_of[i]]`."""

    chunks: list[Block]
    chunk_of: Rows
    row_of: Rows

    def lengths(self) -> "Selection[Chunk]":
        """Return a selection of the same rows' lengths."""
        return Selection([chunk.lengths() for chunk in self.chunks], self.chunk_of, self.row_of)


def read(selection: Selection[Chunk], shared: OwnOffsets | None = None) -> Chunk:
    """Return the rows in fresh memory, offsets `shared` with other columns; this needs no lock."""
    return read_rows(selection.chunks, selection.chunk_of, selection.row_of, shared)

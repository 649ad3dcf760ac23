"""Which chunk holds each row of one column."""

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.data_plane.store.chunks import Chunk, Form, OwnOffsets, RowBlock, Rows, read_rows

Block = TypeVar("Block", bound=RowBlock)

_NOWHERE = -1
_NO_ROWS: Rows = np.empty(0, np.int64)


class Column(Generic[Block]):
    """One column of a partition. Rows are known by slot, a number that the partition gives each sample.

    Where a column is put whole, as most are, its chunks are the rows of all slots in order, and there are no books
    per row. `everyone` below is the partition's array of all its slots in order: the same object until they change.
    """

    def __init__(self) -> None:
        self._chunks: dict[int, Block] = {}
        self._in_use: dict[int, int] = {}
        self._next_chunk = 0
        self._whole: Rows | None = None
        self._chunk_of = self._row_of = _NO_ROWS

    @property
    def form(self) -> Form | None:
        """What its rows have in common; None: it holds no rows."""
        return next(iter(self._chunks.values())).form if self._chunks else None

    @property
    def nbytes(self) -> int:
        return sum(chunk.nbytes for chunk in self._chunks.values())

    def held(self, slots: Rows) -> NDArray[np.bool_]:
        """Return which slots it has a row for."""
        if self._whole is not None:
            return slots < len(self._whole)
        held = np.zeros(len(slots), bool)
        known = slots < len(self._chunk_of)
        held[known] = self._chunk_of[slots[known]] != _NOWHERE
        return held

    def holds_all(self, slots: Rows) -> bool:
        return slots is self._whole or bool(self.held(slots).all())

    def holds_only(self, slots: Rows) -> bool:
        """Return whether it has rows for these (distinct) slots at most."""
        return sum(self._in_use.values()) == int(np.count_nonzero(self.held(slots)))

    def write(self, slots: Rows, chunks: Sequence[Block], everyone: Rows | None = None) -> None:
        """Let row i of all `chunks` together be the row of `slots[i]`."""
        if not len(slots):
            return
        if slots is everyone:
            self._replace(slots, chunks)
            return
        self._spread()
        self._grow(int(slots.max()) + 1)
        is_new = (self._chunk_of[slots] == _NOWHERE).all()
        replaced = [] if is_new else self._detach(slots)
        start = 0
        for number, chunk in self._take_in(chunks):
            mine = slots[start : start + len(chunk)]
            self._chunk_of[mine] = number
            self._row_of[mine] = np.arange(len(mine))
            start += len(chunk)
        self._compact(replaced)

    def _replace(self, everyone: Rows, chunks: Sequence[Block]) -> None:
        self._chunks, self._in_use = {}, {}
        self._chunk_of = self._row_of = _NO_ROWS
        self._whole = everyone
        self._take_in(chunks)

    def _take_in(self, chunks: Sequence[Block]) -> list[tuple[int, Block]]:
        """Keep chunks of which every row is in use, and return their numbers with them."""
        taken = list(enumerate(chunks, self._next_chunk))
        self._chunks.update(taken)
        self._in_use.update((number, len(chunk)) for number, chunk in taken)
        self._next_chunk += len(taken)
        return taken

    def _spread(self) -> None:
        """Begin books per row."""
        if self._whole is None:
            return
        numbers, counts = list(self._chunks), [len(chunk) for chunk in self._chunks.values()]
        self._chunk_of = np.repeat(np.array(numbers, np.int64), counts)
        self._row_of = np.concatenate([np.arange(count, dtype=np.int64) for count in counts])
        self._whole = None

    def drop(self, slots: Rows) -> None:
        """Forget the rows of `slots`; chunks that are less than half in use shrink to what is."""
        self._spread()
        self._compact(self._detach(slots[slots < len(self._chunk_of)]))

    def select(self, slots: Rows) -> "Selection[Block]":
        """Return how to read the rows of `slots`, all of which it holds; valid whatever is written later."""
        if slots is self._whole:
            return Selection(list(self._chunks.values()), None)
        self._spread()
        chunk_of, row_of = self._chunk_of[slots], self._row_of[slots]
        if not len(slots):
            return Selection([next(iter(self._chunks.values()))], (chunk_of, row_of))
        if (chunk_of == chunk_of[0]).all():
            return Selection([self._chunks[int(chunk_of[0])]], (np.zeros_like(chunk_of), row_of))
        numbers, local = np.unique(chunk_of, return_inverse=True)
        return Selection([self._chunks[number] for number in numbers.tolist()], (local, row_of))

    def renumber(self, slots: Rows) -> None:
        """Let what is slot `slots[i]` now be slot i; all other slots are free."""
        self._spread()
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
    """Rows of a column, fixed at one moment.

    Row i is row `places[1][i]` of `chunks[places[0][i]]`; without `places` they are all rows of `chunks`, in order.
    """

    chunks: list[Block]
    places: tuple[Rows, Rows] | None


def read(selection: Selection[Chunk], shared: OwnOffsets | None = None) -> Chunk:
    """Return the rows in fresh memory, offsets `shared` with other columns; this needs no lock."""
    first, *others = selection.chunks
    if selection.places is None:
        return first.join(others) if others else first.copy(shared)
    return read_rows(selection.chunks, *selection.places, shared)

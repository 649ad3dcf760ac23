"""Which block holds each row of one column of a partition."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

import numpy as np
from numpy.typing import NDArray

from headrace.data_plane.store.columns import Block, Form, Places, Rows, Selection, Slots, grown

_NOWHERE = -1
_NO_ROWS: Rows = np.empty(0, np.int64)


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
        for number in numbers:
            block, in_use = self._blocks[number], self._in_use[number]
            if not in_use:
                gone.append(self._blocks.pop(number))
                del self._in_use[number]
                self._unused.append(number)
            elif 2 * in_use < block.rows:
                slots = np.flatnonzero(self._block_of == number)
                shrunk = block.shrunk(self._row_of[slots])
                if shrunk is not None:
                    self._keep(number, shrunk)
                    self._row_of[slots] = np.arange(in_use)
        return gone

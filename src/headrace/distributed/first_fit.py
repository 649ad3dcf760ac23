"""First-fit packing over runs of equal rows.

Rows of one length are interchangeable, and so are neighbouring bins with equal room; so whole runs are placed
at once. The result is that of the row-by-row algorithm, in time that grows with the number of distinct
lengths and not of rows. A row is named here by its position in the order in which rows are placed.
"""

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

Run = tuple[int, int, int]
"""(length > 0, first position, rows): rows of one length at neighbouring positions."""


class Placements:
    """Which rows went where, as moves: rows from `first` on fill bins from `bin_` on, `per_bin` rows each."""

    def __init__(self) -> None:
        self._moves = array("q")

    def add(self, first: int, rows: int, bin_: int, per_bin: int) -> None:
        self._moves.extend((first, rows, bin_, per_bin))

    def bin_of_position(self, positions: int) -> IntArray:
        """Return the bin of each position 0 .. positions - 1; every one must have been placed once."""
        moves = np.frombuffer(self._moves, dtype=np.int64).reshape(-1, 4)
        first, rows, bin_, per_bin = moves[np.argsort(moves[:, 0])].T
        if int(rows.sum()) != positions:
            raise AssertionError(f"{int(rows.sum())} of {positions} rows were placed")
        nth = np.arange(positions)
        nth -= np.repeat(first, rows)
        nth //= np.repeat(per_bin, rows)
        nth += np.repeat(bin_, rows)
        return nth


class OpenBins:
    """Bins in order, as ranges of neighbours with equal room, under a binary tree of maxima.

    The first bin of a range has a leaf with the room; the other bins, and bins with less room than the
    shortest row, have -1.
    """

    def __init__(self, max_bins: int, shortest: int) -> None:
        self._leaves = 1 << max(max_bins - 1, 0).bit_length()
        self._room = [-1] * (2 * self._leaves)
        self._width: dict[int, int] = {}
        self._shortest = shortest

    def first_with_room(self, length: int) -> tuple[int, int, int] | None:
        """Return (first bin, bins, room) of the first range with room for `length`, or None."""
        room, leaves, node = self._room, self._leaves, 1
        if room[1] < length:
            return None
        while node < leaves:
            node += node
            if room[node] < length:
                node += 1
        return node - leaves, self._width[node - leaves], room[node]

    def set_range(self, bin_: int, bins: int, bin_room: int) -> None:
        """Say that `bins` bins from `bin_` on have `bin_room` left each."""
        if bin_room < self._shortest:
            bin_room = -1
        else:
            self._width[bin_] = bins
        room, node = self._room, self._leaves + bin_
        room[node] = bin_room
        while node > 1:
            other = room[node ^ 1]
            best = bin_room if bin_room > other else other
            node >>= 1
            if room[node] == best:
                return
            room[node] = bin_room = best


def first_fit(runs: Sequence[Run], capacity: int, out: Placements, first_bin: int = 0) -> int:
    """Place each row into the first bin with room for it; return the number of bins.

    Bins are numbered from `first_bin` on. With runs in descending order of length this is
    first-fit-decreasing: at most 11/9 OPT + 6/9 bins.

    Source: Johnson, Demers, Ullman, Garey and Graham, "Worst-case performance bounds for simple
    one-dimensional packing algorithms", SIAM J. Comput. 3 (1974); Dósa, "The tight bound of first fit
    decreasing bin-packing algorithm is FFD(I) <= 11/9 OPT(I) + 6/9", ESCAPE 2007.
    """
    if not runs:
        return 0
    # First-fit leaves at most one bin that is half empty or more.
    tokens, rows = sum(length * n for length, _, n in runs), sum(n for _, _, n in runs)
    bins = OpenBins(min(rows, 2 * tokens // capacity + 1), min(length for length, _, _ in runs))
    opened = 0
    for length, position, left in runs:
        while left and (found := bins.first_with_room(length)) is not None:
            bin_, width, room = found
            per_bin = room // length
            full = min(width, left // per_bin)
            if full == 0:
                full, per_bin = 1, left
            out.add(position, full * per_bin, first_bin + bin_, per_bin)
            if full < width:
                bins.set_range(bin_ + full, width - full, room)
            bins.set_range(bin_, full, room - per_bin * length)
            position += full * per_bin
            left -= full * per_bin
        if left:
            opened = _open_bins(bins, opened, (length, position, left), capacity, out, first_bin)
    return opened


def _open_bins(bins: OpenBins, opened: int, run: Run, capacity: int, out: Placements, first_bin: int) -> int:
    length, position, rows = run
    per_bin = capacity // length
    full, rest = divmod(rows, per_bin)
    if full:
        out.add(position, full * per_bin, first_bin + opened, per_bin)
        bins.set_range(opened, full, capacity - per_bin * length)
    if rest:
        out.add(position + full * per_bin, rest, first_bin + opened + full, rest)
        bins.set_range(opened + full, 1, capacity - rest * length)
    return opened + full + (rest > 0)

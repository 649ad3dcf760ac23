"""Modified first-fit-decreasing over runs of equal rows (see `first_fit` for runs and positions)."""

from bisect import bisect_left
from collections.abc import Sequence

from headrace.distributed.first_fit import Placements, Run, first_fit

BinRange = tuple[int, int, int]
"""(first bin, bins, room): neighbouring bins with equal room."""


class _Stock:
    """The rows not placed yet, by length; index 0 is the longest length."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.lengths = [length for length, _, _ in runs]
        self.left = [rows for _, _, rows in runs]
        self._position = [position for _, position, _ in runs]
        self._ascending = [-length for length in self.lengths]
        # Union-find: the next index, itself included, that may still have rows.
        self._next = list(range(len(runs) + 1))

    def index_below(self, length: int) -> int:
        """Return the first index whose length is at most `length`, empty or not."""
        return bisect_left(self._ascending, -length)

    def next_left(self, index: int) -> int:
        """Return the first index from `index` on that has rows, or the number of lengths."""
        after = self._next
        while after[index] != index:
            after[index] = after[after[index]]
            index = after[index]
        return index

    def largest(self, room: int, start: int) -> int:
        """Return the index, from `start` on, of the longest length with rows that fits in `room`."""
        return self.next_left(max(self.index_below(room), start))

    def take(self, index: int, rows: int) -> int:
        """Remove rows of one length and return the first's position."""
        position = self._position[index]
        self._position[index] += rows
        self.left[index] -= rows
        if self.left[index] == 0:
            self._next[index] = index + 1
        return position

    def remaining(self, start: int) -> list[Run]:
        """Return what is left from `start` on, as runs."""
        rest = zip(self.lengths[start:], self._position[start:], self.left[start:])
        return [run for run in rest if run[2]]


def modified_first_fit(runs: Sequence[Run], capacity: int, out: Placements) -> int:
    """Place rows by modified first-fit-decreasing; return the number of bins, at most 71/60 OPT + 1.

    `runs` come in descending order of length. Rows are large (over 1/2 of the capacity), medium (over 1/3),
    small (over 1/6) or tiny. Each large row opens a bin; medium rows, pairs of small rows and then the
    longest rows that fit fill these bins; first-fit-decreasing packs the rest.

    Source: Johnson and Garey, "A 71/60 theorem for bin packing", Journal of Complexity 1 (1985).
    """
    stock = _Stock(runs)
    medium, small, tiny = (_first_at_most(stock, capacity, parts) for parts in (2, 3, 6))
    with_medium, without = _add_medium_rows(stock, medium, small, capacity, out)
    rest = _add_pairs_of_small_rows(stock, small, tiny, without, out)
    _fill_forward(stock, medium, sorted(with_medium + rest), out)
    large = sum(rows for _, _, rows in runs[:medium])
    return large + first_fit(stock.remaining(medium), capacity, out, first_bin=large)


def _first_at_most(stock: _Stock, capacity: int, parts: int) -> int:
    return stock.index_below(capacity // parts)


def _add_medium_rows(
    stock: _Stock, medium: int, small: int, capacity: int, out: Placements
) -> tuple[list[BinRange], list[BinRange]]:
    """Open a bin per large row and, forward, add to each the longest medium row that fits."""
    with_medium: list[BinRange] = []
    without: list[BinRange] = []
    bin_ = 0
    for large in range(medium):
        room, bins = capacity - stock.lengths[large], stock.left[large]
        out.add(stock.take(large, bins), bins, bin_, 1)
        while bins and (index := stock.largest(room, medium)) < small:
            rows = min(bins, stock.left[index])
            out.add(stock.take(index, rows), rows, bin_, 1)
            with_medium.append((bin_, rows, room - stock.lengths[index]))
            bin_, bins = bin_ + rows, bins - rows
        if bins:
            without.append((bin_, bins, room))
            bin_ += bins
    return with_medium, without


def _add_pairs_of_small_rows(
    stock: _Stock, small: int, tiny: int, bins_without: Sequence[BinRange], out: Placements
) -> list[BinRange]:
    """Backward, add to each bin the shortest small row and the longest small row that fits beside it."""
    result: list[BinRange] = []
    shortest = tiny - 1
    for bin_, bins, room in reversed(bins_without):
        while bins:
            while shortest >= small and not stock.left[shortest]:
                shortest -= 1
            if shortest < small or stock.lengths[shortest] > room:
                break
            partner = stock.largest(room - stock.lengths[shortest], small)
            pairs = min(bins, stock.left[shortest])
            if partner == shortest:
                pairs = min(bins, stock.left[shortest] // 2)
            elif partner < shortest:
                pairs = min(pairs, stock.left[partner])
            if partner > shortest or not pairs:
                break
            bins -= pairs
            out.add(stock.take(shortest, pairs), pairs, bin_ + bins, 1)
            out.add(stock.take(partner, pairs), pairs, bin_ + bins, 1)
            result.append((bin_ + bins, pairs, room - stock.lengths[shortest] - stock.lengths[partner]))
        if bins:
            result.append((bin_, bins, room))
    return result


def _fill_forward(stock: _Stock, start: int, ranges: Sequence[BinRange], out: Placements) -> None:
    """Forward, fill each bin with the longest rows that fit, one after the other."""
    for bin_, bins, room in ranges:
        while bins:
            pattern = _longest_that_fit(stock, start, room)
            if not pattern:
                break
            # Equal bins are filled alike while every length of the pattern lasts.
            alike = min(bins, min(stock.left[index] // rows for index, rows in pattern))
            for index, rows in pattern:
                out.add(stock.take(index, rows * alike), rows * alike, bin_, rows)
            bin_, bins = bin_ + alike, bins - alike


def _longest_that_fit(stock: _Stock, start: int, room: int) -> list[tuple[int, int]]:
    """Return [(index, rows)] that greedily fill one bin."""
    pattern: list[tuple[int, int]] = []
    index = stock.largest(room, start)
    while index < len(stock.lengths):
        rows = min(stock.left[index], room // stock.lengths[index])
        pattern.append((index, rows))
        room -= rows * stock.lengths[index]
        index = stock.largest(room, index + 1)
    return pattern

"""The places of an order at which there is something left for a task."""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from headrace.data_plane.store.forms import Rows

Mask = NDArray[np.bool_]


class OpenPlaces:
    """Places of an order that grows at its end; a walk goes over them from the first one on, or back from the last.

    What a walk finds closed it takes out, so that no other passes it again. So a walk costs what is open on its way,
    and what has closed there since the last one, whatever the order was or will be elsewhere.
    """

    def __init__(self) -> None:
        self._places: Rows = np.empty(0, np.int64)
        self._first = self._last = 0
        self.seen = 0
        """How many places of the order it has been told of."""

    def see(self, places: int) -> None:
        """Take in the new places of an order that has so many by now."""
        new = max(places - self.seen, 0)
        if self._last + new > len(self._places):
            old = self._places[self._first : self._last]
            self._places = np.empty(2 * (len(old) + new), np.int64)
            self._places[: len(old)] = old
            self._first, self._last = 0, len(old)
        self._places[self._last : self._last + new] = np.arange(places - new, places)
        self._last, self.seen = self._last + new, places

    def forget(self, place: int) -> None:
        """Ask for the places from that one on again: some may be open again."""
        self._last = self._first + int(np.searchsorted(self._places[self._first : self._last], place))
        self.seen = min(self.seen, place)

    def walk(self, is_open: Callable[[Rows], Mask], width: int, *, is_back: bool) -> Iterator[Rows]:
        """Yield the open ones of the next `width` places, in their order; of twice as many each time."""
        passed = 0
        while passed < self._last - self._first:
            if is_back:
                stop = self._last - passed
                start = max(self._first, stop - width)
            else:
                start = self._first + passed
                stop = min(self._last, start + width)
            left = self._places[start:stop]
            left = left[is_open(left)]
            if len(left) < stop - start:
                self._close_up(start, stop, left, is_back=is_back)
            passed, width = passed + len(left), 2 * width
            yield left

    def _close_up(self, start: int, stop: int, left: Rows, *, is_back: bool) -> None:
        """Leave only some of the places between two, next to which lies what the walk has passed."""
        if is_back:
            kept = np.concatenate([left, self._places[stop : self._last]])
            self._last = start + len(kept)
        else:
            kept = np.concatenate([self._places[self._first : start], left])
            self._first = stop - len(kept)
            start = self._first
        self._places[start : start + len(kept)] = kept

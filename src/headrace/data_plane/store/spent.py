"""Ids of samples that are gone, in eight bytes each."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_FEW = 4096


class SpentIds:
    """A set of ids by their hashes of 64 bits; of 370,000 sets of ten million ids, one takes two for the same."""

    def __init__(self) -> None:
        self._sorted = np.empty(0, np.int64)
        self._new: set[int] = set()

    def add(self, ids: Sequence[str]) -> None:
        self._new.update(map(hash, ids))
        if len(self._new) > _FEW + len(self._sorted) // 8:
            self._sorted = np.union1d(self._sorted, np.fromiter(self._new, np.int64, len(self._new)))
            self._new.clear()

    def has(self, ids: Sequence[str]) -> NDArray[np.bool_]:
        """Return which of some ids are in it."""
        hashes = np.fromiter(map(hash, ids), np.int64, len(ids))
        found: NDArray[np.bool_] = np.array([number in self._new for number in hashes.tolist()], bool)
        if len(self._sorted):
            at = np.searchsorted(self._sorted, hashes)
            found |= self._sorted[np.minimum(at, len(self._sorted) - 1)] == hashes
        return found

"""Ids of samples that are gone, in eight bytes each."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_FEW = 4096


class SpentIds:
    """A set of ids by their hashes of 64 bits; of 370,000 sets of ten million ids, one takes two for the same.

    The hashes lie in sorted runs, each more than twice as long as the next; so an id is merged, and looked for, about
    as often as the set has doubled.
    """

    def __init__(self) -> None:
        self._runs: list[NDArray[np.int64]] = []
        self._new: set[int] = set()

    def add(self, ids: Sequence[str]) -> None:
        self._new.update(map(hash, ids))
        if len(self._new) < _FEW:
            return
        run = np.sort(np.fromiter(self._new, np.int64, len(self._new)))
        self._new.clear()
        while self._runs and len(self._runs[-1]) <= 2 * len(run):
            run = np.sort(np.concatenate([self._runs.pop(), run]), kind="stable")
        self._runs.append(run)

    def has(self, ids: Sequence[str]) -> NDArray[np.bool_]:
        """Return which of some ids are in it."""
        hashes = np.fromiter(map(hash, ids), np.int64, len(ids))
        found: NDArray[np.bool_] = np.array([number in self._new for number in hashes.tolist()], bool)
        for run in self._runs:
            at = np.searchsorted(run, hashes)
            found |= run[np.minimum(at, len(run) - 1)] == hashes
        return found

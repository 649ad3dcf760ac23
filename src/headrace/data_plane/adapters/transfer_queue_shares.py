"""Which of the several indexes of a TransferQueue store has which rows."""

from collections.abc import Callable, Sequence
from typing import TypeVar
from zlib import crc32

import numpy as np

from headrace.data_plane.adapters.transfer_queue_ask import IndexAsker
from headrace.data_plane.adapters.transfer_queue_socket import Elsewhere
from headrace.data_plane.store.claims import Registration
from headrace.data_plane.store.columns import Rows
from headrace.data_plane.store.merge import owner_of

T = TypeVar("T")


class Shares:
    """Deals rows to indexes by a hash of their group; where a tag names the groups, a partition lies in one index."""

    def __init__(self, asker: IndexAsker) -> None:
        self._asker, self._count = asker, asker.count
        # Partitions whose groups a tag names, as far as this process knows.
        self._tagged: dict[str, bool] = {}

    def _shares(self, partition_id: str, ids: Sequence[str]) -> dict[int, Rows]:
        """Return the indexes that have rows, with the places of these in `ids`."""
        if self._tagged.get(partition_id):
            return {crc32(partition_id.encode()) % self._count: np.arange(len(ids))}
        owners = np.array([owner_of(str(sample_id), self._count) for sample_id in ids], np.int64)
        shares = {int(index): np.flatnonzero(owners == index) for index in np.unique(owners)}
        # Of several refusals the first is told: that of the first rows.
        return dict(sorted(shares.items(), key=lambda share: int(share[1][0])))

    def _ids_of(self, partition_id: str, ids: Sequence[str]) -> dict[int, list[str]]:
        """Return the ids that each index has of some."""
        shares = self._shares(partition_id, ids)
        return {index: [ids[row] for row in rows.tolist()] for index, rows in shares.items()}

    def _routed(self, partition_id: str, attempt: Callable[[], T]) -> T:
        """Return what `attempt` does, tried again where the partition has been registered anew by somebody else."""
        for _ in range(3):
            try:
                return attempt()
            except Elsewhere:
                self._learn(partition_id)
        return attempt()

    def _learn(self, partition_id: str) -> bool:
        """Ask how the groups of a partition are named; return whether that is news."""
        before = self._tagged.get(partition_id, False)
        (self._tagged[partition_id],) = self._asker.ask([(0, "is_tagged", (partition_id,))])
        return before != self._tagged[partition_id]

    def register(self, registration: Registration) -> None:
        self._asker.all("register", registration)
        self._tagged[registration.partition_id] = registration.group_tag is not None

"""What a journal asks of the several indexes of a TransferQueue store."""

from collections.abc import Sequence

from headrace.data_plane.adapters.transfer_queue_ask import IndexAsker
from headrace.data_plane.store.columns import Rows


class SharedHistory:
    """Claims that are in force, and those of before a restart, in several indexes."""

    _asker: IndexAsker

    def _shares(self, partition_id: str, ids: Sequence[str]) -> dict[int, Rows]:
        raise NotImplementedError

    def _hold(self, partition_id: str, claim: str) -> list[int]:
        raise NotImplementedError

    def claimed_ids(self, partition_id: str, claim: str) -> list[str]:
        holders = self._hold(partition_id, claim)
        parts = self._asker.ask([(i, "claimed_ids", (partition_id, claim)) for i in holders])
        return [sample_id for part in parts for sample_id in part]

    def mark_consumed(self, partition_id: str, task: str, ids: Sequence[str]) -> None:
        own = {i: [ids[row] for row in rows.tolist()] for i, rows in self._shares(partition_id, ids).items()}
        self._asker.ask([(i, "mark_consumed", (partition_id, task, mine)) for i, mine in own.items()])

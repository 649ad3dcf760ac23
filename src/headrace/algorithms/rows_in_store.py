"""A step's rows in the store: the driver holds their metadata, workers and the rollout actor read and write them."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch

from headrace.algorithms.grpo import Traffic
from headrace.data_plane.column_io import write_columns
from headrace.data_plane.interfaces import KVBatchMeta
from headrace.data_plane.worker_mixin import bytes_moved
from headrace.distributed.worker_groups import WorkerGroup
from headrace.errors import DataPlaneError, HeadraceError
from headrace.models.policy.tq_policy import TQPolicy


class DataPlaneRows:
    """Rows in the store, named by a KVBatchMeta."""

    def __init__(self, policy: TQPolicy, rollouts: WorkerGroup) -> None:
        self._policy = policy
        self._rollouts = rollouts
        self._before = Traffic()
        self.rollout_call: tuple[str, dict[str, Any]] = (
            "rollout_to_tq",
            {"partition_id": policy.tq_partition_id},
        )

    @contextmanager
    def opened(self, num_samples: int, group_size: int) -> Iterator[None]:
        """Open the step's partition; whatever ends the context, the partition is empty afterwards."""
        self._policy.prepare_step(num_samples, group_size)
        finished = False
        try:
            yield
            finished = True
        finally:
            # The error that ended the step is the one to tell: a store that is lost would add another here.
            with nullcontext() if finished else suppress(HeadraceError):
                self._policy.dp_client.clear_samples(None, self._policy.tq_partition_id)

    def keep(self, rows: KVBatchMeta, indices: Sequence[int]) -> KVBatchMeta:
        """Clear all other rows from the store, so that filtered samples never pile up."""
        kept = rows.subset(indices)
        gone = sorted(set(rows.sample_ids) - set(kept.sample_ids))
        if gone:
            self._policy.discard_samples(gone, rows.partition_id)
        return kept

    def join(self, parts: Sequence[KVBatchMeta]) -> KVBatchMeta:
        return parts[0].concat(*parts[1:])

    def batch(self, rows: KVBatchMeta) -> KVBatchMeta:
        return rows

    def reduce(
        self,
        batch: KVBatchMeta,
        reduce_fn: Callable[..., Mapping[str, torch.Tensor]],
        fields: Sequence[str],
    ) -> Mapping[str, torch.Tensor]:
        return self._policy.reduce_rows_from_meta(batch, reduce_fn, select_fields=fields)

    def write(self, batch: KVBatchMeta, columns: Mapping[str, torch.Tensor]) -> None:
        write_columns(self._policy.dp_client, batch, columns)

    def derive(
        self,
        batch: KVBatchMeta,
        make: Callable[..., Mapping[str, torch.Tensor]],
        fields: Sequence[str],
    ) -> None:
        self._policy.derive_columns_from_meta(batch, make, select_fields=fields)

    def read(self, batch: KVBatchMeta, names: Sequence[str], count: int | None = None) -> Mapping[str, Any]:
        some = batch if count is None else batch.slice(0, count)
        return self._policy.read_from_dataplane(some, select_fields=names)

    def finish(self, batch: KVBatchMeta) -> None:
        """Clear the step's rows.

        Raises:
            DataPlaneError: the partition holds rows that the step does not know (a leak), named.
        """
        self._policy.finish_step(batch)
        left = self._policy.dp_client.sample_ids(batch.partition_id)
        if left:
            raise DataPlaneError(
                f"{len(left)} rows are left in partition '{batch.partition_id}' after the step, for example "
                f"{left[:3]}; each row of a step must be trained on or discarded"
            )

    def traffic(self) -> Traffic:
        """Return what went through the store, and what of it through the driver, since the last call."""
        policy = self._policy
        moved = Counter(policy.moved_bytes()) + Counter(self._rollouts.run_all("moved_bytes")[0])
        driver = policy.workers.transferred_bytes + self._rollouts.transferred_bytes
        if driver:
            driver += sum(bytes_moved(policy.dp_client).values())
        now = Traffic(moved, driver)
        since, self._before = now - self._before, now
        return since

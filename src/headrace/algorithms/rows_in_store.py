"""GRPO over the data plane: the driver holds metadata, the store holds the rows.

    SyncRolloutActor  rolls out and puts the rows, once            -> KVBatchMeta + a few numbers per sample
    TQPolicy          cuts the ids by rank; its workers fetch rows and write logprobs back
    driver            turns rewards into advantages, writes one number per sample
    TQPolicy          trains; then the rows are cleared

`grpo.run_step` puts these in order; `rows_in_memory.py` is the same with rows in memory.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch

from headrace.algorithms.grpo import Traffic
from headrace.algorithms.rollout_worker import Rollouts
from headrace.algorithms.sample_table import SampleTable
from headrace.data_plane.interfaces import KVBatchMeta
from headrace.data_plane.worker_mixin import bytes_moved
from headrace.errors import DataPlaneError, HeadraceError
from headrace.experience.types import Prompt
from headrace.models.interfaces import LossFn
from headrace.models.policy.tq_policy import TQPolicy
from headrace.models.router_replay.stats import ReplayStats


class DataPlaneRows:
    """Rows in the store, named by a KVBatchMeta."""

    def __init__(self, policy: TQPolicy, rollouts: Rollouts) -> None:
        self._policy = policy
        self._rollouts = rollouts
        self._group_size = 1
        self._before = Traffic()

    @contextmanager
    def opened(self, num_samples: int, group_size: int) -> Iterator[None]:
        """Open the step's partition; whatever ends the context, the partition is empty afterwards."""
        self._group_size = group_size
        partition = self._policy.tq_partition_id
        self._policy.prepare_step(num_samples, group_size)
        finished = False
        try:
            yield
            finished = True
        finally:
            # The error that ended the step is the one to tell: a store that is lost would add another here.
            with nullcontext() if finished else suppress(HeadraceError):
                self._policy.dp_client.clear_samples(None, partition)

    def rollout(
        self, prompts: Sequence[Prompt], *, tag: str, seed: int
    ) -> tuple[KVBatchMeta, SampleTable, dict[str, float]]:
        """Have the actor roll out and put; only metadata and per-sample numbers come back."""
        meta, carry, _, generation_metrics = self._rollouts.rollout_to_tq(
            {"prompts": prompts, "seed": seed, "tag": tag},
            partition_id=self._policy.tq_partition_id,
            group_size=self._group_size,
        )
        return meta, SampleTable.from_values(carry), generation_metrics

    def keep(self, rows: KVBatchMeta, indices: Sequence[int]) -> KVBatchMeta:
        """Clear all other rows from the store, so that filtered samples never pile up."""
        kept = rows.subset(indices)
        gone = sorted(set(rows.sample_ids) - set(kept.sample_ids))
        if gone:
            self._policy.discard_samples(gone, rows.partition_id)
        return kept

    def join(self, parts: Sequence[KVBatchMeta]) -> KVBatchMeta:
        """Concatenate metadata; the rows stay where they are."""
        return parts[0].concat(*parts[1:])

    def prev_logprobs(self, rows: KVBatchMeta, *, unfiltered: bool) -> None:
        self._policy.get_logprobs_from_meta(rows, unfiltered=unfiltered)

    def reference_logprobs(self, rows: KVBatchMeta) -> None:
        self._policy.get_reference_policy_logprobs_from_meta(rows)

    def reduce(
        self,
        rows: KVBatchMeta,
        reduce_fn: Callable[..., Mapping[str, torch.Tensor]],
        fields: Sequence[str],
    ) -> dict[str, torch.Tensor]:
        return self._policy.reduce_rows_from_meta(rows, reduce_fn, select_fields=fields)

    def write(self, rows: KVBatchMeta, columns: Mapping[str, torch.Tensor]) -> None:
        self._policy.write_to_dataplane(rows, columns)

    def derive(
        self,
        rows: KVBatchMeta,
        make: Callable[..., Mapping[str, torch.Tensor]],
        fields: Sequence[str],
    ) -> None:
        self._policy.derive_columns_from_meta(rows, make, select_fields=fields)

    def train(self, rows: KVBatchMeta, loss_fn: LossFn) -> dict[str, Any]:
        return self._policy.train_from_meta(rows, loss_fn)

    def conversations(self, rows: KVBatchMeta, count: int) -> list[list[dict[str, str]]]:
        few = self._policy.read_from_dataplane(rows.slice(0, count), select_fields=["message_log"])
        return list(few["message_log"])

    def finish(self, rows: KVBatchMeta) -> None:
        """Clear the step's rows.

        Raises:
            DataPlaneError: the partition holds rows that the step does not know (a leak), named.
        """
        self._policy.finish_step(rows)
        left = self._policy.dp_client.sample_ids(rows.partition_id)
        if left:
            raise DataPlaneError(
                f"{len(left)} rows are left in partition '{rows.partition_id}' after the step, for example "
                f"{left[:3]}; each row of a step must be trained on or discarded"
            )

    def replay_stats(self) -> dict[str, ReplayStats]:
        return self._policy.take_replay_stats()

    def columns(self, rows: KVBatchMeta, names: Sequence[str]) -> Mapping[str, torch.Tensor]:
        return self._policy.read_from_dataplane(rows, select_fields=names)

    def traffic(self) -> Traffic:
        """Return what went through the store, and what of it through the driver, since the last call."""
        policy = self._policy
        moved = Counter(policy.moved_bytes()) + Counter(self._rollouts.moved_bytes())
        driver = policy.workers.transferred_bytes + self._rollouts.transferred_bytes
        if driver:
            driver += sum(bytes_moved(policy.dp_client).values())
        now = Traffic(moved, driver)
        since, self._before = now - self._before, now
        return since

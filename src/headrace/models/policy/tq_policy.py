"""The policy that works from metadata: workers fetch their rows from the store and write results back.

Every dispatch cuts the list of sample ids by data-parallel rank (`shard_meta_for_dp`); no tensor passes through
the driver, and no key is made here: ids come from the rollout's first write and live until `finish_step`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch

from headrace.config import DataPlaneConfig
from headrace.data_plane.column_io import read_columns, write_columns
from headrace.data_plane.factory import build_data_plane_client
from headrace.data_plane.interfaces import KVBatchMeta, PartitionReport
from headrace.data_plane.preshard import shard_meta_for_dp
from headrace.data_plane.schema import (
    CLAIM,
    DP_TRAIN_FIELDS,
    LP_SEED_FIELDS,
    PREV_UNFILTERED_LOGPROBS,
    UNFILTERED_LOGPROBS,
    added_fields,
    fields_with_optional_routed_experts,
    pad_values,
)
from headrace.data_plane.worker_mixin import bytes_moved, plan_fields
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.distributed.worker_groups import registered
from headrace.errors import DataPlaneError, HeadraceError, SchemaError
from headrace.models.interfaces import LossFn
from headrace.models.policy.launch import Launcher
from headrace.models.policy.lm_policy import Policy, RowReducer, TokenBudget, logprob_options, timed
from headrace.models.policy.results import Traffic, collect_steps, merge_rows
from headrace.utils.timer import Timer


class TQPolicy(Policy):
    """A Policy whose batches are KVBatchMetas; same results, row order and return shapes as `Policy`."""

    def __init__(
        self,
        *args: Any,
        dp_cfg: DataPlaneConfig | Mapping[str, Any],
        tq_partition_id: str = "train",
        **kwargs: Any,
    ) -> None:
        self.dp_cfg = dp_cfg
        self.tq_partition_id = tq_partition_id
        self.dp_client = build_data_plane_client(dp_cfg, bootstrap=True)
        self._open_lengths: list[int] = []
        self._moved_before = Traffic()
        with ExitStack() as undo:
            undo.callback(self.dp_client.close)
            super().__init__(*args, auto_launcher=launcher_for(dp_cfg), **kwargs)
            undo.callback(self.workers.shutdown)
            self.workers.run_all("setup_data_plane", dp_cfg, added_fields())
            undo.pop_all()

    # A step's rows.

    @property
    def rollout_call(self) -> tuple[str, dict[str, Any]]:
        return "rollout_to_tq", {"partition_id": self.tq_partition_id}

    @contextmanager
    def step_rows(self, num_samples: int, group_size: int) -> Iterator[None]:
        """Open the step's partition; whatever ends the context, the partition is empty afterwards.

        Raises:
            DataPlaneError: a step that ended well has left rows (a leak), named.
        """
        self.prepare_step(num_samples, group_size)
        left: list[str] = []
        finished = False
        try:
            yield
            left = self.dp_client.sample_ids(self.tq_partition_id)
            finished = True
        finally:
            # The error that ended the step is the one to tell: a store that is lost would add another here.
            with nullcontext() if finished else suppress(HeadraceError):
                self.dp_client.clear_samples(None, self.tq_partition_id)
        if left:
            raise DataPlaneError(
                f"{len(left)} rows are left in partition '{self.tq_partition_id}' after the step, for example "
                f"{left[:3]}; each row of a step must be trained on or discarded"
            )

    def prepare_step(self, num_samples: int, group_size: int | None = None) -> None:
        """Open the step's partition, empty, for every column that a stage of the step reads."""
        self.dp_client.register_partition(
            self.tq_partition_id,
            fields_with_optional_routed_experts(DP_TRAIN_FIELDS, enabled=True),
            num_samples,
            ["prev_lp", "ref_lp", "train"],
            grpo_group_size=group_size,
        )

    def prepare_val_partition(self, num_samples: int, *, partition_id: str = "val") -> None:
        """Open a validation partition: one reader, no groups."""
        self.dp_client.register_partition(partition_id, LP_SEED_FIELDS, num_samples, ["val"])

    def discard_samples(self, sample_ids: Sequence[str], partition_id: str) -> None:
        """Remove rows in mid-step (filtered groups, a failed step)."""
        self.dp_client.clear_samples(sample_ids, partition_id)

    def finish_step(self, rows: KVBatchMeta) -> None:
        """Clear the step's rows; leased ones only while the lease lasts.

        Raises:
            ClaimExpired: it has run out.
        """
        self.dp_client.clear_samples(rows.sample_ids, rows.partition_id, claim=rows.extra_info.get(CLAIM))

    def keep_rows(self, rows: KVBatchMeta, indices: Sequence[int]) -> KVBatchMeta:
        kept = rows.subset(indices)
        gone = sorted(set(rows.sample_ids) - set(kept.sample_ids))
        if gone:
            self.discard_samples(gone, rows.partition_id)
        return kept

    def join_rows(self, parts: Sequence[KVBatchMeta]) -> KVBatchMeta:
        return parts[0].concat(*parts[1:])

    def padded(self, rows: Any) -> Any:
        """Return rows of the store as they are, since workers pad what they fetch; rows in memory padded."""
        return rows if isinstance(rows, KVBatchMeta) else super().padded(rows)

    def _stamp_pad_seqlen(self, meta: KVBatchMeta) -> None:
        """Set the batch-wide pad target in `meta.extra_info`; a target grows if a longer row has joined."""
        if meta.sequence_lengths is None:
            raise SchemaError(
                f"the meta of partition '{meta.partition_id}' has no sequence_lengths to pad by"
            )
        meta.stamp_pad_target(self.cfg.make_sequence_length_divisible_by)

    def read_from_dataplane(
        self,
        meta: KVBatchMeta,
        *,
        select_fields: Sequence[str],
        pad_value_dict: Mapping[str, int | float] | None = None,
    ) -> BatchedDataDict:
        pads = {**pad_values(self._pad_token_id), **(pad_value_dict or {})}
        return read_columns(self.dp_client, meta, select_fields, pad_value_dict=pads)

    def read_columns(
        self, rows: KVBatchMeta, names: Sequence[str], count: int | None = None
    ) -> BatchedDataDict:
        some = rows if count is None else rows.slice(0, count)
        return self.read_from_dataplane(some, select_fields=names)

    @property
    def write_columns(self) -> Callable[[Any, Mapping[str, Any]], Any]:
        """Writes columns that the driver computed, and adds them to the fields of the meta that it is given."""
        return partial(write_columns, self.dp_client)

    def write_to_dataplane(self, meta: KVBatchMeta, fields: Mapping[str, Any]) -> None:
        self.write_columns(meta, fields)

    def moved_bytes(self) -> dict[str, int]:
        parts = [bytes_moved(self.dp_client), *self.workers.run_all("moved_bytes")]
        return dict(sum((Counter(part) for part in parts), Counter()))

    def traffic(self, rollouts: Traffic) -> Traffic:
        now = Traffic(self.moved_bytes(), self.workers.transferred_bytes) + rollouts
        if now.driver_bytes:
            now += Traffic(driver_bytes=sum(bytes_moved(self.dp_client).values()))
        since, self._moved_before = now - self._moved_before, now
        return since

    def store_report(self, *, limit: int) -> tuple[str, PartitionReport] | None:
        # A store that cannot tell, or has no such partition yet, has nothing to show.
        with suppress(HeadraceError):
            return self.tq_partition_id, self.dp_client.partition_report(self.tq_partition_id, limit)
        return None

    # Stages: by the names that `Policy` has, and, below, by those that say `meta`.

    def train(self, data: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Train on the rows of a meta, or on a batch in memory."""
        if isinstance(data, KVBatchMeta):
            return self.train_from_meta(data, *args, **kwargs)
        return super().train(data, *args, **kwargs)

    def prev_logprobs(self, rows: Any, *, unfiltered: bool = False) -> None:
        self.get_logprobs_from_meta(rows, unfiltered=unfiltered)

    def reference_logprobs(self, rows: Any) -> None:
        self.get_reference_policy_logprobs_from_meta(rows)

    def get_logprobs_from_meta(
        self,
        meta: KVBatchMeta,
        micro_batch_size: int | None = None,
        timer: Timer | None = None,
        *,
        unfiltered: bool = False,
    ) -> None:
        """Have the workers write the policy's logprobs as `prev_logprobs`.

        With `unfiltered`, also `prev_unfiltered_logprobs`: those at the same temperature without top-k and top-p.
        """
        self._logprob_dispatch(
            meta,
            task_name="prev_lp",
            worker_method="get_logprobs_presharded",
            timer_prefix="get_logprobs",
            timer=timer,
            common_kwargs=logprob_options(micro_batch_size, unfiltered=unfiltered),
        )
        meta.add_fields(["prev_logprobs", *([PREV_UNFILTERED_LOGPROBS] if unfiltered else [])])

    def get_reference_policy_logprobs_from_meta(
        self, meta: KVBatchMeta, micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> None:
        """Have the workers write the reference's logprobs as `reference_policy_logprobs`."""
        self._logprob_dispatch(
            meta,
            task_name="ref_lp",
            worker_method="get_reference_policy_logprobs_presharded",
            timer_prefix="get_reference_policy_logprobs",
            timer=timer,
            common_kwargs={"micro_batch_size": micro_batch_size},
            with_routes=False,
        )
        meta.add_fields(["reference_policy_logprobs"])

    def _logprob_dispatch(
        self,
        meta: KVBatchMeta,
        *,
        task_name: str,
        worker_method: str,
        timer_prefix: str,
        timer: Timer | None,
        common_kwargs: dict[str, Any],
        with_routes: bool = True,
    ) -> None:
        """Run a logprob stage; workers fetch the seed columns only and write their result back themselves."""
        wanted = fields_with_optional_routed_experts(LP_SEED_FIELDS, enabled=with_routes)
        shards, _ = self._shard_meta(
            meta, [*wanted, *self.media_fields], "logprob_mb_tokens", None, task_name
        )
        with timed(timer, f"{timer_prefix}/run"):
            self.workers.run_sharded(worker_method, shards, **common_kwargs)

    def train_from_meta(
        self,
        meta: KVBatchMeta,
        loss_fn: LossFn,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
        timer: Timer | None = None,
        train_fields: Sequence[str] = DP_TRAIN_FIELDS,
    ) -> dict[str, Any]:
        """Train on the rows of `meta`; returns what `Policy.train` returns. The rows stay in the store."""
        gbs = gbs or self.cfg.train_global_batch_size
        wanted = self._train_columns(loss_fn, train_fields)
        shards, _ = self._shard_meta(meta, wanted, "train_mb_tokens", gbs, "train")
        with timed(timer, "policy_training/run"):
            results = self.workers.run_sharded(
                "train_presharded", shards, loss_fn=loss_fn, eval_mode=eval_mode, gbs=gbs, mbs=mbs
            )
        assert meta.sequence_lengths is not None
        return self._finish_train(results, meta.sequence_lengths)

    # The same training step in pieces: the rows of a global batch may come in several parts.

    def begin_train_step(self, meta: KVBatchMeta | None = None) -> None:
        """Open a step over the global batch of `meta`: its valid sequences and tokens are counted.

        None: its rows are not known yet; `finish_train_step` is told them.
        """
        self._open_lengths = []
        self.workers.run_all("begin_train_step", *([] if meta is None else self._valid(meta)))

    def _valid(self, meta: KVBatchMeta) -> tuple[torch.Tensor, torch.Tensor]:
        counts = self.reduce_rows(meta, valid_counts, LP_SEED_FIELDS)
        return counts["seqs"].sum(), counts["toks"].sum()

    def train_microbatches_from_meta(
        self, meta: KVBatchMeta, loss_fn: LossFn, mbs: int | None = None
    ) -> None:
        """Add the gradients of some rows of the open step's global batch."""
        wanted = self._train_columns(loss_fn, DP_TRAIN_FIELDS)
        shards, _ = self._shard_meta(meta, wanted, "train_mb_tokens", None, "train")
        self.workers.run_sharded("train_microbatches_presharded", shards, loss_fn=loss_fn, mbs=mbs)
        self._open_lengths.extend(meta.sequence_lengths or [])

    def finish_train_step(self, meta: KVBatchMeta | None = None) -> dict[str, Any]:
        """Update the weights; returns what `train_from_meta` returns.

        `meta` are all rows of the step, if `begin_train_step` was not told them: the gradient of their sum is divided
        now, so that the last bits are others than those of a step that knew its rows.
        """
        counts = [] if meta is None else self._valid(meta)
        results = [collect_steps([step]) for step in self.workers.run_all("finish_train_step", *counts)]
        return self._finish_train(results, self._open_lengths)

    def abort_train_step(self) -> None:
        """Drop the open step and its gradients; without an open step, do nothing."""
        self.workers.run_all("abort_train_step")

    def reduce_rows(
        self, rows: KVBatchMeta, reduce_fn: RowReducer, select_fields: Sequence[str]
    ) -> dict[str, torch.Tensor]:
        """Return `reduce_fn` of the rows, computed by the workers: {name: (N,)} in the caller's row order."""
        shards, inverse = self._shard_meta(rows, select_fields, None, None, "train")
        results = self.workers.run_sharded("reduce_rows_presharded", shards, reduce_fn=reduce_fn)
        return dict(merge_rows(results, inverse))

    def derive_columns(self, rows: KVBatchMeta, make: RowReducer, select_fields: Sequence[str]) -> None:
        """Have the workers write the columns that `make` gives of their rows, and add them to `rows.fields`."""
        shards, _ = self._shard_meta(rows, select_fields, None, None, "train")
        names = self.workers.run_sharded("derive_columns_presharded", shards, make=make)
        rows.add_fields(names[0])

    def _train_columns(self, loss_fn: LossFn, train_fields: Sequence[str]) -> list[str]:
        standard = fields_with_optional_routed_experts(train_fields, enabled=True)
        # The forward itself makes the unfiltered logprobs.
        asked = set(getattr(loss_fn, "required_columns", ())) - {UNFILTERED_LOGPROBS}
        return list(dict.fromkeys([*standard, *self.media_fields, *sorted(asked)]))

    def _shard_meta(
        self,
        meta: KVBatchMeta,
        wanted: Sequence[str],
        budget: TokenBudget | None,
        batch_size: int | None,
        task_name: str,
    ) -> tuple[list[KVBatchMeta], Sequence[int] | None]:
        self._stamp_pad_seqlen(meta)
        packing, dynamic = self._packing_args(budget) if budget else (None, None)
        narrowed = meta.with_fields(plan_fields(meta.fields, wanted))
        narrowed.task_name = task_name
        narrowed.tags = None  # the driver's own: workers read none, and they are most of a meta's bytes
        return shard_meta_for_dp(
            narrowed,
            dp_world=self.workers.dp_size,
            batch_size=batch_size,
            sequence_packing_args=packing,
            dynamic_batching_args=dynamic,
        )

    def shutdown(self) -> bool:
        """End the workers, then the store, also when the workers are dead already; may be called twice."""
        try:
            return super().shutdown()
        finally:
            self.dp_client.close()


def launcher_for(dp_cfg: DataPlaneConfig | Mapping[str, Any]) -> Launcher:
    """Return how workers start unless the recipe says: on the store's Ray cluster, where it has one."""
    return "ray" if dict(dp_cfg).get("impl") == "transfer_queue" else "spawn"


@registered
def valid_counts(rows: BatchedDataDict) -> dict[str, torch.Tensor]:
    """Valid sequences and tokens of each row, as `automodel.data.valid_counts` counts them."""
    mask = rows["sample_mask"].float()
    return {"seqs": mask, "toks": (rows["token_mask"][:, 1:].float() * mask.unsqueeze(-1)).sum(-1)}

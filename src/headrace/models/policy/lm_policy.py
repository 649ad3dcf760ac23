"""The policy as the driver sees it: whole batches in, whole batches out, over data-parallel workers.

`Policy` carries tensors through the driver; `TQPolicy` (tq_policy.py) does the same from metadata.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from headrace.config import ClusterConfig, GenerationConfig, OptimizerConfig, PolicyConfig, SchedulerConfig
from headrace.data_plane.interfaces import PartitionReport
from headrace.data_plane.route_binding import sample_salts
from headrace.data_plane.schema import (
    INPUT_IDS,
    INPUT_LENGTHS,
    LP_SEED_FIELDS,
    PER_TOKEN_FIELDS,
    PREV_UNFILTERED_LOGPROBS,
    ROUTE_SALTS,
    ROUTED_EXPERTS_FIELD,
    SAMPLE_ID,
    UNFILTERED_LOGPROBS,
    fields_with_optional_routed_experts,
    pad_values,
)
from headrace.data_plane.wire import materialize, wire_tensordict
from headrace.distributed.batched_data_dict import BatchedDataDict, DynamicBatchingArgs, SequencePackingArgs
from headrace.distributed.planner import MicrobatchPlan, plan_microbatches
from headrace.distributed.worker_groups import WorkerGroup
from headrace.models.interfaces import LossFn
from headrace.models.policy.launch import Launcher, build_worker_group
from headrace.models.policy.results import Traffic, aggregate_train_results, merge_rows
from headrace.models.router_replay.stats import ReplayStats
from headrace.utils.arguments import names_list
from headrace.utils.config_errors import validated
from headrace.utils.rounding import round_up
from headrace.utils.timer import Timer

TokenBudget = Literal["train_mb_tokens", "logprob_mb_tokens"]
Batch = BatchedDataDict
RowReducer = Callable[[Batch], Mapping[str, torch.Tensor]]


class Policy:
    """A trainable language model with optional frozen reference, on one or more workers.

    `cfg` and `generation` are sections of a recipe, or mappings with their keys.
    `media_fields` names undeclared columns that the model's forward takes (pixel values and the like). Several
    workers are processes of this machine, or on `cluster`, as `policy.parallel.launcher` says; `auto_launcher`
    is what its `auto` stands for.

    Raises:
        ConfigError: a model that cannot be built, or workers, parallel sizes and devices that do not fit together.
    """

    def __init__(
        self,
        cfg: PolicyConfig | Mapping[str, Any],
        generation: GenerationConfig | Mapping[str, Any],
        *,
        tokenizer: Any,
        seed: int,
        with_reference: bool = False,
        media_fields: Sequence[str] = (),
        workers: WorkerGroup | None = None,
        cluster: ClusterConfig | None = None,
        auto_launcher: Launcher = "spawn",
    ) -> None:
        self.cfg = validated(PolicyConfig, cfg, "policy")
        self.tokenizer = tokenizer
        self.media_fields = tuple(names_list("media_fields", media_fields))
        self.workers = workers or build_worker_group(
            self.cfg,
            validated(GenerationConfig, generation, "generation"),
            tokenizer=tokenizer,
            seed=seed,
            with_reference=with_reference,
            cluster=cluster or ClusterConfig(),
            auto_launcher=auto_launcher,
        )

    # A step's rows: columns in memory, jagged until `padded`. `TQPolicy` has them in the store.

    @property
    def rollout_call(self) -> tuple[str, dict[str, Any]]:
        """The method of `SyncRolloutActor` that makes rows, and its arguments."""
        return "rollout_in_memory", {}

    @contextmanager
    def step_rows(self, num_samples: int, group_size: int) -> Iterator[None]:
        """Return a context in which rows may be made; when it ends, also by an exception, none is left."""
        yield

    def keep_rows(self, rows: Any, indices: Sequence[int]) -> Any:
        """Return the rows at `indices`, in that order, and clear the others."""
        return rows.select_indices(indices)

    def join_rows(self, parts: Sequence[Any]) -> Any:
        return BatchedDataDict.from_batches(parts)

    def padded(self, rows: Any) -> Any:
        """Return the rows with tokens padded on the right, as workers get those of the store."""
        width = round_up(int(rows[INPUT_LENGTHS].max()), self.cfg.make_sequence_length_divisible_by)
        wire = wire_tensordict(dict(rows), rows.size)
        batch = materialize(wire, pad_value_dict=pad_values(self._pad_token_id), pad_to_seqlen=width)
        if ROUTED_EXPERTS_FIELD in batch:
            batch[ROUTE_SALTS] = sample_salts(batch[SAMPLE_ID].tolist())
        return batch

    def reduce_rows(
        self, rows: Any, reduce_fn: RowReducer, select_fields: Sequence[str]
    ) -> Mapping[str, torch.Tensor]:
        """Return what `reduce_fn` makes of the columns: {name: (N,)} in the rows' order."""
        return reduce_fn(rows.select_columns(select_fields))

    def derive_columns(self, rows: Any, make: RowReducer, select_fields: Sequence[str]) -> None:
        """Add the columns that `make` makes of others."""
        rows.update(self.reduce_rows(rows, make, select_fields))

    def write_columns(self, rows: Any, columns: Mapping[str, Any]) -> None:
        rows.update(columns)

    def read_columns(self, rows: Any, names: Sequence[str], count: int | None = None) -> Mapping[str, Any]:
        """Return columns of the first `count` rows, or of all."""
        return {name: rows[name][:count] for name in names}

    def finish_step(self, rows: Any) -> None:
        """Clear the step's rows; in memory they go with the batch."""

    def traffic(self, rollouts: Traffic) -> Traffic:
        """Return what went through the data plane since the last call; nothing in memory.

        `rollouts` is what the side that makes samples has moved, all in all.
        """
        return Traffic()

    # Batches.

    def train(
        self,
        data: Batch,
        loss_fn: LossFn,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
        timer: Timer | None = None,
    ) -> dict[str, Any]:
        """Take one optimizer step per global batch of `gbs` rows (none in `eval_mode`).

        Returns:
            `loss` (0-D, mean over global batches), `grad_norm`, `all_mb_metrics` (name -> value),
            `total_flops`, `num_ranks`, `theoretical_tflops`.
        """
        gbs = gbs or self.cfg.train_global_batch_size
        with timed(timer, "policy_training/shard"):
            shards, _ = self._shard(data, "train_mb_tokens", batch_size=gbs)
        with timed(timer, "policy_training/run"):
            results = self.workers.run_sharded(
                "train", shards, loss_fn=loss_fn, eval_mode=eval_mode, gbs=gbs, mbs=mbs
            )
        return self._finish_train(results, data[INPUT_LENGTHS].tolist())

    def get_logprobs(
        self,
        data: Batch,
        micro_batch_size: int | None = None,
        timer: Timer | None = None,
        *,
        unfiltered: bool = False,
    ) -> Batch:
        """Return {"logprobs": (N, S) float32} of the policy, in the caller's row order.

        With `unfiltered`, also `unfiltered_logprobs`: those at the same temperature without top-k and top-p.
        """
        options = logprob_options(micro_batch_size, unfiltered=unfiltered)
        return self._logprobs(data, "get_logprobs", timer=timer, **options)

    def get_reference_policy_logprobs(
        self, data: Batch, micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> Batch:
        """Return {"reference_logprobs": (N, S) float32} of the frozen reference, without top-k and top-p."""
        return self._logprobs(
            data, "get_reference_policy_logprobs", micro_batch_size=micro_batch_size, timer=timer
        )

    def score_under(
        self, data: Batch, distributions: Sequence[Mapping[str, Any]], *, half: bool | None = None
    ) -> tuple[list[torch.Tensor], ReplayStats | None]:
        """Return logprobs (N, S) under other distributions and precisions, to compare; every replica scores all rows.

        Arguments and results are those of the worker's `score_under`.
        """
        shards, inverse = self._shard(data, "logprob_mb_tokens", batch_size=None, shards=1)
        scored, stats = self.workers.run_all("score_under", shards[0], distributions, half=half)[0]
        columns = merge_rows([scored], inverse)
        return [columns[str(index)] for index in range(len(distributions))], stats

    def prev_logprobs(self, rows: Any, *, unfiltered: bool = False) -> None:
        """Add the column `prev_logprobs` and, if `unfiltered`, `prev_unfiltered_logprobs`."""
        scored = self.get_logprobs(rows, unfiltered=unfiltered)
        rows["prev_logprobs"] = scored["logprobs"]
        if unfiltered:
            rows[PREV_UNFILTERED_LOGPROBS] = scored[UNFILTERED_LOGPROBS]

    def reference_logprobs(self, rows: Any) -> None:
        """Add the column `reference_policy_logprobs`."""
        scored = self.get_reference_policy_logprobs(rows)
        rows["reference_policy_logprobs"] = scored["reference_logprobs"]

    def _logprobs(self, data: Batch, method: str, *, timer: Timer | None, **options: Any) -> Batch:
        wanted = [*fields_with_optional_routed_experts(LP_SEED_FIELDS, enabled=True), ROUTE_SALTS]
        needed = data.select_columns([*wanted, *self.media_fields])
        shards, inverse = self._shard(needed, "logprob_mb_tokens", batch_size=None)
        with timed(timer, method):
            results = self.workers.run_sharded(method, shards, **options)
        return merge_rows(results, inverse)

    def _shard(
        self, data: Batch, budget: TokenBudget, *, batch_size: int | None, shards: int | None = None
    ) -> tuple[Sequence[Batch], list[int] | None]:
        data.token_columns = PER_TOKEN_FIELDS
        packing, dynamic = self._packing_args(budget)
        sharded = data.shard_by_batch_size(
            shards or self.workers.dp_size,
            batch_size=batch_size,
            sequence_packing_args=packing,
            dynamic_batching_args=dynamic,
        )
        return sharded if isinstance(sharded, tuple) else (sharded, None)

    def training_plan(self, lengths: Sequence[int]) -> MicrobatchPlan:
        """Return how `train` cuts rows of these lengths into microbatches."""
        packing, dynamic = self._packing_args("train_mb_tokens")
        return plan_microbatches(
            lengths,
            shards=self.workers.dp_size,
            batch_size=self.cfg.train_global_batch_size,
            sequence_packing_args=packing,
            dynamic_batching_args=dynamic,
        )

    def store_report(self, *, limit: int) -> tuple[str, PartitionReport] | None:
        """Return the id of the step's partition and what it holds; None for rows in memory."""
        return None

    def _packing_args(
        self, mb_tokens_key: TokenBudget
    ) -> tuple[SequencePackingArgs | None, DynamicBatchingArgs | None]:
        """Return the planner's arguments for a stage, named by its token budget's key; both None: fixed size."""
        packing, dynamic = self.cfg.sequence_packing, self.cfg.dynamic_batching
        if packing.enabled:
            return SequencePackingArgs(
                algorithm=packing.algorithm,
                input_key=INPUT_IDS,
                input_lengths_key=INPUT_LENGTHS,
                sequence_length_pad_multiple=self.cfg.make_sequence_length_divisible_by,
                max_tokens_per_microbatch=getattr(packing, mb_tokens_key),
                microbatch_order=packing.microbatch_order,
                attention_ratio=self._attention_ratio,
            ), None
        if dynamic.enabled:
            return None, DynamicBatchingArgs(
                input_key=INPUT_IDS,
                input_lengths_key=INPUT_LENGTHS,
                sequence_length_round=dynamic.sequence_length_round,
                max_tokens_per_microbatch=getattr(dynamic, mb_tokens_key),
                attention_ratio=self._attention_ratio,
            )
        return None, None

    @property
    def _pad_token_id(self) -> int:
        return int(self.tokenizer.pad_token_id)

    @cached_property
    def _attention_ratio(self) -> float:
        ratio: float = self.workers.run_all("attention_ratio")[0]
        return ratio

    def _finish_train(self, results: list[dict[str, Any]], lengths: Sequence[int]) -> dict[str, Any]:
        flops = self.workers.run_all("training_flops", list(lengths))[0]
        peak = self.workers.run_all("peak_tflops")[0]
        return aggregate_train_results(
            results, num_ranks=self.workers.world_size, total_flops=flops, theoretical_tflops=peak
        )

    def take_replay_stats(self) -> dict[str, ReplayStats]:
        """Return what router replay did in each stage since the last call, over all workers."""
        total: dict[str, ReplayStats] = {}
        for part in self.workers.run_all("take_replay_stats"):
            for stage, stats in part.items():
                total[stage] = total.get(stage, ReplayStats()) + stats
        return total

    # Weights.

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what a generator needs: every weight by its Hugging Face name, or the adapter where one trains.

        Weights are not copied where the workers share this process.
        """
        return self.workers.stream("named_weights")

    @property
    def sent_bytes(self) -> int:
        """Bytes of what `named_weights`, or a stream of it to a generator, gave last."""
        return int(self.workers.run_all("sent_bytes")[0])

    @property
    def num_parameters(self) -> int:
        return int(self.workers.run_all("num_parameters")[0])

    @property
    def weight_version(self) -> int:
        return int(self.workers.run_all("get_weight_version")[0])

    def snapshot_reference(self) -> None:
        self.workers.run_all("snapshot_reference")

    def save_reference(self, directory: Path) -> None:
        self.workers.run_all("save_reference", directory)

    def load_reference(self, directory: Path) -> None:
        self.workers.run_all("load_reference", directory)

    def reset_optimizer(self, optimizer: OptimizerConfig, scheduler: SchedulerConfig) -> None:
        self.workers.run_all("reset_optimizer", optimizer, scheduler)

    def save_checkpoint(self, directory: Path, *, with_optimizer: bool = True) -> None:
        """Write model, tokenizer and (with `with_optimizer`) optimizer, scheduler and RNG into `directory`."""
        self.workers.run_all("save_checkpoint", directory, with_optimizer=with_optimizer)

    def load_checkpoint(self, directory: Path) -> None:
        """Restore what `save_checkpoint` wrote, bit for bit."""
        self.workers.run_all("load_checkpoint", directory)

    def shutdown(self) -> bool:
        """End the workers; may be called twice."""
        self.workers.shutdown()
        return True


def logprob_options(micro_batch_size: int | None, *, unfiltered: bool) -> dict[str, Any]:
    """Return what a worker's `get_logprobs` is asked; one that knows no `unfiltered` is not told that it is off."""
    return {"micro_batch_size": micro_batch_size, **({"unfiltered": True} if unfiltered else {})}


def timed(timer: Timer | None, label: str) -> AbstractContextManager[None]:
    return timer.time(label) if timer else nullcontext()

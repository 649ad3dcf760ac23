"""One rank of a policy: a Hugging Face causal LM, its optimizer, and a frozen reference if wanted.

In one process it needs no process group and holds the model whole. Where torch.distributed runs several, weights are
sharded over all of them as `policy.parallel` says; ranks of one replica then get the same rows and return the same.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from headrace.config import GenerationConfig, OptimizerConfig, PolicyConfig, SchedulerConfig
from headrace.data_plane.interfaces import KVBatchMeta
from headrace.data_plane.schema import INPUT_IDS, INPUT_LENGTHS, ROUTED_EXPERTS_FIELD, UNFILTERED_LOGPROBS
from headrace.data_plane.worker_mixin import TQWorkerMixin
from headrace.distributed.batched_data_dict import BatchedDataDict, Cut
from headrace.distributed.topology import RankLayout, Topology, build_topology
from headrace.errors import ConfigError, HeadraceError
from headrace.models.automodel import checkpoint, flops
from headrace.models.automodel.build import ModelBuilder
from headrace.models.automodel.data import COUNTED_COLUMNS, most_of_ranks, valid_counts
from headrace.models.automodel.lora import ADAPTER, Adapter
from headrace.models.automodel.replay import PREV_LOGPROBS, TRAIN, RouteReplayer
from headrace.models.automodel.scoring import Scoring, TokenScorer
from headrace.models.automodel.setup import build_optimizer, build_scheduler, resolve_device
from headrace.models.automodel.sharding import ShardedModel, named_tensors
from headrace.models.automodel.train import TrainStep, apply_gradients, run_microbatches
from headrace.models.generation.weight_group import WeightGroup, WeightRoute
from headrace.models.generation.weights import weight_stream
from headrace.models.interfaces import LossFn
from headrace.models.policy.results import Outcome, StepResult, collect_steps
from headrace.models.router_replay.stats import ReplayStats

Batch = BatchedDataDict


class AutomodelPolicyWorker(TQWorkerMixin):
    """Trains and scores; rows in, numbers out.

    Tokens are scored under the temperature, top-p and top-k of `generation`, by the reference under the temperature
    alone. `weight_version` counts the updates since the first weights.
    """

    def __init__(
        self,
        cfg: PolicyConfig,
        generation: GenerationConfig,
        *,
        tokenizer: Any,
        seed: int,
        with_reference: bool = False,
        topology: Topology | None = None,
    ) -> None:
        self.cfg = cfg
        self.tokenizer = tokenizer
        self._pad_token_id = int(tokenizer.pad_token_id)
        self.device = resolve_device(cfg)
        self.topology = topology or _topology(cfg, self.device)
        layout = RankLayout(1) if self.topology is None else self.topology.layout
        self.dp_size, self._replica_size = layout.data, layout.replica_size
        built = ModelBuilder(
            cfg,
            Scoring(**generation.distribution, chunk_tokens=cfg.logprob_chunk_tokens),
            device=self.device,
            topology=self.topology,
            tokenizer=tokenizer,
            seed=seed,
        ).build(with_reference=with_reference)
        self._scorer, self._reference, self._replay_handle = built.policy, built.reference, built.replay
        self._masters, self._sends_half = built.masters, generation.precision == "bfloat16"
        self.model = self._scorer.model
        self._scorer.replayer = self._make_replayer()
        self._adapter = (
            None if cfg.lora.rank is None else Adapter(self.model, cfg.lora, self.device, cfg.model.path)
        )
        self.weight_version, self._seed = 0, seed
        self._sent_bytes = 0
        self._weight_group = WeightGroup()
        self._step: TrainStep | None = None
        self.reset_optimizer(cfg.optimizer, cfg.scheduler)

    def _make_replayer(self, *, trace: bool = False) -> RouteReplayer | None:
        if self._replay_handle is None:
            return None
        topology, replay = self.topology, self.cfg.router_replay
        context = topology.context if topology is not None and topology.layout.context > 1 else None
        trace = trace or replay.trace
        return RouteReplayer(
            self._replay_handle, trace=trace, floor=replay.min_exact_fraction, context=context
        )

    def take_replay_stats(self) -> dict[str, ReplayStats]:
        replayer = self._scorer.replayer
        return {} if replayer is None else replayer.take()

    def reset_optimizer(self, optimizer: OptimizerConfig, scheduler: SchedulerConfig) -> None:
        """Start optimizer and schedule anew, with these settings."""
        self._optimizer_cfg, self._scheduler_cfg = optimizer, scheduler
        self.optimizer = build_optimizer(self.model, optimizer, self._masters)
        self.scheduler = build_scheduler(self.optimizer, scheduler)

    @property
    def dp_group(self) -> dist.ProcessGroup | None:
        """The ranks that stand where this one does in their replicas; None for one process."""
        return None if self.topology is None else self.topology.data

    @property
    def _cut(self) -> Cut:
        if self.cfg.dynamic_batching.enabled:
            return "dynamic"
        return "packed" if self.cfg.sequence_packing.enabled else "fixed"

    @property
    def _sharded(self) -> ShardedModel | None:
        return self._scorer.sharded

    def _get_replica_group(self) -> dist.ProcessGroup | None:
        return None if self.topology is None or self._replica_size == 1 else self.topology.replica

    # Training.

    def train(
        self,
        data: Batch,
        loss_fn: LossFn,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """Take one optimizer step per global batch; this rank holds `gbs` / ranks rows of each, in order.

        `gbs` and `mbs` default to the policy's sizes. With `eval_mode` losses are computed and nothing changes.

        Returns:
            Per global batch: `loss` (float64 tensor, this rank's share), `grad_norm` (float64 tensor, of the
            whole gradient before clipping; 0 in `eval_mode`), `metrics` (list of dicts, this rank's
            shares: the loss's own, `entropy` and `lr`), and the lists `outcomes`, `suspects` and `sample_ids` (see
            `StepResult`). Over all: `num_microbatches` and `tokens` of this rank.

        Raises:
            ConfigError: rows that do not divide into global batches or microbatches.
        """
        gbs = gbs or self.cfg.train_global_batch_size
        rows = gbs // self.dp_size
        planned = data.elem_counts_per_gb
        if planned is None and (gbs % self.dp_size or data.size == 0 or data.size % rows):
            raise ConfigError(
                f"{data.size} rows on each of {self.dp_size} data-parallel ranks do not make whole global batches; "
                f"choose policy.train_global_batch_size={gbs} so that the ranks divide it and it divides all rows"
            )
        results = []
        for index in range(data.size // rows if planned is None else len(planned)):
            batch = data.get_batch(index, rows)
            counted = batch.select_columns(COUNTED_COLUMNS)
            self.begin_train_step(*valid_counts(counted, loss_fn.loss_type, self.dp_group))
            try:
                self.train_microbatches(batch, loss_fn, mbs=mbs, backward=not eval_mode)
                results.append(self._close_step() if eval_mode else self.finish_train_step())
            finally:
                self.abort_train_step()
        return collect_steps(results)

    def train_presharded(self, meta: KVBatchMeta, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.train(self._fetch_named(meta), *args, **kwargs)

    def begin_train_step(
        self, global_valid_seqs: torch.Tensor | None = None, global_valid_toks: torch.Tensor | None = None
    ) -> None:
        """Open a step over a global batch of this many valid sequences and tokens (0-D each).

        None: `finish_train_step` is told them, once all rows have come.
        """
        if self._step is not None:
            raise HeadraceError("a train step is open already; finish or abort it first")
        self.optimizer.zero_grad(set_to_none=True)
        seqs, toks = (torch.ones(()) if n is None else n for n in (global_valid_seqs, global_valid_toks))
        self._step = TrainStep(seqs.to(self.device), toks.to(self.device))

    def train_microbatches(
        self, data: Batch, loss_fn: LossFn, *, mbs: int | None = None, backward: bool = True
    ) -> None:
        """Add the loss and gradients of further rows of the open step's global batch.

        Every data-parallel rank calls this equally often. Tensors of `data` move to the worker's device, in place.
        """
        step = self._open_step()
        step.tokens += int(data[INPUT_LENGTHS].sum())
        if self._scorer.replayer is not None:
            self._scorer.replayer.begin(TRAIN, data)
        size = mbs or self.cfg.train_micro_batch_size
        data = data.to(self.device, on_host=(INPUT_LENGTHS,))
        microbatches = data.microbatches(self._cut, size, partial(most_of_ranks, self.dp_group))
        drops = backward and self._adapter is not None and self.cfg.lora.dropout > 0
        dropping = self._adapter.dropping() if drops and self._adapter else nullcontext()
        with dropping, self._scorer.gathered(), self._drawing(step):
            run_microbatches(self._scorer, microbatches, loss_fn, step, backward=backward)

    def finish_train_step(
        self, global_valid_seqs: torch.Tensor | None = None, global_valid_toks: torch.Tensor | None = None
    ) -> StepResult:
        """Sum gradients over ranks, clip, update the weights, and close the step.

        The counts are those that `begin_train_step` was not given.

        Raises:
            ReplayError: replayed experts that the routers would too seldom choose; no weight has changed.
        """
        step = self._open_step()
        if self._scorer.replayer is not None:
            self._scorer.replayer.before_update()
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if global_valid_seqs is not None and global_valid_toks is not None:
            step.divide(global_valid_seqs.to(self.device), global_valid_toks.to(self.device), parameters)
        lr = float(self.scheduler.get_last_lr()[0])
        limit = self.cfg.max_grad_norm
        with self._drawing(step):
            norm, outcome = apply_gradients(
                step, parameters, self.optimizer, self.scheduler, max_grad_norm=limit, sharded=self._sharded
            )
        result = self._close_step(norm, outcome)
        self.weight_version += int(result.updated)
        # Metrics are shares that are summed over ranks.
        result.metrics["lr"] = lr / self.dp_size
        return result

    def abort_train_step(self) -> None:
        """Drop the open step and its gradients, if there is one."""
        if self._step is not None and self._scorer.replayer is not None:
            self._scorer.replayer.drop()
        self._step = None
        self.optimizer.zero_grad(set_to_none=True)

    def _drawing(self, step: TrainStep) -> AbstractContextManager[None]:
        return step.drawing(self._seed, self.weight_version, self.dp_group)

    def _open_step(self) -> TrainStep:
        if self._step is None:
            raise HeadraceError("no train step is open; call begin_train_step first")
        return self._step

    def _close_step(self, norm: float = 0.0, outcome: Outcome = "evaluated") -> StepResult:
        result = self._open_step().result(norm, outcome)
        self._step = None
        return result

    # Scoring.

    def get_logprobs(
        self, data: Batch, micro_batch_size: int | None = None, *, unfiltered: bool = False
    ) -> Batch:
        """Return {"logprobs": (N, S) float32 on CPU} in the rows' order; 0 beyond a row's length.

        With `unfiltered`, also `unfiltered_logprobs`: those at the same temperature without top-k and top-p.
        """
        if self._scorer.replayer is not None:
            self._scorer.replayer.begin(PREV_LOGPROBS, data)
        scored = self._score(self._scorer, data, micro_batch_size, unfiltered=unfiltered)
        return BatchedDataDict(dict(zip(("logprobs", UNFILTERED_LOGPROBS), scored)))

    def get_reference_policy_logprobs(self, data: Batch, micro_batch_size: int | None = None) -> Batch:
        """Return {"reference_logprobs": (N, S) float32 on CPU} of the frozen reference, without top-k and top-p."""
        if self._reference is None:
            raise ConfigError(
                "the policy has no reference; it is built where loss.kl_coefficient or "
                "grpo.reward.kl_coefficient is more than 0"
            )
        with nullcontext() if self._adapter is None else self._adapter.as_reference():
            (scored,) = self._score(self._reference, data, micro_batch_size)
        return BatchedDataDict({"reference_logprobs": scored})

    def score_under(
        self, data: Batch, distributions: Sequence[Mapping[str, Any]], *, half: bool | None = None
    ) -> tuple[Batch, ReplayStats | None]:
        """Return columns `0`, `1`, ... of logprobs, one under each of `distributions` (`TokenScorer.under`).

        With a column of routes these are replayed, and the stats come too, with all rows.
        """
        replayer = self._make_replayer(trace=True) if ROUTED_EXPERTS_FIELD in data else None
        columns: Batch = BatchedDataDict()
        for index, distribution in enumerate(distributions):
            if replayer is not None:
                replayer.begin(PREV_LOGPROBS, data)
            (columns[str(index)],) = self._score(
                self._scorer.under(distribution, half, replayer), data, micro_batch_size=None
            )
        return columns, None if replayer is None else replayer.take().get(PREV_LOGPROBS)

    def _score(
        self, scorer: TokenScorer, data: Batch, micro_batch_size: int | None, *, unfiltered: bool = False
    ) -> list[torch.Tensor]:
        """Return the logprobs and, with `unfiltered`, those without filters."""
        # On the device until the end: a copy to the host would wait for each microbatch.
        shape = data[INPUT_IDS].shape
        out = [torch.zeros(shape, dtype=torch.float32, device=self.device) for _ in range(1 + unfiltered)]
        with torch.no_grad(), scorer.gathered():
            for offset, rows, plan in _portions(data, micro_batch_size or self.cfg.logprob_batch_size):
                mbs = max((stop - start for start, stop in plan), default=1)
                rows = rows.to(self.device, on_host=(INPUT_LENGTHS,))
                microbatches = rows.microbatches(self._cut, mbs, partial(most_of_ranks, self.dp_group))
                for index, microbatch in enumerate(microbatches):
                    # Dummies beyond the plan run too: other ranks wait for them in collectives.
                    start, stop = plan[index] if index < len(plan) else (0, 0)
                    scores = scorer(microbatch, with_unfiltered=unfiltered)
                    for column, values in zip(out, (scores.logprobs, scores.unfiltered)):
                        assert values is not None
                        kept = values[: stop - start]
                        column[offset + start : offset + stop, : kept.shape[1]] = kept
        return [column.cpu() for column in out]

    # The reference.

    def snapshot_reference(self) -> None:
        """Make the current weights the reference; without a reference, do nothing."""
        if self._reference is None:
            return
        if self._adapter is not None:
            self._adapter.snapshot()
        elif self._sharded is not None and self._reference.sharded is not None:
            self._reference.sharded.copy_weights_of(self._sharded)
        else:
            self._reference.model.load_state_dict(self.model.state_dict())

    def save_reference(self, directory: Path) -> None:
        if self._reference is None:
            return
        if self._adapter is not None:
            self._adapter.save_reference(directory)
        elif self._reference.sharded is None:
            checkpoint.save_model(directory, self._reference.model, self.tokenizer)
        else:
            self._export(directory, self._reference.sharded)

    def load_reference(self, directory: Path) -> None:
        if self._reference is not None and self._adapter is not None:
            self._adapter.load_reference(directory)
        elif self._reference is not None:
            checkpoint.load_weights(directory, self._reference.model, self._reference.sharded)

    # Weights and checkpoints.

    def get_weight_version(self) -> int:
        return self.weight_version

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what a generator with the first weights needs: all weights, or the adapter where one trains.

        All weights: every parameter and persistent buffer once, by its name in `model.state_dict()`; one process
        yields them as they are, not copied. The adapter: see `Adapter.weights`, scaled. Of several processes, all must
        run through this together; rank 0 yields whole tensors, one at a time, and the others nothing.
        """
        return self._whole_weights(asked=self._rank == 0)

    @property
    def _rank(self) -> int:
        return 0 if self._sharded is None else dist.get_rank()

    def _whole_weights(self, *, asked: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield them on ranks that are `asked` for any; all ranks run through this together."""
        self._sent_bytes = 0
        for name, tensor in self._weights():
            if asked:
                self._sent_bytes += tensor.nbytes
                yield name, tensor

    def sent_bytes(self) -> int:
        return self._sent_bytes

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._adapter is not None:
            yield from self._adapter.weights(scaled=True)
        elif self._sharded is not None:
            yield from self._sharded.full_weights()
        elif self._masters is not None and not self._sends_half:
            yield from self._masters.weights().items()
        else:
            yield from ((name, tensor.detach()) for name, tensor in named_tensors(self.model))

    def weight_stream(self, route: WeightRoute | None = None) -> Iterator[Any]:
        """Yield what `weights.weight_stream` does; by a route, the ranks that have engines send the weights."""
        whole = self._adapter is None
        shapes = {name: tuple(t.shape) for name, t in named_tensors(self.model)} if whole else None
        asked = route.sends(self._rank) if route is not None and whole else self._rank == 0
        weights = self._whole_weights(asked=asked)
        return weight_stream(self.model, shapes, weights, self._weight_group, route, self._rank)

    def save_checkpoint(self, directory: Path, *, with_optimizer: bool = True) -> None:
        """Write model and tokenizer (Hugging Face layout), optimizer, schedule and RNG into `directory`.

        Where an adapter trains, it is written in place of the model. Otherwise several ranks also write their parts of
        weights and optimizer into `directory`/sharded.
        """
        state = checkpoint.TrainerState(self.weight_version, self.scheduler.last_epoch)
        optimizer = self.optimizer if with_optimizer else None
        if self._adapter is not None:
            checkpoint.save_adapter_checkpoint(
                directory, self._adapter, self.model, optimizer, state, self.device
            )
            if self._sharded is not None:
                dist.barrier()
            return
        if self._sharded is None:
            checkpoint.save_checkpoint(directory, self.model, self.tokenizer, optimizer, state, self._masters)
            return
        self._export(directory / checkpoint.MODEL, self._sharded)
        checkpoint.save_shards(directory, self.model, optimizer)
        if dist.get_rank() == 0:
            checkpoint.save_counters(directory, state)
        dist.barrier()

    def load_checkpoint(self, directory: Path) -> None:
        """Restore what `save_checkpoint` wrote at any number of ranks; at the same number, bit for bit.

        Hyperparameters stay the recipe's.
        """
        self._check_kind(directory)
        self.optimizer = build_optimizer(self.model, self._optimizer_cfg, self._masters)
        if self._adapter is not None:
            self._adapter.load(directory / ADAPTER)
            state = checkpoint.load_rest(directory, self.model, self.optimizer)
        elif (directory / checkpoint.SHARDED).is_dir():
            checkpoint.load_shards(directory, self.model, self.optimizer)
            state = checkpoint.load_counters(directory)
        else:
            state = checkpoint.load_checkpoint(
                directory, self.model, self.optimizer, self._sharded, self._masters
            )
        self.scheduler = build_scheduler(
            self.optimizer, self._scheduler_cfg, updates_done=state.scheduler_updates
        )
        self.weight_version = state.weight_version

    def _check_kind(self, directory: Path) -> None:
        if (directory / ADAPTER).is_dir() != (self._adapter is not None):
            held = "all weights" if self._adapter is not None else "an adapter"
            rank = self.cfg.lora.rank
            remedy = "remove policy.lora" if rank is not None else "set policy.lora as it was"
            raise ConfigError(
                f"policy.lora.rank={rank or 'null'}: the checkpoint in {directory} holds {held}; {remedy}, or start "
                "anew with overwrite=true or another run_dir"
            )

    def _export(self, directory: Path, sharded: ShardedModel) -> None:
        weights = sharded.full_weights()
        if dist.get_rank() == 0:
            checkpoint.save_model(directory, sharded.model, self.tokenizer, weights)
        else:
            for _ in weights:
                pass
        dist.barrier()

    # Size and speed.

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def training_flops(self, lengths: Iterable[int]) -> float:
        return flops.training_flops(self.model, lengths)

    def attention_ratio(self) -> float:
        return flops.attention_ratio(self.model)

    def peak_tflops(self) -> float:
        return flops.peak_tflops(self.device)


def _topology(cfg: PolicyConfig, device: torch.device) -> Topology | None:
    """Return this rank's place among the processes of torch.distributed; None where there is but one."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    parallel = cfg.parallel
    if world == 1:
        if parallel.tensor * parallel.context * parallel.expert > 1:
            raise ConfigError(
                f"policy.parallel.tensor={parallel.tensor}, context={parallel.context} and expert={parallel.expert} "
                "need as many processes, and this is the only one; set policy.workers, or all to 1"
            )
        return None
    return build_topology(
        device.type, context=parallel.context, tensor=parallel.tensor, expert=parallel.expert_over_data
    )


def _portions(data: Batch, mbs: int) -> Iterator[tuple[int, Batch, Sequence[Sequence[int]]]]:
    """Yield rows that are cut together: their offset, themselves, and [start, stop) of their microbatches."""
    if data.micro_batch_indices is not None:
        offset = 0
        for index, plan in enumerate(data.micro_batch_indices):
            rows = data.get_batch(index)
            yield offset, rows, plan
            offset += rows.size
        return
    full = data.size - data.size % mbs
    if full:
        yield 0, data.slice(0, full), [(i, i + mbs) for i in range(0, full, mbs)]
    if full < data.size:
        yield full, data.slice(full, data.size), [(0, data.size - full)]

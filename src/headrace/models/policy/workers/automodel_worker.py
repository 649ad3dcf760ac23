"""One data-parallel rank of a policy: a Hugging Face causal LM, its optimizer, and a frozen reference if wanted.

In one process it needs no process group. Where torch.distributed is initialised, gradients are summed over
`dp_group` (or the data-parallel axis of `mesh`, or all ranks).
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from headrace.config import GenerationConfig, OptimizerConfig, PolicyConfig, SchedulerConfig
from headrace.data_plane.schema import INPUT_IDS, INPUT_LENGTHS
from headrace.data_plane.worker_mixin import TQWorkerMixin
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.errors import ConfigError, HeadraceError
from headrace.models.automodel import checkpoint, flops
from headrace.models.automodel.attention import check_isolation, choose_attention
from headrace.models.automodel.data import get_microbatch_iterator, process_global_batch
from headrace.models.automodel.experts import GROUPED_EXPERTS
from headrace.models.automodel.scoring import Autocast, Scoring, TokenScorer
from headrace.models.automodel.setup import (
    build_optimizer,
    build_scheduler,
    enable_activation_checkpointing,
    load_model,
    resolve_device,
)
from headrace.models.automodel.train import (
    StepResult,
    TrainStep,
    apply_gradients,
    reduce_gradients,
    run_microbatches,
)
from headrace.models.interfaces import LossFn

Batch = BatchedDataDict


class AutomodelPolicyWorker(TQWorkerMixin):
    """Trains and scores; rows in, numbers out.

    Tokens are scored under the temperature, top-p and top-k of `generation`. `weight_version` counts the
    updates since the first weights.
    """

    def __init__(
        self,
        cfg: PolicyConfig,
        generation: GenerationConfig,
        *,
        tokenizer: Any,
        seed: int,
        with_reference: bool = False,
        mesh: DeviceMesh | None = None,
        dp_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.cfg = cfg
        self.tokenizer = tokenizer
        self._pad_token_id = int(tokenizer.pad_token_id)
        self.device = resolve_device(cfg)
        self.dp_group = _dp_group(mesh, dp_group)
        self._autocast = Autocast(self.device, cfg.precision)
        self._scoring = Scoring(
            generation.temperature, generation.top_k, generation.top_p, cfg.logprob_chunk_tokens
        )
        self.model = load_model(cfg, seed=seed, device=self.device, tokenizer=tokenizer)
        self._prepare_model()
        self._scorer = TokenScorer(self.model, self._scoring, self._autocast)
        self._reference = self._copy_for_reference() if with_reference else None
        self.weight_version = 0
        self._step: TrainStep | None = None
        self.reset_optimizer(cfg.optimizer, cfg.scheduler)

    def _prepare_model(self) -> None:
        packed = self.cfg.sequence_packing.enabled
        wanted = self.cfg.model.attn_implementation
        self.model.set_attn_implementation(
            choose_attention(self.device, self._autocast.dtype, packed, wanted)
        )
        if self.model.config._experts_implementation == "grouped_mm":
            self.model.set_experts_implementation(GROUPED_EXPERTS)
        if packed:
            check_isolation(self.model)
        if self.cfg.activation_checkpointing:
            enable_activation_checkpointing(self.model)

    def _copy_for_reference(self) -> TokenScorer:
        frozen = copy.deepcopy(self.model).requires_grad_(False)
        return TokenScorer(frozen, self._scoring, self._autocast)

    def reset_optimizer(self, optimizer: OptimizerConfig, scheduler: SchedulerConfig) -> None:
        """Start optimizer and schedule anew, with these settings."""
        self._optimizer_cfg, self._scheduler_cfg = optimizer, scheduler
        self.optimizer = build_optimizer(self.model, optimizer)
        self.scheduler = build_scheduler(self.optimizer, scheduler)

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks."""
        return 1 if self.dp_group is None else dist.get_world_size(self.dp_group)

    # Training.

    def train(
        self,
        data: Batch,
        loss_fn: LossFn,
        *,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """Take one optimizer step per global batch; this rank holds `gbs` / ranks rows of each, in order.

        `gbs` and `mbs` default to the policy's sizes. With `eval_mode` losses are computed and nothing changes.

        Returns:
            Per global batch: `loss` (float64 tensor, this rank's share), `grad_norm` (float64 tensor, of the
            whole gradient before clipping; 0 in `eval_mode`) and `metrics` (list of dicts, this rank's
            shares: the loss's own, `entropy`, `lr`, and `grad_norm_nonfinite`, 1 where the gradient was not
            finite and weights and optimizer stayed as they were). Over all: `num_microbatches` and `tokens`
            of this rank.

        Raises:
            ConfigError: rows that do not divide into global batches or microbatches.
        """
        mbs = mbs or self.cfg.train_micro_batch_size
        batches, local_size = self._global_batches(data, gbs or self.cfg.train_global_batch_size)
        results = []
        for index in range(batches):
            counted = process_global_batch(
                data, loss_fn, self.dp_group, batch_idx=index, batch_size=local_size
            )
            self.begin_train_step(counted["global_valid_seqs"], counted["global_valid_toks"])
            try:
                self.train_microbatches(counted["batch"], loss_fn, mbs=mbs, backward=not eval_mode)
                results.append(self._close_step() if eval_mode else self.finish_train_step())
            finally:
                self.abort_train_step()
        return _collect(results)

    def begin_train_step(self, global_valid_seqs: torch.Tensor, global_valid_toks: torch.Tensor) -> None:
        """Open a step over a global batch of this many valid sequences and tokens (0-D each)."""
        if self._step is not None:
            raise HeadraceError("a train step is open already; finish or abort it first")
        self.optimizer.zero_grad(set_to_none=True)
        self._step = TrainStep(global_valid_seqs.to(self.device), global_valid_toks.to(self.device))

    def train_microbatches(
        self, data: Batch, loss_fn: LossFn, *, mbs: int | None = None, backward: bool = True
    ) -> None:
        """Add the loss and gradients of further rows of the open step's global batch.

        Every data-parallel rank calls this equally often. Tensors of `data` move to the worker's device, in place.
        """
        step = self._open_step()
        step.tokens += int(data[INPUT_LENGTHS].sum())
        microbatches, _ = get_microbatch_iterator(
            data.to(self.device),
            self.cfg,
            mbs or self.cfg.train_micro_batch_size,
            self.dp_group,
            self.tokenizer,
        )
        run_microbatches(self._scorer, microbatches, loss_fn, step, backward=backward)

    def finish_train_step(self) -> StepResult:
        """Sum gradients over ranks, clip, update the weights, and close the step."""
        self._open_step()
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        reduce_gradients(parameters, self.dp_group)
        lr = float(self.scheduler.get_last_lr()[0])
        norm, updated = apply_gradients(
            parameters, self.optimizer, self.scheduler, max_grad_norm=self.cfg.max_grad_norm
        )
        self.weight_version += int(updated)
        result = self._close_step(norm, updated=updated)
        # Metrics are shares that are summed over ranks.
        result.metrics["lr"] = lr / self.dp_size
        result.metrics["grad_norm_nonfinite"] = float(not updated) / self.dp_size
        return result

    def abort_train_step(self) -> None:
        """Drop the open step and its gradients, if there is one."""
        self._step = None
        self.optimizer.zero_grad(set_to_none=True)

    def _open_step(self) -> TrainStep:
        if self._step is None:
            raise HeadraceError("no train step is open; call begin_train_step first")
        return self._step

    def _close_step(self, norm: float = 0.0, *, updated: bool = False) -> StepResult:
        result = self._open_step().result(norm, updated=updated)
        self._step = None
        return result

    def _global_batches(self, data: Batch, gbs: int) -> tuple[int, int]:
        """Return how many global batches the rows hold, and this rank's rows in each (a plan may override)."""
        if data.elem_counts_per_gb is not None:
            return len(data.elem_counts_per_gb), 0
        local_size, rest = divmod(gbs, self.dp_size)
        if rest or data.size == 0 or data.size % local_size:
            raise ConfigError(
                f"{data.size} rows on each of {self.dp_size} data-parallel ranks do not make whole global batches; "
                f"choose policy.train_global_batch_size={gbs} so that the ranks divide it and it divides all rows"
            )
        return data.size // local_size, local_size

    # Scoring.

    def get_logprobs(self, data: Batch, micro_batch_size: int | None = None) -> Batch:
        """Return {"logprobs": (N, S) float32 on CPU} in the rows' order; 0 beyond a row's length."""
        return BatchedDataDict({"logprobs": self._score(self._scorer, data, micro_batch_size)})

    def get_reference_policy_logprobs(self, data: Batch, micro_batch_size: int | None = None) -> Batch:
        """Return {"reference_logprobs": (N, S) float32 on CPU} of the frozen reference.

        Raises:
            ConfigError: the worker was built without a reference.
        """
        if self._reference is None:
            raise ConfigError(
                "the policy has no reference; it is built where loss.kl_coefficient or "
                "grpo.reward.kl_coefficient is more than 0"
            )
        return BatchedDataDict({"reference_logprobs": self._score(self._reference, data, micro_batch_size)})

    @torch.no_grad()
    def _score(self, scorer: TokenScorer, data: Batch, micro_batch_size: int | None) -> torch.Tensor:
        out = torch.zeros(data[INPUT_IDS].shape, dtype=torch.float32)
        for offset, rows, plan in _portions(data, micro_batch_size or self.cfg.logprob_batch_size):
            mbs = max((stop - start for start, stop in plan), default=1)
            microbatches, _ = get_microbatch_iterator(
                rows.to(self.device), self.cfg, mbs, self.dp_group, self.tokenizer
            )
            for index, microbatch in enumerate(microbatches):
                # Fillers beyond the plan run too: other ranks wait for them in collectives.
                start, stop = plan[index] if index < len(plan) else (0, 0)
                kept = scorer(microbatch).logprobs[: stop - start]
                out[offset + start : offset + stop, : kept.shape[1]] = kept.cpu()
        return out

    # The reference.

    def snapshot_reference(self) -> None:
        """Make the weights of now the reference; without a reference, do nothing."""
        if self._reference is not None:
            self._reference.model.load_state_dict(self.model.state_dict())

    def save_reference(self, directory: Path) -> None:
        """Write the reference as a Hugging Face model directory; without a reference, do nothing."""
        if self._reference is not None and self._is_writer():
            checkpoint.save_model(directory, self._reference.model, self.tokenizer)
        self._wait_for_all()

    def load_reference(self, directory: Path) -> None:
        """Read the reference's weights back; without a reference, do nothing."""
        if self._reference is not None:
            checkpoint.load_weights(directory, self._reference.model)

    # Weights and checkpoints.

    def get_weight_version(self) -> int:
        """Return the number of updates since the first weights."""
        return self.weight_version

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter and persistent buffer once, by its name in `model.state_dict()`, not copied."""
        seen: set[int] = set()
        for name, tensor in self.model.state_dict().items():
            if tensor.data_ptr() not in seen or tensor.numel() == 0:
                seen.add(tensor.data_ptr())
                yield name, tensor

    def save_checkpoint(self, directory: Path, *, with_optimizer: bool = True) -> None:
        """Write model and tokenizer (Hugging Face layout), optimizer, schedule and RNG into `directory`."""
        if self._is_writer():
            state = checkpoint.TrainerState(self.weight_version, self.scheduler.last_epoch)
            optimizer = self.optimizer if with_optimizer else None
            checkpoint.save_checkpoint(directory, self.model, self.tokenizer, optimizer, state)
        self._wait_for_all()

    def load_checkpoint(self, directory: Path) -> None:
        """Restore what `save_checkpoint` wrote, bit for bit; hyperparameters stay the recipe's.

        Raises:
            ConfigError: files that are missing, damaged, or of another model.
        """
        self.optimizer = build_optimizer(self.model, self._optimizer_cfg)
        state = checkpoint.load_checkpoint(directory, self.model, self.optimizer)
        self.scheduler = build_scheduler(
            self.optimizer, self._scheduler_cfg, updates_done=state.scheduler_updates
        )
        self.weight_version = state.weight_version

    def _is_writer(self) -> bool:
        return self.dp_group is None or dist.get_rank(self.dp_group) == 0

    def _wait_for_all(self) -> None:
        if self.dp_group is not None:
            dist.barrier(self.dp_group)

    # Size and speed.

    def num_parameters(self) -> int:
        """Return the number of weights, tied ones once."""
        return sum(p.numel() for p in self.model.parameters())

    def training_flops(self, lengths: Iterable[int]) -> float:
        """Return the estimated operations of one training pass over sequences of `lengths` tokens."""
        return flops.training_flops(self.model, lengths)

    def peak_tflops(self) -> float:
        """Return the device's peak bfloat16 rate in 10^12 operations per second; 0 where it is not known."""
        return flops.peak_tflops(self.device)


def _dp_group(mesh: DeviceMesh | None, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    if group is not None or not dist.is_initialized():
        return group
    if mesh is None:
        return dist.group.WORLD
    return mesh.get_group("dp") if "dp" in (mesh.mesh_dim_names or ()) else mesh.get_group()


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


def _collect(results: Sequence[StepResult]) -> dict[str, Any]:
    return {
        "loss": torch.tensor([r.loss for r in results], dtype=torch.float64),
        "grad_norm": torch.tensor([r.grad_norm for r in results], dtype=torch.float64),
        "metrics": [r.metrics for r in results],
        "num_microbatches": sum(r.num_microbatches for r in results),
        "tokens": sum(r.tokens for r in results),
    }

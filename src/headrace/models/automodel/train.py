"""One optimizer step over a global batch: forward and backward per microbatch, then clip and update, once.

Weights, gradients and optimizer state are float32; with `precision="bfloat16"` the forward runs under
autocast. The model stays in evaluation mode: dropout, router noise and balancing losses are off, so that
logprobs before and during training are of the same function.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from headrace.data_plane.schema import INPUT_LENGTHS, SAMPLE_ID, SAMPLE_MASK, TOKEN_MASK, UNFILTERED_LOGPROBS
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.models.automodel.data import FORWARD_COLUMNS
from headrace.models.automodel.scoring import TokenScorer
from headrace.models.automodel.sharding import ShardedModel, for_norm
from headrace.models.interfaces import LossFn, LossType
from headrace.models.policy.results import Outcome, StepResult, combine_metrics
from headrace.utils.seeding import derive_seed

# As torch.nn.utils.clip_grads_with_norm_ has it.
_CLIP_EPSILON = 1e-6
_LOGPROBS = "logprobs"
_T = TypeVar("_T")


Metrics = Mapping[str, torch.Tensor | float]
"""As a loss returns them: tensors are 0-D, where the logprobs are."""


@dataclass
class TrainStep:
    """A step that has begun: what normalises its loss, and what its microbatches have given so far."""

    global_valid_seqs: torch.Tensor
    global_valid_toks: torch.Tensor
    losses: list[torch.Tensor] = field(default_factory=list)
    metrics: list[Metrics] = field(default_factory=list)
    entropies: list[torch.Tensor] = field(default_factory=list)
    """This step's fraction of the entropy per token, of each microbatch that has it."""
    columns: list[dict[str, Any]] = field(default_factory=list)
    """Of each microbatch, what tells which row is at fault if one is."""
    tokens: int = 0
    loss_type: LossType = LossType.TOKEN_LEVEL
    per_sequence_metrics: Collection[str] = ()

    @contextmanager
    def drawing(self, seed: int, version: int, group: dist.ProcessGroup | None) -> Iterator[None]:
        """Return a context whose random numbers (dropout, rounding) are the step's own, whatever was drawn before.

        They follow from the run's seed, the version of the weights, the microbatches so far and this rank's place in
        `group`, so that a run which goes on from a checkpoint draws what it would have drawn. Ranks that share a row
        draw alike.
        """
        place = 0 if group is None else dist.get_rank(group)
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
        with torch.random.fork_rng(devices):
            torch.manual_seed(derive_seed(seed, "step", version, len(self.losses), place))
            yield

    def divide(
        self, valid_seqs: torch.Tensor, valid_toks: torch.Tensor, parameters: Sequence[torch.nn.Parameter]
    ) -> None:
        """Divide what was summed over counts of 1 by the global batch's: losses, metrics and gradients, in place.

        A loss is a sum over tokens or over sequences, as its `loss_type` says; its metrics are per token, but for its
        `per_sequence_metrics`. Extremes (`_min`, `_max`) stay.
        """
        by_token, by_sequence = (1 / count.clamp(min=1) for count in (valid_toks, valid_seqs))
        of_loss = by_token if self.loss_type is LossType.TOKEN_LEVEL else by_sequence
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(of_loss)
        self.losses = [loss * of_loss for loss in self.losses]
        self.entropies = [entropy * by_token for entropy in self.entropies]

        def factor(name: str) -> torch.Tensor | float:
            if name.endswith(("_min", "_max")):
                return 1.0
            return by_sequence if name in self.per_sequence_metrics else by_token

        self.metrics = [{name: v * factor(name) for name, v in part.items()} for part in self.metrics]
        self.global_valid_seqs, self.global_valid_toks = valid_seqs, valid_toks

    @property
    def loss(self) -> torch.Tensor:
        """This rank's fraction of the loss so far, 0-D float32."""
        return torch.stack(self.losses or [torch.zeros_like(self.global_valid_toks).float()]).sum()

    def result(self, grad_norm: float = 0.0, outcome: Outcome = "evaluated") -> StepResult:
        """Return the sums over microbatches, with how the step ended. Waits for the device once."""
        fractions = [{"entropy": fraction} for fraction in self.entropies]
        (total,), entropies, own = _fetched([{"loss": self.loss}], fractions, self.metrics)
        # A loss's own entropy goes before the scorer's.
        metrics = {**combine_metrics(entropies), **combine_metrics(own)}
        named = self._suspects() if outcome == "not_finite" else ([], [])
        return StepResult(total["loss"], grad_norm, metrics, len(self.losses), self.tokens, outcome, *named)

    def _suspects(self) -> tuple[list[str], list[str]]:
        """Return the samples at fault (without any, those of microbatches with a bad loss), and all samples."""
        rows = [_faults(columns) for columns in self.columns]
        faulty = [sample_id for part in rows for sample_id, fault in part.items() if fault]
        nearby = [i for loss, part in zip(self.losses, rows) if not loss.isfinite() for i in part]
        return faulty or nearby, [sample_id for part in rows for sample_id in part]


def _faults(columns: Mapping[str, Any]) -> dict[str, bool]:
    """Return the ids of the rows that count, and whether something of theirs is not finite.

    A logprob of -inf is no fault: top-k or top-p excludes the token.
    """
    if SAMPLE_ID not in columns or SAMPLE_MASK not in columns:
        return {}
    samples = columns[SAMPLE_MASK] > 0
    bad = torch.zeros_like(samples)
    for name, column in columns.items():
        if name in (SAMPLE_ID, TOKEN_MASK):
            continue
        fault = column.isnan() | column.isposinf()
        if column.shape == columns[_LOGPROBS].shape and TOKEN_MASK in columns:
            fault = (fault & (columns[TOKEN_MASK] > 0))[:, 1:].any(-1)
        if fault.shape == bad.shape:
            bad |= fault
    rows = zip(columns[SAMPLE_ID], samples.tolist(), bad.tolist())
    return {str(sample_id): fault for sample_id, counts, fault in rows if counts}


def run_microbatches(
    scorer: TokenScorer,
    microbatches: Iterable[BatchedDataDict],
    loss_fn: LossFn,
    step: TrainStep,
    *,
    backward: bool,
) -> None:
    """Add the loss, metrics and (with `backward`) gradients of `microbatches` to `step` and to the model.

    Beside the loss's own metrics there is `entropy`, in nats per token, unless the loss has one itself.
    """
    unfiltered = UNFILTERED_LOGPROBS in getattr(loss_fn, "required_columns", ())
    step.loss_type = loss_fn.loss_type
    step.per_sequence_metrics = getattr(loss_fn, "per_sequence_metrics", ())
    for data, is_last in _with_last(microbatches):
        if scorer.sharded is not None:
            scorer.sharded.reduce_next(is_last)
        with torch.set_grad_enabled(backward):
            read = data.select_columns(FORWARD_COLUMNS, with_media=True)
            scores = scorer(read, with_entropy=True, with_unfiltered=unfiltered)
            # Losses find every column on the device of the logprobs.
            data[INPUT_LENGTHS] = data[INPUT_LENGTHS].to(scores.logprobs.device, non_blocking=True)
            loss, metrics = loss_fn(
                scores.logprobs,
                {**data, UNFILTERED_LOGPROBS: scores.unfiltered} if unfiltered else data,
                global_valid_seqs=step.global_valid_seqs,
                global_valid_toks=step.global_valid_toks,
            )
        if backward:
            loss.backward()  # type: ignore[no-untyped-call]
        step.losses.append(loss.detach().float())
        step.metrics.append({n: v.detach() if isinstance(v, torch.Tensor) else v for n, v in metrics.items()})
        telling = {
            name: column
            for name, column in data.items()
            if name in (SAMPLE_ID, TOKEN_MASK)
            or (isinstance(column, torch.Tensor) and column.is_floating_point() and column.dim() <= 2)
        }
        step.columns.append({**telling, _LOGPROBS: scores.logprobs.detach()})
        if scores.entropy is not None and TOKEN_MASK in data:
            weights = data[TOKEN_MASK].float() * data[SAMPLE_MASK].float()[:, None]  # (b, S)
            total = (scores.entropy[:, 1:] * weights[:, 1:]).sum()
            step.entropies.append(total / step.global_valid_toks.clamp(min=1))


def _with_last(items: Iterable[_T]) -> Iterator[tuple[_T, bool]]:
    """Yield each item, and whether it is the last."""
    rest = iter(items)
    for item in rest:
        for following in rest:
            yield item, False
            item = following
        yield item, True


def apply_gradients(
    step: TrainStep,
    parameters: Sequence[torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    *,
    max_grad_norm: float | None,
    sharded: ShardedModel | None = None,
) -> tuple[float, Outcome]:
    """Clip to `max_grad_norm`, update and advance the schedule; return the norm before, and how it ended.

    Only `updated` moves weights, optimizer and schedule; gradients are freed either way. The parameters of a `sharded`
    model have the norm of all ranks' gradients. Every rank returns the same: norm, tokens and whether some rank's loss
    is not finite are facts of the whole global batch.
    """
    loss = step.loss
    if sharded is None:
        total = torch.nn.utils.get_total_norm([for_norm(p.grad) for p in parameters if p.grad is not None])
    else:
        sharded.sum_replicated_gradients()
        total, loss = sharded.gradient_norm(loss)
    facts = [fact.to(total.device, torch.float64) for fact in (total, loss, step.global_valid_toks)]
    norm, *rest = torch.stack(facts).tolist()
    outcome = _outcome(norm, *rest)
    if outcome == "updated":
        if max_grad_norm is not None and sharded is None:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, total)
        elif max_grad_norm is not None and sharded is not None:
            sharded.scale_gradients((max_grad_norm / (total + _CLIP_EPSILON)).clamp(max=1.0))
        optimizer.step()
        scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    return norm, outcome


def _outcome(norm: float, loss: float, tokens: float) -> Outcome:
    if tokens <= 0:
        # A loss may well be 0 / 0 here.
        return "no_tokens"
    if not (math.isfinite(norm) and math.isfinite(loss)):
        return "not_finite"
    return "updated" if norm > 0 else "no_gradient"


def _fetched(*groups: Sequence[Metrics]) -> list[list[dict[str, float]]]:
    """Return groups of metrics as numbers, those on the device by way of float32 and in one copy for all."""
    values = [value for group in groups for metrics in group for value in metrics.values()]
    tensors = [value.to(torch.float32) for value in values if isinstance(value, torch.Tensor)]
    numbers = iter(torch.stack(tensors).tolist() if tensors else [])

    def fetch(metrics: Metrics) -> dict[str, float]:
        return {n: next(numbers) if isinstance(v, torch.Tensor) else v for n, v in metrics.items()}

    return [[fetch(metrics) for metrics in group] for group in groups]

"""One optimizer step over a global batch: forward and backward per microbatch, then clip and update, once.

Weights, gradients and optimizer state are float32; with `precision="bfloat16"` the forward runs under
autocast. The model stays in evaluation mode: dropout, router noise and balancing losses are off, so that
logprobs before and during training are of the same function.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from headrace.data_plane.schema import SAMPLE_MASK, TOKEN_MASK
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.models.automodel.data import ProcessedMicrobatch
from headrace.models.automodel.scoring import TokenScorer
from headrace.models.automodel.sharding import ShardedModel
from headrace.models.interfaces import LossFn
from headrace.models.policy.results import combine_metrics

# As torch.nn.utils.clip_grads_with_norm_ has it.
_CLIP_EPSILON = 1e-6


Metrics = Mapping[str, torch.Tensor | float]
"""As a loss returns them: tensors are 0-D, where the logprobs are."""


@dataclass(frozen=True)
class StepResult:
    """What one global batch gave: this rank's share of loss and metrics, and the norm of the whole gradient.

    `updated` is False where the gradient was not finite: weights and optimizer are then as before the step.
    """

    loss: float
    grad_norm: float
    metrics: dict[str, float]
    num_microbatches: int
    tokens: int
    updated: bool


@dataclass
class TrainStep:
    """A step that has begun: what normalises its loss, and what its microbatches have given so far."""

    global_valid_seqs: torch.Tensor
    global_valid_toks: torch.Tensor
    losses: list[torch.Tensor] = field(default_factory=list)
    metrics: list[Metrics] = field(default_factory=list)
    entropies: list[torch.Tensor] = field(default_factory=list)
    """This step's share of the entropy per token, one 0-D tensor per microbatch that has it."""
    tokens: int = 0

    def result(self, grad_norm: float = 0.0, *, updated: bool = False) -> StepResult:
        """Return the sums over microbatches, with how the step ended. Waits for the device once."""
        loss = torch.stack(self.losses).sum() if self.losses else 0.0
        shares = [{"entropy": share} for share in self.entropies]
        (total,), entropies, own = _fetched([{"loss": loss}], shares, self.metrics)
        # A loss's own entropy goes before the scorer's.
        metrics = {**combine_metrics(entropies), **combine_metrics(own)}
        return StepResult(total["loss"], grad_norm, metrics, len(self.losses), self.tokens, updated)


def run_microbatches(
    scorer: TokenScorer,
    microbatches: Iterable[ProcessedMicrobatch],
    loss_fn: LossFn,
    step: TrainStep,
    *,
    backward: bool = True,
) -> None:
    """Add the loss, metrics and (with `backward`) gradients of `microbatches` to `step` and to the model.

    Beside the loss's own metrics there is `entropy`, in nats per token, unless the loss has one itself.
    """
    for microbatch in microbatches:
        data = microbatch.data_dict
        with torch.set_grad_enabled(backward):
            scores = scorer(microbatch, with_entropy=True)
            loss, metrics = loss_fn(
                scores.logprobs,
                data,
                global_valid_seqs=step.global_valid_seqs,
                global_valid_toks=step.global_valid_toks,
            )
        if backward:
            loss.backward()  # type: ignore[no-untyped-call]
        step.losses.append(loss.detach().float())
        step.metrics.append({n: v.detach() if isinstance(v, torch.Tensor) else v for n, v in metrics.items()})
        if scores.entropy is not None and TOKEN_MASK in data:
            step.entropies.append(_entropy_share(scores.entropy, data, step))


def apply_gradients(
    parameters: Sequence[torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    *,
    max_grad_norm: float | None,
    sharded: ShardedModel | None = None,
) -> tuple[float, bool]:
    """Clip to `max_grad_norm`, update and advance the schedule; return the norm before, and whether updated.

    A norm that is not finite updates nothing and leaves optimizer and schedule where they are. Gradients are
    freed either way. The parameters of a `sharded` model have the norm of all ranks' gradients.
    """
    if sharded is None:
        total = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    else:
        sharded.sum_replicated_gradients()
        total = sharded.gradient_norm()
    norm = float(total)
    updated = math.isfinite(norm)
    if updated:
        if max_grad_norm is not None and sharded is None:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, total)
        elif max_grad_norm is not None and sharded is not None:
            sharded.scale_gradients((max_grad_norm / (total + _CLIP_EPSILON)).clamp(max=1.0))
        optimizer.step()
        scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    return norm, updated


def _fetched(*groups: Sequence[Metrics]) -> list[list[dict[str, float]]]:
    """Return groups of metrics as numbers, those on the device by way of float32 and in one copy for all."""
    values = [value for group in groups for metrics in group for value in metrics.values()]
    tensors = [value.to(torch.float32) for value in values if isinstance(value, torch.Tensor)]
    numbers = iter(torch.stack(tensors).tolist() if tensors else [])

    def fetch(metrics: Metrics) -> dict[str, float]:
        return {n: next(numbers) if isinstance(v, torch.Tensor) else v for n, v in metrics.items()}

    return [[fetch(metrics) for metrics in group] for group in groups]


def _entropy_share(entropy: torch.Tensor, data: BatchedDataDict, step: TrainStep) -> torch.Tensor:
    weights: torch.Tensor = data[TOKEN_MASK].float() * data[SAMPLE_MASK].float()[:, None]
    return (entropy[:, 1:] * weights[:, 1:]).sum() / step.global_valid_toks.clamp(min=1)

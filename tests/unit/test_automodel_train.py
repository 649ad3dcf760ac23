"""One step: microbatches add up to the batch, clipping is what it says, and bad gradients change nothing."""

from typing import Any

import pytest
import torch

from headrace.algorithms.loss import NLLLoss
from headrace.config import OptimizerConfig, SchedulerConfig
from headrace.models.automodel.data import COUNTED_COLUMNS, valid_counts
from headrace.models.automodel.scoring import Scoring, TokenScorer
from headrace.models.automodel.setup import build_optimizer, build_scheduler
from headrace.models.automodel.train import TrainStep, apply_gradients, run_microbatches
from headrace.models.interfaces import LossFn
from headrace.models.policy.results import combine_metrics
from reference_training import PolicyGradient, gradients, largest_gap, naive_loss
from tiny_models import tiny_batch, tiny_model

LENGTHS = [9, 4, 12, 7, 5, 3, 11, 8]


def _accumulate(
    model: Any, mbs: int, *, backward: bool = True, loss: LossFn | None = None, data: Any = None
) -> TrainStep:
    data, loss = data or tiny_batch(LENGTHS), loss or PolicyGradient()
    step = TrainStep(*valid_counts(data.select_columns(COUNTED_COLUMNS), loss.loss_type, None))
    scorer = TokenScorer(model, Scoring(chunk_tokens=16))
    run_microbatches(scorer, data.microbatches("fixed", mbs), loss, step, backward=backward)
    return step


@pytest.mark.parametrize("mbs", [1, 2, 8])
def test_microbatches_add_up_to_the_loss_and_gradient_of_the_whole_batch(mbs: int) -> None:
    ours, naive = tiny_model("qwen3_moe"), tiny_model("qwen3_moe")
    result = _accumulate(ours, mbs).result()
    loss = naive_loss(naive, tiny_batch(LENGTHS))
    loss.backward()
    assert result.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    assert largest_gap(gradients(ours), gradients(naive)) < 1e-4
    assert result.num_microbatches == 8 // mbs


def test_metrics_are_summed_or_are_extremes_by_their_names() -> None:
    whole = _accumulate(tiny_model("llama"), 8).result().metrics
    parts = _accumulate(tiny_model("llama"), 2).result().metrics
    assert parts["tokens_fraction"] == pytest.approx(1.0)
    for name in ("logprob_min", "logprob_max", "entropy"):
        assert parts[name] == pytest.approx(whole[name], rel=1e-5)
    assert parts["logprob_min"] < parts["logprob_max"] < 0 < parts["entropy"]


def test_a_sample_that_does_not_count_is_in_no_metric_and_not_in_the_loss() -> None:
    data = tiny_batch(LENGTHS)
    data["sample_mask"][2] = 0
    with_it = _accumulate(tiny_model("llama"), 2, data=data).result()
    without = _accumulate(tiny_model("llama"), 7, data=data.select_indices([0, 1, 3, 4, 5, 6, 7])).result()
    assert with_it.loss == pytest.approx(without.loss, rel=1e-5)
    assert with_it.metrics == pytest.approx(without.metrics, rel=1e-5)


def test_metrics_fetched_at_the_end_are_bit_for_bit_those_fetched_at_every_microbatch() -> None:
    step = _accumulate(tiny_model("llama"), 2, loss=NLLLoss())
    assert all(isinstance(value, torch.Tensor) for metrics in step.metrics for value in metrics.values())
    expected = combine_metrics([{n: float(v) for n, v in metrics.items()} for metrics in step.metrics])
    shares = combine_metrics([{"entropy": float(share)} for share in step.entropies])
    step.metrics.append({"plain": 0.1})
    result = step.result()
    assert result.metrics == {**shares, **expected, "plain": 0.1}
    assert result.loss == float(step.loss)
    assert len(step.metrics) == 5


def test_a_step_without_microbatches_has_a_loss_of_zero_and_no_metrics() -> None:
    result = TrainStep(torch.tensor(0.0), torch.tensor(0.0)).result()
    assert (result.loss, result.metrics, result.num_microbatches) == (0.0, {}, 0)


def test_without_backward_no_gradient_is_made() -> None:
    model = tiny_model("llama")
    assert _accumulate(model, 4, backward=False).result().loss != 0
    assert all(p.grad is None for p in model.parameters())


def _step_of(step: TrainStep, model: Any, max_grad_norm: float | None) -> tuple[Any, Any, float, str]:
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.1, weight_decay=0.0))
    schedule = build_scheduler(optimizer, SchedulerConfig(warmup_steps=4))
    norm, outcome = apply_gradients(
        step, list(model.parameters()), optimizer, schedule, max_grad_norm=max_grad_norm
    )
    return optimizer, schedule, norm, outcome


@pytest.mark.parametrize("limit", [None, 1e-3, 1e6])
def test_the_reported_norm_is_that_before_clipping(limit: float | None) -> None:
    model = tiny_model("llama")
    step = _accumulate(model, 4)
    grads = gradients(model)
    expected = float(torch.cat([g.flatten() for g in grads.values()]).norm())
    optimizer, _, norm, outcome = _step_of(step, model, limit)
    assert outcome == "updated"
    assert norm == pytest.approx(expected, rel=1e-5)
    # After one step from zero, AdamW's first moment is 0.1 x the clipped gradient.
    scale = 1.0 if limit is None else min(1.0, limit / (expected + 1e-6))
    weight = model.get_output_embeddings().weight
    torch.testing.assert_close(
        optimizer.state[weight]["exp_avg"], 0.1 * scale * grads["lm_head.weight"], rtol=1e-4, atol=1e-9
    )
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("shape", [(40_000, 1000), (32, 1000, 1250)])
def test_the_norm_of_a_large_gradient_on_a_cpu_is_that_of_float64(shape: tuple[int, ...]) -> None:
    weight = torch.nn.Parameter(torch.zeros(shape))
    weight.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = float(weight.grad.double().norm())
    optimizer = torch.optim.SGD([weight], lr=0.0)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    step = TrainStep(torch.tensor(1.0), torch.tensor(1.0))
    norm, _ = apply_gradients(step, [weight], optimizer, schedule, max_grad_norm=None)
    assert norm == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_neither_weights_nor_optimizer(poison: float) -> None:
    model = tiny_model("llama")
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    step = _accumulate(model, 4)
    next(model.parameters()).grad[0, 0] = poison
    optimizer, schedule, norm, outcome = _step_of(step, model, 1.0)
    assert outcome == "not_finite"
    assert not norm < float("inf")
    assert not optimizer.state
    assert schedule.last_epoch == 0
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())

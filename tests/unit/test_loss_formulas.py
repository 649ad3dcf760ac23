"""Each formula by hand, and its gradient."""

import math

import pytest
import torch

from headrace.algorithms.loss import (
    LossInputs,
    PolicyGradientLoss,
    aggregation_weights,
    importance_correction,
    kl_estimate,
    probability_error,
)
from headrace.config import LossConfig


def inputs_of(tokens, seqs=1.0, toks=1.0, samples=None, **columns):
    mask = torch.tensor(tokens) > 0
    samples = torch.ones(len(tokens)) if samples is None else samples
    return LossInputs(torch.zeros(mask.shape), mask, samples, columns, torch.tensor(seqs), torch.tensor(toks))


def correction_of(ratios, tokens, kind):
    """Weights and kept rows for these ratios of trainer to generator."""
    inputs = inputs_of(tokens, prev_logprobs=ratios.log(), generation_logprobs=torch.zeros_like(ratios))
    cfg = LossConfig(importance_correction=kind, importance_low=0.5, importance_high=2.0)
    return importance_correction(inputs, cfg)


def loss_of(ratios, advantages, cfg, *, generation_ratios=None, reference_ratios=None, prev=-1.0):
    """Loss, gradient and metrics of one row, by ratios: current/prev, prev/generation, current/reference."""
    ratios = torch.tensor([1.0, *ratios], dtype=torch.float64)
    size = len(ratios)
    prev_logprobs = torch.full((1, size), prev, dtype=torch.float64)
    logprobs = (prev_logprobs + ratios.log()).requires_grad_()

    def below(quotients):
        values = torch.tensor([1.0, *(quotients or [1.0] * (size - 1))], dtype=torch.float64)
        return values.log()

    data = {
        "token_mask": torch.tensor([[0] + [1] * (size - 1)], dtype=torch.uint8),
        "sample_mask": torch.ones(1),
        "advantages": torch.tensor([[0.0, *advantages]], dtype=torch.float64),
        "prev_logprobs": prev_logprobs,
        "generation_logprobs": prev_logprobs - below(generation_ratios),
        "reference_policy_logprobs": logprobs.detach() - below(reference_ratios),
    }
    loss, metrics = PolicyGradientLoss(cfg)(
        logprobs,
        data,
        global_valid_seqs=torch.tensor(1.0),
        global_valid_toks=torch.tensor(float(size - 1)),
    )
    loss.backward()
    return loss.item(), logprobs.grad[0, 1:].tolist(), {name: value.item() for name, value in metrics.items()}


PPO = LossConfig(clip_low=0.2, clip_high=0.28)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 1.0, -1.1, -1.1),
        (1.5, 1.0, -1.28, 0.0),  # above 1 + clip_high, A > 0: clipped
        (1.25, 1.0, -1.25, -1.25),  # between the symmetric and the raised upper clip
        (0.5, 1.0, -0.5, -0.5),  # below, but A > 0: the gradient brings it back
        (0.5, -1.0, 0.8, 0.0),  # below 1 - clip_low, A < 0: clipped
        (5.0, -1.0, 5.0, 5.0),  # above, A < 0: unbounded without dual clip
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_clipped_pg_and_its_gradient(ratio, advantage, loss, gradient):
    got_loss, got_gradient, _ = loss_of([ratio], [advantage], PPO)
    assert got_loss == pytest.approx(loss)
    assert got_gradient == pytest.approx([gradient])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [(5.0, -1.0, 3.0, 0.0), (2.0, -1.0, 2.0, 2.0), (5.0, 1.0, -1.28, 0.0), (0.5, -2.0, 1.6, 0.0)],
)
def test_dual_clip_bounds_the_loss_of_bad_tokens_only(ratio, advantage, loss, gradient):
    cfg = LossConfig(clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    got_loss, got_gradient, metrics = loss_of([ratio], [advantage], cfg)
    assert got_loss == pytest.approx(loss)
    assert got_gradient == pytest.approx([gradient])
    assert metrics["dual_clip_fraction"] == float(loss == 3.0)


def test_clip_fractions_count_the_tokens_that_lose_their_gradient():
    ratios, advantages = [1.5, 1.5, 0.5, 0.5, 1.0], [1.0, -1.0, 1.0, -1.0, 1.0]
    _, gradient, metrics = loss_of(ratios, advantages, PPO)
    assert [g == 0 for g in gradient] == [True, False, False, True, False]
    assert metrics["clip_fraction_high"] == pytest.approx(0.2)
    assert metrics["clip_fraction_low"] == pytest.approx(0.2)
    assert metrics["ratio_mean"] == pytest.approx(1.0)
    assert (metrics["ratio_min"], metrics["ratio_max"]) == pytest.approx((0.5, 1.5))


def test_gspo_uses_the_length_normalised_ratio_of_the_sequence():
    # s = (2 * 0.5 * 1.331) ** (1/3) = 1.1.
    cfg = LossConfig(ratio_level="sequence", aggregation="sequence_mean", clip_low=0.2, clip_high=0.2)
    loss, gradient, metrics = loss_of([2.0, 0.5, 1.331], [1.0] * 3, cfg)
    assert loss == pytest.approx(-1.1)
    # d s / d logprob_t = s / 3.
    assert gradient == pytest.approx([-1.1 / 3] * 3)
    assert (metrics["ratio_min"], metrics["ratio_max"]) == pytest.approx((1.1, 1.1))


@pytest.mark.parametrize("advantage", [0.7, -0.7])
def test_the_gspo_gradient_equals_finite_differences(advantage):
    cfg = LossConfig(ratio_level="sequence", aggregation="sequence_mean", clip_low=0.2, clip_high=0.2)
    ratios, step = [2.0, 0.5, 1.2], 1e-6
    _, gradient, _ = loss_of(ratios, [advantage] * 3, cfg)
    for t in range(3):
        up = [r * math.exp(step) if i == t else r for i, r in enumerate(ratios)]
        down = [r * math.exp(-step) if i == t else r for i, r in enumerate(ratios)]
        slope = loss_of(up, [advantage] * 3, cfg)[0] - loss_of(down, [advantage] * 3, cfg)[0]
        assert gradient[t] == pytest.approx(slope / (2 * step), rel=1e-6)


def test_a_clipped_sequence_loses_the_gradient_of_all_its_tokens():
    cfg = LossConfig(ratio_level="sequence", aggregation="sequence_mean", clip_low=0.2, clip_high=0.2)
    loss, gradient, metrics = loss_of([4.0, 0.5], [1.0, 1.0], cfg)  # s = sqrt(2)
    assert loss == pytest.approx(-1.2)
    assert gradient == [0.0, 0.0]
    assert metrics["clip_fraction_high"] == 1.0


def test_gspo_keeps_each_tokens_own_advantage():
    cfg = LossConfig(ratio_level="sequence", aggregation="sequence_mean")
    _, gradient, _ = loss_of([1.1, 1.1], [1.0, -2.0], cfg)
    assert gradient == pytest.approx([-1.1 / 2, 2 * 1.1 / 2])


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"),
    [(1.0, 1.0, -1.0), (1.5, 1.0, -1.28), (0.5, 1.0, -0.8), (0.5, -1.0, 0.8), (5.0, -1.0, 1.28)],
)
def test_cispo_lets_every_token_learn_with_a_bounded_weight(ratio, advantage, gradient):
    cfg = LossConfig(kind="cispo", clip_low=0.2, clip_high=0.28)
    loss, got, _ = loss_of([ratio], [advantage], cfg)
    assert got == pytest.approx([gradient])
    assert loss == pytest.approx(gradient * (-1.0 + math.log(ratio)))


def test_cispo_has_no_lower_bound_with_a_clip_low_of_one():
    cfg = LossConfig(kind="cispo", clip_low=1.0)
    _, gradient, metrics = loss_of([0.01], [1.0], cfg)
    assert gradient == pytest.approx([-0.01])
    assert metrics["clip_fraction_low"] == 0.0


def test_the_on_policy_ratio_is_exactly_one_with_a_live_gradient():
    cfg = LossConfig(force_on_policy_ratio=True)
    loss, gradient, metrics = loss_of([5.0, 0.1], [1.0, -2.0], cfg)
    assert loss == 0.5
    assert gradient == [-0.5, 1.0]
    assert (metrics["ratio_min"], metrics["ratio_max"], metrics["approx_kl"]) == (1.0, 1.0, 0.0)


def test_kl_estimators_by_hand():
    # The docstring's example: d = 0.5.
    policy, reference = torch.tensor([-0.5]), torch.tensor([-1.0])
    assert kl_estimate(policy, reference, "k1").item() == 0.5
    assert kl_estimate(policy, reference, "k2").item() == 0.125
    assert kl_estimate(policy, reference, "k3").item() == pytest.approx(math.exp(-0.5) - 0.5)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(kind):
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    truth = (policy * (policy / reference).log()).sum()
    mean = (policy * kl_estimate(policy.log(), reference.log(), kind)).sum()
    assert mean.item() == pytest.approx(truth.item())


def kl_gradients(scores, reference):
    """Gradients by the scores of KL(policy || reference) and KL(reference || policy), over all tokens."""
    logprobs = scores.log_softmax(0)
    forward = (logprobs.exp() * (logprobs - reference.log())).sum()
    backward = (reference * (reference.log() - logprobs)).sum()
    return [torch.autograd.grad(kl, scores, retain_graph=True)[0] for kl in (forward, backward)]


def expected_gradient(scores, per_token):
    """Gradient of what `per_token` gives of the logprobs, in expectation over samples of the policy."""
    logprobs = scores.log_softmax(0)
    loss = (logprobs.exp().detach() * per_token(logprobs)).sum()
    return torch.autograd.grad(loss, scores)[0]


SCORES = torch.tensor([0.4, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
REFERENCE = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)


def test_as_a_loss_k2_teaches_the_kl_k3_the_reverse_kl_and_k1_nothing():
    forward, backward = kl_gradients(SCORES, REFERENCE)
    k1, k2, k3 = (
        expected_gradient(SCORES, lambda x, kind=kind: kl_estimate(x, REFERENCE.log(), kind))
        for kind in ("k1", "k2", "k3")
    )
    assert torch.allclose(k2, forward)
    assert torch.allclose(k3, backward)
    assert not torch.allclose(k3, forward, rtol=0.05)
    assert k1.abs().max() < 1e-12
    assert forward.norm() > 0.1


@pytest.mark.parametrize(
    ("kind", "gradient", "off_policy"),
    [
        ("k1", "score_function", True),
        ("k1", "score_function", False),
        ("k3", "score_function", True),
        ("k3", "score_function", False),
        ("k2", "value", False),
    ],
)
@pytest.mark.parametrize("filtered", [False, True])
def test_the_loss_has_the_gradient_of_the_kl_over_every_token(kind, gradient, off_policy, filtered):
    # One row for each token, weighed with the probability that the previous policy samples it.
    scores = SCORES.detach().requires_grad_()
    shift = torch.tensor([0.3, 0.0, -0.4], dtype=torch.float64) if off_policy else 0.0
    prev = (scores.detach() + shift).log_softmax(0)

    def column(values):
        return torch.stack([torch.zeros_like(values), values], dim=1)

    data = {
        "token_mask": torch.tensor([[0, 1]] * 3),
        "sample_mask": prev.exp(),
        "advantages": torch.zeros(3),
        "generation_logprobs": column(prev),
        "prev_logprobs": column(prev),
        "reference_policy_logprobs": column(REFERENCE.log()),
        "unfiltered_logprobs": column(scores.log_softmax(0)),
    }
    loss_fn = PolicyGradientLoss(
        LossConfig(kl_coefficient=1.0, kl_kind=kind, kl_gradient=gradient), filtered=filtered
    )
    one = torch.tensor(1.0, dtype=torch.float64)
    loss, _ = loss_fn(column(scores.log_softmax(0)), data, global_valid_seqs=one, global_valid_toks=one)
    loss.backward()
    assert torch.allclose(scores.grad, kl_gradients(SCORES, REFERENCE)[0])


@pytest.mark.parametrize("distance", [1.0, 0.1, 0.01])
def test_in_the_reward_only_k1_teaches_the_kl(distance):
    # A reward weighs the gradient of the logprob; k2 and k3 are of second order near the reference, so that nothing
    # of first order is left of them.
    scores = (REFERENCE.log() + distance * SCORES.detach()).requires_grad_()
    forward, _ = kl_gradients(scores, REFERENCE)
    k1, k2, k3 = (
        expected_gradient(scores, lambda x, kind=kind: kl_estimate(x.detach(), REFERENCE.log(), kind) * x)
        for kind in ("k1", "k2", "k3")
    )
    assert torch.allclose(k1, forward)
    assert max(k2.norm(), k3.norm()) < 0.5 * distance * forward.norm()


@pytest.mark.parametrize(
    ("kind", "value", "gradient"),
    [
        ("k2", math.log(2) ** 2 / 2, math.log(2)),
        ("k3", 0.5 - 1 + math.log(2), 0.5),
    ],
)
def test_kl_in_the_loss_adds_coefficient_times_kl(kind, value, gradient):
    cfg = LossConfig(kl_coefficient=0.1, kl_kind=kind)
    loss, got, metrics = loss_of([1.0], [0.0], cfg, reference_ratios=[2.0])
    assert metrics["kl"] == pytest.approx(value)
    assert loss == pytest.approx(0.1 * value)
    assert got == pytest.approx([0.1 * gradient])


RATIOS = torch.tensor([[0.4, 1.5, 3.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        ("none", [1.0, 1.0, 1.0]),
        ("tis", [0.4, 1.5, 2.0]),
        ("icepop", [0.0, 1.5, 0.0]),
        ("sequence_mask", [0.4, 1.5, 3.0]),
    ],
)
def test_importance_weights_by_hand(kind, weights):
    got, keep = correction_of(RATIOS, [[1, 1, 1]], kind)
    assert got[0].tolist() == pytest.approx(weights)
    assert keep.tolist() == [True]


def test_sequence_mask_looks_at_the_geometric_mean():
    # Geometric means: sqrt(8 / 4) = 1.41 stays; sqrt(3 * 2) = 2.45 and sqrt(0.2) = 0.45 go.
    ratios = torch.tensor([[8.0, 0.25], [3.0, 2.0], [0.2, 1.0]], dtype=torch.float64)
    _, keep = correction_of(ratios, [[1, 1]] * 3, "sequence_mask")
    assert keep.tolist() == [True, False, False]


def test_a_row_without_tokens_is_never_masked_by_its_ratio():
    _, keep = correction_of(torch.full((1, 2), 9.0, dtype=torch.float64), [[0, 0]], "sequence_mask")
    assert keep.tolist() == [True]


@pytest.mark.parametrize(("kind", "weight"), [("none", 1.0), ("tis", 2.0), ("icepop", 0.0)])
def test_the_importance_weight_scales_loss_and_gradient_and_carries_none(kind, weight):
    cfg = LossConfig(importance_correction=kind, importance_high=2.0)
    loss, gradient, metrics = loss_of([1.1], [1.0], cfg, generation_ratios=[3.0])
    assert loss == pytest.approx(-1.1 * weight)
    assert gradient == pytest.approx([-1.1 * weight])
    assert metrics["importance_weight_mean"] == pytest.approx(weight)
    assert metrics["token_mult_prob_error"] == pytest.approx(3.0)


def test_the_on_policy_correction_compares_the_current_policy_with_the_generator():
    cfg = LossConfig(force_on_policy_ratio=True, importance_correction="tis", importance_high=10.0)
    # Current / prev = 2 and prev / generator = 1.5, so current / generator = 3.
    loss, gradient, _ = loss_of([2.0], [1.0], cfg, generation_ratios=[1.5])
    assert (loss, gradient) == (pytest.approx(-3.0), pytest.approx([-3.0]))


def test_a_masked_sequence_is_out_of_loss_and_kl_but_not_out_of_the_measurements():
    cfg = LossConfig(importance_correction="sequence_mask", kl_coefficient=0.5)
    loss, gradient, metrics = loss_of(
        [1.0, 1.0], [1.0, 1.0], cfg, generation_ratios=[4.0, 4.0], reference_ratios=[2.0, 2.0]
    )
    assert (loss, gradient) == (0.0, [0.0, 0.0])
    assert metrics["kl"] == 0.0
    assert metrics["masked_sequence_fraction"] == 1.0
    assert metrics["token_mult_prob_error"] == pytest.approx(4.0)
    assert metrics["ratio_mean"] == pytest.approx(1.0)


def test_a_sample_is_masked_by_its_mean_logprob_error():
    for ratios, masked in [([1.2, 1.4], 0.0), ([1.2, 2.4], 1.0), ([1 / 1.2, 1 / 2.4], 1.0)]:
        cfg = LossConfig(max_sequence_logprob_error=1.5)
        loss, _, metrics = loss_of([1.0, 1.0], [1.0, 1.0], cfg, generation_ratios=ratios)
        assert metrics["masked_sequence_fraction"] == masked
        assert loss == masked - 1.0


def test_probability_error_is_the_same_both_ways():
    ratio = torch.tensor([0.5, 2.0, 1.0]).log()
    assert probability_error(ratio).tolist() == pytest.approx([2.0, 2.0, 1.0])


def test_aggregation_weights_of_the_docstring():
    inputs = inputs_of([[1, 0, 0], [1, 1, 1]], seqs=2.0, toks=4.0)
    token = aggregation_weights(inputs, "token_mean")
    assert token.tolist() == [[0.25, 0, 0], [0.25, 0.25, 0.25]]
    sequence = aggregation_weights(inputs, "sequence_mean")
    assert sequence.flatten().tolist() == pytest.approx([0.5, 0, 0, 1 / 6, 1 / 6, 1 / 6])
    constant = aggregation_weights(inputs, "constant", 4)
    assert constant.tolist() == [[0.125, 0, 0], [0.125, 0.125, 0.125]]


def test_a_sample_mask_between_zero_and_one_is_a_weight():
    inputs = inputs_of([[1, 1], [1, 1]], seqs=1.5, toks=3.0, samples=torch.tensor([1.0, 0.5]))
    weights = aggregation_weights(inputs, "token_mean")
    assert weights.sum().item() == pytest.approx(1.0)
    assert weights[0, 0] == 2 * weights[1, 0]

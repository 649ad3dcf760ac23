"""The loss as a whole: against the naive reference, under every cut and padding, and with nothing in it."""

import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch._subclasses.fake_tensor import FakeTensorMode

import reference_algorithms as reference
from headrace.algorithms.loss import NLLLoss, PolicyGradientLoss
from headrace.compat.losses import LossFunction, LossType
from headrace.config import LossConfig
from headrace.errors import SchemaError
from reference_algorithms import Row, columns, random_row

CONFIGS = {
    "default": LossConfig(),
    "sequence_mean": LossConfig(aggregation="sequence_mean", clip_low=0.1, clip_high=0.3),
    "dual_clip": LossConfig(dual_clip=1.3, kl_coefficient=0.1),
    "score_function": LossConfig(kl_coefficient=0.3, kl_kind="k1", kl_gradient="score_function"),
    "constant": LossConfig(aggregation="constant", constant_tokens=9, kl_coefficient=0.1),
    "gspo": LossConfig(ratio_level="sequence", aggregation="sequence_mean", clip_low=0.05, clip_high=0.1),
    "gspo_kl": LossConfig(
        ratio_level="sequence", aggregation="sequence_mean", kl_coefficient=0.3, kl_kind="k2"
    ),
    "cispo": LossConfig(kind="cispo", kl_coefficient=0.2),
    "cispo_sequence_mean": LossConfig(kind="cispo", aggregation="sequence_mean"),
    "tis": LossConfig(importance_correction="tis", importance_high=1.2),
    "icepop": LossConfig(importance_correction="icepop", importance_low=0.8, importance_high=1.3),
    "sequence_mask": LossConfig(
        importance_correction="sequence_mask",
        importance_low=0.9,
        importance_high=1.1,
        aggregation="sequence_mean",
    ),
    "logprob_error": LossConfig(max_sequence_logprob_error=1.5, kl_coefficient=0.1),
    "on_policy": LossConfig(force_on_policy_ratio=True, importance_correction="tis"),
}
EVERY = pytest.mark.parametrize("cfg", CONFIGS.values(), ids=CONFIGS.keys())


def run(rows: list[Row], cfg: LossConfig, counts=None, dtype=torch.float64):
    """Loss, gradient (rows, S) and metrics of these rows as part of a global batch with these counts."""
    seqs, toks = counts or reference.global_counts(rows)
    logprobs, data = columns(rows, dtype)
    loss, metrics = PolicyGradientLoss(cfg)(
        logprobs, data, global_valid_seqs=torch.tensor(seqs), global_valid_toks=torch.tensor(toks)
    )
    loss.backward()
    return loss.detach().item(), logprobs.grad, numbers(metrics)


def numbers(metrics) -> dict[str, float]:
    """Metrics as a step fetches them: 0-D float32 tensors without gradient."""
    kinds = {(value.shape, value.dtype, value.requires_grad) for value in metrics.values()}
    assert kinds == {(torch.Size(), torch.float32, False)}
    return {name: value.item() for name, value in metrics.items()}


def batch(seed: int, size: int = 6) -> list[Row]:
    rng = random.Random(seed)
    return [random_row(rng, sample_mask=float(rng.random() < 0.8)) for _ in range(size)]


@EVERY
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_loss_and_metrics_match_the_naive_reference(cfg, seed):
    rows = batch(seed)
    seqs, toks = reference.global_counts(rows)
    expected, sums = reference.loss_and_metrics(rows, cfg, seqs, toks)
    loss, _, metrics = run(rows, cfg)
    assert loss == pytest.approx(expected, rel=1e-9, abs=1e-12)
    for name, value in sums.items():
        if name in metrics:
            assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert ("kl" in metrics) == (cfg.kl_coefficient > 0)
    assert ("dual_clip_fraction" in metrics) == (cfg.dual_clip is not None)


@EVERY
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_cut_into_microbatches_sums_to_the_whole(cfg, data):
    rows = batch(data.draw(st.integers(0, 10**6)))
    counts = reference.global_counts(rows)
    order = data.draw(st.permutations(range(len(rows))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=3)))
    loss, gradient, metrics = run(rows, cfg, counts, torch.float32)
    total, parts = 0.0, []
    for start, stop in zip([0, *cuts], [*cuts, len(rows)]):
        chosen = [rows[i] for i in order[start:stop]]
        if not chosen:
            continue
        part_loss, part_gradient, part_metrics = run(chosen, cfg, counts, torch.float32)
        total += part_loss
        parts.append(part_metrics)
        for i, row_gradient in zip(order[start:stop], part_gradient):
            assert torch.allclose(row_gradient, gradient[i], rtol=1e-6, atol=1e-7)
    assert total == pytest.approx(loss, rel=1e-6, abs=1e-6)
    for name, value in metrics.items():
        combine = min if name.endswith("_min") else max if name.endswith("_max") else sum
        assert combine(p[name] for p in parts) == pytest.approx(value, rel=1e-5, abs=1e-6), name


@EVERY
def test_padding_width_does_not_matter(cfg):
    for seed in range(5):
        rows = batch(seed)
        wide = [
            Row(
                mask=[*r.mask, *[0] * 9],
                sample_mask=r.sample_mask,
                logprobs=[*r.logprobs, *[math.inf] * 9],
                prev=[*r.prev, *[-math.inf] * 9],
                generation=[*r.generation, *[math.nan] * 9],
                reference=[*r.reference, *[math.nan] * 9],
                advantages=[*r.advantages, *[math.nan] * 9],
            )
            for r in rows
        ]
        loss, gradient, metrics = run(rows, cfg, dtype=torch.float32)
        wide_loss, wide_gradient, wide_metrics = run(wide, cfg, dtype=torch.float32)
        assert wide_loss == pytest.approx(loss, rel=1e-6, abs=1e-7)
        assert torch.allclose(wide_gradient[:, : gradient.shape[1]], gradient, rtol=1e-6, atol=1e-8)
        assert wide_gradient[:, gradient.shape[1] :].eq(0).all()
        assert wide_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-6)


@EVERY
def test_filler_rows_and_masked_rows_weigh_nothing_whatever_they_hold(cfg):
    rows = [r for r in batch(3, size=8) if r.places()]
    width = len(rows[0].mask)
    nan, inf = [math.nan] * width, [math.inf] * width
    filler = Row([0] * width, 0.0, nan, nan, nan, nan, nan)
    masked = Row([0] + [1] * (width - 1), 0.0, nan, [-x for x in inf], inf, nan, inf)
    loss, gradient, metrics = run(rows, cfg)
    mixed = [filler, *rows, masked, filler]
    mixed_loss, mixed_gradient, mixed_metrics = run(mixed, cfg)
    assert reference.global_counts(mixed) == reference.global_counts(rows)
    assert mixed_loss == pytest.approx(loss, rel=1e-12)
    assert torch.allclose(mixed_gradient[1:-2], gradient, rtol=1e-12, atol=0)
    assert mixed_gradient[[0, -2, -1]].eq(0).all()
    assert mixed_metrics == pytest.approx(metrics, rel=1e-6)


@EVERY
@pytest.mark.parametrize("sample_mask", [0.0, 1.0])
def test_a_batch_without_counting_tokens_has_a_loss_and_gradient_of_zero(cfg, sample_mask):
    nan = [math.nan] * 5
    rows = [Row([1, 0, 0, 0, 0], sample_mask, nan, nan, nan, nan, nan)] * 3
    loss, gradient, metrics = run(rows, cfg)
    assert loss == 0.0
    assert gradient.eq(0).all()
    low, high = metrics.pop("ratio_min"), metrics.pop("ratio_max")
    assert (low, high) == (math.inf, -math.inf)
    assert set(metrics.values()) == {0.0}


@EVERY
def test_a_response_of_no_tokens_leaves_the_others_as_they_are(cfg):
    rows = [r for r in batch(11, size=8) if r.places()]
    width = len(rows[0].mask)
    nan = [math.nan] * width
    empty = Row([0] * width, 1.0, nan, nan, nan, nan, nan)
    counts = reference.global_counts([*rows, empty])
    loss, gradient, _ = run(rows, cfg, counts)
    with_empty, with_empty_gradient, metrics = run([*rows, empty], cfg, counts)
    assert with_empty == pytest.approx(loss, rel=1e-12)
    assert torch.allclose(with_empty_gradient[:-1], gradient, rtol=1e-12, atol=0)
    assert all(math.isfinite(v) for v in metrics.values())


@EVERY
@pytest.mark.parametrize("shape", [(0, 4), (3, 1)])
def test_a_batch_without_rows_or_without_places_is_no_special_case(cfg, shape):
    logprobs = torch.zeros(shape, requires_grad=True)
    data = dict.fromkeys(PolicyGradientLoss(cfg).required_columns, torch.zeros(shape))
    data["sample_mask"] = torch.ones(shape[0])
    zero = torch.tensor(0.0)
    loss, _ = PolicyGradientLoss(cfg)(logprobs, data, global_valid_seqs=zero, global_valid_toks=zero)
    loss.backward()
    assert loss.item() == 0.0
    assert logprobs.grad.shape == shape


def test_one_advantage_per_sample_equals_one_per_token():
    rows = batch(5)
    logprobs, data = columns(rows)
    seqs, toks = (torch.tensor(n) for n in reference.global_counts(rows))
    loss_fn = PolicyGradientLoss(LossConfig())
    full, _ = loss_fn(logprobs, data, global_valid_seqs=seqs, global_valid_toks=toks)
    for narrow in (data["advantages"][:, 0], data["advantages"][:, :1]):
        short, _ = loss_fn(
            logprobs, data | {"advantages": narrow}, global_valid_seqs=seqs, global_valid_toks=toks
        )
        assert torch.equal(short, full)


def test_columns_of_other_dtypes_are_taken():
    rows = batch(6)
    logprobs, data = columns(rows, torch.float32)
    seqs, toks = (torch.tensor(n) for n in reference.global_counts(rows))
    loss_fn = PolicyGradientLoss(LossConfig())
    plain, _ = loss_fn(logprobs, data, global_valid_seqs=seqs, global_valid_toks=toks)
    other = data | {
        "token_mask": data["token_mask"].bool(),
        "sample_mask": data["sample_mask"].to(torch.int64),
        "prev_logprobs": data["prev_logprobs"].to(torch.float64),
    }
    loss, _ = loss_fn(logprobs, other, global_valid_seqs=seqs.long(), global_valid_toks=toks.long())
    assert loss.dtype == torch.float32
    assert torch.equal(loss, plain)


@EVERY
def test_the_required_columns_are_enough_and_each_is_needed(cfg):
    loss_fn = PolicyGradientLoss(cfg)
    logprobs, data = columns(batch(7))
    needed = {name: data[name] for name in loss_fn.required_columns}
    one = torch.tensor(1.0)
    loss_fn(logprobs, needed, global_valid_seqs=one, global_valid_toks=one)
    for name in needed:
        rest = {k: v for k, v in needed.items() if k != name}
        with pytest.raises(SchemaError, match=f"'{name}'"):
            loss_fn(logprobs, rest, global_valid_seqs=one, global_valid_toks=one)


def test_only_what_the_config_uses_is_required():
    base = {"token_mask", "sample_mask", "advantages", "generation_logprobs"}
    assert PolicyGradientLoss(LossConfig()).required_columns == base | {"prev_logprobs"}
    assert PolicyGradientLoss(LossConfig(force_on_policy_ratio=True)).required_columns == base
    with_kl = PolicyGradientLoss(LossConfig(kl_coefficient=0.1))
    assert with_kl.required_columns == base | {"prev_logprobs", "reference_policy_logprobs"}
    assert NLLLoss().required_columns == {"token_mask", "sample_mask"}


def test_a_column_of_another_shape_is_refused_by_name():
    logprobs, data = columns(batch(8))
    one = torch.tensor(1.0)
    for name, wrong in [
        ("prev_logprobs", torch.zeros(6)),
        ("generation_logprobs", torch.zeros(6, 3)),
        ("token_mask", torch.ones(6)),
        ("sample_mask", torch.ones(6, 1)),
        ("advantages", torch.zeros(5)),
    ]:
        with pytest.raises(SchemaError, match=f"'{name}'"):
            PolicyGradientLoss(LossConfig())(
                logprobs, data | {name: wrong}, global_valid_seqs=one, global_valid_toks=one
            )


def test_nan_at_a_counting_token_makes_the_loss_nan():
    row = Row(
        [0, 1, 1], 1.0, [0.0, -1.0, -1.0], [0.0, math.nan, -1.0], [0.0, -1.0, -1.0], [0.0] * 3, [1.0] * 3
    )
    loss, _, _ = run([row], LossConfig())
    assert math.isnan(loss)


@EVERY
@pytest.mark.parametrize("column", ["generation", "prev", "reference", "logprobs"])
def test_a_missing_logprob_puts_its_row_out_when_errors_are_bounded(cfg, column):
    if column == "prev" and cfg.force_on_policy_ratio:
        pytest.skip("prev_logprobs are not read")
    cfg = cfg.model_copy(update={"max_sequence_logprob_error": 1e6})
    bad = next(r for r in batch(12, size=20) if len(r.places()) > 1)
    rows = [r for r in batch(13) if r.places()]
    values = list(getattr(bad, column))
    values[bad.places()[0]] = math.nan
    bad = replace(bad, **{column: values})
    if column in ("reference", "logprobs"):
        bad = replace(bad, generation=[math.nan] * len(values))
    counts = reference.global_counts([*rows, bad])
    loss, gradient, _ = run(rows, cfg, counts)
    mixed_loss, mixed_gradient, metrics = run([*rows, bad], cfg, counts)
    assert mixed_loss == pytest.approx(loss, rel=1e-12)
    assert torch.allclose(mixed_gradient[:-1], gradient, rtol=1e-12, atol=0)
    assert mixed_gradient[-1].eq(0).all()
    assert metrics["masked_sequence_fraction"] >= 1 / counts[0]


def test_a_column_that_carries_a_gradient_does_not_pass_it_on():
    rows = batch(14)
    seqs, toks = (torch.tensor(n) for n in reference.global_counts(rows))
    logprobs, data = columns(rows)
    data["prev_logprobs"] = logprobs
    loss, _ = PolicyGradientLoss(LossConfig())(logprobs, data, global_valid_seqs=seqs, global_valid_toks=toks)
    loss.backward()
    expected, gradient, _ = run(rows, LossConfig(force_on_policy_ratio=True))
    assert loss.item() == expected
    assert torch.equal(logprobs.grad, gradient)


@EVERY
def test_a_token_that_the_trainers_filter_excludes_is_out_and_counted(cfg):
    rows = [r for r in batch(9, size=8) if len(r.places()) > 1][:2]
    place = rows[0].places()[0]
    for name in ("logprobs", "prev"):
        values = list(getattr(rows[0], name))
        values[place] = -math.inf
        if name == "prev" and cfg.force_on_policy_ratio:
            continue
        changed = [replace(rows[0], **{name: values}), rows[1]]
        expected, sums = reference.loss_and_metrics(changed, cfg, *reference.global_counts(rows))
        loss, gradient, metrics = run(changed, cfg)
        assert loss == pytest.approx(expected, rel=1e-9)
        assert gradient.isfinite().all()
        assert gradient[0, place] == 0
        assert sums["impossible_fraction"] == pytest.approx(1 / reference.global_counts(rows)[1])
        assert {n: sums[n] for n in metrics.keys() & sums} == pytest.approx(
            {n: metrics[n] for n in metrics.keys() & sums}, rel=1e-5, abs=1e-6
        )
        assert all(math.isfinite(v) for v in metrics.values())


@EVERY
def test_probabilities_that_are_far_apart_stay_finite(cfg):
    rows = []
    for logprob, other, advantage in [(-1.0, -500.0, 1.0), (-500.0, -1.0, -1.0), (-1.0, -500.0, -1.0)]:
        far = [other] * 4
        rows.append(Row([0, 1, 1, 1], 1.0, [logprob] * 4, far, far, far, [advantage] * 4))
        rows.append(replace(rows[-1], prev=[logprob] * 4))
    loss, gradient, metrics = run(rows, cfg, dtype=torch.float32)
    assert math.isfinite(loss)
    assert gradient.isfinite().all()
    assert all(math.isfinite(v) for v in metrics.values())


def test_losses_satisfy_the_protocol():
    for loss_fn in (PolicyGradientLoss(LossConfig()), NLLLoss()):
        assert isinstance(loss_fn, LossFunction)
    assert PolicyGradientLoss(LossConfig()).loss_type is LossType.TOKEN_LEVEL
    for aggregation, constant in (("sequence_mean", None), ("constant", 8)):
        cfg = LossConfig(aggregation=aggregation, constant_tokens=constant)
        assert PolicyGradientLoss(cfg).loss_type is LossType.SEQUENCE_LEVEL
    assert NLLLoss().loss_type is LossType.TOKEN_LEVEL


def test_dual_clip_with_cispo_is_refused_by_its_keys():
    with pytest.raises(ValidationError, match=r"dual_clip=3.*kind=cispo"):
        LossConfig(kind="cispo", dual_clip=3.0)


@pytest.mark.parametrize("kind", ["icepop", "sequence_mask"])
def test_bounds_in_the_wrong_order_are_refused_by_their_keys(kind):
    with pytest.raises(ValidationError, match=r"importance_low=3.*importance_high=2"):
        LossConfig(importance_correction=kind, importance_low=3.0)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"ratio_level": "sequence"}, r"ratio_level=sequence .* aggregation=token_mean"),
        ({"ratio_level": "sequence", "kind": "cispo", "aggregation": "sequence_mean"}, r"kind=cispo"),
        (
            {"ratio_level": "sequence", "aggregation": "constant", "constant_tokens": 8},
            r"aggregation=constant",
        ),
        ({"aggregation": "constant"}, r"aggregation=constant with constant_tokens=None"),
        ({"constant_tokens": 8}, r"aggregation=token_mean with constant_tokens=8"),
        (
            {"kl_kind": "k1", "kl_coefficient": 0.1},
            r"kl_kind=k1 .*kl_gradient=score_function.* grpo.reward.kl_coefficient",
        ),
        ({"kl_kind": "k2", "kl_gradient": "score_function"}, r"kl_kind=k2 with kl_gradient=score_function"),
    ],
)
def test_terms_that_make_no_loss_together_are_refused_by_their_keys(keys, message):
    with pytest.raises(ValidationError, match=message):
        LossConfig(**keys)


def test_an_estimator_without_a_kl_is_not_checked():
    PolicyGradientLoss(LossConfig(kl_kind="k1"))


def test_a_lower_bound_that_is_not_used_is_not_checked():
    PolicyGradientLoss(LossConfig(importance_correction="tis", importance_low=3.0))


@EVERY
def test_nothing_of_a_loss_is_read_before_its_caller_reads_it(cfg):
    # Fake tensors have no values: an operation that waits for the device fails on them.
    with FakeTensorMode() as mode:
        logprobs, data = columns(batch(0), torch.float32)
        given = {name: mode.from_tensor(value) for name, value in data.items()}
        counts = mode.from_tensor(torch.tensor(3.0))
        scores = mode.from_tensor(logprobs.detach()).requires_grad_()
        for loss_fn in (PolicyGradientLoss(cfg), NLLLoss()):
            loss, metrics = loss_fn(scores, given, global_valid_seqs=counts, global_valid_toks=counts)
            loss.backward()
            assert all(isinstance(value, torch.Tensor) for value in metrics.values())


def test_nll_is_the_mean_over_counting_tokens():
    logprobs = torch.tensor([[math.nan, -1.0, math.nan], [0.0, math.nan, -3.0], [0.0, -7.0, -7.0]])
    logprobs.requires_grad_()
    data = {
        "token_mask": torch.tensor([[1, 1, 0], [0, 0, 1], [0, 1, 1]], dtype=torch.uint8),
        "sample_mask": torch.tensor([1.0, 1.0, 0.0]),
    }
    loss, metrics = NLLLoss()(
        logprobs, data, global_valid_seqs=torch.tensor(2.0), global_valid_toks=torch.tensor(2.0)
    )
    loss.backward()
    assert loss.item() == 2.0
    assert numbers(metrics) == {"nll": 2.0}
    assert logprobs.grad.tolist() == [[0.0, -0.5, 0.0], [0.0, 0.0, -0.5], [0.0, 0.0, 0.0]]


def test_nll_of_a_batch_without_tokens_is_zero():
    logprobs = torch.full((2, 3), math.nan, requires_grad=True)
    data = {"token_mask": torch.zeros(2, 3), "sample_mask": torch.zeros(2)}
    zero = torch.tensor(0.0)
    loss, _ = NLLLoss()(logprobs, data, global_valid_seqs=zero, global_valid_toks=zero)
    loss.backward()
    assert loss.item() == 0.0
    assert logprobs.grad.eq(0).all()

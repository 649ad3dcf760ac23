import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import reference_algorithms as reference
from headrace.algorithms.advantages import TokenKL, compute_advantages
from headrace.config import AdvantageConfig
from headrace.errors import SchemaError

CONFIGS = [
    AdvantageConfig(estimator="grpo"),
    AdvantageConfig(estimator="grpo", normalize_std=False),
    AdvantageConfig(estimator="grpo", leave_one_out=True),
    AdvantageConfig(estimator="grpo", normalize_std=False, leave_one_out=True),
    AdvantageConfig(estimator="rloo"),
    AdvantageConfig(estimator="reinforce_plus_plus"),
    AdvantageConfig(estimator="reinforce_plus_plus", normalize_std=False),
    AdvantageConfig(estimator="reinforce_plus_plus", minus_baseline=True),
]
REWARDS = st.sampled_from([0.0, 1.0, 0.5, 0.25, -1.0, 3.0])


def compute(rewards, group_ids, cfg, valid=None, tokens=None, dtype=torch.float32, kl=None):
    valid = [True] * len(rewards) if valid is None else valid
    tokens = [3] * len(rewards) if tokens is None else tokens
    return compute_advantages(
        torch.tensor(rewards, dtype=dtype),
        torch.tensor(group_ids),
        torch.tensor(valid),
        torch.tensor(tokens),
        cfg,
        kl=kl,
    )


def test_grpo_by_hand():
    result = compute([1.0, 0.0, 0.0, 0.0], [3, 3, 3, 3], AdvantageConfig(epsilon=1e-6))
    # Mean 1/4; standard deviation sqrt((9 + 3) / 16 / 3) = 1/2.
    assert result.advantages.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)
    assert result.baseline.tolist() == [0.25] * 4
    assert result.std.tolist() == [0.5] * 4


def test_rloo_by_hand():
    result = compute([1.0, 0.0, 0.5], [0, 0, 0], AdvantageConfig(estimator="rloo"))
    assert result.advantages.tolist() == pytest.approx([0.75, -0.75, 0.0])
    assert result.baseline.tolist() == pytest.approx([0.25, 0.75, 0.5])


def test_rloo_is_never_divided_by_the_std():
    on, off = (AdvantageConfig(estimator="rloo", normalize_std=x) for x in (True, False))
    rewards, groups = [1.0, 0.0, 0.5, 9.0], [0, 0, 0, 0]
    assert torch.equal(compute(rewards, groups, on).advantages, compute(rewards, groups, off).advantages)


def test_reinforce_plus_plus_measures_against_all_tokens_of_the_batch():
    cfg = AdvantageConfig(estimator="reinforce_plus_plus")
    result = compute([1.0, 0.0], [0, 1], cfg, tokens=[10, 90])
    # Mean 10 / 100; standard deviation sqrt(0.1 x 0.9) = 0.3.
    assert result.advantages.tolist() == pytest.approx([3.0, -1 / 3], abs=1e-4)
    assert result.baseline.tolist() == pytest.approx([0.1, 0.1])
    assert result.std.tolist() == pytest.approx([0.3, 0.3])


def test_minus_baseline_takes_the_mean_of_the_group_first():
    cfg = AdvantageConfig(estimator="reinforce_plus_plus", minus_baseline=True, normalize_std=False)
    result = compute([1.0, 0.0, 7.0, 5.0], [0, 0, 1, 1], cfg, tokens=[1, 1, 1, 5])
    # From the groups' means: 0.5, -0.5, 1, -1; over all tokens their mean is (0.5 - 0.5 + 1 - 5) / 8 = -0.5.
    assert result.advantages.tolist() == pytest.approx([1.0, 0.0, 1.5, -0.5])


@pytest.mark.parametrize("cfg", CONFIGS[5:], ids=repr)
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_kl_of_tokens_is_charged_to_them_and_those_before(cfg, data):
    rows = data.draw(st.lists(st.tuples(REWARDS, st.integers(0, 2), st.booleans()), min_size=1, max_size=8))
    rewards, groups, valid = (list(column) for column in zip(*rows))
    numbers = st.floats(-2, 2, width=32)
    kl = [data.draw(st.lists(numbers, min_size=1, max_size=4)) for _ in rows]
    to_go = [[sum(row[t:]) for t in range(len(row))] for row in kl]
    sums = torch.tensor([sum(row) for row in to_go], dtype=torch.float64)
    squares = torch.tensor([sum(x * x for x in row) for row in to_go], dtype=torch.float64)
    result = compute(
        rewards, groups, cfg, valid, [len(row) for row in kl], torch.float64, TokenKL(0.3, sums, squares)
    )
    expected = reference.token_advantages(rewards, groups, valid, kl, cfg, 0.3)
    for i, row in enumerate(to_go):
        mean = sum(row) / len(row)
        scale = result.kl_scale if valid[i] else 0.0
        own = [float(result.advantages[i]) - scale * (x - mean) for x in row]
        # Where all returns are equal, rounding alone would be divided by epsilon.
        if float(result.std[0]) > 1e-6 or not cfg.normalize_std:
            assert own == pytest.approx(expected[i], rel=1e-4, abs=1e-5)


def test_baselines_of_the_docstring():
    rewards, groups = [1.0, 0.0, 0.0, 5.0], [7, 7, 7, 9]
    plain = compute(rewards, groups, AdvantageConfig())
    assert plain.baseline.tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 5.0])
    assert plain.std.tolist() == pytest.approx([math.sqrt(1 / 3)] * 3 + [0.0])
    peers = compute(rewards, groups, AdvantageConfig(leave_one_out=True))
    assert peers.baseline.tolist() == pytest.approx([0.0, 0.5, 0.5, 5.0])


@pytest.mark.parametrize("cfg", CONFIGS[:5], ids=repr)
@pytest.mark.parametrize("reward", [0.1, 1.0, 1e30, -7.3, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_group_of_equal_rewards_has_advantages_of_exactly_zero(cfg, reward, dtype):
    # In float64, the mean of 0.1 taken seven times is not 0.1.
    result = compute([reward] * 7 + [0.0, 1.0], [4] * 7 + [2, 2], cfg, dtype=dtype)
    assert result.advantages[:7].tolist() == [0.0] * 7
    assert result.std[:7].tolist() == [0.0] * 7
    assert result.advantages[7:].abs().min() > 0


def test_a_batch_of_equal_rewards_has_advantages_of_exactly_zero():
    cfg = AdvantageConfig(estimator="reinforce_plus_plus")
    result = compute([0.1] * 6, [0, 0, 0, 1, 1, 1], cfg, tokens=[1, 7, 3, 9, 2, 6])
    assert result.advantages.tolist() == [0.0] * 6


@pytest.mark.parametrize("cfg", CONFIGS[:5], ids=repr)
def test_a_group_of_one_sample_has_an_advantage_of_zero(cfg):
    assert compute([5.0, 1.0, 0.0], [9, 1, 1], cfg).advantages[0] == 0


@pytest.mark.parametrize("cfg", CONFIGS, ids=repr)
def test_invalid_samples_change_nothing_for_the_others(cfg):
    alone = compute([1.0, 0.0, 0.5], [0, 0, 0], cfg)
    joined = compute([1.0, math.nan, 0.0, 0.5, 1e9], [0, 0, 0, 0, 8], cfg, [True, False, True, True, False])
    assert torch.equal(joined.advantages[[0, 2, 3]], alone.advantages)
    assert joined.advantages[[1, 4]].tolist() == [0.0, 0.0]
    assert joined.baseline.isfinite().all()
    assert joined.std.isfinite().all()
    assert joined.metrics == pytest.approx(alone.metrics)


@pytest.mark.parametrize("cfg", CONFIGS, ids=repr)
def test_a_batch_without_valid_samples_gives_zeros(cfg):
    result = compute([math.nan, 1.0], [0, 0], cfg, [False, False])
    assert result.advantages.tolist() == [0.0, 0.0]
    assert all(math.isfinite(v) for v in result.metrics.values())


@pytest.mark.parametrize("cfg", CONFIGS, ids=repr)
def test_an_empty_batch_gives_nothing(cfg):
    empty = torch.empty(0)
    result = compute_advantages(empty, empty.long(), empty, empty.long(), cfg)
    assert result.advantages.shape == (0,)
    assert all(math.isfinite(v) for v in result.metrics.values())


def test_results_are_float32():
    result = compute([1.0, 0.0], [0, 0], AdvantageConfig())
    assert {t.dtype for t in (result.advantages, result.baseline, result.std)} == {torch.float32}


def test_large_rewards_keep_their_differences():
    # 2**24 + 2 and 2**24 are neighbours in float32; a float32 sum of squares would lose them.
    result = compute([16777218.0, 16777216.0], [0, 0], AdvantageConfig(normalize_std=False))
    assert result.advantages.tolist() == [1.0, -1.0]


def test_metrics_count_groups_of_equal_rewards():
    metrics = compute([1.0, 1.0, 0.0, 1.0, 3.0], [0, 0, 1, 1, 2], AdvantageConfig()).metrics
    assert metrics["group/zero_variance_fraction"] == pytest.approx(2 / 3)
    assert metrics["group/std_mean"] == pytest.approx(math.sqrt(0.5) / 3)


def test_metrics_sum_up_the_advantages_of_valid_samples():
    cfg = AdvantageConfig(normalize_std=False, leave_one_out=True)
    result = compute([1.0, -1.0, 5.0, 4.0], [0, 0, 1, 1], cfg)
    assert result.advantages.tolist() == [2.0, -2.0, 1.0, -1.0]
    mean = {"advantage/mean": 0.0, "advantage/abs_max": 2.0, "advantage/std": math.sqrt(2.5)}
    assert {name: result.metrics[name] for name in mean} == pytest.approx(mean)
    by_token = AdvantageConfig(estimator="reinforce_plus_plus", normalize_std=False)
    # The mean of tokens is 1/4.
    result = compute([1.0, 0.0], [0, 0], by_token, tokens=[1, 3])
    assert result.advantages.tolist() == [0.75, -0.25]
    assert result.metrics["advantage/mean"] == pytest.approx(0.25)


@pytest.mark.parametrize("cfg", CONFIGS, ids=repr)
@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(REWARDS, st.integers(-2, 3), st.booleans(), st.integers(1, 9)), min_size=1, max_size=20
    )
)
def test_advantages_match_the_naive_reference(cfg, rows):
    rewards, groups, valid, tokens = (list(column) for column in zip(*rows))
    expected = reference.advantages(rewards, groups, valid, tokens, cfg)
    assert compute(rewards, groups, cfg, valid, tokens).advantages.tolist() == pytest.approx(
        expected, rel=1e-5, abs=1e-6
    )


@pytest.mark.parametrize("cfg", CONFIGS, ids=repr)
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_row_order_and_group_names_do_not_matter(cfg, data):
    rows = data.draw(st.lists(st.tuples(REWARDS, st.integers(0, 3)), min_size=1, max_size=16))
    order = data.draw(st.permutations(range(len(rows))))
    names = data.draw(st.lists(st.integers(-100, 100), min_size=4, max_size=4, unique=True))
    rewards, groups = [r for r, _ in rows], [g for _, g in rows]
    plain = compute(rewards, groups, cfg)
    mixed = compute([rewards[i] for i in order], [names[groups[i]] for i in order], cfg)
    assert torch.allclose(mixed.advantages, plain.advantages[list(order)], rtol=1e-6, atol=1e-7)


def test_misaligned_inputs_are_refused():
    with pytest.raises(SchemaError, match=r"rewards \(3,\), group_ids \(2,\)"):
        compute_advantages(
            torch.zeros(3), torch.zeros(2).long(), torch.ones(3), torch.ones(3), AdvantageConfig()
        )


def test_group_ids_that_are_not_integers_are_refused():
    with pytest.raises(SchemaError, match="float32"):
        compute_advantages(torch.zeros(2), torch.zeros(2), torch.ones(2), torch.ones(2), AdvantageConfig())


def test_a_count_of_tokens_for_other_samples_is_refused():
    with pytest.raises(SchemaError, match=r"tokens \(3,\)"):
        compute([1.0, 0.0], [0, 0], AdvantageConfig(), tokens=[1, 2, 3])


@pytest.mark.parametrize(
    "keys",
    [
        {"estimator": "reinforce_plus_plus", "leave_one_out": True},
        {"minus_baseline": True},
        {"estimator": "rloo", "minus_baseline": True},
    ],
)
def test_a_baseline_that_the_estimator_does_not_have_is_refused(keys):
    with pytest.raises(ValidationError, match=r"has no effect with estimator="):
        AdvantageConfig(**keys)

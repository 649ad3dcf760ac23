import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from headrace.errors import ConfigError
from headrace.models.sampling import filter_logits, sample_at, selected_logprobs
from reference_generation import filtered_probabilities

FILTERS = [
    {"temperature": 0.7},
    {"top_k": 3},
    {"top_k": 100},
    {"top_p": 0.8},
    {"top_p": 1e-9},
    {"temperature": 1.3, "top_k": 7, "top_p": 0.9},
]


def sample(logits, generator):
    return sample_at(logits, torch.rand(logits.shape[:-1], generator=generator, dtype=torch.float64))


def logits_of(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def warped(logits, temperature=1.0, top_k=None, top_p=1.0):
    scores = logits.float()
    if temperature != 1:
        scores = TemperatureLogitsWarper(temperature)(None, scores)
    if top_k is not None:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return scores


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_filtering_equals_the_warpers_of_transformers(filters, dtype):
    logits = logits_of(40, 53).to(dtype)
    assert torch.equal(filter_logits(logits, **filters), warped(logits, **filters))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(-3, 3), min_size=6, max_size=6), min_size=1, max_size=4),
    top_k=st.none() | st.integers(1, 8),
    top_p=st.sampled_from([0.05, 0.3, 0.5, 0.75, 0.99, 1.0]),
)
def test_ties_are_cut_as_the_warpers_of_transformers_cut_them(rows, top_k, top_p):
    logits = torch.tensor(rows, dtype=torch.float32)
    expected = warped(logits, top_k=top_k, top_p=top_p)
    assert torch.equal(filter_logits(logits, top_k=top_k, top_p=top_p), expected)


@pytest.mark.parametrize("filters", FILTERS)
def test_filtered_probabilities_follow_the_definition(filters):
    logits = logits_of(12, 31, seed=1)
    probabilities = filter_logits(logits, **filters).softmax(-1)
    expected = torch.tensor([filtered_probabilities(row, **filters) for row in logits])
    assert torch.equal(probabilities > 0, expected > 0)
    torch.testing.assert_close(probabilities, expected, atol=1e-6, rtol=0)


def test_without_filters_float32_logits_come_back_without_a_copy():
    logits = logits_of(4, 9)
    assert filter_logits(logits) is logits
    assert filter_logits(logits, top_k=9) is logits


@pytest.mark.parametrize("filters", FILTERS)
def test_chunks_give_the_same_bits_as_the_whole_batch(filters):
    logits, ids = logits_of(33, 301), torch.arange(33)
    whole = selected_logprobs(logits, ids, **filters)
    for size in (1, 2, 7, 32):
        parts = [selected_logprobs(x, i, **filters) for x, i in zip(logits.split(size), ids.split(size))]
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("filters", FILTERS)
def test_the_trainer_scores_a_sampled_token_with_the_bits_of_the_sampled_distribution(filters):
    logits = logits_of(64, 47)
    filtered = filter_logits(logits, **filters)
    ids = sample(filtered, torch.Generator().manual_seed(0))
    expected = filtered.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    assert torch.equal(selected_logprobs(logits, ids, **filters), expected)
    assert expected.isfinite().all()


@pytest.mark.parametrize("filters", FILTERS)
def test_probabilities_of_the_kept_tokens_sum_to_one(filters):
    logits = logits_of(1, 29)
    kept = filter_logits(logits, **filters)[0].isfinite().nonzero()[:, 0]
    logprobs = selected_logprobs(logits.expand(len(kept), -1), kept, **filters)
    assert float(logprobs.exp().sum()) == pytest.approx(1, abs=1e-6)


def test_a_token_outside_the_cut_is_scored_as_if_the_cut_let_it_in():
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]])
    logprob = selected_logprobs(logits, torch.tensor([3]), top_k=2)
    assert float(logprob) == pytest.approx(1 - math.log(math.exp(4) + math.exp(3) + math.exp(1)), abs=1e-6)


def test_gradients_reach_the_kept_logits_only_and_are_finite():
    logits = logits_of(5, 17).requires_grad_()
    ids = logits.argmin(-1)
    selected_logprobs(logits, ids, temperature=0.5, top_k=4, top_p=0.9).sum().backward()
    kept = filter_logits(logits.detach(), temperature=0.5, top_k=4, top_p=0.9).isfinite()
    kept.scatter_(-1, ids[:, None], True)
    assert logits.grad.isfinite().all()
    assert torch.equal(logits.grad != 0, kept)


def test_leading_dimensions_are_kept():
    logits, ids = logits_of(2, 3, 11), torch.zeros(2, 3, dtype=torch.int64)
    assert selected_logprobs(logits, ids, top_p=0.5).shape == (2, 3)
    assert sample(logits, torch.Generator().manual_seed(0)).shape == (2, 3)


def test_sampled_frequencies_match_the_distribution():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0, 1.5])
    filtered = filter_logits(logits, temperature=1.5, top_p=0.95)
    draws = 50_000
    ids = sample(filtered.expand(draws, -1), torch.Generator().manual_seed(0))
    expected = filtered.softmax(-1) * draws
    counts = torch.bincount(ids, minlength=6)
    assert (counts[expected == 0] == 0).all()
    seen = expected > 0
    chi_square = float(((counts - expected)[seen] ** 2 / expected[seen]).sum())
    # 4 degrees of freedom: 0.1 % of samples exceed 18.5.
    assert chi_square < 18.5


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_a_filtered_token_is_never_drawn(uniform):
    logits = torch.full((3, 8), -math.inf)
    logits[0, 3] = logits[1, 7] = logits[2, 0] = 1.0
    ids = sample_at(logits, torch.full((3,), uniform, dtype=torch.float64))
    assert ids.tolist() == [3, 7, 0]


def test_the_largest_uniform_sample_draws_the_last_kept_token():
    logits = logits_of(500, 301)
    logits[:, 150:] = -math.inf
    ids = sample_at(logits, torch.full((500,), 1 - 2**-53, dtype=torch.float64))
    assert ids.max() < 150
    assert (ids > 120).all()


def test_rare_tokens_of_a_large_vocabulary_keep_their_share():
    logits = torch.full((1, 100_001), math.log(1e-9))
    logits[0, 0] = 0.0
    share = float(logits.softmax(-1)[0, 1:].double().sum())
    just_inside = torch.tensor([1 - share * 0.999], dtype=torch.float64)
    assert 1 <= int(sample_at(logits, just_inside)) <= 200


def test_a_row_of_nan_gives_an_id_inside_the_vocabulary_and_a_nan_logprob():
    logits = torch.full((1, 5), math.nan)
    for filters in ({}, {"top_k": 2}, {"top_p": 0.5}):
        filtered = filter_logits(logits, **filters)
        assert 0 <= int(sample_at(filtered, torch.tensor([0.3], dtype=torch.float64))) < 5
        assert selected_logprobs(logits, torch.tensor([1]), **filters).isnan().all()


@pytest.mark.parametrize(
    ("filters", "named"),
    [
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
    ],
)
def test_a_filter_out_of_range_is_refused_by_name(filters, named):
    with pytest.raises(ConfigError, match=named):
        filter_logits(torch.zeros(1, 4), **filters)
    with pytest.raises(ConfigError, match=named):
        selected_logprobs(torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64), **filters)


@pytest.mark.parametrize("filters", [{}, *FILTERS])
def test_ids_without_a_token_are_out_of_the_distribution_as_if_the_model_had_no_score_for_them(filters):
    logits, unknown = logits_of(20, 12), torch.tensor([0, 3, 10, 11])
    known = [i for i in range(12) if i not in unknown]
    found = filter_logits(logits, **filters, unknown_ids=unknown)
    assert found[:, unknown].eq(-math.inf).all()
    assert torch.equal(found[:, known], filter_logits(logits[:, known], **filters))
    targets = torch.arange(20) % 8
    ours = selected_logprobs(logits, torch.tensor(known)[targets], **filters, unknown_ids=unknown)
    torch.testing.assert_close(
        ours, selected_logprobs(logits[:, known], targets, **filters), rtol=0, atol=1e-6
    )


def test_a_given_id_without_a_token_is_scored_beside_those_that_have_one():
    logits, unknown = logits_of(6), torch.tensor([4, 5])
    found = selected_logprobs(logits, torch.tensor(5), unknown_ids=unknown)
    assert found == pytest.approx(float(logits[[0, 1, 2, 3, 5]].log_softmax(-1)[-1]), abs=1e-6)

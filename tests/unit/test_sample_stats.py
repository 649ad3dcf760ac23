import math
import random

import pytest
import torch

import reference_algorithms as reference
from headrace.algorithms.sample_stats import (
    STATS_COLUMNS,
    kl_to_go_stats,
    mismatch_stats,
    mismatch_summary,
    sample_stats,
    stats_columns,
    token_advantages,
)
from headrace.errors import SchemaError
from reference_algorithms import columns, random_row


def batch(seed, size=8, width=9):
    rng = random.Random(seed)
    return [random_row(rng, width) for _ in range(size)]


def padded(data, extra, fill):
    def widen(column):
        if column.dim() == 1:
            return column
        tail = torch.full((len(column), extra), 0 if column.dtype == torch.uint8 else fill).to(column.dtype)
        return torch.cat([column, tail], dim=1)

    return {name: widen(column) for name, column in data.items()}


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_statistics_match_the_naive_reference(kind):
    rows = batch(0)
    stats = sample_stats(columns(rows)[1], kl_kind=kind)
    assert {s.dtype for s in stats.values()} == {torch.float32}
    for i, row in enumerate(rows):
        places = row.places()
        n = max(len(places), 1)
        kl_sum = sum(reference.kl(row.prev[t], row.reference[t], kind) for t in places)
        errors = [math.exp(abs(row.prev[t] - row.generation[t])) for t in places]
        assert stats["kl_sum"][i].item() == pytest.approx(kl_sum, rel=1e-6)
        assert stats["logprob_error"][i].item() == pytest.approx(sum(errors) / n if places else 1.0)
        assert stats["mean_logprob"][i].item() == pytest.approx(sum(row.prev[t] for t in places) / n)


def mismatch(data):
    return mismatch_summary(
        mismatch_stats(data), data.get("sample_mask", torch.ones(len(data["token_mask"])))
    )


@pytest.mark.parametrize("fill", [0.0, math.nan, -math.inf, math.inf])
@pytest.mark.parametrize("extra", [1, 7, 64, 1000])
def test_statistics_are_the_same_bit_for_bit_at_every_width(fill, extra):
    rng = random.Random(extra)
    data = columns([random_row(rng, 150) for _ in range(20)], torch.float32)[1]
    narrow = sample_stats(data, kl_kind="k3")
    wide = sample_stats(padded(data, extra, fill), kl_kind="k3")
    assert narrow.keys() == wide.keys()
    for name in narrow:
        assert torch.equal(narrow[name], wide[name]), name
    assert mismatch(data) == mismatch(padded(data, extra, fill))


def kl_by_row(rows, kind):
    """KL to go of every counting token of each row, summed naively."""
    every = [[reference.kl(r.prev[t], r.reference[t], kind) for t in r.places()] for r in rows]
    return [[sum(row[t:]) for t in range(len(row))] for row in every]


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_to_go_is_that_of_a_token_and_all_later_ones_of_its_sample(kind):
    rows = batch(3)
    stats = kl_to_go_stats(columns(rows)[1], kl_kind=kind)
    assert {s.dtype for s in stats.values()} == {torch.float64}
    for i, to_go in enumerate(kl_by_row(rows, kind)):
        assert stats["kl_to_go_sum"][i].item() == pytest.approx(sum(to_go), abs=1e-12)
        assert stats["kl_to_go_squares"][i].item() == pytest.approx(sum(x * x for x in to_go), abs=1e-12)


def test_a_token_pays_for_its_kl_to_go_and_a_samples_mean_stays():
    rows = batch(4)
    data = columns(rows)[1] | {"mean_advantages": torch.linspace(-1, 1, len(rows))}
    column = token_advantages(data, kl_kind="k3", kl_scale=2.0)["advantages"]
    assert (column.shape, column.dtype) == (data["token_mask"].shape, torch.float32)
    for i, (row, to_go) in enumerate(zip(rows, kl_by_row(rows, "k3"))):
        others = [t for t in range(len(row.mask)) if t not in row.places()]
        assert column[i, others].tolist() == [0.0] * len(others)
        if to_go:
            mean = sum(to_go) / len(to_go)
            own = [data["mean_advantages"][i].item() - 2 * (x - mean) for x in to_go]
            assert column[i, row.places()].tolist() == pytest.approx(own, abs=1e-6)


@pytest.mark.parametrize("fill", [0.0, math.nan])
def test_token_advantages_are_the_same_bit_for_bit_at_every_width_and_among_other_rows(fill):
    rng = random.Random(5)
    data = columns([random_row(rng, 150) for _ in range(20)], torch.float32)[1]
    data["mean_advantages"] = torch.linspace(-1, 1, 20)
    options = {"kl_kind": "k1", "kl_scale": 0.3}
    whole = token_advantages(data, **options)["advantages"]
    sums = kl_to_go_stats(data, kl_kind="k1")
    wide = padded(data, 70, fill)
    assert torch.equal(token_advantages(wide, **options)["advantages"][:, :150], whole)
    for i in range(0, 20, 5):
        part = {name: column[i : i + 5] for name, column in wide.items()}
        assert torch.equal(token_advantages(part, **options)["advantages"][:, :150], whole[i : i + 5])
        for name, values in kl_to_go_stats(part, kl_kind="k1").items():
            assert torch.equal(values, sums[name][i : i + 5]), name


def test_the_kl_of_tokens_needs_both_policies():
    data = {n: c for n, c in columns(batch(6))[1].items() if n != "reference_policy_logprobs"}
    with pytest.raises(SchemaError, match="reference_policy_logprobs"):
        kl_to_go_stats(data, kl_kind="k1")


def test_statistics_of_a_row_do_not_depend_on_its_neighbours():
    data = columns(batch(1, size=30, width=120), torch.float32)[1]
    together = sample_stats(data, kl_kind="k3")
    for i in range(30):
        alone = sample_stats({n: c[i : i + 1] for n, c in data.items()}, kl_kind="k3")
        for name in together:
            assert torch.equal(alone[name], together[name][i : i + 1])


def test_a_sample_without_tokens_agrees_perfectly_and_has_no_kl():
    nan = torch.full((2, 3), math.nan)
    data = {"token_mask": torch.tensor([[1, 0, 0], [0, 0, 0]], dtype=torch.uint8)}
    stats = sample_stats(data | dict.fromkeys(STATS_COLUMNS[1:], nan), kl_kind="k1")
    assert {name: s.tolist() for name, s in stats.items()} == {
        "kl_sum": [0.0, 0.0],
        "logprob_error": [1.0, 1.0],
        "mean_logprob": [0.0, 0.0],
    }


def test_statistics_are_there_only_if_their_columns_are():
    data = columns(batch(2))[1]
    without = {n: c for n, c in data.items() if n != "reference_policy_logprobs"}
    assert sample_stats(without, kl_kind="k1").keys() == {"mean_logprob", "logprob_error"}
    without = {n: c for n, c in data.items() if n != "generation_logprobs"}
    assert sample_stats(without, kl_kind="k1").keys() == {"mean_logprob", "kl_sum"}
    without = {n: c for n, c in data.items() if n != "prev_logprobs"}
    assert sample_stats(without, kl_kind="k1") == {}


def test_the_columns_to_fetch_leave_out_a_reference_that_is_not_there():
    assert stats_columns(reference=True) == STATS_COLUMNS
    assert set(STATS_COLUMNS) - set(stats_columns(reference=False)) == {"reference_policy_logprobs"}


def test_a_nan_logprob_marks_its_sample_only():
    data = columns(batch(3))[1]
    i = int(data["token_mask"].sum(1).argmax())
    place = int(data["token_mask"][i].nonzero()[0])
    data["prev_logprobs"][i, place] = math.nan
    stats = sample_stats(data, kl_kind="k1")
    for values in stats.values():
        assert values.isnan().nonzero().flatten().tolist() == [i]


def test_a_token_that_the_trainers_filter_excludes_does_not_count():
    data = {
        "token_mask": torch.tensor([[0, 1, 1]]),
        "prev_logprobs": torch.tensor([[0.0, -math.inf, -1.0]]),
        "generation_logprobs": torch.tensor([[0.0, -1.0, -1.0]]),
        "reference_policy_logprobs": torch.tensor([[0.0, -1.0, -1.5]]),
    }
    stats = sample_stats(data, kl_kind="k1")
    assert {name: s.item() for name, s in stats.items()} == {
        "kl_sum": 0.5,
        "logprob_error": 1.0,
        "mean_logprob": -1.0,
    }


def test_mismatch_by_hand():
    data = {
        "token_mask": torch.tensor([[0, 1, 1], [0, 1, 0], [0, 1, 1]]),
        "sample_mask": torch.tensor([1.0, 1.0, 0.0]),
        "prev_logprobs": torch.tensor([[0.0, 0.1, 0.4], [0.0, 0.75, 0.0], [0.0, 0.9, 0.9]]).log(),
        "generation_logprobs": torch.tensor([[0.0, 0.4, 0.4], [0.0, 0.25, 0.0], [0.0, 0.1, 0.1]]).log(),
    }
    metrics = mismatch(data)
    # Trainer / generator: 1/4, 1 and 3; k3 of KL(generator || trainer) = r - 1 - log r.
    kl = ((0.25 - 1 + math.log(4)) + 0 + (3 - 1 - math.log(3))) / 3

    def js(r):
        return (math.log(2 / (1 + r)) + r * math.log(2 * r / (1 + r))) / 2

    assert metrics == pytest.approx(
        {
            "generation_kl": kl,
            "generation_kl_k1": (math.log(4) - math.log(3)) / 3,
            "generation_kl_k2": (math.log(4) ** 2 + math.log(3) ** 2) / 6,
            "js_divergence": (js(0.25) + js(1) + js(3)) / 3,
            "tail_1.5": 2 / 3,
            "tail_2": 2 / 3,
            "tail_5": 0.0,
            "token_mult_prob_error": 8 / 3,
            "logprob_gap_max": math.log(4),
            "sample_error_max": 3.0,
        }
    )


def test_a_batch_without_tokens_has_no_mismatch():
    zeros = torch.zeros(2, 3)
    data = dict.fromkeys(("token_mask", "prev_logprobs", "generation_logprobs"), zeros)
    assert mismatch(data) == {}


def test_missing_and_misshapen_columns_are_refused_by_name():
    data = columns(batch(4))[1]
    with pytest.raises(SchemaError, match="'token_mask'"):
        sample_stats({n: c for n, c in data.items() if n != "token_mask"}, kl_kind="k1")
    with pytest.raises(SchemaError, match="'prev_logprobs' has shape"):
        sample_stats(data | {"prev_logprobs": torch.zeros(8, 2)}, kl_kind="k1")
    assert mismatch_stats({n: c for n, c in data.items() if n != "generation_logprobs"}) == {}

import pytest

from headrace.compat.packing_algorithms import (
    ConcatenativePacker,
    FirstFitDecreasingPacker,
    FirstFitShufflePacker,
    ModifiedFirstFitDecreasingPacker,
    PackingAlgorithm,
    SequencePacker,
    get_packer,
)
from headrace.errors import ConfigError

LENGTHS = [25, 35, 45, 55, 65, 75, 85, 95, 15, 25, 35]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("concatenative", ConcatenativePacker),
        ("FIRST_FIT_DECREASING", FirstFitDecreasingPacker),
        ("first_fit_shuffle", FirstFitShufflePacker),
        ("Modified_First_Fit_Decreasing", ModifiedFirstFitDecreasingPacker),
    ],
)
def test_a_packer_is_found_by_name_in_any_case_and_by_member(name, kind):
    assert type(get_packer(name, 100)) is kind
    packer = get_packer(PackingAlgorithm[name.upper()], 100)
    assert type(packer) is kind
    assert isinstance(packer, SequencePacker)


@pytest.mark.parametrize("algorithm", list(PackingAlgorithm))
def test_every_packer_packs_all_rows_within_capacity_into_the_asked_number_of_bins(algorithm):
    bins = get_packer(algorithm, 100, min_bin_count=8, bin_count_multiple=4).pack(LENGTHS)
    assert sorted(i for b in bins for i in b) == list(range(len(LENGTHS)))
    assert all(b and sum(LENGTHS[i] for i in b) <= 100 for b in bins)
    assert len(bins) == 8
    assert all(type(i) is int for b in bins for i in b)


@pytest.mark.parametrize("algorithm", list(PackingAlgorithm))
def test_no_rows_and_no_minimum_give_no_bins(algorithm):
    assert get_packer(algorithm, 100).pack([]) == []


def test_concatenative_follows_its_documented_example():
    assert get_packer("concatenative", 5).pack([4, 1, 3, 2, 1, 3, 4, 5]) == [[0, 1], [2, 3], [4, 5], [6], [7]]
    assert get_packer("concatenative", 8).pack([4, 1, 3, 2, 1, 3, 4, 5]) == [[0, 1, 2], [3, 4, 5], [6], [7]]


def test_metrics_add_up_over_calls_when_asked_for():
    packer = get_packer("concatenative", 10, collect_metrics=True)
    packer.pack([5, 5, 10])
    packer.pack([5])
    assert packer.get_aggregated_metrics() == {"tokens": 25.0, "bins": 3.0, "fill": 25 / 30}
    packer.reset_metrics()
    assert packer.get_aggregated_metrics() == {}
    assert get_packer("concatenative", 10).get_aggregated_metrics() == {}


@pytest.mark.parametrize("algorithm", ["best_fit", object()])
def test_an_unknown_algorithm_is_refused(algorithm):
    with pytest.raises(ConfigError, match="is unknown; choose one of"):
        get_packer(algorithm, 100)


@pytest.mark.parametrize("wrong", [{"min_bin_count": -1}, {"bin_count_multiple": 0}])
def test_counts_that_make_no_sense_are_refused_at_once(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        get_packer("concatenative", 100, **wrong)
    with pytest.raises(ConfigError, match="bin_capacity"):
        get_packer("concatenative", 0)

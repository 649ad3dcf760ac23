import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.algorithms.filtering import complete_batch, select_groups, zero_variance_rows
from headrace.errors import SchemaError


def test_rows_of_groups_of_equal_rewards_are_marked():
    rewards = [1.0, 0.0, 0.1, 0.1, 0.1, 1.0]
    assert zero_variance_rows(rewards, ["a", "b", "c", "c", "a", "b"]) == [
        False,
        False,
        True,
        True,
        False,
        False,
    ]


def test_a_masked_row_does_not_make_its_group_vary():
    valid = [True, True, False, True, False, False]
    assert zero_variance_rows([1.0, 1.0, 0.0, 5.0, 1.0, 2.0], list("aaabbb"), valid) == [True] * 6


def test_a_prompt_that_occurs_twice_stays_two_groups():
    keys = [("p", 0), ("p", 0), ("p", 1), ("p", 1)]
    assert zero_variance_rows([0.0, 0.0, 1.0, 1.0], keys) == [True] * 4


def test_the_first_groups_that_vary_win_and_the_surplus_is_dropped():
    chosen = select_groups([1, 0, 1, 1, 0, 1, 1, 0], list("aabbccdd"), needed=2)
    assert chosen.keep == [0, 1, 4, 5]
    assert chosen.spare == []
    assert chosen.drop == [2, 3, 6, 7]
    assert chosen.is_complete
    assert chosen.surplus_groups == 1
    assert chosen.zero_variance_groups == 1


def test_a_short_round_keeps_as_many_spares_as_groups_are_missing():
    chosen = select_groups([1, 0, 1, 1, 0, 0, 1, 1], list("aabbccdd"), needed=3)
    assert (chosen.keep, chosen.spare, chosen.drop) == ([0, 1], [2, 3, 4, 5], [6, 7])
    assert chosen.missing_groups == 2
    assert not chosen.is_complete


def test_groups_are_found_in_any_row_order():
    chosen = select_groups([1, 1, 0, 1], ["a", "b", "a", "b"], needed=1)
    assert (chosen.keep, chosen.drop) == ([0, 2], [1, 3])


def test_no_rows_at_all_leave_everything_missing():
    chosen = select_groups([], [], needed=2)
    assert (chosen.keep, chosen.spare, chosen.drop, chosen.missing_groups) == ([], [], [], 2)


def test_groups_of_different_sizes_are_refused_by_name():
    with pytest.raises(SchemaError, match=r"'a' has 2 rows, 'b' has 1"):
        select_groups([1, 0, 1], ["a", "a", "b"], needed=1)


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(SchemaError, match="got 1 rewards for 2 rows"):
        select_groups([1.0], ["a", "a"], needed=1)
    with pytest.raises(SchemaError, match="got 1 valid for 2 rows"):
        zero_variance_rows([1.0, 1.0], ["a", "a"], [True])


def test_a_full_batch_takes_the_kept_groups_in_order_of_arrival():
    batch = complete_batch([0, 1, 4, 5], [], list("aabbcc"), needed=2)
    assert batch.rows == [0, 1, 4, 5]
    assert batch.weights == [1.0] * 4
    assert batch.has_signal


def test_a_short_batch_is_filled_up_with_rows_of_weight_zero():
    batch = complete_batch([0, 1], [2, 3, 4, 5], list("aabbcc"), needed=3)
    assert sorted(batch.rows) == [0, 1, 2, 3, 4, 5]
    assert {row: weight for row, weight in zip(batch.rows, batch.weights)} == {
        0: 1.0, 1: 1.0, 2: 0.0, 3: 0.0, 4: 0.0, 5: 0.0,
    }  # fmt: skip


def test_fillers_are_spread_over_the_batch():
    keys = [i // 2 for i in range(16)]
    batch = complete_batch(list(range(8)), list(range(8, 16)), keys, needed=8)
    halves = batch.weights[:8], batch.weights[8:]
    assert [sum(half) for half in halves] == [4.0, 4.0]


def test_a_batch_of_fillers_only_has_no_signal():
    batch = complete_batch([], [0, 1], ["a", "a"], needed=1)
    assert batch.weights == [0.0, 0.0]
    assert not batch.has_signal


def test_spares_that_are_not_needed_are_dropped():
    batch = complete_batch([0], [1, 2], ["a", "b", "c"], needed=2)
    assert (sorted(batch.rows), batch.drop) == ([0, 1], [2])


@pytest.mark.parametrize(("keep", "spare", "needed"), [([0], [1], 3), ([0, 1], [], 1)])
def test_a_batch_that_cannot_be_made_is_refused(keep, spare, needed):
    with pytest.raises(SchemaError, match=f"a batch of {needed} groups"):
        complete_batch(keep, spare, ["a", "b"], needed=needed)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_rounds_of_refills_lose_no_row_and_hold_at_most_one_batch(data):
    needed, size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    max_rounds = data.draw(st.integers(1, 4))
    rewards: dict[str, float] = {}
    held: list[str] = []
    made: set[str] = set()
    cleared: set[str] = set()
    for round_number in range(max_rounds):
        prompts = needed if round_number == 0 else data.draw(st.integers(1, needed))
        for prompt in range(prompts):
            for i in range(size):
                name = f"{round_number}.{prompt}_g{i}"
                rewards[name] = data.draw(st.sampled_from([0.0, 1.0]))
                held.append(name)
                made.add(name)
        keys = [name.split("_")[0] for name in held]
        chosen = select_groups([rewards[n] for n in held], keys, needed=needed)
        assert sorted(chosen.keep + chosen.spare + chosen.drop) == list(range(len(held)))
        cleared |= {held[i] for i in chosen.drop}
        if chosen.is_complete or round_number == max_rounds - 1:
            break
        held = [held[i] for i in sorted(chosen.keep + chosen.spare)]
        assert len(held) <= needed * size
    batch = complete_batch(chosen.keep, chosen.spare, keys, needed=needed)
    trained = [held[i] for i in batch.rows]
    assert len(trained) == needed * size == len(set(trained))
    assert set(trained) | cleared | {held[i] for i in batch.drop} == made
    assert not set(trained) & cleared
    for name, weight in zip(trained, batch.weights):
        group = [rewards[n] for n in made if n.split("_")[0] == name.split("_")[0]]
        assert weight == (1.0 if len(set(group)) > 1 else 0.0)

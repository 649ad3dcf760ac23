import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.algorithms.filtering import complete_batch, divide_groups, select_groups
from headrace.errors import SchemaError


def test_groups_of_equal_rewards_are_told_from_others():
    rewards = [1.0, 0.0, 0.1, 0.1, 0.1, 1.0]
    assert divide_groups(rewards, ["a", "b", "c", "c", "a", "b"]) == ([[0, 4], [1, 5]], [[2, 3]])


def test_a_masked_row_does_not_make_its_group_vary():
    valid = [True, True, False, True, False, False]
    assert divide_groups([1.0, 1.0, 0.0, 5.0, 1.0, 2.0], list("aaabbb"), valid)[0] == []


def test_a_filter_of_ones_own_is_asked_of_groups_with_two_valid_rows_or_more():
    asked = []

    def best_is_right(rewards):
        asked.append(rewards)
        return max(rewards) > 0

    rewards, keys = [1.0, 0.0, 1.0, 0.0, 1.0, 0.0], ["a", "a", "b", "b", "c", "c"]
    valid = [True, True, True, False, False, False]
    assert divide_groups(rewards, keys, valid, best_is_right) == ([[0, 1]], [[2, 3], [4, 5]])
    assert asked == [[1.0, 0.0]]


def test_a_prompt_that_occurs_twice_stays_two_groups():
    keys = [("p", 0), ("p", 0), ("p", 1), ("p", 1)]
    assert divide_groups([0.0, 0.0, 1.0, 1.0], keys) == ([], [[0, 1], [2, 3]])


def test_the_first_groups_that_vary_win_and_the_surplus_is_dropped():
    chosen = select_groups([1, 0, 1, 1, 0, 1, 1, 0], list("aabbccdd"), needed=2)
    assert chosen.keep == [0, 1, 4, 5]
    assert chosen.spare == []
    assert chosen.missing_groups == 0


def test_a_short_round_keeps_as_many_spares_as_groups_are_missing():
    chosen = select_groups([1, 0, 1, 1, 0, 0, 1, 1], list("aabbccdd"), needed=3)
    assert (chosen.keep, chosen.spare) == ([0, 1], [2, 3, 4, 5])
    assert chosen.missing_groups == 2


def test_groups_are_found_in_any_row_order():
    chosen = select_groups([1, 1, 0, 1], ["a", "b", "a", "b"], needed=1)
    assert (chosen.keep, chosen.spare) == ([0, 2], [])


def test_no_rows_at_all_leave_everything_missing():
    chosen = select_groups([], [], needed=2)
    assert (chosen.keep, chosen.spare, chosen.missing_groups) == ([], [], 2)


def test_groups_of_different_sizes_are_refused_by_name():
    with pytest.raises(SchemaError, match=r"'a' has 2 rows, 'b' has 1"):
        select_groups([1, 0, 1], ["a", "a", "b"], needed=1)


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(SchemaError, match="got 1 rewards for 2 rows"):
        select_groups([1.0], ["a", "a"], needed=1)
    with pytest.raises(SchemaError, match="got 1 valid for 2 rows"):
        divide_groups([1.0, 1.0], ["a", "a"], [True])


def test_a_full_batch_takes_the_kept_groups_in_order_of_arrival():
    rows, weights = complete_batch([0, 1, 4, 5], [], list("aabbcc"), needed=2)
    assert rows == [0, 1, 4, 5]
    assert weights == [1.0] * 4


def test_a_short_batch_is_filled_up_with_rows_of_weight_zero():
    rows, weights = complete_batch([0, 1], [2, 3, 4, 5], list("aabbcc"), needed=3)
    assert sorted(rows) == [0, 1, 2, 3, 4, 5]
    assert {row: weight for row, weight in zip(rows, weights)} == {
        0: 1.0, 1: 1.0, 2: 0.0, 3: 0.0, 4: 0.0, 5: 0.0,
    }  # fmt: skip


def test_spare_groups_are_spread_over_the_batch():
    keys = [i // 2 for i in range(16)]
    _, weights = complete_batch(list(range(8)), list(range(8, 16)), keys, needed=8)
    halves = weights[:8], weights[8:]
    assert [sum(half) for half in halves] == [4.0, 4.0]


def test_a_batch_of_spare_groups_only_has_no_weight():
    assert complete_batch([], [0, 1], ["a", "a"], needed=1)[1] == [0.0, 0.0]


def test_spares_that_are_not_needed_are_left_out():
    assert sorted(complete_batch([0], [1, 2], ["a", "b", "c"], needed=2)[0]) == [0, 1]


@pytest.mark.parametrize(("keep", "spare", "needed"), [([0], [1], 3), ([0, 1], [], 1)])
def test_a_batch_that_cannot_be_made_is_refused(keep, spare, needed):
    with pytest.raises(SchemaError, match=f"a batch of {needed} groups"):
        complete_batch(keep, spare, ["a", "b"], needed=needed)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_selection_is_what_looking_at_each_group_in_turn_gives(data):
    size, needed = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    keys = data.draw(
        st.permutations([group for group in range(data.draw(st.integers(0, 6))) for _ in range(size)])
    )
    rewards = [data.draw(st.sampled_from([0.0, 1.0])) for _ in keys]
    valid = [data.draw(st.booleans()) for _ in keys]
    varied, equal = [], []
    for group in dict.fromkeys(keys):
        rows = [row for row, key in enumerate(keys) if key == group]
        differ = len({rewards[row] for row in rows if valid[row]}) > 1
        (varied if differ else equal).append(rows)
    chosen = select_groups(rewards, keys, needed=needed, valid=valid)
    assert chosen.keep == sorted(row for rows in varied[:needed] for row in rows)
    assert chosen.missing_groups == needed - len(varied[:needed])
    assert chosen.spare == sorted(row for rows in equal[: chosen.missing_groups] for row in rows)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_rounds_of_refills_lose_no_row_and_hold_at_most_one_batch(data):
    needed, size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    max_rounds = data.draw(st.integers(1, 4))
    rewards: dict[str, float] = {}
    held: list[str] = []
    made: list[str] = []
    cleared: set[str] = set()
    for round_number in range(max_rounds):
        prompts = needed if round_number == 0 else data.draw(st.integers(1, needed))
        for prompt in range(prompts):
            for i in range(size):
                name = f"{round_number}.{prompt}_g{i}"
                rewards[name] = data.draw(st.sampled_from([0.0, 1.0]))
                held.append(name)
                made.append(name)
        keys = [name.split("_")[0] for name in held]
        chosen = select_groups([rewards[n] for n in held], keys, needed=needed)
        assert len({*chosen.keep, *chosen.spare}) == len(chosen.keep) + len(chosen.spare)
        if not chosen.missing_groups or round_number == max_rounds - 1:
            break
        cleared |= {*held} - {held[i] for i in chosen.keep + chosen.spare}
        held = [held[i] for i in sorted(chosen.keep + chosen.spare)]
        assert len(held) <= needed * size
    rows, weights = complete_batch(chosen.keep, chosen.spare, keys, needed=needed)
    trained = [held[i] for i in rows]
    assert len(trained) == needed * size == len(set(trained))
    assert set(trained) <= set(held) <= set(made) - cleared
    groups: dict[str, set[float]] = {}
    for name in made:
        groups.setdefault(name.split("_")[0], set()).add(rewards[name])
    # No useful group is lost on the way: the first ones that were made train, whatever the rounds held and cleared.
    useful = [group for group, values in groups.items() if len(values) > 1][:needed]
    weighted = [name for name, weight in zip(trained, weights) if weight == 1.0]
    assert weighted == [f"{group}_g{i}" for group in useful for i in range(size)]
    assert weights.count(0.0) == len(trained) - len(weighted)

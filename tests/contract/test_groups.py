"""Groups: the samples of one uid, which claims hand out together or not at all."""

import random

import pytest
import torch
from contract_batches import claim, put_numbers, register, wire

from headrace.data_plane import DataPlaneClient
from headrace.errors import ClaimTimeout, DataPlaneError, SchemaError


def group(uid: str, *indices: int) -> list[str]:
    return [f"{uid}_g{index}" for index in indices]


def test_groups_are_handed_out_whole(client: DataPlaneClient) -> None:
    register(client, "train", grpo_group_size=2)
    put_numbers(client, ["p0_g0", "p0_g1", "p1_g0"], x=0)
    assert claim(client, 4) is None
    put_numbers(client, ["p1_g1", "p2_g0"], x=0)
    assert claim(client, 4) == ["p0_g0", "p0_g1", "p1_g0", "p1_g1"]
    assert claim(client, 2) is None


def test_a_group_that_was_cleared_in_part_moves_no_other(client: DataPlaneClient) -> None:
    register(client, "train", grpo_group_size=4)
    put_numbers(client, group("A", 0, 1, 2), x=0)
    client.clear_samples(group("A", 0, 1, 2), "p")
    put_numbers(client, [*group("A", 0, 1, 2, 3), *group("B", 0, 1, 2, 3)], x=0)
    assert claim(client, 4) == group("A", 0, 1, 2, 3)
    assert claim(client, 4) == group("B", 0, 1, 2, 3)


def test_producers_that_take_turns_mix_no_groups(client: DataPlaneClient) -> None:
    register(client, "train", rows=9, grpo_group_size=3)
    for index in range(2):
        put_numbers(client, [*group("a", index), *group("b", index)], x=0)
    put_numbers(client, group("b", 2), x=0)
    assert claim(client, 3) == group("b", 0, 1, 2)
    assert claim(client, 3) is None
    put_numbers(client, group("a", 2), x=0)
    assert claim(client, 3) == group("a", 0, 1, 2)


def test_the_rows_of_a_group_come_one_after_the_other(client: DataPlaneClient) -> None:
    register(client, "train", grpo_group_size=2)
    put_numbers(client, ["a_g0", "b_g1", "a_g1", "b_g0"], x=0)
    assert claim(client, 4) == ["a_g0", "a_g1", "b_g1", "b_g0"]


def test_a_group_waits_for_the_columns_of_all_its_rows(client: DataPlaneClient) -> None:
    register(client, "train", grpo_group_size=2)
    put_numbers(client, ["a_g0", "a_g1", "b_g0", "b_g1"], x=0)
    put_numbers(client, ["a_g1", "b_g0", "b_g1"], y=0)
    assert claim(client, 2, "train", "x", "y") == ["b_g0", "b_g1"]
    put_numbers(client, ["a_g0"], y=0)
    assert claim(client, 2, "train", "x", "y") == ["a_g0", "a_g1"]


def test_what_is_left_of_a_broken_group_is_handed_out_when_it_is_whole_again(client: DataPlaneClient) -> None:
    register(client, "train", grpo_group_size=2)
    put_numbers(client, ["a_g0", "a_g1", "b_g0", "b_g1"], x=0)
    client.clear_samples(["a_g0"], "p")
    assert claim(client, 2) == ["b_g0", "b_g1"]
    assert claim(client, 2) is None
    put_numbers(client, ["a_g0"], x=0)
    assert claim(client, 2) == ["a_g1", "a_g0"]


def test_a_claimed_group_of_which_a_row_is_new_is_not_handed_out(client: DataPlaneClient) -> None:
    register(client, "train", "log", grpo_group_size=2)
    put_numbers(client, ["a_g0", "a_g1"], x=0)
    assert claim(client, 2) == ["a_g0", "a_g1"]
    client.clear_samples(["a_g0"], "p")
    put_numbers(client, ["a_g0"], x=0)
    assert claim(client, 2) is None
    assert claim(client, 2, "log") == ["a_g1", "a_g0"]
    client.clear_samples(["a_g0", "a_g1"], "p")
    put_numbers(client, ["a_g0", "a_g1"], x=0)
    assert claim(client, 2) == ["a_g0", "a_g1"]


def test_a_tag_says_the_group_where_one_is_declared(client: DataPlaneClient) -> None:
    register(client, "train", grpo_group_size=2, group_tag="prompt")
    client.put_samples(["a", "b"], "p", fields=wire(2, x=torch.zeros(2)), tags=[{"prompt": 1}, {"prompt": 2}])
    client.put_samples(["d", "c"], "p", fields=wire(2, x=torch.zeros(2)), tags=[{"prompt": 2}, {"prompt": 1}])
    assert claim(client, 2) == ["b", "d"]
    assert claim(client, 2) == ["a", "c"]


def test_a_sample_brings_the_tag_of_its_group_and_keeps_it(client: DataPlaneClient) -> None:
    register(client, "train", grpo_group_size=2, group_tag="prompt")
    with pytest.raises(
        SchemaError, match=r"tag 'prompt' of sample 'a' is None; expected the uid of its group"
    ):
        put_numbers(client, ["a"], x=0)
    with pytest.raises(SchemaError, match=r"tag 'prompt' of sample 'b' is \[1\]"):
        client.put_samples(["a", "b"], "p", tags=[{"prompt": 1}, {"prompt": [1]}])
    client.put_samples(["a"], "p", tags=[{"prompt": 1}])
    put_numbers(client, ["a"], x=0)
    with pytest.raises(SchemaError, match="tag 'prompt' of sample 'a' is 2; its first put said 1"):
        client.put_samples(["b", "a"], "p", tags=[{"prompt": 1}, {"prompt": 2}])
    assert client.sample_ids("p") == ["a"]


def test_a_uid_is_the_id_up_to_the_last_mark(client: DataPlaneClient) -> None:
    register(client, "train", grpo_group_size=2)
    put_numbers(client, ["a_g0_g0", "a_g1_g0", "a_g1_g1", "a_g0_g1"], x=0)
    assert claim(client, 2) == ["a_g1_g0", "a_g1_g1"]


def test_a_group_with_too_many_samples_is_refused_and_nothing_is_written(client: DataPlaneClient) -> None:
    register(client, "train", grpo_group_size=2)
    put_numbers(client, ["a_g0"], x=0)
    with pytest.raises(
        SchemaError, match=r"group 'a' of partition 'p' has 1 samples and gets 2 more; .*size=2"
    ):
        put_numbers(client, ["a_g1", "b_g0", "a_g2"], x=0)
    assert client.sample_ids("p") == ["a_g0"]
    put_numbers(client, ["a_g0", "a_g1"], x=0)
    assert claim(client, 2) == ["a_g0", "a_g1"]


def test_a_claim_of_groups_names_samples_that_have_none(client: DataPlaneClient) -> None:
    register(client, "train", grpo_group_size=2)
    put_numbers(client, ["a", "b", "c_g0"], x=0)
    client.clear_samples(["a"], "p")
    with pytest.raises(DataPlaneError, match=r"grpo_group_size=2\), and 'b' name none; .*group_tag"):
        claim(client, 2)
    client.clear_samples(["b"], "p")
    assert claim(client, 2) is None


@pytest.mark.parametrize("count", [1, 3])
def test_a_claim_that_splits_a_group_is_refused(client: DataPlaneClient, count: int) -> None:
    register(client, "train", grpo_group_size=2)
    with pytest.raises(DataPlaneError, match=f"batch_size={count} .*a multiple of grpo_group_size=2"):
        claim(client, count)


def test_a_claim_in_vain_says_which_groups_are_not_whole(client: DataPlaneClient) -> None:
    register(client, "train", grpo_group_size=2)
    put_numbers(client, ["a_g0", "b_g0", "b_g1"], x=0)
    with pytest.raises(
        ClaimTimeout, match=r"2 are ready of 3 .* 1 are not whole: 'a' has 1; 3 of 8 registered"
    ):
        client.claim_meta("p", "train", ["x"], 4, timeout_s=0)


def test_claims_of_groups_agree_with_naive_books_whatever_is_put_and_cleared(client: DataPlaneClient) -> None:
    rng = random.Random(11)
    ids = [f"{uid}_g{index}" for uid in range(100) for index in range(4)]
    register(client, "train", rows=len(ids), grpo_group_size=4)
    there: list[str] = []
    had: set[str] = set()
    for _ in range(12):
        new = rng.sample(sorted(set(ids) - set(there)), min(150, len(ids) - len(there)))
        put_numbers(client, new, x=0)
        there += new
        free = [sample_id for sample_id in there if sample_id not in had]
        whole = {
            uid for uid in {i.split("_")[0] for i in free} if sum(i.startswith(f"{uid}_") for i in free) == 4
        }
        count = 4 * rng.randint(0, len(whole)) if whole else 0
        got = (claim(client, count) if count else None) or []
        uids = [sample_id.split("_")[0] for sample_id in got]
        assert len(got) == count
        assert uids[::4] == uids[3::4]
        assert len(set(uids)) == count // 4
        assert set(uids) <= whole
        had |= set(got)
        gone = set(rng.sample(there, len(there) // 2))
        client.clear_samples(sorted(gone), "p")
        there, had = [i for i in there if i not in gone], had - gone
    assert len(there) > 50

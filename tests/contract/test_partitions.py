"""How a partition is registered, filled, consumed to its last row, and ended."""

import math
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract_batches import Start, claim, numbers, put_numbers, register

from headrace.data_plane import DataPlaneClient, build_data_plane_client
from headrace.errors import CapacityExceeded, ClaimTimeout, DataPlaneError, SampleNotFound, SchemaError


def test_a_partition_is_consumed_when_all_its_rows_came_and_each_task_had_them(
    client: DataPlaneClient,
) -> None:
    register(client, "logprob", "train")
    put_numbers(client, list("abcd"), x=0)
    claim(client, 4, "train")
    assert not client.check_consumption_status("p", ["train"])
    put_numbers(client, list("efgh"), x=0)
    assert not client.check_consumption_status("p", ["train"])
    claim(client, 4, "train")
    assert client.check_consumption_status("p", ["train"])
    assert not client.check_consumption_status("p", ["train", "logprob"])
    claim(client, 8, "logprob")
    assert client.check_consumption_status("p", ["train", "logprob"])


def test_rows_that_are_cleared_have_come_whether_they_were_claimed_or_not(client: DataPlaneClient) -> None:
    register(client, "train", rows=4)
    put_numbers(client, list("ab"), x=0)
    claim(client, 2)
    client.clear_samples(["a", "b"], "p")
    put_numbers(client, ["c"], x=0)
    client.clear_samples(["c"], "p")
    assert not client.check_consumption_status("p", ["train"])
    put_numbers(client, ["d"], x=0)
    assert not client.check_consumption_status("p", ["train"])
    claim(client, 1)
    assert client.check_consumption_status("p", ["train"])


def test_an_empty_partition_is_not_a_consumed_one(client: DataPlaneClient) -> None:
    register(client, "train", rows=1)
    assert not client.check_consumption_status("p", ["train"])
    put_numbers(client, ["a"], x=0)
    claim(client, 1)
    assert client.check_consumption_status("p", ["train"])
    client.clear_samples(None, "p")
    assert not client.check_consumption_status("p", ["train"])
    client.register_partition("p", ["x"], 0, ["train"])
    assert not client.check_consumption_status("p", ["train"])


# The last rows.


def test_the_last_rows_of_a_complete_partition_can_be_claimed_by_a_larger_claim(
    client: DataPlaneClient,
) -> None:
    register(client, "train", rows=5)
    put_numbers(client, list("abc"), x=0)
    assert claim(client, 4, allow_partial=True) is None
    put_numbers(client, list("de"), x=0)
    assert claim(client, 4, allow_partial=True) == list("abcd")
    assert claim(client, 4) is None
    assert claim(client, 4, allow_partial=True) == ["e"]
    assert client.check_consumption_status("p", ["train"])


def test_the_last_rows_wait_for_one_another(client: DataPlaneClient) -> None:
    register(client, "train", rows=3)
    put_numbers(client, list("abc"), x=0)
    put_numbers(client, list("ac"), y=0)
    assert claim(client, 8, "train", "x", "y", allow_partial=True) is None
    put_numbers(client, ["b"], y=0)
    assert claim(client, 8, "train", "x", "y", allow_partial=True) == list("abc")


def test_the_last_rows_of_groups_are_whole_groups(client: DataPlaneClient) -> None:
    register(client, "train", rows=6, grpo_group_size=2)
    put_numbers(client, ["a_g0", "a_g1", "b_g0", "b_g1", "c_g0"], x=0)
    assert claim(client, 4, allow_partial=True) == ["a_g0", "a_g1", "b_g0", "b_g1"]
    assert claim(client, 4, allow_partial=True) is None
    put_numbers(client, ["c_g1"], x=0)
    assert claim(client, 4, allow_partial=True) == ["c_g0", "c_g1"]


def test_a_loop_over_claims_ends_with_the_partition_also_where_rows_are_cleared_on_the_way(
    client: DataPlaneClient,
) -> None:
    register(client, "train", rows=7)
    put_numbers(client, list("abcdefg"), x=0)
    shares = []
    while (ids := claim(client, 3, blocking=True, timeout_s=30, allow_partial=True)) is not None:
        shares.append(ids)
        client.clear_samples(ids, "p")
    assert shares == [["a", "b", "c"], ["d", "e", "f"], ["g"]]


def test_a_loop_over_claims_ends_also_where_rows_were_filtered_out_before_their_claim(
    client: DataPlaneClient,
) -> None:
    register(client, "train", rows=8)
    put_numbers(client, list("abcdefgh"), x=0)
    client.clear_samples(["g", "h"], "p")
    shares = []
    while (ids := claim(client, 4, blocking=True, timeout_s=5, allow_partial=True)) is not None:
        shares.append(ids)
    assert shares == [list("abcd"), ["e", "f"]]
    assert client.check_consumption_status("p", ["train"])
    put_numbers(client, ["late"], x=0)
    assert claim(client, 4, allow_partial=True) == ["late"]


def test_rows_that_are_still_to_come_are_waited_for_whatever_was_filtered_out(
    client: DataPlaneClient,
) -> None:
    register(client, "train", rows=4)
    put_numbers(client, list("abc"), x=0)
    client.clear_samples(["b"], "p")
    with pytest.raises(
        ClaimTimeout, match="2 are ready of 2 not claimed yet; 3 of 4 registered samples have come"
    ):
        claim(client, 3, blocking=True, timeout_s=0, allow_partial=True)
    put_numbers(client, ["d"], x=0)
    assert claim(client, 4, allow_partial=True) == ["a", "c", "d"]


def test_a_row_that_nobody_had_and_that_is_put_again_has_come_once(client: DataPlaneClient) -> None:
    register(client, "train", rows=4)
    for _ in range(3):
        put_numbers(client, list("ab"), x=0)
        put_numbers(client, list("ab"), x=1)
        client.clear_samples(["a", "b"], "p")
    put_numbers(client, list("ab"), x=0)
    assert claim(client, 4, allow_partial=True) is None
    assert claim(client, 2) == ["a", "b"]
    client.clear_samples(["a", "b"], "p")
    assert not client.check_consumption_status("p", ["train"])
    # What a task has had is another row when it is put again.
    put_numbers(client, list("ab"), x=0)
    assert claim(client, 4, allow_partial=True) == ["a", "b"]
    assert client.check_consumption_status("p", ["train"])


def test_what_is_left_of_a_broken_group_keeps_no_loop_over_claims_waiting(client: DataPlaneClient) -> None:
    register(client, "train", "log", rows=8, grpo_group_size=2)
    put_numbers(client, [f"{uid}_g{i}" for uid in "abcd" for i in range(2)], x=0)
    client.clear_samples(["d_g1"], "p")
    # A group of which one task has had a part is whole again for the other.
    assert claim(client, 2, "log") == ["a_g0", "a_g1"]
    client.clear_samples(["a_g0"], "p")
    put_numbers(client, ["a_g0"], x=0)
    shares: dict[str, list[list[str]]] = {"train": [], "log": []}
    for task, mine in shares.items():
        while (ids := claim(client, 4, task, blocking=True, timeout_s=5, allow_partial=True)) is not None:
            mine.append(ids)
    assert shares["train"] == [["b_g0", "b_g1", "c_g0", "c_g1"], ["a_g1", "a_g0"]]
    assert shares["log"] == [["b_g0", "b_g1", "c_g0", "c_g1"]]
    assert client.check_consumption_status("p", ["train", "log"])
    put_numbers(client, ["d_g1"], x=0)
    assert not client.check_consumption_status("p", ["train"])
    assert claim(client, 4, allow_partial=True) == ["d_g0", "d_g1"]


def test_a_group_that_is_still_to_become_whole_is_waited_for(client: DataPlaneClient) -> None:
    register(client, "train", rows=4, grpo_group_size=2)
    put_numbers(client, ["a_g0", "a_g1"], x=0)
    client.clear_samples(["a_g0", "a_g1"], "p")
    put_numbers(client, ["b_g0", "c_g0"], x=0)
    assert claim(client, 2, allow_partial=True) is None
    with pytest.raises(ClaimTimeout, match="2 are not whole"):
        claim(client, 4, blocking=True, timeout_s=0, allow_partial=True)
    put_numbers(client, ["b_g1", "c_g1"], x=0)
    assert claim(client, 6, allow_partial=True) == ["b_g0", "b_g1", "c_g0", "c_g1"]


def test_a_claim_of_more_than_a_partition_ever_holds_is_refused_at_once(client: DataPlaneClient) -> None:
    register(client, "train", rows=4)
    start = time.monotonic()
    with pytest.raises(
        DataPlaneError, match=r"batch_size=5 for partition 'p', .* num_samples=4 .*allow_partial"
    ):
        claim(client, 5, blocking=True, timeout_s=60)
    assert time.monotonic() - start < 5
    put_numbers(client, list("abcd"), x=0)
    with pytest.raises(DataPlaneError, match="batch_size=5"):
        claim(client, 5)
    assert claim(client, 5, allow_partial=True) == list("abcd")


# Sizes, texts and times.


def test_more_rows_than_registered_are_refused_and_nothing_is_written(client: DataPlaneClient) -> None:
    register(client, "train", rows=2)
    put_numbers(client, ["a"], x=0)
    with pytest.raises(CapacityExceeded, match=r"2 new samples .*num_samples=2 and holds 1"):
        put_numbers(client, ["b", "c"], x=0)
    assert client.sample_ids("p") == ["a"]
    put_numbers(client, ["a", "b"], x=5)
    client.clear_samples(["a"], "p")
    put_numbers(client, ["c"], x=0)
    assert client.sample_ids("p") == ["b", "c"]


@pytest.mark.parametrize("size", [-1, 2.5, math.nan, math.inf, "2", None, True])
def test_sizes_are_whole_numbers(client: DataPlaneClient, size: Any) -> None:
    with pytest.raises(DataPlaneError, match=f"num_samples={size!r}; expected a whole number, 0 or more"):
        client.register_partition("p", ["x"], size, ["train"])
    register(client, "train")
    with pytest.raises(DataPlaneError, match=f"batch_size={size!r}; expected a whole number, 1 or more"):
        claim(client, size)
    if size is not None:
        with pytest.raises(
            DataPlaneError, match=f"grpo_group_size={size!r}; expected a whole number, 1 or more"
        ):
            register(client, "train", grpo_group_size=size)


def test_a_size_of_zero_is_no_group_and_no_batch(client: DataPlaneClient) -> None:
    with pytest.raises(DataPlaneError, match="grpo_group_size=0"):
        register(client, "train", grpo_group_size=0)
    register(client, "train")
    with pytest.raises(DataPlaneError, match="batch_size=0"):
        claim(client, 0)


def test_sizes_may_be_numbers_of_numpy(client: DataPlaneClient) -> None:
    sizes: Any = (np.int64(4), np.int32(2))
    register(client, "train", rows=sizes[0], grpo_group_size=sizes[1])
    put_numbers(client, ["a_g0", "a_g1"], x=0)
    assert claim(client, sizes[1]) == ["a_g0", "a_g1"]


def test_samples_that_make_no_whole_groups_are_refused(client: DataPlaneClient) -> None:
    with pytest.raises(DataPlaneError, match=r"expects 8 samples, .*grpo_group_size=3"):
        register(client, "train", grpo_group_size=3)


def test_a_text_in_place_of_a_list_is_refused_by_every_call(client: DataPlaneClient) -> None:
    register(client, "train")
    meta = put_numbers(client, ["a"], x=0)
    calls: dict[str, Any] = {
        "fields": lambda: client.register_partition("q", "x", 1, ["train"]),
        "consumer_tasks": lambda: client.register_partition("q", ["x"], 1, "train"),
        "enums": lambda: client.register_partition("q", ["x"], 1, ["train"], enums={"state": "kept"}),
        "required_fields": lambda: client.claim_meta("p", "train", "x", 1),
        "task_names": lambda: client.check_consumption_status("p", "train"),
        "select_fields": lambda: client.get_samples(["a"], "p", "x"),
        "sample_ids": lambda: client.get_samples("a", "p", ["x"]),
        "tags": lambda: client.put_samples(["a"], "p", tags="x"),  # type: ignore[arg-type]
    }
    for name, call in calls.items():
        with pytest.raises(SchemaError, match=f"^{name}.* is a text; expected a list"):
            call()
    with pytest.raises(SchemaError, match="select_fields='x' is a text"):
        client.get_data(meta, "x")
    with pytest.raises(SchemaError, match="sample_ids='a' is a text"):
        client.clear_samples("a", "p")
    with pytest.raises(SchemaError, match="sample_ids=b'a' is a text"):
        client.put_samples(b"a", "p")  # type: ignore[arg-type]
    assert (client.partition_ids(), client.sample_ids("p")) == (["p"], ["a"])


def test_a_claim_may_wait_for_ever(client: DataPlaneClient) -> None:
    register(client, "train")
    for ids, timeout_s in ((["a"], math.inf), (["b"], 1e300)):
        timer = threading.Timer(0.05, put_numbers, (client, ids), {"x": 0})
        timer.start()
        assert claim(client, 1, blocking=True, timeout_s=timeout_s) == ids
        timer.join()


@pytest.mark.parametrize("timeout_s", [math.nan, "1", None])
def test_a_time_out_that_is_no_number_is_refused_at_once(client: DataPlaneClient, timeout_s: Any) -> None:
    register(client, "train")
    with pytest.raises(
        DataPlaneError, match=f"timeout_s={timeout_s!r}; expected a number of seconds, or math.inf"
    ):
        claim(client, 1, blocking=True, timeout_s=timeout_s)


@pytest.mark.parametrize("timeout_s", [0, -1, -math.inf])
def test_a_time_out_that_has_passed_waits_for_nothing(client: DataPlaneClient, timeout_s: float) -> None:
    register(client, "train")
    start = time.monotonic()
    with pytest.raises(ClaimTimeout):
        claim(client, 1, blocking=True, timeout_s=timeout_s)
    assert time.monotonic() - start < 5
    put_numbers(client, ["a"], x=0)
    assert claim(client, 1, blocking=True, timeout_s=timeout_s) == ["a"]


# The end.


def test_partitions_end_when_they_are_cleared(client: DataPlaneClient) -> None:
    for step in range(5):
        put_numbers(client, ["a", "b"], f"by hand {step}", x=0)
        client.register_partition(f"step {step}", ["x"], 2, ["train"])
        put_numbers(client, ["a", "b"], f"step {step}", x=0)
        client.clear_samples(None, f"by hand {step}")
        client.clear_samples(None, f"step {step}")
    put_numbers(client, ["a", "b"], "row by row", x=0)
    client.clear_samples(["a"], "row by row")
    assert client.partition_ids() == ["row by row"]
    client.clear_samples(["b"], "row by row")
    client.put_samples([], "nothing")
    assert (client.partition_ids(), client.stored_bytes()) == ([], 0)
    with pytest.raises(SampleNotFound, match="unknown partition 'step 4'"):
        numbers(client, ["a"], "x", "step 4")


def test_a_registered_partition_outlives_its_rows_until_it_is_cleared_as_a_whole(
    client: DataPlaneClient,
) -> None:
    register(client, "train")
    put_numbers(client, ["a"], x=0)
    client.clear_samples(["a"], "p")
    assert client.partition_ids() == ["p"]
    client.clear_samples(None, "p")
    assert client.partition_ids() == []


def test_a_partition_that_has_ended_can_be_filled_again(client: DataPlaneClient) -> None:
    register(client, "train", rows=2, grpo_group_size=2)
    for _ in range(2):
        put_numbers(client, ["a_g0", "a_g1"], x=0)
        assert claim(client, 2) == ["a_g0", "a_g1"]
        assert claim(client, 2) is None
        client.clear_samples(None, "p")
    with pytest.raises(CapacityExceeded, match="num_samples=2"):
        put_numbers(client, list("abc"), x=0)
    register(client, "late", rows=3)
    put_numbers(client, list("abc"), x=0)
    assert claim(client, 3, "late") == list("abc")
    with pytest.raises(DataPlaneError, match="no task 'train'"):
        claim(client, 1)


def test_the_room_of_partitions_that_ended_or_began_again_is_free(start: Start) -> None:
    client = start(storage_capacity=4)
    for step in range(4):
        put_numbers(client, ["a", "b"], f"p{step}", x=0)
        client.register_partition("q", ["x"], 2, [])
        put_numbers(client, ["c", "d"], "q", x=0)
        with pytest.raises(CapacityExceeded, match="holds 4 of at most 4"):
            put_numbers(client, ["e"], "r", x=0)
        client.clear_samples(["a", "a", "z"], f"p{step}")
        put_numbers(client, ["e"], f"p{step}", x=0)
        client.clear_samples(None, f"p{step}")
    assert client.partition_ids() == ["q"]


# Clients.


def test_a_second_bootstrap_of_a_store_that_is_open_is_refused(
    client: DataPlaneClient, config: dict[str, Any], tmp_path: Path
) -> None:
    put_numbers(client, ["a"], x=1)
    with pytest.raises(
        DataPlaneError, match=r"is open already.*attach to it.* or set another data_plane\.store_name"
    ):
        build_data_plane_client(config, bootstrap=True)
    attached = build_data_plane_client(config, bootstrap=False)
    assert numbers(attached, ["a"], "x") == [1]
    attached.close()
    others = {**config, "store_name": "other"}
    if "journal" in config:
        others["journal"] = {**config["journal"], "folder": str(tmp_path / "others")}
    other = build_data_plane_client(others, bootstrap=True)
    assert other.partition_ids() == []
    other.close()
    client.close()
    again = build_data_plane_client(config, bootstrap=True)
    assert again.partition_ids() == []
    again.close()


def test_what_a_tag_holds_is_shared_with_nobody(client: DataPlaneClient) -> None:
    register(client, "train")
    values = {"turns": [1, 2], "by": {"judge": ["x"]}}
    put = client.put_samples(["a"], "p", tags=[{"stats": values, "reward": 1.0}])
    values["turns"].append(3)  # type: ignore[attr-defined]
    assert put.tags is not None
    put.tags[0]["stats"]["by"]["judge"].append("y")
    claimed = client.claim_meta("p", "train", [], 1)
    assert claimed is not None
    assert claimed.tags is not None
    assert claimed.tags == [{"stats": {"turns": [1, 2], "by": {"judge": ["x"]}}, "reward": 1.0}]
    claimed.tags[0]["stats"]["turns"].clear()
    assert client.put_samples(["a"], "p").tags == [
        {"stats": {"turns": [1, 2], "by": {"judge": ["x"]}}, "reward": 1.0}
    ]


def test_a_tag_that_cannot_be_stored_is_refused_and_nothing_is_written(client: DataPlaneClient) -> None:
    for tags in ([{"lock": threading.Lock()}], ["x"]):
        with pytest.raises(SchemaError, match=r"tags? "):
            client.put_samples(["a"], "p", tags=tags)  # type: ignore[arg-type]
    assert client.partition_ids() == []

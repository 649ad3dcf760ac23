"""Partitions, claims and consumption."""

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from contract_batches import Start, claim, put_numbers, register, tokens, wire

from headrace.data_plane import DataPlaneClient, KVBatchMeta, TagRule
from headrace.errors import CapacityExceeded, ClaimTimeout, DataPlaneError, SampleNotFound, SchemaError


def test_a_task_gets_every_row_once_in_the_order_of_the_puts(client: DataPlaneClient) -> None:
    register(client, "train")
    put_numbers(client, ["b", "a"], x=0)
    put_numbers(client, ["c", "d"], x=0)
    assert [claim(client, 3), claim(client, 1), claim(client, 1)] == [["b", "a", "c"], ["d"], None]


def test_each_task_has_a_cursor_of_its_own(client: DataPlaneClient) -> None:
    register(client, "logprob", "train")
    put_numbers(client, ["a", "b"], x=0)
    assert claim(client, 2, "logprob") == ["a", "b"]
    assert claim(client, 1, "train") == ["a"]


def test_a_row_is_ready_when_it_has_all_required_columns(client: DataPlaneClient) -> None:
    register(client, "train")
    put_numbers(client, ["a", "b", "c"], x=0)
    put_numbers(client, ["c", "b"], y=0)
    assert claim(client, 2, "train", "x", "y") == ["b", "c"]
    assert claim(client, 1, "train", "x", "y") is None
    assert claim(client, 1, "train", "x") == ["a"]


def test_a_claim_takes_all_it_asks_for_or_nothing(client: DataPlaneClient) -> None:
    register(client, "train")
    put_numbers(client, ["a", "b"], x=0)
    assert claim(client, 3) is None
    assert claim(client, 2) == ["a", "b"]


def test_no_two_ranks_share_a_row(client: DataPlaneClient) -> None:
    register(client, "train")
    put_numbers(client, list("abcdef"), x=0)
    shares = [client.claim_meta("p", "train", ["x"], 2, dp_rank=rank, blocking=False) for rank in range(3)]
    assert [share.sample_ids for share in shares if share] == [["a", "b"], ["c", "d"], ["e", "f"]]


def test_cleared_rows_are_no_longer_counted(client: DataPlaneClient) -> None:
    register(client, "train")
    put_numbers(client, list("abc"), x=0)
    client.clear_samples(["b"], "p")
    assert claim(client, 3) is None
    assert claim(client, 2) == ["a", "c"]


def test_a_row_that_was_cleared_and_put_again_is_new(client: DataPlaneClient) -> None:
    register(client, "train")
    put_numbers(client, ["a"], x=0)
    assert claim(client, 1) == ["a"]
    client.clear_samples(["a"], "p")
    put_numbers(client, ["a"], x=0)
    assert claim(client, 1) == ["a"]


def test_a_claimed_row_that_is_written_again_stays_claimed(client: DataPlaneClient) -> None:
    register(client, "train")
    put_numbers(client, ["a"], x=0)
    claim(client, 1)
    put_numbers(client, ["a"], x=5)
    assert claim(client, 1) is None


def test_claims_survive_the_clearing_of_other_rows(client: DataPlaneClient) -> None:
    client.register_partition("p", ["x"], 4000, ["train"])
    ids = [f"s{i}" for i in range(4000)]
    put_numbers(client, ids, x=0)
    assert claim(client, 3500) == ids[:3500]
    client.clear_samples(ids[:3400], "p")
    assert claim(client, 500) == ids[3500:]
    assert claim(client, 1) is None


def test_a_claim_says_what_it_claimed(client: DataPlaneClient) -> None:
    register(client, "train")
    fields = wire(2, input_ids=tokens([1, 2], [3]), input_lengths=torch.tensor([2, 1]))
    client.put_samples(["a", "b"], "p", fields=fields, tags=[{"r": 1.0}, {"r": 0.0}])
    meta = client.claim_meta("p", "train", ["input_ids"], 2)
    assert meta == KVBatchMeta("p", "train", ["a", "b"], ["input_ids"], [2, 1], {}, [{"r": 1.0}, {"r": 0.0}])


def test_data_of_a_claim_are_its_required_columns_by_default(client: DataPlaneClient) -> None:
    register(client, "train")
    put_numbers(client, ["a", "b"], x=0, y=5, z=9)
    meta = client.claim_meta("p", "train", ["x", "y"], 2)
    assert meta is not None
    assert sorted(client.get_data(meta).keys()) == ["x", "y"]
    assert client.get_data(meta, ["z"])["z"].tolist() == [9, 10]
    assert list(client.get_data(meta, []).keys()) == []


def test_data_of_a_meta_without_fields_are_the_columns_that_its_rows_share(client: DataPlaneClient) -> None:
    put_numbers(client, ["a", "b"], x=0)
    put_numbers(client, ["a"], y=5)
    assert list(client.get_data(KVBatchMeta("p", "t", ["a", "b"])).keys()) == ["x"]
    assert sorted(client.get_data(KVBatchMeta("p", "t", ["a"])).keys()) == ["x", "y"]
    with pytest.raises(SampleNotFound, match="'nobody'"):
        client.get_data(KVBatchMeta("p", "t", ["nobody"]))


def test_a_blocking_claim_waits_for_the_rows(client: DataPlaneClient) -> None:
    register(client, "train")
    put_numbers(client, ["a"], x=0)
    timer = threading.Timer(0.1, put_numbers, (client, ["b"]), {"x": 0})
    timer.start()
    meta = client.claim_meta("p", "train", ["x"], 2, timeout_s=10)
    timer.join()
    assert meta is not None
    assert meta.sample_ids == ["a", "b"]


def test_a_blocking_claim_waits_for_a_column(client: DataPlaneClient) -> None:
    register(client, "train")
    put_numbers(client, ["a"], x=0)
    timer = threading.Timer(0.1, put_numbers, (client, ["a"]), {"y": 0})
    timer.start()
    assert client.claim_meta("p", "train", ["x", "y"], 1, timeout_s=10) is not None
    timer.join()


def test_a_claim_in_vain_times_out_and_says_what_is_missing(client: DataPlaneClient) -> None:
    register(client, "train")
    put_numbers(client, ["a", "b"], x=0)
    put_numbers(client, ["a"], y=0)
    start = time.monotonic()
    with pytest.raises(ClaimTimeout) as caught:
        client.claim_meta("p", "train", ["x", "y", "z"], 2, timeout_s=0.05)
    assert 0.05 <= time.monotonic() - start < 5
    for part in (
        "'train'",
        "2 samples",
        "0 are ready of 2",
        "'y' is written for 1",
        "'z' is written for 0",
        "timeout_s",
    ):
        assert part in str(caught.value)


def test_a_waiting_claim_blocks_no_other_client(client: DataPlaneClient) -> None:
    register(client, "train")
    waiting = threading.Thread(
        target=client.claim_meta, args=("p", "train", ["x"], 1), kwargs={"timeout_s": 10}
    )
    waiting.start()
    start = time.monotonic()
    put_numbers(client, ["v"], "other", x=0)
    client.get_samples(["v"], "other", ["x"])
    assert time.monotonic() - start < 5
    put_numbers(client, ["a"], x=0)
    waiting.join(10)
    assert not waiting.is_alive()


def test_unknown_partitions_and_tasks_are_errors(client: DataPlaneClient) -> None:
    with pytest.raises(DataPlaneError, match="unknown partition 'p'"):
        claim(client, 1)
    register(client, "train")
    with pytest.raises(DataPlaneError, match="no task 'val'; registered consumer_tasks: 'train'"):
        claim(client, 1, "val")
    with pytest.raises(DataPlaneError, match="no task 'val'"):
        client.check_consumption_status("p", ["val"])


def test_registering_again_empties_the_partition(client: DataPlaneClient) -> None:
    register(client, "train")
    put_numbers(client, ["a"], x=0)
    claim(client, 1)
    register(client, "train", "late")
    with pytest.raises(SampleNotFound):
        client.get_samples(["a"], "p", ["x"])
    put_numbers(client, ["a"], x=0)
    assert (claim(client, 1), claim(client, 1, "late")) == (["a"], ["a"])


def test_more_samples_than_the_store_holds_are_refused_at_registration(start: Start) -> None:
    client = start(storage_capacity=7)
    with pytest.raises(CapacityExceeded, match="expects 8 samples; the store holds at most 7"):
        register(client, "train")


def test_tags_outside_their_enum_are_refused_by_sample(client: DataPlaneClient) -> None:
    client.register_partition("p", ["x"], 2, [], enums={"status": ["kept", "filtered"]})
    client.put_samples(["a"], "p", tags=[{"status": "kept"}])
    with pytest.raises(SchemaError, match="tag 'status' of sample 'b' is 'lost'"):
        client.put_samples(["a", "b"], "p", tags=[{"status": "filtered"}, {"status": "lost"}])
    assert client.put_samples(["a"], "p").tags == [{"status": "kept"}]


@pytest.mark.parametrize(
    "value", [np.array([1, 2]), torch.tensor([1, 2]), [np.array([1, 2])], {"a": torch.ones(2)}]
)
def test_an_array_is_no_value_of_an_enum_of_a_group_or_of_a_rule(client: DataPlaneClient, value: Any) -> None:
    register(client, "train", grpo_group_size=2, group_tag="uid", enums={"kind": [[1], {"a": 1}, "math"]})
    tags = [{"uid": "u", "kind": "math"}, {"uid": "u", "kind": "math", "scores": value}]
    client.put_samples(["a", "b"], "p", tags=tags)
    with pytest.raises(
        SchemaError, match=r"tag 'kind' of sample 'b' is .*; partition 'p' was registered with"
    ):
        client.put_samples(["a", "b"], "p", tags=[{}, {"kind": value}])
    with pytest.raises(SchemaError, match=r"tag 'uid' of sample 'b' is .*; its first put said 'u'"):
        client.put_samples(["b"], "p", tags=[{"uid": value}])
    with pytest.raises(SchemaError, match="tag 'uid' of sample 'c' is"):
        client.put_samples(["c"], "p", tags=[{"uid": value}])
    rule = TagRule("scores", among=[[1], {"a": 1}, 1])
    assert client.claim_meta("p", "train", [], 2, blocking=False, where=[rule]) is None
    with pytest.raises(SchemaError, match=r"among has .*; expected values that a tag equals or not"):
        TagRule("scores", among=[1, value])
    with pytest.raises(SchemaError, match=r"enums\['kind'\] has .*; expected values that a tag equals"):
        register(client, "train", enums={"kind": ["math", value]})
    assert client.sample_ids("p") == ["a", "b"]
    assert client.claim_meta("p", "train", [], 2) is not None

"""Claims with leases, rules on tags, order, room for producers, puts that are done once, and reports."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from contract_batches import claim, numbers, put_numbers, register, wire

from headrace.data_plane import DataPlaneClient, KVBatchMeta, TagRule, kv_first_write, write_columns
from headrace.errors import ClaimExpired, ClaimTimeout, DataPlaneError, SchemaError

OVER = 1e-9
"""Seconds of a lease that has run out before its claim is answered."""


def lease(client: DataPlaneClient, count: int, lease_s: float = 60.0, **options: Any) -> KVBatchMeta:
    meta = client.claim_meta("p", "train", ["x"], count, blocking=False, lease_s=lease_s, **options)
    assert meta is not None
    return meta


def put_tagged(client: DataPlaneClient, **tags: Sequence[Any]) -> None:
    """Put groups of two rows, `uid=[tag of _g0, tag of _g1]`, each with a tag `v`."""
    for uid, (first, second) in tags.items():
        values = [{} if value is None else {"v": value} for value in (first, second)]
        client.put_samples([f"{uid}_g0", f"{uid}_g1"], "p", fields=wire(2, x=torch.zeros(2)), tags=values)


def uids(ids: Sequence[str] | None) -> list[str]:
    return [sample_id.removesuffix("_g0") for sample_id in (ids or [])[::2]]


def test_leased_rows_are_nobody_elses_until_they_are_released(client: DataPlaneClient) -> None:
    register(client, "train", "log")
    put_numbers(client, list("abcd"), x=0)
    first, second = lease(client, 2), lease(client, 1)
    assert (first.sample_ids, second.sample_ids) == (["a", "b"], ["c"])
    assert first.extra_info["claim"] != second.extra_info["claim"]
    assert claim(client, 2) is None
    assert claim(client, 4, "log") == list("abcd")
    client.release_claim(first)
    assert claim(client, 3) == ["a", "b", "d"]
    client.release_claim(first)


def test_a_lease_that_runs_out_gives_the_rows_back_in_their_old_place(client: DataPlaneClient) -> None:
    register(client, "train", grpo_group_size=2)
    put_tagged(client, a=[0, 0], b=[0, 0], c=[0, 0])
    late = lease(client, 2, OVER)
    kept = lease(client, 2)
    assert (uids(late.sample_ids), uids(kept.sample_ids)) == (["a"], ["a"])
    client.release_claim(kept)
    assert uids(claim(client, 6)) == ["a", "b", "c"]


def test_a_holder_whose_lease_has_run_out_writes_clears_and_finishes_nothing(client: DataPlaneClient) -> None:
    register(client, "train")
    put_numbers(client, ["a", "b"], x=0)
    late = lease(client, 2, OVER)
    token, text = late.extra_info["claim"], "no longer in force"
    with pytest.raises(ClaimExpired, match=text):
        client.put_samples(["a", "b"], "p", fields=wire(2, x=torch.ones(2), y=torch.ones(2)), claim=token)
    with pytest.raises(ClaimExpired, match=text):
        write_columns(client, late, {"y": torch.ones(2)})
    with pytest.raises(ClaimExpired, match=text):
        client.clear_samples(["a"], "p", claim=token)
    with pytest.raises(ClaimExpired, match=text):
        client.finish_claim(late)
    with pytest.raises(ClaimExpired, match=text):
        client.renew_claim(late, 60)
    assert numbers(client, ["a", "b"], "x") == [0, 1]
    assert set(client.partition_report("p").bytes_by_column) == {"x"}
    assert claim(client, 2) == ["a", "b"]


def test_a_claim_in_force_writes_and_clears_its_own_rows_only(client: DataPlaneClient) -> None:
    register(client, "train")
    put_numbers(client, list("abcd"), x=0)
    meta = lease(client, 3)
    token = meta.extra_info["claim"]
    write_columns(client, meta.subset([1, 2]), {"y": torch.tensor([5.0, 6.0])})
    assert numbers(client, ["b", "c"], "y") == [5, 6]
    for ids in (["a", "d"], ["new"]):
        with pytest.raises(
            DataPlaneError, match=f"'{ids[-1]}' of partition 'p' are not among the rows of claim"
        ):
            client.put_samples(ids, "p", tags=[{}] * len(ids), claim=token)
    with pytest.raises(DataPlaneError, match="'d' of partition 'p' are not among"):
        client.clear_samples(["a", "d"], "p", claim=token)
    client.clear_samples(["a", "unknown"], "p", claim=token)
    assert client.sample_ids("p") == list("bcd")


def test_a_partition_cannot_be_removed_under_a_claim(client: DataPlaneClient) -> None:
    register(client, "train")
    put_numbers(client, list("abcd"), x=0)
    meta = lease(client, 2)
    with pytest.raises(DataPlaneError, match=r"removes partition 'p' with rows that are not of the claim"):
        client.clear_samples(None, "p", claim=meta.extra_info["claim"])
    assert client.sample_ids("p") == list("abcd")
    client.clear_samples(meta.sample_ids, "p", claim=meta.extra_info["claim"])
    assert client.sample_ids("p") == ["c", "d"]


def test_a_renewed_claim_lasts_from_then(client: DataPlaneClient) -> None:
    register(client, "train")
    put_numbers(client, ["a"], x=0)
    meta = lease(client, 1, 5)
    client.renew_claim(meta, 60)
    assert 5 < client.partition_report("p").leases[0].seconds_left <= 60
    assert claim(client, 1) is None
    client.renew_claim(meta, OVER)
    assert claim(client, 1) == ["a"]


def test_a_finished_claim_is_for_good(client: DataPlaneClient) -> None:
    register(client, "train", rows=3)
    put_numbers(client, list("abc"), x=0)
    done, cleared = lease(client, 1), lease(client, 2)
    assert not client.check_consumption_status("p", ["train"])
    client.finish_claim(done)
    client.clear_samples(cleared.sample_ids, "p", claim=cleared.extra_info["claim"])
    assert client.check_consumption_status("p", ["train"])
    for meta in (done, cleared):
        with pytest.raises(ClaimExpired):
            client.finish_claim(meta)
        client.release_claim(meta)
    assert claim(client, 1) is None


def test_emptying_a_partition_ends_its_claims(client: DataPlaneClient) -> None:
    register(client, "train")
    for empty in (lambda: client.clear_samples(None, "p"), lambda: register(client, "train")):
        put_numbers(client, ["a"], x=0)
        meta = lease(client, 1)
        empty()
        client.release_claim(meta)
        put_numbers(client, ["a"], x=0)
        with pytest.raises(ClaimExpired, match="or the partition was emptied"):
            client.finish_claim(meta)


def test_leases_survive_the_clearing_of_other_rows(client: DataPlaneClient) -> None:
    client.register_partition("p", ["x"], 4000, ["train"])
    ids = [f"s{i}" for i in range(4000)]
    put_numbers(client, ids, x=0)
    assert claim(client, 3400) == ids[:3400]
    meta = lease(client, 400)
    client.clear_samples([*ids[:3400], ids[3401]], "p")
    write_columns(client, meta.drop([1]) or meta, {"y": torch.zeros(399)})
    client.release_claim(meta)
    assert claim(client, 599) == [ids[3400], *ids[3402:]]


def test_the_last_rows_wait_for_those_that_are_leased(client: DataPlaneClient) -> None:
    register(client, "train", rows=3)
    put_numbers(client, list("abc"), x=0)
    meta = lease(client, 2)
    assert claim(client, 2, allow_partial=True) == ["c"]
    client.release_claim(meta)
    meta = lease(client, 2, holder="me")
    with pytest.raises(ClaimTimeout, match=r"2 are leased by me for another \d"):
        client.claim_meta("p", "train", ["x"], 2, timeout_s=0, allow_partial=True)
    client.finish_claim(meta)
    assert client.claim_meta("p", "train", ["x"], 2, timeout_s=0, allow_partial=True) is None


@pytest.mark.parametrize("ends", ["released", "run out"])
def test_a_waiting_claim_gets_what_a_lease_gives_back(client: DataPlaneClient, ends: str) -> None:
    register(client, "train")
    put_numbers(client, ["a"], x=0)
    meta = lease(client, 1, 60 if ends == "released" else 0.2)
    timer = threading.Timer(0.1, client.release_claim, (meta,))
    if ends == "released":
        timer.start()
    got = client.claim_meta("p", "train", ["x"], 1, timeout_s=10)
    assert got is not None
    assert got.sample_ids == ["a"]
    if ends == "released":
        timer.join()


def test_the_freshest_groups_come_newest_first(client: DataPlaneClient) -> None:
    register(client, "train", rows=12, grpo_group_size=2)
    put_tagged(client, a=[0, 0], b=[0, 0], c=[0, 0], d=[0, 0])
    assert claim(client, 4, order="freshest") == ["d_g0", "d_g1", "c_g0", "c_g1"]
    put_tagged(client, e=[0, 0])
    assert uids(claim(client, 4, order="freshest")) == ["e", "b"]
    assert uids(claim(client, 2)) == ["a"]
    with pytest.raises(DataPlaneError, match="order='newest'; expected 'oldest' or 'freshest'"):
        claim(client, 2, order="newest")


@pytest.mark.parametrize(
    ("rule", "passing"),
    [
        (TagRule("v", at_least=2), ["b", "c"]),
        (TagRule("v", at_most=2), ["a", "d"]),
        (TagRule("v", at_least=1, at_most=2), ["d"]),
        (TagRule("v", among=[0, 1, 2]), ["a", "d"]),
        (TagRule("v", min_spread=1), ["a", "b", "d"]),
        (TagRule("v", min_spread=1.5), ["b"]),
    ],
)
def test_a_claim_takes_groups_whose_tags_pass(
    client: DataPlaneClient, rule: TagRule, passing: list[str]
) -> None:
    register(client, "train", rows=14, grpo_group_size=2)
    put_tagged(client, a=[0, 1], b=[2, 4.5], none=[None, 2], c=[3, 3], nan=[float("nan"), 2], d=[2, 1])
    assert uids(claim(client, 2 * len(passing), where=[rule])) == passing
    assert claim(client, 2, where=[rule]) is None
    assert uids(claim(client, 2 * (6 - len(passing)))) == [
        uid for uid in ("a", "b", "none", "c", "nan", "d") if uid not in passing
    ]


def test_all_rules_have_to_pass_and_the_rest_is_left_out_at_the_end(client: DataPlaneClient) -> None:
    register(client, "train", rows=6, grpo_group_size=2)
    put_tagged(client, a=[1, 2], b=[1, 1], c=[5, 9])
    rules = [TagRule("v", at_least=1), TagRule("v", min_spread=1), TagRule("v", at_most=4)]
    assert claim(client, 4, where=rules) is None
    with pytest.raises(
        ClaimTimeout, match=r"6 are ready of 6 .*; 2 of the ready ones pass the rules on tags"
    ):
        client.claim_meta("p", "train", ["x"], 4, timeout_s=0, where=rules)
    assert uids(claim(client, 4, where=rules, allow_partial=True)) == ["a"]
    assert claim(client, 4, where=rules, allow_partial=True) is None
    client.put_samples(["b_g0"], "p", tags=[{"v": 3}])
    assert uids(claim(client, 2, where=rules)) == ["b"]


def test_rules_that_ask_nothing_or_compare_texts_are_refused(client: DataPlaneClient) -> None:
    for mistake in ({}, {"at_least": "1"}, {"min_spread": float("nan")}, {"among": "abc"}):
        with pytest.raises(SchemaError, match=r"'v'|among"):
            TagRule("v", **mistake)  # type: ignore[arg-type]
    register(client, "train")
    client.put_samples(["a"], "p", fields=wire(1, x=torch.zeros(1)), tags=[{"v": "new"}])
    with pytest.raises(SchemaError, match="tag 'v' is 'new'"):
        claim(client, 1, where=[TagRule("v", at_least=1)])
    assert claim(client, 1, where=[TagRule("v", among=["new"])]) == ["a"]
    with pytest.raises(DataPlaneError, match="where has 'v'"):
        claim(client, 1, where=["v"])


@pytest.mark.parametrize("lease_s", [0, -1, float("nan"), "60"])
def test_a_lease_is_a_number_of_seconds_above_zero(client: DataPlaneClient, lease_s: Any) -> None:
    register(client, "train")
    with pytest.raises(DataPlaneError, match=r"lease_s=.*a number of seconds above 0"):
        claim(client, 1, lease_s=lease_s)


def test_a_meta_that_is_not_leased_has_no_claim_to_finish(client: DataPlaneClient) -> None:
    register(client, "train")
    put_numbers(client, ["a", "b", "c"], x=0)
    meta = client.claim_meta("p", "train", ["x"], 1)
    assert meta is not None
    assert "claim" not in meta.extra_info
    with pytest.raises(DataPlaneError, match="no claim in extra_info; claim_meta gives one with lease_s"):
        client.finish_claim(meta)
    one, other = lease(client, 1), lease(client, 1)
    assert one.concat(one).extra_info["claim"] == one.extra_info["claim"]
    assert "claim" not in one.concat(other).extra_info


def test_a_producer_waits_for_room(client: DataPlaneClient) -> None:
    register(client, "train", rows=4)
    put_numbers(client, list("abc"), x=0)
    client.wait_for_room("p", 1, 0)
    with pytest.raises(ClaimTimeout, match="'p' has room for 1 samples, and 2 were to come"):
        client.wait_for_room("p", 2, timeout_s=0.01)
    timer = threading.Timer(0.1, client.clear_samples, (["a"], "p"))
    timer.start()
    client.wait_for_room("p", 2, timeout_s=10)
    timer.join()
    with pytest.raises(DataPlaneError, match="it holds at most num_samples=4"):
        client.wait_for_room("p", 5, timeout_s=10)
    with pytest.raises(DataPlaneError, match="unknown partition 'q'"):
        client.wait_for_room("q", 1)


def test_a_put_that_is_tried_again_is_done_once(client: DataPlaneClient) -> None:
    register(client, "train", rows=4, grpo_group_size=2)
    batch = {
        "input_ids": torch.ones(2, 3, dtype=torch.int64),
        "input_lengths": torch.tensor([3, 2]),
        "x": torch.zeros(2),
    }

    def put(uid: str) -> list[str]:
        ids = [f"{uid}_g0", f"{uid}_g1"]
        return kv_first_write(
            batch, sample_ids=ids, dp_client=client, partition_id="p", once=True, producer="me"
        ).sample_ids

    assert put("a") == ["a_g0", "a_g1"]
    assert put("a") == []
    meta = lease(client, 2)
    write_columns(client, meta, {"x": torch.ones(2)})
    assert put("a") == []
    assert numbers(client, meta.sample_ids, "x") == [1, 1]
    client.clear_samples(meta.sample_ids, "p", claim=meta.extra_info["claim"])
    assert put("a") == []
    assert client.sample_ids("p") == []
    assert (put("b"), put("c")) == (["b_g0", "b_g1"], ["c_g0", "c_g1"])
    assert put("a") == []
    with pytest.raises(SchemaError, match="has 'a_g0', which partition 'p' has had before, beside new ones"):
        client.put_samples(["a_g0", "d_g0"], "p", once=True)
    client.clear_samples(None, "p")
    assert put("a") == ["a_g0", "a_g1"]


def test_a_report_says_what_is_left_and_who_wrote_it(client: DataPlaneClient) -> None:
    register(client, "train", "log", rows=10, grpo_group_size=2)
    for producer, uid in (("one", "a"), ("two", "b"), (None, "c")):
        client.put_samples(
            [f"{uid}_g0", f"{uid}_g1"],
            "p",
            fields=wire(2, x=torch.zeros(2)),
            tags=[{"reward": 1.0, "why": ("a", 1)}, {}],
            producer=producer,
        )
    client.put_samples(["a_g0"], "p", fields=wire(1, y=torch.zeros(1, dtype=torch.int64)))
    client.put_samples(["d_g0"], "p", fields=wire(1, x=torch.zeros(1)), producer="two")
    claim(client, 6, "log")
    meta = lease(client, 4, 60, holder="trainer 0")
    client.finish_claim(lease(client, 2))
    report = client.partition_report("p", limit=3)
    assert (report.rows, report.rows_by_column) == (7, {"x": 7, "y": 1})
    assert report.bytes_by_column["x"] >= 28
    assert sum(report.bytes_by_column.values()) == client.stored_bytes("p")
    assert report.rows_by_producer == {"one": 2, "two": 3}
    assert {task: (t.claimed, t.leased, t.finished, t.ready) for task, t in report.tasks.items()} == {
        "train": (6, 4, 2, 0),
        "log": (6, 0, 6, 0),
    }
    (held,) = report.leases
    assert replace(held, seconds_left=0).__dict__ == {
        "claim": meta.extra_info["claim"],
        "task": "train",
        "holder": "trainer 0",
        "rows": 4,
        "seconds_left": 0,
    }
    assert 0 < held.seconds_left <= 60
    assert report.unconsumed_rows == 5
    assert [(row.sample_id, row.producer) for row in report.unconsumed] == [
        ("a_g0", "one"),
        ("a_g1", "one"),
        ("b_g0", "two"),
    ]
    assert report.unconsumed[0].tags == {"reward": 1.0, "why": ("a", 1)}
    client.clear_samples(["c_g0", "c_g1", "a_g0"], "p")
    assert client.partition_report("p").rows_by_producer == {"one": 1, "two": 3}
    with pytest.raises(DataPlaneError, match="unknown partition 'q'"):
        client.partition_report("q")

"""What a journal knows of claims, and of rows that are gone."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.data_plane import JournalDataPlaneClient, kv_first_write, write_columns
from headrace.data_plane.adapters.local import LocalDataPlaneClient
from headrace.errors import ClaimExpired
from journal_model import journaled, put_group, restored


def test_what_some_tasks_have_had_they_do_not_get_again(tmp_path: Path) -> None:
    client = journaled(tmp_path, segment_bytes=1_500)
    client.register_partition("train", ["input_ids"], 100, ["score", "train"], grpo_group_size=2)
    groups = [put_group(client, number) for number in range(5)]

    def claim(store: Any, task: str, rows: int = 2, **more: Any) -> Any:
        return store.claim_meta("train", task, ["input_ids"], rows, blocking=False, **more)

    finished, stalled, released = (claim(client, "score", lease_s=60, order="freshest") for _ in range(3))
    client.finish_claim(finished.subset([0]))  # the claim as a whole
    client.release_claim(released)
    for_good = claim(client, "train", 4)
    assert for_good.sample_ids == [*groups[0], *groups[1]]
    for number in range(5):  # old files go, and with them the records of these claims
        client.clear_samples(put_group(client, 100 + number, tokens=50), "train")
    back = restored(tmp_path)
    assert stalled.sample_ids == groups[3]
    assert claim(back, "score", 8).sample_ids == [i for group in groups[:4] for i in group]
    assert claim(back, "train", 6).sample_ids == [i for group in groups[2:] for i in group]
    assert claim(back, "score") is claim(back, "train") is None


def test_a_producer_that_tries_again_after_a_restore_writes_nothing_twice(tmp_path: Path) -> None:
    def put_once(store: Any, number: int) -> int:
        ids = [f"u{number}_g{i}" for i in range(2)]
        batch = {"input_ids": [torch.arange(2), torch.arange(3)], "input_lengths": torch.tensor([2, 3])}
        meta = kv_first_write(
            batch, sample_ids=ids, dp_client=store, partition_id="train", producer="p", once=True
        )
        return int(meta.size)

    client = journaled(tmp_path, segment_bytes=400)
    client.register_partition("train", ["input_ids"], 6, ["train"], grpo_group_size=2)
    for number in range(4):
        assert put_once(client, number) == 2
        assert put_once(client, number) == 0
        client.clear_samples([f"u{number}_g0", f"u{number}_g1"], "train")
    for number in (4, 5):
        put_once(client, number)
    client.claim_meta("train", "train", ["input_ids"], 2)
    back = restored(tmp_path)
    assert back.sample_ids("train") == ["u5_g0", "u5_g1"]
    assert [put_once(back, number) for number in range(8)] == [0, 0, 0, 0, 0, 0, 2, 2]
    assert back.partition_report("train").rows_by_producer == {"p": 6}


def test_a_late_writer_and_a_late_clear_are_not_journaled(tmp_path: Path) -> None:
    client = journaled(tmp_path)
    client.register_partition("train", ["input_ids"], 6, ["train"])
    ids = put_group(client, 0)
    meta = client.claim_meta("train", "train", ["input_ids"], 2, lease_s=0.01)
    assert meta is not None
    time.sleep(0.02)
    again = client.claim_meta("train", "train", ["input_ids"], 2, lease_s=60)
    assert again is not None
    with pytest.raises(ClaimExpired):
        write_columns(client, meta, {"advantages": torch.tensor([7.0, 7.0])})
    with pytest.raises(ClaimExpired):
        client.clear_samples(ids, "train", claim=meta.extra_info["claim"])
    with pytest.raises(ClaimExpired):
        client.finish_claim(meta)
    back = restored(tmp_path)
    assert back.get_samples(ids, "train", ["advantages"])["advantages"].tolist() == [0.5, 0.0]
    client.clear_samples(ids, "train", claim=again.extra_info["claim"])
    assert restored(tmp_path).sample_ids("train") == []


def test_a_claim_that_another_client_finishes_by_a_part_is_finished_as_a_whole(tmp_path: Path) -> None:
    store = LocalDataPlaneClient()
    driver, worker = (JournalDataPlaneClient(store, tmp_path, fsync="never") for _ in range(2))
    driver.register_partition("train", ["input_ids"], 8, ["train"], grpo_group_size=2)
    for number in range(3):
        put_group(driver, number)
    meta = driver.claim_meta("train", "train", ["input_ids"], 4, lease_s=60)
    assert meta is not None
    driver.clear_samples(["u1_g0", "u1_g1"], "train")
    put_group(driver, 1)
    worker.finish_claim(meta.subset([0]))
    assert restored(tmp_path).sample_ids("train") == ["u2_g0", "u2_g1", "u1_g0", "u1_g1"]


def test_a_group_that_is_not_whole_any_more_stays_consumed(tmp_path: Path) -> None:
    store = LocalDataPlaneClient()
    client = JournalDataPlaneClient(store, tmp_path, fsync="never")
    client.register_partition("train", ["input_ids"], 8, ["score", "train"], grpo_group_size=2)
    ids = put_group(client, 0)
    client.claim_meta("train", "score", ["input_ids"], 2)
    client.clear_samples(ids[1:], "train")
    other = put_group(client, 1)
    client.claim_meta("train", "score", ["input_ids"], 2)
    client.clear_samples(other[1:], "train")
    client.put_samples(other[1:], "train")
    back = restored(tmp_path)
    for one in (store, back):
        one.put_samples(ids[1:], "train")
        assert one.claim_meta("train", "score", [], 2, blocking=False) is None
        assert one.claim_meta("train", "train", [], 4, blocking=False) is not None


def test_a_uid_that_came_again_and_again_is_no_obstacle_to_a_restore(tmp_path: Path) -> None:
    client = journaled(tmp_path)
    client.register_partition("train", ["x"], 6, ["train"], grpo_group_size=2)
    had = [f"u_g{i}" for i in range(8)]
    for first in range(0, 8, 2):
        client.put_samples(had[first : first + 2], "train", once=True)
        client.clear_samples(had[first : first + 2], "train")
    client.put_samples(["v_g0", "v_g1"], "train", once=True)
    back = restored(tmp_path)
    assert back.sample_ids("train") == ["v_g0", "v_g1"]
    for first in range(0, 8, 2):
        assert back.put_samples(had[first : first + 2], "train", once=True).size == 0


def test_rows_that_all_tasks_have_had_stay_away_where_their_registration_is_told_later(
    tmp_path: Path,
) -> None:
    store = LocalDataPlaneClient()
    driver, producer, consumer = (
        JournalDataPlaneClient(store, tmp_path, segment_bytes=1500, fsync="never") for _ in range(3)
    )
    driver.register_partition("train", [], 8, ["train"])
    producer.put_samples(["a", "b"], "train")
    consumer.claim_meta("train", "train", [], 1)
    for number in range(30):  # the driver's first file goes, and the registration is in a later one
        put_group(driver, number)
        driver.clear_samples([f"u{number}_g0", f"u{number}_g1"], "train")
    assert restored(tmp_path).sample_ids("train") == ["b"]


def test_a_registration_that_another_client_has_changed_is_not_told_again(tmp_path: Path) -> None:
    store = LocalDataPlaneClient()
    first, second = (
        JournalDataPlaneClient(store, tmp_path, segment_bytes=1500, fsync="never") for _ in range(2)
    )
    first.register_partition("train", [], 8, ["old"])
    second.register_partition("train", [], 10, ["new"])
    for client in (first, second):
        for number in range(30):
            put_group(client, number)
            client.clear_samples([f"u{number}_g0", f"u{number}_g1"], "train")
    report = restored(tmp_path).partition_report("train")
    assert (report.num_samples, list(report.tasks)) == (10, ["new"])

"""What one store has journaled, every store takes back: another kind, or the same with other storage units."""

from pathlib import Path
from typing import Any

import pytest
import torch
from contract_batches import Start
from tensordict import TensorDict

from headrace.data_plane import (
    DataPlaneClient,
    build_data_plane_client,
    kv_first_write,
    read_columns,
    restore,
    write_columns,
)
from headrace.errors import ClaimExpired, DataPlaneError

COLUMNS = ["input_ids", "advantages", "message_log", "routed_experts"]


def fill(client: Any) -> None:
    client.register_partition("train", ["input_ids"], 8, ["score", "train"], grpo_group_size=2)
    for number in range(4):
        rows = [torch.arange(3 + number), torch.arange(2)]
        batch = {
            "input_ids": rows,
            "input_lengths": torch.tensor([len(row) for row in rows]),
            "message_log": [[{"role": "user", "content": f"{number}"}], [{"role": "user", "content": "b"}]],
            "routed_experts": [torch.tensor([[[0, 1]]] * len(row), dtype=torch.uint8) for row in rows],
        }
        ids = [f"u{number}_g{i}" for i in range(2)]
        meta = kv_first_write(
            batch, sample_ids=ids, dp_client=client, partition_id="train", tags=[{"v": number}] * 2, once=True
        )
        write_columns(client, meta, {"advantages": torch.tensor([0.5, number])})
    client.clear_samples(["u0_g0", "u0_g1"], "train")
    client.claim_meta("train", "score", ["input_ids"], 2)


def test_what_is_journaled_over_one_store_is_restored_into_any_other(
    config: dict[str, Any], start: Start, tmp_path: Path
) -> None:
    folder = tmp_path / "own"
    journal = {"enabled": True, "folder": str(folder), "segment_bytes": 2_000}
    client = start(journal=journal)
    fill(client)
    client.close()
    local = build_data_plane_client({"enabled": True, "store_name": "other"}, bootstrap=True)
    again = start(journal={**journal, "folder": str(tmp_path / "new")})
    try:
        for store in (local, again):
            report = restore(store, folder)
            assert report.rows == {"train": 6}
            for task, count in (("score", 4), ("train", 6)):
                meta = store.claim_meta("train", task, COLUMNS, count, blocking=False)
                assert meta is not None
                assert meta.sample_ids == [f"u{n}_g{i}" for n in range(4 - count // 2, 4) for i in range(2)]
                assert store.claim_meta("train", task, COLUMNS, 2, blocking=False) is None
            # Rows that were cleared before have come, too.
            assert store.check_consumption_status("train", ["score", "train"])
            batch = read_columns(store, meta, COLUMNS)
            assert batch["input_ids"].tolist() == [
                row for n in (1, 2, 3) for row in ([*range(3 + n), *[0] * (3 - n)], [0, 1, 0, 0, 0, 0])
            ]
            assert batch["advantages"].tolist() == [0.5, 1.0, 0.5, 2.0, 0.5, 3.0]
            assert [log[0]["content"] for log in batch["message_log"]] == ["1", "b", "2", "b", "3", "b"]
            assert meta.tags == [{"v": n} for n in (1, 2, 3) for _ in range(2)]
    finally:
        local.close()


def test_a_claim_s_rows_are_told_by_any_part_of_its_meta_until_they_are_cleared(
    client: DataPlaneClient,
) -> None:
    client.register_partition("train", ["x"], 6, ["train"])
    ids = [f"s{i}" for i in range(6)]
    client.put_samples(ids, "train", TensorDict({"x": torch.arange(6)}, [6]))
    meta = client.claim_meta("train", "train", ["x"], 5, lease_s=60)
    assert meta is not None
    client.clear_samples(["s1", "s5"], "train")
    client.put_samples(["s1"], "train", TensorDict({"x": torch.arange(1)}, [1]))
    assert sorted(client.claimed_ids(meta.subset([3]))) == ["s0", "s2", "s3", "s4"]
    client.finish_claim(meta)
    with pytest.raises(ClaimExpired):
        client.claimed_ids(meta)


def test_rows_that_are_marked_as_consumed_are_handed_out_to_other_tasks_only(client: DataPlaneClient) -> None:
    client.register_partition("train", ["x"], 6, ["score", "train"], grpo_group_size=2)

    def put(*ids: str) -> None:
        client.put_samples(ids, "train", TensorDict({"x": torch.arange(len(ids))}, [len(ids)]))

    put("u_g0", "u_g1", "v_g0", "w_g0", "w_g1")
    client.mark_consumed("train", "score", ["u_g0", "u_g1", "v_g0", "nowhere"])
    client.mark_consumed("train", "score", ["u_g0"])
    put("v_g1")
    meta = client.claim_meta("train", "score", ["x"], 2, blocking=False)
    assert meta is not None
    assert meta.sample_ids == ["w_g0", "w_g1"]
    assert client.claim_meta("train", "score", ["x"], 2, blocking=False) is None
    assert client.claim_meta("train", "train", ["x"], 6, blocking=False) is not None
    assert client.partition_report("train").tasks["score"].finished == 5
    for ids in (["u_g0"], []):
        with pytest.raises(DataPlaneError, match="no task 'other'"):
            client.mark_consumed("train", "other", ids)

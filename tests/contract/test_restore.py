"""What one store has journaled, every store takes back: another kind, or the same with other storage units."""

from pathlib import Path
from typing import Any

import torch
from contract_batches import Start

from headrace.data_plane import build_data_plane_client, kv_first_write, read_columns, restore, write_columns

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

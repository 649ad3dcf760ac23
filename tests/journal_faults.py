"""Kills a process of a journaled transfer_queue store while groups are put, restores, and prints what came back.

Run as a script: it needs a Ray cluster of its own.
"""

import json
import logging
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import ray
import torch

from headrace.data_plane import build_data_plane_client, journal_of, kv_first_write, restore
from headrace.errors import DataPlaneError
from transfer_queue_faults import process_of


def put_group(client: Any, number: int) -> list[str]:
    """Put a group whose values say which it is."""
    ids = [f"u{number}_g{i}" for i in range(2)]
    rows = [torch.full((20_000 + i,), number) for i in range(2)]
    batch = {"input_ids": rows, "input_lengths": torch.tensor([len(row) for row in rows])}
    kv_first_write(batch, sample_ids=ids, dp_client=client, partition_id="train", once=True)
    return ids


def run(victim: str, folder: Path) -> dict[str, Any]:
    """Return the groups that were finished before the death, and what a store with other units holds afterwards."""
    journal = {"enabled": True, "folder": str(folder), "segment_bytes": 2_000_000}
    config = {"enabled": True, "impl": "transfer_queue", "timeout_s": 30.0, "journal": journal}
    client = build_data_plane_client({**config, "num_storage_units": 2}, bootstrap=True)
    client.register_partition("train", ["input_ids"], 10_000, ["train"], grpo_group_size=2)
    inside = journal_of(client)
    assert inside is not None
    index, _, *storage = inside.inner._engine.actors  # type: ignore[attr-defined]
    pid = process_of(index if victim == "index" else storage[-1])
    killer = threading.Timer(1.0, os.kill, (pid, signal.SIGKILL))
    killer.start()
    finished: list[str] = []
    trained: list[str] = []
    error = ""
    for number in range(10_000):
        try:
            finished += put_group(client, number)
            if number % 4 == 3:
                meta = client.claim_meta("train", "train", ["input_ids"], 2, lease_s=600)
                assert meta is not None
                client.clear_samples(meta.sample_ids, "train", claim=meta.extra_info["claim"])
                trained += meta.sample_ids
        except DataPlaneError as raised:
            error = type(raised).__name__
            break
    killer.join()
    client.close()
    again = build_data_plane_client({**config, "num_storage_units": 1}, bootstrap=True)
    report = restore(again, folder)
    there = again.sample_ids("train")
    values = again.get_samples(there, "train", ["input_ids"])["input_ids"]
    right = all(
        torch.equal(row, torch.full_like(row, int(sample_id[1:].partition("_")[0])))
        for sample_id, row in zip(there, values.unbind())
    )
    retried = [
        len(
            kv_first_write(
                {"input_ids": [torch.zeros(1, dtype=torch.int64)], "input_lengths": torch.tensor([1])},
                sample_ids=[sample_id],
                dp_client=again,
                partition_id="train",
                once=True,
            )
        )
        for sample_id in trained[:4]
    ]
    later = put_group(again, 20_000)
    claimed = []
    while meta := again.claim_meta("train", "train", ["input_ids"], 2, blocking=False):
        claimed += meta.sample_ids
    again.close()
    return {
        "error": error,
        "finished": finished,
        "trained": trained,
        "there": there,
        "right": right,
        "retried": retried,
        "claimed": claimed,
        "later": later,
        "rows": report.total,
    }


def main() -> None:
    ray.init(
        address="local", num_cpus=1, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False
    )
    with tempfile.TemporaryDirectory() as folder:
        for victim in sys.argv[1:]:
            print("REPORT" + json.dumps(run(victim, Path(folder) / victim)), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()

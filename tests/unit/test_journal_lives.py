"""Several lives of a run over one journal, whose files are begun anew and removed all the time."""

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from headrace.data_plane import DataPlaneClient, JournalDataPlaneClient, restore
from headrace.data_plane.adapters.local import LocalDataPlaneClient
from headrace.errors import SchemaError
from journal_model import journaled, restored


def numbers(ids: list[str], name: str, value: int) -> TensorDict:
    return TensorDict({name: torch.full((len(ids),), value)}, [len(ids)])


def refused_put(client: DataPlaneClient, partition: str, ids: list[str]) -> None:
    with pytest.raises(SchemaError):
        client.put_samples(ids, partition, TensorDict({"input_ids": torch.zeros(len(ids))}, [len(ids)]))


def roll(client: DataPlaneClient, partition: str = "train", times: int = 30) -> None:
    """Let other rows come and go, so that the journal begins further files and removes those before."""
    for number in range(times):
        ids = [f"n{number}_{i}" for i in range(4)]
        client.put_samples(ids, partition, numbers(ids, "x", 1))
        client.clear_samples(ids, partition)


def test_rows_of_a_life_before_that_all_tasks_have_had_do_not_come_back_by_a_late_column(
    tmp_path: Path,
) -> None:
    old = [f"old{i}" for i in range(4)]
    first = journaled(tmp_path, segment_bytes=1500)
    first.register_partition("train", ["x"], 1000, ["train"])
    first.put_samples(old, "train", numbers(old, "x", 0))
    second = journaled(tmp_path, segment_bytes=1500)
    restore(second, tmp_path)
    meta = second.claim_meta("train", "train", ["x"], 4)
    assert meta is not None
    assert meta.sample_ids == old
    roll(second)
    second.put_samples(old, "train", numbers(old, "late", 1))
    assert restored(tmp_path).sample_ids("train") == []
    third = journaled(tmp_path, segment_bytes=1500)
    restore(third, tmp_path)
    roll(third)
    assert len(list(tmp_path.glob("*/*"))) <= 3, "no file of the lives before is needed any more"


def test_a_late_column_that_is_refused_brings_no_row_back(tmp_path: Path) -> None:
    client = journaled(tmp_path, segment_bytes=1500)
    client.register_partition("train", ["x"], 1000, ["train"])
    client.put_samples(["old"], "train", numbers(["old"], "x", 0))
    client.claim_meta("train", "train", ["x"], 1)
    roll(client)
    refused_put(client, "train", ["old"])
    client.put_samples(["old"], "train", numbers(["old"], "late", 1))
    assert restored(tmp_path).sample_ids("train") == []


def test_a_row_that_was_had_and_cleared_may_be_put_again(tmp_path: Path) -> None:
    store = LocalDataPlaneClient()
    owner, trainer, driver = (
        JournalDataPlaneClient(store, tmp_path, segment_bytes=600, fsync="never") for _ in range(3)
    )
    owner.register_partition("train", ["x"], 1000, ["train"])
    owner.put_samples(["old"], "train", numbers(["old"], "x", 0))
    trainer.claim_meta("train", "train", ["x"], 1)
    roll(owner)
    driver.clear_samples(["old"], "train")
    roll(driver)
    trainer.put_samples(["old"], "train", numbers(["old"], "x", 2))
    assert restored(tmp_path).sample_ids("train") == ["old"]

"""Several lives of a run over one journal, whose files are begun anew and removed all the time."""

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from headrace.data_plane import DataPlaneClient, JournalDataPlaneClient, KVBatchMeta, restore
from headrace.data_plane.adapters.local import LocalDataPlaneClient
from headrace.data_plane.journal.client import keep_since
from headrace.data_plane.journal.segments import Position
from headrace.errors import ClaimExpired, SchemaError
from journal_model import journaled, restored

TASKS, IDS = ("a", "b"), [f"u{number}_g{i}" for number in range(20) for i in range(2)]
Rows = dict[str, dict[str, dict[str, int]]]
PARTITIONS = ("pairs", "rows")
WEIGHTS = {
    "put_new": 35,
    "write": 15,
    "refused_put": 3,
    "clear": 12,
    "claim": 22,
    "lease": 8,
    "end_lease": 6,
    "clear_all": 1,
    "register": 1,
    "checkpoint": 3,
    "die": 3,
}


class Lives:
    """A store with two journaling clients; what it holds when it dies is what the next one has to hold."""

    def __init__(self, folder: Path, random: Random) -> None:
        self.folder, self._random = folder, random
        self._checkpoint: tuple[Position, Rows] | None = None
        self._begin()
        for partition in PARTITIONS:
            self.register(self.clients[0], partition)

    def _begin(self) -> None:
        self.store, size = LocalDataPlaneClient(), self._random.choice([400, 1500, 5000])
        self.clients = [
            JournalDataPlaneClient(self.store, self.folder, segment_bytes=size, fsync="never")
            for _ in range(2)
        ]
        self._leases: list[KVBatchMeta] = []

    def step(self) -> None:
        """Let one of the clients do something."""
        operation = self._random.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        getattr(self, operation)(self._random.choice(self.clients), self._random.choice(PARTITIONS))

    def register(self, client: DataPlaneClient, partition: str) -> None:
        client.register_partition(partition, ["x"], 100, TASKS, 2 if partition == "pairs" else None)

    def put_new(self, client: DataPlaneClient, partition: str) -> None:
        first = 2 * self._random.randrange(20)
        ids = IDS[first : first + self._random.randint(1, 6)]
        self._put(client, partition, ids, "x", once=partition == "pairs")

    def write(self, client: DataPlaneClient, partition: str) -> None:
        if there := self._some_of(partition):
            self._put(client, partition, there, self._random.choice("xy"), once=False)

    def _some_of(self, partition: str) -> list[str]:
        there = self.store.sample_ids(partition)
        return self._random.sample(there, self._random.randint(1, len(there))) if there else []

    def _put(self, client: DataPlaneClient, partition: str, ids: list[str], name: str, *, once: bool) -> None:
        try:
            client.put_samples(ids, partition, numbers(ids, name, self._random.randrange(99)), once=once)
        except SchemaError:
            assert once, "only some of the rows are new"

    def refused_put(self, client: DataPlaneClient, partition: str) -> None:
        refused_put(client, partition, self._some_of(partition) or IDS[:1])

    def clear(self, client: DataPlaneClient, partition: str) -> None:
        client.clear_samples(self._some_of(partition), partition)

    def clear_all(self, client: DataPlaneClient, partition: str) -> None:
        client.clear_samples(None, partition)

    def claim(self, client: DataPlaneClient, partition: str, lease_s: float | None = None) -> None:
        rows = (2 if partition == "pairs" else 1) * self._random.randint(1, 3)
        task = self._random.choice(TASKS)
        meta = client.claim_meta(partition, task, [], rows, blocking=False, lease_s=lease_s)
        if meta is not None and lease_s is not None:
            self._leases.append(meta)

    def lease(self, client: DataPlaneClient, partition: str) -> None:
        self.claim(client, partition, 1e6)

    def end_lease(self, client: DataPlaneClient, partition: str) -> None:
        if self._leases:
            meta = self._leases.pop(self._random.randrange(len(self._leases)))
            with suppress(ClaimExpired):  # the partition was emptied
                client.finish_claim(meta) if self._random.random() < 0.6 else client.release_claim(meta)

    def checkpoint(self, client: JournalDataPlaneClient, partition: str) -> None:
        position = client.journal_position()
        keep_since(client, position)
        self._checkpoint = position, rows_of(self.store)

    def die(self, client: DataPlaneClient, partition: str) -> None:
        """End the store and begin the next life, with the rows of this one."""
        self.check()
        for one in self.clients:
            one.close()
        self._begin()
        restore(self.clients[0], self.folder)

    def check(self) -> None:
        """What is restored from the journal is what the store holds, and its tasks have had the same."""
        for meta in self._leases:
            self.store.release_claim(meta)
        back = restored(self.folder)
        expected = rows_of(self.store)
        assert rows_of(back) == expected
        assert {p: list(rows) for p, rows in rows_of(back).items()} == {
            p: list(r) for p, r in expected.items()
        }
        assert handed_out(back, expected) == handed_out(self.store, expected)
        if self._checkpoint is not None:
            position, then = self._checkpoint
            copy = self.folder.with_name("copy")
            shutil.copytree(self.folder, copy)
            assert rows_of(restored(copy, position=position)) == then
            shutil.rmtree(copy)


def numbers(ids: list[str], name: str, value: int) -> TensorDict:
    return TensorDict({name: torch.full((len(ids),), value)}, [len(ids)])


def rows_of(store: DataPlaneClient) -> Rows:
    """Return the rows that some task has not had, with their columns."""
    found: Rows = {}
    for partition in store.partition_ids():
        for row in store.partition_report(partition).unconsumed:
            data = store.get_data(KVBatchMeta(partition, "", [row.sample_id]))
            columns = {name: int(data[name]) for name in sorted(data.keys())}
            found.setdefault(partition, {})[row.sample_id] = columns
    return found


def handed_out(store: DataPlaneClient, rows: Rows) -> dict[tuple[str, str], list[str]]:
    """Return which of some rows each task gets, when all their groups are whole again."""
    for sample_id in IDS:
        if "pairs" in rows and sample_id not in rows["pairs"]:
            store.put_samples([sample_id], "pairs", numbers([sample_id], "x", 0))
    got: dict[tuple[str, str], list[str]] = {}
    for partition in rows:
        for task in TASKS:
            size = 2 if partition == "pairs" else 1
            while meta := store.claim_meta(partition, task, [], size, blocking=False):
                own = [sample_id for sample_id in meta.sample_ids if sample_id in rows[partition]]
                got.setdefault((partition, task), []).extend(own)
    return got


@given(seed=st.integers(0, 2**32), steps=st.integers(1, 100))
@example(seed=24288, steps=89)  # ids of before a registration, which a file of another writer tells of
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_each_life_has_the_rows_of_the_one_before(seed: int, steps: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        lives = Lives(Path(name) / "journal", Random(seed))
        for _ in range(steps):
            lives.step()
        lives.check()


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

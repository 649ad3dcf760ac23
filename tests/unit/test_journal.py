"""The journal: what it gives back after a crash, what it keeps on disk, and what it refuses."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.data_plane import DataPlaneClient, JournalDataPlaneClient, restore
from headrace.data_plane.adapters.local import LocalDataPlaneClient
from headrace.data_plane.journal.client import keep_since
from headrace.data_plane.journal.segments import records as records_of
from headrace.data_plane.journal.segments import segments
from headrace.data_plane.passing_client import PassingClient
from headrace.errors import SchemaError, TransportError
from journal_model import (
    IDS,
    Model,
    bytes_written,
    columns_of,
    contents,
    cut_to,
    journaled,
    restored,
)

PARTITIONS = ("groups", "singles", "free")


some_ids = st.lists(st.sampled_from(IDS), min_size=1, max_size=4, unique=True)
some_columns = st.lists(st.sampled_from(["input_ids", "score", "log"]), min_size=1, max_size=3, unique=True)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("put"), some_ids, some_columns, st.integers(1, 10**6)),
        st.tuples(st.just("put"), some_ids, some_columns, st.integers(1, 10**6)),
        st.tuples(st.just("refused_put"), some_ids),
        st.tuples(st.just("clear"), some_ids),
        st.tuples(st.just("clear"), st.none()),
        st.tuples(st.just("claim")),
        st.tuples(st.just("register"), st.sampled_from([None, 2])),
    ),
    max_size=14,
)
schedules = operations.flatmap(
    lambda ops: st.tuples(
        st.just(ops), st.lists(st.sampled_from(PARTITIONS), min_size=len(ops), max_size=len(ops))
    )
)


def play(model: Model, client: JournalDataPlaneClient, operation: tuple[Any, ...], partition: str) -> None:
    name, *arguments = operation
    if name == "register":
        arguments = [2 if partition == "groups" else None]
        if partition == "free":
            return
    getattr(model, name)(client, partition, *arguments)


@given(schedule=schedules, part=st.floats(0, 1), segment_bytes=st.sampled_from([300, 2000, 10**6]))
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_a_journal_cut_at_any_byte_gives_back_what_its_operations_came_to(
    schedule: Any, part: float, segment_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, model = Path(name) / "journal", Model()
        client = journaled(folder, segment_bytes=segment_bytes)
        keep_since(client, {})  # or files go as soon as all their rows are cleared
        history = [(0, model.snapshot())]
        play(model, client, ("register", 2), "groups")
        for operation, partition in zip(*schedule):
            play(model, client, operation, partition)
            history.append((bytes_written(folder), model.snapshot()))
        size = round(part * history[-1][0])
        cut_to(folder, size)
        expected = [snapshot for end, snapshot in history if end <= size][-1]
        assert contents(restored(folder)) == expected


@given(schedule=schedules, writers=st.lists(st.integers(0, 1), min_size=14, max_size=14))
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
def test_files_that_have_gone_are_not_missed(schedule: Any, writers: list[int]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, model, store = Path(name) / "journal", Model(), LocalDataPlaneClient()
        clients = [JournalDataPlaneClient(store, folder, segment_bytes=200, fsync="never") for _ in range(2)]
        play(model, clients[0], ("register", 2), "groups")
        for operation, partition, writer in zip(*schedule, writers):
            play(model, clients[writer], operation, partition)
        assert contents(restored(folder)) == model.left()
        # And once more from what a second life has written on.
        again = journaled(folder, segment_bytes=200)
        report = restore(again, folder)
        assert report.total == sum(map(len, model.left().values()))
        for partition in PARTITIONS:
            left = model.left().get(partition, {})
            model.rows[partition], model.consumed[partition] = left, set()
        for operation, partition in zip(*schedule):
            if operation[0] != "claim":
                play(model, again, operation, partition)
        assert contents(restored(folder)) == model.left()


PRODUCERS = """
import os, sys
from pathlib import Path
import torch
from headrace.data_plane import build_data_plane_client, kv_first_write

def produce(name):
    journal = {"enabled": True, "folder": str(Path(sys.argv[1]) / name), "segment_bytes": 8_000_000}
    client = build_data_plane_client({"enabled": True, "journal": journal}, bootstrap=True)
    client.register_partition("train", ["input_ids"], 10_000, ["train"], grpo_group_size=4)
    for number in range(10_000):
        rows = [torch.full((100_000 + i,), number) for i in range(4)]
        ids = [f"{name}{number}_g{i}" for i in range(4)]
        batch = {"input_ids": rows, "input_lengths": torch.tensor([len(row) for row in rows])}
        kv_first_write(batch, sample_ids=ids, dp_client=client, partition_id="train")
        if number % 5 == 4:
            client.clear_samples(ids, "train")
        os.write(1, f"{name} {number}\\n".encode())

for name in "abc":
    child = os.fork()
    if not child:
        produce(name)
    os.write(1, f"{name} {child} pid\\n".encode())
for name in "abc":
    os.wait()
"""


def killed_producers(folder: Path) -> dict[str, int]:
    """Run three producers, kill each in the middle of its work, and return the last group that each has finished."""
    pids: dict[str, int] = {}
    finished: dict[str, int] = {}
    with subprocess.Popen(
        [sys.executable, "-c", PRODUCERS, str(folder)], stdout=subprocess.PIPE, text=True
    ) as producers:
        assert producers.stdout is not None
        for line in producers.stdout:
            name, number, *is_pid = line.split()
            if is_pid:
                pids[name] = int(number)
                continue
            finished[name] = int(number)
            if finished[name] == 6 + 2 * "abc".index(name):
                time.sleep(0.003 * "abc".index(name))
                os.kill(pids[name], signal.SIGKILL)
    return finished


def test_of_producers_killed_in_a_put_every_finished_group_is_there_once(tmp_path: Path) -> None:
    for name, last in killed_producers(tmp_path).items():
        client = LocalDataPlaneClient()
        report = restore(client, tmp_path / name)
        kept = client.sample_ids("train")
        finished = [f"{name}{n}_g{i}" for n in range(last + 1) if n % 5 != 4 for i in range(4)]
        under_way = [f"{name}{last + 1}_g{i}" for i in range(4)]
        assert kept in (finished, [*finished, *under_way]), report
        values = client.get_samples(kept, "train", ["input_ids"])["input_ids"]
        for sample_id, row in zip(kept, values.unbind()):
            number, i = sample_id[1:].split("_g")
            assert torch.equal(row, torch.full((100_000 + int(i),), int(number)))
        assert client.claim_meta("train", "train", ["input_ids"], len(kept), blocking=False) is not None
        assert client.claim_meta("train", "train", ["input_ids"], 4, blocking=False) is None


def test_what_a_store_refuses_is_not_given_back(tmp_path: Path) -> None:
    client = journaled(tmp_path)
    client.register_partition("train", ["input_ids"], 2, ["train"], enums={"kind": ["a"]})
    client.put_samples(["x"], "train", tags=[{"kind": "a"}])
    with pytest.raises(SchemaError, match="registered with"):
        client.put_samples(["y"], "train", tags=[{"kind": "b"}])
    report = restore(LocalDataPlaneClient(), tmp_path)
    assert (report.rows, report.refused) == ({"train": 1}, 0)


def test_columns_of_every_form_come_back(tmp_path: Path) -> None:
    from headrace.distributed.columns import object_array
    from headrace.distributed.multimodal import PackedTensor

    client = journaled(tmp_path)
    columns = {
        "image": object_array([PackedTensor([torch.rand(2, 3)], 0), PackedTensor([torch.rand(1, 3)], 0)]),
        "grid": torch.arange(12, dtype=torch.uint8).view(2, 2, 3),
        "flag": torch.tensor([True, False]),
        "half": torch.rand(2, 3).to(torch.bfloat16)[:, ::2],
        "nothing": torch.nested.nested_tensor([torch.zeros(0), torch.zeros(0)], layout=torch.jagged),
        "log": object_array([{"text": "é", "n": None}, (1, [2.5])]),
    }
    from headrace.data_plane import pack_jagged_fields

    client.put_samples(["x", "y"], "p", pack_jagged_fields(columns, lengths=torch.tensor([1, 2])))
    names, other = list(columns), restored(tmp_path)
    expected, got = client.get_samples(["y", "x"], "p", names), other.get_samples(["y", "x"], "p", names)
    for name in names:
        if not isinstance(expected[name], torch.Tensor):
            assert str(expected[name]) == str(got[name])
            continue
        one, two = expected[name], got[name]
        assert one.dtype == two.dtype
        assert one.is_nested == two.is_nested
        assert torch.equal(one.values() if one.is_nested else one, two.values() if two.is_nested else two)


class Refusing(PassingClient):
    """A store that ends each put of some rows with an error of its own."""

    def __init__(self, inner: DataPlaneClient, error: Exception) -> None:
        self.inner, self._error = inner, error

    def _pass(self, name: str, *args: Any, **more: Any) -> Any:
        if name == "put_samples" and "refused" in args[0]:
            raise self._error
        return super()._pass(name, *args, **more)


def test_a_put_that_ends_with_any_error_keeps_no_restore_from_the_others(tmp_path: Path) -> None:
    store = Refusing(LocalDataPlaneClient(), ValueError("something else"))
    client = JournalDataPlaneClient(store, tmp_path, fsync="never")
    for sample_id in ("a", "refused", "b"):
        with pytest.raises(ValueError, match="something else") if sample_id == "refused" else nullcontext():
            client.put_samples([sample_id], "train", tags=[{"v": 1}])
    assert restored(tmp_path).sample_ids("train") == ["a", "b"]
    # So it is when the crash came before the journal was told.
    (file,) = tmp_path.glob("*/*")
    records = [r for s in segments(tmp_path) for r in records_of(tmp_path, s, 0, file.stat().st_size)]
    end = next(record.end for record in records if getattr(record.head, "ids", []) == ["refused"])
    os.truncate(file, end)
    back = Refusing(LocalDataPlaneClient(), ValueError("something else"))
    assert restore(back, tmp_path).refused == 1
    assert back.sample_ids("train") == ["a"]


def test_a_store_that_does_not_answer_loses_no_row_of_a_journal(tmp_path: Path) -> None:
    client = journaled(tmp_path)
    client.put_samples(["refused"], "train", tags=[{"v": 1}])
    with pytest.raises(TransportError):
        restore(Refusing(LocalDataPlaneClient(), TransportError("no answer")), tmp_path)
    assert restored(tmp_path).sample_ids("train") == ["refused"]


def test_what_the_model_puts_is_what_it_reads() -> None:
    client, model = LocalDataPlaneClient(), Model()
    client.put_samples(
        ["a_g0"], "free", columns_of(["a_g0"], ["input_ids", "score", "log"], 3), [{"made": 4}]
    )
    assert contents(client) == {"free": {"a_g0": {"input_ids": 3, "score": 3, "log": 3, "tag": 4}}}
    assert model.left() == {}

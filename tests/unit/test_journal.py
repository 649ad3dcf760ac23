"""The journal: what it gives back after a crash, what it keeps on disk, and what it refuses."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from full_disk import files_of_at_most
from headrace.data_plane import (
    JournalDataPlaneClient,
    build_data_plane_client,
    kv_first_write,
    restore,
    write_columns,
)
from headrace.data_plane.adapters.local import LocalDataPlaneClient
from headrace.data_plane.journal.client import journal_of, keep_since
from headrace.data_plane.journal.segments import segments
from headrace.errors import (
    CapacityExceeded,
    ClaimExpired,
    ConfigError,
    DataPlaneError,
    SchemaError,
    WriteError,
)
from journal_model import IDS, Model, bytes_written, columns_of, contents, cut_to

PARTITIONS = ("groups", "singles", "free")


def journaled(folder: Path, **options: Any) -> JournalDataPlaneClient:
    return JournalDataPlaneClient(LocalDataPlaneClient(), folder, **{"fsync": "never", **options})


def restored(folder: Path, **options: Any) -> LocalDataPlaneClient:
    client = LocalDataPlaneClient()
    restore(client, folder, **options)
    return client


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


def put_group(
    client: Any,
    number: int,
    tokens: int = 3,
    partition: str = "train",
    once: bool = False,
    v: int | None = None,
) -> list[str]:
    """Put a group, with the tag `v` if there is one; return the ids that were written."""
    ids = [f"u{number}_g{i}" for i in range(2)]
    rows = [torch.arange(tokens + i) for i in range(2)]
    batch = {"input_ids": rows, "input_lengths": torch.tensor([len(row) for row in rows])}
    tags = None if v is None else [{"v": v}] * 2
    meta = kv_first_write(
        batch, sample_ids=ids, dp_client=client, partition_id=partition, once=once, tags=tags
    )
    if meta.size:
        write_columns(client, meta, {"advantages": torch.tensor([0.5, number])})
    return meta.sample_ids


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


def test_files_go_with_their_rows_and_the_folder_stays_small(tmp_path: Path) -> None:
    client = journaled(tmp_path, segment_bytes=20_000, max_bytes=100_000)
    client.register_partition("train", ["input_ids"], 8, ["train"], grpo_group_size=2)
    kept = put_group(client, 1000)
    for number in range(100):
        ids = put_group(client, number, tokens=1000)
        client.clear_samples(ids, "train")
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*")) < 80_000
    assert restored(tmp_path).sample_ids("train") == kept


def test_a_put_beyond_the_size_limit_is_refused_and_nothing_of_it_stays(tmp_path: Path) -> None:
    client = journaled(tmp_path, segment_bytes=4_000, max_bytes=40_000)
    ids = [put_group(client, number, tokens=1000) for number in range(2)]
    with pytest.raises(CapacityExceeded, match=r"data_plane\.journal\.max_bytes=40000"):
        put_group(client, 2, tokens=1000)
    assert client.sample_ids("train") == [*ids[0], *ids[1]] == restored(tmp_path).sample_ids("train")
    client.clear_samples(ids[0], "train")
    again = put_group(client, 2, tokens=1000)
    assert restored(tmp_path).sample_ids("train") == [*ids[1], *again]


def test_a_full_disk_refuses_the_put_whole(tmp_path: Path) -> None:
    client = journaled(tmp_path)
    ids = put_group(client, 0)
    with files_of_at_most(20_000), pytest.raises(WriteError, match="make room"):
        put_group(client, 1, tokens=2000)
    assert client.sample_ids("train") == ids
    later = put_group(client, 2)
    assert restored(tmp_path).sample_ids("train") == [*ids, *later]


def test_what_a_store_refuses_is_not_given_back(tmp_path: Path) -> None:
    client = journaled(tmp_path)
    client.register_partition("train", ["input_ids"], 2, ["train"], enums={"kind": ["a"]})
    client.put_samples(["x"], "train", tags=[{"kind": "a"}])
    with pytest.raises(SchemaError, match="registered with"):
        client.put_samples(["y"], "train", tags=[{"kind": "b"}])
    report = restore(LocalDataPlaneClient(), tmp_path)
    assert (report.rows, report.refused) == ({"train": 1}, 0)


def test_a_damaged_record_is_told_and_a_damaged_last_one_is_cut_off(tmp_path: Path) -> None:
    client = journaled(tmp_path)
    first, ends = put_group(client, 0, tokens=500), [bytes_written(tmp_path)]
    put_group(client, 1, tokens=500)
    ends.append(bytes_written(tmp_path))
    (file,) = tmp_path.glob("*/*")
    whole = bytearray(file.read_bytes())

    def with_byte_changed(at: int) -> None:
        changed = whole.copy()
        changed[at] ^= 1
        file.write_bytes(changed)

    for at in (ends[0] - 60, 200):  # of a body, of a head
        with_byte_changed(at)
        with pytest.raises(DataPlaneError, match="is damaged"):
            restored(tmp_path)
    file.write_bytes(whole[: ends[0]])
    with_byte_changed(ends[1] - 20)
    client, report = LocalDataPlaneClient(), None
    report = restore(client, tmp_path)
    assert report.cut_bytes > 0
    assert client.sample_ids("train") == [*first, "u1_g0", "u1_g1"]
    with pytest.raises(DataPlaneError, match="not written"):
        client.get_samples(["u1_g0"], "train", ["advantages"])
    (tmp_path / "9-x").mkdir()
    (tmp_path / "9-x" / "000001.journal").write_bytes(b"something else")
    with pytest.raises(DataPlaneError, match="no file of a journal"):
        restored(tmp_path)


def test_a_position_gives_back_the_rows_of_then(tmp_path: Path) -> None:
    client = journaled(tmp_path, segment_bytes=3_000)
    client.register_partition("train", ["input_ids"], 100, ["train"], grpo_group_size=2)
    groups = [put_group(client, number, tokens=100) for number in range(4)]
    client.clear_samples(groups[0], "train")
    then = client.journal_position()
    keep_since(client, then)
    client.claim_meta("train", "train", ["input_ids"], 2)
    client.clear_samples([*groups[1], *groups[2]], "train")
    for number in range(10, 20):
        client.clear_samples(put_group(client, number, tokens=100), "train")
    new = put_group(client, 20)
    assert restored(tmp_path).sample_ids("train") == [*groups[3], *new]
    with_later = restored(tmp_path, position=then, later=True)
    late = [f"u{number}_g{i}" for number in range(10, 20) for i in range(2)]
    assert with_later.sample_ids("train") == [*groups[1], *groups[2], *groups[3], *late, *new]
    back = restored(tmp_path, position=then)
    assert back.sample_ids("train") == [*groups[1], *groups[2], *groups[3]]
    meta = back.claim_meta("train", "train", ["advantages"], 6, blocking=False)
    assert meta is not None
    assert meta.sequence_lengths == [100, 101] * 3
    assert back.get_data(meta)["advantages"].tolist() == [0.5, 1, 0.5, 2, 0.5, 3]


def test_rows_that_come_back_with_later_ones_are_in_the_journal_again(tmp_path: Path) -> None:
    client = journaled(tmp_path, segment_bytes=1_000)
    groups = [put_group(client, number) for number in range(3)]
    then = client.journal_position()
    keep_since(client, then)
    client.clear_samples(groups[0], "train")
    second = journaled(tmp_path, segment_bytes=1_000)
    report = restore(second, tmp_path, then, later=True)
    assert (report.total, report.revived > 0) == (6, True)
    second.clear_samples(groups[1], "train")
    assert restored(tmp_path).sample_ids("train") == [*groups[2], *groups[0]]


def test_rows_that_come_back_twice_are_there_once_whatever_was_cleared_between(tmp_path: Path) -> None:
    first = journaled(tmp_path)
    first.register_partition("train", ["input_ids"], 4, ["train"], grpo_group_size=2)
    groups = [put_group(first, 0, once=True), put_group(first, 1, once=True)]
    first.clear_samples(groups[0], "train")
    then = first.journal_position()
    groups.append(put_group(first, 2, once=True))
    first.clear_samples(groups[1], "train")
    groups.append(put_group(first, 3, once=True))
    for _ in range(2):  # a second crash before there is a checkpoint
        client = journaled(tmp_path)
        restore(client, tmp_path, then, later=True)
        assert client.sample_ids("train") == [i for group in groups[1:] for i in group]
    report = client.partition_report("train")
    assert report.num_samples == 4 + report.rows, "what came later fits in"
    assert put_group(client, 0, once=True) == [], "it was trained on before"
    client.clear_samples(groups[1], "train")
    then = client.journal_position()
    client.clear_samples(groups[2], "train")
    last = journaled(tmp_path)
    restore(last, tmp_path, then, later=True)
    assert last.sample_ids("train") == [*groups[2], *groups[3]]
    assert put_group(last, 1, once=True) == []
    assert last.partition_report("train").num_samples == 4 + 4


def test_rows_that_are_not_to_be_kept_may_be_put_again_under_their_ids(tmp_path: Path) -> None:
    first = journaled(tmp_path)
    first.register_partition("train", ["input_ids"], 8, ["train"], grpo_group_size=2)
    ids = [put_group(first, number, once=True, v=number) for number in range(3)]
    client = journaled(tmp_path)
    report = restore(client, tmp_path, {}, later=True, keep=lambda tags: tags["v"] != 1)
    assert (report.unwanted, client.sample_ids("train")) == (2, [*ids[0], *ids[2]])
    again = put_group(client, 1, once=True, v=5, tokens=7)
    assert again == ids[1]
    last = journaled(tmp_path)
    restore(last, tmp_path, {}, later=True)
    assert last.sample_ids("train") == [*ids[0], *ids[2], *ids[1]]
    assert [row.tags["v"] for row in last.partition_report("train").unconsumed] == [0, 0, 2, 2, 5, 5]


def test_a_journal_of_the_same_folder_goes_on_after_a_restore(tmp_path: Path) -> None:
    first = journaled(tmp_path, segment_bytes=1_000)
    first.register_partition("train", ["input_ids"], 100, ["train"])
    groups = [put_group(first, number, tokens=100) for number in range(3)]
    second = journaled(tmp_path, segment_bytes=1_000)
    report = restore(second, tmp_path)
    assert (report.rows, report.revived) == ({"train": 6}, 0)
    size = sum(path.stat().st_size for path in tmp_path.glob("*/*"))
    second.clear_samples([*groups[0], *groups[1]], "train")
    for number in range(10, 14):
        second.clear_samples(put_group(second, number, tokens=100), "train")
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*")) < size, (
        "files of the first have gone, too"
    )
    assert restored(tmp_path).sample_ids("train") == groups[2]


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


def test_a_client_is_built_by_its_config(tmp_path: Path) -> None:
    journal = {"enabled": True, "folder": str(tmp_path / "j")}
    config = {
        "enabled": True,
        "journal": journal,
        "observability": {"enabled": True},
        "store_name": "journaled",
    }
    client = build_data_plane_client(config, bootstrap=True)
    other = build_data_plane_client(config, bootstrap=False)
    put_group(client, 0)
    other.clear_samples(["u0_g0"], "train")
    inside = journal_of(client)
    assert inside is not None
    assert len({segment.writer for segment in segments(tmp_path / "j")}) == 2
    assert restored(tmp_path / "j").sample_ids("train") == ["u0_g1"]
    client.close()
    client.close()
    with pytest.raises(ConfigError, match=r"data_plane\.journal\.folder is not set"):
        build_data_plane_client({"enabled": True, "journal": {"enabled": True}}, bootstrap=True)
    with pytest.raises(ConfigError, match="fewer than two files"):
        build_data_plane_client({"enabled": True, "journal": {"max_bytes": 5}}, bootstrap=True)


def test_what_the_model_puts_is_what_it_reads() -> None:
    client, model = LocalDataPlaneClient(), Model()
    client.put_samples(
        ["a_g0"], "free", columns_of(["a_g0"], ["input_ids", "score", "log"], 3), [{"made": 4}]
    )
    assert contents(client) == {"free": {"a_g0": {"input_ids": 3, "score": 3, "log": 3, "tag": 4}}}
    assert model.left() == {}

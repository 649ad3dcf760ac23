"""What a journal keeps on disk: which files go, what a full or bad disk does."""

import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from full_disk import files_of_at_most
from headrace.data_plane import build_data_plane_client, restore
from headrace.data_plane.adapters.local import LocalDataPlaneClient
from headrace.data_plane.journal.client import journal_of
from headrace.data_plane.journal.records import FRAME_BYTES, Written
from headrace.data_plane.journal.segments import Writer, records, segments
from headrace.errors import CapacityExceeded, ConfigError, DataPlaneError, WriteError
from journal_model import bytes_written, journaled, put_group, restored


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


def test_a_record_that_is_interrupted_leaves_no_part_of_it_before_the_next_ones(tmp_path: Path) -> None:
    writer = Writer(tmp_path, "w", segment_bytes=2**30, syncs=False)
    # It takes the system several calls.
    body = [memoryview(bytes(2048))] * 4000

    def append(at: int) -> None:
        writer.append(Written(at=at, partition="p", ids=[], columns=[], offsets=[]), body)

    start = time.monotonic()
    append(0)
    once_s, before = time.monotonic() - start, signal.getsignal(signal.SIGALRM)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    for part in range(40):
        with suppress(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, once_s * (0.2 + part / 50))
            append(1 + part)
            time.sleep(once_s)
    signal.signal(signal.SIGALRM, before)
    append(100)
    (segment,) = segments(tmp_path)
    size = segment.path(tmp_path).stat().st_size
    found = list(records(tmp_path, segment, 0, size))
    assert (found[0].head.at, found[-1].head.at, found[-1].end) == (0, 100, size)


def test_a_damaged_record_is_told_and_a_damaged_last_one_is_cut_off(tmp_path: Path) -> None:
    client = journaled(tmp_path)
    first, ends = put_group(client, 0, tokens=500), [bytes_written(tmp_path)]
    put_group(client, 1, tokens=500)
    ends.append(bytes_written(tmp_path))
    (file,) = tmp_path.glob("*/*")
    whole = bytearray(file.read_bytes()[: ends[1]])

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


def test_a_file_in_place_of_the_folder_is_named_and_leaves_no_store_open(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "journal"):
        config = {"enabled": True, "journal": {"enabled": True, "folder": str(folder)}}
        with pytest.raises(WriteError, match=f"{folder}: cannot write it") as told:
            build_data_plane_client(config, bootstrap=True)
        # The error holds the frames that it went through.
        build_data_plane_client({"enabled": True}, bootstrap=True).close()
        del told


def test_a_damaged_size_of_a_record_does_not_cut_off_those_behind_it(tmp_path: Path) -> None:
    client = journaled(tmp_path)
    for number in range(10):
        client.put_samples([f"s{number}"], "train", TensorDict({"x": torch.rand(1, 1000)}, [1]))
    (file,) = tmp_path.glob("*/*")
    whole, (segment,) = file.read_bytes(), segments(tmp_path)
    there = list(records(tmp_path, segment, 0, len(whole)))
    for record in there[1:-1]:
        for at in range(record.start, record.start + FRAME_BYTES):
            changed = bytearray(whole)
            changed[at] ^= 1
            file.write_bytes(changed)
            with pytest.raises(DataPlaneError, match=f"at byte {record.start} is damaged"):
                restored(tmp_path)
            assert file.stat().st_size == len(whole)
    *_, put, _ = there
    file.write_bytes(whole[: put.end - 5])
    assert restored(tmp_path).sample_ids("train") == [f"s{number}" for number in range(9)]


def test_when_a_file_goes_the_disk_says_what_the_files_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, synced, copies = tmp_path / "journal", dict[str, int](), list[tuple[Path, Path]]()
    fsync, unlink = os.fsync, Path.unlink

    def synced_up_to(descriptor: int) -> None:
        fsync(descriptor)
        synced[os.readlink(f"/proc/self/fd/{descriptor}")] = os.fstat(descriptor).st_size

    def then_the_power_fails(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok=missing_ok)
        whole, disk = tmp_path / f"whole{len(copies)}", tmp_path / f"disk{len(copies)}"
        shutil.copytree(folder, whole)
        shutil.copytree(folder, disk)
        for one in folder.glob("*/*.journal"):
            os.truncate(disk / one.relative_to(folder), synced.get(str(one), 0))
        copies.append((whole, disk))

    monkeypatch.setattr(os, "fsync", synced_up_to)
    monkeypatch.setattr(Path, "unlink", then_the_power_fails)
    client = journaled(folder, segment_bytes=2000, fsync="groups")
    client.register_partition("train", ["input_ids"], 100, ["train"], grpo_group_size=2)
    for number in range(40):
        client.clear_samples(put_group(client, number, tokens=number), "train")
    monkeypatch.undo()
    assert len(copies) > 3
    for whole, disk in copies:
        one, other = restored(whole), restored(disk)
        assert one.sample_ids("train") == other.sample_ids("train")
        assert other.partition_report("train").num_samples == 100


def test_a_client_that_writes_parts_of_groups_only_does_not_remember_all(tmp_path: Path) -> None:
    client = journaled(tmp_path, fsync="groups")
    client.register_partition("train", [], 20_000, ["train"], grpo_group_size=2)
    for first in range(0, 10_000, 1000):
        client.put_samples([f"u{number}_g0" for number in range(first, first + 1000)], "train")
    assert len(client._parts["train"]) <= 4096


OTHER_STORE = """
import sys
from headrace.data_plane import build_data_plane_client

journal = {"enabled": True, "folder": sys.argv[1]}
store = build_data_plane_client({"enabled": True, "journal": journal}, bootstrap=True)
print("open", flush=True)
sys.stdin.read()
"""


def test_a_second_live_store_is_refused_the_folder_of_a_first(tmp_path: Path) -> None:
    config = {"enabled": True, "journal": {"enabled": True, "folder": str(tmp_path / "journal")}}
    command = [sys.executable, "-c", OTHER_STORE, str(tmp_path / "journal")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        refusal = (
            rf"data_plane\.journal\.folder=.*journal: process {other.pid} is writing there; wait .* or set"
        )
        with pytest.raises(ConfigError, match=refusal):
            build_data_plane_client(config, bootstrap=True)
        other.kill()
    with closing(build_data_plane_client(config, bootstrap=True)):
        with pytest.raises(ConfigError, match=rf"process {os.getpid()} is writing there"):
            build_data_plane_client({**config, "store_name": "second"}, bootstrap=True)
        build_data_plane_client(config, bootstrap=False).close()
    build_data_plane_client(config, bootstrap=True).close()


def test_a_client_that_is_forgotten_without_being_closed_keeps_no_file_open(tmp_path: Path) -> None:
    client = journaled(tmp_path)
    client.register_partition("train", ["input_ids"], 8, ["train"], grpo_group_size=2)
    put_group(client, 1)
    held = [file for file in Path("/proc/self/fd").iterdir() if str(tmp_path) in os.path.realpath(file)]
    assert len(held) == 1
    del client
    gc.collect()
    assert not held[0].exists() or str(tmp_path) not in os.path.realpath(held[0])

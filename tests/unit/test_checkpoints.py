"""Checkpoints are whole, ranked, pruned, and survive a crash at any point; so are single files."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from full_disk import files_of_at_most
from headrace.algorithms.observer import BEST_BY, SAMPLED_ACCURACY, SAMPLED_REWARD
from headrace.config import CheckpointingConfig
from headrace.errors import ConfigError, WriteError
from headrace.utils import atomic
from headrace.utils.checkpoints import CheckpointInfo, CheckpointManager, read_checkpoint

METRIC = "validation/accuracy"


def manager(folder: Path, *, keep: int | None = 2, higher: bool = True) -> CheckpointManager:
    return CheckpointManager(folder, keep_top_k=keep, metric=METRIC, higher_is_better=higher)


def save(checkpoints: CheckpointManager, step: int, accuracy: float | None) -> CheckpointInfo:
    with checkpoints.writing(step) as draft:
        (draft / "weights.bin").write_bytes(bytes([step]))
    metrics = {} if accuracy is None else {METRIC: accuracy}
    return checkpoints.commit(step, metrics, {"position": step * 32})


def write_half(directory: AbstractContextManager[Path]) -> None:
    with directory as draft:
        (draft / "weights").write_bytes(b"half")
        raise OSError("disk full")


def steps(checkpoints: CheckpointManager) -> list[int]:
    return [info.step for info in checkpoints.list()]


def test_a_checkpoint_reads_back_with_files_metrics_and_state(tmp_path: Path) -> None:
    written = save(manager(tmp_path), 80, 0.94)
    assert written.path == tmp_path / "step_000080"
    found = manager(tmp_path).latest()
    assert found == CheckpointInfo(80, written.path, {METRIC: 0.94}, {"position": 2560})
    assert (written.path / "weights.bin").read_bytes() == b"\x50"


def test_nothing_is_there_before_the_first(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path / "none")
    assert (steps(checkpoints), checkpoints.latest(), checkpoints.best()) == ([], None, None)


def test_the_best_k_and_the_newest_stay(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path, keep=2)
    for step, accuracy in ((10, 0.9), (20, 0.5), (30, 0.8), (40, 0.1), (50, 0.2)):
        save(checkpoints, step, accuracy)
    assert steps(checkpoints) == [10, 30, 50]
    assert checkpoints.best().step == 10  # type: ignore[union-attr]
    assert checkpoints.latest().step == 50  # type: ignore[union-attr]


def test_lower_can_be_better(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path, keep=1, higher=False)
    for step, loss in ((1, 0.9), (2, 0.1), (3, 0.5)):
        save(checkpoints, step, loss)
    assert steps(checkpoints) == [2, 3]


def test_a_missing_metric_or_one_that_is_not_a_number_ranks_last(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path, keep=1)
    for step, accuracy in ((1, None), (2, 0.0), (3, math.nan), (4, None)):
        save(checkpoints, step, accuracy)
    assert checkpoints.best().step == 2  # type: ignore[union-attr]
    assert steps(checkpoints) == [2, 4]


def test_of_several_metrics_the_first_that_was_measured_ranks_all(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path, keep_top_k=None, metric=(METRIC, "validation/reward"))
    for step, metrics in enumerate([{"validation/reward": 0.2}, {"validation/reward": 0.9}, {}], start=1):
        with checkpoints.writing(step):
            pass
        checkpoints.commit(step, metrics, {})
    assert checkpoints.best().step == 2  # type: ignore[union-attr]
    save(checkpoints, 4, 0.1)
    assert checkpoints.best().step == 4  # type: ignore[union-attr]


def test_where_only_sampled_completions_are_measured_the_best_is_best_at_these(tmp_path: Path) -> None:
    cfg = CheckpointingConfig(keep_top_k=1)
    checkpoints = CheckpointManager.configured(tmp_path, cfg, BEST_BY)
    for step, accuracy in enumerate((0.2, 0.9, 0.4, 0.3), start=1):
        with checkpoints.writing(step):
            pass
        checkpoints.commit(step, {SAMPLED_ACCURACY: accuracy, SAMPLED_REWARD: 1 - accuracy}, {})
    assert checkpoints.best().step == 2  # type: ignore[union-attr]
    assert steps(checkpoints) == [2, 4]


def test_of_equal_checkpoints_the_newer_is_better(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path, keep=1)
    for step in (1, 2):
        save(checkpoints, step, 0.5)
    assert steps(checkpoints) == [2]


def test_none_keeps_all(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path, keep=None)
    for step in range(1, 6):
        save(checkpoints, step, 0.1 * step)
    assert steps(checkpoints) == [1, 2, 3, 4, 5]


def test_a_step_written_twice_holds_the_second(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path)
    save(checkpoints, 7, 0.1)
    with checkpoints.writing(7) as draft:
        (draft / "other.bin").write_bytes(b"x")
    checkpoints.commit(7, {METRIC: 0.2}, {})
    assert steps(checkpoints) == [7]
    assert sorted(p.name for p in (tmp_path / "step_000007").iterdir()) == ["checkpoint.json", "other.bin"]
    assert [p.name for p in tmp_path.iterdir()] == ["step_000007"]


def test_an_error_while_writing_leaves_nothing(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path)
    with pytest.raises(WriteError, match=r"step_000001: cannot write it \(disk full\)"):
        write_half(checkpoints.writing(1))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match=r"commit\(1\) without files"):
        checkpoints.commit(1, {}, {})


def test_a_checkpoint_of_another_step_than_its_directory_is_named(tmp_path: Path) -> None:
    info = save(manager(tmp_path), 80, 0.5)
    moved = info.path.rename(tmp_path / "step_000009")
    with pytest.raises(ConfigError, match=r"checkpoint.json: is of step 80, not of step_000009; remove"):
        manager(tmp_path).latest()
    copied = read_checkpoint(moved.rename(tmp_path / "my_copy"))
    assert copied is not None
    assert copied.step == 80


def test_a_draft_that_was_not_committed_is_no_checkpoint(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path)
    save(checkpoints, 1, 0.5)
    with checkpoints.writing(2) as draft:
        (draft / "weights.bin").write_bytes(b"x")
    assert steps(manager(tmp_path)) == [1]
    atomic.remove_partials(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]


def test_other_folders_and_files_are_no_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "step_000003").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "step_000004").write_text("a file")
    assert steps(manager(tmp_path)) == []
    assert read_checkpoint(tmp_path / "step_000003") is None


WRONG = [
    "{",
    "[]",
    '{"step": 3}',
    '{"step": "3", "metrics": {}, "state": {}}',
    '{"step": 3, "metrics": {"m": NaN}, "state": {}}',
    '{"step": 3, "metrics": [], "state": {}}',
    "\x00",
]


@pytest.mark.parametrize("content", WRONG)
def test_a_damaged_checkpoint_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "step_000003").mkdir()
    (tmp_path / "step_000003" / "checkpoint.json").write_text(content)
    with pytest.raises(ConfigError, match=r"step_000003/checkpoint\.json.*: damaged.*remove"):
        manager(tmp_path).latest()


KILLED_WHILE_SAVING = """
import sys
from pathlib import Path
from headrace.utils.checkpoints import CheckpointManager
checkpoints = CheckpointManager(Path(sys.argv[1]), keep_top_k=1, metric="m")
step = 0
while True:
    step += 1
    with checkpoints.writing(step) as draft:
        for i in range(20):
            (draft / f"part{i}").write_bytes(bytes(20_000))
    checkpoints.commit(step, {}, {})
    if step == 3:
        print("ready", flush=True)
"""


@pytest.mark.parametrize("delay_s", [0.0, 0.013, 0.029, 0.051])
def test_a_killed_process_leaves_whole_checkpoints_only(tmp_path: Path, delay_s: float) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED_WHILE_SAVING, str(tmp_path)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    time.sleep(delay_s)
    process.send_signal(signal.SIGKILL)
    process.wait()
    atomic.remove_partials(tmp_path)
    found = manager(tmp_path).list()
    assert found
    for info in found:
        parts = [p for p in info.path.iterdir() if p.name != "checkpoint.json"]
        assert len(parts) == 20
        assert all(p.stat().st_size == 20_000 for p in parts)
    assert {p.name for p in tmp_path.iterdir()} == {info.path.name for info in found}


def test_a_replacement_that_a_crash_cut_between_its_two_renames_is_undone(tmp_path: Path) -> None:
    save(manager(tmp_path), 5, 0.5)
    # The state after `rename(step_000005, backup)` and before `rename(draft, step_000005)`.
    os.rename(tmp_path / "step_000005", tmp_path / ".step_000005.headrace-old")
    assert steps(manager(tmp_path)) == []
    atomic.remove_partials(tmp_path)
    assert steps(manager(tmp_path)) == [5]


def test_a_backup_beside_its_replacement_is_removed(tmp_path: Path) -> None:
    save(manager(tmp_path), 5, 0.5)
    (tmp_path / ".step_000005.headrace-old").mkdir()
    atomic.remove_partials(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step_000005"]


def test_hidden_files_of_others_are_not_swept(tmp_path: Path) -> None:
    for name in (".bashrc.old", ".cache.tmp", ".x"):
        (tmp_path / name).write_text("mine")
    atomic.remove_partials(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_file_is_replaced_whole_and_keeps_ordinary_permissions(tmp_path: Path) -> None:
    path, plain = tmp_path / "a.json", tmp_path / "plain"
    plain.write_text("x")
    atomic.write_text(path, "old")
    atomic.write_text(path, "new é")
    assert path.read_text(encoding="utf-8") == "new é"
    assert path.stat().st_mode == plain.stat().st_mode
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "plain"]


def test_a_file_that_cannot_be_written_keeps_its_old_content(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    atomic.write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        atomic.write_text(path, "\ud800")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o007, 0o660), (0o077, 0o600)])
def test_files_of_tensors_may_be_read_by_whom_the_umask_says(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        with atomic.writing_directory(tmp_path / "model") as draft:
            (draft / "inner").mkdir()
            for name in ("a.safetensors", "inner/b.safetensors"):
                save_file({"x": torch.ones(1)}, draft / name)
            (draft / "config.json").write_text("{}")
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "model").rglob("*") if path.is_file()]
    assert {(path.name, path.stat().st_mode & 0o777) for path in files} == {
        ("a.safetensors", mode),
        ("b.safetensors", mode),
        ("config.json", mode),
    }


def test_a_full_disk_is_an_error_that_names_the_path_and_leaves_what_was_there(tmp_path: Path) -> None:
    old = save(manager(tmp_path), 1, 0.5)
    (tmp_path / "log").write_text("x" * 200 + "\n")
    writes = {
        "a.json": lambda: atomic.write_text(tmp_path / "a.json", "x" * 200),
        "log": lambda: atomic.append_line(tmp_path / "log", "more"),
        "folder": lambda: write_directory(tmp_path / "folder"),
        "step_000002": lambda: save_much(manager(tmp_path)),
    }
    for name, write in writes.items():
        with files_of_at_most(100), pytest.raises(WriteError) as caught:
            write()
        assert str(caught.value).startswith(f"{tmp_path / name}: cannot write it (File too large); make room")
    assert {p.name for p in tmp_path.iterdir()} == {"step_000001", "log"}
    assert manager(tmp_path).latest() == old


def save_much(checkpoints: CheckpointManager) -> None:
    with checkpoints.writing(2) as draft:
        (draft / "weights.bin").write_bytes(bytes(200))


def write_directory(path: Path) -> None:
    with atomic.writing_directory(path) as draft:
        (draft / "weights.bin").write_bytes(bytes(200))


def test_lines_that_several_processes_append_stay_whole(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    source = (
        "import sys, json\nfrom pathlib import Path\nfrom headrace.utils.atomic import append_line\n"
        "for i in range(200): append_line(Path(sys.argv[1]), json.dumps({'from': sys.argv[2], 'x': 'y' * 5000}))"
    )
    writers = [subprocess.Popen([sys.executable, "-c", source, str(log), str(n)]) for n in range(3)]
    assert [w.wait() for w in writers] == [0, 0, 0]
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert sorted(line["from"] for line in lines) == ["0"] * 200 + ["1"] * 200 + ["2"] * 200


def test_a_directory_is_published_when_its_block_ends_and_not_before(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model"
    with atomic.writing_directory(target) as draft:
        (draft / "weights").write_bytes(b"1")
        assert not target.exists()
    assert (target / "weights").read_bytes() == b"1"
    with pytest.raises(OSError, match="disk full"):
        write_half(atomic.writing_directory(target))
    assert (target / "weights").read_bytes() == b"1"
    assert [p.name for p in target.parent.iterdir()] == ["model"]

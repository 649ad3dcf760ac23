"""One run per directory: what is created, refused, continued, replaced, and never touched."""

import fcntl
import json
import os
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace.utils.checkpoints import CheckpointManager
from headrace.utils.recipe import read_resolved
from headrace.utils.run_directory import RunDirectory
from toy_run import toy_state

# What `str.splitlines` takes for ends of lines stands in JSON strings as it is.
TEXT = "é\u2028a\u2029b\x85c\x0bd\x1ce\r"
RECIPE = "seed: 0\nrun_dir: x\npolicy: {model: {path: m}}\ngrpo: {max_num_steps: 80}\n"


def start(path: Path, recipe: str = RECIPE, **options: bool) -> RunDirectory:
    run = RunDirectory.open(path, recipe_text=recipe, **options)
    with ExitStack() as on_error:
        on_error.callback(run.close)
        run.begin()
        on_error.pop_all()
    return run


def refusal(path: Path, recipe: str = RECIPE, **options: bool) -> str:
    with pytest.raises(ConfigError) as caught:
        start(path, recipe, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def run_with_steps(path: Path, steps: int, *, checkpoint_at: int | None = None) -> None:
    """Leave what a run of some steps leaves."""
    with start(path) as run:
        run.append_metrics({"kind": "phase", "phase": "warm_start", "step": 400, "loss": 1.0})
        run.append_metrics({"kind": "validation", "step": 0, "validation/accuracy": 0.4})
        for step in range(1, steps + 1):
            run.append_metrics({"kind": "step", "step": step, "reward/mean": step / 10})
            run.append_sample({"step": step, "split": "train", "answer": TEXT})
        run.tensorboard_dir.mkdir(exist_ok=True)
        (run.tensorboard_dir / "events.out.tfevents.1.host").write_bytes(b"x")
        if checkpoint_at is not None:
            checkpoints = CheckpointManager(run.checkpoints_dir, keep_top_k=2, metric="m")
            with checkpoints.writing(checkpoint_at) as draft:
                (draft / "weights").write_bytes(b"w")
            checkpoints.commit(checkpoint_at, {}, toy_state(checkpoint_at, read_resolved(RECIPE)))


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def test_a_fresh_directory_gets_its_config_and_folders(tmp_path: Path) -> None:
    with start(tmp_path / "a" / "b") as run:
        assert run.resume_from is None
        assert run.config_path.read_text() == RECIPE
        assert run.checkpoints_dir.is_dir()
        run.write_summary({"steps": 3, "val_accuracy_after": 0.5})
        assert json.loads(run.summary_path.read_text()) == {"steps": 3, "val_accuracy_after": 0.5}


def test_a_tilde_is_the_home_directory(tmp_path: Path) -> None:
    source = (
        "from headrace.utils.run_directory import RunDirectory\n"
        "RunDirectory.open('~/runs/a', recipe_text='seed: 0').close()"
    )
    subprocess.run([sys.executable, "-c", source], env={**os.environ, "HOME": str(tmp_path)}, check=True)
    assert (tmp_path / "runs" / "a" / ".headrace-run").exists()


def test_a_home_directory_that_nobody_has_is_named() -> None:
    with pytest.raises(
        ConfigError, match="run_dir=~nosuchuser/run: no home directory is known for '~nosuchuser'"
    ):
        RunDirectory.open("~nosuchuser/run", recipe_text=RECIPE)


def test_a_run_is_continued_from_its_newest_checkpoint_and_later_lines_are_cut(tmp_path: Path) -> None:
    run_with_steps(tmp_path, 7, checkpoint_at=5)
    with start(tmp_path) as run:
        assert run.resume_from is not None
        assert run.resume_from.step == 5
        records = lines(run.metrics_path)
        assert [r["step"] for r in records if r["kind"] == "step"] == [1, 2, 3, 4, 5]
        assert [r["kind"] for r in records[:2]] == ["phase", "validation"]
        assert [r["step"] for r in lines(run.samples_path)] == [1, 2, 3, 4, 5]
        assert {r["answer"] for r in lines(run.samples_path)} == {TEXT}


@pytest.mark.parametrize("validated", [False, True])
def test_a_run_that_goes_on_within_its_warm_start_cuts_what_comes_again(
    tmp_path: Path, validated: bool
) -> None:
    first = {"validation/accuracy": 0.4} if validated else None
    state = toy_state(0, read_resolved(RECIPE))
    state["progress"] |= {"warm_start_steps": 2, "first_validation": first}
    with start(tmp_path) as run:
        for step in (1, 2, 3, 4):
            run.append_metrics({"kind": "phase", "phase": "warm_start", "step": step})
        run.append_metrics({"kind": "validation", "step": 0, "validation/accuracy": 0.4})
        run.append_metrics({"kind": "step", "step": 1})
        run.append_sample({"step": 0, "split": "validation", "answer": TEXT})
        checkpoints = CheckpointManager(run.checkpoints_dir, keep_top_k=2, metric="m")
        with checkpoints.writing(0):
            pass
        checkpoints.commit(0, {}, state)
    with start(tmp_path) as run:
        left = [(r["kind"], r["step"]) for r in lines(run.metrics_path)]
        assert left == [("phase", 1), ("phase", 2), *([("validation", 0)] if validated else [])]
        assert len(lines(run.samples_path)) == (1 if validated else 0)


def test_a_line_that_a_crash_cut_short_is_dropped(tmp_path: Path) -> None:
    run_with_steps(tmp_path, 5, checkpoint_at=5)
    with open(tmp_path / "metrics.jsonl", "a") as log:
        log.write('{"kind": "step", "st')
    with start(tmp_path) as run:
        run.append_metrics({"kind": "step", "step": 6})
        assert [r["step"] for r in lines(run.metrics_path)][-2:] == [5, 6]


def test_a_line_that_is_damaged_is_named_and_nothing_is_cut(tmp_path: Path) -> None:
    run_with_steps(tmp_path, 7, checkpoint_at=5)
    for name, fault in (
        ("samples.jsonl", "oops"),
        ("metrics.jsonl", "[1]"),
        ("metrics.jsonl", '{"kind": "step"}'),
    ):
        log = tmp_path / name
        whole = log.read_text()
        first, _, rest = whole.partition("\n")
        log.write_text(f"{first}\n{fault}\n{rest}")
        message = refusal(tmp_path)
        assert message.startswith(f"{log}, line 2: ")
        assert "mend or remove the line, or set overwrite=true" in message
        assert log.read_text() == f"{first}\n{fault}\n{rest}"
        log.write_text(whole)
    assert len(lines(tmp_path / "samples.jsonl")) == 7, "nothing is cut before all can be"


def test_keys_that_changed_since_are_told_and_whether_they_matter(tmp_path: Path) -> None:
    run_with_steps(tmp_path, 3, checkpoint_at=3)
    with start(tmp_path, RECIPE.replace("80", "120").replace("run_dir: x", "run_dir: y")) as run:
        assert [(str(change), change.matters) for change in run.changes] == [
            ("grpo.max_num_steps 80 -> 120", True),
            ("run_dir x -> y", False),
        ]


def test_what_changed_is_told_against_the_checkpoint_whatever_config_yaml_says(tmp_path: Path) -> None:
    run_with_steps(tmp_path, 3, checkpoint_at=3)
    (tmp_path / "config.yaml").write_text("a: [damaged\n")
    with start(tmp_path, RECIPE.replace("80", "120")) as run:
        assert [change.key for change in run.changes] == ["grpo.max_num_steps"]
        assert run.config_path.read_text() == RECIPE.replace("80", "120")


@pytest.mark.parametrize(
    ("old", "new", "key"), [("seed: 0", "seed: 1", "seed"), ("path: m", "path: n", "policy.model.path")]
)
def test_a_checkpoint_of_another_seed_or_model_is_not_resumed_unless_that_is_allowed(
    tmp_path: Path, old: str, new: str, key: str
) -> None:
    run_with_steps(tmp_path, 3, checkpoint_at=3)
    message = refusal(tmp_path, RECIPE.replace(old, new))
    assert message.startswith(f"{key} differs")
    for part in (f"({old.split()[1]} -> {new.split()[1]})", "overwrite=true", "allow_changes=true"):
        assert part in message
    assert len(lines(tmp_path / "metrics.jsonl")) == 5
    assert (tmp_path / "config.yaml").read_text() == RECIPE
    with start(tmp_path, RECIPE.replace(old, new), allow_changes=True) as run:
        assert [change.key for change in run.changes] == [key]


def test_the_path_of_the_data_may_change_since_its_content_decides(tmp_path: Path) -> None:
    recipe = RECIPE + "env: {kind: dataset, path: a, match: exact}\n"
    state = toy_state(3, read_resolved(recipe))
    with start(tmp_path, recipe) as run:
        checkpoints = CheckpointManager(run.checkpoints_dir, keep_top_k=2, metric="m")
        with checkpoints.writing(3):
            pass
        checkpoints.commit(3, {}, state)
    with start(tmp_path, recipe.replace("path: a", "path: b")) as run:
        assert [str(change) for change in run.changes] == ["env.path a -> b"]
    assert refusal(tmp_path, recipe.replace("exact", "contains")).startswith("env.match differs")


STATE = toy_state(3, {"seed": 0})
DAMAGED_STATES: dict[str, tuple[Any, str]] = {
    "nothing": ({}, "state.progress: Field required"),
    "no progress": ({**STATE, "progress": {}}, "state.progress.step: Field required"),
    "a step that is text": (
        {**STATE, "progress": {**STATE["progress"], "step": "3"}},
        "state.progress.step: ",
    ),
    "a negative step": ({**STATE, "progress": {**STATE["progress"], "step": -3}}, "state.progress.step: "),
    "another step": (
        {**STATE, "progress": {**STATE["progress"], "step": 0}},
        "progress.step is 0 in the checkpoint of",
    ),
    "no digest": (
        {**STATE, "prompts": {"train": {"prompts": 8}}},
        "state.prompts.train.digest: Field required",
    ),
    "a key too many": ({**STATE, "more": 1}, "state.more: "),
}


@pytest.mark.parametrize("name", DAMAGED_STATES)
def test_a_state_that_a_run_cannot_go_on_from_is_named(tmp_path: Path, name: str) -> None:
    run_with_steps(tmp_path, 3, checkpoint_at=3)
    state, fault = DAMAGED_STATES[name]
    file = tmp_path / "checkpoints" / "step_000003" / "checkpoint.json"
    file.write_text(json.dumps({"step": 3, "metrics": {}, "state": state}))
    message = refusal(tmp_path)
    assert message.startswith(f"{file}: damaged, ")
    assert fault in message
    assert f"remove the directory {file.parent}" in message
    assert len(lines(tmp_path / "metrics.jsonl")) == 5


def test_a_run_without_a_checkpoint_is_not_replaced_unasked(tmp_path: Path) -> None:
    run_with_steps(tmp_path, 3)
    message = refusal(tmp_path)
    assert f"run_dir={tmp_path}" in message
    assert "no checkpoint" in message
    assert "overwrite=true" in message
    assert len(lines(tmp_path / "metrics.jsonl")) == 5


def test_a_run_is_not_continued_when_resume_is_off(tmp_path: Path) -> None:
    run_with_steps(tmp_path, 3, checkpoint_at=3)
    assert "resume=false" in refusal(tmp_path, resume=False)


def test_a_run_that_failed_before_its_first_step_is_in_nobodys_way(tmp_path: Path) -> None:
    start(tmp_path).close()
    with start(tmp_path, RECIPE.replace("seed: 0", "seed: 1")) as run:
        assert run.resume_from is None
        assert "seed: 1" in run.config_path.read_text()


def test_overwrite_removes_what_headrace_wrote_and_nothing_else(tmp_path: Path) -> None:
    run_with_steps(tmp_path, 3, checkpoint_at=3)
    for name in ("notes.txt", "tensorboard/notes.txt", "checkpoints/notes.txt"):
        (tmp_path / name).write_text("mine")
    with start(tmp_path, overwrite=True) as run:
        assert run.resume_from is None
        assert not run.metrics_path.exists()
        assert not run.samples_path.exists()
        left = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()}
    assert left == {
        ".headrace-run",
        ".headrace-lock",
        "config.yaml",
        "notes.txt",
        "tensorboard/notes.txt",
        "checkpoints/notes.txt",
    }


def test_overwrite_removes_only_names_of_the_form_that_headrace_writes(tmp_path: Path) -> None:
    run_with_steps(tmp_path, 3, checkpoint_at=3)
    own = (
        "journal/driver-1/000001.journal",
        "journal/keep.json",
        "router_trace/step_000001.safetensors",
        "reference/model-00001-of-00002.safetensors",
        "reference/model.safetensors.index.json",
        "reference/config.json",
        "reference/tokenizer_config.json",
        "reference/tokenizer.json",
        "reference/adapter_model.safetensors",
    )
    mine = (
        "journal/2024-05-01.md",
        "journal/may/notes.journal",
        "checkpoints/step_final/weights",
        "checkpoints/old/step_000001",
        "router_trace/step_mine.safetensors",
    )
    for name in (*own, *mine):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    start(tmp_path, overwrite=True).close()
    assert [name for name in own if (tmp_path / name).exists()] == []
    assert [name for name in mine if not (tmp_path / name).exists()] == []
    assert not (tmp_path / "journal" / "driver-1").exists()


@pytest.mark.parametrize(
    ("name", "overwrite"),
    [("reference/notes.txt", True), ("report.html/index.html", True), ("summary.json/a", False)],
)
def test_what_would_go_with_a_run_and_is_not_of_headrace_is_named_and_nothing_is_removed(
    tmp_path: Path, name: str, overwrite: bool
) -> None:
    run_with_steps(tmp_path, 3, checkpoint_at=3)
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    shown = name if name.startswith("reference") else name.partition("/")[0]
    assert f"holds {shown} that headrace did not write" in refusal(tmp_path, overwrite=overwrite)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_files_that_headrace_did_not_write_are_never_replaced(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "config.yaml").write_text("mine")
    message = refusal(tmp_path, overwrite=overwrite)
    assert "holds config.yaml that headrace did not write" in message
    assert "set another run_dir" in message
    assert (tmp_path / "config.yaml").read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize("path", ["", " "])
def test_an_empty_run_dir_is_not_the_working_directory(path: str) -> None:
    with pytest.raises(ConfigError, match="run_dir is empty"):
        RunDirectory.open(path, recipe_text=RECIPE)


def test_a_directory_with_other_files_can_be_used(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    start(tmp_path).close()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_link_among_the_checkpoints_is_removed_and_not_followed(tmp_path: Path) -> None:
    kept = tmp_path / "elsewhere"
    kept.mkdir()
    (kept / "weights").write_text("w")
    run_dir = tmp_path / "run"
    run_with_steps(run_dir, 3, checkpoint_at=3)
    (run_dir / "checkpoints" / "step_000009").symlink_to(kept)
    start(run_dir, overwrite=True).close()
    assert (kept / "weights").read_text() == "w"
    assert list((run_dir / "checkpoints").iterdir()) == []


@pytest.mark.parametrize("place", ["a_file/run", "/proc/headrace-run"])
def test_a_directory_that_cannot_be_written_is_named_with_the_remedy(tmp_path: Path, place: str) -> None:
    (tmp_path / "a_file").write_text("x")
    message = refusal(tmp_path / place)
    assert f"run_dir={tmp_path / place}: cannot write there" in message
    assert "set run_dir to a writable directory" in message


HOLDER = """
import sys
from headrace.utils.run_directory import RunDirectory
with RunDirectory.open(sys.argv[1], recipe_text="seed: 0"):
    print("open", flush=True)
    sys.stdin.read()
"""


def test_two_processes_cannot_write_into_one_directory(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "open\n"
    message = refusal(tmp_path, overwrite=True)
    assert f"process {holder.pid} is writing there" in message
    holder.kill()
    holder.communicate()
    with start(tmp_path):
        assert (tmp_path / ".headrace-lock").read_text() == f"{os.getpid()}\n"


def test_a_look_at_the_lock_keeps_no_run_from_starting(tmp_path: Path) -> None:
    start(tmp_path).close()
    with (tmp_path / ".headrace-lock").open() as look:
        fcntl.flock(look, fcntl.LOCK_SH)
        soon = threading.Timer(0.05, fcntl.flock, (look, fcntl.LOCK_UN))
        soon.start()
        start(tmp_path, overwrite=True).close()
        soon.join()


def test_without_file_locks_a_run_starts_with_a_warning(tmp_path: Path) -> None:
    source = (
        "import sys\nsys.modules['fcntl'] = None\n"
        "from headrace.utils.run_directory import RunDirectory\n"
        "with RunDirectory.open(sys.argv[1], recipe_text='seed: 0') as run: run.begin()"
    )
    done = subprocess.run([sys.executable, "-c", source, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "no file locks; start no second run in this directory" in done.stderr
    assert (tmp_path / "config.yaml").read_text() == "seed: 0"


def test_the_lock_goes_when_the_directory_is_closed_or_refused(tmp_path: Path) -> None:
    run = start(tmp_path)
    assert "is writing there" in refusal(tmp_path)
    run.close()
    run.close()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert "no checkpoint" in refusal(tmp_path)
    start(tmp_path, overwrite=True).close()

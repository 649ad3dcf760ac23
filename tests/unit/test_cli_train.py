"""`headrace train` and `headrace eval` with a real model: results, files, Ctrl-C, going on, and refusals."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from headrace.cli import app
from headrace.progress import make_console
from headrace.training import try_results
from headrace.utils.recipe import dump_recipe, load_recipe
from headrace.utils.run_directory import RunDirectory
from tiny_recipe import tiny_recipe

STEPS = 6
_TIMED = ("_s", "/seconds")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    path = folder / "recipe.yaml"
    loop = {"max_num_steps": STEPS}
    path.write_text(dump_recipe(tiny_recipe(folder / "run", grpo=loop, validation={"period": 2})))
    return path


@pytest.fixture(scope="module")
def finished(recipe: Path) -> tuple[Path, str]:
    """Train to the end once; return the run directory and what was printed."""
    result = headrace_cli("train", recipe, "logging.tensorboard=true")
    assert result.exit_code == 0, result.output
    return Path(load_recipe(recipe).run_dir), result.stdout


def headrace_cli(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "100"})


def step_metrics(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Return the metrics of each step but for those that measure time."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        r["step"]: {k: v for k, v in r.items() if not k.startswith("time_s/") and not k.endswith(_TIMED)}
        for r in records
        if r["kind"] == "step"
    }


def test_a_run_prints_accuracy_before_and_after_and_where_time_and_bytes_went(
    finished: tuple[Path, str],
) -> None:
    run_dir, printed = finished
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert summary["train_seconds"] > 0
    for label, name in (("greedy", "val_accuracy"), ("sampled", "val_accuracy_sampled")):
        before, after = summary[f"{name}_before"], summary[f"{name}_after"]
        assert re.search(rf"{label} +{before:.1%} +{after:.1%}", printed)
    assert re.search(rf"rollout .* {STEPS} ", printed)
    assert re.search(r"input_ids .* B", printed)
    assert "\x1b" not in printed


def test_a_run_directory_has_everything(finished: tuple[Path, str], recipe: Path) -> None:
    run_dir, _ = finished
    assert load_recipe(run_dir / "config.yaml") == load_recipe(recipe, ["logging.tensorboard=true"])
    assert list(step_metrics(run_dir)) == list(range(1, STEPS + 1))
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert {s["step"] for s in samples} == set(range(1, STEPS + 1))
    assert list((run_dir / "tensorboard").iterdir())
    assert (run_dir / "checkpoints" / f"step_{STEPS:06d}" / "checkpoint.json").exists()
    for name in ("timings.txt", "report.png", "reward.png"):
        assert (run_dir / name).stat().st_size > 0
    assert {p.name for p in run_dir.rglob(".*")} == {".headrace-run", ".headrace-lock"}


def test_a_finished_run_is_not_run_again(finished: tuple[Path, str], recipe: Path) -> None:
    run_dir, _ = finished
    before = (run_dir / "metrics.jsonl").read_text()
    result = headrace_cli("train", recipe)
    assert result.exit_code == 0
    assert f"going on after step {STEPS}" in result.stdout
    assert "all its steps are made; raise grpo.max_num_steps to go on" in result.stdout
    assert (run_dir / "metrics.jsonl").read_text() == before
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == STEPS


@pytest.mark.parametrize("more", [0, 1])
def test_a_run_goes_on_and_ends_well_where_nothing_can_be_printed(
    finished: tuple[Path, str], tmp_path: Path, more: int
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(finished[0], run_dir)
    command = [sys.executable, "-m", "headrace", "train", str(run_dir / "config.yaml"), f"run_dir={run_dir}"]
    with open("/dev/full", "w") as nowhere:
        done = subprocess.run(
            [*command, f"grpo.max_num_steps={STEPS + more}"],
            stdout=nowhere,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "COLUMNS": "5"},
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == STEPS + more
    assert len((run_dir / "timings.txt").read_text().splitlines()[2].split()[0]) > 5


def test_a_terminal_without_our_characters_gets_a_question_mark_for_each(
    finished: tuple[Path, str], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(finished[0], run_dir)
    command = [sys.executable, "-m", "headrace", "train", str(run_dir / "config.yaml"), f"run_dir={run_dir}"]
    done = subprocess.run(
        command, capture_output=True, check=False, env={**os.environ, "PYTHONIOENCODING": "ascii"}
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"float32 ? loop" in done.stdout


@pytest.mark.parametrize("columns", ["1", "5"])
def test_a_terminal_too_narrow_for_a_table_gets_it_all_the_same(
    finished: tuple[Path, str], columns: str
) -> None:
    for command in (["train", finished[0] / "config.yaml"], ["report", finished[0]]):
        arguments = [str(part) for part in command]
        assert CliRunner().invoke(app, arguments, env={"COLUMNS": columns}).exit_code == 0


def test_sets_whose_names_look_like_markup_are_previewed_and_evaluated_by_their_names(
    recipe: Path, tmp_path: Path
) -> None:
    rows = [{"prompt": text, "answer": text} for text in ("ab", "cd", "ef", "gh", "ij", "kl")]
    for name in ("t", "v"):
        own = rows[:4] if name == "t" else rows[4:]
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in own))
    sets = f'{{"[/x]": {{path: {tmp_path}/v.jsonl}}, "[bold]y": {{path: {tmp_path}/v.jsonl}}}}'
    changes = ("env.kind=dataset", f"data.train={tmp_path}/t.jsonl", f"data.validation={sets}")
    for command in (("data", "preview"), ("eval",)):
        result = headrace_cli(*command, recipe, *changes)
        assert result.exit_code == 0, result.output
        assert "[/x]" in result.stdout
        assert "[bold]y" in result.stdout


def test_tables_that_cannot_be_made_after_a_run_are_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RunDirectory.open(tmp_path, recipe_text="seed: 0\n") as run:
        run.append_metrics({"kind": "step", "step": 1})
        run.report_path.mkdir()
        try_results(run, make_console())
    (warning,) = caplog.messages
    assert warning.startswith(f"{tmp_path}: no tables or plots of the run ({run.report_path}: cannot write")
    assert "headrace report makes them" in warning


def test_fewer_steps_than_the_run_has_made_are_refused_and_nothing_of_it_is_touched(
    finished: tuple[Path, str], recipe: Path
) -> None:
    run_dir, _ = finished
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    result = headrace_cli("train", recipe, f"grpo.max_num_steps={STEPS - 1}")
    assert (result.exit_code, result.stdout) == (2, "")
    expected = (
        f"headrace: error: grpo.max_num_steps={STEPS - 1}: the run in {run_dir} has made {STEPS} steps; set "
    )
    assert result.stderr.startswith(expected)
    assert result.stderr.count("\n") == 1
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before


def test_ctrl_c_leaves_a_checkpoint_from_which_the_same_command_goes_on_bit_for_bit(
    finished: tuple[Path, str], recipe: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "headrace.cli", "train", str(recipe), f"run_dir={tmp_path}"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(os.environ.get("OMP_NUM_THREADS", 1))},
    )
    assert process.stdout is not None
    while not (line := process.stdout.readline()).startswith("step 1/"):
        assert line, process.communicate()[1]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "headrace: stopping at the next safe point" in err
    assert "Traceback" not in err
    stopped = max(step_metrics(tmp_path))
    assert 1 <= stopped < STEPS
    assert f"stopped after step {stopped}; to go on: headrace train {recipe} run_dir={tmp_path}" in out
    assert {p.name for p in tmp_path.rglob(".*")} == {".headrace-run", ".headrace-lock"}
    assert not (tmp_path / "summary.json").exists()

    result = headrace_cli("train", recipe, f"run_dir={tmp_path}")
    assert result.exit_code == 0, result.output
    assert f"going on after step {stopped}" in result.stdout
    assert step_metrics(tmp_path) == step_metrics(finished[0])


def test_a_run_is_evaluated_at_its_newest_checkpoint_to_what_training_measured(
    finished: tuple[Path, str],
) -> None:
    run_dir, _ = finished
    result = headrace_cli("eval", run_dir, "--checkpoint", "latest")
    assert result.exit_code == 0, result.output
    summary = json.loads((run_dir / "summary.json").read_text())
    assert f"step {STEPS}, {run_dir}" in result.stdout
    assert re.search(rf"validation/accuracy +{summary['val_accuracy_after']:.1%}", result.stdout)
    assert re.search(
        rf"validation/sampled_accuracy +{summary['val_accuracy_sampled_after']:.1%}", result.stdout
    )


def test_the_best_checkpoint_and_a_path_can_be_evaluated(finished: tuple[Path, str]) -> None:
    run_dir, _ = finished
    best = headrace_cli("eval", run_dir)
    assert best.exit_code == 0, best.output
    path = re.search(r"step \d+, (\S+)", best.stdout)
    assert path is not None
    assert headrace_cli("eval", run_dir, "--checkpoint", path[1]).stdout == best.stdout


def test_a_recipe_is_evaluated_with_its_own_weights(recipe: Path) -> None:
    result = headrace_cli("eval", recipe)
    assert result.exit_code == 0, result.output
    assert f"the weights of {recipe}" in result.stdout


@pytest.mark.parametrize("wanted", ["latest", "nowhere"])
def test_a_checkpoint_that_is_not_there_is_named(recipe: Path, tmp_path: Path, wanted: str) -> None:
    result = headrace_cli("eval", recipe, f"run_dir={tmp_path}", "--checkpoint", wanted)
    assert result.exit_code == 2
    assert "checkpoint" in result.stderr
    assert result.stderr.count("\n") == 1


LATE_MISTAKES = {
    "an empty dataset": (["env={kind: dataset, path: FOLDER/empty.jsonl}"], "empty.jsonl"),
    "a dataset that is not there": (["env={kind: dataset, path: FOLDER/nowhere.jsonl}"], "nowhere.jsonl"),
    "an unknown task": (["env.task=spell_backwards"], "spell_backwards"),
    "a length above the model's": (
        ["policy.max_total_sequence_length=65"],
        "max_total_sequence_length=65",
    ),
    "weights that are not there": (
        ["policy.model.config=null", "policy.model.path=FOLDER/nowhere"],
        "nowhere",
    ),
}


@pytest.mark.parametrize("name", LATE_MISTAKES)
def test_what_only_the_model_or_the_data_can_tell_is_one_line_and_exit_code_2_too(
    recipe: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "empty.jsonl").touch()
    overrides, expected = LATE_MISTAKES[name]
    words = [override.replace("FOLDER", str(tmp_path)) for override in overrides]
    if words[0].startswith("env={"):
        text = recipe.read_text().replace("env:", "unused:")
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(re.sub(r"unused:\n(  .*\n)+", "", text))
    result = headrace_cli("train", recipe, f"run_dir={tmp_path / 'run'}", *words)
    assert result.exit_code == 2, result.output
    assert expected in result.stderr
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.output

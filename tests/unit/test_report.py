"""A run read back from its directory: totals, plots, and one line for what cannot be read."""

import random
import struct
from pathlib import Path

import pytest

from headrace.algorithms.observer import GREEDY_ACCURACY, GREEDY_REWARD, SAMPLED_ACCURACY, StepRecord
from headrace.errors import ConfigError
from headrace.progress import FileObserver
from headrace.report import draw_reward_plot, read_metrics, run_totals, write_report
from headrace.utils.run_directory import RunDirectory
from toy_run import STAGE_SHARES, TOKENS, toy_record


def write_run(path: Path, steps: int) -> Path:
    """Write a run of toy steps, validated every 10."""
    rng = random.Random(0)
    with RunDirectory.open(path, recipe_text="seed: 0\n") as run:
        files = FileObserver(run, tensorboard=False)
        files.on_phase_progress("warm_start", 20, {"loss": 1.0})
        files.on_validation(0, {GREEDY_ACCURACY: 0.4, SAMPLED_ACCURACY: 0.3})
        for step in range(1, steps + 1):
            files.on_step(toy_record(step, steps, rng))
            if step % 10 == 0:
                files.on_validation(step, {GREEDY_ACCURACY: 0.4 + step / 200, SAMPLED_ACCURACY: 0.3})
    return path


def png_size(path: Path) -> tuple[int, int]:
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:24])
    return width, height


def test_totals_count_steps_and_not_phases_or_validations(tmp_path: Path) -> None:
    totals = run_totals(read_metrics(write_run(tmp_path, 20)))
    assert totals.steps == 20
    assert totals.tokens == 20 * TOKENS
    assert totals.stages() == list(STAGE_SHARES)
    assert totals.seconds["rollout"] == pytest.approx(20 * 0.3)
    assert totals.column_bytes["input_ids"] == 20 * 41_000


def test_totals_hold_the_steps_before_a_resume_too(tmp_path: Path) -> None:
    write_run(tmp_path, 5)
    run = RunDirectory(tmp_path)
    FileObserver(run, tensorboard=False).on_step(toy_record(6, 6, random.Random(0)))
    assert run_totals(read_metrics(tmp_path)).steps == 6


@pytest.mark.parametrize("steps", [1, 35, 1000])
def test_the_report_is_a_picture_whatever_the_length(tmp_path: Path, steps: int) -> None:
    path = write_report(write_run(tmp_path, steps))
    assert path == tmp_path / "report.png"
    assert png_size(path) == (1210, 1210)


def test_the_reward_plot_goes_where_it_is_asked_to(tmp_path: Path) -> None:
    draw_reward_plot(write_run(tmp_path / "run", 30), tmp_path / "docs.png")
    assert png_size(tmp_path / "docs.png") == (825, 396)


def test_the_same_run_gives_the_same_picture(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", 30)
    first, second = (tmp_path / name for name in ("a.png", "b.png"))
    draw_reward_plot(run_dir, first)
    draw_reward_plot(run_dir, second)
    assert first.read_bytes() == second.read_bytes()


def test_a_better_run_gives_another_picture(tmp_path: Path) -> None:
    pictures = []
    for name, steps in (("a", 10), ("b", 30)):
        draw_reward_plot(write_run(tmp_path / name, steps), tmp_path / f"{name}.png")
        pictures.append((tmp_path / f"{name}.png").read_bytes())
    assert pictures[0] != pictures[1]


def test_rewards_of_a_validation_without_verdicts_are_drawn(tmp_path: Path) -> None:
    pictures = []
    for name, validation in (("a", {}), ("b", {GREEDY_REWARD: 0.9})):
        with RunDirectory.open(tmp_path / name, recipe_text="seed: 0\n") as run:
            files = FileObserver(run, tensorboard=False)
            files.on_step(toy_record(1, 1, random.Random(0)))
            files.on_validation(1, validation)
        draw_reward_plot(tmp_path / name, tmp_path / f"{name}.png")
        pictures.append((tmp_path / f"{name}.png").read_bytes())
    assert pictures[0] != pictures[1]


def test_a_run_without_validation_bytes_or_finite_loss_is_drawn(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path, recipe_text="seed: 0\n") as run:
        files = FileObserver(run, tensorboard=False)
        files.on_step(StepRecord(1, 1, {"train/loss": float("inf")}, {}, 0, {}))
    assert write_report(tmp_path).exists()


def test_a_missing_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere/metrics\.jsonl: cannot read it.*check the path"):
        write_report(tmp_path / "nowhere")


def test_a_run_without_a_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="no step has been recorded yet"):
        read_metrics(tmp_path)


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step"\n')
    with pytest.raises(ConfigError, match=r"metrics.jsonl, line 1: not valid JSON .*mend or remove the line"):
        read_metrics(tmp_path)

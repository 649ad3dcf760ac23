"""The checks that GPUs run, on four gloo processes: layouts that mix data, tensor and context parallelism."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SCRIPTS = Path(__file__).parents[1] / "gpu"


def run(script: str, out: Path, *options: str) -> dict[str, Any]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command = [*launch, str(SCRIPTS / script), "--device", "cpu", "--out", str(out), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def test_mixed_layouts_give_the_numbers_of_one_process(tmp_path: Path) -> None:
    report = run("parallel_check.py", tmp_path / "parallel.json")
    trained = {(c["model"], c["layout"]) for c in report["cases"] if "to_one_gpu" in c and c["ok"]}
    mixed = (
        "data 4",
        "tensor 2 x data 2",
        "context 2 x data 2",
        "tensor 2 x context 2",
        "tensor 4",
        "context 4",
    )
    experts = ("data 4, experts over 2", "context 2 x data 2, experts over 2", "data 4, experts over 4")
    layouts = {"llama": mixed, "qwen3_moe": (*mixed, *experts)}
    assert trained == {(model, layout) for model in layouts for layout in layouts[model]}
    gaps = [c["to_one_gpu"] for c in report["cases"] if "to_one_gpu" in c]
    assert max(gap["loss_max"] for gap in gaps) < 1e-5
    assert max(gap["grad_norm_relative"] for gap in gaps) < 1e-5


def test_mixed_layouts_use_the_recorded_experts(tmp_path: Path) -> None:
    layouts = ["single", "tensor", "sequence", "context", "tensor_context", "sequence_context"]
    chosen = ["--families", "qwen3_moe", "--precisions", "float32", "--layouts", *layouts]
    report = run("router_replay_parallel.py", tmp_path / "replay.json", *chosen)
    assert [c["layout"] for c in report["cases"] if c["ok"]] == layouts
    assert all(rank["seen"]["rows"] > 0 for c in report["cases"] for rank in c["ranks"])
    assert all(c["grad_norm_gap"] < 1e-5 for c in report["cases"] if c["layout"] != "single")

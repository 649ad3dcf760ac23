"""The check that GPUs run, on two gloo processes: a family with a plan of transformers' own and attention sinks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
LAYOUTS = ("single", "tensor")  # FSDP2 alone: test_router_replay_sharded
FAMILIES = ("gpt_oss",)


@pytest.mark.timeout(240)
def test_two_ranks_use_the_recorded_experts_with_other_weights(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(TESTS / "gpu" / "router_replay_parallel.py"), "--device", "cpu", "--out", str(result)]
    chosen = ["--families", *FAMILIES, "--layouts", *LAYOUTS, "--precisions", "float32"]
    ran = subprocess.run(
        [*launch, *script, *chosen],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report = json.loads(result.read_text())
    assert report["ranks"] == 2
    assert [(c["family"], c["layout"]) for c in report["cases"] if c["ok"]] == [
        *((family, "single") for family in FAMILIES),
        *((family, layout) for family in FAMILIES for layout in LAYOUTS[1:]),
    ]
    for case in report["cases"]:
        for rank in case["ranks"]:
            assert rank["seen"]["rows"] > 0
            assert rank["seen_with_recompute"]["rows"] == 2 * rank["seen"]["rows"]
    assert all(c["grad_norm_gap"] < 1e-4 for c in report["cases"] if c["layout"] == "tensor")

"""Trackio itself, from a folder of its own: a run by recipe, continued; run by `make test-extras`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import headrace
from headrace.utils.recipe import dump_recipe
from tiny_recipe import tiny_recipe

pytestmark = pytest.mark.slow
FOLDER = Path(sys.prefix) / "trackio"
READ = """
import json
from trackio import Api
from trackio.sqlite_storage import SQLiteStorage
runs = list(Api().runs("mine"))
print(json.dumps([[run.name, run.config, SQLiteStorage.get_logs("mine", run.name)] for run in runs]))
"""


@pytest.mark.skipif(not FOLDER.is_dir(), reason="needs the package trackio (make test-extras)")
def test_a_run_and_its_continuation_are_one_run_there_with_numbers_samples_and_recipe(tmp_path: Path) -> None:
    source = str(Path(headrace.__file__).parents[1])
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(FOLDER), source]),
        "TRACKIO_DIR": str(tmp_path / "trackio"),
    }
    recipe = tiny_recipe(tmp_path / "run", data={"train_size": 16, "validation_size": 4})
    (tmp_path / "r.yaml").write_text(dump_recipe(recipe))
    chosen = ("logging.trackers=[trackio]", "logging.trackio.project=mine", "logging.trackio.name=first")
    for steps in (2, 3):
        command = ["-m", "headrace", "train", "r.yaml", *chosen, f"grpo.max_num_steps={steps}"]
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert "rackio" not in done.stdout.partition("step")[2]
    told = subprocess.run([sys.executable, "-c", READ], env=env, capture_output=True, text=True, check=True)
    ((name, config, logs),) = json.loads(told.stdout.splitlines()[-1])
    assert name == "first"
    assert config["seed"] == 0
    rewards = {entry["step"]: entry["reward/mean"] for entry in logs if "reward/mean" in entry}
    kept = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rewards == {r["step"]: r["reward/mean"] for r in kept if "reward/mean" in r}
    assert sorted(rewards) == [1, 2, 3]
    samples = [entry["samples/train"]["_value"] for entry in logs if "samples/train" in entry]
    assert {"prompt", "completion", "expected", "reward"} <= samples[0][0].keys()

"""What dies, and what is there afterwards: the store's index, a storage unit, the driver of a run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.report import read_metrics
from headrace.utils.recipe import dump_recipe
from tiny_recipe import tiny_recipe

pytestmark = pytest.mark.timeout(600)
TESTS = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["index", "storage"])
def test_after_the_death_of_a_store_s_process_every_finished_group_is_trained_on_once(victim: str) -> None:
    pytest.importorskip("ray", reason="needs headrace[ray]")
    command = [sys.executable, str(TESTS / "journal_faults.py"), victim]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("REPORT")]
    assert lines, done.stdout + done.stderr
    seen: dict[str, Any] = json.loads(lines[-1].removeprefix("REPORT"))
    assert seen["error"] == "TransportError"
    assert seen["trained"], "some groups were trained on before"
    assert seen["right"]
    assert len(set(seen["there"])) == len(seen["there"]) == seen["rows"]
    left = [sample_id for sample_id in seen["finished"] if sample_id not in seen["trained"]]
    # What was under way at the end is there as a whole, or not at all; a clear may have come to the journal or not.
    assert seen["there"][: len(left)] == left or seen["there"] == left[:-2]
    assert len(seen["there"]) - len(left) in (-2, 0, 2)
    assert seen["retried"] == [0] * len(seen["retried"])
    assert seen["claimed"] == [*seen["there"], *seen["later"]]


def steps_of(directory: Path) -> dict[int, dict[str, float]]:
    lines = [
        line
        for line in read_metrics(directory)
        if line.get("kind", "step") == "step" and "train/loss" in line
    ]
    return {
        int(line["step"]): {
            key: value
            for key, value in line.items()
            if key.startswith(("train/", "reward/", "advantage/", "mismatch/"))
        }
        for line in lines
    }


@pytest.mark.slow
def test_a_driver_killed_between_and_inside_of_steps_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    def command(name: str) -> list[str]:
        recipe = tiny_recipe(
            tmp_path / name,
            batching="packed",
            data_plane={"journal": {"enabled": True, "segment_bytes": 20_000}},
            grpo={"max_num_steps": 8},
            checkpointing={"save_period": 1},
            validation={"at_start": False, "at_end": False},
        )
        (tmp_path / f"{name}.yaml").write_text(dump_recipe(recipe))
        arguments = ["train", str(tmp_path / f"{name}.yaml"), "logging.progress=off"]
        return [sys.executable, "-m", "headrace", *arguments]

    subprocess.run(command("whole"), check=True, capture_output=True)
    metrics = tmp_path / "killed" / "metrics.jsonl"
    for after, delay_s in ((2, 0.0), (4, 0.05), (6, 0.15)):
        with subprocess.Popen(
            command("killed"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as driver:
            while not metrics.exists() or len(metrics.read_text().splitlines()) < after:
                assert driver.poll() is None
                time.sleep(0.005)
            time.sleep(delay_s)
            os.kill(driver.pid, signal.SIGKILL)
    subprocess.run(command("killed"), check=True, capture_output=True)
    assert len(steps_of(tmp_path / "whole")) == 8
    assert steps_of(tmp_path / "killed") == steps_of(tmp_path / "whole")

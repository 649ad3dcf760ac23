"""`headrace train` with workers and rollouts on a Ray cluster of its own: it finishes, it stops, it leaves nothing."""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import TextIO

import pytest

from run_processes import marked, survivors

ROOT = Path(__file__).parents[2]
pytest.importorskip("transfer_queue", reason="needs headrace[ray]")

# A demo of a few thousand weights, whose steps take less than a second.
CLUSTER = (
    "policy.model.config.hidden_size=32",
    "policy.model.config.moe_intermediate_size=32",
    "policy.train_global_batch_size=16",
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "data.train_size=64",
    "data.validation_size=4",
    "logging.trackers=[]",
    "data_plane.impl=transfer_queue",
    "cluster.gpus_per_node=0",
    "policy.workers=2",
    "warm_start.enabled=false",
    "validation.at_start=false",
    "validation.at_end=false",
    "validation.period=0",
)


ONE_WORKER = ("policy.workers=1", "policy.parallel.launcher=ray")  # where their number makes no difference


def start(
    run_dir: Path, mark: str, *overrides: str, stdout: TextIO | int = subprocess.PIPE
) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "headrace.cli", "train", "demo_moe", f"run_dir={run_dir}"]
    # Every process of the run inherits the mark, whoever its parent is; a cluster elsewhere is none of its business.
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {"HEADRACE_RUN_MARK": mark}
    return subprocess.Popen(
        [*command, *CLUSTER, *overrides],
        cwd=ROOT,
        env=environment,
        stdout=stdout,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for(path: Path, process: "subprocess.Popen[str]", within_s: float = 300.0) -> None:
    deadline = time.monotonic() + within_s
    while not (path.exists() and path.read_text()):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
@pytest.mark.timeout(600)
@pytest.mark.slow  # Ctrl-C in the loop, below, ends a run the same way
def test_a_run_that_finishes_leaves_no_process_behind(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    process = start(tmp_path / "run", mark, "grpo.max_num_steps=1", *ONE_WORKER)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1
    assert survivors(mark) == {}


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow)]
)
def test_ctrl_c_saves_the_last_whole_step_and_leaves_no_process_behind(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    mark = uuid.uuid4().hex
    process = start(tmp_path / "run", mark)
    wait_for(tmp_path / "run" / "metrics.jsonl", process)
    running = marked(mark)
    assert sum("RankActor" in command for command in running.values()) >= 3, "two workers and the rollouts"
    os.killpg(process.pid, number)  # as a terminal does it: to all of the foreground group
    output, _ = process.communicate(timeout=120)
    assert process.returncode == code, output
    assert "Traceback" not in output
    assert any((tmp_path / "run" / "checkpoints").iterdir())
    assert survivors(mark) == {}


# What a run waits for when it is stopped: options, and the process or the line that shows it.
START_UPS = {
    "the store": ((), "SimpleStorageUnit"),
    "the workers": ((), "RankActor"),
    "room": (("cluster.num_nodes=2", "cluster.autoscales=true"), "Ray has no room yet"),
}


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    # Where it waits makes no difference to how it ends. That it waits for room is seen in test_virtual_cluster_attach.
    "waits_for",
    ["the store", *(pytest.param(name, marks=pytest.mark.slow) for name in ("the workers", "room"))],
)
def test_ctrl_c_during_start_up_ends_the_run_soon_and_leaves_no_process_behind(
    tmp_path: Path, waits_for: str
) -> None:
    mark = uuid.uuid4().hex
    options, sign = START_UPS[waits_for]
    with (tmp_path / "output").open("w+") as output:
        process = start(tmp_path / "run", mark, *options, stdout=output)
        deadline = time.monotonic() + 300
        while not (
            sign in (tmp_path / "output").read_text() or any(sign in c for c in marked(mark).values())
        ):
            assert process.poll() is None, (tmp_path / "output").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        stopped = time.monotonic()
        process.wait(timeout=120)
    text = (tmp_path / "output").read_text()
    assert process.returncode == 130, text
    assert time.monotonic() - stopped < 40, text
    assert "Traceback" not in text
    assert "stopped after step 0; to go on: headrace train" in text
    assert survivors(mark) == {}


@pytest.mark.slow  # test_virtual_cluster_attach has the same refusal, on a cluster that is there
@pytest.mark.timeout(600)
def test_a_gpu_for_the_rollouts_that_the_cluster_lacks_is_one_line_before_any_worker_starts(
    tmp_path: Path,
) -> None:
    process = start(tmp_path / "run", uuid.uuid4().hex, "cluster.rollout_gpus=1")
    output, _ = process.communicate()
    assert process.returncode == 2, output
    last = output.splitlines()[-1]
    assert last.startswith("headrace: error: the run needs 1 GPUs and the Ray cluster has 0"), output
    assert "cluster.rollout_gpus" in last


DEATHS = {
    "SimpleStorageUnit": r"storage unit 0 of 1 at [\d.]+ has died, or .* closed it\. What only it held is lost",
    # The last to start.
    "RankActor": r"the rollout actor has died: pid \d+ on [\d.]+ was killed or crashed, perhaps for memory \(in \w+\)$",
}


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["SimpleStorageUnit", pytest.param("RankActor", marks=pytest.mark.slow)])
def test_a_run_that_loses_a_process_ends_soon_with_one_error_that_names_it(
    tmp_path: Path, victim: str
) -> None:
    mark = uuid.uuid4().hex
    process = start(tmp_path / "run", mark, *ONE_WORKER)
    wait_for(tmp_path / "run" / "metrics.jsonl", process)
    os.kill(max(pid for pid, command in marked(mark).items() if victim in command), signal.SIGKILL)
    killed = time.monotonic()
    output, _ = process.communicate(timeout=120)
    assert time.monotonic() - killed < 60, output
    assert process.returncode == 1, output
    errors = [line for line in output.splitlines() if line.startswith("headrace: error")]
    assert len(errors) == 1, output
    assert re.search(DEATHS[victim], errors[0]), output
    assert survivors(mark) == {}

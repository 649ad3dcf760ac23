"""Asynchronous runs whose processes are killed or stopped: they go on, or are resumed, and lose no group."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from headrace.report import read_metrics
from headrace.utils.recipe import dump_recipe
from killed_run import Life
from soak import GROUPS, Books, Soak, children, lives, soak_recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 8


def recipe_in(folder: Path, engines: int = 0, steps: int = STEPS, **asynchrony: Any) -> Any:
    """Return a recipe of a few steps with so many engines in processes of their own, and its file."""
    recipe = soak_recipe(folder / "run", **{"on_stale": "wait", "room": None, "lease_s": 60.0, **asynchrony})
    told = recipe.model_dump(by_alias=True)
    told["grpo"]["max_num_steps"], told["checkpointing"]["save_period"] = steps, 2
    told["generation"] |= {"placement": "beside" if engines else "in_place", "engines": max(engines, 1)}
    recipe = type(recipe).model_validate(told)
    folder.mkdir(exist_ok=True)
    path = folder / "recipe.yaml"
    path.write_text(dump_recipe(recipe))
    return recipe, path


def samples_of(run_dir: Path) -> dict[int, list[tuple[str, str]]]:
    """Return what each step has trained on: ids and texts."""
    found = defaultdict(list)
    for line in (run_dir / "samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        found[sample["step"]].append((sample["sample_id"], json.dumps(sample["messages"])))
    return dict(found)


def losses_of(run_dir: Path) -> list[tuple[float, float]]:
    return [(line["train/loss"], line["train/grad_norm"]) for line in read_metrics(run_dir)]


def trained_once(books: Books) -> None:
    """The books were read after each death."""
    ledger = books.balance()
    assert ledger.faults == []
    assert (ledger.steps, ledger.trained) == (STEPS, STEPS * GROUPS)


DEATHS = [
    ("3", "wait", "0.02"),
    ("4", "prev_logprobs", "0"),
    ("4", "train", "0.02"),
    ("5", "update_weights", "0"),
    ("6", "checkpoint", "0"),
    ("6", "checkpoint", "draft"),
    ("8", "wait", "0"),
]


@pytest.mark.parametrize("max_lag", [0, 1])
def test_a_driver_killed_in_any_stage_is_resumed_on_the_same_groups(tmp_path: Path, max_lag: int) -> None:
    own = {"max_lag": max_lag, "collectors": 1 + max_lag, "prompts_per_call": 4 if max_lag == 0 else 2}
    _, whole = recipe_in(tmp_path / "whole", **own)
    assert Life(whole).end() == (0, "")
    recipe, killed = recipe_in(tmp_path / "killed", **own)
    books = Books(recipe, tmp_path / "killed" / "run")
    for death in DEATHS:
        code, output = Life(killed, "SIGKILL", *death).end()
        assert code == -signal.SIGKILL, (death, output)
        books.read_journal()
    code, output = Life(killed).end()
    assert code == 0, output
    trained_once(books)
    ours, truth = (samples_of(tmp_path / name / "run") for name in ("killed", "whole"))
    assert {step: [i for i, _ in rows] for step, rows in ours.items()} == {
        step: [i for i, _ in rows] for step, rows in truth.items()
    }
    if max_lag == 0:
        assert ours == truth
        assert losses_of(tmp_path / "killed" / "run") == losses_of(tmp_path / "whole" / "run")


@pytest.mark.parametrize("when", ["0", "0.02"])
def test_a_trainer_that_stalls_longer_than_its_lease_trains_on_nothing_and_is_resumed(
    tmp_path: Path, when: str
) -> None:
    recipe, path = recipe_in(tmp_path, lease_s=2.0)
    driver = Life(path, "SIGSTOP", "3", "train", when)
    while not driver.is_stopped():
        time.sleep(0.01)
    time.sleep(2.5)
    os.kill(driver.pid, signal.SIGCONT)
    code, output = driver.end()
    assert code == 1, output
    assert "ClaimExpired" in output
    assert "no longer in force" in output
    assert set(samples_of(tmp_path / "run")) == {1, 2}
    books = Books(recipe, tmp_path / "run")
    books.read_journal()
    code, output = Life(path).end()
    assert code == 0, output
    trained_once(books)


def ended(driver: "subprocess.Popen[str]") -> tuple[int, str]:
    output, _ = driver.communicate(timeout=300)
    return driver.returncode, output


def command(path: Path) -> "subprocess.Popen[str]":
    arguments = ["train", str(path), "logging.progress=off"]
    return subprocess.Popen(
        [sys.executable, "-m", "headrace", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for_steps(run_dir: Path, count: int, driver: "subprocess.Popen[str]") -> None:
    metrics = run_dir / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < count:
        assert driver.poll() is None, driver.communicate()[0]
        time.sleep(0.02)


@pytest.mark.parametrize("survivors", [1, 0])
def test_a_run_whose_engines_are_killed_goes_on(tmp_path: Path, survivors: int) -> None:
    recipe, path = recipe_in(tmp_path, engines=2, collectors=1, prompts_per_call=4)
    driver = command(path)
    wait_for_steps(tmp_path / "run", 2, driver)
    engines = children(driver.pid)
    for pid in engines[survivors:]:
        os.kill(pid, signal.SIGKILL)
    code, output = ended(driver)
    assert code == 0, output
    assert (
        "was killed by SIGKILL" if survivors else "no engine is left; 2 of 2 are started again and waited for"
    ) in output
    told = read_metrics(tmp_path / "run")
    assert sum(line.get("generator/engines_lost", 0) for line in told) == 2 - survivors
    assert sum(line["async/failed_calls"] for line in told) == (0 if survivors else 1)
    assert not any(map(lives, engines))
    trained_once(Books(recipe, tmp_path / "run"))


def kill_engines(driver: "subprocess.Popen[str]", spared: set[int], times: int) -> set[int]:
    """Kill the engines that are not spared, and those that come in their places; return all of them."""
    killed: set[int] = set()
    deadline = time.monotonic() + 300
    while len(killed) < times:
        assert time.monotonic() < deadline, killed
        assert driver.poll() is None, driver.communicate()[0]
        for pid in set(children(driver.pid)) - spared - killed:
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        time.sleep(0.05)
    return killed


@pytest.mark.parametrize("survivors", [1, 0])
def test_what_a_collector_makes_whose_engine_dies_too_often_goes_to_the_other_or_the_run_ends_and_is_resumed(
    tmp_path: Path, survivors: int
) -> None:
    # A call that finds a dead engine is counted; the starts again, which find it dead as well, are too.
    recipe, path = recipe_in(
        tmp_path, engines=2, steps=100_000, collectors=2, prompts_per_call=2, max_failures=20
    )
    driver = command(path)
    wait_for_steps(tmp_path / "run", 2, driver)
    kill_engines(driver, set(children(driver.pid)[:survivors]), 4 * (2 - survivors))
    books = Books(recipe, tmp_path / "run")
    if survivors:
        steps = len(read_metrics(tmp_path / "run"))
        wait_for_steps(tmp_path / "run", steps + 20, driver)
        os.kill(driver.pid, signal.SIGINT)
    code, output = ended(driver)
    assert "Traceback" not in output
    assert len(re.findall(r"collector-\d makes no more samples: no engine is left", output)) == 1
    if survivors:
        assert code == 130, output
        assert sum(line["async/lost_collectors"] for line in read_metrics(tmp_path / "run")) == 1
    else:
        errors = [line for line in output.splitlines() if line.startswith("headrace: error")]
        assert (code, len(errors)) == (1, 1), output
        assert "no engine is left" in errors[0]
        books.read_journal()
        driver = command(path)
        wait_for_steps(tmp_path / "run", len(read_metrics(tmp_path / "run")) + 4, driver)
        os.kill(driver.pid, signal.SIGINT)
        code, output = ended(driver)
        assert code == 130, output
    ledger = books.balance()
    assert ledger.faults == []
    assert ledger.trained == ledger.steps * GROUPS


def test_a_short_soak_balances_to_the_last_group(tmp_path: Path) -> None:
    soak = Soak(tmp_path, seed=1)
    books = soak.run(30.0)
    assert soak.wrong == []
    assert books.is_exact
    assert books.made > 0

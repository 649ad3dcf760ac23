"""Asynchronous runs on Ray over TransferQueue, each of whose processes is killed: nothing is lost or trained on twice.

A run goes on, or ends with one line and is resumed. What it trains on is in the end what the run of one process does
that never died: the same ids in the same steps, and where nothing lags the same answers.
"""

import gc
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from test_async_faults import samples_of

from dying_worker import FETCH, PID, WRITE_BACK, DyingWorker
from headrace.algorithms.run import train
from headrace.config import RecipeConfig
from headrace.errors import ClaimExpired, HeadraceError
from headrace.models.policy import launch
from headrace.progress import CompositeObserver, FileObserver
from headrace.report import read_metrics
from headrace.utils.recipe import dump_recipe
from headrace.utils.run_directory import RunDirectory
from killed_run import is_stopped
from ray_session import SIMPLE, fresh_store
from recorder import NeverStop, Recorder
from run_processes import survivors
from soak import GROUP, GROUPS, Books, soak_recipe

pytest.importorskip("transfer_queue", reason="needs headrace[ray]")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
STEPS = 6
TESTS = Path(__file__).parent.parent
# From the death of a process to the end of the run; on a busy machine most of it goes to ending the others.
END_S = 90.0
LEASE_S, STALL_S = 8.0, 10.0
# An index takes a process for dead that has not answered it for 40 s.
SILENT_S = 45.0


def recipe_in(
    folder: Path,
    *,
    journal: bool = True,
    policy: Mapping[str, Any] | None = None,
    store: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
    **asynchrony: Any,
) -> RecipeConfig:
    """Return a recipe of a few steps, in one process or with a `store` on Ray; its file is recipe.yaml."""
    section = {"on_stale": "wait", "room": None, "lease_s": 300.0, **asynchrony}
    told = soak_recipe(folder / "run", **section).model_dump(by_alias=True)
    told["grpo"]["max_num_steps"], told["checkpointing"]["save_period"] = STEPS, 2
    told["generation"] |= {"placement": "in_place", "engines": 1, **(generation or {})}
    told["policy"] |= policy or {}
    told["data_plane"] |= {"journal": {"enabled": journal}, **(store or {})}
    recipe = RecipeConfig.model_validate(told)
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(dump_recipe(recipe))
    return recipe


def on_ray(folder: Path, workers: int = 1, **changes: Any) -> RecipeConfig:
    policy = {"workers": workers, "parallel": {"launcher": "ray"}}
    return recipe_in(folder, policy=policy, **{"store": fresh_store(SIMPLE), **changes})


def schedule(run_dir: Path) -> dict[int, list[str]]:
    """Return the ids that each step has trained on."""
    return {step: [sample_id for sample_id, _ in rows] for step, rows in samples_of(run_dir).items()}


def whole_run(folder: Path, **asynchrony: Any) -> Path:
    """Do the same run in this process, without a death; its directory."""
    recipe = recipe_in(folder / "whole", **asynchrony)
    assert one_life(recipe, Recorder()) is None
    return folder / "whole" / "run"


def one_life(recipe: RecipeConfig, observer: Recorder) -> HeadraceError | None:
    """Train in this process until the run completes, or ends with an error, which is returned."""
    with RunDirectory.open(recipe.run_dir, recipe_text=dump_recipe(recipe)) as run:
        try:
            done = train(recipe, run.path, CompositeObserver([FileObserver(run), observer]), NeverStop())
        except HeadraceError as error:
            return error
    assert done["completed"]
    return None


def check_ledger(recipe: RecipeConfig, books: Books | None = None) -> None:
    """Each group of each step was trained on once and whole; with a journal, nothing else was used or is left over."""
    run_dir = Path(recipe.run_dir)
    ids = schedule(run_dir)
    assert sorted(ids) == list(range(1, STEPS + 1))
    flat = [sample_id for rows in ids.values() for sample_id in rows]
    assert len(set(flat)) == len(flat) == STEPS * GROUPS * GROUP
    if recipe.data_plane.journal.enabled:
        ledger = (books or Books(recipe, run_dir)).balance()
        assert ledger.faults == []
        assert (ledger.trained, ledger.dropped) == (STEPS * GROUPS, 0)


# Within this process, on the cluster of the test session.


class Killing(Recorder):
    """Does something when a stage of a step begins, once each."""

    def __init__(self, **deeds: Callable[[], None]) -> None:
        super().__init__()
        self._deeds = deeds

    def on_stage(self, step: int, stage: str) -> None:
        deed = self._deeds.pop(f"{stage}_{step}", None)
        if deed is not None:
            deed()


def groups_of(who: str) -> list[Any]:
    """Return the live groups of one actor that messages call so."""
    groups = [one for one in gc.get_objects() if type(one).__name__ == "RayWorkerGroup"]
    return [one for one in groups if (one._alone or "").startswith(who) and not one.has_ended]


def kill(who: str, read: Callable[[Any], list[int]] = lambda server: [os.getpid()]) -> None:
    """Kill the process of the first such actor, or those that it knows of."""
    import ray

    actor = groups_of(who)[0]._actors[0]
    for pid in ray.get(actor.__ray_call__.remote(read), timeout=120):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("journal", [True, False])
def test_a_worker_killed_while_it_fetches_and_while_it_writes_back_ends_the_run_which_is_resumed(
    tmp_path: Path, journal: bool, transfer_queue_engine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = whole_run(tmp_path, max_lag=1)
    monkeypatch.setattr(launch, "AutomodelPolicyWorker", partial(DyingWorker, tmp_path))
    recipe = on_ray(tmp_path / "killed", workers=2, journal=journal, max_lag=1)
    books = Books(recipe, Path(recipe.run_dir))
    for stage, where in (("train_3", FETCH), ("prev_logprobs_4", WRITE_BACK)):
        started = time.monotonic()
        death = Killing(**{stage: (tmp_path / where).touch})
        error = one_life(recipe, death)
        assert re.search(r"worker actor has died: pid \d+ on [\d.]+ was killed", str(error)), error
        assert time.monotonic() - started < 300
        books.read_journal()
    assert one_life(recipe, Recorder()) is None
    assert schedule(Path(recipe.run_dir)) == schedule(whole)
    check_ledger(recipe, books)


def wake_later(folder: Path) -> threading.Thread:
    """Let the worker go on that stops itself, when its lease is over."""

    def wake() -> None:
        while not (folder / PID).exists():
            time.sleep(0.05)
        time.sleep(STALL_S)
        os.kill(int((folder / PID).read_text()), signal.SIGCONT)
        (folder / PID).unlink()

    thread = threading.Thread(target=wake, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("journal", [True, False])
def test_a_worker_that_stalls_longer_than_the_lease_writes_nothing_and_what_it_trained_on_is_not_cleared(
    tmp_path: Path, journal: bool, transfer_queue_engine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = whole_run(tmp_path, max_lag=1)
    monkeypatch.setattr(launch, "AutomodelPolicyWorker", partial(DyingWorker, tmp_path, sends=signal.SIGSTOP))
    recipe = on_ray(tmp_path / "stalled", workers=2, journal=journal, max_lag=1, lease_s=LEASE_S)
    books = Books(recipe, Path(recipe.run_dir))
    for stage, where, refused in (
        ("prev_logprobs_3", WRITE_BACK, "in get_logprobs"),
        ("train_4", FETCH, "no longer in force"),
    ):
        waking = wake_later(tmp_path)
        error = one_life(recipe, Killing(**{stage: (tmp_path / where).touch}))
        waking.join(1)
        assert isinstance(error, ClaimExpired), error
        assert refused in str(error)
        assert str(error).endswith(f"raise async.lease_s={LEASE_S:g}")
        assert max(schedule(Path(recipe.run_dir))) == int(stage[-1]) - 1
        books.read_journal()
    assert one_life(recipe, Recorder()) is None
    assert schedule(Path(recipe.run_dir)) == schedule(whole)
    check_ledger(recipe, books)


@pytest.mark.parametrize("max_lag", [0, 1])
def test_the_keeper_of_the_weights_killed_while_a_step_waits_and_while_it_trains_is_started_again(
    tmp_path: Path, max_lag: int, transfer_queue_engine: None, caplog: pytest.LogCaptureFixture
) -> None:
    own = {"max_lag": max_lag, "collectors": 1, "prompts_per_call": 4}
    whole = whole_run(tmp_path, **own)
    recipe = on_ray(tmp_path / "killed", **own)
    keeper = partial(kill, "the keeper")
    observer = Killing(wait_2=keeper, train_4=keeper)
    with caplog.at_level(logging.WARNING):
        assert one_life(recipe, observer) is None
    restored = [record.metrics["async/restored_weights"] for record in observer.steps]
    assert sum(restored) == 2
    assert len(re.findall("the keeper of the weights has died: .*published again", caplog.text)) == 2
    assert schedule(Path(recipe.run_dir)) == schedule(whole)
    if max_lag == 0:
        assert samples_of(Path(recipe.run_dir)) == samples_of(whole)
    check_ledger(recipe)


def test_an_engine_and_a_rollout_actor_that_are_killed_are_started_again(
    tmp_path: Path, transfer_queue_engine: None, caplog: pytest.LogCaptureFixture
) -> None:
    whole = whole_run(tmp_path, max_lag=1)
    recipe = on_ray(
        tmp_path / "killed",
        max_lag=1,
        generation={"placement": "apart", "engines": 2, "precision": "float32"},
    )
    engine = partial(kill, "rollout actor", lambda server: server._worker.generator.pids)
    observer = Killing(train_2=engine, train_4=partial(kill, "rollout actor"))
    with caplog.at_level(logging.WARNING):
        assert one_life(recipe, observer) is None
    assert sum(record.metrics["async/failed_calls"] for record in observer.steps) >= 1
    assert re.search(r"collector-0: rollout actor 0 has died: .* it is started again", caplog.text)
    assert schedule(Path(recipe.run_dir)) == schedule(whole)
    check_ledger(recipe)


# In processes of their own.


def begin(folder: Path, address: str, *told: str) -> "subprocess.Popen[bytes]":
    """Begin one life of a run on a cluster that stays; what it says is output.txt."""
    environment = {
        **os.environ,
        "RAY_ADDRESS": address,
        "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, sys.path)]),
    }
    files = [str(folder / name) for name in ("recipe.yaml", "output.txt")]
    command = [sys.executable, str(TESTS / "killed_run.py"), *files, *told]
    return subprocess.Popen(command, env=environment)


def life(folder: Path, address: str, *told: str) -> tuple[int, str]:
    """Do one life of a run, and return the exit code and what it said."""
    code = begin(folder, address, *told).wait(300)
    return code, (folder / "output.txt").read_text()


@pytest.mark.parametrize("journal", [True, False])
def test_a_driver_killed_between_and_inside_of_steps_is_resumed_on_the_same_groups(
    tmp_path: Path, journal: bool, ray_cluster: str, transfer_queue_engine: None
) -> None:
    own = {"max_lag": 0, "collectors": 1, "prompts_per_call": 4}
    whole = whole_run(tmp_path, **own)
    recipe = on_ray(tmp_path / "killed", journal=journal, **own)
    books = Books(recipe, Path(recipe.run_dir))
    for death in (("3", "wait", "0.05"), ("4", "train", "0.02"), ("5", "update_weights", "0.01")):
        code, output = life(tmp_path / "killed", ray_cluster, "SIGKILL", *death)
        assert code == -signal.SIGKILL, (death, output)
        books.read_journal()
    code, output = life(tmp_path / "killed", ray_cluster)
    assert code == 0, output
    assert samples_of(Path(recipe.run_dir)) == samples_of(whole)
    check_ledger(recipe, books)


@pytest.mark.parametrize(("stage", "stall_s"), [("advantages", STALL_S), ("train", SILENT_S)])
def test_a_driver_that_stalls_longer_than_the_lease_trains_on_nothing_and_is_resumed(
    tmp_path: Path, stage: str, stall_s: float, ray_cluster: str, transfer_queue_engine: None
) -> None:
    """The second stall is so long that the store takes the process for dead."""
    own = {"max_lag": 0, "collectors": 1, "prompts_per_call": 4}
    whole = whole_run(tmp_path, **own)
    recipe = on_ray(tmp_path / "stalled", lease_s=LEASE_S, **own)
    books = Books(recipe, Path(recipe.run_dir))
    driver = begin(tmp_path / "stalled", ray_cluster, "SIGSTOP", "3", stage, "0")
    while not is_stopped(driver.pid):
        assert driver.poll() is None
        time.sleep(0.05)
    time.sleep(stall_s)
    os.kill(driver.pid, signal.SIGCONT)
    code, output = driver.wait(END_S), (tmp_path / "stalled" / "output.txt").read_text()
    assert code == 1, output
    assert re.search(rf"ClaimExpired: .* no longer in force: .*raise async.lease_s={LEASE_S:g}", output)
    assert set(schedule(Path(recipe.run_dir))) == {1, 2}
    books.read_journal()
    code, output = life(tmp_path / "stalled", ray_cluster)
    assert code == 0, output
    assert samples_of(Path(recipe.run_dir)) == samples_of(whole)
    check_ledger(recipe, books)


def start(folder: Path, mark: str) -> "subprocess.Popen[str]":
    """Start `headrace train` with a cluster of its own."""
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {"HEADRACE_RUN_MARK": mark}
    command = [sys.executable, "-m", "headrace", "train", str(folder / "recipe.yaml"), "logging.progress=off"]
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


PROCESSES = {
    "SimpleStorageUnit": r"storage unit \d of 2 at [\d.]+ has died",
    "TransferQueueController": r"TransferQueue's controller has died",
    "IndexActor": r"(the index of the store|index 1 of 2) has died",
}


@pytest.mark.parametrize("journal", [True, False])
def test_a_run_that_loses_a_storage_unit_the_controller_or_an_index_ends_with_one_line_and_is_resumed(
    tmp_path: Path, journal: bool
) -> None:
    whole = whole_run(tmp_path, max_lag=1)
    store = {**SIMPLE, "num_storage_units": 2, "indexes": 2}
    recipe = on_ray(tmp_path / "killed", journal=journal, max_lag=1, store=store)
    run_dir = Path(recipe.run_dir)
    books = Books(recipe, run_dir)
    for steps, victim in enumerate(PROCESSES, 3):
        mark = uuid.uuid4().hex
        driver = start(tmp_path / "killed", mark)
        while not (run_dir / "metrics.jsonl").exists() or len(read_metrics(run_dir)) < steps:
            assert driver.poll() is None, driver.communicate()[0]
            time.sleep(0.02)
        os.kill(max(pid for pid, title in survivors(mark, 0).items() if victim in title), signal.SIGKILL)
        killed = time.monotonic()
        output, _ = driver.communicate(timeout=300)
        assert time.monotonic() - killed < END_S, output
        errors = [line for line in output.splitlines() if line.startswith("headrace: error")]
        assert (driver.returncode, len(errors)) == (1, 1), output
        assert re.search(PROCESSES[victim], errors[0]), output
        assert "Traceback" not in output
        assert survivors(mark) == {}
        books.read_journal()
    driver = start(tmp_path / "killed", uuid.uuid4().hex)
    output, _ = driver.communicate(timeout=300)
    assert driver.returncode == 0, output
    assert schedule(run_dir) == schedule(whole)
    check_ledger(recipe, books)

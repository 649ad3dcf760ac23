"""Trackers get a run's numbers and samples, stay one run over a resume, and never stop a run."""

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

from full_disk import files_of_at_most
from headrace.algorithms.observer import REWARD, RunObserver, StepRecord
from headrace.algorithms.run import train
from headrace.cli import app
from headrace.config import RecipeConfig
from headrace.errors import WriteError
from headrace.metric_names import METRICS
from headrace.trackers import JsonlTracker, MlflowTracker, RunTrackers, TensorBoardTracker, WandbTracker
from headrace.trackers.base import Tracker, sample_row
from headrace.utils.recipe import dump_recipe, load_recipe
from headrace.utils.run_directory import RunDirectory
from recorder import NeverStop
from tiny_recipe import tiny_recipe
from wheel_session import InstalledWheel

SAMPLE = {
    "sample_id": "a@1.0_g0",
    "messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "two\n| 2"}],
    "reward": 0.5,
    "expected": "2",
    "parts": {"length": 0.25},
}


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return pytest.importorskip("mlflow", reason="needs headrace[trackers]")


def short_run(observer: RunObserver, steps: range = range(1, 4), total: int = 4) -> None:
    observer.on_start(total_steps=total, first_step=steps[0], info={"model": "tiny"})
    if steps[0] == 1:
        observer.on_phase_progress("warm_start", 20, {"loss": 2.0})
    for step in steps:
        observer.on_samples(step, "train", [SAMPLE])
        observer.on_step(
            StepRecord(
                step, total, {REWARD: step / 4, "odd": float("nan")}, {"rollout": 1.0}, 7, {"input_ids": 56}
            )
        )
    observer.on_validation(steps[-1], {"validation/pass@4": 0.75})
    if steps[-1] == total:
        observer.on_finish({"steps": total})


def scalars(directory: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(directory))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_has_numbers_text_and_hparams_also_after_a_resume(tmp_path: Path) -> None:
    settings = {"grpo": {"max_num_steps": 4}, "seed": 3, "loss": {"dual_clip": None}}
    with TensorBoardTracker(tmp_path, settings=settings) as tracker:
        short_run(tracker)
    time.sleep(1.1)  # event files are ordered by the second in their name
    with TensorBoardTracker(tmp_path, settings=settings) as tracker:
        short_run(tracker, range(3, 5))
    assert scalars(tmp_path, REWARD) == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
    assert scalars(tmp_path, "bytes/input_ids") == [(n, 56.0) for n in (1, 2, 3, 4)]
    assert scalars(tmp_path / "warm_start", "warm_start/loss") == [(20, 2.0)]
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert "odd" not in events.Tags()["scalars"]
    (tag,) = (tag for tag in events.Tags()["tensors"] if tag.startswith("samples/train/0"))
    text = events.Tensors(tag)[-1].tensor_proto.string_val[0].decode()
    assert "| 2" in text
    assert "length" in text
    hparams = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"grpo.max_num_steps" in hparams


def test_a_sample_is_a_row_of_prompt_completion_expected_answer_and_parts_of_its_reward() -> None:
    assert sample_row(SAMPLE) == {
        "prompt": "1+1?",
        "completion": "two\n| 2",
        "sample_id": "a@1.0_g0",
        "reward": 0.5,
        "expected": "2",
        "length": 0.25,
    }


def test_mlflow_has_one_run_of_a_run_that_was_continued(tmp_path: Path, mlflow: Any) -> None:
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "store").as_uri())
    for steps in (range(1, 4), range(3, 5)):
        with MlflowTracker(
            tracking_uri=str(tmp_path / "store"),
            name="mine",
            settings={"seed": 3, "env": {"kind": "math"}},
            id_file=tmp_path / "mlflow.id",
        ) as tracker:
            short_run(tracker, steps)
    experiment = client.get_experiment_by_name("headrace")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params == {"seed": "3", "env.kind": "math"}
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "mine"
    history = {m.step: m.value for m in client.get_metric_history(run.info.run_id, REWARD)}
    assert history == {1: 0.25, 2: 0.5, 3: 0.75, 4: 1.0}
    assert run.data.metrics["validation/pass_4"] == 0.75
    (sample,) = tmp_path.glob("store/**/train_000002.json")
    assert json.loads(sample.read_text())["samples"][0]["expected"] == "2"


def test_wandb_writes_offline_and_keeps_its_id(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="needs headrace[trackers]")
    for steps in (range(1, 4), range(3, 5)):
        tracker = WandbTracker(
            mode="offline",
            directory=tmp_path,
            project="p",
            name="mine",
            settings={"seed": 3},
            id_file=tmp_path / "wandb.id",
        )
        with tracker:
            short_run(tracker, steps)
    id = (tmp_path / "wandb.id").read_text().strip()
    files = sorted((tmp_path / "wandb").glob(f"offline-run-*-{id}/run-{id}.wandb"))
    assert len(files) == 2
    content = b"".join(file.read_bytes() for file in files)
    for word in (b"reward/mean", b"samples/train", b"warm_start/loss", b"validation/pass@4", b"seed"):
        assert word in content, word


def test_jsonl_has_every_event(tmp_path: Path) -> None:
    with JsonlTracker(tmp_path / "new" / "e.jsonl", settings={"seed": 3}) as tracker:
        short_run(tracker, range(3, 5))
        tracker.on_notice(4, "look")
    lines = [json.loads(line) for line in (tmp_path / "new" / "e.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines][:3] == ["start", "samples", "values"]
    assert lines[0]["settings"] == {"seed": 3}
    assert lines[-1] == {"event": "end", "summary": {"steps": 4}}


@pytest.mark.parametrize("event", ["on_start", "on_step", "on_samples", "close"])
def test_a_tracker_that_fails_is_named_once_and_the_run_goes_on(
    event: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Mine(JsonlTracker):
        pass

    def fail(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("no way\nthere")

    setattr(Mine, event, fail)
    recipe = tiny_recipe(tmp_path / "run", logging={"trackers": ["jsonl"]})
    with (
        RunDirectory.open(tmp_path / "run", recipe_text="seed: 0\n") as run,
        caplog.at_level(logging.WARNING),
    ):
        with RunTrackers(recipe, run, [Mine(tmp_path / "mine.jsonl")]) as trackers:
            short_run(trackers, range(1, 5))
        events = [json.loads(line)["event"] for line in (run.path / "events.jsonl").read_text().splitlines()]
    assert caplog.messages == [
        f"Mine failed in {event} (ConnectionError: no way there); the run goes on without it"
    ]
    assert events[-1] == "end"


def test_the_switch_of_earlier_versions_goes_on_selecting_tensorboard(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(dump_recipe(tiny_recipe(tmp_path, logging={"trackers": ["tensorboard", "wandb"]})))
    for override, left in (("false", ("wandb",)), ("true", ("tensorboard", "wandb"))):
        assert load_recipe(path, [f"logging.tensorboard={override}"]).logging.trackers == left
    bare = dump_recipe(tiny_recipe(tmp_path)).replace("  trackers: []\n", "")
    for switch, left in (("true", ("tensorboard",)), ("false", ())):
        path.write_text(bare.replace("logging:\n", f"logging:\n  tensorboard: {switch}\n"))
        for of_a_run in (True, False):
            assert load_recipe(path, of_a_run=of_a_run).logging.trackers == left


USES = 15
SCRIPT = """\
run_dir: run
defaults: demo_moe
policy: {train_global_batch_size: 16, model: {config: {hidden_size: 32, moe_intermediate_size: 32}}}
grpo: {num_prompts_per_step: 4, num_generations_per_prompt: 4, max_num_steps: 2}
data: {train_size: 64, validation_size: 8}
warm_start: {enabled: false}
logging:
  trackers: [wandb, mlflow]
  wandb: {project: mine, mode: offline}
  mlflow: {tracking_uri: store}
"""


def test_a_wheel_in_an_empty_folder_tracks_a_run_with_wandb_offline_and_mlflow(
    installed_wheel: InstalledWheel, tmp_path: Path, mlflow: Any
) -> None:
    pytest.importorskip("wandb", reason="needs headrace[trackers]")
    assert len(SCRIPT.splitlines()) <= USES
    (tmp_path / "mine.yaml").write_text(SCRIPT)
    done = installed_wheel.headrace("train", "mine.yaml", cwd=tmp_path, timeout_s=280)
    assert (done.returncode, done.stderr) == (0, "")
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "store").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("headrace").experiment_id])
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    wanted = {line["step"]: line["reward/mean"] for line in steps if line["kind"] == "step"}
    assert {m.step: m.value for m in client.get_metric_history(run.info.run_id, REWARD)} == wanted
    assert run.data.params["policy.train_global_batch_size"] == "16"
    (log,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    assert b"reward/mean" in log.read_bytes()
    assert b"expected" in log.read_bytes() or list(log.parent.glob("files/media/table/**/*.json"))
    sample = json.loads((tmp_path / "run" / "samples.jsonl").read_text().splitlines()[0])
    assert sample["expected"] == sample["messages"][0]["content"][::-1]


WRONG = {
    "an unknown tracker": (
        ("logging.trackers=[wandbb]",),
        "logging.trackers.0='wandbb': expected 'tensorboard', ",
    ),
    "no list": (("logging.trackers=wandb",), "logging.trackers='wandb': expected a list"),
    "an unknown option": (("logging.wandb.projct=x",), "unknown key 'logging.wandb.projct'; did you mean"),
    "an option of another type": (("logging.wandb.tags=x",), "logging.wandb.tags='x': expected a list"),
    "an unknown mode": (
        ("logging.wandb.mode=off",),
        "logging.wandb.mode='off': expected 'online' or 'offline'",
    ),
    "a switch that is none": (("logging.tensorboard=maybe",), "logging.tensorboard"),
    "nobody logged in": (
        ("logging.trackers=[wandb]",),
        "logging.wandb.mode=online: nobody is logged in to W&B",
    ),
    "no package": (
        ("logging.trackers=[trackio]",),
        "logging.trackers=trackio: trackio is not installed; pip install 'headrace[trackio]'",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_use_is_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "nobody logged in":
        pytest.importorskip("wandb", reason="needs headrace[trackers]")
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        for key in ("WANDB_API_KEY", "WANDB_MODE"):
            monkeypatch.delenv(key, raising=False)
    if name == "no package":
        monkeypatch.setitem(sys.modules, "trackio", None)
    overrides, expected = WRONG[name]
    path = tmp_path / "r.yaml"
    path.write_text(dump_recipe(tiny_recipe(tmp_path / "run")))
    result = CliRunner().invoke(app, ["train", str(path), *overrides])
    assert result.exit_code == 2
    assert expected in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_package_that_is_missing_is_named_for_each_tracker(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom headrace import trackers\nfrom headrace.errors import ConfigError\n"
        "for name, kind in (('wandb', 'Wandb'), ('mlflow', 'Mlflow'), ('trackio', 'Trackio')):\n"
        "    sys.modules[name] = None\n    try:\n        getattr(trackers, kind + 'Tracker')()\n"
        "    except ConfigError as error:\n        print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout.count("is not installed; pip install 'headrace[track") == 3


class _Names(RunObserver):
    def __init__(self) -> None:
        self.names: set[str] = set()

    def on_step(self, record: StepRecord) -> None:
        self.names |= set(record.flat())

    def on_validation(self, step: int, metrics: dict[str, float]) -> None:
        self.names |= set(metrics)

    def on_phase_progress(self, name: str, done: int, metrics: dict[str, float]) -> None:
        self.names |= {f"{name}/{key}" for key in metrics}


def test_the_reference_of_metrics_has_what_a_run_reports(tmp_path: Path) -> None:
    from fnmatch import fnmatchcase

    recipe: RecipeConfig = tiny_recipe(
        tmp_path,
        grpo={"max_num_steps": 1, "dynamic_sampling": {"enabled": True, "max_refills": 1}},
        loss={"kl_coefficient": 0.1, "importance_correction": "tis", "dual_clip": 3.0},
        policy={"router_replay": {"enabled": True, "trace": True}},
        warm_start={"enabled": True, "steps": 1, "batch_size": 8},
    )
    seen = _Names()
    with RunDirectory.open(tmp_path, recipe_text=dump_recipe(recipe)) as run:
        train(recipe, run.path, seen, NeverStop())
    specific = [
        name for name in METRICS if name not in ("train/*", "mismatch/*", "router_replay/*", "reward/*")
    ]
    assert len(seen.names) > 80
    assert [n for n in sorted(seen.names) if not any(fnmatchcase(n, pattern) for pattern in specific)] == []


def test_an_id_that_a_crash_left_unwritten_is_none_and_is_written_whole(tmp_path: Path) -> None:
    file = tmp_path / "service.id"
    tracker = Tracker(id_file=file)
    file.write_text("")
    assert tracker.known_id() is None
    tracker.keep_id("nummer-é")
    assert (tracker.known_id(), file.read_bytes()) == ("nummer-é", "nummer-é\n".encode())
    with files_of_at_most(3), pytest.raises(WriteError, match="service"):
        tracker.keep_id("other-id")
    assert tracker.known_id() == "nummer-é"

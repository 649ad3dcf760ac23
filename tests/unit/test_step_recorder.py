"""A recorded step, run again: the same numbers bit for bit, and where another version or layout differs."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from headrace.algorithms.column_files import SampleColumns
from headrace.algorithms.run import train
from headrace.algorithms.step_record import Results, read_facts
from headrace.algorithms.step_recorder import record_step
from headrace.algorithms.step_replay import ColumnGap, compare_columns, metric_gaps, replay_step
from headrace.cli import app
from headrace.errors import ConfigError, HeadraceError
from headrace.utils.recipe import dump_recipe
from headrace.utils.run_directory import RunDirectory
from recorder import NeverStop, Recorder
from tiny_recipe import tiny_recipe

SETTINGS: dict[str, dict[str, Any]] = {
    "refilled in the store": {
        "batching": "packed",
        "grpo": {"dynamic_sampling": {"enabled": True, "max_refills": 3}},
    },
    "in memory with a reference": {
        "batching": "dynamic",
        "data_plane": {"enabled": False},
        "loss": {"kl_coefficient": 0.05},
    },
    "replayed routes, two updates": {
        "policy": {
            "model": tiny_recipe(Path("none")).policy.model.model_dump(),
            "train_micro_batch_size": 4,
            "logprob_batch_size": 8,
            "train_global_batch_size": 8,
            "router_replay": {"enabled": True},
        },
    },
}


def record(recipe: Any, folder: Path, **options: Any) -> Path:
    options = {"run": None, "step": None, "with_weights": True, "say": lambda line: None, **options}
    return record_step(recipe, folder, **options)


def cli(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Recorder]:
    """A run of three steps with a checkpoint of the first; its reference is not the policy."""
    directory, seen = tmp_path_factory.mktemp("recorded") / "run", Recorder()
    recipe = tiny_recipe(
        directory,
        batching="packed",
        grpo={"max_num_steps": 3},
        loss={"kl_coefficient": 0.05},
        checkpointing={"save_period": 1, "keep_top_k": None},
        warm_start={"enabled": True, "steps": 2, "batch_size": 16},
        validation={"at_start": False, "at_end": False},
    )
    with RunDirectory.open(directory, recipe_text=dump_recipe(recipe)) as opened:
        opened.begin()
        train(recipe, directory, seen, NeverStop())
    return directory, seen


@pytest.fixture(scope="module")
def folder(run: tuple[Path, Recorder]) -> Path:
    """Its second step, by the command."""
    path = run[0].parent / "step2"
    done = cli("record-step", run[0], "--step", 2, "--to", path)
    assert done.exit_code == 0, done.output
    return path


def test_a_recorded_step_is_that_of_the_run(run: tuple[Path, Recorder], folder: Path) -> None:
    of_run = run[1].steps[1].metrics
    recorded = {n: v for n, v in Results.read(folder).metrics.items() if not n.endswith(("_s", "/seconds"))}
    assert recorded == {name: of_run[name] for name in recorded}
    assert recorded["train/loss"] != 0


@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_replayed_on_the_same_code_and_layout_is_the_same_bit_for_bit(
    tmp_path: Path, name: str
) -> None:
    folder = record(tiny_recipe(tmp_path / "none", **SETTINGS[name]), tmp_path / "step")
    recorded, again = Results.read(folder), replay_step(folder, [])
    assert again.metrics == recorded.metrics
    gaps = list(compare_columns(recorded.samples, again.samples))
    assert {"advantages", "prev_logprobs", "sample_mask"} <= {gap.name for gap in gaps}
    assert [gap for gap in gaps if gap.samples] == []
    assert not (tmp_path / "none").exists(), "a recipe's run directory is not touched"


def test_the_command_says_that_nothing_differs(folder: Path) -> None:
    done = cli("replay-step", folder, "--tolerance", 0)
    assert done.exit_code == 0, done.output
    assert "the same, bit for bit" in done.output
    assert "reference_policy_logprobs" in done.output


def test_another_layout_is_compared_with_what_was_recorded_and_with_a_saved_replay(
    folder: Path, tmp_path: Path
) -> None:
    padded = ["policy.sequence_packing.enabled=false", "policy.train_micro_batch_size=2"]
    done = cli("replay-step", folder, *padded, "--save", tmp_path / "padded", "--tolerance", 1e-4)
    assert done.exit_code == 0, done.output
    recorded, other = Results.read(folder), Results.read(tmp_path / "padded")
    gaps = {gap.name: gap for gap in compare_columns(recorded.samples, other.samples)}
    assert gaps["advantages"].samples == 0
    assert metric_gaps(recorded.metrics, other.metrics), "another order of additions has other last digits"
    same = cli("replay-step", folder, *padded, "--compare", tmp_path / "padded")
    assert "the same, bit for bit" in same.output
    far = cli("replay-step", folder, "policy.optimizer.lr=1", "loss.kl_coefficient=1", "--tolerance", 1e-4)
    assert far.exit_code == 1
    assert "above --tolerance 0.0001" in far.output


def test_a_gap_is_told_with_its_sample_token_and_size() -> None:
    one = SampleColumns.of_leaves(
        ["a", "b", "c"], {"x": torch.tensor([1.0, 2.0, float("nan")]), "y": torch.zeros(3, 2)}
    )
    other = SampleColumns.of_leaves(
        ["c", "b", "a"], {"x": torch.tensor([float("nan"), 2.5, 1.0]), "y": torch.zeros(3, 2)}
    )
    assert list(compare_columns(one, other)) == [ColumnGap("x", 1, 0.5, "b"), ColumnGap("y", 0, 0.0)]


def test_of_tokens_the_first_that_differs_is_told(folder: Path, tmp_path: Path) -> None:
    recorded, changed = Results.read(folder), Results.read(folder)
    column = changed.samples.columns["prev_logprobs"]
    assert column.offsets is not None
    start = int(column.offsets[5])
    for values in (recorded.samples.columns["prev_logprobs"].values, column.values):
        values[start + 2 : start + 4] = -1.0
    column.values[start + 2] += 0.25
    column.values[start + 3] -= 0.5
    gaps = {gap.name: gap for gap in compare_columns(recorded.samples, changed.samples)}
    ids = recorded.samples.sample_ids
    assert gaps["prev_logprobs"] == ColumnGap("prev_logprobs", 1, 0.5, ids[5], 2)
    with pytest.raises(ConfigError, match="not of the same samples"):
        list(compare_columns(recorded.samples, SampleColumns([*ids[1:], "z"], changed.samples.columns)))


def test_weights_may_stay_where_they_are(run: tuple[Path, Recorder], tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path / "none")
    small = record(recipe, tmp_path / "first", with_weights=False)
    assert read_facts(small).policy is None
    assert not (small / "policy").exists()
    assert replay_step(small, []).metrics == Results.read(small).metrics
    done = cli("record-step", run[0], "--no-weights", "--to", tmp_path / "next")
    assert done.exit_code == 0, done.output
    checkpoint = run[0] / "checkpoints" / "step_000003" / "policy"
    assert read_facts(tmp_path / "next").policy == str(checkpoint)
    assert "the same, bit for bit" in cli("replay-step", tmp_path / "next").output


def test_a_step_that_fails_is_recorded_up_to_its_error(tmp_path: Path) -> None:
    recipe = tiny_recipe(
        tmp_path / "none", loss={"target": "exploding_loss:explode"}, code_path=[str(tmp_path)]
    )
    (tmp_path / "exploding_loss.py").write_text(
        "def explode(inputs, cfg):\n    return inputs.logprobs * (float('inf') if len(inputs.logprobs) > 2 else 1)\n"
    )
    folder = record(recipe, tmp_path / "step")
    error = read_facts(folder).error
    assert error is not None
    assert "expected finite numbers" in error
    with pytest.raises(HeadraceError) as raised:
        replay_step(folder, [])
    assert str(raised.value) == error
    done = cli("replay-step", folder)
    assert done.exit_code == 1
    assert "it ended with an error: step 1" in done.output


def test_wrong_uses_are_told_in_a_line(folder: Path, run: tuple[Path, Recorder], tmp_path: Path) -> None:
    def refusal(*arguments: object) -> str:
        done = cli(*arguments)
        assert done.exit_code == 2, done.output
        return done.stderr.strip()

    (tmp_path / "empty").mkdir()
    broken, gone, old = (tmp_path / name for name in ("broken", "gone", "old"))
    for copy in (broken, gone, old):
        shutil.copytree(folder, copy)
    (broken / "rollout_0.safetensors").write_bytes(b"no such file")
    shutil.rmtree(gone / "policy")
    facts = json.loads((old / "step.json").read_text())
    (old / "step.json").write_text(json.dumps({**facts, "format": 2}))
    told = {
        "is there already": refusal("record-step", run[0], "--to", folder),
        "no run there": refusal("record-step", tmp_path / "empty"),
        "weights that lie nowhere": refusal(
            "record-step", run[0], "--step", 9, "--no-weights", "--to", tmp_path / "x"
        ),
        "add async.enabled=false": refusal(
            "record-step", run[0], "async.enabled=true", "async.max_lag=0", "--to", tmp_path / "x"
        ),
        "no step.json there": refusal("replay-step", tmp_path / "empty"),
        "has no effect in a replay": refusal("replay-step", folder, "env.kind=math"),
        "no results.json there": refusal("replay-step", folder, "--compare", tmp_path / "empty"),
        "cannot read these columns": refusal("replay-step", broken),
        "the step starts from its weights": refusal("replay-step", gone),
        "is of format 2": refusal("replay-step", old),
    }
    for words, line in told.items():
        assert words in line
        assert "\n" not in line

"""Router replay in both loops: the same numbers, exactly one use of every row, and every stage proven."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from headrace.algorithms.observer import StepRecord
from headrace.algorithms.run import build_session, start_loop, train
from headrace.cli import app
from headrace.config import DataPlaneConfig, RecipeConfig
from headrace.data_plane.routes_codec import missing_mark
from headrace.distributed.worker_groups import LocalWorkerGroup
from headrace.errors import ConfigError, ReplayError
from headrace.models.generation.interfaces import GenerationOutput, Generator
from headrace.models.router_replay.trace import check_run
from headrace.utils.run_directory import RunDirectory
from ray_session import SIMPLE, fresh_store
from recorder import NeverStop, Recorder
from tiny_recipe import tiny_recipe

TIMES = ("_s", "seconds")


def replay_recipe(run_dir: Path, *, batching: str = "fixed", steps: int = 2, **policy: Any) -> RecipeConfig:
    return tiny_recipe(
        run_dir,
        batching=batching,
        policy={
            **tiny_recipe(run_dir, batching=batching).policy.model_dump(exclude_unset=True),
            "router_replay": {"enabled": True},
            **policy,
        },
        generation={"precision": "bfloat16"},
        grpo={"max_num_steps": steps},
        checkpointing={"enabled": False},
    )


def run(recipe: RecipeConfig) -> list[StepRecord]:
    recorder = Recorder()
    train(recipe, Path(recipe.run_dir), recorder, NeverStop())
    return recorder.steps


def numbers(record: StepRecord) -> dict[str, float]:
    return {n: v for n, v in record.metrics.items() if not n.endswith(TIMES)}


@pytest.mark.parametrize("batching", ["fixed", "dynamic", "packed"])
def test_both_loops_replay_the_same_rows_bit_for_bit(tmp_path: Path, batching: str) -> None:
    recipe = replay_recipe(tmp_path / "store", batching=batching)
    in_memory = recipe.model_copy(
        update={
            "run_dir": str(tmp_path / "memory"),
            "data_plane": recipe.data_plane.model_copy(update={"enabled": False}),
        }
    )
    over_store, in_driver = run(recipe), run(in_memory)
    assert [numbers(r) for r in over_store] == [numbers(r) for r in in_driver]
    for record in over_store:
        rows = 2 * (record.tokens - 16)
        for stage in ("prev_logprobs", "train"):
            assert record.metrics[f"router_replay/{stage}/replayed"] == rows
            assert record.metrics[f"router_replay/{stage}/native"] == 0
            assert record.metrics[f"router_replay/{stage}/never_reached"] == 0
        assert 0.5 < record.metrics["router_replay/route_exact"] <= 1
        assert record.metrics["mismatch/generation_kl"] > 0


@pytest.mark.parametrize("batching", ["fixed", "packed"])
def test_a_store_on_other_processes_gives_the_numbers_and_the_routes_of_the_local_one(
    tmp_path: Path, batching: str, transfer_queue_engine: None
) -> None:
    tracing = {"enabled": True, "trace": True}
    near = replay_recipe(tmp_path / "near", batching=batching, router_replay=tracing)
    far = near.model_copy(
        update={
            "run_dir": str(tmp_path / "far"),
            "data_plane": DataPlaneConfig.model_validate(fresh_store(SIMPLE)),
        }
    )
    here, there = run(near), run(far)
    assert [numbers(r) for r in here] == [numbers(r) for r in there]
    assert any(r.metrics["train/loss"] != 0 for r in here)
    assert check_run(tmp_path / "near") == check_run(tmp_path / "far")
    for step in (1, 2):
        files = [
            RunDirectory(tmp_path / name).traces_dir / f"step_{step:06d}.safetensors"
            for name in ("near", "far")
        ]
        left, right = (load_file(file) for file in files)
        assert left.keys() == right.keys() >= {"rollout.digests", "prev_logprobs.used", "train.used"}
        assert left["rollout.digests"].unique().numel() > 8
        for name, column in left.items():
            assert torch.equal(column, right[name]), name


def test_activation_checkpointing_replays_the_same_numbers(tmp_path: Path) -> None:
    plain = run(replay_recipe(tmp_path / "plain", batching="packed"))
    saving = run(replay_recipe(tmp_path / "saving", batching="packed", activation_checkpointing=True))
    assert [numbers(r) for r in plain] == [numbers(r) for r in saving]


def test_a_warm_start_trains_without_routes_and_the_run_replays(tmp_path: Path) -> None:
    recipe = replay_recipe(tmp_path / "run", steps=1).model_copy(
        update={
            "warm_start": tiny_recipe(tmp_path).warm_start.model_copy(
                update={"enabled": True, "steps": 2, "batch_size": 16}
            )
        }
    )
    assert run(recipe)[0].metrics["router_replay/train/replayed"] > 0


def test_the_reference_policy_is_not_replayed(tmp_path: Path) -> None:
    recipe = replay_recipe(tmp_path / "run", steps=1)
    recipe = recipe.model_copy(update={"loss": recipe.loss.model_copy(update={"kl_coefficient": 0.1})})
    record = run(recipe)[0]
    stages = {
        n.split("/")[1] for n in record.metrics if n.startswith("router_replay/") and n.endswith("/replayed")
    }
    assert stages == {"prev_logprobs", "train"}


def test_the_on_policy_shortcut_proves_the_train_stage_alone(tmp_path: Path) -> None:
    recipe = replay_recipe(tmp_path / "run", steps=1)
    recipe = recipe.model_copy(
        update={"loss": recipe.loss.model_copy(update={"force_on_policy_ratio": True})}
    )
    metrics = run(recipe)[0].metrics
    assert metrics["router_replay/train/replayed"] > 0
    assert "router_replay/prev_logprobs/replayed" not in metrics
    assert "router_replay/traced_samples" not in metrics
    assert "router_replay/route_exact" in metrics


def test_a_trace_of_a_sound_run_passes(tmp_path: Path) -> None:
    recipe = replay_recipe(
        tmp_path / "run", batching="packed", router_replay={"enabled": True, "trace": True}
    )
    assert [record.metrics["router_replay/traced_samples"] for record in run(recipe)] == [16, 16]
    for step, line in enumerate(check_run(tmp_path / "run"), start=1):
        said = f"step {step}: 16 samples as recorded; used as given: prev_logprobs 16, train 16; "
        assert re.fullmatch(rf"{said}(100|9\d)\.\d% are the routers' own choice", line)


class LosesRows:
    """An engine that has no record of the first two tokens of every fourth answer, as after a prefix-cache hit."""

    def __init__(self, inner: Generator) -> None:
        self._inner = inner
        self.route_shape = inner.route_shape
        self.update_weights, self.release, self.shutdown = inner.update_weights, inner.release, inner.shutdown

    @property
    def weight_version(self) -> int:
        return self._inner.weight_version

    def generate(self, *args: Any, **kwargs: Any) -> GenerationOutput:
        output = self._inner.generate(*args, **kwargs)
        for routes in (output.routes or [])[::4]:
            routes[:2] = missing_mark(routes.dtype)
        return output


def run_with_lost_rows(recipe: RecipeConfig) -> StepRecord:
    session, recorder = build_session(recipe), Recorder()
    try:
        assert isinstance(session.rollouts, LocalWorkerGroup)
        actor = session.rollouts.worker
        actor.generator = LosesRows(actor.generator)
        assert start_loop(session, recorder, NeverStop()).run()
    finally:
        session.close()
    return recorder.steps[0]


def test_samples_that_lack_more_rows_than_the_budget_stop_the_run_or_do_not_count(tmp_path: Path) -> None:
    def recipe(**settings: Any) -> RecipeConfig:
        made = replay_recipe(tmp_path, steps=1, router_replay={"enabled": True, **settings})
        memory = made.data_plane.model_copy(update={"enabled": False})
        return made.model_copy(update={"data_plane": memory})

    with pytest.raises(ReplayError, match=r"4 of 16 samples lack the routes.*max_missing_fraction=0\.0%"):
        run_with_lost_rows(recipe())
    masked = run_with_lost_rows(recipe(on_excess="mask")).metrics
    kept = run_with_lost_rows(recipe(max_missing_fraction=0.9)).metrics
    assert (masked["router_replay/masked_samples"], kept["router_replay/masked_samples"]) == (4, 0)
    assert masked["router_replay/missing_fraction"] == kept["router_replay/missing_fraction"] > 0
    for metrics in (masked, kept):
        for stage in ("prev_logprobs", "train"):
            # Two tokens of four samples, in two layers.
            assert metrics[f"router_replay/{stage}/native"] == 16
    assert masked["train/loss"] != kept["train/loss"]


def test_a_model_of_300_experts_replays_in_two_bytes_per_id(tmp_path: Path) -> None:
    recipe = replay_recipe(tmp_path / "run", batching="packed", steps=1)
    config = {**(recipe.policy.model.config or {}), "num_experts": 300, "num_experts_per_tok": 4}
    model = recipe.policy.model.model_copy(update={"config": config})
    policy = recipe.policy.model_copy(
        update={
            "model": model,
            "router_replay": recipe.policy.router_replay.model_copy(update={"trace": True}),
        }
    )
    record = run(recipe.model_copy(update={"policy": policy}))[0]
    assert record.metrics["router_replay/train/replayed"] == 2 * (record.tokens - 16)
    rows = load_file(RunDirectory(tmp_path / "run").traces_dir / "step_000001.safetensors")["train.used"]
    assert rows.dtype == torch.int16
    assert 255 < rows.max() < 300


def test_the_command_line_checks_a_trace_and_names_a_row_that_was_changed_after_it(tmp_path: Path) -> None:
    run(replay_recipe(tmp_path / "run", steps=1, router_replay={"enabled": True, "trace": True}))
    sound = CliRunner().invoke(app, ["trace-check", str(tmp_path / "run")])
    assert (sound.exit_code, sound.output.count("16 samples as recorded")) == (0, 1)
    file = RunDirectory(tmp_path / "run").traces_dir / "step_000001.safetensors"
    with safe_open(file, framework="pt") as opened:
        about, columns = opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    columns["train.used"][0, 1] = columns["train.used"][0, 1].flip(-1)
    save_file(columns, file, about)
    changed = CliRunner().invoke(app, ["trace-check", str(tmp_path / "run")])
    assert changed.exit_code == 1
    assert re.search(
        r"stage 'train', sample '.*', rows that the routers used.*token 0, layer 1",
        " ".join(changed.output.split()),
    )


def test_replay_on_a_dense_model_stops_before_the_first_step(tmp_path: Path) -> None:
    recipe = replay_recipe(tmp_path / "run")
    dense = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
    }
    model = recipe.policy.model.model_copy(update={"config": dense, "experts_implementation": None})
    recipe = recipe.model_copy(update={"policy": recipe.policy.model_copy(update={"model": model})})
    with pytest.raises(ConfigError, match=r"policy\.router_replay\.enabled=true.*no router"):
        run(recipe)

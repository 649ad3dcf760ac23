"""Router replay in both loops: the same numbers, exactly one use of every row, and every stage proven."""

from pathlib import Path
from typing import Any

import pytest

from headrace.algorithms.observer import StepRecord
from headrace.algorithms.run import train
from headrace.config import RecipeConfig
from headrace.errors import ConfigError
from headrace.trace_check import check_run
from recorder import Recorder
from tiny_recipe import tiny_recipe

TIMES = ("_s", "seconds")


class NoStop:
    def is_set(self) -> bool:
        return False


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
    train(recipe, Path(recipe.run_dir), recorder, NoStop())
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
    assert "router_replay/route_exact" in metrics


def test_a_trace_of_a_sound_run_passes(tmp_path: Path) -> None:
    recipe = replay_recipe(
        tmp_path / "run", batching="packed", router_replay={"enabled": True, "trace": True}
    )
    run(recipe)
    assert check_run(tmp_path / "run") == [
        f"step {step}: 16 samples as recorded; used as given: prev_logprobs 16, train 16" for step in (1, 2)
    ]


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

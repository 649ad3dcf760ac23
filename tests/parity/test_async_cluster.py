"""The asynchronous loop on a Ray cluster: collectors and the policy's ranks in actors, rows in TransferQueue."""

from pathlib import Path
from typing import Any

import torch
from test_cluster_loop import ROWS, numbers, on_the_cluster, run_steps

from headrace.algorithms.observer import UPDATE_BYTES
from headrace.config import RecipeConfig

STEPS = 3


def asynchronous(recipe: RecipeConfig, **section: Any) -> RecipeConfig:
    return RecipeConfig.model_validate({**recipe.model_dump(), "async": {"enabled": True, **section}})


def recipe_for(directory: Path, workers: int, **changes: Any) -> RecipeConfig:
    grpo = {"max_num_steps": STEPS, **changes.pop("grpo", {})}
    quiet = {"period": 0, "at_start": False, "batch_size": 8}
    loss = {"importance_correction": "tis"}
    return on_the_cluster(directory, workers, grpo=grpo, validation=quiet, loss=loss, **changes)


def test_without_a_lag_actors_take_the_steps_of_the_synchronous_loop(
    tmp_path: Path, transfer_queue_engine: None
) -> None:
    want = run_steps(recipe_for(tmp_path, 1))
    got = run_steps(asynchronous(recipe_for(tmp_path, 1), max_lag=0))
    assert torch.equal(numbers(got["steps"]), numbers(want["steps"]))
    assert numbers(want["steps"])[:, 0].abs().max() > 1e-3, "a loss of zero proves nothing"
    assert got["recorder"].samples == want["recorder"].samples
    assert got["recorder"].validations == want["recorder"].validations
    for name, weight in want["weights"].items():
        assert torch.equal(got["weights"][name], weight), name
    for record in got["steps"]:
        check_driver(record)


def test_two_ranks_and_two_collectors_train_within_the_bound_while_weights_change_inside_answers(
    tmp_path: Path, transfer_queue_engine: None
) -> None:
    lagging = {"max_lag": 1, "collectors": 2, "on_update": "resume", "piece_tokens": 2}
    steps = run_steps(asynchronous(recipe_for(tmp_path, 2), **lagging))["steps"]
    assert [record.step for record in steps] == [1, 2, 3]
    assert steps[0].metrics["async/lag_max"] == 0
    assert all(0 <= record.metrics["async/lag_max"] <= 1 for record in steps)
    assert all(record.metrics["async/failed_calls"] == 0 for record in steps)
    assert all(record.metrics["train/grad_norm"] > 0 for record in steps)
    for record in steps:
        check_driver(record)


def check_driver(record: Any) -> None:
    """Neither rows nor weights go through the driver's process; a row's metadata is some hundred bytes."""
    assert ROWS * 100 < record.metrics["data_plane/driver_bytes"] < ROWS * 1500 < record.metrics[UPDATE_BYTES]

"""The asynchronous loop on a Ray cluster: collectors and the policy's ranks in actors, rows in TransferQueue."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cluster_loop import ROWS, numbers, on_the_cluster, run_steps

from headrace.algorithms.observer import UPDATE_BYTES, StepRecord
from headrace.algorithms.run import build_session, start_loop, train
from headrace.config import RecipeConfig
from recorder import NeverStop, Recorder


def recipe_for(directory: Path, workers: int, steps: int = 3, **changes: Any) -> RecipeConfig:
    """Return a recipe of `workers` ranks on Ray, unless the changes say otherwise."""
    quiet = {"period": 0, "at_start": False, "batch_size": 8}
    loss = {"importance_correction": "tis"}
    grpo = {"max_num_steps": steps}
    return on_the_cluster(directory, workers, grpo=grpo, validation=quiet, loss=loss, **changes)


def check_driver(record: StepRecord) -> None:
    """Neither rows nor weights go through the driver's process; metadata of two steps' rows does."""
    assert ROWS * 100 < record.metrics["data_plane/driver_bytes"] < ROWS * 3000 < record.metrics[UPDATE_BYTES]


@pytest.mark.parametrize("indexes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_without_a_lag_actors_take_the_steps_of_the_synchronous_loop(
    tmp_path: Path, transfer_queue_engine: None, indexes: int
) -> None:
    want = run_steps(recipe_for(tmp_path, 1))
    assert numbers(want["steps"])[:, 0].abs().max() > 1e-3, "a loss of zero proves nothing"
    values = recipe_for(tmp_path, 1, **{"async": {"enabled": True, "max_lag": 0}}).model_dump()
    values["data_plane"]["indexes"] = indexes
    got = run_steps(RecipeConfig.model_validate(values))
    assert torch.equal(numbers(got["steps"]), numbers(want["steps"]))
    assert got["recorder"].samples == want["recorder"].samples
    assert got["recorder"].validations == want["recorder"].validations
    for name, weight in want["weights"].items():
        assert torch.equal(got["weights"][name], weight), name
    for record in got["steps"]:
        check_driver(record)


def test_two_ranks_train_while_two_collectors_and_the_weights_keeper_die_and_weights_change_inside_answers(
    tmp_path: Path, transfer_queue_engine: None, caplog: pytest.LogCaptureFixture
) -> None:
    ray = pytest.importorskip("ray")
    section = {"enabled": True, "max_lag": 1, "collectors": 2, "on_update": "resume", "piece_tokens": 2}
    session = build_session(recipe_for(tmp_path, 2, 4, **{"async": section}))

    class Killing(Recorder):
        def on_step(self, record: StepRecord) -> None:
            super().on_step(record)
            if record.step == 1:
                for group in (session.rollouts, *session.others):
                    ray.kill(group._actors[0])  # type: ignore[attr-defined]
            if record.step == 2:
                assert session.weights is not None
                ray.kill(session.weights._actors[0])  # type: ignore[attr-defined]

    recorder = Killing()
    try:
        assert start_loop(session, recorder, NeverStop()).run()
    finally:
        session.close()
    assert [record.step for record in recorder.steps] == [1, 2, 3, 4]
    assert recorder.steps[0].metrics["async/lag_max"] == 0
    assert caplog.text.count("it is started again") >= 1  # the other one may have nothing to do any more
    assert "the keeper of the weights has died" in caplog.text
    assert sum(record.metrics["async/restored_weights"] for record in recorder.steps) == 1
    for record in recorder.steps:
        assert 0 <= record.metrics["async/lag_max"] <= 1
        assert record.metrics["train/grad_norm"] > 0
        check_driver(record)


class StopWith(NeverStop):
    """The user asks to stop when so many steps are done."""

    def __init__(self, recorder: Recorder, steps: int) -> None:
        super().__init__()
        self._recorder, self._steps = recorder, steps

    def is_set(self) -> bool:
        return len(self._recorder.steps) >= self._steps


def test_a_run_that_goes_on_has_the_rows_of_its_checkpoint_and_trains_on_no_sample_twice(
    tmp_path: Path, transfer_queue_engine: None, caplog: pytest.LogCaptureFixture
) -> None:
    def run(steps: int) -> Recorder:
        section = {"enabled": True, "max_lag": 1, "prompts_per_call": 1}
        shown = {"samples_per_step": ROWS}
        values = recipe_for(tmp_path, 1, 4, logging=shown, **{"async": section}).model_dump()
        values["data_plane"]["journal"]["enabled"] = True
        recorder = Recorder()
        train(RecipeConfig.model_validate(values), tmp_path, recorder, StopWith(recorder, steps))
        return recorder

    first = run(2)
    with caplog.at_level(logging.WARNING):
        second = run(9)
    assert "rows are in the store again" in caplog.text
    assert [record.step for part in (first, second) for record in part.steps] == [1, 2, 3, 4]
    samples = [s["sample_id"] for part in (first, second) for _, _, some in part.samples for s in some]
    assert len(set(samples)) == len(samples) == 4 * ROWS
    assert all(r.metrics["async/lag_max"] <= 1 for r in second.steps)

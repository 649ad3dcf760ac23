"""Without a lag, the asynchronous loop is the synchronous one, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
from test_loops import LOCAL, check_bit_identical, recipe_for, run_steps

STEPS = 5


def run_both(tmp_path: Path, batching: str, learner: str, **asynchrony: Any) -> tuple[Any, Any]:
    recipe = recipe_for(tmp_path, batching, learner, data_plane=LOCAL)
    recipe = recipe.model_copy(update={"grpo": recipe.grpo.model_copy(update={"max_num_steps": STEPS})})
    section = {"enabled": True, "max_lag": 0, **asynchrony}
    asynchronous = type(recipe).model_validate({**recipe.model_dump(), "async": section})
    return run_steps(asynchronous), run_steps(recipe)


def without_its_own(run: dict[str, Any]) -> dict[str, Any]:
    """Take the metrics out that a synchronous run has not."""
    for record in run["records"]:
        own = {name for name in record.metrics if name.startswith("async/")}
        assert record.metrics["async/lag_max"] == record.metrics["async/failed_calls"] == 0
        for name in own:
            del record.metrics[name]
    return run


CASES = [("packed", "plain"), ("fixed", "reference_and_correction"), ("packed", "on_policy_shortcut")]


@pytest.mark.parametrize(("batching", "learner"), CASES)
def test_without_a_lag_the_loop_is_the_synchronous_one(tmp_path: Path, batching: str, learner: str) -> None:
    asynchronous, synchronous = run_both(tmp_path, batching, learner)
    check_bit_identical(without_its_own(asynchronous), synchronous, STEPS)

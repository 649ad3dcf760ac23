"""The on-policy shortcut computes no previous logprobs, and reports the generator's gap all the same."""

from pathlib import Path
from typing import Any

import pytest

from headrace.algorithms.observer import StepRecord
from headrace.algorithms.run import build_session, start_loop
from recorder import NeverStop, Recorder
from tiny_recipe import tiny_recipe


def run(directory: Path, *, shortcut: bool, replay: bool, **changes: Any) -> list[StepRecord]:
    recipe = tiny_recipe(
        directory,
        policy={"router_replay": {"enabled": replay}, **changes.pop("policy", {})},
        generation={"precision": "bfloat16"},
        loss={"force_on_policy_ratio": shortcut},
        grpo={"max_num_steps": 2},
        checkpointing={"enabled": False},
        **changes,
    )
    session, recorder = build_session(recipe), Recorder()
    try:
        assert start_loop(session, recorder, NeverStop()).run()
    finally:
        session.close()
    return recorder.steps


def gap(record: StepRecord) -> dict[str, float]:
    return {name: value for name, value in record.metrics.items() if name.startswith("mismatch/")}


@pytest.mark.parametrize("replay", [False, True], ids=["plain", "replay"])
@pytest.mark.parametrize("batching", ["fixed", "packed"])
def test_the_shortcut_reports_the_gap_of_a_step_with_previous_logprobs(
    tmp_path: Path, batching: str, replay: bool
) -> None:
    plain = run(tmp_path, shortcut=False, replay=replay, batching=batching)
    short = run(tmp_path, shortcut=True, replay=replay, batching=batching)
    in_memory = run(tmp_path, shortcut=True, replay=replay, batching=batching, data_plane={"enabled": False})
    for want, got, other in zip(plain, short, in_memory):
        assert "prev_logprobs" in want.timings_s
        assert "prev_logprobs" not in got.timings_s
        assert gap(got) == gap(other)
        assert gap(got).keys() == gap(want).keys()
        assert gap(got)["mismatch/generation_kl"] > 1e-8
        assert not any(name.startswith("train/mismatch") for name in got.metrics)
    # The same weights and tokens, scored in microbatches of another size.
    assert gap(short[0]) == pytest.approx(gap(plain[0]), rel=1e-2, abs=1e-9)

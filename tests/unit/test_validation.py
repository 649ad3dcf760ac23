"""Validation of environments with and without verdicts, and the checkpoint that is best by what they give."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.algorithms.observer import BEST_BY
from headrace.algorithms.run import build_session, start_loop
from headrace.config import ValidationConfig
from headrace.environments.interfaces import StepResult
from headrace.errors import ConfigError
from headrace.experience.rollouts import RolloutSettings
from headrace.experience.sync_rollout_actor import SyncRolloutActor
from headrace.experience.types import Prompt
from headrace.models.generation.interfaces import SamplingParams
from headrace.run_tables import held_out, render_text, summary_table
from headrace.utils.checkpoints import CheckpointManager
from recorder import NeverStop, Recorder
from reference_experience import BigramGenerator, GuessingGame, character_tokenizer
from tiny_recipe import tiny_recipe


class Judge(GuessingGame):
    """Gives prompt i the reward i / 4; a verdict on the first `verdicts` prompts alone."""

    verdicts = 0

    def step(self, prompts: Sequence[Prompt], *_: Any, **__: Any) -> list[StepResult]:
        numbers = [int(prompt.uid.removeprefix("validation")) for prompt in prompts]
        return [StepResult(n / 4, correct=n % 2 == 0 if n < self.verdicts else None) for n in numbers]


def measured(verdicts: int, judge: Judge | None = None, **cfg: Any) -> dict[str, float]:
    judge = judge or Judge()
    judge.verdicts = verdicts
    tokenizer = character_tokenizer()
    settings = RolloutSettings(SamplingParams(max_new_tokens=5), max_total_tokens=64)
    validation = ValidationConfig(batch_size=3, **cfg)
    actor = SyncRolloutActor(BigramGenerator(tokenizer), tokenizer, judge, settings, validation=validation)
    return actor.validate(seed=0)


def test_without_verdicts_there_is_a_mean_reward_and_no_accuracy() -> None:
    assert measured(0) == {"validation/reward": 0.375, "validation/sampled_reward": 0.375}
    assert measured(0, sampled=False) == {"validation/reward": 0.375}


def test_with_verdicts_there_are_both_and_an_answer_without_one_is_not_right() -> None:
    both = {"validation/reward": 0.375, "validation/sampled_reward": 0.375}
    assert measured(4) == {"validation/accuracy": 0.5, "validation/sampled_accuracy": 0.5, **both}
    assert measured(1) == {"validation/accuracy": 0.25, "validation/sampled_accuracy": 0.25, **both}


def test_the_parts_of_a_reward_are_measured_greedy_and_sampled() -> None:
    class Parts(Judge):
        def step(self, prompts: Sequence[Prompt], *rest: Any, **more: Any) -> list[StepResult]:
            results = super().step(prompts, *rest, **more)
            own = [{"reward/half": r.reward / 2} | ({"tries": 1.0} if r.reward else {}) for r in results]
            return [StepResult(r.reward, metrics=m) for r, m in zip(results, own)]

    found = measured(0, judge=Parts())
    for prefix in ("validation/", "validation/sampled_"):
        assert found[f"{prefix}reward/half"] == found[f"{prefix}reward"] / 2 == 0.1875
        assert found[f"{prefix}environment/tries"] == 1.0


def test_rewards_are_shown_under_their_own_name_where_there_is_no_accuracy() -> None:
    assert held_out({"validation/accuracy": 0.5, "validation/reward": 0.7}) == (
        "accuracy",
        {"greedy": "50.0%"},
    )
    rewards = {"validation/reward": 0.9, "validation/sampled_reward": 0.85}
    assert held_out(rewards) == ("reward", {"greedy": "0.9", "sampled": "0.85"})
    summary = {"val_accuracy_before": None, "val_accuracy_after": None}
    text = render_text(summary_table({**summary, "val_reward_before": 0.1, "val_reward_after": 0.9}))
    assert "held-out reward" in text
    assert re.search(r"greedy +0\.1 +0\.9", text)


def run_with(
    tmp_path: Path, validations: list[dict[str, float]], metric: str | None = None
) -> CheckpointManager:
    """Run two steps, each validated (to these results) and saved."""
    recipe = tiny_recipe(
        tmp_path,
        data_plane={"enabled": False},
        grpo={"max_num_steps": 2},
        validation={"period": 1},
        checkpointing={"save_period": 1, "save_optimizer": False, "metric": metric},
    )
    session = build_session(recipe)
    try:
        checkpoints = CheckpointManager(
            tmp_path / "checkpoints", keep_top_k=1, metric=recipe.checkpointing.metric or BEST_BY
        )
        loop = start_loop(session, Recorder(), NeverStop(), checkpoints)
        results = iter(validations)
        loop.session.validate = lambda: next(results)
        loop.run()
    finally:
        session.close()
    return checkpoints


def test_the_best_checkpoint_is_best_by_what_the_environment_gives(tmp_path: Path) -> None:
    rewards = [{"validation/reward": value} for value in (0.1, 0.9, 0.2)]
    best = run_with(tmp_path, rewards).best()
    assert best is not None
    assert (best.step, best.metrics) == (1, {"validation/reward": 0.9})


def test_a_ranking_by_what_is_not_measured_is_refused_at_the_first_validation(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"checkpointing\.metric=validation/accuracy is not measured.*choose one of validation/reward",
    ):
        run_with(tmp_path, [{"validation/reward": 0.1}], "validation/accuracy")
    assert not list((tmp_path / "checkpoints").glob("step_*"))

"""Reward functions of one's own that fail now and then, or always: what is counted, and when a run ends."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.config import DatasetConfig, ValidationConfig, ValidationSourceConfig
from headrace.environments.dataset import REWARDS
from headrace.environments.interfaces import StepResult
from headrace.environments.own_rewards import OwnRewards
from headrace.errors import ConfigError, RewardError
from headrace.experience.own_columns import own_columns
from headrace.experience.types import Message, Prompt, Rollout
from headrace.experience.validation import ValidationSet, measure
from headrace.models.generation.interfaces import SamplingParams

CODE = """
def one(completion): return {"reward": {"ok": 1.0}[completion], "level": 0.5}
def together(completions): return [{"ok": 1.0}[completion] for completion in completions]
"""


@pytest.fixture
def _code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rewards_code.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)


def rewards_of(name: str) -> OwnRewards:
    cfg = DatasetConfig.model_validate({"rewards": [f"own_rewards_code:{name}"], "reward_timeout_s": None})
    return OwnRewards(cfg, REWARDS)


def prompts_of(texts: Sequence[str]) -> list[Prompt]:
    return [Prompt(f"p{i}", (Message("user", "q"),)) for i in range(len(texts))]


def score(rewards: OwnRewards, texts: Sequence[str]) -> list[StepResult]:
    return rewards.score(prompts_of(texts), texts, [False] * len(texts))


@pytest.mark.usefixtures("_code")
@pytest.mark.parametrize("count", [9, 10])
def test_a_call_that_fails_in_a_small_last_batch_of_a_validation_counts_as_0(count: int) -> None:
    rewards, texts = rewards_of("one"), ["ok"] * 8 + ["fails"] + ["ok"] * (count - 9)
    said = {prompt.uid: text for prompt, text in zip(prompts_of(texts), texts)}

    def roll_out(prompts: Sequence[Prompt], *_: object) -> list[Rollout]:
        results = rewards.score(prompts, [said[p.uid] for p in prompts], [False] * len(prompts))
        return [Rollout(f"{p.uid}_g0", p, 0, reward=r.reward) for p, r in zip(prompts, results)]

    sets = [ValidationSet("", prompts_of(texts), ValidationSourceConfig(path=""))]
    measured = measure(sets, ValidationConfig(batch_size=4, sampled=False), SamplingParams(8), roll_out)
    assert measured["validation/reward"] == pytest.approx((count - 1) / count)


@pytest.mark.usefixtures("_code")
@pytest.mark.parametrize(("name", "size", "fine"), [("one", 10, 3), ("one", 100, 0), ("together", 100, 2)])
def test_a_function_that_fails_many_times_in_a_row_ends_the_run(name: str, size: int, fine: int) -> None:
    rewards = rewards_of(name)
    for _ in range(2):
        for _ in range(fine):
            assert [result.reward for result in score(rewards, ["fails"] * size)] == [0.0] * size
        if fine:
            score(rewards, ["ok"])  # from here it begins anew
    for _ in range(fine):
        score(rewards, ["fails"] * size)
    with pytest.raises(
        RewardError, match=rf"own_rewards_code:{name} failed on .* in a row.*'p0'.*KeyError.*mend it"
    ):
        score(rewards, ["fails"] * size)


@pytest.mark.usefixtures("_code")
def test_a_column_that_a_failed_call_did_not_return_is_0_and_one_that_nobody_returns_is_named() -> None:
    texts = ["ok", "fails", "ok"]
    results = score(rewards_of("one"), texts)
    rollouts = [
        Rollout(f"{p.uid}_g0", p, 0, metrics=dict(r.metrics)) for p, r in zip(prompts_of(texts), results)
    ]
    assert own_columns(rollouts, ["level"])["level"].tolist() == [0.5, 0.0, 0.5]
    with pytest.raises(ConfigError, match="asks for column 'hardness', and sample 'p0_g0' has nothing"):
        own_columns(rollouts, ["hardness"])

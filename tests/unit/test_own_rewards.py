"""Reward functions of one's own that fail now and then, or always: what is counted, and when a run ends."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from headrace.config import (
    DataConfig,
    DatasetConfig,
    PythonConfig,
    ValidationConfig,
    ValidationSourceConfig,
)
from headrace.environments.dataset import REWARDS
from headrace.environments.interfaces import StepResult
from headrace.environments.own_rewards import OwnRewards
from headrace.environments.prompts import Splits
from headrace.environments.python import python_environment
from headrace.errors import ConfigError, RewardError
from headrace.experience.own_columns import own_columns
from headrace.experience.scoring import checked_results, score_group
from headrace.experience.types import Message, Prompt, Rollout
from headrace.experience.validation import ValidationSet, measure
from headrace.models.generation.interfaces import SamplingParams

CODE = """
import asyncio
import time
from headrace import StepResult

at_once = asyncio.Semaphore(2)
async def few(completion):
    async with at_once:
        await asyncio.sleep(0.001)
        return {"ok": 1.0}[completion]
async def few_together(completions):
    return await asyncio.gather(*map(few, completions))
class Few:
    def __init__(self): self.at_once = asyncio.Semaphore(2)
    async def judge(self, talk):
        async with self.at_once:
            await asyncio.sleep(0.001)
            return StepResult(1.0)
    async def step(self, conversations):
        return await asyncio.gather(*map(self.judge, conversations))

def slow(completion): time.sleep(50)
def one(completion): return {"reward": {"ok": 1.0}[completion], "level": 0.5}
def together(completions): return [{"ok": 1.0}[completion] for completion in completions]
"""


@pytest.fixture
def _code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rewards_code.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)


def rewards_of(name: str, timeout_s: float | None = None) -> OwnRewards:
    cfg = DatasetConfig.model_validate(
        {"rewards": [f"own_rewards_code:{name}"], "reward_timeout_s": timeout_s}
    )
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


@pytest.mark.usefixtures("_code")
@pytest.mark.parametrize("timeout_s", [20.0, None])
@pytest.mark.parametrize("name", ["few", "few_together"])
def test_what_asynchronous_rewards_share_works_in_every_call_also_after_one_that_failed(
    name: str, timeout_s: float | None
) -> None:
    rewards = rewards_of(name, timeout_s)
    for texts in (["ok"] * 8, ["ok"] * 8, ["ok"] * 7 + ["fails"], ["ok"] * 8):
        failed = texts.count("fails") * (len(texts) if name == "few_together" else 1)
        assert [result.reward for result in score(rewards, texts)] == [1.0] * (8 - failed) + [0.0] * failed


@pytest.mark.usefixtures("_code")
def test_what_turns_of_an_asynchronous_environment_share_works_in_every_step() -> None:
    splits = Splits(prompts_of("ab"), prompts_of("c"))
    environment = python_environment(PythonConfig(target="own_rewards_code:Few"), DataConfig(), splits=splits)
    for _ in range(3):
        prompts = prompts_of("abcdefgh")
        talks = [prompt.messages for prompt in prompts]
        results = environment.step(prompts, talks, truncated=[False] * 8)
        assert [result.reward for result in results] == [1.0] * 8


class Grading:
    """Measures with NumPy."""

    def prompts(self, split: str) -> list[Prompt]:
        return prompts_of("ab")

    def step(self, prompts: Sequence[Prompt], *_: object, **__: object) -> list[StepResult]:
        grades = np.array([0.5, 2.0], dtype=np.float32)
        return [
            StepResult(float(x), metrics={"grade": x, "place": np.int64(i)}) for i, x in enumerate(grades)
        ]


def test_a_number_of_numpys_that_an_environment_measures_is_a_column_as_any_number() -> None:
    rollouts = [Rollout(f"{prompt.uid}_g0", prompt, 0) for prompt in prompts_of("ab")]
    score_group(Grading(), rollouts)
    columns = own_columns(rollouts, ["grade", "place"])
    assert {name: column.tolist() for name, column in columns.items()} == {
        "grade": [0.5, 2.0],
        "place": [0.0, 1.0],
    }


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_narrow_number_that_is_not_finite_is_refused(kind: type[np.floating], value: float) -> None:
    for result in (StepResult(kind(value)), StepResult(0.0, metrics={"grade": kind(value)})):  # type: ignore[arg-type,dict-item]
        with pytest.raises(RewardError, match=r"result 0 \(p0\) with .* expected a.* finite number"):
            checked_results([result], ["p0"])
    assert checked_results([StepResult(kind(0.5))], ["p0"])  # type: ignore[arg-type]


INTERRUPTED = """
import signal, threading
from test_own_rewards import rewards_of, score

rewards = rewards_of("slow", 60.0)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts without
main = threading.main_thread().ident
threading.Timer(2.0, signal.pthread_kill, [main, signal.SIGINT]).start()
try:
    score(rewards, ["ok"] * 3)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.usefixtures("_code")
def test_a_process_that_is_interrupted_does_not_wait_for_a_slow_reward(tmp_path: Path) -> None:
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-c", INTERRUPTED]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, timeout=40, capture_output=True, check=True
    )
    assert done.stdout == b"interrupted\n"

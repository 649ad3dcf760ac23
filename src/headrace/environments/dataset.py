"""Questions with answers: completions compared with them as text, or scored by functions of the user's own."""

import re
from collections.abc import Callable, Sequence
from decimal import Decimal

from headrace.config import DataConfig, DatasetConfig
from headrace.environments.interfaces import Prompts, Reward, StepResult, Talks
from headrace.environments.own_rewards import OwnRewards
from headrace.environments.prompts import Splits, read_splits
from headrace.environments.single_turn import SingleTurnEnvironment
from headrace.experience.types import Prompt

# Digits, in whole groups of thousands or without, and a fraction, or that alone; an exponent. A sign counts unless it
# follows a digit; the last of the signs is the minus of typesetting.
_NUMBER = re.compile(
    r"(?:(?<!\d)[-+\u2212])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+\u2212]?\d{1,3})?"
)


def dataset_environment(
    cfg: DatasetConfig, data: DataConfig, *, seed: int, splits: Splits | None = None
) -> SingleTurnEnvironment:
    """Build the environment that compares completions with answers as text, or scores them by `cfg.rewards`.

    `exact`: equal, outer whitespace aside. `contains`: the completion holds the answer. `last_number`: the last numbers
    in both are equal as numbers (`1,200` = `1200.0`).

    Raises:
        ConfigError: see `read_splits`; also an answer that is missing, or, for `last_number`, without a number; or a
            reward function that cannot be called, raises, or returns no reward.
    """
    splits = splits or read_splits(data, cfg, task=cfg.kind)
    used: set[str] = {spec.target for spec in cfg.rewards} if cfg.rewards else {cfg.match}
    splits.check(lambda prompt: _fault_of_answer(prompt, used, cfg.answer_key))
    if not cfg.rewards:
        return SingleTurnEnvironment(splits.train, splits.validation, REWARDS[cfg.match], data, seed=seed)
    rewards = OwnRewards(cfg, _built_in(used))
    rewards.probe((splits.train or splits.validation)[0])
    return _OwnRewardsEnvironment(splits, rewards, data, seed=seed)


class _OwnRewardsEnvironment(SingleTurnEnvironment):
    """Scores all completions of a step together."""

    def __init__(self, splits: Splits, rewards: OwnRewards, data: DataConfig, *, seed: int) -> None:
        super().__init__(splits.train, splits.validation, REWARDS["exact"], data, seed=seed)
        self._rewards = rewards

    def step(self, prompts: Prompts, conversations: Talks, truncated: Sequence[bool]) -> list[StepResult]:
        return self._rewards.score(prompts, [messages[-1].content for messages in conversations], truncated)


def last_number(text: str) -> Decimal | None:
    """Return the last number in `text`, or None.

    >>> last_number("3 + 4 = 7, so 1,200.50 in all.")
    Decimal('1200.50')
    """
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "").replace("\u2212", "-")) if found else None


def _same_last_number(completion: str, answer: str) -> bool:
    got = last_number(completion)
    return got is not None and got == last_number(answer)


def _by(matches: Callable[[str, str], bool], said: Callable[[str], str | None]) -> Reward:
    def reward(prompt: Prompt, completion: str, truncated: bool) -> StepResult:
        correct = matches(completion, prompt.answer or "")
        return StepResult(reward=float(correct), correct=correct, answer=said(completion))

    return reward


def _last_number_text(text: str) -> str | None:
    number = last_number(text)
    return None if number is None else str(number.normalize())


REWARDS: dict[str, Reward] = {
    "exact": _by(lambda completion, answer: completion.strip() == answer.strip(), str.strip),
    "contains": _by(lambda completion, answer: answer.strip() in completion, str.strip),
    "last_number": _by(_same_last_number, _last_number_text),
}
"""The rewards that come along and need no other package, by name."""


def _built_in(used: set[str]) -> dict[str, Reward]:
    if "math" not in used:
        return REWARDS
    from headrace.environments.math import math_reward  # noqa: PLC0415 - optional

    return {**REWARDS, "math": math_reward}


def _fault_of_answer(prompt: Prompt, used: set[str], key: str) -> str | None:
    comparing = used & {*REWARDS, "math"}
    if comparing and prompt.answer is None:
        names = ", ".join(sorted(comparing))
        return f"there is no answer, which {names} compares with; name its column (columns: {{answer: ...}})"
    if "last_number" in used and last_number(prompt.answer or "") is None:
        return f"key '{key}' holds no number ({(prompt.answer or '')[:40]!r}), as env.match=last_number needs"
    return None

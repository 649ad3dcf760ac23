"""Environments of several turns: a calculator that answers, and a number to find."""

import re
from collections.abc import Iterator, Sequence
from itertools import count, islice

import numpy as np

from headrace.config import CalculatorConfig, DataConfig, GuessNumberConfig
from headrace.environments.arithmetic import compute
from headrace.environments.dataset import last_number
from headrace.environments.interfaces import Environment, StepResult
from headrace.environments.judge_process import NoVerdict, judge_process
from headrace.environments.prompts import Splits, read_splits
from headrace.environments.single_turn import DATA_SEED, TurnEnvironment, conversation
from headrace.experience.types import Message, Prompt
from headrace.utils.seeding import derive_seed

_CALL = re.compile(r"<calc>(.*?)</calc>", re.DOTALL)
_TRAIN_SIZE = 2048


def calculator_environment(
    cfg: CalculatorConfig, data: DataConfig, *, splits: Splits | None = None
) -> Environment:
    """Build sums, or the questions of `data.train`, with a calculator.

    A completion that holds `<calc>SUM</calc>` is answered with the value of the last such sum. Any other ends the
    episode; it is right if its last number is the answer's.

    Raises:
        ConfigError: see `read_splits`; also an answer without a number.
    """
    if splits is not None or data.train:
        splits = splits or read_splits(data, task=cfg.kind)
        splits.check(
            lambda p: None if p.answer and last_number(p.answer) is not None else "its answer holds no number"
        )
    else:
        splits = _generated(_sums(cfg), data, cfg.kind, cfg.hint or None)

    def turn(prompt: Prompt, talk: Sequence[Message], truncated: bool) -> StepResult:
        text = talk[-1].content
        if (calls := _CALL.findall(text)) and not truncated:
            value = _computed(calls[-1])
            told = Message(cfg.role, "cannot be computed" if value is None else value)
            metrics = {"failed_calls": float(value is None)}
            bonus = cfg.bonus * (value is not None)
            return StepResult(bonus, done=False, correct=False, observation=(told,), metrics=metrics)
        said = last_number(text)
        correct = said is not None and said == last_number(prompt.answer or "")
        return StepResult(
            float(correct), correct=correct, answer=None if said is None else str(said.normalize())
        )

    return TurnEnvironment(splits.train, splits.validation, turn)


def guess_number_environment(cfg: GuessNumberConfig, data: DataConfig) -> Environment:
    """Build games in which a number is to be found; the reward is 1 once it is, and a wrong guess is answered."""
    splits = _generated(_games(cfg), data, cfg.kind, None)

    def turn(prompt: Prompt, talk: Sequence[Message], truncated: bool) -> StepResult:
        guess, secret = last_number(talk[-1].content), int(prompt.answer or 0)
        if guess == secret:
            return StepResult(1.0, correct=True, answer=str(secret))
        said = "no number" if guess is None else "too low" if guess < secret else "too high"
        return StepResult(0.0, done=False, correct=False, observation=(Message("user", said),))

    return TurnEnvironment(splits.train, splits.validation, turn)


def _computed(text: str) -> str | None:
    try:
        return str(judge_process().ask(compute, text))
    except NoVerdict:
        return None


def _sums(cfg: CalculatorConfig) -> Iterator[tuple[str, str]]:
    rng = np.random.default_rng(derive_seed(DATA_SEED, "sums"))
    while True:
        numbers = rng.integers(1, cfg.largest + 1, size=cfg.terms).tolist()
        signs = rng.choice(["+", "-", "*"], size=cfg.terms - 1).tolist()
        text = "".join(f"{n} {sign} " for n, sign in zip(numbers, signs)) + str(numbers[-1])
        yield f"{text} = ?", compute(text)


def _games(cfg: GuessNumberConfig) -> Iterator[tuple[str, str]]:
    rng = np.random.default_rng(derive_seed(DATA_SEED, "games"))
    for number in count(1):
        secret = int(rng.integers(cfg.lowest, cfg.highest + 1))
        yield f"game {number}: find a number from {cfg.lowest} to {cfg.highest}", str(secret)


def _generated(pairs: Iterator[tuple[str, str]], data: DataConfig, kind: str, hint: str | None) -> Splits:
    """Return prompts of distinct questions, those of validation first, so that they are the same for every run."""
    wanted = data.validation_size + (data.train_size or _TRAIN_SIZE)
    found: dict[str, str] = {}
    # A task of few questions ends here with those there are.
    for question, answer in islice(pairs, 20 * wanted):
        found.setdefault(question, answer)
        if len(found) == wanted:
            break
    system = data.system_prompt or hint
    prompts = [
        Prompt(f"{kind}-{i}", conversation(question, system), {"task": kind}, answer)
        for i, (question, answer) in enumerate(found.items())
    ]
    return Splits(prompts[data.validation_size :], prompts[: data.validation_size])

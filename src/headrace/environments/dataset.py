"""Questions and answers from a file: JSONL, or a Hugging Face dataset saved to disk."""

import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path

from headrace.config import DataConfig, DatasetConfig, MathConfig
from headrace.environments.interfaces import StepResult
from headrace.environments.records import read_records
from headrace.environments.splits import Splits, conversation, hold_out
from headrace.errors import ConfigError
from headrace.experience.types import Message, Prompt

Judge = Callable[[str, str], bool | None]
"""Whether the text of an answer (first) gives the right answer (second); None: it could not be judged."""

# Digits with optional thousands separators, fraction and exponent; a sign counts unless it follows a digit.
_NUMBER = re.compile(r"(?:(?<!\d)[-+])?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3})?|\.\d+")


class DatasetEnvironment:
    """Questions of a file, with reward 1 where `judge` accepts the answer and 0 elsewhere; single-turn.

    With `may_fail`, the share of answers that the judge gives up on is in the metric `unscorable`.

    `check_answer` returns what is wrong with a right answer, or None. A repeated question counts once, with
    its first answer. `data.validation_size` questions are held out at random, the same ones for every run;
    of the others, the first `data.train_size` train, or all of them.

    Raises:
        ConfigError: a missing, malformed or empty file, a missing key, an answer that `check_answer`
            refuses, or too few distinct questions; with the path, the line and the key to change.
    """

    def __init__(
        self,
        cfg: DatasetConfig | MathConfig,
        data: DataConfig,
        *,
        judge: Judge,
        check_answer: Callable[[str], str | None],
        seed: int,
        may_fail: bool = False,
    ) -> None:
        self._judge, self._may_fail = judge, may_fail
        splits = _read_splits(cfg, data)
        for prompt in (*splits.train, *splits.validation):
            fault = check_answer(prompt.info["answer"])
            if fault is not None:
                place = prompt.info["place"]
                raise ConfigError(
                    f"{cfg.path}, {place}: key '{cfg.answer_key}' {fault}; mend it, or remove the row"
                )
        self._splits = splits.shuffled(seed) if data.shuffle else splits

    def prompts(self, split: str) -> list[Prompt]:
        """Return all prompts of `train` or `validation`, in a fixed order."""
        return self._splits.of(split)

    def step(
        self, prompts: Sequence[Prompt], conversations: Sequence[Sequence[Message]], truncated: Sequence[bool]
    ) -> list[StepResult]:
        """Judge the last message of each conversation by its text alone."""
        results = []
        for prompt, talk, _ in zip(prompts, conversations, truncated, strict=True):
            verdict = self._judge(talk[-1].content, prompt.info["answer"])
            metrics = {"unscorable": float(verdict is None)} if self._may_fail else {}
            results.append(StepResult(reward=float(bool(verdict)), correct=bool(verdict), metrics=metrics))
        return results


def dataset_environment(cfg: DatasetConfig, data: DataConfig, *, seed: int) -> DatasetEnvironment:
    """Build the environment that compares answers as text, by `cfg.match`.

    `exact`: equal, outer whitespace aside. `contains`: the answer holds the right one. `last_number`: the
    last numbers in both are equal as numbers (`1,200` = `1200.0`).

    Raises:
        ConfigError: see `DatasetEnvironment`; for `last_number` also an answer without a number.
    """
    check = _lacks_number if cfg.match == "last_number" else _accept_all
    return DatasetEnvironment(cfg, data, judge=_JUDGES[cfg.match], check_answer=check, seed=seed)


def last_number(text: str) -> Decimal | None:
    """Return the last number in `text`, or None.

    >>> last_number("3 + 4 = 7, so 1,200.50 in all.")
    Decimal('1200.50')
    """
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def _match_exact(text: str, answer: str) -> bool:
    return text.strip() == answer.strip()


def _match_contains(text: str, answer: str) -> bool:
    return answer.strip() in text


def _match_last_number(text: str, answer: str) -> bool:
    got = last_number(text)
    return got is not None and got == last_number(answer)


_JUDGES: dict[str, Judge] = {
    "exact": _match_exact,
    "contains": _match_contains,
    "last_number": _match_last_number,
}


def _accept_all(answer: str) -> str | None:
    return None


def _lacks_number(answer: str) -> str | None:
    return (
        None
        if last_number(answer) is not None
        else f"holds no number ({answer[:40]!r}), as env.match=last_number needs"
    )


def _read_splits(cfg: DatasetConfig | MathConfig, data: DataConfig) -> Splits:
    stem = Path(cfg.path).stem
    prompts: dict[str, Prompt] = {}
    for record in read_records(cfg.path):
        question = record.text(cfg.question_key, "question_key")
        answer = record.text(cfg.answer_key, "answer_key")
        if question not in prompts:
            uid = f"{stem}-{record.number}"
            info = {"task": cfg.kind, "answer": answer, "place": record.place}
            prompts[question] = Prompt(uid, conversation(question, data.system_prompt), info, answer)
    if not prompts:
        raise ConfigError(
            f"env.path={cfg.path}: the file has no rows; give one with a question and an answer each"
        )
    if len(prompts) <= data.validation_size:
        raise ConfigError(
            f"env.path={cfg.path} has {len(prompts)} distinct questions, and data.validation_size="
            f"{data.validation_size} leaves none of them for training; lower it, or add rows"
        )
    return hold_out(list(prompts.values()), train_size=data.train_size, validation_size=data.validation_size)

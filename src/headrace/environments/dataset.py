"""Questions and answers from a file: JSONL, or a Hugging Face dataset saved to disk."""

import math
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from headrace.config import DataConfig, DatasetConfig, MathConfig
from headrace.environments.interfaces import Reward, StepResult
from headrace.environments.single_turn import DATA_SEED, SingleTurnEnvironment, conversation
from headrace.errors import ConfigError
from headrace.experience.types import Prompt
from headrace.utils.json_text import read_json_lines
from headrace.utils.paths import user_path
from headrace.utils.seeding import derive_seed

# Digits with optional thousands separators, fraction and exponent; a sign counts unless it follows a digit.
_NUMBER = re.compile(r"(?:(?<!\d)[-+])?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3})?|\.\d+")


def dataset_environment(cfg: DatasetConfig, data: DataConfig, *, seed: int) -> SingleTurnEnvironment:
    """Build the environment that compares completions with answers as text, by `cfg.match`.

    `exact`: equal, outer whitespace aside. `contains`: the completion holds the answer. `last_number`: the last numbers
    in both are equal as numbers (`1,200` = `1200.0`).

    Raises:
        ConfigError: see `file_environment`; for `last_number` also an answer without a number.
    """
    matches = _MATCHES[cfg.match]

    def reward(prompt: Prompt, completion: str, truncated: bool) -> StepResult:
        correct = matches(completion, prompt.answer or "")
        return StepResult(reward=float(correct), correct=correct)

    check = _lacks_number if cfg.match == "last_number" else lambda answer: None
    return file_environment(cfg, data, reward, fault_of_answer=check, seed=seed)


def file_environment(
    cfg: DatasetConfig | MathConfig,
    data: DataConfig,
    reward: Reward,
    *,
    fault_of_answer: Callable[[str], str | None],
    seed: int,
) -> SingleTurnEnvironment:
    """Build an environment of the questions in a file; `fault_of_answer` returns what is wrong with an answer, or None.

    A repeated question counts once, with its first answer. `data.validation_size` questions are held out at random, the
    same ones for every run; of the others, the first `data.train_size` train, or all of them.

    Raises:
        ConfigError: a missing, malformed or empty file, a missing key, an answer with a fault, or too few distinct
            questions; with the path, the line and the key to change.
    """
    prompts = _read_prompts(cfg, data)
    order = np.random.default_rng(derive_seed(DATA_SEED, "hold out")).permutation(len(prompts))
    held_out = {*order[: data.validation_size].tolist()}
    validation = [prompt for i, prompt in enumerate(prompts) if i in held_out]
    train = [prompt for i, prompt in enumerate(prompts) if i not in held_out][: data.train_size]
    for prompt in (*train, *validation):
        if fault := fault_of_answer(prompt.answer or ""):
            place = prompt.info["place"]
            raise ConfigError(
                f"{cfg.path}, {place}: key '{cfg.answer_key}' {fault}; mend it, or remove the row"
            )
    return SingleTurnEnvironment(train, validation, reward, data, seed=seed)


def last_number(text: str) -> Decimal | None:
    """Return the last number in `text`, or None.

    >>> last_number("3 + 4 = 7, so 1,200.50 in all.")
    Decimal('1200.50')
    """
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def _same_last_number(completion: str, answer: str) -> bool:
    got = last_number(completion)
    return got is not None and got == last_number(answer)


_MATCHES: dict[str, Callable[[str, str], bool]] = {
    "exact": lambda completion, answer: completion.strip() == answer.strip(),
    "contains": lambda completion, answer: answer.strip() in completion,
    "last_number": _same_last_number,
}


def _lacks_number(answer: str) -> str | None:
    if last_number(answer) is not None:
        return None
    return f"holds no number ({answer[:40]!r}), as env.match=last_number needs"


def _read_prompts(cfg: DatasetConfig | MathConfig, data: DataConfig) -> list[Prompt]:
    """Return the file's distinct questions, in order, more than are held out."""
    path = user_path(cfg.path, "env.path")
    prompts: dict[str, Prompt] = {}
    for number, place, row in _read_rows(path):
        where = f"env.path={path}, {place}"
        question = _text(row, cfg.question_key, where, "env.question_key")
        answer = _text(row, cfg.answer_key, where, "env.answer_key")
        if question not in prompts:
            messages = conversation(question, data.system_prompt)
            info = {"task": cfg.kind, "place": place}
            prompts[question] = Prompt(f"{path.stem}-{number}", messages, info, answer)
    if not prompts:
        raise ConfigError(
            f"env.path={cfg.path}: the file has no rows; give one with a question and an answer each"
        )
    if len(prompts) <= data.validation_size:
        raise ConfigError(
            f"env.path={cfg.path} has {len(prompts)} distinct questions, and data.validation_size="
            f"{data.validation_size} leaves none of them for training; lower it, or add rows"
        )
    return list(prompts.values())


def _read_rows(path: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield the number of each row, its place (`line 3` of a text file, `row 2` of a dataset), and its values."""
    if path.is_dir():
        yield from ((number, f"row {number}", values) for number, values in enumerate(_load_from_disk(path)))
    else:
        for line in read_json_lines(path, name=f"env.path={path}"):
            yield line.number, f"line {line.number}", line.value


def _text(row: dict[str, Any], key: str, place: str, setting: str) -> str:
    """Return the text under `key`, which the recipe's `setting` names; a number counts as text."""
    if key not in row:
        there = ", ".join(map(str, row)) or "none"
        raise ConfigError(
            f"{place}: missing key '{key}' (keys there: {there}); set {setting}, or mend the row"
        )
    value = row[key]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"{place}: key '{key}' is {value!r:.60}; expected text or a number ({setting})")
    if isinstance(value, float) and not math.isfinite(value):
        fault = f"{value}, which no completion equals"
    elif not str(value).strip():
        fault = "empty"
    else:
        return str(value)
    raise ConfigError(f"{place}: key '{key}' is {fault}; mend or remove the row ({setting})")


def _load_from_disk(path: Path) -> Any:
    try:
        from datasets import load_from_disk  # noqa: PLC0415 - optional, and slow to import
    except ImportError as error:
        raise ConfigError(
            f"env.path={path} is a folder, and reading a saved Hugging Face dataset needs the package "
            "'datasets'; install headrace[train], or give a JSONL file"
        ) from error
    try:
        dataset = load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"env.path={path}: not a Hugging Face dataset made by save_to_disk ({reason}); check the path"
        ) from error
    if hasattr(dataset, "keys"):
        names = ", ".join(dataset.keys())
        raise ConfigError(
            f"env.path={path} holds several splits ({names}); add one to the path, as in {path}/train"
        )
    return dataset

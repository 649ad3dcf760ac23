"""From rows to prompts: two splits of distinct questions, from the sets that a recipe names."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from numbers import Real
from pathlib import PurePath
from typing import Any, get_args

import numpy as np

from headrace.config import DataConfig, DatasetConfig, MathConfig, SourceConfig
from headrace.environments.single_turn import DATA_SEED
from headrace.environments.sources import Source, read_rows
from headrace.errors import ConfigError
from headrace.experience.types import Message, Prompt, Role
from headrace.utils.seeding import derive_seed

logger = logging.getLogger(__name__)

_PROMPT_COLUMNS = ("prompt", "question", "messages")
_ROLES = get_args(Role)


@dataclass(frozen=True)
class Splits:
    """The prompts of a run; a question of `validation` is not in `train`."""

    train: list[Prompt]
    validation: list[Prompt]

    def check(self, fault_of: Callable[[Prompt], str | None]) -> None:
        """Refuse the first prompt that `fault_of` says something of."""
        for prompt in (*self.train, *self.validation):
            if fault := fault_of(prompt):
                raise ConfigError(f"{prompt.data_set}, {prompt.place}: {fault}; mend it, or remove the row")


def read_splits(data: DataConfig, file: DatasetConfig | MathConfig | None = None, *, task: str) -> Splits:
    """Return the prompts of the sets in `data`, and, in place of training sets, of the one file of an `env` section.

    A repeated question counts once, with its first answer. Without validation sets, `data.validation_size` questions
    are held out at random, the same ones for every run. Of the others, `data.train_size` train, or all: of each set its
    first, as many as its weight says, or its size. A question of a validation set is left out of the training sets,
    with a warning that counts such.

    Raises:
        ConfigError: no set is named; a missing, malformed or empty one, a missing column, or too few questions.
    """
    sources = _training_sources(data, file)
    train = [p for source in sources for p in _prompts(source, data, task)]
    train = _distinct(train)
    if data.validation:
        held_out = _validation(data, task)
        return Splits(within_train_size(_without(train, held_out), data), held_out)
    return _hold_out(train, data, sources)


def _training_sources(data: DataConfig, file: DatasetConfig | MathConfig | None) -> list[Source]:
    path = file.path if file is not None else None
    if path is not None and file is not None:
        if data.train:
            raise ConfigError(
                f"env.path={path} and data.train.{next(iter(data.train))} both name training questions; remove one"
            )
        cfg = SourceConfig(path=path, columns={"prompt": file.question_key, "answer": file.answer_key})
        settings = {"prompt": "env.question_key", "answer": "env.answer_key"}
        return [Source(PurePath(path).stem, cfg, "env.path", settings)]
    if not data.train:
        raise ConfigError(
            "no training questions: set data.train to a file, a dataset of the hub, or a function"
        )
    return [Source(name, cfg, f"data.train.{name}.path", {}) for name, cfg in data.train.items()]


def _validation(data: DataConfig, task: str) -> list[Prompt]:
    found: list[Prompt] = []
    for name, cfg in data.validation.items():
        found += _distinct(_prompts(Source(name, cfg, f"data.validation.{name}.path", {}), data, task))
    return found


def _without(train: list[Prompt], held_out: list[Prompt]) -> list[Prompt]:
    questions = {prompt.messages for prompt in held_out}
    kept = [prompt for prompt in train if prompt.messages not in questions]
    if not kept:
        raise ConfigError(
            "every training question is in a validation set too; name other sets in data.validation"
        )
    if len(kept) < len(train):
        logger.warning(
            "%d of %d training questions are in a validation set too, and are left out of training",
            len(train) - len(kept),
            len(train),
        )
    return kept


def _hold_out(prompts: list[Prompt], data: DataConfig, sources: Sequence[Source]) -> Splits:
    if len(prompts) <= data.validation_size:
        names = " and ".join(str(source) for source in sources)
        raise ConfigError(
            f"{names} has {len(prompts)} distinct questions, and data.validation_size="
            f"{data.validation_size} leaves none of them for training; lower it, or add rows"
        )
    order = np.random.default_rng(derive_seed(DATA_SEED, "hold out")).permutation(len(prompts))
    held_out = {*order[: data.validation_size].tolist()}
    validation = [prompt for i, prompt in enumerate(prompts) if i in held_out]
    train = [prompt for i, prompt in enumerate(prompts) if i not in held_out]
    return Splits(within_train_size(train, data), validation)


def within_train_size(prompts: list[Prompt], data: DataConfig) -> list[Prompt]:
    """Return `data.train_size` prompts at most, as if the sets gave one at a time, each as often as it weighs."""
    if data.train_size is None:
        return prompts
    weights: dict[str, float] = {**Counter(prompt.data_set for prompt in prompts)}
    weights |= {name: source.weight for name, source in data.train.items() if source.weight is not None}
    given: Counter[str] = Counter()
    due = []
    for prompt in prompts:
        due.append(given[prompt.data_set] / weights[prompt.data_set])
        given[prompt.data_set] += 1
    kept = np.sort(np.argsort(due, kind="stable")[: data.train_size])
    return [prompts[i] for i in kept]


def _distinct(prompts: Sequence[Prompt]) -> list[Prompt]:
    found: dict[tuple[Message, ...], Prompt] = {}
    for prompt in prompts:
        found.setdefault(prompt.messages, prompt)
    return list(found.values())


def _prompts(source: Source, data: DataConfig, task: str) -> list[Prompt]:
    found: list[Prompt] = []
    for number, place, row in read_rows(source):
        if len(found) == source.cfg.size:
            break
        prompt = _prompt(row, source, number, f"{source}, {place}", data.system_prompt)
        # For scoring code; a column of the data goes before.
        prompt.info.update({"task": task, "place": place, "data_set": source.name} | prompt.info)
        found.append(replace(prompt, data_set=source.name, place=place))
    if not found:
        raise ConfigError(f"{source}: the file has no rows; give one with a question and an answer each")
    return found


def _prompt(row: Mapping[str, Any], source: Source, number: int, where: str, system: str | None) -> Prompt:
    columns = source.cfg.columns
    asked = columns.get("prompt") or next((name for name in _PROMPT_COLUMNS if name in row), "prompt")
    said = columns.get("answer") or ("answer" if "answer" in row else None)
    messages = _messages(row, asked, where, source.setting("prompt"))
    if system is not None and messages[0].role != "system":
        messages = (Message("system", system), *messages)
    info = {name: plain_value(value) for name, value in row.items() if name not in (asked, said)}
    for ours, theirs in columns.items():
        if ours not in ("prompt", "answer"):
            _require(row, theirs, where, source.setting(ours))
            info[ours] = info.pop(theirs) if theirs in info else plain_value(row[theirs])
    answer = None if said is None else _text(row, said, where, source.setting("answer"))
    return Prompt(f"{source.name}-{number}", messages, info, answer)


def plain_value(value: Any) -> Any:
    """Return a value as msgpack can carry it; what is none of its kinds (a date, a path) is text."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(inner) for inner in value]
    return value.item() if isinstance(value, np.generic) else str(value)


def _require(row: Mapping[str, Any], key: str, place: str, setting: str) -> Any:
    if key not in row:
        there = ", ".join(map(str, row)) or "none"
        raise ConfigError(
            f"{place}: missing key '{key}' (keys there: {there}); set {setting}, or mend the row"
        )
    return row[key]


def _messages(row: Mapping[str, Any], key: str, place: str, setting: str) -> tuple[Message, ...]:
    value = _require(row, key, place, setting)
    if not isinstance(value, list | tuple):
        return (Message("user", _text(row, key, place, setting)),)
    return tuple(_read_messages(value, f"{place}: key '{key}'", setting))


def _read_messages(value: Sequence[Any], where: str, setting: str) -> Iterator[Message]:
    shape = "a list of {role: ..., content: ...}"
    for message in value:
        fits = isinstance(message, Mapping) and isinstance(message.get("content"), str)
        if not fits or message.get("role") not in _ROLES:
            raise ConfigError(
                f"{where} is {value!r:.60}; expected text, or {shape} with roles {', '.join(_ROLES)} ({setting})"
            )
        yield Message(message["role"], message["content"])
    if not value or value[-1]["role"] == "assistant":
        raise ConfigError(
            f"{where} {'is empty' if not value else 'ends with an answer'}; expected messages up to the "
            f"question ({setting})"
        )


def _text(row: Mapping[str, Any], key: str, place: str, setting: str) -> str:
    """Return the text under `key`, which the recipe's `setting` names; a number counts as text."""
    value = _require(row, key, place, setting)
    if isinstance(value, bool) or not isinstance(value, str | Real | Decimal):
        raise ConfigError(f"{place}: key '{key}' is {value!r:.60}; expected text or a number ({setting})")
    if not isinstance(value, str | int) and not math.isfinite(value):
        fault = f"{value}, which no completion equals"
    elif not str(value).strip():
        fault = "empty"
    else:
        return str(value)
    raise ConfigError(f"{place}: key '{key}' is {fault}; mend or remove the row ({setting})")

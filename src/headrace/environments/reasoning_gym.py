"""Any reasoning-gym task, by name and config.

Several tasks evaluate the completion's text as Python or sympy to score it; that runs in the judge process, within a
limit of time and memory. It is no sandbox: where the model is not trusted, train in one.
"""

import dataclasses
import difflib
import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from reasoning_gym import create_dataset
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import extract_answer

from headrace.config import DataConfig, ReasoningGymConfig
from headrace.environments.dataset import last_number
from headrace.environments.interfaces import Reward, StepResult
from headrace.environments.judge_process import FAILURES, NoVerdict, judge_process
from headrace.environments.single_turn import DATA_SEED, SingleTurnEnvironment, conversation
from headrace.environments.task_scorer import TaskScorer
from headrace.errors import ConfigError
from headrace.experience.types import Prompt
from headrace.utils.seeding import derive_seed

logger = logging.getLogger(__name__)

Entry = dict[str, Any]

_TRAIN_SIZE = 2048
_MAX_REPEATS = 1000
"""Draws in a row without a new question after which a task counts as exhausted."""
_CHUNK_SIZE = 1000
"""Entries per seed; a constant, so that a split's first questions do not depend on its size."""

_NAMES_SHOWN = 12
_BAD_CONFIG = (AssertionError, AttributeError, LookupError, OSError, TypeError, ValueError)


def reasoning_gym_environment(
    cfg: ReasoningGymConfig, data: DataConfig, *, seed: int
) -> SingleTurnEnvironment:
    """Build the environment of one task.

    With `score=exact`, the reward is 1 for exactly the right answer, ended by end-of-text, and 0 otherwise; with
    `last_number`, 1 if the last numbers of completion and answer are equal. With `task`, it is the task's own score of
    the text, or of what stands in the last `<answer>...</answer>` if there is one. A completion on which the task's
    scorer fails, or takes too long, gets 0 and counts in the metric `unscorable`.

    Questions are distinct. A task that gives fewer than `data.train_size` (2,048 if None) of them beside the
    validation split trains on those there are, with a warning.

    Example: `ReasoningGymConfig(task="spell_backward", prompt_from="metadata.word")` asks `klam` and wants
    `malk`.

    Raises:
        ConfigError: an unknown task, a config that it refuses, a metadata key that it lacks, `exact` or `last_number`
            for a task without a single right answer or number, or too few distinct questions.
    """
    _check_names(cfg)
    with _refusals(cfg):
        scorer = TaskScorer(cfg.task, cfg.config)
    entries: dict[str, Entry] = {}
    train, validation = _draw_splits(cfg, data, entries)
    return SingleTurnEnvironment(train, validation, _reward(cfg, entries, scorer), data, seed=seed)


def _reward(cfg: ReasoningGymConfig, entries: dict[str, Entry], scorer: TaskScorer) -> Reward:
    def exact(entry: Entry, completion: str, truncated: bool) -> StepResult:
        correct = not truncated and completion == entry["answer"]
        return StepResult(reward=float(correct), correct=correct)

    def by_task(entry: Entry, completion: str, truncated: bool) -> StepResult:
        tagged = extract_answer(completion)
        text = completion.strip() if tagged is None else tagged
        ask = scorer if scorer.compares_text else lambda *rest: judge_process().ask(scorer, *rest)
        try:
            score = ask(text, entry)
        except (*FAILURES, NoVerdict):
            return StepResult(reward=0.0, correct=False, metrics={"unscorable": 1.0})
        correct = score is not None and score >= 1
        return StepResult(reward=score, correct=correct, metrics={"unscorable": 0.0})

    def by_last_number(entry: Entry, completion: str, truncated: bool) -> StepResult:
        correct = last_number(completion) == last_number(entry["answer"])
        return StepResult(reward=float(correct), correct=correct)

    score_entry = {"exact": exact, "task": by_task, "last_number": by_last_number}[cfg.score]

    def reward(prompt: Prompt, completion: str, truncated: bool) -> StepResult:
        if prompt.uid not in entries:
            raise ValueError(f"prompt '{prompt.uid}' does not come from this '{cfg.task}' environment")
        return score_entry(entries[prompt.uid], completion, truncated)

    return reward


def _draw_splits(
    cfg: ReasoningGymConfig, data: DataConfig, entries: dict[str, Entry]
) -> tuple[list[Prompt], list[Prompt]]:
    """Draw the validation split, then the training split from what is left; add their `entries` by uid."""
    seen: set[str] = set()
    drawn: dict[str, list[Prompt]] = {}
    train_size = data.train_size or _TRAIN_SIZE
    for split, size in (("validation", data.validation_size), ("train", train_size)):
        prompts = drawn[split] = []
        for question, entry in itertools.islice(_new_questions(cfg, split, seen), size):
            uid = f"{cfg.task}-{split}-{len(prompts)}"
            messages = conversation(question, data.system_prompt)
            prompts.append(Prompt(uid, messages, {"task": cfg.task, "split": split}, _answer(cfg, entry)))
            entries[uid] = entry
    train, validation = drawn["train"], drawn["validation"]
    if len(validation) < data.validation_size or not train:
        raise ConfigError(
            f"env.task={cfg.task} gives only {len(validation)} distinct questions under env.config={cfg.config}, and "
            f"data.validation_size={data.validation_size} leaves none for training; lower it, or widen env.config"
        )
    if len(train) < train_size:
        logger.warning(
            "env.task=%s gives only %d distinct questions beside the %d for validation; training repeats "
            "them (data.train_size=%d)",
            cfg.task,
            len(train),
            len(validation),
            train_size,
        )
    return train, validation


def _new_questions(cfg: ReasoningGymConfig, split: str, seen: set[str]) -> Iterator[tuple[str, Entry]]:
    """Yield entries whose questions are not in `seen`, and add those to it, until the task is exhausted."""
    repeats = 0
    for entry in _entries(cfg, split):
        question = _question(cfg, entry)
        repeats = repeats + 1 if question in seen else 0
        if repeats == _MAX_REPEATS:
            return
        if not repeats:
            seen.add(question)
            yield question, entry


def _entries(cfg: ReasoningGymConfig, split: str) -> Iterator[Entry]:
    """Yield a task's entries without end, in chunks that each have a seed of their own."""
    for chunk in itertools.count():
        # Some tasks seed numpy's legacy generator, which takes 32 bits.
        seed = derive_seed(DATA_SEED, cfg.task, split, chunk) % 2**31
        with _refusals(cfg):
            dataset = create_dataset(cfg.task, size=_CHUNK_SIZE, seed=seed, **cfg.config)
        for index in range(_CHUNK_SIZE):
            with _refusals(cfg):
                entry: Entry = dataset[index]
            yield _lowercased(entry) if cfg.lowercase else entry


def _lowercased(value: Any) -> Any:
    """Return an entry with question, answer and metadata texts in lower case."""
    if isinstance(value, dict):
        return {key: _lowercased(part) for key, part in value.items()}
    return value.lower() if isinstance(value, str) else value


@contextmanager
def _refusals(cfg: ReasoningGymConfig) -> Iterator[None]:
    """Turn what a task raises on its config into a ConfigError."""
    try:
        yield
    except _BAD_CONFIG as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"env.task={cfg.task} refuses env.config={cfg.config}: {reason}") from error


def _check_names(cfg: ReasoningGymConfig) -> None:
    if cfg.task not in DATASETS:
        raise ConfigError(f"env.task={cfg.task} is no reasoning-gym task{_close(cfg.task, list(DATASETS))}")
    known = {f.name for f in dataclasses.fields(DATASETS[cfg.task][1])} - {"seed", "size"}
    for key in cfg.config:
        if key in ("seed", "size"):
            raise ConfigError(
                f"env.config.{key} cannot be set: data.train_size and data.validation_size decide how many "
                "prompts there are, and which ones is fixed; remove the key"
            )
        if key not in known:
            raise ConfigError(f"env.config.{key} is unknown to env.task={cfg.task}{_close(key, [*known])}")


def _close(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    shown = ", ".join(sorted(known)[:_NAMES_SHOWN])
    more = len(known) - _NAMES_SHOWN
    return f"; known: {shown}" + (f" and {more} more" if more > 0 else "")


def _question(cfg: ReasoningGymConfig, entry: Entry) -> str:
    if cfg.prompt_from == "question":
        return str(entry["question"])
    root, _, key = cfg.prompt_from.partition(".")
    if root != "metadata" or not key:
        raise ConfigError(
            f"env.prompt_from={cfg.prompt_from}: expected 'question' or 'metadata.KEY', for example "
            "metadata.word"
        )
    value = entry["metadata"].get(key)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        usable = [k for k, v in entry["metadata"].items() if isinstance(v, str | int | float)]
        found = "is not there" if value is None else f"is a {type(value).__name__}, not text or a number"
        raise ConfigError(
            f"env.prompt_from={cfg.prompt_from}: the key {found} in the metadata of env.task={cfg.task}; "
            f"usable: {', '.join(usable)}"
        )
    return str(value)


def _answer(cfg: ReasoningGymConfig, entry: Entry) -> str | None:
    answer = entry.get("answer")
    if cfg.score == "last_number" and last_number(str(answer)) is None:
        raise ConfigError(
            f"env.score=last_number needs answers with a number, and env.task={cfg.task} gives {answer!r:.40}; set "
            "env.score=task"
        )
    if isinstance(answer, str):
        return answer
    if cfg.score == "exact":
        raise ConfigError(
            f"env.score=exact needs a single right answer, and env.task={cfg.task} gives none; set env.score=task"
        )
    return None

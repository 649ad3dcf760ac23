"""Any reasoning-gym task, by name and config.

Several tasks evaluate the answer's text as Python or sympy to score it; that runs in the judge process, within a
limit of time and memory. It is no sandbox: where the model is not trusted, train in one.
"""

import dataclasses
import difflib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from reasoning_gym import create_dataset
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import extract_answer

from headrace.config import DataConfig, ReasoningGymConfig
from headrace.environments.interfaces import StepResult
from headrace.environments.judge_process import NoVerdict, judge_process
from headrace.environments.judge_server import FAILURES
from headrace.environments.splits import DATA_SEED, Splits, conversation
from headrace.environments.task_scorer import TaskScorer
from headrace.errors import ConfigError
from headrace.experience.types import Message, Prompt
from headrace.utils.seeding import derive_seed

logger = logging.getLogger(__name__)

Entry = dict[str, Any]
T = TypeVar("T")

_TRAIN_SIZE = 2048
_MAX_REPEATS = 1000
"""Draws in a row without a new question after which a task counts as exhausted."""
_CHUNK_SIZE = 1000
"""Entries per seed; a constant, so that a split's first questions do not depend on its size."""

_NAMES_SHOWN = 12
_BAD_CONFIG = (AssertionError, AttributeError, LookupError, OSError, TypeError, ValueError)


class ReasoningGymEnvironment:
    """Prompts and rewards of one task; single-turn.

    With `exact`, the reward is 1 for exactly the right answer, ended by end-of-text, and 0 otherwise.
    Without, it is the task's own score of the text, or of what stands in the last `<answer>...</answer>` if
    there is one. An answer on which the task's scorer fails, or takes too long, gets 0 and counts in the metric
    `unscorable`.

    Questions are distinct. A task that gives fewer than `data.train_size` (2,048 if None) of them beside the
    validation split trains on those there are, with a warning.

    Example: `ReasoningGymConfig(task="spell_backward", prompt_from="metadata.word")` asks `klam` and wants
    `malk`.

    Raises:
        ConfigError: an unknown task, a config that it refuses, a metadata key that it lacks, `exact` for a
            task without a single right answer, or too few distinct questions.
    """

    def __init__(self, cfg: ReasoningGymConfig, data: DataConfig, *, seed: int) -> None:
        self._cfg = cfg
        self._entries: dict[str, Entry] = {}
        self._scorer = _built(cfg, lambda: TaskScorer(cfg.task, cfg.config))
        splits = self._draw_splits(data)
        self._splits = splits.shuffled(seed) if data.shuffle else splits

    def prompts(self, split: str) -> list[Prompt]:
        """Return all prompts of `train` or `validation`, in a fixed order."""
        return self._splits.of(split)

    def step(
        self, prompts: Sequence[Prompt], conversations: Sequence[Sequence[Message]], truncated: Sequence[bool]
    ) -> list[StepResult]:
        """Judge the last message of each conversation.

        Raises:
            ValueError: a prompt that this environment did not make.
        """
        judge = self._judge_exactly if self._cfg.exact else self._judge_by_task
        return [
            judge(self._entry_of(prompt), talk[-1].content, cut)
            for prompt, talk, cut in zip(prompts, conversations, truncated, strict=True)
        ]

    def _entry_of(self, prompt: Prompt) -> Entry:
        if prompt.uid not in self._entries:
            raise ValueError(f"prompt '{prompt.uid}' does not come from this '{self._cfg.task}' environment")
        return self._entries[prompt.uid]

    def _judge_exactly(self, entry: Entry, text: str, truncated: bool) -> StepResult:
        correct = not truncated and text == entry["answer"]
        return StepResult(reward=float(correct), correct=correct)

    def _judge_by_task(self, entry: Entry, text: str, truncated: bool) -> StepResult:
        tagged = extract_answer(text)
        answer = text.strip() if tagged is None else tagged
        try:
            if self._scorer.compares_text:
                score = self._scorer(answer, entry)
            else:
                score = judge_process().ask(self._scorer, answer, entry)
        except (*FAILURES, NoVerdict):
            return StepResult(reward=0.0, correct=False, metrics={"unscorable": 1.0})
        return StepResult(reward=score, correct=score is not None and score >= 1, metrics={"unscorable": 0.0})

    def _draw_splits(self, data: DataConfig) -> Splits:
        """Draw the validation split, then the training split from what is left; validation has priority."""
        seen: set[str] = set()
        validation = self._draw("validation", data.validation_size, data.system_prompt, seen)
        train_size = data.train_size or _TRAIN_SIZE
        train = self._draw("train", train_size, data.system_prompt, seen)
        if len(validation) < data.validation_size or not train:
            raise ConfigError(
                f"env.task={self._cfg.task} gives only {len(validation)} distinct questions under env.config="
                f"{self._cfg.config}, and data.validation_size={data.validation_size} leaves none for "
                "training; lower it, or widen env.config"
            )
        if len(train) < train_size:
            logger.warning(
                "env.task=%s gives only %d distinct questions beside the %d for validation; training repeats "
                "them (data.train_size=%d)",
                self._cfg.task,
                len(train),
                len(validation),
                train_size,
            )
        return Splits(tuple(train), tuple(validation))

    def _draw(self, split: str, wanted: int, system_prompt: str | None, seen: set[str]) -> list[Prompt]:
        """Make up to `wanted` prompts whose questions are not in `seen`, and add them to it."""
        drawn: list[Prompt] = []
        repeats = 0
        for entry in _entries(self._cfg, split):
            question = _question(self._cfg, entry)
            if question in seen:
                repeats += 1
                if repeats == _MAX_REPEATS:
                    break
                continue
            repeats = 0
            seen.add(question)
            answer = _answer(self._cfg, entry)
            uid = f"{self._cfg.task}-{split}-{len(drawn)}"
            self._entries[uid] = entry
            info = {"task": self._cfg.task, "split": split}
            drawn.append(Prompt(uid, conversation(question, system_prompt), info, answer))
            if len(drawn) == wanted:
                break
        return drawn


def _entries(cfg: ReasoningGymConfig, split: str) -> Iterator[Entry]:
    """Yield a task's entries without end, in chunks that each have a seed of their own."""
    for chunk in itertools.count():
        # Some tasks seed numpy's legacy generator, which takes 32 bits.
        seed = derive_seed(DATA_SEED, cfg.task, split, chunk) % 2**31
        dataset = _create(cfg, size=_CHUNK_SIZE, seed=seed)
        for index in range(_CHUNK_SIZE):
            try:
                entry: Entry = dataset[index]
            except _BAD_CONFIG as error:
                raise _refused(cfg, error) from error
            yield _lowercased(entry) if cfg.lowercase else entry


def _lowercased(entry: Entry) -> Entry:
    """Return the entry with question, answer and metadata texts in lower case."""
    return {
        key: _lowercased(value)
        if isinstance(value, dict)
        else value.lower()
        if isinstance(value, str)
        else value
        for key, value in entry.items()
    }


def _create(cfg: ReasoningGymConfig, *, size: int, seed: int) -> Any:
    return _built(cfg, lambda: create_dataset(cfg.task, size=size, seed=seed, **cfg.config))


def _built(cfg: ReasoningGymConfig, build: Callable[[], T]) -> T:
    _check_names(cfg)
    try:
        return build()
    except _BAD_CONFIG as error:
        raise _refused(cfg, error) from error


def _refused(cfg: ReasoningGymConfig, error: Exception) -> ConfigError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return ConfigError(f"env.task={cfg.task} refuses env.config={cfg.config}: {reason}")


def _check_names(cfg: ReasoningGymConfig) -> None:
    if cfg.task not in DATASETS:
        raise ConfigError(f"env.task={cfg.task} is no reasoning-gym task{_close(cfg.task, list(DATASETS))}")
    known = [f.name for f in dataclasses.fields(DATASETS[cfg.task][1])]
    for key in cfg.config:
        if key in ("seed", "size"):
            raise ConfigError(
                f"env.config.{key} cannot be set: data.train_size and data.validation_size decide how many "
                "prompts there are, and which ones is fixed; remove the key"
            )
        if key not in known:
            keys = [name for name in known if name not in ("seed", "size")]
            raise ConfigError(f"env.config.{key} is unknown to env.task={cfg.task}{_close(key, keys)}")


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
    if isinstance(answer, str):
        return answer
    if cfg.exact:
        raise ConfigError(
            f"env.exact=true needs a single right answer, and env.task={cfg.task} gives none; set "
            "env.exact=false"
        )
    return None

"""The scorer of a reasoning-gym task, as it travels to the judge process; imports nothing that is slow to load."""

import pickle
from collections.abc import Callable
from functools import lru_cache
from types import CodeType
from typing import Any

from reasoning_gym import create_dataset
from reasoning_gym.dataset import ProceduralDataset

_TEXT_ALONE = {
    *("all", "any", "enumerate", "isinstance", "len", "max", "min", "range", "set", "sorted", "str", "sum"),
    *("zip", "append", "get", "join", "lower", "rstrip", "split", "startswith", "strip", "upper"),
}
"""What a scorer may use that does no more than compare texts."""


class TaskScorer:
    """Scores completions as a task does. Pickled, it is its task and config, and what it reads is made anew.

    `compares_text`: scoring compares texts and does nothing else, so that it ends at once whatever they are.
    """

    def __init__(self, task: str, config: dict[str, Any]) -> None:
        self._task, self._config = task, config
        self._dataset = create_dataset(task, size=1, seed=0, **config)
        score = type(self._dataset).score_answer
        self.compares_text = score is ProceduralDataset.score_answer or _names(score.__code__) <= _TEXT_ALONE

    def __call__(self, answer: str, entry: dict[str, Any]) -> Any:
        return self._dataset.score_answer(answer, entry)

    def __reduce__(self) -> tuple[Callable[..., "TaskScorer"], tuple[str, bytes]]:
        return _load, (self._task, pickle.dumps(self._config))


@lru_cache(maxsize=8)
def _load(task: str, config: bytes) -> TaskScorer:
    return TaskScorer(task, pickle.loads(config))


def _names(code: CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return {*code.co_names}.union(*map(_names, inner))

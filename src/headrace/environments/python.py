"""An environment of the user's own, by import path."""

import inspect
from collections.abc import Sequence
from typing import Any

from headrace.config import DataConfig, PythonConfig
from headrace.environments.interfaces import Environment, Prompts, StepResult, Talks
from headrace.environments.prompts import Splits, read_splits
from headrace.errors import ConfigError
from headrace.experience.types import Prompt
from headrace.utils.event_loop import run_coroutine
from headrace.utils.targets import check_parameters, load_callable, load_target, user_code

_STEP = ("prompts", "conversations", "truncated")


def python_environment(cfg: PythonConfig, data: DataConfig, *, splits: Splits | None = None) -> Environment:
    """Build the environment that a factory makes; without `prompts` of its own it has those of `data`.

    Raises:
        ConfigError: a factory that cannot be called so, or that makes something without `step`; also see `read_splits`.
    """
    who = f"env.target={cfg.target}"
    found = load_target(cfg.target, "env.target")
    if inspect.isclass(found) or not hasattr(found, "step"):
        factory = load_callable(cfg.target, "env.target")
        with user_code(who):
            found = factory(**cfg.args)
    if not callable(getattr(found, "step", None)):
        raise ConfigError(f"{who} made a {type(found).__name__} without step({', '.join(_STEP)}); add it")
    taken = check_parameters(found.step, _STEP, f"step of {who}", example=f"({', '.join(_STEP)})")
    if not callable(getattr(found, "prompts", None)):
        splits = splits or read_splits(data, task="python")
        return OwnEnvironment(found, {"train": splits.train, "validation": splits.validation}, who, taken)
    if data.train or data.validation:
        raise ConfigError(
            f"{who} brings its own prompts, and data.{'train' if data.train else 'validation'} names others; remove one"
        )
    with user_code(f"prompts() of {who}"):
        own = {split: list(found.prompts(split)) for split in ("train", "validation")}
    for split, prompts in own.items():
        other = next((p for p in prompts if not isinstance(p, Prompt)), None)
        if other is not None or not prompts:
            got = "nothing" if other is None else f"a {type(other).__name__}"
            raise ConfigError(
                f"prompts('{split}') of {who} returned {got}; expected a list of headrace.Prompt"
            )
    return OwnEnvironment(found, own, who, taken)


class OwnEnvironment:
    """What the user's object does, its prompts read once, and its exceptions named."""

    def __init__(self, own: Any, prompts: dict[str, list[Prompt]], who: str, taken: set[str] | None) -> None:
        self._own, self._prompts, self._who, self._taken = own, prompts, who, taken

    def prompts(self, split: str) -> list[Prompt]:
        return list(self._prompts[split])

    def step(self, prompts: Prompts, conversations: Talks, truncated: Sequence[bool]) -> list[StepResult]:
        given = dict(zip(_STEP, (prompts, conversations, truncated)))
        with user_code(f"step() of {self._who}"):
            results = self._own.step(
                **{k: v for k, v in given.items() if self._taken is None or k in self._taken}
            )
            if inspect.isawaitable(results):
                results = run_coroutine(_finished(results))
        return results  # type: ignore[no-any-return]


async def _finished(results: Any) -> Any:
    return await results

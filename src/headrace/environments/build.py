"""From an `env` section to an environment."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from headrace.config import (
    ByColumnConfig,
    CalculatorConfig,
    DataConfig,
    DatasetConfig,
    EnvironmentConfig,
    GuessNumberConfig,
    MathConfig,
    PythonConfig,
    ReasoningGymConfig,
    VerifiersConfig,
)
from headrace.environments.dataset import dataset_environment
from headrace.environments.games import calculator_environment, guess_number_environment
from headrace.environments.interfaces import Environment
from headrace.environments.prompts import Splits, read_splits, within_train_size
from headrace.environments.python import python_environment
from headrace.environments.routed import RoutedEnvironment
from headrace.environments.verifiers import VerifiersEnvironment
from headrace.errors import ConfigError


def build_environment(
    cfg: EnvironmentConfig, data: DataConfig, *, seed: int, splits: Splits | None = None
) -> Environment:
    """Build the environment that `cfg.kind` names, with its prompts, or with those of `splits`.

    `seed` decides the order of the training prompts if `data.shuffle` is on, and nothing else: all seeds
    share the same two splits, and no question is in both.

    Raises:
        ConfigError: settings, a file or an installation that cannot be used.
    """
    try:
        return _BUILDERS[type(cfg)](cfg, data, seed, splits)
    except ImportError as error:
        raise ConfigError(
            f"env.kind={cfg.kind} needs the package '{error.name}', which is not installed; install "
            "headrace[train]"
        ) from error


def _math(cfg: MathConfig, data: DataConfig, seed: int, splits: Splits | None) -> Environment:
    from headrace.environments.math import math_environment  # noqa: PLC0415 - optional

    return math_environment(cfg, data, seed=seed, splits=splits)


def _reasoning_gym(
    cfg: ReasoningGymConfig, data: DataConfig, seed: int, splits: Splits | None
) -> Environment:
    from headrace.environments.reasoning_gym import reasoning_gym_environment  # noqa: PLC0415 - optional

    return reasoning_gym_environment(cfg, data, seed=seed)


def _by_column(cfg: ByColumnConfig, data: DataConfig, seed: int, splits: Splits | None) -> Environment:
    """Build each environment over the prompts of `data` that name it; one that none names has its own."""
    whole = data.model_copy(update={"train_size": None})
    read = read_splits(whole, task=cfg.kind) if data.train else Splits([], [])
    names = {str(prompt.info.get(cfg.column)) for prompt in (*read.train, *read.validation)}
    read = Splits(within_train_size(read.train, data), read.validation)
    _check_names(cfg, read)
    bare = data.model_copy(update={"train": {}, "validation": {}})
    everything, by_name = Splits([*read.train], [*read.validation]), {}
    for name, inner in cfg.environments.items():
        mine = Splits(
            *([p for p in part if p.info[cfg.column] == name] for part in (read.train, read.validation))
        )
        named = bool(mine.train or mine.validation)
        where = f"env.environments.{name}"
        if not named and name in names:
            raise ConfigError(
                f"{where}: the rows that name it are all beyond data.train_size={data.train_size}; raise it, or mix "
                "the rows"
            )
        if not named and name in {**data.train, **data.validation}:
            raise ConfigError(
                f"{where} makes prompts of its own, and a set of data has the same name; rename one"
            )
        _check_inner(where, inner, named)
        environment = build_environment(inner, bare, seed=seed, splits=mine if named else None)
        by_name[name] = environment
        for part, split in ((everything.train, "train"), (everything.validation, "validation")):
            made = [] if named else environment.prompts(split)
            part += [replace(p, info={**p.info, cfg.column: name}, data_set=name) for p in made]
    return RoutedEnvironment(everything, by_name, column=cfg.column)


def _check_inner(where: str, inner: EnvironmentConfig, named: bool) -> None:
    """Refuse keys of an inner environment that nothing reads; `named`: it has prompts of `data`."""
    unread = {
        "chat_template_kwargs": "one chat template is for all; set env.chat_template_kwargs, and remove it"
    }
    if named:
        told = "rows of data.train and data.validation name this environment, which has those; remove it"
        unread |= dict.fromkeys(("path", "question_key", "answer_key"), told)
    for key, told in unread.items():
        field = type(inner).model_fields.get(key)
        if field and (value := getattr(inner, key)) != field.get_default(call_default_factory=True):
            raise ConfigError(f"{where}.{key}={value} is not read: {told}")


def _check_names(cfg: ByColumnConfig, splits: Splits) -> None:
    for prompt in (*splits.train, *splits.validation):
        name = prompt.info.get(cfg.column)
        if not isinstance(name, str) or name not in cfg.environments:
            raise ConfigError(
                f"{prompt.data_set}, {prompt.place}: column '{cfg.column}' is {name!r}; expected one of "
                f"{', '.join(cfg.environments)} (env.environments), or set env.column to another"
            )


_BUILDERS: dict[type[Any], Callable[[Any, DataConfig, int, Splits | None], Environment]] = {
    ReasoningGymConfig: _reasoning_gym,
    MathConfig: _math,
    DatasetConfig: lambda cfg, data, seed, splits: dataset_environment(cfg, data, seed=seed, splits=splits),
    PythonConfig: lambda cfg, data, seed, splits: python_environment(cfg, data, splits=splits),
    CalculatorConfig: lambda cfg, data, seed, splits: calculator_environment(cfg, data, splits=splits),
    GuessNumberConfig: lambda cfg, data, seed, splits: guess_number_environment(cfg, data),
    VerifiersConfig: lambda cfg, data, seed, splits: VerifiersEnvironment(cfg, data),
    ByColumnConfig: _by_column,
}

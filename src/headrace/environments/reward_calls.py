"""Calls of one reward function of a user's; runs in the process that is beside the rollout, or in the rollout's own.

What comes back is made of JSON: for each sample `["ok", value]`, `["error", what it raised]` or `["wrong", what it
returned]`. Imports nothing that is slow to load.
"""

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from headrace.errors import ConfigError
from headrace.utils.event_loop import run_coroutine
from headrace.utils.targets import check_parameters, failure, load_callable

Sample = tuple[str, str, dict[str, Any]]
"""Prompt, completion and info."""
Reply = list[Any]
ONE = ("prompt", "completion", "info")
BATCH = ("prompts", "completions", "infos")
_EXPECTED = "a finite number, or a dict with 'reward' and further numbers"


@dataclass(frozen=True)
class RewardFunction:
    """A function by its target, and how it is called; pickled, it is found again where it arrives."""

    target: str
    is_batched: bool
    is_async: bool
    names: tuple[str, ...]

    def __reduce__(self) -> tuple[Callable[..., "RewardFunction"], tuple[str]]:
        return reward_function, (self.target,)


@lru_cache(maxsize=64)
def reward_function(target: str) -> RewardFunction:
    """Load a function, and tell how it is called by the names of its parameters.

    `prompts`, `completions`, `infos`: once for all samples, and it returns a list. `prompt`, `completion`, `info`: once
    for each sample. It may leave out some, and be `async`.

    Raises:
        ConfigError: it cannot be loaded, or takes something else.
    """
    function = _unwrapped(load_callable(target, "env.rewards"))
    who = f"env.rewards={target}"
    if inspect.isclass(function):
        raise ConfigError(f"{who} is a class; expected a function (prompt, completion, info)")
    example = f"({', '.join(ONE)}), or for all samples at once ({', '.join(BATCH)})"
    taken = check_parameters(function, (*ONE, *BATCH), who, example=example)
    found = {*ONE, *BATCH} if taken is None else taken
    named = {p for p in _parameters(function) if p in (*ONE, *BATCH)}
    is_batched = bool(named & {*BATCH})
    if is_batched and named & {*ONE}:
        raise ConfigError(f"{who} takes {', '.join(sorted(named))}; write it as {example}")
    if not found:
        raise ConfigError(f"{who} takes nothing of a sample; write it as {example}")
    names = tuple(name for name in (BATCH if is_batched else ONE) if name in found)
    return RewardFunction(target, is_batched, inspect.iscoroutinefunction(function), names)


def call_reward(function: RewardFunction, samples: Sequence[Sample], timeout_s: float | None) -> list[Reply]:
    """Return a reply for each sample; `timeout_s` is for each call of an asynchronous function."""
    call = _unwrapped(load_callable(function.target, "env.rewards"))
    if function.is_batched:
        return _call_batch(call, function, samples, timeout_s)
    given = [dict(zip(ONE, sample)) for sample in samples]
    arguments = [{name: values[name] for name in function.names} for values in given]
    if function.is_async:
        return run_coroutine(_call_together(call, arguments, timeout_s))
    return [_call(call, values) for values in arguments]


def _call(call: Callable[..., Any], values: Mapping[str, Any]) -> Reply:
    try:
        return _checked(call(**values))
    except (Exception, SystemExit) as error:
        return ["error", failure(error)]


async def _call_together(
    call: Callable[..., Any], arguments: Sequence[Mapping[str, Any]], timeout_s: float | None
) -> list[Reply]:
    async def one(values: Mapping[str, Any]) -> Reply:
        try:
            return _checked(await asyncio.wait_for(call(**values), timeout_s))
        except TimeoutError:
            return ["error", f"it took more than {timeout_s:g} s" if timeout_s else "TimeoutError"]
        except (Exception, asyncio.CancelledError) as error:
            return ["error", failure(error)]

    return list(await asyncio.gather(*map(one, arguments)))


def _call_batch(
    call: Callable[..., Any], function: RewardFunction, samples: Sequence[Sample], timeout_s: float | None
) -> list[Reply]:
    columns = dict(zip(BATCH, (list(column) for column in zip(*samples))))
    values = {name: columns[name] for name in function.names}
    try:
        given = call(**values)
        results = run_coroutine(asyncio.wait_for(given, timeout_s)) if function.is_async else given
    except TimeoutError:
        return [["error", f"it took more than {timeout_s:g} s" if timeout_s else "TimeoutError"]] * len(
            samples
        )
    except Exception as error:
        return [["error", failure(error)]] * len(samples)
    results = results.tolist() if hasattr(results, "tolist") else results
    if not isinstance(results, list | tuple):
        return [
            ["wrong", f"{_shown(results)}; expected a list of {len(samples)} numbers, one per completion"]
        ]
    if len(results) != len(samples):
        return [["wrong", f"{len(results)} values for {len(samples)} completions; expected one for each"]]
    return [_checked(result) for result in results]


def _checked(result: Any) -> Reply:
    """Return a result as JSON has it: a number, or a dict of numbers with `correct` and `answer`."""
    if not isinstance(result, Mapping):
        number = _number(result)
        return ["wrong", f"{_shown(result)}; expected {_EXPECTED}"] if number is None else ["ok", number]
    if "reward" not in result:
        return [
            "wrong",
            f"a dict without 'reward' (it has {', '.join(map(repr, result)) or 'nothing'}); add it",
        ]
    found: dict[str, Any] = {}
    for key, value in result.items():
        if key == "answer":
            if not isinstance(value, str | None):
                return ["wrong", f"a dict with 'answer': {_shown(value)}; expected text or None"]
            found[key] = value
        elif key == "correct" and value is None:
            continue
        elif (number := _number(value)) is None or not isinstance(key, str):
            return ["wrong", f"a dict with {key!r}: {_shown(value)}; expected {_EXPECTED}"]
        else:
            found[key] = bool(number) if key == "correct" else number
    return ["ok", found]


def _number(value: Any) -> float | None:
    try:
        number = value if isinstance(value, bool | int | float) else value.item()
        return float(number) if math.isfinite(number) else None
    except (AttributeError, TypeError, ValueError, OverflowError, RuntimeError):
        return None


def _shown(value: object) -> str:
    return f"{' '.join(repr(value).split())[:60]} of type {type(value).__name__}"


def _unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, or, of a callable object, its method."""
    if inspect.isroutine(function) or inspect.isclass(function):
        return function
    return function.__call__  # type: ignore[operator,no-any-return]


def _parameters(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []

"""Scores of samples, from an environment whose results are checked against what they are declared to be."""

import sys
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, get_args

import numpy as np

from headrace.environments.interfaces import Environment, StepResult
from headrace.errors import RewardError
from headrace.experience.types import Message, Role, Rollout

_ROLES = get_args(Role)
_FLOAT32_MAX = float(np.finfo(np.float32).max)


def score_group(environment: Environment, rollouts: Sequence[Rollout]) -> list[StepResult]:
    """Have the environment judge the last completion of each sample, and add its rewards, verdicts and metrics.

    Raises:
        RewardError: as `checked_results`; also an episode that goes on without an observation, and rewards of several
            turns whose sum does not fit in float32.
    """
    # By keyword, so that an environment that expects the opposite flag is told.
    results = environment.step(
        [r.prompt for r in rollouts],
        [tuple(r.messages) for r in rollouts],
        truncated=[r.truncated for r in rollouts],
    )
    results = checked_results(results, [f"sample '{r.sample_id}', turn {r.turns}" for r in rollouts])
    for rollout, result in zip(rollouts, results):
        rollout.reward += float(result.reward)
        if not _is_finite(rollout.reward, _FLOAT32_MAX):
            raise RewardError(
                f"sample '{rollout.sample_id}': the rewards of {rollout.turns} turns add up to {rollout.reward!r}; "
                "expected a sum that fits in float32"
            )
        rollout.correct = rollout.correct if result.correct is None else bool(result.correct)
        rollout.answer = result.answer
        rollout.metrics.update({name: float(value) for name, value in result.metrics.items()})
    return results


def checked_results(results: Any, names: Sequence[str], *, who: str = "the environment") -> list[StepResult]:
    """Return the results of a `step`, one per name, each as `StepResult` declares it.

    Raises:
        RewardError: another number of results, or one with a value of another type, or a number that is not finite;
            the message has its index, its name and the type.
    """
    if not isinstance(results, Sequence) or isinstance(results, str | bytes):
        got = _shown(results)
        raise RewardError(f"{who} returned {got} from step(); expected a list of {len(names)} StepResult")
    if len(results) != len(names):
        fate = f"{names[len(results)]}, has none" if len(results) < len(names) else "some belong to no sample"
        raise RewardError(f"{who} returned {len(results)} results for {len(names)} samples; {fate}")
    for index, (result, name) in enumerate(zip(results, names)):
        if fault := _fault(result):
            raise RewardError(f"{who} returned result {index} ({name}) with {fault}")
    return list(results)


def _fault(result: Any) -> str | None:
    if not isinstance(result, StepResult):
        return f"{_shown(result)} in place of a StepResult; return StepResult(reward=...)"
    if not _is_finite(result.reward, _FLOAT32_MAX):
        return f"reward {_shown(result.reward)}; expected a finite number that fits in float32"
    if result.correct is not None and not _is_flag(result.correct):
        return f"correct {_shown(result.correct)}; expected True, False or None"
    if result.answer is not None and not isinstance(result.answer, str):
        return f"answer {_shown(result.answer)}; expected text or None"
    if not isinstance(result.metrics, Mapping):
        return f"metrics {_shown(result.metrics)}; expected a dict of names and numbers"
    for key, value in result.metrics.items():
        if not isinstance(key, str) or not _is_finite(value):
            return f"metric {key!r} {_shown(value)}; expected a name and a finite number"
    return _fault_of_turn(result)


def _fault_of_turn(result: StepResult) -> str | None:
    if not _is_flag(result.done):
        return f"done {_shown(result.done)}; expected True or False"
    if not isinstance(result.observation, Sequence) or isinstance(result.observation, str):
        return f"observation {_shown(result.observation)}; expected a tuple of Message"
    for message in result.observation:
        if not isinstance(message, Message) or not isinstance(message.content, str):
            return f"observation of {_shown(message)}; expected Message(role, text)"
        if message.role not in _ROLES:
            return f"an observation of role {message.role!r}; expected one of {', '.join(_ROLES)}"
    if not result.done and not result.observation:
        return "done=False without an observation; give at least one message, or done=True"
    return None


def _is_finite(value: Any, most: float = sys.float_info.max) -> bool:
    # Not `math.isfinite`, to which a whole number beyond floats is an error. A narrow float would make the bound one of
    # its own kind, which is infinite.
    value = value.item() if isinstance(value, np.generic) else value
    return issubclass(type(value), Real) and bool(abs(value) <= most)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool | np.bool_)


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    return f"{text[:60]}{'...' if len(text) > 60 else ''} of type {type(value).__name__}"

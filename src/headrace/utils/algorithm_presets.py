"""Named algorithms: what `algorithm` in a recipe sets, key by key, and what it refuses.

A preset is complete: it names every key that its paper decides, also where the value is the default. Keys of `meaning`
make the algorithm what it is, so a recipe that sets one otherwise is refused. Keys of `values` are the paper's
numbers, which a recipe may change. All other keys are the recipe's own: no preset adds a KL, for example.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

FromTurn = Callable[[int], int]
"""A value that follows from `generation.max_new_tokens`."""


@dataclass(frozen=True)
class Preset:
    """What a named algorithm sets, by dotted key."""

    meaning: dict[str, Any]
    values: dict[str, float | int | bool | str | FromTurn] = field(default_factory=dict)


def _meaning(
    *,
    estimator: str = "grpo",
    normalize_std: bool = True,
    kind: str = "clipped_pg",
    ratio_level: str = "token",
    aggregation: str,
) -> dict[str, Any]:
    return {
        "grpo.advantage.estimator": estimator,
        "grpo.advantage.normalize_std": normalize_std,
        "loss.kind": kind,
        "loss.ratio_level": ratio_level,
        "loss.aggregation": aggregation,
    }


def _clips(low: float, high: float) -> dict[str, float | int | bool | str | FromTurn]:
    return {"loss.clip_low": low, "loss.clip_high": high}


def _whole_turn(max_new_tokens: int) -> int:
    return max_new_tokens


def _fifth_of_turn(max_new_tokens: int) -> int:
    return max(max_new_tokens // 5, 1)


PRESETS: dict[str, Preset] = {
    # DeepSeekMath, arXiv:2402.03300, equation 3.
    "grpo": Preset(_meaning(aggregation="sequence_mean"), _clips(0.2, 0.2)),
    # arXiv:2503.20783, section 3.2: neither the standard deviation nor the length of an answer divides.
    "dr_grpo": Preset(
        _meaning(normalize_std=False, aggregation="constant"),
        {**_clips(0.2, 0.2), "loss.constant_tokens": _whole_turn},
    ),
    # arXiv:2503.14476, equations 8 to 13; its buffer is 4,096 of 20,480 tokens.
    "dapo": Preset(
        _meaning(aggregation="token_mean"),
        {
            **_clips(0.2, 0.28),
            "grpo.dynamic_sampling.enabled": True,
            "grpo.reward.overlong_penalty": 1.0,
            "grpo.reward.overlong_buffer_tokens": _fifth_of_turn,
        },
    ),
    # arXiv:2507.18071, equations 5 to 7; clips of section 5.1.
    "gspo": Preset(_meaning(ratio_level="sequence", aggregation="sequence_mean"), _clips(3e-4, 4e-4)),
    # MiniMax-M1, arXiv:2506.13585, equations 4 and 5: no lower bound. Weights up to 5: ScaleRL, arXiv:2510.13786.
    "cispo": Preset(_meaning(kind="cispo", aggregation="token_mean"), _clips(1.0, 4.0)),
    # arXiv:2402.14740, section 3.3: the gradient of a sample is the sum over its tokens, here in units of a turn.
    "rloo": Preset(
        _meaning(estimator="rloo", normalize_std=False, aggregation="constant"),
        {**_clips(0.2, 0.2), "loss.constant_tokens": _whole_turn, "grpo.reward.kl_kind": "k1"},
    ),
    # arXiv:2501.03262, section 3.
    "reinforce_plus_plus": Preset(
        _meaning(estimator="reinforce_plus_plus", aggregation="token_mean"),
        {**_clips(0.2, 0.2), "grpo.advantage.minus_baseline": False, "grpo.reward.kl_kind": "k1"},
    ),
}


def with_preset(recipe: Any, *, max_new_tokens: int) -> Any:
    """Return a recipe's values with what its `algorithm` sets; without one, or not a mapping, as they are.

    Args:
        recipe: As read; sections are mappings or models.
        max_new_tokens: Stands for `generation.max_new_tokens` where the recipe does not set it.

    Raises:
        ValueError: keys that contradict the algorithm, named.
    """
    preset = PRESETS.get(str(recipe.get("algorithm"))) if isinstance(recipe, Mapping) else None
    if preset is None:
        return recipe
    filled = _plain(recipe)
    given = _get(filled, "generation.max_new_tokens", max_new_tokens)
    turn = given if type(given) is int else max_new_tokens
    wrong = {k: _get(filled, k, v) for k, v in preset.meaning.items() if _get(filled, k, v) != v}
    if wrong:
        got = ", ".join(f"{key}={value}" for key, value in wrong.items())
        needed = ", ".join(f"{key}={preset.meaning[key]}" for key in wrong)
        raise ValueError(
            f"algorithm={filled['algorithm']} contradicts {got}; it means {needed}: set that, remove the key, or "
            "remove algorithm"
        )
    for key, value in {**preset.meaning, **preset.values}.items():
        _set_missing(filled, key, value(turn) if callable(value) else value)
    return filled


def describe_preset(algorithm: str, recipe: Mapping[str, Any]) -> str:
    """Return an algorithm's name, with the values that a (whole) recipe has in place of the preset's."""
    turn = _get(recipe, "generation.max_new_tokens", 0)
    usual = {k: v(turn) if callable(v) else v for k, v in PRESETS[algorithm].values.items()}
    own = [f"{k}={_get(recipe, k, v)}, not {v}" for k, v in usual.items() if _get(recipe, k, v) != v]
    return f"{algorithm} ({'; '.join(own)})" if own else algorithm


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_unset=True)
    return {key: _plain(entry) for key, entry in value.items()} if isinstance(value, Mapping) else value


def _get(values: Any, dotted: str, otherwise: Any) -> Any:
    for part in dotted.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return otherwise
        values = values[part]
    return values


def _set_missing(values: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, name = dotted.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            return  # no section: the recipe's own mistake, which its validation names
    values.setdefault(name, value)

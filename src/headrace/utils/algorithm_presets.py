"""Named algorithms: what `algorithm` in a recipe sets, key by key, and what it refuses.

A preset is complete: it names every key that its paper decides, also where the value is the default. Keys of `MEANING`
make the algorithm what it is, so a recipe that sets one otherwise is refused. The others are the paper's numbers, which
a recipe may change. All other keys are the recipe's own: no preset adds a KL, for example.
"""

from collections.abc import Callable, Mapping
from typing import Any

from headrace.utils.section import plain, written

Preset = dict[str, bool | float | str | Callable[[int], int] | None]
"""Values by dotted key; a function is of `generation.max_new_tokens`."""

MEANING = (
    "grpo.advantage.estimator",
    "grpo.advantage.normalize_std",
    "grpo.advantage.leave_one_out",
    "grpo.advantage.target",
    "loss.kind",
    "loss.target",
    "loss.ratio_level",
    "loss.aggregation",
)


# DeepSeekMath, arXiv:2402.03300, equation 3.
_GRPO: Preset = {
    "grpo.advantage.estimator": "grpo",
    "grpo.advantage.normalize_std": True,
    "grpo.advantage.leave_one_out": False,
    "grpo.advantage.target": None,
    "loss.kind": "clipped_pg",
    "loss.target": None,
    "loss.ratio_level": "token",
    "loss.aggregation": "sequence_mean",
    "loss.clip_low": 0.2,
    "loss.clip_high": 0.2,
}
PRESETS: dict[str, Preset] = {
    "grpo": _GRPO,
    # arXiv:2503.20783, section 3.2: neither the standard deviation nor the length of an answer divides.
    "dr_grpo": _GRPO
    | {
        "grpo.advantage.normalize_std": False,
        "loss.aggregation": "constant",
        "loss.constant_tokens": lambda max_new_tokens: max_new_tokens,
    },
    # arXiv:2503.14476, equations 8 to 13; its buffer is 4,096 of 20,480 tokens.
    "dapo": _GRPO
    | {
        "loss.aggregation": "token_mean",
        "loss.clip_high": 0.28,
        "grpo.dynamic_sampling.enabled": True,
        "grpo.reward.overlong_penalty": 1.0,
        "grpo.reward.overlong_buffer_tokens": lambda max_new_tokens: max(max_new_tokens // 5, 1),
    },
    # arXiv:2507.18071, equations 5 to 7; clips of section 5.1.
    "gspo": _GRPO | {"loss.ratio_level": "sequence", "loss.clip_low": 3e-4, "loss.clip_high": 4e-4},
    # MiniMax-M1, arXiv:2506.13585, equations 4 and 5: no lower bound. Weights up to 5: ScaleRL, arXiv:2510.13786.
    "cispo": _GRPO
    | {"loss.kind": "cispo", "loss.aggregation": "token_mean", "loss.clip_low": 1.0, "loss.clip_high": 4.0},
    # arXiv:2402.14740, section 3.3: the gradient of a sample is the sum over its tokens, here in units of a turn.
    "rloo": _GRPO
    | {
        "grpo.advantage.estimator": "rloo",
        "grpo.advantage.normalize_std": False,
        "loss.aggregation": "constant",
        "loss.constant_tokens": lambda max_new_tokens: max_new_tokens,
        "grpo.reward.kl_kind": "k1",
    },
    # arXiv:2501.03262, section 3.
    "reinforce_plus_plus": _GRPO
    | {
        "grpo.advantage.estimator": "reinforce_plus_plus",
        "loss.aggregation": "token_mean",
        "grpo.advantage.minus_baseline": False,
        "grpo.reward.kl_kind": "k1",
    },
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
    filled = plain(recipe)
    given = _get(filled, "generation.max_new_tokens", max_new_tokens)
    turn = given if type(given) is int else max_new_tokens
    values = _of_turn(preset, turn)
    found = {key: _get(filled, key, values[key]) for key in MEANING}
    wrong = [key for key in MEANING if found[key] != values[key]]
    if wrong:
        got, needed = (", ".join(f"{key}={written(of[key])}" for key in wrong) for of in (found, values))
        raise ValueError(
            f"algorithm={filled['algorithm']} contradicts {got}; it means {needed}: set that, remove the key, or "
            "remove algorithm"
        )
    for key, value in values.items():
        _set_missing(filled, key, value)
    return filled


def describe_preset(algorithm: str, recipe: Mapping[str, Any]) -> str:
    """Return an algorithm's name, with the values that a (whole) recipe has in place of the preset's."""
    usual = _of_turn(PRESETS[algorithm], _get(recipe, "generation.max_new_tokens", 0))
    own = [f"{k}={_get(recipe, k, v)}, not {v}" for k, v in usual.items() if _get(recipe, k, v) != v]
    return f"{algorithm} ({'; '.join(own)})" if own else algorithm


def _of_turn(preset: Preset, max_new_tokens: int) -> dict[str, Any]:
    return {key: value(max_new_tokens) if callable(value) else value for key, value in preset.items()}


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

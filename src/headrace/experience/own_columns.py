"""Columns that a loss of the user's own asks for: a number per sample, from its reward's parts or its prompt's row."""

from collections.abc import Sequence
from typing import Any

import torch

from headrace.config import LossConfig
from headrace.data_plane.schema import FIELDS, UNFILTERED_LOGPROBS
from headrace.environments.own_rewards import FAILED_CALL
from headrace.errors import ConfigError
from headrace.experience.types import Rollout
from headrace.utils.targets import load_callable


def columns_asked_for(cfg: LossConfig) -> tuple[str, ...]:
    """Return the columns of `loss.target` that no stage of a step makes."""
    if cfg.target is None:
        return ()
    asked: Any = getattr(load_callable(cfg.target, "loss.target"), "required_columns", ())
    return tuple(sorted({*asked} - {*FIELDS, UNFILTERED_LOGPROBS}))


def own_columns(rollouts: Sequence[Rollout], names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return each column, (N,) float32: a metric of the sample (`NAME` or `reward/.../NAME`), or its prompt's value.

    A sample on which a reward function failed has none of its parts, and 0 in their place.

    Raises:
        ConfigError: a sample has none, or no number.
    """
    return {name: torch.tensor([_number(r, name) for r in rollouts], dtype=torch.float32) for name in names}


def _number(rollout: Rollout, name: str) -> float:
    told = (value for key, value in rollout.metrics.items() if key == name or key.endswith(f"/{name}"))
    value = next(told, rollout.prompt.info.get(name))
    if value is None and any(
        failed and FAILED_CALL.fullmatch(key) for key, failed in rollout.metrics.items()
    ):
        return 0.0
    if isinstance(value, bool | int | float):
        return float(value)
    found = "nothing" if value is None else f"{value!r:.40}, which is no number"
    raise ConfigError(
        f"loss.target asks for column '{name}', and sample '{rollout.sample_id}' has {found}; have the reward return "
        "it, or the data set bring a column of this name"
    )

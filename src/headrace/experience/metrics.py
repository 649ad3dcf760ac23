"""Metrics of samples and of the generator's calls, each from all that were drawn: over turns, and over rounds."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

COMPLETIONS, NEW_TOKENS, SECONDS = "generation/completions", "generation/new_tokens", "generation/seconds"
TOKENS_PER_S = "rollout/tokens_per_s"
ENGINES_LOST = "generator/engines_lost"
_SUMS = (
    "_tokens",
    "_bytes",
    "_ms",
    "_s",
    "/calls",
    "/completions",
    "/seconds",
    "/preemptions",
    ENGINES_LOST,
)
_EXTREMES: dict[str, Callable[[Any], Any]] = {"_max": np.max, "_min": np.min}

GREEDY_ACCURACY = "validation/accuracy"
SAMPLED_ACCURACY = "validation/sampled_accuracy"
GREEDY_REWARD = "validation/reward"
SAMPLED_REWARD = "validation/sampled_reward"


def rollout_metrics(values: Mapping[str, Any]) -> dict[str, float]:
    """Return what is worth plotting of N samples; `rollout/accuracy` is over those with a verdict, if there are any.

    `values` holds columns of N as in `flatten.per_sample_values`: `reward`, `response_tokens`, `truncated`, `turns`,
    `correct` (None: no verdict) and `metrics` (the environment's own, by name).
    """
    rewards = np.asarray(values["reward"], dtype=np.float64)
    lengths = np.asarray(values["response_tokens"])
    metrics = {
        "rollout/reward_mean": float(rewards.mean()),
        "rollout/reward_std": float(rewards.std()),
        "rollout/reward_min": float(rewards.min()),
        "rollout/reward_max": float(rewards.max()),
        "rollout/response_tokens_mean": float(lengths.mean()),
        "rollout/response_tokens_max": float(lengths.max()),
        "rollout/truncated_fraction": float(np.mean(np.asarray(values["truncated"]))),
        "rollout/turns_mean": float(np.mean(np.asarray(values["turns"]))),
    }
    verdicts = [correct for correct in values["correct"] if correct is not None]
    if verdicts:
        metrics["rollout/accuracy"] = float(np.mean(verdicts))
    return metrics | own_metrics(values["metrics"])


def own_metrics(of_samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the means of what the environment measures of samples: `reward/NAME` of rewards, or `environment/NAME`."""
    metrics = {}
    for name in sorted({name for own in of_samples for name in own}):
        given = [own[name] for own in of_samples if name in own]
        metrics[name if name.startswith("reward/") else f"environment/{name}"] = float(np.mean(given))
    return metrics


def combine_calls(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of several calls of a generator, or of several rounds of calls, as those of one.

    By the end of a name: `_max` and `_min` are the greatest and the least; counts, bytes and times are sums; a rate
    (`_per_s`) is weighted by seconds, anything else by completions. `rollout/tokens_per_s` is all tokens by all
    seconds; each part has `COMPLETIONS`, `NEW_TOKENS` and `SECONDS`.
    """
    combined = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        having = [part for part in parts if name in part]
        values = np.array([part[name] for part in having], dtype=np.float64)
        if name[-4:] in _EXTREMES:
            value = _EXTREMES[name[-4:]](values)
        elif name.endswith(_SUMS) and not name.endswith("_per_s"):
            value = values.sum()
        else:
            weights = np.array([part[SECONDS if name.endswith("_per_s") else COMPLETIONS] for part in having])
            value = (values * weights).sum() / max(weights.sum(), 1e-9)
        combined[name] = float(value)
    combined[TOKENS_PER_S] = combined[NEW_TOKENS] / max(combined[SECONDS], 1e-9)
    return combined

"""Names of earlier versions: of recipe keys and of metrics.

A recipe with an old key is refused with the new one named; a run directory of before is read as if it had the new ones.
"""

from collections.abc import Mapping
from typing import Any

RECIPE_KEYS = {
    "policy.router_replay.max_missing_share": "policy.router_replay.max_missing_fraction",
    "policy.router_replay.min_exact_share": "policy.router_replay.min_exact_fraction",
}

METRICS = {
    "data_plane/driver_share": "data_plane/driver_fraction",
    "dynamic_sampling/useful_share": "dynamic_sampling/useful_fraction",
    "dynamic_sampling/varied_share": "dynamic_sampling/varied_fraction",
    "router_replay/missing_share": "router_replay/missing_fraction",
    "rollout/cut_share": "rollout/truncated_fraction",
    "rollout/cut_fraction": "rollout/truncated_fraction",
    "generation/answers": "generation/completions",
    "time_s/refresh": "time_s/update_weights",
}


def with_trackers(logging: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section `logging` whose switch `tensorboard`, of earlier versions, is an entry of `trackers`."""
    values = dict(logging)
    switch = values.get("tensorboard")
    if isinstance(switch, bool):
        del values["tensorboard"]
        others = [name for name in values.get("trackers", ()) if name != "tensorboard"]
        values["trackers"] = ["tensorboard", *others] if switch else others
    return values


def with_score(env: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section `env` whose switch `exact`, of earlier versions, is a value of `score`."""
    values = dict(env)
    switch = values.get("exact")
    if (
        values.get("kind", "reasoning_gym") == "reasoning_gym"
        and isinstance(switch, bool)
        and "score" not in env
    ):
        del values["exact"]
        values["score"] = "exact" if switch else "task"
    return values


def with_new_keys(recipe: Mapping[str, Any]) -> dict[str, Any]:

    def renamed(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        result = {}
        for name, value in values.items():
            key = f"{prefix}{name}"
            new = RECIPE_KEYS.get(key, key).rpartition(".")[2]
            result[new] = renamed(value, f"{key}.") if isinstance(value, Mapping) else value
        return result

    result = renamed(recipe, "")
    if isinstance(result.get("logging"), Mapping):
        result["logging"] = with_trackers(result["logging"])
    if isinstance(env := result.get("env"), Mapping):
        result["env"] = with_score(env)
        if isinstance(parts := env.get("environments"), Mapping):
            result["env"]["environments"] = {name: with_score(part) for name, part in parts.items()}
    return result


def with_new_metrics(record: Mapping[str, Any]) -> dict[str, Any]:
    return {METRICS.get(name, name): value for name, value in record.items()}

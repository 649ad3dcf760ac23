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


def with_new_keys(recipe: Mapping[str, Any]) -> dict[str, Any]:

    def renamed(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        result = {}
        for name, value in values.items():
            key = f"{prefix}{name}"
            new = RECIPE_KEYS.get(key, key).rpartition(".")[2]
            result[new] = renamed(value, f"{key}.") if isinstance(value, Mapping) else value
        return result

    return renamed(recipe, "")


def with_new_metrics(record: Mapping[str, Any]) -> dict[str, Any]:
    return {METRICS.get(name, name): value for name, value in record.items()}

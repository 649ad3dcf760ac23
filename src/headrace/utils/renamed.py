"""Names of earlier versions: of recipe keys and of metrics.

A recipe with an old key is refused with the new one named; a run directory of before is read as if it had the new ones.
"""

RECIPE_KEYS = {
    "policy.router_replay.max_missing_share": "policy.router_replay.max_missing_fraction",
    "policy.router_replay.min_exact_share": "policy.router_replay.min_exact_fraction",
}

METRICS = {
    "data_plane/driver_share": "data_plane/driver_fraction",
    "dynamic_sampling/useful_share": "dynamic_sampling/useful_fraction",
    "dynamic_sampling/varied_share": "dynamic_sampling/varied_fraction",
    "router_replay/missing_share": "router_replay/missing_fraction",
    "rollout/cut_share": "rollout/cut_fraction",
    "generator/finished_share": "generator/finished_fraction",
}

"""Whether a recipe's answers are generated in an actor of their own, told before anything is started."""

from pathlib import Path
from typing import Any

import pytest

from headrace.algorithms.run import rolls_out_in_actor
from headrace.errors import ConfigError
from tiny_recipe import tiny_recipe

STORE = {"impl": "transfer_queue"}
IN_MEMORY = {"enabled": False}
ON_RAY = {"parallel": {"launcher": "ray"}}
AUTO: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("policy", "store", "cluster", "expected"),
    [
        (ON_RAY, STORE, {}, True),
        (ON_RAY, STORE, {"rollout": "driver"}, False),
        (ON_RAY, STORE, {"rollout_gpus": 0}, True),
        ({"workers": 2}, STORE, {"rollout": "actor"}, True),
        (AUTO, STORE, {}, False),
        (ON_RAY, IN_MEMORY, {}, False),
    ],
)
def test_answers_are_generated_in_an_actor_where_workers_and_store_are_on_ray(
    tmp_path: Path, policy: dict[str, Any], store: dict[str, Any], cluster: dict[str, Any], expected: bool
) -> None:
    recipe = tiny_recipe(tmp_path, policy=policy, data_plane=store, cluster=cluster)
    assert rolls_out_in_actor(recipe) is expected


@pytest.mark.parametrize(("policy", "store"), [(AUTO, AUTO), (AUTO, STORE), (ON_RAY, IN_MEMORY)])
@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"rollout": "actor"}, r"cluster\.rollout=actor needs.*impl=transfer_queue.*launcher=ray"),
        ({"rollout_gpus": 1}, r"cluster\.rollout_gpus=1 is for a rollout actor.*launcher=ray"),
        ({"rollout_gpus": 0}, r"cluster\.rollout_gpus=0 is for a rollout actor"),
    ],
)
def test_an_actor_or_its_gpus_where_there_is_none_are_refused(
    tmp_path: Path, policy: dict[str, Any], store: dict[str, Any], cluster: dict[str, Any], message: str
) -> None:
    recipe = tiny_recipe(tmp_path, policy=policy, data_plane=store, cluster=cluster)
    with pytest.raises(ConfigError, match=message):
        rolls_out_in_actor(recipe)


def test_gpus_of_an_actor_that_the_recipe_rules_out_are_refused(tmp_path: Path) -> None:
    cluster = {"rollout": "driver", "rollout_gpus": 1}
    recipe = tiny_recipe(tmp_path, policy=ON_RAY, data_plane=STORE, cluster=cluster)
    with pytest.raises(
        ConfigError, match=r"cluster\.rollout_gpus=1 is for .*remove it, or set cluster\.rollout=auto"
    ):
        rolls_out_in_actor(recipe)

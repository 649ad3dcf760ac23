"""A policy takes its sections as models or as mappings, and says which key is wrong."""

from typing import Any

import pytest
import torch

from headrace.config import ClusterConfig
from headrace.errors import ConfigError
from headrace.models.policy.lm_policy import Policy
from tiny_models import tiny_batch, tiny_generation_config, tiny_policy_config, tiny_tokenizer


def test_a_policy_of_mappings_scores_as_one_of_sections() -> None:
    cfg, generation = tiny_policy_config("llama"), tiny_generation_config()
    sections = Policy(cfg, generation, tokenizer=tiny_tokenizer(), seed=0)
    mappings = Policy(
        cfg.model_dump(exclude_unset=True),
        generation.model_dump(exclude_unset=True),
        tokenizer=tiny_tokenizer(),
        seed=0,
    )
    rows = tiny_batch([5, 3])
    assert torch.equal(
        sections.get_logprobs(rows)["logprobs"], mappings.get_logprobs(tiny_batch([5, 3]))["logprobs"]
    )


def test_an_unknown_key_of_a_mapping_is_named() -> None:
    cfg = {**tiny_policy_config("llama").model_dump(exclude_unset=True), "worker": 2}
    with pytest.raises(ConfigError, match=r"policy: unknown key 'worker'; did you mean 'workers'"):
        Policy(cfg, {}, tokenizer=tiny_tokenizer(), seed=0)


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"num_nodes": 2}, r"cluster\.num_nodes=2: .* outside Ray, on this machine alone.*launcher=ray"),
        (
            {"gpus_per_node": 99},
            r"cluster\.gpus_per_node=99: .*on this machine, which has \d+ CUDA.*launcher=ray",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("workers", [1, 2], ids=["driver", "processes"])
def test_nodes_and_gpus_that_workers_outside_ray_cannot_have_are_refused(
    cluster: dict[str, Any], message: str, workers: int
) -> None:
    cfg = tiny_policy_config("llama", workers=workers)
    with pytest.raises(ConfigError, match=message):
        Policy(
            cfg,
            tiny_generation_config(),
            tokenizer=tiny_tokenizer(),
            seed=0,
            cluster=ClusterConfig.model_validate(cluster),
        )

"""A policy takes its sections as models or as mappings, and says which key is wrong."""

import pytest
import torch

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

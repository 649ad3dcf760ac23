"""Weights and optimizer state in host memory, in one process: the same training, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.models.policy.workers.automodel_worker import AutomodelPolicyWorker
from reference_training import PolicyGradient
from tiny_models import tiny_batch, tiny_generation_config, tiny_policy_config, tiny_tokenizer

LENGTHS = [9, 4, 12, 7, 5, 3, 11, 8]


def worker(name: str, *, offload: bool, **changes: Any) -> AutomodelPolicyWorker:
    generation = changes.pop("generation", {})
    cfg = tiny_policy_config(name, parallel={"cpu_offload": offload}, **changes)
    return AutomodelPolicyWorker(
        cfg, tiny_generation_config(**generation), tokenizer=tiny_tokenizer(), seed=0, with_reference=True
    )


def train(policy: AutomodelPolicyWorker, steps: int, seed: int = 0) -> list[torch.Tensor]:
    return [
        policy.train(tiny_batch(LENGTHS, seed=seed + step), PolicyGradient())["grad_norm"]
        for step in range(steps)
    ]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2", "llama"])
def test_offloaded_weights_train_as_those_on_the_device(name: str, precision: str) -> None:
    experts = {"model": {"experts_implementation": "grouped_mm"}} if name == "qwen3_moe" else {}
    both = [worker(name, offload=on, precision=precision, **experts) for on in (False, True)]
    norms = [train(one, 3) for one in both]
    assert norms[0] == norms[1]
    plain, offloaded = (dict(one.named_weights()) for one in both)
    assert plain.keys() == offloaded.keys()
    assert all(torch.equal(plain[n], offloaded[n]) for n in plain)
    for method in ("get_logprobs", "get_reference_policy_logprobs"):
        scores = [next(iter(getattr(one, method)(tiny_batch(LENGTHS)).values())) for one in both]
        assert torch.equal(*scores)


def test_the_device_holds_products_in_bfloat16_and_a_bfloat16_generator_gets_them() -> None:
    policy = worker("llama", offload=True, precision="bfloat16", generation={"precision": "bfloat16"})
    kinds = {n.split(".")[-2]: p.dtype for n, p in policy.model.named_parameters()}
    assert kinds["q_proj"] == kinds["lm_head"] == torch.bfloat16
    assert kinds["embed_tokens"] == kinds["input_layernorm"] == torch.float32
    assert all(
        m.dtype == torch.float32 and m.device.type == "cpu" for m in policy._masters.parameters.values()
    )
    sent = dict(policy.named_weights())
    assert sent["lm_head.weight"].dtype == torch.bfloat16
    train(policy, 1)
    assert torch.equal(sent["lm_head.weight"], policy._masters.parameters["lm_head.weight"].bfloat16())


def test_a_checkpoint_of_offloaded_weights_is_like_any_other(tmp_path: Path) -> None:
    policy = worker("qwen2", offload=True, precision="bfloat16")
    train(policy, 2)
    policy.save_checkpoint(tmp_path)
    again, plain = (worker("qwen2", offload=on, precision="bfloat16") for on in (True, False))
    for one in (again, plain):
        one.load_checkpoint(tmp_path)
    assert train(policy, 2, seed=5) == train(again, 2, seed=5) == train(plain, 2, seed=5)
    weights = [dict(one.named_weights()) for one in (policy, again, plain)]
    assert all(torch.equal(weights[0][n], other[n]) for other in weights[1:] for n in weights[0])

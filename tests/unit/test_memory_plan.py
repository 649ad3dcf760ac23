"""The memory plan: what it counts is what tensors take, and what a change of the recipe does to it."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.config import RecipeConfig
from headrace.models.memory_plan import STAGES, MemoryPlan, plan_memory
from headrace.models.memory_trace import LiveBytes
from tiny_models import CONFIGS

LLAMA = {
    **CONFIGS["llama"],
    "hidden_size": 64,
    "intermediate_size": 256,
    "vocab_size": 4096,
    "num_hidden_layers": 4,
}


def recipe(config: dict[str, Any] = LLAMA, *, kl: float = 0.0, rows: int = 16, **policy: Any) -> RecipeConfig:
    packing = {"enabled": True, "train_mb_tokens": 1024, "logprob_mb_tokens": 2048}
    changes = {"sequence_packing": packing, "precision": "bfloat16", **policy}
    return RecipeConfig.model_validate(
        {
            "run_dir": "runs/none",
            "policy": {
                "model": {"config": config},
                "tokenizer": {"builder": "characters"},
                "max_total_sequence_length": 128,
                "train_global_batch_size": rows,
                **changes,
            },
            "generation": {"max_new_tokens": 64, "precision": "bfloat16"},
            "grpo": {"num_prompts_per_step": rows // 4, "num_generations_per_prompt": 4},
            "loss": {"kl_coefficient": kl},
            "env": {"kind": "dataset", "path": "none"},
        }
    )


def part(plan: MemoryPlan, name: str, stage: str = "training") -> int:
    return plan.parts[stage].get(name, 0)


@pytest.fixture(scope="module")
def full() -> MemoryPlan:
    return plan_memory(recipe())


def test_live_bytes_are_those_of_tensors_that_something_holds() -> None:
    with FakeTensorMode(), LiveBytes() as counter:
        first = torch.empty(1024)
        second = first + 1  # noqa: F841  (held)
        view = first.view(32, 32)  # noqa: F841
        assert counter.live == 2 * 4096
        third = (first * 2).sum()  # noqa: F841
        assert (counter.live, counter.peak) == (2 * 4096 + 512, 3 * 4096 + 512)


def test_sizes_of_weights_gradients_and_optimizer_are_those_of_the_parameters(full: MemoryPlan) -> None:
    layer = 4 * 64 * 32 - 2 * 64 * 16 + 3 * 64 * 256 + 2 * 64  # q, k, v, o; MLP; norms: heads of 4 x 8, 2 x 8
    parameters = 2 * 4096 * 64 + 4 * layer + 64
    assert part(full, "gradients") == 4 * parameters
    assert part(full, "optimizer") == 8 * parameters
    assert part(full, "weights") == pytest.approx(4 * parameters, abs=100)  # and the rotary frequencies
    assert part(full, "generator") == pytest.approx(2 * parameters, abs=100)
    assert part(full, "gradients", "scoring") == part(full, "reference") == 0
    assert full.peak == max(sum(full.parts[stage].values()) for stage in STAGES)


def test_activations_grow_with_the_microbatch_and_shrink_with_recomputation(full: MemoryPlan) -> None:
    packing = {"enabled": True, "train_mb_tokens": 2048, "logprob_mb_tokens": 2048}
    wide = plan_memory(recipe(rows=32, sequence_packing=packing))
    again = plan_memory(recipe(activation_checkpointing=True))
    name = "activations and logits"
    assert 1.6 < part(wide, name) / part(full, name) < 2.1
    assert part(again, name) < 0.7 * part(full, name)
    assert part(again, name, "scoring") == part(full, name, "scoring")
    assert part(full, name, "scoring") < part(full, name)


def test_an_adapter_needs_neither_gradients_nor_optimizer_nor_reference_of_all_weights(
    full: MemoryPlan,
) -> None:
    lora = plan_memory(recipe(lora={"rank": 2}, kl=0.1))
    with_reference = plan_memory(recipe(kl=0.1))
    assert 0 < part(lora, "gradients") < 0.2 * part(full, "gradients")
    assert part(lora, "optimizer") == 2 * part(lora, "gradients")
    assert part(lora, "reference") == 0
    # Products are held in bfloat16, embeddings in float32.
    assert 0.5 * part(full, "weights") < part(with_reference, "reference") < 0.8 * part(full, "weights")
    assert part(lora, "weights") < 0.85 * part(full, "weights")


def test_offloading_leaves_products_and_gradients_on_the_device(full: MemoryPlan) -> None:
    plan = plan_memory(recipe(parallel={"cpu_offload": True}))
    assert part(plan, "optimizer") == 0
    assert part(plan, "gradients") == part(full, "gradients")
    assert part(plan, "weights") < 0.8 * part(full, "weights")


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2", "gemma3", "granite", "mistral_window"])
def test_other_families_and_ways_to_cut_batches_can_be_planned(name: str) -> None:
    fixed = {"sequence_packing": {"enabled": False}, "train_micro_batch_size": 4, "logprob_batch_size": 8}
    dynamic = {"dynamic_batching": {"enabled": True}, "sequence_packing": {"enabled": False}}
    for changes in (fixed, dynamic, {"workers": 2}):
        plan = plan_memory(recipe(CONFIGS[name], **changes))
        assert all(part(plan, "activations and logits", stage) > 0 for stage in STAGES)
        assert bool(plan.notes) == ("workers" in changes)


def test_ranks_that_share_experts_gather_only_their_own() -> None:
    layouts = [{"expert": n, "gathered_gib": 0} for n in (1, 2)]
    plans = [plan_memory(recipe(CONFIGS["qwen3_moe"], workers=2, parallel=layout)) for layout in layouts]
    gathered = 2 * 8 * 3 * 24 * 32 * 2  # two layers of 8 experts with three matrices in bfloat16
    assert part(plans[0], "weights") - part(plans[1], "weights") == gathered // 2


def test_a_small_sharded_model_is_whole_on_every_rank_while_it_runs() -> None:
    by_layer, whole = (plan_memory(recipe(workers=2, parallel={"gathered_gib": gib})) for gib in (0.0, 4.0))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA))
    layer = sum(weight.numel() for weight in model.model.layers[0].parameters())
    assert part(whole, "weights") - part(by_layer, "weights") == 2 * 2 * layer
    # In float32, until a step's last microbatch.
    assert part(whole, "gradients") - part(by_layer, "gradients") == 4 * model.num_parameters()


def test_a_reader_that_goes_away_makes_no_plan_that_does_not_fit() -> None:
    command = [sys.executable, "-m", "headrace", "plan", "--memory", "demo_moe", "--gpu-gib", "80"]
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as gone:
        done = subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")

"""A recipe that trains in a second: a character MoE model of a few thousand weights on partly rewarded spelling."""

from pathlib import Path
from typing import Any

from headrace.config import RecipeConfig

MODEL = {
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}

BATCHING: dict[str, dict[str, Any]] = {
    "fixed": {"train_micro_batch_size": 4, "logprob_batch_size": 8},
    "dynamic": {"dynamic_batching": {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 96}},
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 96}},
}


def bare_recipe(algorithm: str | None, **sections: Any) -> RecipeConfig:
    """Return a recipe whose `loss` and `grpo` say nothing but `sections`; it is not one that can run."""
    groups = {"num_prompts_per_step": 4, "num_generations_per_prompt": 4}
    return RecipeConfig.model_validate(
        {
            "algorithm": algorithm,
            "run_dir": "runs/none",
            "policy": {"model": {"path": "m"}, "train_global_batch_size": 16},
            "generation": {"max_new_tokens": 20},
            "env": {"kind": "dataset", "path": "d"},
            **sections,
            "grpo": {**groups, **sections.get("grpo", {})},
        }
    )


def tiny_recipe(run_dir: Path, *, batching: str = "fixed", **changes: Any) -> RecipeConfig:
    """Return the tiny recipe with sections replaced by `changes` (one level deep)."""
    sections: dict[str, Any] = {
        "seed": 0,
        "run_dir": str(run_dir),
        "policy": {
            "model": {"config": MODEL, "experts_implementation": "grouped_mm"},
            "tokenizer": {"builder": "characters"},
            "max_total_sequence_length": 24,
            "train_global_batch_size": 16,
            "optimizer": {"lr": 1e-3},
            **BATCHING[batching],
        },
        "generation": {"max_new_tokens": 8, "batch_size": 32},
        "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 4, "max_num_steps": 5},
        "loss": {"clip_high": 0.28},
        "env": {
            "kind": "reasoning_gym",
            "task": "spell_backward",
            "config": {"min_word_len": 3, "max_word_len": 6},
            "prompt_from": "metadata.word",
        },
        "data": {"train_size": 64, "validation_size": 8},
        "validation": {"period": 0, "batch_size": 8},
        "logging": {"tensorboard": False, "samples_per_step": 2},
    }
    for name, values in changes.items():
        old = sections.get(name, {})
        sections[name] = {**old, **values} if isinstance(old, dict) and isinstance(values, dict) else values
    return RecipeConfig.model_validate(sections)

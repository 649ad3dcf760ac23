"""Real models and tokenizers of a few thousand weights, and policies over them; all from seeds."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.config import GenerationConfig, PolicyConfig
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.models.policy.lm_policy import Policy
from headrace.models.tokenizers import build_character_tokenizer

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,;:!?-+*/=()[]<>#&%$@_"
VOCAB_SIZE = 64

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    # The default of 0.02 makes so small a model nearly linear.
    "initializer_range": 0.2,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_COMMON},
    "qwen2": {"model_type": "qwen2", **_COMMON, "tie_word_embeddings": True},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **_COMMON,
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
    },
    "mistral_window": {"model_type": "mistral", **_COMMON, "sliding_window": 4},
    "gemma2": {"model_type": "gemma2", **_COMMON, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "gemma3": {"model_type": "gemma3_text", **_COMMON, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "granite": {"model_type": "granite", **_COMMON, "logits_scaling": 4.0},
    "cohere": {"model_type": "cohere", **_COMMON, "logit_scale": 0.25},
    "opt": {
        "model_type": "opt",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "init_std": 0.2,
        "pad_token_id": 0,
    },
}


def tiny_model(name: str, *, seed: int = 0, **options: Any) -> Any:
    """Return a float32 model in evaluation mode; `options` go to `from_config`."""
    values = dict(CONFIGS[name])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options).eval()


def tiny_tokenizer() -> Any:
    """Return a character tokenizer with at most VOCAB_SIZE tokens."""
    return build_character_tokenizer(CHARACTERS[: VOCAB_SIZE - 5])


def tiny_policy_config(name: str = "qwen3_moe", **changes: Any) -> PolicyConfig:
    """Return a policy section over a tiny model; `changes` replace keys, `model` is merged."""
    model = {"config": CONFIGS[name], **changes.pop("model", {})}
    values = {
        "model": model,
        "tokenizer": {"builder": "characters", "characters": CHARACTERS[: VOCAB_SIZE - 5]},
        "device": "cpu",
        "max_total_sequence_length": 32,
        "train_global_batch_size": 8,
        "train_micro_batch_size": 4,
        "logprob_batch_size": 4,
        "optimizer": {"lr": 1e-2},
        **changes,
    }
    return PolicyConfig.model_validate(values)


@cache
def tiny_policy(pad_token: str | None = None, **changes: Any) -> Policy:
    """Return a policy of one worker in this process, the same for the same arguments; `changes` as above."""
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = pad_token or tokenizer.pad_token
    return Policy(
        tiny_policy_config("llama", **changes), tiny_generation_config(), tokenizer=tokenizer, seed=0
    )


def tiny_generation_config(**changes: Any) -> GenerationConfig:
    """Return a generation section with few new tokens."""
    return GenerationConfig.model_validate({"max_new_tokens": 8, **changes})


def tiny_batch(lengths: list[int], *, seed: int = 0, width: int | None = None) -> BatchedDataDict:
    """Return rows of random tokens with every column that training reads; the first third of a row is
    prompt."""
    generator = torch.Generator().manual_seed(seed)
    rows, width = len(lengths), width or max(lengths)
    sizes = torch.tensor(lengths)
    column = torch.arange(width)
    there = column < sizes[:, None]
    answer = there & (column >= (sizes // 3)[:, None])

    def noise(scale: float) -> torch.Tensor:
        return torch.randn(rows, width, generator=generator) * scale * there

    ids = torch.randint(5, VOCAB_SIZE, (rows, width), generator=generator)
    return BatchedDataDict(
        {
            "input_ids": torch.where(there, ids, 0),
            "input_lengths": sizes,
            "token_mask": answer.to(torch.uint8),
            "sample_mask": torch.ones(rows),
            "advantages": noise(1.0),
            "generation_logprobs": -noise(1.0).abs(),
            "prev_logprobs": -noise(1.0).abs(),
        }
    )


def save_tiny_model(directory: Path, name: str, *, seed: int = 0) -> Path:
    """Write a tiny model and its tokenizer as a Hugging Face directory and return it."""
    tiny_model(name, seed=seed).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory

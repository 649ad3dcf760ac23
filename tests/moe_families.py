"""Tiny random models of every mixture-of-experts family that router replay is tested on."""

from copy import deepcopy
from importlib import import_module
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.aria import modeling_aria

from headrace.models.router_replay import RouterReplay

# Written over a family's defaults where its config has the name.
_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "unpadded_vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "sliding_window": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "output_router_logits": False,
    # The default of 0.02 makes so small a model nearly linear.
    "initializer_range": 0.2,
}

_SELECTION_BIASES = ("e_score_correction_bias", "expert_bias", "balancing_biases")

_LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 4,
}  # Multi-head latent attention: heads share the rotary part.
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
# The indexer keeps all keys: its own choice of keys ties in models this small, and is not what is tested.
_INDEXED = {**_LATENT, "index_topk": 64, "index_n_heads": 2, "index_head_dim": 8}

_ROTARY = {"rope_type": "default", "rope_theta": 1e4}

FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {},
    "aria_text": {},
    "axk1": _LATENT,
    "axk2": _INDEXED,
    "bailing_hybrid": {**_LATENT, "layer_types": ["linear_attention", "full_attention"]},
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "cohere2_moe": {},
    "deepseek_ocr2_text": {
        "num_key_value_heads": 4,
        "mlp_layer_types": ["dense", "sparse"],
        "topk_method": "group_limited_greedy",
    },
    "deepseek_v2": {**_LATENT, "topk_method": "group_limited_greedy"},
    "deepseek_v3": _LATENT,
    "deepseek_v32": _INDEXED,
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "mlp_layer_types": ["hash_moe", "moe"],
        "layer_types": ["sliding_attention", "sliding_attention"],
        "o_groups": 2,
        "o_lora_rank": 8,
    },
    "dots1": {},
    "dots3_note_text": {**_INDEXED, "layer_types": ["indexed_attention"] * 2},
    "ernie4_5_moe": {},
    "exaone_moe": {},
    "flex_olmo": {},
    "flint": {"mlp_only_layers": [0]},
    "gemma4_text": {
        "num_attention_heads": 4,
        "enable_moe_block": True,
        "top_k_experts": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 0,
    },
    "glm4_moe": {},
    "glm4_moe_lite": _LATENT,
    "glm4v_moe_text": {
        "rope_parameters": {**_ROTARY, "mrope_section": [1, 0, 1], "partial_rotary_factor": 0.5}
    },
    "glm5_next_text": {
        **_INDEXED,
        "qk_rope_head_dim": 0,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "glm_moe_dsa": _INDEXED,
    "gpt_oss": {},
    "granitemoe": {},
    "granitemoe_swa": {},
    "granitemoehybrid": {
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_expand": 2,
        "mamba_d_state": 4,
        "layer_types": ["mamba", "attention"],
    },
    "granitemoeshared": {},
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "hy_v4": {},
    "hy_v4_vl_text": {**_INDEXED, "rope_parameters": {**_ROTARY, "mrope_section": [1, 1, 0]}},
    "inkling_text": {},
    "inkling2_text": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 1,
        "expert_layer_offset": 0,
        "mamba_dt_rank": 4,
        "mamba_d_state": 4,
    },
    "jetmoe": {},
    "kimi_linear": {
        "num_key_value_heads": 4,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "kolibri1": {},
    "laguna": {},
    "lara_mini": {},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {},
    "longcat_flash": {
        **_LATENT,
        "num_layers": 2,
        "zero_expert_num": 2,
        "ffn_hidden_size": 32,
        "expert_ffn_hidden_size": 16,
    },
    "mellum": {},
    "mimo_v2_flash": {},
    "minimax": {},
    "minimax_m2": {},
    "minimax_m3_vl_text": {},
    "mistral4": {"num_key_value_heads": 4},
    "mistral_large4_text": {**_INDEXED, "rope_parameters": _ROTARY},
    "mixtral": {},
    "muse_spark_text": {"moe_hidden_size": 16},
    "nemotron_h": {
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 16,
        "layers_block_type": ["mamba", "moe", "attention", "moe"],
    },
    "olmoe": {},
    "qwen2_moe": {},
    "qwen3_5_moe_text": _LINEAR,
    "qwen3_moe": {},
    "qwen3_next": _LINEAR,
    "qwen3_omni_moe_text": {},
    "qwen3_vl_moe_text": {},
    "qwen4_exp_text": {
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "solar_open": {},
    "step3p7": {"mlp_layer_types": ["dense", "sparse"]},
    "unlimited_ocr_text": {},
    "zaya": {"num_experts_per_tok": 1},
}

# Families that `AutoModelForCausalLM` does not build: their decoder, or the causal model that another class has.
_OTHER_CLASSES = {
    "deepseek_ocr2_text": "deepseek_ocr2.DeepseekOcr2TextModel",
    "glm4v_moe_text": "glm4v_moe.Glm4vMoeTextModel",
    "glm5_next_text": "glm5_next.Glm5NextTextModel",
    "hy_v4_vl_text": "hy_v4_vl.HYV4VLTextModel",
    "mistral4": "mistral4.Mistral4ForCausalLM",
    "mistral_large4_text": "mistral_large4.MistralLarge4TextModel",
    "muse_spark_text": "muse_spark.MuseSparkTextModel",
    "qwen3_omni_moe_text": "qwen3_omni_moe.Qwen3OmniMoeThinkerTextModel",
    "qwen3_vl_moe_text": "qwen3_vl_moe.Qwen3VLMoeTextModel",
    "step3p7": "step3p7.Step3p7TextModel",
    "unlimited_ocr_text": "unlimited_ocr.UnlimitedOcrTextModel",
}

# The families that the installed transformers has; 5.17 lacks some, and routes aria in the block.
INSTALLED = [
    f
    for f in FAMILIES
    if f in CONFIG_MAPPING and (f != "aria_text" or hasattr(modeling_aria, "AriaTextTopKRouter"))
]


def tiny_sizes(family: str, **changes: Any) -> dict[str, Any]:
    """Return what the config of a tiny model of `family` is made of."""
    kind = config_class(family)
    sizes = {name: value for name, value in _SIZES.items() if hasattr(kind, name)}
    # A config changes what it is given.
    return deepcopy({**sizes, **FAMILIES.get(family, {}), **changes})


def tiny_moe(family: str, *, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """Return a model of `family` in evaluation mode, with weights drawn from a fixed seed."""
    config = config_class(family)(**tiny_sizes(family, **changes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        build: Any = _model_class(family) if family in _OTHER_CLASSES else AutoModelForCausalLM
        make = build._from_config if family in _OTHER_CLASSES else build.from_config
        model = make(config, dtype=dtype)
        for name, buffer in model.named_buffers():
            if name.endswith(_SELECTION_BIASES):
                buffer.normal_(0, 0.05)
            if name.endswith("tid2eid"):
                buffer.copy_(torch.rand(len(buffer), 8).topk(buffer.shape[1]).indices)
    return model.eval()


def _model_class(family: str) -> Any:
    package, name = _OTHER_CLASSES[family].split(".")
    return getattr(import_module(f"transformers.models.{package}.modeling_{package}"), name)


def config_class(family: str) -> Any:
    """Return the config of a family's decoder."""
    return _model_class(family).config_class if family in _OTHER_CLASSES else CONFIG_MAPPING[family]


def scores(output: Any) -> torch.Tensor:
    """Return a model's logits, or the last hidden states of a decoder without a head."""
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Turn activation checkpointing of the decoder layers on, by the name that the installed transformers has."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def random_routes(replay: RouterReplay, tokens: int, seed: int) -> torch.Tensor:
    """Return routes (tokens, routers, k) that no router would choose by itself: k random experts everywhere."""
    generator = torch.Generator().manual_seed(seed)
    columns = [
        torch.rand(tokens, r.num_experts, generator=generator).topk(r.top_k).indices for r in replay.routers
    ]
    return torch.stack(columns, dim=1)

"""Tiny random models of every mixture-of-experts family that router replay is tested on."""

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel
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

FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {},
    "aria_text": {},
    "axk1": _LATENT,
    "axk2": _INDEXED,
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "cohere2_moe": {},
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
    "inkling_text": {},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 1,
        "expert_layer_offset": 0,
        "mamba_dt_rank": 4,
        "mamba_d_state": 4,
    },
    "jetmoe": {},
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
    "mixtral": {},
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
    "solar_open": {},
    "zaya": {"num_experts_per_tok": 1},
}

# The families that the installed transformers has; 5.17 lacks four, and routes aria in the block.
INSTALLED = [
    f
    for f in FAMILIES
    if f in CONFIG_MAPPING and (f != "aria_text" or hasattr(modeling_aria, "AriaTextTopKRouter"))
]


def tiny_sizes(family: str, **changes: Any) -> dict[str, Any]:
    """Return what the config of a tiny model of `family` is made of."""
    kind = type(AutoConfig.for_model(family))
    sizes = {name: value for name, value in _SIZES.items() if hasattr(kind, name)}
    return {**sizes, **FAMILIES.get(family, {}), **changes}


def tiny_moe(family: str, **changes: Any) -> PreTrainedModel:
    """Return a model of `family` in float32 and evaluation mode, with weights drawn from a fixed seed."""
    config = AutoConfig.for_model(family, **tiny_sizes(family, **changes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, buffer in model.named_buffers():
            if name.endswith(_SELECTION_BIASES):
                buffer.normal_(0, 0.05)
            if name.endswith("tid2eid"):
                buffer.copy_(torch.rand(len(buffer), 8).topk(buffer.shape[1]).indices)
    return model.eval()


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

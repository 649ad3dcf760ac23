"""Floating-point operations of training, estimated, and what a device can do at most."""

from collections.abc import Iterable
from typing import Any

import torch

_PEAK_TFLOPS = {
    # Dense bfloat16 tensor-core rates of the vendors' data sheets.
    "H200": 989.0,
    "H100": 989.0,
    "H800": 989.0,
    "B200": 2250.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
}
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def training_flops(model: Any, lengths: Iterable[int]) -> float:
    """Return the operations of one forward and backward pass over sequences of `lengths` tokens.

    6 per active weight and token, and 6 x layers x heads x head size x length^2 per sequence for causal
    attention. Active weights are those that multiply a token: the output head counts, the embedding table
    does not, and of E experts the k that are chosen. Recomputation does not count.

    Source: Chowdhery et al., PaLM (arXiv 2204.02311), appendix B; its attention term halved for the causal
    mask.
    """
    per_token, per_pair = 6.0 * active_parameters(model), 6.0 * _attention_width(model)
    return float(sum(per_token * n + per_pair * n * n for n in lengths))


def attention_ratio(model: Any) -> float:
    """Return the operations of a row's L^2 over those of its L, as the planner's `attention_ratio` counts them."""
    return _attention_width(model) / active_parameters(model)


def _attention_width(model: Any) -> int:
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(config.num_hidden_layers * heads * head_size)


def active_parameters(model: Any) -> int:
    """Return the number of weights that multiply one token."""
    config = model.config.get_text_config()
    experts = next((n for n in (getattr(config, key, None) for key in _EXPERT_COUNTS) if n), 0)
    chosen = getattr(config, "num_experts_per_tok", None) or experts
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    total = 0
    for weight in model.parameters():
        stacked = experts and weight.dim() == 3 and weight.shape[0] == experts
        total += weight.numel() * chosen // experts if stacked else weight.numel()
    return total if head is table else total - int(table.numel())


def peak_tflops(device: torch.device) -> float:
    """Return the device's peak rate in bfloat16, 10^12 operations per second; 0 where it is not known."""
    if device.type != "cuda":
        return 0.0
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in _PEAK_TFLOPS.items() if key in name), 0.0)

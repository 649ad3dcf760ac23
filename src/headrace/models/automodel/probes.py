"""What is tried out on a whole model before a run: that it runs at all, and that it is causal."""

from typing import Any

import torch

from headrace.errors import ConfigError

_EARLIER, _LATER = [5, 6, 7, 8], ([9, 10, 11, 12], [13, 14, 15, 16])
# Largest change of a score, as a share of how far scores lie apart: rounding.
_FLOAT32, _BFLOAT16 = 1e-4, 5e-2

REFUSALS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What transformers raises over a config whose parts do not fit together."""

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN_EXPERTS = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
"""Names that configs have for the experts of a token."""


@torch.no_grad()
def check_runs(model: Any, dtype: torch.dtype, key: str) -> None:
    """Run two tokens through a model that the config under `key` describes: sizes that do not fit show there only."""
    device = model.device
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=device)
    try:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            scores = model(input_ids=tokens, use_cache=False).logits
    except REFUSALS as error:
        fault = _too_few_experts(model.config) or "check that sizes, heads and experts fit together"
        raise ConfigError(
            f"{key}: the {type(model).__name__} that it describes cannot run ({first_line(error)}); {fault}"
        ) from error
    if scores.float().log_softmax(-1).isnan().any():
        raise ConfigError(
            f"{key}: the {type(model).__name__} that it describes gives scores that are no numbers; check its scales "
            "and weights"
        )


def _too_few_experts(config: Any) -> str | None:
    """Return which sizes contradict, if a token is to choose more experts than there are."""
    text = config.get_text_config()
    chosen, experts = (
        next(((n, v) for n in names if isinstance(v := getattr(text, n, None), int)), None)
        for names in (CHOSEN_EXPERTS, _EXPERTS)
    )
    if chosen is None or experts is None or chosen[1] <= experts[1]:
        return None
    return f"{chosen[0]}={chosen[1]} is more than {experts[0]}={experts[1]}"


@torch.no_grad()
def check_causal(model: Any) -> None:
    """Run two rows that differ in their later tokens only, and hold the scores of the earlier ones to be equal.

    Raises:
        ConfigError: a later token moves what the model predicts before it, so that tokens have no logprob given those
            before them alone.
    """
    half = model.config._attn_implementation == "flash_attention_2"
    vocabulary = model.get_input_embeddings().weight.shape[0]
    rows = torch.tensor([_EARLIER + later for later in _LATER], device=model.device).remainder(vocabulary)
    with torch.autocast(model.device.type, torch.bfloat16, enabled=half):
        # With the mask of a padded batch, which every attention takes.
        whole = torch.ones_like(rows, dtype=torch.bool)
        logits = model(input_ids=rows, attention_mask=whole, use_cache=False).logits
    scores = logits[:, : len(_EARLIER)].float()
    first, second = scores.log_softmax(-1)
    gap = (first - second).abs().max()
    if gap > (_BFLOAT16 if half else _FLOAT32) * (scores.max() - scores.min()):
        is_encoder = getattr(model.config, "is_decoder", None) is False
        remedy = "set policy.model.config.is_decoder=true, or " * is_encoder + "use a causal model"
        raise ConfigError(
            f"policy.model: {type(model).__name__} is not causal: a later token moves the logprob of an earlier one by "
            f"{float(gap):.1e}; {remedy}"
        )


def first_line(error: BaseException) -> str:
    """Return an error's message on one line, with its class where the message alone says little."""
    text = " ".join(str(error).split())[:300]
    says_enough = text and isinstance(error, OSError | RuntimeError | ValueError)
    return text if says_enough else f"{type(error).__name__}: {text}"

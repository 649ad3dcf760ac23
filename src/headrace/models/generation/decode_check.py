"""Proof that a model decodes, with its key-value cache and beside shorter prompts, as it scores whole sequences."""

from collections.abc import Callable
from typing import Any

import torch

from headrace.errors import ConfigError, HeadraceError
from headrace.models.automodel.probes import REFUSALS
from headrace.models.sampling import filter_logits, gather_logprobs

_PROMPTS = ((5, 6, 7, 8, 9), (7, 6), (5, 6, 7, 8, 9))
# Largest change of a logprob, as a share of how far scores lie apart: rounding of the summation order.
_LARGEST = 1e-3

Decode = Callable[[list[list[int]]], tuple[list[list[int]], list[list[float]]]]
"""From prompts to answers and their logprobs."""


@torch.no_grad()
def check_decoding(model: Any, decode: Decode, unknown_ids: torch.Tensor | None) -> None:
    """Decode two prompts of different lengths, and hold the logprobs to those of forwards without cache and padding.

    Weights of half precision are decoded only: two orders of summation differ too much there.

    Raises:
        ConfigError: decoding fails, or gives other logprobs.
    """
    name = type(model).__name__
    vocabulary = model.get_input_embeddings().weight.shape[0]
    prompts = [[i % vocabulary for i in prompt] for prompt in _PROMPTS]
    try:
        answers, logprobs = decode(prompts)
        gap = max(_gap(model, unknown_ids, *row) for row in zip(prompts, answers, logprobs))
    except HeadraceError:
        raise
    except REFUSALS as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ConfigError(
            f"policy.model: {name} cannot answer prompts with a key-value cache ({reason}); use another model"
        ) from error
    if model.dtype == torch.float32 and gap > _LARGEST:
        raise ConfigError(
            f"policy.model: {name} gives tokens other logprobs in generation, with a key-value cache and padding, than "
            f"in a forward pass over the whole row (relative change {gap:.1e}); use another model"
        )


def _gap(
    model: Any, unknown_ids: torch.Tensor | None, prompt: list[int], answer: list[int], logprobs: list[float]
) -> float:
    """Return the largest change of a logprob of `answer`, as a share of how far the scores lie apart."""
    row = torch.tensor([*prompt, *answer], device=model.device)
    scores = model(input_ids=row[None], use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    whole = gather_logprobs(filter_logits(scores, unknown_ids=unknown_ids), row[len(prompt) :])
    change = (whole.cpu() - torch.tensor(logprobs)).abs().max()
    return float(change / (scores.max() - scores.min()).clamp(min=1e-6).cpu())

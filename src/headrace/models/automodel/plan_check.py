"""Proof that a tensor-parallel plan that came with transformers leaves a model's scores as they were."""

from typing import Any

import torch

from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.errors import ConfigError
from headrace.models.automodel.data import ProcessedMicrobatch, process_microbatch
from headrace.models.automodel.scoring import TokenScorer

_TOKENS = 16
# Largest and mean change of a logprob: rounding of the summation order, and of bfloat16 (nats).
_LARGEST_FLOAT32, _MEAN_BFLOAT16 = 1e-3, 0.5


@torch.no_grad()
def probe_scores(scorer: TokenScorer, device: torch.device, *, multiple: int) -> torch.Tensor:
    """Return the logprobs (1, 16) on CPU of a fixed row; `multiple` is what the packed row is filled up to.

    Ranks of a sharded model call this together.
    """
    ids = torch.tensor([[0, 1]], device=device).repeat(1, _TOKENS // 2)
    row: Any = BatchedDataDict({"input_ids": ids, "input_lengths": torch.tensor([_TOKENS])})
    inputs = process_microbatch(row, None, True, {"make_sequence_length_divisible_by": multiple}, 1)
    return scorer(ProcessedMicrobatch(row, inputs, 1, _TOKENS)).logprobs.cpu()


def check_split(model: Any, whole: torch.Tensor, split: torch.Tensor, precision: str) -> None:
    """Hold the scores of the split model to those of the whole one, which are float32.

    Raises:
        ConfigError: they differ by more than rounding.
    """
    gap = (whole - split).abs()
    exact = precision == "float32"
    found, limit = (gap.max(), _LARGEST_FLOAT32) if exact else (gap.mean(), _MEAN_BFLOAT16)
    if not float(found) <= limit:
        raise ConfigError(
            f"policy.parallel.tensor: split by transformers' own plan, {type(model).__name__} scores tokens otherwise "
            f"(logprobs change by {float(found):.1e}, more than {limit}); set policy.parallel.tensor=1"
        )

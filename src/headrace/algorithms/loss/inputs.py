"""What every loss does first: read its columns, check them, and find the tokens that count.

A token counts where `token_mask[:, 1:] * sample_mask` is positive. All other positions may hold anything, NaN
and infinities included; a loss puts 0 there before any arithmetic, so that neither values nor gradients see
them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from headrace.data_plane.schema import FIELDS
from headrace.errors import SchemaError


@dataclass(frozen=True)
class TokenMask:
    """Which of the tokens 1..S-1 of b rows count (b, S-1, bool), and each row's weight (b,)."""

    counts: torch.Tensor
    samples: torch.Tensor

    def sequence_mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return (b, 1): the mean of (b, S-1) values over a row's counting tokens; 0 without any."""
        total = torch.where(self.counts, values, 0.0).sum(-1, keepdim=True)
        return total / self.counts.sum(-1, keepdim=True).clamp(min=1)


def read_mask(data: Mapping[str, Any], logprobs: torch.Tensor) -> TokenMask:
    """Return which tokens count.

    Raises:
        SchemaError: a mask that is missing or does not have the rows and width of `logprobs`.
    """
    tokens = read_column(data, "token_mask", logprobs, "it says which tokens were generated")
    samples = data.get("sample_mask")
    if samples is None or samples.shape != logprobs.shape[:1]:
        got = "nothing" if samples is None else f"shape {tuple(samples.shape)}"
        raise SchemaError(f"the loss needs column 'sample_mask' of shape ({len(logprobs)},); got {got}")
    samples = samples.to(logprobs.dtype)
    return TokenMask(counts=(tokens > 0) & (samples > 0)[:, None], samples=samples)


def read_column(
    data: Mapping[str, Any], name: str, logprobs: torch.Tensor, reason: str, *, live: bool = False
) -> torch.Tensor:
    """Return tokens 1..S-1 of a per-token column, (b, S-1), in the dtype of `logprobs`; with gradient if `live`.

    Where the field table allows it, one value per sample, (b,) or (b, 1), holds for the row's tokens.

    Raises:
        SchemaError: the column is missing (the message gives `reason`) or has another shape.
    """
    column = data.get(name)
    if column is None:
        raise SchemaError(f"the loss needs column '{name}': {reason}; got {', '.join(sorted(data))}")
    rows = logprobs.shape[0]
    if name in FIELDS and FIELDS[name].broadcast and column.shape in ((rows,), (rows, 1)):
        column = column.reshape(rows, 1).expand_as(logprobs)
    if column.shape != logprobs.shape:
        raise SchemaError(
            f"column '{name}' has shape {tuple(column.shape)}; expected that of the logprobs, "
            f"{tuple(logprobs.shape)} (rows, padded length)"
        )
    values = torch.as_tensor(column)[:, 1:].to(logprobs.dtype)
    return values if live else values.detach()


def safe_divisor(count: torch.Tensor) -> torch.Tensor:
    """Return a global count as a divisor: 1 in place of 0, because then there is nothing to divide."""
    return torch.where(count > 0, count, torch.ones_like(count))

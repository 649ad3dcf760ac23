"""Protocols between models, policies, generators and losses, so that nothing here imports algorithms."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import torch


class LossType(StrEnum):
    """What a loss is normalised by."""

    TOKEN_LEVEL = "token_level"
    """Valid tokens of the global batch."""
    SEQUENCE_LEVEL = "sequence_level"
    """Valid sequences of the global batch."""


@runtime_checkable
class LossFn(Protocol):
    """A loss over the log-probabilities of the tokens that are there.

    The loss is a sum over the rows it is given, divided by the *global* count of valid tokens or sequences; so
    the sum over microbatches and ranks is the loss of the global batch, however it is cut. A loss may have an
    attribute `required_columns`: a training step fetches those beside `schema.DP_TRAIN_FIELDS`. If
    `schema.UNFILTERED_LOGPROBS` is among them, it comes from the same forward, with gradient.
    """

    loss_type: LossType

    def __call__(
        self,
        logprobs: torch.Tensor,
        data: Mapping[str, Any],
        *,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor | float]]:
        """Return the loss (0-D, float32, with gradient) and metrics: numbers, or 0-D tensors where `logprobs` are.

        Tensors are fetched once per step, as float32; reading one here would wait for the device at every microbatch.

        Args:
            logprobs: (b, S) float32; position t scores token t, position 0 is 0 and never counts.
            data: Columns of the same b rows, each (b, S) or (b,), on the device of `logprobs`.
            global_valid_seqs: 0-D; sum of `sample_mask` over the global batch.
            global_valid_toks: 0-D; sum of `token_mask[:, 1:] * sample_mask` over the global batch.

        Metrics whose name ends in `_min` or `_max` are combined by min or max over microbatches; all others
        are shares of the global batch and are summed.
        """
        ...

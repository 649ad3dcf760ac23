"""The supervised loss."""

from collections.abc import Mapping
from typing import Any

import torch

from headrace.algorithms.loss.aggregate import aggregation_weights, detached, weighted_sum
from headrace.algorithms.loss.inputs import read_column, read_mask
from headrace.data_plane.schema import UNFILTERED_LOGPROBS
from headrace.models.interfaces import LossType


class NLLLoss:
    """Mean negative log-likelihood of the tokens that count; satisfies `models.interfaces.LossFn`.

    It is that of the whole vocabulary, also where sampling is cut by top-k or top-p. Logprobs of -1 and -3 on the two
    counting tokens of the global batch give a loss of 2. The metric `nll` is the loss.
    """

    loss_type = LossType.TOKEN_LEVEL

    def __init__(self, *, filtered: bool = False) -> None:
        """`filtered`: logprobs are of a distribution cut by top-k or top-p."""
        self._filtered = filtered
        masks = {"token_mask", "sample_mask"}
        self.required_columns = frozenset(masks | {UNFILTERED_LOGPROBS} if filtered else masks)

    def __call__(
        self,
        logprobs: torch.Tensor,
        data: Mapping[str, Any],
        *,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss (0-D, with gradient) and its metrics (0-D float32 each); see `LossFn` for the arguments.

        Raises:
            SchemaError: a mask is missing or has another shape than `logprobs`.
        """
        mask = read_mask(data, logprobs)
        weights = aggregation_weights(mask, "token_mean", global_valid_seqs, global_valid_toks)
        scores = logprobs[:, 1:]
        if self._filtered:
            scores = read_column(data, UNFILTERED_LOGPROBS, logprobs, "an answer is learnt uncut", live=True)
        loss = -weighted_sum(scores, weights, mask.counts)
        return loss, detached({"nll": loss})

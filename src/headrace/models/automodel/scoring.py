"""Log-probabilities of the tokens of a microbatch, without ever holding [tokens, vocabulary] scores.

The model runs up to its last hidden state; the output head then scores `chunk_tokens` tokens at a time, and
the backward pass computes each chunk's scores anew. On CUDA a head that is a plain matrix, under a distribution that
keeps every token, goes through `fused_head`, which needs a fraction of the memory traffic.
"""

import copy
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from headrace.data_plane.schema import INPUT_IDS, INPUT_LENGTHS
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.distributed.ragged import offsets_from_lengths, ragged_indices, row_lengths
from headrace.errors import ConfigError
from headrace.models.automodel.data import Packing, forward_kwargs
from headrace.models.automodel.fused_head import chunks_at_once, fused_scores
from headrace.models.automodel.replay import RouteReplayer
from headrace.models.automodel.replica import Replica
from headrace.models.automodel.sharding import ShardedModel
from headrace.models.sampling import filter_logits, selected_logprobs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scoring:
    """The distribution that tokens are scored under, as the generator samples them, and how.

    `chunk_tokens` tokens have their scores in memory at once; a fused head with kernels keeps fewer copies, of
    proportionally more tokens (`fused_head.chunks_at_once`). `fused`: whether heads that allow it go through
    `fused_head`; None: those on CUDA. `unknown_ids` (K,) are the ids without a token, which are never sampled; None:
    there are none.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    chunk_tokens: int = 1024
    fused: bool | None = None
    unknown_ids: torch.Tensor | None = field(default=None, compare=False)

    @property
    def distribution(self) -> dict[str, Any]:
        """The arguments of `headrace.models.sampling` that make the distribution."""
        names = ("temperature", "top_k", "top_p", "unknown_ids")
        return {name: getattr(self, name) for name in names}

    @property
    def filters(self) -> bool:
        return self.top_k is not None or self.top_p != 1

    def unfiltered(self) -> "Scoring":
        return replace(self, top_k=None, top_p=1.0)


class TokenScores(NamedTuple):
    """Per token, (b, S) float32: 0 at position 0 and beyond a row's length.

    `logprobs` has gradients where they are enabled; `entropy` (nats, of the same distribution) has none. `unfiltered`
    are the logprobs at the same temperature without top-k and top-p, with gradients too, where they were asked for.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor | None = None
    unfiltered: torch.Tensor | None = None


@dataclass(frozen=True)
class OutputHead:
    """From hidden states (n, H) to logits (n, V): a projection, then what families do to its result."""

    projection: torch.nn.Module
    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.projection(hidden)
        if self.scale != 1:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


class TokenScorer:
    """Scores every token of a microbatch given the tokens before it, with a model and its output head.

    Packed and padded microbatches give the same (b, S), so that nothing after this sees the packing. Forwards run in
    `precision` on `device` (None: the model's). The ranks of a replica each score a part and return all scores.
    """

    def __init__(
        self,
        model: Any,
        scoring: Scoring,
        precision: str = "float32",
        *,
        packing: Packing | None = None,
        device: torch.device | None = None,
        has_head: bool | None = None,
    ) -> None:
        """`packing` None: microbatches stay padded; `has_head`: whether `output_head` finds one (None: it tries).

        Raises:
            ConfigError: a number of chunk tokens other than the default, for a model that cannot be scored in chunks.
        """
        self.model = model
        self.sharded: ShardedModel | None = None
        self.replayer: RouteReplayer | None = None
        self._scoring, self._half, self._packing = scoring, precision == "bfloat16", packing
        self._device_type = (device or model.device).type
        self.replica: Replica | None = None
        with self._autocast():
            self._head = output_head(model) if has_head is None else model_head(model) if has_head else None
        if self._head is None and scoring.chunk_tokens != Scoring.chunk_tokens:
            raise ConfigError(
                f"policy.logprob_chunk_tokens={scoring.chunk_tokens} has no effect: {type(model).__name__} computes "
                "its logits in a way that cannot be cut into chunks; remove it, and make microbatches smaller to "
                "save memory"
            )

    @property
    def has_head(self) -> bool:
        return self._head is not None

    def under(
        self, distribution: Mapping[str, Any], half: bool | None, replayer: RouteReplayer | None
    ) -> "TokenScorer":
        """Return a scorer of the same model whose distribution has another `temperature`, `top_k` or `top_p`.

        `half` says whether it computes in bfloat16; None: as this one does.
        """
        other = copy.copy(self)
        other._scoring = replace(self._scoring, **distribution)
        other._half = self._half if half is None else half
        other.replayer = replayer
        return other

    def shard(self, sharded: ShardedModel, replica: Replica | None) -> None:
        """Score with the model's sharded form; `replica` None: every rank scores rows of its own.

        Raises:
            ConfigError: a replica of several ranks, of a model whose logits cannot be cut into chunks.
        """
        if replica is not None and self._head is None:
            raise ConfigError(
                f"{type(self.model).__name__} computes its logits in a way that cannot be split over ranks; set "
                "policy.parallel.tensor=1 and policy.parallel.context=1"
            )
        self.sharded, self.replica = sharded, replica

    def gathered(self) -> AbstractContextManager[None]:
        """Return a context for the microbatches of one call, in which a small sharded model's weights stay whole."""
        return nullcontext() if self.sharded is None else self.sharded.gathered()

    def __call__(
        self, data: BatchedDataDict, *, with_entropy: bool = False, with_unfiltered: bool = False
    ) -> TokenScores:
        """Score b rows padded to S: `data.FORWARD_COLUMNS` and media. Lengths on the CPU save a device sync."""
        kwargs = forward_kwargs(data, self._packing)
        if self.replayer is not None:
            tokens, packed = kwargs["input_ids"].flatten(), self._packing is not None
            if (routes := self.replayer.routes(data, tokens, packed=packed)) is not None:
                kwargs["routes"] = routes
        lengths, width = row_lengths(data[INPUT_LENGTHS]), data[INPUT_IDS].shape[1]
        with self._autocast():
            if self.sharded is None:
                return self._score(kwargs, lengths, width, with_entropy, with_unfiltered)

            def run() -> TokenScores:
                scores = self._score(kwargs, lengths, width, with_entropy, with_unfiltered)
                # FSDP hangs its hook on what it is given, and a hook on a view can be lost.
                whole = None if scores.unfiltered is None else scores.unfiltered.clone()
                return TokenScores(scores.logprobs.clone(), scores.entropy, whole)

            scores: TokenScores = self.sharded.run(run)
            return scores

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device_type, torch.bfloat16, enabled=self._half)

    def _score(
        self,
        kwargs: dict[str, Any],
        lengths: torch.Tensor,
        width: int,
        with_entropy: bool,
        with_unfiltered: bool,
    ) -> TokenScores:
        ids, replica, filters = kwargs["input_ids"], self.replica, self._scoring.filters
        window = None if replica is None else replica.own_tokens(ids.numel())
        packed = self._packing is not None
        source, scored, target = _places(lengths, width, window, packed=packed, device=ids.device)
        # (1, T, H) or (b, S, H); without a head, logits
        hidden = _run(
            self.model, kwargs if replica is None else replica.own_kwargs(kwargs), whole=self._head is None
        )
        if replica is not None:
            hidden = replica.own_hidden(hidden)
        chosen = hidden.flatten(0, 1).index_select(0, source)  # (n, H)
        targets = ids.flatten().index_select(0, scored)  # (n,)
        found = self.score_tokens(chosen, targets, with_entropy, with_unfiltered and filters)
        rows = len(lengths)
        spread = [
            None if x is None else x.new_zeros(rows * width).scatter(0, target, x).view(rows, width)
            for x in found
        ]
        if replica is not None:
            spread = [None if x is None else replica.join(x) for x in spread]
        logprobs, entropy, unfiltered = spread
        assert logprobs is not None
        return TokenScores(logprobs, entropy, logprobs if with_unfiltered and not filters else unfiltered)

    def score_tokens(
        self, hidden: torch.Tensor, targets: torch.Tensor, with_entropy: bool, with_unfiltered: bool
    ) -> TokenScores:
        head, scoring, size = self._head, self._scoring, self._scoring.chunk_tokens
        matrix = fused_matrix(head, scoring)
        if head is not None and matrix is not None:
            logprobs, entropy = fused_scores(
                hidden,
                matrix,
                targets,
                scale=head.scale / scoring.temperature,
                chunk_tokens=chunks_at_once(matrix.device) * size,
                unknown_ids=scoring.unknown_ids,
            )
            return TokenScores(logprobs, entropy if with_entropy else None)
        run: Callable[..., TokenScores] = self._score_chunk
        if torch.is_grad_enabled() and len(targets) > size:
            run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
        chunks = zip(torch.split(hidden, size), torch.split(targets, size))
        parts = [run(part, ids, with_entropy, with_unfiltered) for part, ids in chunks]
        columns: list[Any] = [None if part[0] is None else torch.cat(part) for part in zip(*parts)]
        return TokenScores(*columns)

    def _score_chunk(
        self, hidden: torch.Tensor, targets: torch.Tensor, with_entropy: bool, with_unfiltered: bool
    ) -> TokenScores:
        logits, scoring = hidden if self._head is None else self._head(hidden), self._scoring
        logprobs = selected_logprobs(logits, targets, **scoring.distribution)
        entropy = _entropy(filter_logits(logits.detach(), **scoring.distribution)) if with_entropy else None
        plain = scoring.unfiltered().distribution
        whole = selected_logprobs(logits, targets, **plain) if with_unfiltered else None
        return TokenScores(logprobs, entropy, whole)


def output_head(model: Any) -> OutputHead | None:
    """Return the model's head, if that makes the model's own logits of two tokens, or else None.

    Without a head, the model computes all logits of a microbatch at once.
    """
    head = model_head(model)
    ids = torch.tensor([[0, 1]], device=model.device)
    kwargs = {"input_ids": ids, "attention_mask": torch.ones_like(ids, dtype=torch.bool)}
    with torch.no_grad():
        own, hidden = _run(model, kwargs, whole=True).float(), _run(model, kwargs, whole=False)
        if hidden.shape[-1] == model.get_output_embeddings().weight.shape[-1]:
            ours = head(hidden).float()
            if torch.allclose(ours, own, rtol=1e-3, atol=1e-3 * float(own.abs().max())):
                return head
    logger.warning(
        "%s computes its logits in a way that cannot be cut into chunks; policy.logprob_chunk_tokens has no effect "
        "and a microbatch's [tokens, vocabulary] scores are held whole",
        type(model).__name__,
    )
    return None


def model_head(model: Any) -> OutputHead:
    """Return the head that the model's config describes; `output_head` compares it with the model's own logits."""
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
    return OutputHead(model.get_output_embeddings(), scale, getattr(config, "final_logit_softcapping", None))


def _places(
    lengths: torch.Tensor, width: int, window: tuple[int, int] | None, *, packed: bool, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return flat indices (n,): of the hidden states that score a token, of that token, and of the score in b x S.

    They are of all tokens, or of those whose hidden states lie in [start, stop), where those begin at 0.
    """
    offsets = offsets_from_lengths((lengths - 1).clamp(min=0))
    total = int(offsets[-1])
    starts = lengths.cumsum(0) - lengths if packed else torch.arange(len(lengths)) * width
    if window is None:
        # Only what there is per row goes to the device, where what there is per token is made of it.
        offsets, starts = (x.to(device, non_blocking=True) for x in (offsets, starts))
    row, position = ragged_indices(offsets, total)
    source, target = starts[row] + position, row * width + position + 1
    if window is None:
        return source, source + 1, target
    # Packed rows lie in order, so that a window is one piece.
    first, last = torch.searchsorted(source, torch.tensor(window)).tolist()
    source, target = source[first:last].to(device), target[first:last].to(device)
    return source - window[0], source + 1, target


def _run(model: Any, kwargs: dict[str, Any], *, whole: bool) -> torch.Tensor:
    """Return the last hidden states (..., H); of a `whole` run, the logits."""
    if whole:
        logits: torch.Tensor = model(**kwargs, use_cache=False).logits
        return logits
    hidden: torch.Tensor = trunk(model)(**kwargs, use_cache=False).last_hidden_state
    return hidden


def trunk(model: Any) -> Any:
    # The base that some name is the whole model.
    return model.base_model if model.base_model is not model else model.model


def fused_matrix(head: OutputHead | None, scoring: Scoring) -> torch.Tensor | None:
    """Return the matrix (V, H) of a head that is to be fused, or None.

    A product with it and a softmax of all tokens must be all that scoring takes.
    """
    if head is None or not takes_fused_head(head, scoring):
        return None
    matrix: Any = head.projection.weight
    # Sharded matrices are tensors of other types.
    if type(matrix) not in (torch.nn.Parameter, torch.Tensor):
        return None
    wanted = matrix.is_cuda if scoring.fused is None else scoring.fused
    return matrix if wanted else None


def takes_fused_head(head: OutputHead, scoring: Scoring) -> bool:
    """Return whether a product with a plain matrix and a softmax of all tokens are all that scoring takes."""
    projection = head.projection
    plain = type(projection) is torch.nn.Linear and projection.bias is None
    hooked = projection._forward_hooks or projection._forward_pre_hooks
    return plain and not hooked and head.softcap is None and not scoring.filters


@torch.no_grad()
def _entropy(logits: torch.Tensor) -> torch.Tensor:
    """Return the entropy (n,) of softmax(logits): log sum exp(z) - sum p z, where p > 0."""
    probabilities = logits.softmax(-1)
    expected = (probabilities * logits.masked_fill(logits == -torch.inf, 0)).sum(-1)
    return logits.logsumexp(-1) - expected

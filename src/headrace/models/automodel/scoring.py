"""Log-probabilities of the tokens of a microbatch, without ever holding [tokens, vocabulary] scores.

The model runs up to its last hidden state; the output head then scores `chunk_tokens` tokens at a time, and
the backward pass computes each chunk's scores anew. On CUDA a head that is a plain matrix, under a distribution that
keeps every token, goes through `fused_head`, which needs a fraction of the memory traffic.
"""

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from headrace.data_plane.schema import INPUT_LENGTHS
from headrace.distributed.ragged import offsets_from_lengths, ragged_indices, row_lengths
from headrace.errors import ConfigError
from headrace.models.automodel.data import ProcessedMicrobatch
from headrace.models.automodel.fused_head import chunks_at_once, fused_scores, fusible_matrix
from headrace.models.automodel.replay import RouteReplayer
from headrace.models.automodel.replica import Replica
from headrace.models.automodel.sharding import ShardedModel
from headrace.models.router_replay import Routes
from headrace.models.sampling import filter_logits, selected_logprobs

logger = logging.getLogger(__name__)

Scores = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""Per token: logprobs, and entropies and unfiltered logprobs where they were asked for."""


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
        return {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "unknown_ids": self.unknown_ids,
        }

    @property
    def filters(self) -> bool:
        return self.top_k is not None or self.top_p != 1

    def unfiltered(self) -> "Scoring":
        """Return the same without top-k and top-p."""
        return replace(self, top_k=None, top_p=1.0)


@dataclass(frozen=True)
class TokenScores:
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
        """Return the logits."""
        logits: torch.Tensor = self.projection(hidden)
        if self.scale != 1:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


class Autocast:
    """Makes the context in which forwards run: bfloat16 autocast, or none for float32."""

    def __init__(self, device: torch.device, precision: str) -> None:
        self._device, self._enabled = device, precision == "bfloat16"

    def __call__(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device.type, torch.bfloat16) if self._enabled else nullcontext()

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self._enabled else torch.float32


class TokenScorer:
    """A model with its output head, and how its tokens are scored."""

    def __init__(
        self, model: Any, scoring: Scoring, autocast: Autocast, *, has_head: bool | None = None
    ) -> None:
        """`has_head`: whether `output_head` finds one; None: run the model to find out.

        Raises:
            ConfigError: a number of chunk tokens other than the default, for a model that cannot be scored in chunks.
        """
        self.model = model
        self.autocast = autocast
        self.sharded: ShardedModel | None = None
        self.replayer: RouteReplayer | None = None
        self._scoring = scoring
        self._replica: Replica | None = None
        with autocast():
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

    def shard(self, sharded: ShardedModel, replica: Replica | None) -> None:
        """From now on score with the model's sharded form; `replica` None: every rank scores rows of its own.

        Raises:
            ConfigError: a replica of several ranks, of a model whose logits cannot be cut into chunks.
        """
        if replica is not None and self._head is None:
            raise ConfigError(
                f"{type(self.model).__name__} computes its logits in a way that cannot be split over ranks; set "
                "policy.parallel.tensor=1 and policy.parallel.context=1"
            )
        self.sharded, self._replica = sharded, replica

    def __call__(
        self, microbatch: ProcessedMicrobatch, *, with_entropy: bool = False, with_unfiltered: bool = False
    ) -> TokenScores:
        """Score every token of a microbatch; see `token_logprobs`."""
        routes = None if self.replayer is None else self.replayer.routes(microbatch)
        with self.autocast():
            if self.sharded is None:
                return self._score(microbatch, with_entropy, with_unfiltered, routes)
            part = partial(self._score_part, microbatch, with_entropy, with_unfiltered, routes)
            return TokenScores(*self.sharded.run(part))

    def _score(
        self,
        microbatch: ProcessedMicrobatch,
        with_entropy: bool,
        with_unfiltered: bool,
        routes: Routes | None,
    ) -> TokenScores:
        return token_logprobs(
            self.model,
            microbatch,
            self._scoring,
            head=self._head,
            with_entropy=with_entropy,
            with_unfiltered=with_unfiltered,
            replica=self._replica,
            routes=routes,
        )

    def _score_part(self, *arguments: Any) -> tuple[torch.Tensor | None, ...]:
        scores = self._score(*arguments)
        # FSDP hangs its hook on what it is given, and a hook on a view can be lost.
        unfiltered = None if scores.unfiltered is None else scores.unfiltered.clone()
        return scores.logprobs.clone(), scores.entropy, unfiltered


def output_head(model: Any) -> OutputHead | None:
    """Return the model's head, if that makes the model's own logits of two tokens, or else None.

    Without a head, `token_logprobs` lets the model compute all logits of a microbatch at once.
    """
    head = model_head(model)
    ids = torch.tensor([[0, 1]], device=model.device)
    mask = torch.ones_like(ids, dtype=torch.bool)
    with torch.no_grad():
        own = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float()
        hidden = _trunk(model)(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
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
    """Return the head that the model's config describes; `output_head` holds it to the model's own logits."""
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
    return OutputHead(model.get_output_embeddings(), scale, getattr(config, "final_logit_softcapping", None))


def token_logprobs(
    model: Any,
    microbatch: ProcessedMicrobatch,
    scoring: Scoring,
    *,
    head: OutputHead | None,
    with_entropy: bool = False,
    with_unfiltered: bool = False,
    replica: Replica | None = None,
    routes: Routes | None = None,
) -> TokenScores:
    """Score every token of a microbatch given the tokens before it.

    Packed and padded microbatches give the same (b, S), so that nothing after this sees the packing. `head` is
    `output_head(model)`. The ranks of a `replica` each score a part and return all scores. `routes` are for the tokens
    of this rank's forward; the model then has router replay installed.
    """
    inputs = microbatch.processed_inputs
    replay = {} if routes is None else {"routes": routes}
    if replica is None:
        places = _places(microbatch)
        hidden = _last_hidden(model, {**inputs.forward_kwargs(), **replay}, whole=head is None)
    else:
        places = _places(microbatch, replica.own_tokens(inputs.input_ids.numel()))
        kwargs = {**replica.forward_kwargs(inputs), **replay}
        hidden = replica.own_hidden(_last_hidden(model, kwargs, whole=False))
    chosen = hidden.flatten(0, 1).index_select(0, places.source)
    targets = inputs.input_ids.flatten().index_select(0, places.scored)
    found = _score(head, chosen, targets, scoring, with_entropy, with_unfiltered and scoring.filters)
    shape = (microbatch.original_batch_size, microbatch.original_seq_len)
    spread = [None if x is None else _spread(x, places.target, shape) for x in found]
    if replica is not None:
        spread = [None if x is None else replica.join(x) for x in spread]
    logprobs, entropy, unfiltered = spread
    assert logprobs is not None
    if with_unfiltered and not scoring.filters:
        unfiltered = logprobs
    return TokenScores(logprobs, entropy, unfiltered)


@dataclass(frozen=True)
class _Places:
    """Flat indices: of the hidden states that score a token, of that token, and of the score in b x S."""

    source: torch.Tensor
    scored: torch.Tensor
    target: torch.Tensor


def _places(microbatch: ProcessedMicrobatch, window: tuple[int, int] | None = None) -> _Places:
    """Return all places, or those whose hidden states lie in [start, stop), where those begin at 0."""
    inputs = microbatch.processed_inputs
    lengths = microbatch.lengths
    if lengths is None:
        lengths = row_lengths(microbatch.data_dict[INPUT_LENGTHS])
    offsets = offsets_from_lengths((lengths - 1).clamp(min=0))
    total, width = int(offsets[-1]), microbatch.original_seq_len
    starts = lengths.cumsum(0) - lengths if inputs.has_flash_attention else torch.arange(len(lengths)) * width
    device = inputs.input_ids.device
    if window is None:
        # Only what there is per row goes to the device, where what there is per token is made of it.
        offsets, starts = (x.to(device, non_blocking=True) for x in (offsets, starts))
    row, position = ragged_indices(offsets, total)
    source, target = starts[row] + position, row * width + position + 1
    if window is None:
        return _Places(source, source + 1, target)
    # Packed rows lie in order, so that a window is one piece.
    first, last = torch.searchsorted(source, torch.tensor(window)).tolist()
    source, target = source[first:last].to(device), target[first:last].to(device)
    return _Places(source - window[0], source + 1, target)


def _last_hidden(model: Any, kwargs: dict[str, Any], *, whole: bool) -> torch.Tensor:
    if whole:
        logits: torch.Tensor = model(**kwargs, use_cache=False).logits
        return logits
    hidden: torch.Tensor = _trunk(model)(**kwargs, use_cache=False).last_hidden_state
    return hidden


def _trunk(model: Any) -> Any:
    # The base that some name is the whole model.
    return model.base_model if model.base_model is not model else model.model


def _score(
    head: OutputHead | None,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    scoring: Scoring,
    with_entropy: bool,
    with_unfiltered: bool,
) -> Scores:
    size = scoring.chunk_tokens
    matrix = fused_matrix(head, scoring)
    if head is not None and matrix is not None:
        together = chunks_at_once(matrix.device) * size
        options: Any = {"scale": head.scale / scoring.temperature, "chunk_tokens": together}
        fused = fused_scores(hidden, matrix, targets, **options, unknown_ids=scoring.unknown_ids)
        return fused[0], fused[1] if with_entropy else None, None
    recompute = torch.is_grad_enabled() and len(targets) > size
    parts: list[Scores] = []
    for part, ids in zip(torch.split(hidden, size), torch.split(targets, size)):
        arguments = (head, part, ids, scoring, with_entropy, with_unfiltered)
        parts.append(
            checkpoint(_score_chunk, *arguments, use_reentrant=False, preserve_rng_state=False)
            if recompute
            else _score_chunk(*arguments)
        )
    columns: list[Any] = list(zip(*parts))
    entropies = torch.cat(columns[1]) if with_entropy else None
    return torch.cat(columns[0]), entropies, torch.cat(columns[2]) if with_unfiltered else None


def fused_matrix(head: OutputHead | None, scoring: Scoring) -> torch.Tensor | None:
    """Return the matrix of a head that is to be fused, or None.

    A product with it and a softmax of all tokens must be all that scoring takes.
    """
    if head is None or head.softcap is not None or scoring.filters:
        return None
    matrix = fusible_matrix(head.projection)
    if matrix is None:
        return None
    wanted = matrix.is_cuda if scoring.fused is None else scoring.fused
    return matrix if wanted else None


def _score_chunk(
    head: OutputHead | None,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    scoring: Scoring,
    with_entropy: bool,
    with_unfiltered: bool,
) -> Scores:
    logits = hidden if head is None else head(hidden)
    logprobs = selected_logprobs(logits, targets, **scoring.distribution)
    entropy = _entropy(filter_logits(logits.detach(), **scoring.distribution)) if with_entropy else None
    whole = (
        selected_logprobs(logits, targets, **scoring.unfiltered().distribution) if with_unfiltered else None
    )
    return logprobs, entropy, whole


@torch.no_grad()
def _entropy(logits: torch.Tensor) -> torch.Tensor:
    """Return the entropy (n,) of softmax(logits): log sum exp(z) - sum p z, where p > 0."""
    probabilities = logits.softmax(-1)
    expected = (probabilities * logits.masked_fill(logits == -torch.inf, 0)).sum(-1)
    return logits.logsumexp(-1) - expected


def _spread(values: torch.Tensor, target: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    flat = values.new_zeros(shape[0] * shape[1])
    return flat.scatter(0, target, values).view(shape)

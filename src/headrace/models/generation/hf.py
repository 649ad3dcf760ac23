"""Completions from a Hugging Face causal LM: a decode loop over its own forward pass and key-value cache.

Prompts are sorted by length and decoded in left-padded batches. Equal prompts of a batch are prefilled once; a row
that ends leaves its batch, in a static cache once half of the batch has ended. Sampling takes one random number per
prompt and token, all drawn at once from one seeded generator. So a completion depends on the weights, its prompt, the
params, the seed and its place in the call. Its neighbours and the batch size reach it only through rounding: padding
and matrix shapes change the last bits of a logit.
"""

import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import chain
from typing import Any

import torch
from transformers import DynamicCache

from headrace.config import GenerationConfig
from headrace.errors import ConfigError, GenerationError
from headrace.models.generation.decode_check import check_decoding
from headrace.models.generation.decode_steps import (
    DECODE_ATTENTION,
    Forward,
    GrowingSteps,
    PaddedPrompts,
    StaticSteps,
)
from headrace.models.generation.interfaces import GenerationOutput, SamplingParams, check_request
from headrace.models.generation.route_recording import RouteRecording
from headrace.models.generation.stopping import StopRule, build_stop_rule
from headrace.models.generation.weights import cast_parameters, checked_weights, copy_weights
from headrace.models.router_replay import Routes, install
from headrace.models.sampling import filter_logits, gather_logprobs, sample_at
from headrace.models.tokenizers import unknown_ids, vocabulary_of

_LOGGER = logging.getLogger(__name__)
_WORTH_A_GRAPH = 16  # new tokens; a capture takes as long as a few steps


class HFGenerator:
    """A Generator over a `PreTrainedModel`, which it owns: it casts it to `cfg.precision` and freezes it.

    Logprobs are those of the filtered distribution that was sampled; of greedy completions, those of the plain
    softmax. For a further turn of a conversation, pass all its ids again.

    With `record_routes` the output has the experts that every token used, those of the prompt's prefill included.
    """

    def __init__(
        self, model: Any, tokenizer: Any, cfg: GenerationConfig, *, record_routes: bool = False
    ) -> None:
        """Build it.

        Raises:
            ConfigError: a model that decodes otherwise than it scores.
            ReplayError: `record_routes`, and the model has no routers, or some that cannot be recorded.
        """
        self.route_shape = install(model).shape if record_routes else None
        self._model = model.eval().requires_grad_(False)
        self._tokenizer = tokenizer
        self._unknown_ids = unknown_ids(tokenizer, vocabulary_of(model))
        self._batch_size = cfg.batch_size
        self._below_adapter: dict[str, torch.Tensor] = {}
        self.weight_version = 0
        self._is_whole = True
        keywords = signature(model.forward).parameters
        self._options = {"use_cache": True, **({"logits_to_keep": 1} if "logits_to_keep" in keywords else {})}
        self._cache_keyword = "cache" if "cache" in keywords else "past_key_values"
        # In float32, where rounding is small, if the attention has it.
        half_only = model.config._attn_implementation == "flash_attention_2"
        self._static_from: float = math.inf
        if not half_only:
            self._check_decoding()
            if cfg.static_cache or (cfg.static_cache is None and model.device.type == "cuda"):
                self._try_static(0 if cfg.static_cache else _WORTH_A_GRAPH)
        cast_parameters(model, getattr(torch, cfg.precision))
        if half_only:
            self._check_decoding()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        seed: int,
        places: Sequence[int] | None = None,
    ) -> GenerationOutput:
        """Answer every prompt (token ids, at least one each), in order.

        `places`: where in a larger call these prompts stand, so that each gets what it would get there.
        Metrics: `generated_tokens`, `generate_s`, `tokens_per_s`, `truncated_fraction`.

        Raises:
            ConfigError: an empty prompt, an id outside the vocabulary, a prompt without room for a completion or whose
                completion could pass the model's position limit, or params that cannot be used.
            GenerationError: a logprob that is not finite (the message names the prompt), or a call after
                `shutdown` or after an update of weights that broke off.
        """
        start = time.perf_counter()
        if self._model is None:
            raise GenerationError("generate was called after shutdown; build a new generator")
        if not self._is_whole:
            raise GenerationError("an update of the weights broke off midway; call update_weights again")
        check_request(self._model, prompts, params)
        stop = build_stop_rule(self._model, self._tokenizer, params)
        limits = [params.limit(len(prompt)) for prompt in prompts]
        places = range(len(prompts)) if places is None else places
        uniforms = None if params.greedy else _draw_uniforms(places, params.limit(1), seed)
        output = GenerationOutput([[] for _ in prompts], [[] for _ in prompts], [True for _ in prompts])
        routes: dict[int, torch.Tensor] = {}
        # The longest first: a batch that does not fit in memory fails at once. Equal prompts side by side.
        order = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), tuple(prompts[i])))
        for begin in range(0, len(order), self._batch_size):
            rows = order[begin : begin + self._batch_size]
            noise = None if uniforms is None else uniforms[rows].to(self._model.device)
            completions, recording = self._decode(
                [prompts[i] for i in rows], [limits[i] for i in rows], params, stop, noise
            )
            completions.check_finite(rows)
            completions.write_to(output, rows)
            if recording is not None:
                routes.update(zip(rows, recording.rows(completions.counts), strict=True))
        if routes:
            output.routes = [routes[i] for i in range(len(prompts))]
        output.stop_token_ids = tuple(stop.token_ids.tolist())
        output.metrics = output.rates(time.perf_counter() - start)
        return output

    def update_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Copy new weights in, by Hugging Face parameter name, and set `weight_version`; one after the other.

        Every parameter must be there once; of tied parameters one name is enough. Persistent buffers may be. Or all are
        of an adapter to the first weights; see `checked_weights`. A refused update changes nothing. Where the source of
        a stream fails midway, nothing is generated until another update.

        Raises:
            GenerationError: unknown, missing or repeated names, wrong shapes, or tied names that differ.
        """
        checked = checked_weights(self._model, named_tensors, self._below_adapter)
        self._is_whole = False
        copy_weights(self._model, checked)
        self._is_whole, self.weight_version = True, version

    def release(self) -> None:
        """Give cached device memory back; the key-value cache itself ends with each `generate`."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def shutdown(self) -> None:
        self._model = None
        self.release()

    @torch.inference_mode()
    def _decode(
        self,
        prompts: Sequence[Sequence[int]],
        limits: list[int],
        params: SamplingParams,
        stop: StopRule,
        uniforms: torch.Tensor | None,
    ) -> "tuple[_Completions, RouteRecording | None]":
        vocabulary = self._model.get_input_embeddings().weight.shape[0]
        inputs, batch = _pad(prompts, vocabulary, self._model.device)
        shape = self.route_shape if params.record_routes else None
        recording = None if shape is None else RouteRecording(shape, batch.lengths, batch.source)
        completions = _Completions.empty(limits, self._model.device)
        live = torch.arange(len(prompts), device=self._model.device)
        cache = DynamicCache(config=self._model.config)
        forward = partial(self._forward, records=recording is not None)
        logits, routes = forward(inputs, cache)
        if recording is not None:
            recording.add_prefill(routes)
        logits = logits[batch.source]
        steps = self._steps(forward, cache, batch, max(limits))
        del cache  # a static one leaves nothing in it
        for step in range(max(limits)):
            noise = None if uniforms is None else uniforms[live, step]
            ids, logprobs = _choose(logits, params, noise, self._unknown_ids)
            completions.tokens[live, step] = ids
            completions.logprobs[live, step] = logprobs
            ended = stop.ended(completions.tokens[live, max(0, step + 1 - stop.window) : step + 1])
            leaves = ended | (completions.limits[live] == step + 1)
            if bool(leaves.any()):
                completions.end(live[ended], step + 1)
                going = (~leaves).nonzero().squeeze(-1)
                if len(going) == 0:
                    break
                live, ids = live[going], ids[going]
                steps.keep(going)
            logits, routes = steps.step(ids)
            if recording is not None:
                recording.add_step(live, routes)
        return completions, recording

    def _steps(
        self, forward: Forward, cache: DynamicCache, batch: PaddedPrompts, new_tokens: int
    ) -> GrowingSteps | StaticSteps:
        if new_tokens >= self._static_from and StaticSteps.fits(cache, self._model.config):
            return StaticSteps(forward, cache, batch, self._model.config, new_tokens)
        return GrowingSteps(forward, cache, batch)

    def _try_static(self, new_tokens: int) -> None:
        """Decode in a static cache from now on where there are so many new tokens, if this model can."""
        self._static_from = new_tokens
        attention = self._model.config._attn_implementation
        try:
            if attention == "sdpa":
                self._model.set_attn_implementation(DECODE_ATTENTION)
            self._check_decoding(new_tokens=_WORTH_A_GRAPH)
        except ConfigError as error:
            self._static_from = math.inf
            self._model.set_attn_implementation(attention)
            _LOGGER.warning("generation.static_cache is off, so that decoding is slower: %s", error)

    def _check_decoding(self, new_tokens: int = 3) -> None:
        params = SamplingParams(
            max_new_tokens=new_tokens, greedy=True, record_routes=self.route_shape is not None
        )
        never = StopRule(torch.empty(0, dtype=torch.int64, device=self._model.device), (), self._tokenizer)

        def decode(prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
            limits = [params.max_new_tokens] * len(prompts)
            completions, _ = self._decode(prompts, limits, params, never, None)
            return completions.tokens.tolist(), completions.logprobs.tolist()

        check_decoding(self._model, decode, self._unknown_ids)

    def _forward(
        self, inputs: dict[str, Any], cache: Any, *, records: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run prefill or one decode step, grow the cache; return the last position's logits (b, V), and routes."""
        routes = Routes.record()
        extra = {"routes": routes} if records else {}
        output = self._model(**inputs, **{self._cache_keyword: cache}, **self._options, **extra)
        logits: torch.Tensor = output.logits
        return logits[:, -1], routes.ids if records else None


def _pad(
    prompts: Sequence[Sequence[int]], vocabulary: int, device: torch.device
) -> tuple[dict[str, Any], PaddedPrompts]:
    """Return the inputs of the prefill, (U, W) each, and where the prompts lie in them."""
    keys = [tuple(prompt) for prompt in prompts]
    place = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    lengths = torch.tensor([len(key) for key in place])
    flat = torch.tensor(list(chain.from_iterable(place)), dtype=torch.int64)
    low, high = (int(x) for x in flat.aminmax())
    if low < 0 or high >= vocabulary:
        raise ConfigError(
            f"a prompt has token id {low if low < 0 else high}, outside the model's vocabulary of "
            f"{vocabulary}; use the model's own tokenizer (policy.tokenizer)"
        )
    width = int(lengths.max())
    positions = torch.arange(width) - (width - lengths).unsqueeze(1)
    mask = positions >= 0
    ids = torch.zeros(len(place), width, dtype=torch.int64)
    ids[mask] = flat
    source = torch.tensor([place[key] for key in keys])
    padding = None if mask.all() else mask.long().to(device)
    inputs = {"input_ids": ids, "position_ids": positions.clamp_(min=0)}
    inputs = {name: value.to(device) for name, value in inputs.items()}
    batch = PaddedPrompts(padding, width, lengths.to(device), source.to(device))
    return {**inputs, "attention_mask": padding}, batch


@dataclass
class _Completions:
    """B completions; row i's first `counts[i]` entries are used, `limits[i]` at most."""

    tokens: torch.Tensor
    logprobs: torch.Tensor
    limits: torch.Tensor
    counts: torch.Tensor
    truncated: torch.Tensor

    @classmethod
    def empty(cls, limits: list[int], device: torch.device) -> "_Completions":
        rows, width = len(limits), max(limits)
        bounds = torch.tensor(limits, device=device)
        return cls(
            tokens=torch.zeros(rows, width, dtype=torch.int64, device=device),
            logprobs=torch.zeros(rows, width, device=device),
            limits=bounds,
            counts=bounds.clone(),
            truncated=torch.ones(rows, dtype=torch.bool, device=device),
        )

    def end(self, rows: torch.Tensor, count: int) -> None:
        self.counts[rows] = count
        self.truncated[rows] = False

    def check_finite(self, prompt_indices: list[int]) -> None:
        # Entries past a row's count are 0.
        bad = (~self.logprobs.isfinite()).nonzero()
        if len(bad):
            row, token = bad[0].tolist()
            raise GenerationError(
                f"prompt {prompt_indices[row]}: logprob {float(self.logprobs[row, token])} at new token "
                f"{token}; the weights give logits that are not finite (a diverged update?); "
                "lower policy.optimizer.lr or start again from a checkpoint"
            )

    def write_to(self, output: GenerationOutput, prompt_indices: list[int]) -> None:
        """Put each completion in its prompt's place."""
        columns = (
            self.tokens.tolist(),
            self.logprobs.tolist(),
            self.counts.tolist(),
            self.truncated.tolist(),
        )
        for i, ids, logprobs, count, truncated in zip(prompt_indices, *columns, strict=True):
            output.token_ids[i] = ids[:count]
            output.logprobs[i] = logprobs[:count]
            output.truncated[i] = truncated


def _draw_uniforms(places: Sequence[int], limit: int, seed: int) -> torch.Tensor:
    # On CPU whatever the model's device: the same seed gives the same numbers everywhere.
    generator = torch.Generator("cpu").manual_seed(seed)
    rows = max(places, default=-1) + 1
    drawn = torch.rand(rows, limit, generator=generator, dtype=torch.float64, device="cpu")
    return drawn[torch.tensor(places, dtype=torch.int64)]


def _choose(
    logits: torch.Tensor,
    params: SamplingParams,
    uniforms: torch.Tensor | None,
    unknown_ids: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a token id and its logprob per row of `logits` (b, V); greedy when `uniforms` is None."""
    if uniforms is None:
        scores = filter_logits(logits, unknown_ids=unknown_ids)
        ids = scores.argmax(-1)
    else:
        scores = filter_logits(
            logits,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            unknown_ids=unknown_ids,
        )
        ids = sample_at(scores, uniforms)
    return ids, gather_logprobs(scores, ids)

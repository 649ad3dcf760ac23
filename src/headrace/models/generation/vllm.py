"""A vLLM engine in this process: continuous batching, a prefix cache, CUDA graphs.

Token ids go in and come out. Logprobs are those of the distribution that was sampled, so the trainer scores under the
same temperature, top-p and top-k. Weights come by the names of a checkpoint.

The prefix cache is emptied by an update, whose keys and values are those of old weights. It outlives one only while
answers come in pieces that keep theirs; each answer looks into it under the salt of the update that it began with, so
that a new one finds nothing of before.

Source: vLLM, docs/training/rlhf.md, docs/features/sleep_mode.md, docs/training/routed_experts_replay.md,
docs/design/prefix_caching.md (cache salts).
"""

import gc
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from headrace.errors import ConfigError, GenerationError
from headrace.models.generation.engine import Completions, EngineSpec, Request
from headrace.models.generation.interfaces import SamplingParams
from headrace.models.generation.weight_buckets import NamedTensors
from headrace.models.generation.weight_group import WeightGroup, WeightRoute
from headrace.utils.seeding import derive_seed
from headrace.utils.targets import load_optional

_COUNTERS = {
    "vllm:num_preemptions": "preemptions",
    "vllm:prefix_cache_queries": "prefix_query_tokens",
    "vllm:prefix_cache_hits": "prefix_hit_tokens",
}
_GAUGES = {
    "vllm:num_requests_running": "running_requests_max",
    "vllm:num_requests_waiting": "waiting_requests_max",
    "vllm:kv_cache_usage_perc": "cache_use_max",
}
_GAUGE_PERIOD_S = 0.25
_PART_S = 0.05
"""Completions that finish within this time come together."""
_ALL = frozenset({"weights", "kv_cache"})
_NO_WEIGHTS = "the engine has had no weights yet; update them before it generates"
_DISCARDED = (
    "the engine's weights were discarded for training (generation.vllm.sleep_level=2), and no new ones have come; "
    "update them before it generates, or set generation.vllm.sleep_level=1, which keeps them in the host's memory"
)
_BROKEN = "the last update of the engine's weights broke off; update them again before it generates"
OWN_ARGS = {
    "model": "policy.model",
    "tokenizer": "policy.tokenizer",
    "runner": "nothing: it generates",
    "dtype": "generation.precision",
    "load_format": "nothing: weights come from the trainer",
    "logprobs_mode": "nothing: the trainer scores what was sampled",
    "enable_return_routed_experts": "policy.router_replay.enabled",
    "enable_sleep_mode": "generation.vllm.sleep_level",
    "tensor_parallel_size": "generation.vllm.tensor_parallel",
}
"""Engine arguments that headrace sets, and the recipe's key that decides each."""


class VLLMEngine:
    """An Engine on one device, or on one for each of `generation.vllm.tensor_parallel` ranks in processes of vLLM's."""

    def __init__(self, spec: EngineSpec) -> None:
        """Start it, with random weights: seconds on a CPU, a minute with CUDA graphs.

        Raises:
            ConfigError: vLLM is not installed or cannot run the model.
        """
        if spec.ranks > 1:
            # On CPUs vLLM else gives each rank a NUMA node of its own, and refuses to start where there are fewer.
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        self._vllm = import_vllm()
        self._spec = spec
        self._asleep: set[str] = set()
        self._lacks_weights: str | None = _NO_WEIGHTS
        self._peaks: dict[str, float] = {}
        self._seen_s = 0.0
        self._requests = self._updates = 0
        self._salts: dict[int | None, str] = {}  # by weight version
        self._keeps_cache = False
        engine = self._vllm.LLM  # loads the modules
        # Its own errors were ValueErrors once.
        own = getattr(getattr(self._vllm, "exceptions", None), "VLLMError", ValueError)
        self._refusals: tuple[type[Exception], ...] = (ValueError, own)
        try:
            self._llm: Any = engine(**_engine_args(spec))
        except (*self._refusals, TypeError, RuntimeError, NotImplementedError) as error:
            text = " ".join(str(error).split())
            raise ConfigError(
                f"generation.backend=vllm cannot start: {text[:300]}; see generation.vllm.args"
            ) from error
        # It tells at each update that rotary buffers and a tied output layer were not among the weights.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
        self._counted = self._counters()

    def answer(self, request: Request) -> Iterator[Completions]:
        if self._lacks_weights is not None:
            raise GenerationError(self._lacks_weights)
        self._wake(*_ALL)
        engine = self._llm.llm_engine
        places: dict[str, int] = {}
        finished: list[Any] = []
        sent = time.monotonic()
        try:
            self._ask(request, places)
            while engine.has_unfinished_requests():
                finished += [result for result in engine.step() if result.finished]
                self._look()
                if finished and time.monotonic() - sent > _PART_S:
                    yield self._completions(finished, places, request.params)
                    finished, sent = [], time.monotonic()
        finally:
            if unfinished := list(places):
                engine.abort_request(unfinished)
        if finished:
            yield self._completions(finished, places, request.params)

    def _ask(self, request: Request, places: dict[str, int]) -> None:
        """Give the engine all prompts; `places` gets the place of each by the name of its request.

        Raises:
            ConfigError: vLLM takes no such prompt or params, or would cut the answer before its limit.
        """
        engine, params = self._llm.llm_engine, request.params
        longest = engine.model_config.max_model_len
        self._keeps_cache = params.cache_version is not None
        # An engine that has been started again has nothing of before.
        salt = self._salts.get(params.cache_version, str(self._updates))
        for place, prompt in zip(request.places, request.prompts):
            limit = params.limit(len(prompt))
            if len(prompt) + limit > longest:
                raise ConfigError(
                    f"prompt {place} has {len(prompt)} tokens; with {limit} new ones that is more than vLLM's "
                    f"max_model_len={longest}; raise it (generation.vllm.args), or lower generation.max_new_tokens or "
                    "policy.max_total_sequence_length"
                )
            self._requests += 1
            places[str(self._requests)] = place
            asked = {"type": "token", "prompt_token_ids": list(prompt), "cache_salt": salt}
            seed = derive_seed(request.seed, "row", place) % 2**63
            try:
                sampling = self._sampling(params, limit, seed)
                engine.add_request(str(self._requests), asked, sampling)
            except self._refusals as error:
                text = " ".join(str(error).split())
                raise ConfigError(f"prompt {place}: vLLM refuses it: {text[:300]}") from error

    def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        with self._replacing(version):
            self._llm.collective_rpc(_load, args=(named_tensors, self._spec.tied))

    def receive_weights(self, route: WeightRoute, rank: int, version: int) -> list[list[float]]:
        with self._replacing(version):
            try:
                found: list[list[float]] = self._llm.collective_rpc(
                    _receive_weights, args=(route, rank, self._spec.tied)
                )
            except (RuntimeError, TimeoutError) as error:  # of a rank in another process
                raise GenerationError(
                    f"vLLM could not load weights: {' '.join(str(error).split())[:500]}"
                ) from error
        return found

    @contextmanager
    def _replacing(self, version: int) -> Iterator[None]:
        """Return a context in which all weights are replaced; if it breaks off, nothing is answered."""
        self._wake("weights")
        self._lacks_weights = _BROKEN
        yield
        if not self._keeps_cache and self._llm.reset_prefix_cache() is False:
            raise GenerationError(
                "vLLM keeps its prefix cache, whose keys and values are of the old weights; are there requests of "
                "others in the engine?"
            )
        self._updates += 1
        self._salts[version] = str(self._updates)
        self._lacks_weights = None

    def release(self, *, weights_follow: bool = False) -> None:
        """Give memory back until the next call, with `generation.vllm.sleep_level`; else do nothing.

        At level 2, if new weights follow, those that the engine has are discarded. On a CPU vLLM frees nothing.
        """
        level = self._spec.cfg.vllm.sleep_level
        if level and self._asleep != _ALL:
            self._wake("kv_cache")  # an update woke the weights alone
            if discards := weights_follow and level == 2:
                self._lacks_weights = _DISCARDED
            self._llm.sleep(level=2 if discards else 1)
            self._asleep = set(_ALL)

    def take_metrics(self) -> dict[str, float]:
        counted = self._counters()
        metrics = {name: value - self._counted[name] for name, value in counted.items()} | self._peaks
        self._counted, self._peaks = counted, {}
        return metrics

    def shutdown(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _wake(self, *tags: str) -> None:
        if asleep := self._asleep & set(tags):
            self._llm.wake_up(tags=sorted(asleep))
            self._asleep -= asleep

    def _completions(
        self, results: Sequence[Any], places: dict[str, int], params: SamplingParams
    ) -> Completions:
        outputs = [result.outputs[0] for result in results]
        routes = None
        if self._spec.record_routes and params.record_routes:
            # A request that was preempted has none.
            routes = [
                None
                if output.routed_experts is None
                else [getattr(result, "prompt_routed_experts", None), output.routed_experts]
                for result, output in zip(results, outputs)
            ]
        return Completions.of(
            [places.pop(result.request_id) for result in results],
            [list(output.token_ids) for output in outputs],
            [_sampled(output.logprobs, output.token_ids) for output in outputs],
            [output.finish_reason != "stop" for output in outputs],
            routes=routes,
            cached_tokens=sum(result.num_cached_tokens or 0 for result in results),
        )

    def _sampling(self, params: SamplingParams, limit: int, seed: int) -> Any:
        filters = {} if params.greedy else {"top_p": params.top_p, "top_k": params.top_k or 0, "seed": seed}
        temperature = 0.0 if params.greedy else params.temperature
        made = self._vllm.SamplingParams(
            temperature=temperature,
            max_tokens=limit,
            logprobs=0,
            flat_logprobs=True,
            ignore_eos=True,  # the ids below have it
            stop_token_ids=list(params.stop_token_ids),
            stop=list(params.stop_strings) or None,
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            detokenize=bool(params.stop_strings),
            output_kind=self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
            **filters,
        )
        if made.temperature != temperature:
            raise ValueError(
                f"at generation.temperature={temperature} it would draw as at {made.temperature}, and the trainer "
                "score otherwise; set that, or generation.backend=hf"
            )
        return made

    def _look(self) -> None:
        """Note how full the engine is, a few times a second."""
        if time.monotonic() - self._seen_s < _GAUGE_PERIOD_S:
            return
        for metric in self._llm.get_metrics():
            if (name := _GAUGES.get(metric.name)) is not None:
                self._peaks[name] = max(self._peaks.get(name, 0.0), float(metric.value))
        self._seen_s = time.monotonic()

    def _counters(self) -> dict[str, float]:
        found = dict.fromkeys(_COUNTERS.values(), 0.0)
        for metric in self._llm.get_metrics():
            if (name := _COUNTERS.get(metric.name)) is not None:
                found[name] += float(metric.value)
        return found


def _receive_weights(
    worker: Any, route: WeightRoute, first: int, tied: Mapping[str, list[str]]
) -> list[float]:
    """Load what comes into one of vLLM's workers, in whatever process that is; return the seconds of each bucket."""
    # The worker keeps its place in the group for the next update.
    group: WeightGroup = worker.__dict__.setdefault("headrace_weights", WeightGroup())
    with group.receiving(route, first + worker.rank) as weights:
        _load(worker, weights, tied)
    return group.seconds


def _load(worker: Any, named_tensors: NamedTensors, tied: Mapping[str, list[str]]) -> None:
    """Load all weights into one of vLLM's workers."""
    with ExitStack() as undo:
        undo.callback(_end_load, worker)
        worker.reload_weights(weights_iterator=_under_all_names(named_tensors, tied))
        undo.pop_all()


def _end_load(worker: Any) -> None:
    """End a load that broke off: a layer that got a part of its weights takes the next load for the rest of them."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload  # noqa: PLC0415  (vLLM is loaded)

    finalize_layerwise_reload(worker.get_model(), worker.model_config)


def _under_all_names(
    named_tensors: NamedTensors, tied: Mapping[str, list[str]]
) -> Iterator[tuple[str, torch.Tensor]]:
    # On a CPU a tied output layer has a packed copy, which stays old unless its own name comes too.
    sent: set[str] = set()
    for name, tensor in named_tensors:
        for alias in tied.get(name, (name,)):
            if alias not in sent:
                sent.add(alias)
                yield alias, tensor


def _engine_args(spec: EngineSpec) -> dict[str, Any]:
    cfg = spec.cfg
    own = {
        "model": str(spec.folder),
        "runner": "generate",
        "dtype": cfg.precision,
        "load_format": "dummy",
        "logprobs_mode": "processed_logprobs",
        "enable_sleep_mode": cfg.vllm.sleep_level > 0 and spec.device == "cuda",
        **({"enable_return_routed_experts": True} if spec.record_routes else {}),
        **({"tensor_parallel_size": spec.ranks} if spec.ranks > 1 else {}),
    }
    assert own.keys() <= OWN_ARGS.keys()
    if spec.unknown_ids:
        # A list of allowed ids with each request takes milliseconds of each: a vocabulary is long.
        own["logits_processors"] = [*cfg.vllm.args.get("logits_processors", ()), _without(spec.unknown_ids)]
    return {
        "gpu_memory_utilization": 0.4,
        # Ranks are processes of this host, also where the engine is a Ray actor.
        **({"distributed_executor_backend": "mp"} if spec.ranks > 1 else {}),
        "max_num_seqs": cfg.batch_size,
        "async_scheduling": True,
        "disable_log_stats": False,
        **cfg.vllm.args,
        **own,
    }


def _without(ids: list[int]) -> type:
    """Return what takes ids out of the distribution of all requests at once."""
    from vllm.v1.sample.logits_processor import LogitsProcessor  # noqa: PLC0415  (vLLM is loaded by now)

    class Without(LogitsProcessor):  # type: ignore[misc]
        """Without them."""

        def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
            self._ids = torch.tensor(ids, device=device)

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: Any) -> None:
            """All requests are alike."""

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            return logits.index_fill_(-1, self._ids, -torch.inf)

    return Without


def import_vllm() -> Any:
    """Return the module.

    Raises:
        ConfigError: it is not installed.
    """
    # One process: the weights' tensors, and a dead engine's error, come to us as they are.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    return load_optional(
        "vllm",
        "generation.backend=vllm: {error}; pip install 'headrace[vllm]', name an interpreter that has it "
        "(generation.python), or set generation.backend=hf",
    )


def _sampled(logprobs: Any, token_ids: Sequence[int]) -> list[float]:
    """Return the sampled tokens' logprobs of a completion, of vLLM's flat form or of one dict per token."""
    if hasattr(logprobs, "start_indices"):
        values, starts = logprobs.logprobs, logprobs.start_indices
        return [values[start] for start in starts]
    return [entry[token].logprob for entry, token in zip(logprobs, token_ids)]

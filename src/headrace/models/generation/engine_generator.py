"""Generators over engines, which run in this process or in processes of their own."""

import gc
import logging
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from headrace.config import GenerationConfig
from headrace.errors import ConfigError, GenerationError
from headrace.models.generation.engine import Engine, EngineSpec, RayRoom, Request
from headrace.models.generation.engine_pool import EnginePool
from headrace.models.generation.engine_routes import read_vllm
from headrace.models.generation.interfaces import GenerationOutput, SamplingParams, check_request
from headrace.models.generation.served_model import refuse_own_args, write_description
from headrace.models.generation.stopping import build_stop_rule
from headrace.models.generation.vllm import OWN_ARGS, VLLMEngine, import_vllm
from headrace.models.generation.weight_buckets import sent_dtype
from headrace.models.generation.weight_group import WeightRoute
from headrace.models.generation.weights import (
    NamedTensors,
    WeightStream,
    checked_weights,
    checkpoint_names,
    tied_names,
    whole_weights,
)
from headrace.models.router_replay import install
from headrace.models.tokenizers import unknown_ids, vocabulary_of

_log = logging.getLogger(__name__)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")


class EngineGenerator:
    """A Generator over engines that serve transformers' models, each in a process of its own.

    It takes config, names and first weights from `model`, which is empty (on the meta device) afterwards.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        cfg: GenerationConfig,
        *,
        record_routes: bool = False,
        room: RayRoom | None = None,
    ) -> None:
        """Start the engines, as Ray actors where they have a `room`: seconds on a CPU, a minute for vLLM on a GPU.

        Raises:
            ConfigError: an engine cannot be started with this model and config.
            ReplayError: `record_routes`, and the model has no routers, or some that cannot be recorded.
        """
        self._cfg, self._model, self._tokenizer = cfg, model, tokenizer
        self._device = room.device if room else model.device.type
        self._check(model)
        self._routers = install(model) if record_routes else None
        self.route_shape = self._routers.shape if self._routers else None
        self.weight_version = 0
        self._update_metrics: dict[str, float] = {}
        self._room = room
        # Engines that are started again read it too.
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-engine-")
        missing = unknown_ids(tokenizer, vocabulary_of(model))
        write_description(model, tokenizer, Path(self._folder.name))
        spec = EngineSpec(
            Path(self._folder.name),
            cfg,
            [] if missing is None else missing.tolist(),
            record_routes,
            self._device,
            {n: value for n in _IMPLEMENTATIONS if (value := getattr(model.config, f"_{n}", None))},
            {name: names for names in tied_names(model.state_dict(keep_vars=True)) for name in names},
        )
        first = {name: tensor.to("cpu") for name, tensor in model.state_dict().items()}
        model.to("meta")
        model.tie_weights()  # that move gives each name a parameter of its own
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self._engine: Engine | None = self._start(spec)
        self.update_weights(first.items(), 0)

    @property
    def pids(self) -> list[int]:
        """The processes of the engines that answer; none of an engine in place."""
        return self._engine.pids if isinstance(self._engine, EnginePool) else []

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, seed: int
    ) -> GenerationOutput:
        """Complete every prompt (token ids, at least one each), in order.

        Metrics: `generated_tokens`, `generate_s`, `tokens_per_s`, `truncated_fraction`, `cached_prompt_fraction`, those
        of the engine, and those of the last update of the weights.

        Raises:
            ConfigError: a prompt without room for a completion, or params that cannot be used.
            GenerationError: fewer results than prompts, missing routes, no engine left, or a call after `shutdown`.
        """
        start = time.perf_counter()
        engine = self._open()
        check_request(self._model, prompts, params)
        stop_ids = tuple(build_stop_rule(self._model, self._tokenizer, params).token_ids.tolist())
        asked = replace(params, stop_token_ids=stop_ids)
        request = Request([list(prompt) for prompt in prompts], range(len(prompts)), asked, seed)
        output = GenerationOutput([[]] * len(prompts), [[]] * len(prompts), [True] * len(prompts))
        output.stop_token_ids = stop_ids
        routes: dict[int, Any] = {}
        cached = self._fill(output, routes, engine, request)
        if self._routers is not None and params.record_routes:
            if lacking := [place for place in request.places if routes[place] is None]:
                cached += self._fill(output, routes, engine, request.subset(lacking))
            output.routes = [
                self._read_routes(f"prompt {row}", prompt, output.token_ids[row], routes[row])
                for row, prompt in enumerate(prompts)
            ]
        output.metrics = {
            **output.rates(time.perf_counter() - start),
            "cached_prompt_fraction": cached / max(sum(map(len, prompts)), 1),
            **engine.take_metrics(),
            **self._update_metrics,
        }
        return output

    def update_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Load new weights, by Hugging Face parameter name, and set `weight_version`.

        Raises:
            GenerationError: unknown, missing or repeated names, or wrong shapes; nothing has changed then.
        """
        started = time.perf_counter()
        engine = self._open()
        routed = isinstance(named_tensors, WeightStream) and named_tensors.is_routed
        with ExitStack() as undo:
            if routed and isinstance(engine, EnginePool):
                undo.callback(engine.refuse_route, "the weights do not fit the engines' model")
            checked = checked_weights(self._model, self._named(named_tensors))
            undo.pop_all()
        # By a route, the sender has named them already.
        named = checked if routed else self._as_engine_names(checked)
        found = engine.update_weights(named, version) or {}
        self.weight_version = version
        self._update_metrics = {"weights_seconds": time.perf_counter() - started, **found}

    def weight_route(self) -> WeightRoute | None:
        """Return how another process sends the next weights straight to the engines; None: it cannot.

        `update_weights` then gets a routed `WeightStream`.
        """
        engine = self._open()
        return engine.weight_route() if isinstance(engine, EnginePool) else None

    def release(self, *, weights_follow: bool = False) -> None:
        """Give memory back until the next call, as far as the engine does.

        With `weights_follow` that call has to be an update: an engine may have discarded the weights, and then refuses
        to generate.
        """
        if self._engine is not None:
            self._engine.release(weights_follow=weights_follow)

    def shutdown(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()
        self._engine = None
        self._folder.cleanup()

    def _fill(
        self, output: GenerationOutput, routes: dict[int, Any], engine: Engine, request: Request
    ) -> int:
        """Put each completion in its prompt's place; return how many tokens of prompts were cached."""
        missing, cached = set(request.places), 0
        for part in engine.answer(request):
            cached += part.cached_tokens
            for place, token_ids, logprobs, truncated, routed in part.rows():
                output.token_ids[place], output.logprobs[place] = token_ids, logprobs
                output.truncated[place], routes[place] = truncated, routed
            missing -= set(part.places)
        if missing:
            raise GenerationError(
                f"the engine returned nothing for {len(missing)} of {len(request.places)} prompts"
            )
        return cached

    def _open(self) -> Engine:
        if self._engine is None:
            raise GenerationError("the generator was called after shutdown; build a new one")
        return self._engine

    # What engines differ in.

    def _check(self, model: Any) -> None:
        """Refuse what the engine cannot do with the model."""

    def _start(self, spec: EngineSpec) -> Engine:
        dtype = getattr(torch, spec.cfg.precision)
        weights = self._model.state_dict().values()
        return EnginePool(spec, [t.numel() * sent_dtype(t, dtype).itemsize for t in weights], room=self._room)

    def _named(self, named_tensors: NamedTensors) -> NamedTensors:
        """Refuse weights of a kind that the engine does not take."""
        return named_tensors

    def _as_engine_names(self, named_tensors: NamedTensors) -> NamedTensors:
        return named_tensors

    def _read_routes(self, name: str, prompt: Sequence[int], new: Sequence[int], routes: Any) -> torch.Tensor:
        if routes is None:
            raise GenerationError(f"{name}: the engine returned no routes, asked twice")
        found: torch.Tensor = routes
        return found


class VLLMGenerator(EngineGenerator):
    """A Generator over vLLM: one engine in this process, or several in processes of their own."""

    def _check(self, model: Any) -> None:
        refuse_own_args("generation.vllm.args", self._cfg.vllm.args, OWN_ARGS)
        if self._cfg.placement == "in_place":
            import_vllm()
        if self._device == "cpu" and self._cfg.vllm.sleep_level:
            _log.warning("generation.vllm.sleep_level=%s frees nothing on a CPU", self._cfg.vllm.sleep_level)
        text_config = model.config.get_text_config()
        if self._device == "cpu" and any(getattr(text_config, name, None) for name in _EXPERTS):
            raise ConfigError(
                "generation.backend=vllm: on a CPU, vLLM goes on with the experts of before an update; set "
                "generation.backend=hf, or use a GPU"
            )

    def _start(self, spec: EngineSpec) -> Engine:
        return VLLMEngine(spec) if spec.cfg.placement == "in_place" else super()._start(spec)

    def _named(self, named_tensors: NamedTensors) -> NamedTensors:
        return whole_weights(
            named_tensors, "generation.backend=vllm", "set generation.backend=hf, or remove policy.lora"
        )

    def _as_engine_names(self, named_tensors: NamedTensors) -> NamedTensors:
        return checkpoint_names(self._model, named_tensors)

    def _read_routes(self, name: str, prompt: Sequence[int], new: Sequence[int], routes: Any) -> torch.Tensor:
        assert self._routers is not None
        of_prompt, of_answer = routes or (None, None)
        return read_vllm(
            of_prompt,
            of_answer,
            model=self._routers,
            prompt_tokens=len(prompt),
            new_tokens=len(new),
            name=name,
        )

"""Completions from an SGLang server, which headrace reaches by its documented HTTP endpoints (`sglang_server.py`).

Token ids go in and come out. Logprobs are those of the distribution that was sampled. Weights get there as files, or as
tensors of a GPU that both processes see; every update empties the prefix cache.

Source: SGLang's documentation of `/generate`, of weight updates and of memory release (docs/engines.md).
"""

import base64
import io
import logging
import pickle
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch

from headrace.config import GenerationConfig
from headrace.errors import ConfigError, GenerationError
from headrace.models.generation.engine_routes import read_sglang
from headrace.models.generation.interfaces import GenerationOutput, SamplingParams, check_request
from headrace.models.generation.served_model import refuse_own_args, write_description
from headrace.models.generation.sglang_server import SGLangServer
from headrace.models.generation.stopping import build_stop_rule
from headrace.models.generation.weights import (
    cast_parameters,
    checked_weights,
    checkpoint_names,
    copy_weights,
    whole_weights,
)
from headrace.models.router_replay import install
from headrace.models.saving import Saving
from headrace.models.tokenizers import unknown_ids, vocabulary_of
from headrace.utils.seeding import derive_seed

logger = logging.getLogger(__name__)

_OWN_ARGS = {
    "model_path": "policy.model",
    "tokenizer_path": "policy.tokenizer",
    "skip_tokenizer_init": "nothing: stop strings need the tokenizer",
    "dtype": "generation.precision",
    "load_format": "nothing: weights come from the trainer",
    "host": "generation.sglang.url",
    "port": "generation.sglang.url",
    "enable_return_routed_experts": "policy.router_replay.enabled",
    "enable_memory_saver": "generation.sglang.sleep",
    "enable_weights_cpu_backup": "generation.sglang.sleep",
}
"""Server arguments that headrace sets, and the recipe's key that decides each."""
_TAGS = {"none": [], "kv_cache": ["kv_cache"], "all": ["kv_cache", "weights"]}
_BUCKET_BYTES = 1 << 29
_LARGEST_SEED = 2**31


class SGLangGenerator:
    """A Generator over a server, which has weights of its own.

    With weights by way of files, `model` stays on the host, where updates are checked and an adapter is added; else it
    is empty (on the meta device) afterwards.
    """

    def __init__(
        self, model: Any, tokenizer: Any, cfg: GenerationConfig, *, record_routes: bool = False
    ) -> None:
        """Start the server or connect to it, and give it the model's weights.

        Raises:
            ConfigError: no server there, or it cannot start; filters that SGLang applies otherwise than the trainer.
            ReplayError: `record_routes`, and the model has no routers, or some that cannot be recorded.
        """
        refuse_own_args("generation.sglang.args", cfg.sglang.args, _OWN_ARGS)
        _check_filters(cfg.top_k, cfg.top_p)
        self._routers = install(model) if record_routes else None
        self.route_shape = self._routers.shape if self._routers else None
        self._tokenizer, self._cfg = tokenizer, cfg
        self._asleep: set[str] = set()
        self._below_adapter: dict[str, torch.Tensor] = {}
        self.weight_version = 0
        if unknown_ids(tokenizer, vocabulary_of(model)) is not None:
            logger.warning(
                "the model has scores for ids without a token; SGLang may sample them, and the trainer leaves them out"
            )
        self._server: SGLangServer | None = SGLangServer(cfg.sglang)
        self._undo = ExitStack()
        self._folder = Path(self._undo.enter_context(tempfile.TemporaryDirectory(prefix="headrace-sglang-")))
        self._undo.callback(self._server.close)
        with ExitStack() as on_error:
            on_error.callback(self.shutdown)
            self._connect(model, record_routes)
            first = dict(model.state_dict())
            by_tensor = cfg.sglang.weights == "tensor"
            self._model = model.to("meta" if by_tensor else "cpu")
            if not by_tensor:
                cast_parameters(self._model, getattr(torch, cfg.precision))
            self.update_weights(first.items(), 0)
            on_error.pop_all()

    def _connect(self, model: Any, routes: bool) -> None:
        cfg, server = self._cfg, self._open()
        if cfg.sglang.url is not None:
            server.attach(cfg.sglang.url)
            return
        write_description(model, self._tokenizer, self._folder)
        arguments: dict[str, Any] = {
            "model_path": str(self._folder),
            "dtype": cfg.precision,
            "load_format": "dummy",
            "enable_return_routed_experts": routes,
            "enable_memory_saver": cfg.sglang.sleep != "none",
            "enable_weights_cpu_backup": cfg.sglang.sleep == "all",
        }
        server.start(arguments, self._folder)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, seed: int
    ) -> GenerationOutput:
        """Complete every prompt (token ids, at least one each), in order.

        Metrics: `generated_tokens`, `generate_s`, `tokens_per_s`, `truncated_fraction`, `cached_prompt_fraction`,
        `preemptions`.

        Raises:
            ConfigError: a prompt without room for a completion, or params that cannot be used.
            GenerationError: no answer, fewer results than prompts, results that lack a field or are of other weights,
                or a call after `shutdown`.
        """
        started = time.perf_counter()
        server = self._open()
        check_request(self._model, prompts, params)
        filtered = not params.greedy and (params.top_k is not None or params.top_p != 1)
        if filtered:
            _check_filters(params.top_k, params.top_p)
        self._wake("weights", "kv_cache")
        stop_ids = build_stop_rule(self._model, self._tokenizer, params).token_ids.tolist()
        routes = self._routers is not None and params.record_routes
        body = {
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": [
                _sampling(params, params.limit(len(prompt)), stop_ids, derive_seed(seed, "row", row))
                for row, prompt in enumerate(prompts)
            ],
            "return_logprob": True,
            **({"return_sampling_mask": True} if filtered else {}),
            **({"return_routed_experts": True} if routes else {}),
        }
        results = server.post("/generate", body) if prompts else []
        if not isinstance(results, list) or len(results) != len(prompts):
            got = f"{len(results)} results" if isinstance(results, list) else type(results).__name__
            raise GenerationError(f"SGLang returned {got} for {len(prompts)} prompts")
        answers = [_Answer(f"prompt {row}", result) for row, result in enumerate(results)]
        output = self._output(prompts, answers, filtered=filtered, routes=routes)
        output.stop_token_ids = tuple(stop_ids)
        cached = sum(answer.count("cached_tokens") for answer in answers)
        # The later name, and the earlier one.
        lost = sum(answer.count("num_retractions", "total_retractions") for answer in answers)
        output.metrics = {
            **output.rates(time.perf_counter() - started),
            "cached_prompt_fraction": cached / max(sum(map(len, prompts)), 1),
            "preemptions": float(lost),
        }
        return output

    def _output(
        self, prompts: Sequence[Sequence[int]], answers: Sequence["_Answer"], *, filtered: bool, routes: bool
    ) -> GenerationOutput:
        output = GenerationOutput([], [], [], routes=[] if routes else None)
        for prompt, answer in zip(prompts, answers):
            answer.check(len(prompt), self.weight_version)
            tokens = answer.tokens()
            output.token_ids.append(tokens)
            output.logprobs.append(answer.sampling_logprobs(len(tokens)) if filtered else answer.logprobs())
            output.truncated.append(answer.truncated)
            if output.routes is not None and self._routers is not None:
                rows = read_sglang(
                    answer.meta,
                    model=self._routers,
                    prompt_tokens=len(prompt),
                    new_tokens=len(tokens),
                    name=answer.name,
                )
                output.routes.append(rows)
        return output

    def update_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Load new weights, by Hugging Face parameter name, empty the prefix cache, and set `weight_version`.

        Raises:
            GenerationError: the server refuses them, or cannot empty its cache.
        """
        server = self._open()
        self._wake("weights")
        label = {"weight_version": str(version)}
        if self._cfg.sglang.weights == "tensor":
            self._send_tensors(server, named_tensors, label)
        else:
            copy_weights(self._model, checked_weights(self._model, named_tensors, self._below_adapter))
            with tempfile.TemporaryDirectory(
                prefix="headrace-weights-", dir=self._cfg.sglang.weights_dir
            ) as name:
                with Saving(Path(name)):
                    self._model.save_pretrained(name)
                    self._tokenizer.save_pretrained(name)
                answer = server.post("/update_weights_from_disk", {"model_path": name, **label})
            _check_update(answer, version)
        server.tell("/flush_cache")
        self.weight_version = version

    def release(self) -> None:
        """Have the server give memory back until the next call, as `generation.sglang.sleep` says."""
        tags = _TAGS[self._cfg.sglang.sleep]
        if tags and not self._asleep and self._server is not None:
            self._server.tell("/release_memory_occupation", {"tags": tags})
            self._asleep = set(tags)

    def shutdown(self) -> None:
        """End the server, if headrace has started it; may be called twice."""
        self._server = None
        self._undo.close()

    def _open(self) -> SGLangServer:
        if self._server is None:
            raise GenerationError("the generator was called after shutdown; build a new one")
        return self._server

    def _wake(self, *tags: str) -> None:
        if asleep := self._asleep & set(tags):
            self._open().tell("/resume_memory_occupation", {"tags": sorted(asleep)})
            self._asleep -= asleep

    def _send_tensors(
        self, server: SGLangServer, named_tensors: Iterable[tuple[str, torch.Tensor]], label: dict[str, str]
    ) -> None:
        # One payload for each tensor-parallel worker, which takes its part of the whole tensors.
        workers = int(server.get("/get_server_info").get("tp_size") or 1)
        stream = whole_weights(
            named_tensors, "generation.sglang.weights=tensor", "set generation.sglang.weights=disk"
        )
        for bucket in _buckets(checkpoint_names(self._model, checked_weights(self._model, stream))):
            payload = {"serialized_named_tensors": [_serialized(bucket)] * workers, "flush_cache": False}
            answer = server.post("/update_weights_from_tensor", {**payload, **label})
            _check_update(answer, int(label["weight_version"]))


class _Answer:
    """One result of /generate; its methods raise GenerationError with the prompt's name."""

    def __init__(self, name: str, result: Any) -> None:
        self.name = name
        self.meta: Mapping[str, Any] = result.get("meta_info") or {} if isinstance(result, dict) else {}

    def field(self, key: str, remedy: str = "look at the server's version (docs/engines.md)") -> Any:
        if self.meta.get(key) is None:
            found = ", ".join(sorted(self.meta)) or "none"
            raise GenerationError(
                f"{self.name}: SGLang's answer has no meta_info.{key} (there are: {found}); {remedy}"
            )
        return self.meta[key]

    def count(self, *keys: str) -> int:
        """Return a number that not every server gives; 0 without it."""
        return next((int(self.meta[key]) for key in keys if self.meta.get(key)), 0)

    @property
    def truncated(self) -> bool:
        return bool(self.field("finish_reason").get("type") != "stop")

    def check(self, prompt_tokens: int, version: int) -> None:
        """Refuse an answer that was cut off, to another prompt, or of other weights."""
        reason = self.field("finish_reason")
        if not isinstance(reason, dict) or reason.get("type") not in ("stop", "length"):
            said = reason.get("message") if isinstance(reason, dict) else reason
            raise GenerationError(
                f"{self.name}: SGLang gave the request up: {said}; look at the server's log"
            )
        if (got := self.field("prompt_tokens")) != prompt_tokens:
            raise GenerationError(
                f"{self.name}: SGLang read {got} prompt tokens; expected the {prompt_tokens} that were sent: it must "
                "neither add nor cut any (--context-length, --allow-auto-truncate)"
            )
        if (label := self.meta.get("weight_version", str(version))) != str(version):
            raise GenerationError(
                f"{self.name}: SGLang answers with weights of version '{label}'; expected '{version}': the server was "
                "restarted, or another run updates it too"
            )

    def tokens(self) -> list[int]:
        return [int(entry[1]) for entry in self._pairs()]

    def logprobs(self) -> list[float]:
        return [float(entry[0]) for entry in self._pairs()]

    def sampling_logprobs(self, tokens: int) -> list[float]:
        """Return the logprobs after top-p or top-k, where `output_token_logprobs` has those of all tokens."""
        values = self.field(
            "output_token_sampling_logprobs",
            "a server that knows return_sampling_mask is needed, or generation.top_k=null and generation.top_p=1",
        )
        if len(values) != tokens or any(value is None for value in values):
            raise GenerationError(
                f"{self.name}: SGLang returned {len(values)} output_token_sampling_logprobs for {tokens} tokens; raise "
                "--sampling-mask-max-tokens, or set generation.top_k=null and generation.top_p=1"
            )
        return [float(value) for value in values]

    def _pairs(self) -> list[Any]:
        pairs = self.field("output_token_logprobs")
        count = self.meta.get("completion_tokens", len(pairs))
        if len(pairs) != count or not pairs or any(len(entry) < 2 or entry[0] is None for entry in pairs):
            raise GenerationError(
                f"{self.name}: SGLang returned {len(pairs)} output_token_logprobs for {count} new tokens; expected one "
                "(logprob, token id) for each, and at least one"
            )
        return list(pairs)


def _check_filters(top_k: int | None, top_p: float) -> None:
    if top_k is not None and top_p != 1:
        raise ConfigError(
            f"generation.top_k={top_k} with generation.top_p={top_p}: SGLang takes top-p of all tokens, and the "
            "trainer of the top k; set one of both, or another generation.backend"
        )


def _sampling(params: SamplingParams, limit: int, stop_ids: list[int], seed: int) -> dict[str, Any]:
    """Return a request's sampling parameters, all of them, since a server has defaults of the model's own."""
    return {
        "max_new_tokens": limit,
        "temperature": 0.0 if params.greedy else params.temperature,
        "top_p": 1.0 if params.greedy else params.top_p,
        "top_k": -1 if params.greedy or params.top_k is None else params.top_k,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop": list(params.stop_strings) or None,
        "stop_token_ids": stop_ids,
        "ignore_eos": False,  # true would turn the stop ids off as well
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "sampling_seed": seed % _LARGEST_SEED,
    }


def _check_update(answer: Any, version: int) -> None:
    if not isinstance(answer, dict) or answer.get("success") is not True:
        said = answer.get("message") if isinstance(answer, dict) else answer
        raise GenerationError(
            f"SGLang refused the weights of version {version}: {' '.join(str(said).split())[:300]}; "
            "generation.sglang.weights says how they get there, and a folder has to be one that the server sees too "
            "(generation.sglang.weights_dir)"
        )


def _buckets(pairs: Iterable[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in pairs:
        bucket.append((name, tensor.detach()))
        size += tensor.nbytes
        if size >= _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def _serialized(bucket: list[tuple[str, torch.Tensor]]) -> str:
    """Return tensors as SGLang reads them: pickled, those of a GPU as handles of its memory, others by value."""
    if all(tensor.is_cuda for _, tensor in bucket):
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(bucket)
        content = buffer.getvalue()
    else:
        content = pickle.dumps([(name, tensor.cpu().clone()) for name, tensor in bucket])
    return base64.b64encode(content).decode()

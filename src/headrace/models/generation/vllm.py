"""Completions from vLLM in this process: continuous batching, a prefix cache, CUDA graphs.

Token ids go in and come out. Logprobs are those of the distribution that was sampled, so the trainer scores under the
same temperature, top-p and top-k. Weights come by Hugging Face name from the trainer's tensors, without a file. Every
update empties the prefix cache, whose keys and values are those of the old weights.

Source: vLLM, docs/training/rlhf.md, docs/features/sleep_mode.md, docs/training/routed_experts_replay.md.
"""

import copy
import gc
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion

from headrace.config import GenerationConfig
from headrace.errors import ConfigError, GenerationError
from headrace.models.generation.engine_routes import read_vllm
from headrace.models.generation.hf import check_request
from headrace.models.generation.interfaces import GenerationOutput, SamplingParams
from headrace.models.generation.stopping import build_stop_rule
from headrace.models.router_replay import RouterReplay, install
from headrace.models.tokenizers import unknown_ids, vocabulary_of
from headrace.utils.seeding import derive_seed

_OWN_ARGS = {
    "model": "policy.model",
    "tokenizer": "policy.tokenizer",
    "dtype": "generation.precision",
    "load_format": "nothing: weights come from the trainer",
    "logprobs_mode": "nothing: the trainer scores what was sampled",
    "enable_return_routed_experts": "policy.router_replay.enabled",
    "enable_sleep_mode": "generation.vllm.sleep_level",
    "tensor_parallel_size": "nothing: the engine shares this process's one device",
}
"""Engine arguments that headrace sets, and the recipe's key that decides each."""
_PREEMPTIONS = "vllm:num_preemptions"
_LAYER = re.compile(r".*\.layers\.\d+\.")


class VLLMGenerator:
    """A Generator over an engine in this process, which has weights of its own on the policy's device.

    It takes config, names and first weights from `model`, which is empty (on the meta device) afterwards.
    """

    def __init__(
        self, model: Any, tokenizer: Any, cfg: GenerationConfig, *, record_routes: bool = False
    ) -> None:
        """Start the engine: seconds on a CPU, a minute with CUDA graphs.

        Raises:
            ConfigError: vLLM is not installed or cannot run the model, or an argument that headrace sets.
            ReplayError: `record_routes`, and the model has no routers, or some that cannot be recorded.
        """
        if taken := sorted(_OWN_ARGS.keys() & cfg.vllm.args.keys()):
            raise ConfigError(
                f"generation.vllm.args.{taken[0]}={cfg.vllm.args[taken[0]]}: headrace sets it; what decides it is "
                f"{_OWN_ARGS[taken[0]]}"
            )
        self._vllm = _import_vllm()
        if _is_moe(model) and model.device.type == "cpu":
            raise ConfigError(
                "generation.backend=vllm: on a CPU, vLLM goes on with the experts of before an update; set "
                "generation.backend=hf, or use a GPU"
            )
        self._routers = install(model) if record_routes else None
        self.route_shape = self._routers.shape if self._routers else None
        self._model, self._tokenizer, self._cfg = model, tokenizer, cfg
        self._known_ids = _known_ids(tokenizer, vocabulary_of(model))
        self._asleep: set[str] = set()
        self.weight_version = 0
        first = {name: tensor.to("cpu") for name, tensor in model.state_dict().items()}
        model.to("meta")
        _collect()
        with tempfile.TemporaryDirectory(prefix="headrace-vllm-") as folder:
            self._llm: Any = self._start(Path(folder), routes=record_routes)
        self.update_weights(first.items(), 0)

    def _start(self, folder: Path, *, routes: bool) -> Any:
        cfg = self._cfg
        config = copy.deepcopy(self._model.config)
        config.architectures = [type(self._model).__name__]
        config.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)
        args: dict[str, Any] = {
            "gpu_memory_utilization": 0.4,
            "max_num_seqs": cfg.batch_size,
            "async_scheduling": True,
            "disable_log_stats": False,
            **cfg.vllm.args,
            "model": str(folder),
            "dtype": cfg.precision,
            "load_format": "dummy",
            "runner": "generate",
            "logprobs_mode": "processed_logprobs",
            "enable_sleep_mode": bool(cfg.vllm.sleep_level),
        }
        if routes:
            args["enable_return_routed_experts"] = True
        try:
            return self._vllm.LLM(**args)
        except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
            text = " ".join(str(error).split())
            raise ConfigError(
                f"generation.backend=vllm cannot start: {text[:300]}; see generation.vllm.args"
            ) from error

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, seed: int
    ) -> GenerationOutput:
        """Complete every prompt (token ids, at least one each), in order.

        Metrics: `generated_tokens`, `generate_s`, `tokens_per_s`, `truncated_fraction`, `cached_prompt_fraction`,
        `preemptions`.

        Raises:
            ConfigError: a prompt without room for a completion, or params that cannot be used.
            GenerationError: fewer results than prompts, a request that failed, missing routes, or a call after
                `shutdown`.
        """
        start = time.perf_counter()
        self._check_open()
        check_request(self._model, prompts, params)
        self._wake("weights", "kv_cache")
        stop_ids = build_stop_rule(self._model, self._tokenizer, params).token_ids.tolist()
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        sampling = [
            self._sampling(params, params.limit(len(prompt)), stop_ids, derive_seed(seed, "row", row))
            for row, prompt in enumerate(prompts)
        ]
        counters = self._counters()
        results = self._llm.generate(requests, sampling, use_tqdm=False)
        if len(results) != len(prompts):
            raise GenerationError(f"vLLM returned {len(results)} results for {len(prompts)} prompts")
        completions = [result.outputs[0] for result in results]
        output = GenerationOutput(
            token_ids=[list(c.token_ids) for c in completions],
            logprobs=[_sampled(c.logprobs, c.token_ids) for c in completions],
            truncated=[c.finish_reason != "stop" for c in completions],
            stop_token_ids=tuple(stop_ids),
        )
        if self._routers is not None and params.record_routes:
            output.routes = [
                _routes(self._routers, f"prompt {row}", len(prompt), result)
                for row, (prompt, result) in enumerate(zip(prompts, results))
            ]
        output.metrics = self._metrics(output, results, time.perf_counter() - start, counters)
        return output

    def update_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Load new weights, by Hugging Face parameter name, empty the prefix cache, and set `weight_version`."""
        self._check_open()
        self._wake("weights")
        pairs = _checkpoint_names(self._model, named_tensors)
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": pairs})
        self._llm.reset_prefix_cache()
        self.weight_version = version

    def release(self) -> None:
        """Give memory back until the next call, with `generation.vllm.sleep_level`; else do nothing."""
        level = self._cfg.vllm.sleep_level
        if level and self._llm is not None and not self._asleep:
            self._llm.sleep(level=level)
            self._asleep = {"weights", "kv_cache"}

    def shutdown(self) -> None:
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        _collect()

    def _wake(self, *tags: str) -> None:
        if asleep := self._asleep & set(tags):
            self._llm.wake_up(tags=sorted(asleep))
            self._asleep -= asleep

    def _check_open(self) -> None:
        if self._llm is None:
            raise GenerationError("the generator was called after shutdown; build a new one")

    def _counters(self) -> dict[str, float]:
        return {m.name: m.value for m in self._llm.get_metrics() if hasattr(m, "value")}

    def _sampling(self, params: SamplingParams, limit: int, stop_ids: list[int], seed: int) -> Any:
        filters = (
            {} if params.greedy else {"top_p": params.top_p, "top_k": params.top_k or 0, "seed": seed % 2**63}
        )
        return self._vllm.SamplingParams(
            temperature=0.0 if params.greedy else params.temperature,
            max_tokens=limit,
            logprobs=0,
            flat_logprobs=True,
            ignore_eos=True,  # the ids below have it
            stop_token_ids=stop_ids,
            stop=list(params.stop_strings) or None,
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            detokenize=bool(params.stop_strings),
            allowed_token_ids=self._known_ids,
            **filters,
        )

    def _metrics(
        self, output: GenerationOutput, results: Sequence[Any], seconds: float, counters: Mapping[str, float]
    ) -> dict[str, float]:
        tokens = sum(map(len, output.token_ids))
        prompt_tokens = sum(len(result.prompt_token_ids) for result in results)
        cached = sum(result.num_cached_tokens or 0 for result in results)
        preempted = self._counters().get(_PREEMPTIONS, 0.0) - counters.get(_PREEMPTIONS, 0.0)
        return {
            "generated_tokens": float(tokens),
            "generate_s": seconds,
            "tokens_per_s": tokens / max(seconds, 1e-9),
            "truncated_fraction": sum(output.truncated) / max(len(results), 1),
            "cached_prompt_fraction": cached / max(prompt_tokens, 1),
            "preemptions": preempted,
        }


def _import_vllm() -> Any:
    # One process: the weights' tensors, and a dead engine's error, come to us as they are.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    try:
        import vllm  # noqa: PLC0415  (optional, and slow to load)
    except ImportError as error:
        raise ConfigError(
            f"generation.backend=vllm: {error}; pip install 'headrace[vllm]', or set generation.backend=hf"
        ) from error
    return vllm


def _is_moe(model: Any) -> bool:
    config = model.config.get_text_config()
    return any(
        getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")
    )


def _known_ids(tokenizer: Any, vocabulary: int) -> list[int] | None:
    """Return the ids that a token has, where some of the model's have none."""
    unknown = unknown_ids(tokenizer, vocabulary)
    if unknown is None:
        return None
    return sorted(set(range(vocabulary)) - set(unknown.tolist()))


def _checkpoint_names(
    model: Any, named_tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights as a checkpoint has them: fused experts of transformers are split again, layer by layer."""

    def layer(pair: tuple[str, torch.Tensor]) -> str:
        found = _LAYER.match(pair[0])
        return found[0] if found else ""

    for _, weights in groupby(named_tensors, key=layer):
        yield from revert_weight_conversion(model, dict(weights)).items()


def _routes(routers: RouterReplay, name: str, prompt_tokens: int, result: Any) -> torch.Tensor:
    completion = result.outputs[0]
    return read_vllm(
        getattr(result, "prompt_routed_experts", None),
        completion.routed_experts,
        model=routers,
        prompt_tokens=prompt_tokens,
        new_tokens=len(completion.token_ids),
        name=name,
    )


def _sampled(logprobs: Any, token_ids: Sequence[int]) -> list[float]:
    """Return the sampled tokens' logprobs of a completion, of vLLM's flat form or of one dict per token."""
    if hasattr(logprobs, "start_indices"):
        values, starts = logprobs.logprobs, logprobs.start_indices
        return [values[start] for start in starts]
    return [entry[token].logprob for entry, token in zip(logprobs, token_ids)]


def _collect() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

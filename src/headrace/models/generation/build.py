"""The one place that chooses a generator."""

from collections.abc import Callable
from typing import Any

from headrace.config import GenerationConfig
from headrace.errors import ConfigError, ReplayError
from headrace.models.generation.engine import RayRoom
from headrace.models.generation.engine_generator import EngineGenerator, VLLMGenerator
from headrace.models.generation.hf import HFGenerator
from headrace.models.generation.interfaces import Generator
from headrace.models.generation.sglang import SGLangGenerator

_BACKENDS: dict[str, Callable[..., Generator]] = {
    "hf": HFGenerator,
    "sglang": SGLangGenerator,
    "vllm": VLLMGenerator,
}
# Those that can run in processes of their own.
_IN_PROCESSES: dict[str, Callable[..., Generator]] = {"hf": EngineGenerator, "vllm": VLLMGenerator}


def build_generator(
    cfg: GenerationConfig,
    model: Any,
    tokenizer: Any,
    *,
    record_routes: bool = False,
    room: RayRoom | None = None,
) -> Generator:
    """Return the generator that `cfg.backend` names; it owns `model` from then on.

    `room` is where engines apart are Ray actors; None: they are processes of this machine.

    Raises:
        ConfigError: a backend that is not there, or `record_routes` with a model whose routes cannot be recorded.
    """
    choices = _BACKENDS if cfg.placement == "in_place" else _IN_PROCESSES
    backend = choices.get(cfg.backend)
    if backend is None:
        place = "" if cfg.placement == "in_place" else f" with generation.placement={cfg.placement}"
        raise ConfigError(
            f"generation.backend={cfg.backend!r} is not there{place}; choose one of: {', '.join(choices)}"
        )
    more = {} if room is None or cfg.placement == "in_place" else {"room": room}
    try:
        return backend(model, tokenizer, cfg, record_routes=record_routes, **more)
    except ReplayError as error:
        raise ConfigError(
            f"policy.router_replay.enabled=true, and generation.backend={cfg.backend} cannot record routes: {error}"
        ) from error

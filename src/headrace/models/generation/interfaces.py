"""What a generator is: the protocol, what it is asked, and what it gives back. `hf.py` is one to copy."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from headrace.config import GenerationConfig
from headrace.errors import ConfigError

if TYPE_CHECKING:  # an engine's process loads no data plane
    from headrace.data_plane.routes_codec import RouteShape


@dataclass(frozen=True)
class SamplingParams:
    """How to sample.

    `greedy` takes the most likely token; temperature, top-p and top-k then do not matter. `record_routes` asks a
    generator that records routes for those of this call. `max_total_tokens` bounds each row's prompt and completion
    together, so that a row with a long prompt gets fewer new tokens than its neighbours; None: no such bound.
    `cache_version` is for answers in pieces: keys and values may be read that weights since this version have left in a
    cache; None: only those of the newest weights.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    greedy: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    record_routes: bool = True
    max_total_tokens: int | None = None
    cache_version: int | None = None

    def limit(self, prompt_tokens: int) -> int:
        """Return how many new tokens a prompt of `prompt_tokens` gets at most.

        >>> params = SamplingParams(max_new_tokens=32, max_total_tokens=64)
        >>> params.limit(5), params.limit(47)
        (32, 17)
        """
        if self.max_total_tokens is None:
            return self.max_new_tokens
        return min(self.max_new_tokens, self.max_total_tokens - prompt_tokens)


@dataclass
class GenerationOutput:
    """What a generator made of B prompts.

    `token_ids[i]` are the new tokens of prompt i, a stop token included; `logprobs[i]` has one float per new
    token, of the distribution sampled from (after temperature, top-p, top-k); `truncated[i]` is False where a stop
    token or string ended the completion and True where the token limit cut it. `routes[i]` are the experts that
    prompt and completion used, (tokens - 1, MoE layers, k) in the wire's dtype: the last token was never computed.
    None from a generator that does not record, or was not asked to. `stop_token_ids` are all ids that end
    completions: those of the params, and the model's own. `weight_versions[i]` has the version of the weights that drew
    each new token, where these may have changed during the call; None: they are all the generator's `weight_version`.
    """

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    truncated: list[bool]
    metrics: dict[str, float] = field(default_factory=dict)
    routes: list[torch.Tensor] | None = None
    stop_token_ids: tuple[int, ...] = ()
    weight_versions: list[list[int]] | None = None

    def rates(self, seconds: float) -> dict[str, float]:
        """Return the metrics that every generator has, of completions that took so many seconds."""
        tokens = sum(map(len, self.token_ids))
        return {
            "generated_tokens": float(tokens),
            "generate_s": seconds,
            "tokens_per_s": tokens / max(seconds, 1e-9),
            "truncated_fraction": sum(self.truncated) / max(len(self.truncated), 1),
        }


class Generator(Protocol):
    """Samples completions. One `generate` call is a pure function of weights, prompts, params and seed.

    `route_shape` is what its recorded routes look like, None if it records none.
    """

    weight_version: int
    route_shape: "RouteShape | None"

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, seed: int
    ) -> GenerationOutput:
        """Answer every prompt (token ids, at least one each), in order; none beyond its own `params.limit`."""
        ...

    def update_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Copy new weights in, by Hugging Face parameter name, and set `weight_version`."""
        ...

    def release(self) -> None:
        """Free what is not needed until the next `generate`: caches and their memory."""
        ...

    def shutdown(self) -> None: ...


def sampling_params(cfg: GenerationConfig) -> SamplingParams:
    """Return the recipe's way to sample."""
    ends: dict[str, Any] = {"stop_token_ids": cfg.stop_token_ids, "stop_strings": cfg.stop_strings}
    return SamplingParams(cfg.max_new_tokens, **cfg.distribution, **ends)


def check_request(model: Any, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
    """Refuse what no generator can complete.

    Raises:
        ConfigError: an empty prompt, one without room for a completion, or one that could pass the model's positions.
    """
    if params.max_new_tokens < 1:
        raise ConfigError(f"generation.max_new_tokens={params.max_new_tokens}: expected 1 or more")
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for i, prompt in enumerate(prompts):
        limit = params.limit(len(prompt))
        if len(prompt) == 0:
            raise ConfigError(
                f"prompt {i} is empty; expected at least one token id (check the chat template)"
            )
        if limit < 1:
            raise ConfigError(
                f"prompt {i} has {len(prompt)} tokens and leaves no room for a completion within max_total_tokens="
                f"{params.max_total_tokens} (policy.max_total_sequence_length); raise it, or shorten the prompt"
            )
        if positions is not None and len(prompt) + limit > positions:
            raise ConfigError(
                f"prompt {i} has {len(prompt)} tokens; with generation.max_new_tokens="
                f"{params.max_new_tokens} that is more than the model's {positions} positions "
                "(max_position_embeddings); lower generation.max_new_tokens or shorten the prompt"
            )

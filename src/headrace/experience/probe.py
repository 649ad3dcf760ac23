"""A few completions of the generator, kept whole: what the mismatch guard compares with the trainer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from headrace.errors import GenerationError
from headrace.models.generation.interfaces import Generator, SamplingParams


@dataclass(frozen=True)
class Probed:
    """A completion as the generator gave it; `routes` (prompt + new - 1, layers, k) where it records any."""

    prompt: list[int]
    new: list[int]
    logprobs: list[float]
    routes: torch.Tensor | None = None


@dataclass(frozen=True)
class Probe:
    """Completions of the task's prompts, as the generator's side renders them, and, behind them, of other ones."""

    task: list[list[int]]
    greedy: list[Probed]
    sampled: list[Probed] = field(default_factory=list)


def complete(
    generator: Generator, prompts: Sequence[list[int]], params: SamplingParams, seed: int
) -> tuple[list[Probed], dict[str, float]]:
    """Return the generator's completions, and the metrics of the call.

    Raises:
        GenerationError: a logprob that is not finite, which a mean could hide.
    """
    output = generator.generate(prompts, params, seed=seed)
    for row, logprobs in enumerate(output.logprobs):
        if bad := [value for value in logprobs if not math.isfinite(value)]:
            raise GenerationError(
                f"the generator answered prompt {row} of the mismatch guard with logprob {bad[0]}; expected finite "
                "numbers"
            )
    routes: Sequence[torch.Tensor | None] = output.routes or [None] * len(prompts)
    probed = [
        Probed(list(prompt), list(new), list(logprobs), rows)
        for prompt, new, logprobs, rows in zip(
            prompts, output.token_ids, output.logprobs, routes, strict=True
        )
    ]
    return probed, output.metrics

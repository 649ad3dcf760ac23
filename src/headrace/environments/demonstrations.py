"""Right answers to learn from before reinforcement learning starts."""

from collections.abc import Sequence

import numpy as np

from headrace.errors import ConfigError
from headrace.experience.types import Prompt
from headrace.utils.seeding import derive_seed


def demonstrations(
    prompts: Sequence[Prompt], *, copy_fraction: float, seed: int, count: int
) -> list[tuple[Prompt, str]]:
    """Draw `count` pairs of a prompt and the text to answer it with.

    Each draw takes a prompt at random, with replacement. The text is its right answer or, with probability
    `copy_fraction`, the prompt's own last message. A model trained on such pairs holds both habits, and
    rewards then tell it which one to keep.

    Raises:
        ConfigError: no prompts, or a prompt without an answer, which the message names.
    """
    if not prompts:
        raise ConfigError("a warm start needs training prompts; got none")
    order = np.random.default_rng(derive_seed(seed, "demonstrations"))
    drawn = order.integers(len(prompts), size=count)
    copied = order.random(count) < copy_fraction
    return [(prompts[i], _target(prompts[i], copy)) for i, copy in zip(drawn.tolist(), copied.tolist())]


def targets(prompt: Prompt, *, copy_fraction: float) -> list[str]:
    """Return the texts that `demonstrations` may draw for a prompt.

    Raises:
        ConfigError: as `demonstrations`.
    """
    copies = [False] * (copy_fraction < 1) + [True] * (copy_fraction > 0)
    return [_target(prompt, copy) for copy in copies]


def _target(prompt: Prompt, copy: bool) -> str:
    if copy:
        return prompt.messages[-1].content
    if prompt.answer is None:
        raise ConfigError(
            f"prompt '{prompt.uid}' has no single right answer to learn from; set warm_start.enabled=false, "
            "or use an environment whose prompts have one"
        )
    return prompt.answer

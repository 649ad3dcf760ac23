"""Training and validation prompts that never share a question.

What a split holds does not depend on the run's seed: `DATA_SEED` alone draws it, so runs with other seeds
are measured on the same validation prompts, and a uid names the same prompt in each of them. The run's seed
decides the order of the training prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from headrace.experience.types import Message, Prompt
from headrace.utils.seeding import derive_seed

DATA_SEED = 0
"""Seed of everything that decides which prompts a split holds."""


@dataclass(frozen=True)
class Splits:
    """The prompts of both splits."""

    train: tuple[Prompt, ...]
    validation: tuple[Prompt, ...]

    def of(self, split: str) -> list[Prompt]:
        """Return the prompts of `train` or `validation` as a new list.

        Raises:
            ValueError: another name.
        """
        if split not in ("train", "validation"):
            raise ValueError(f"split '{split}'; expected 'train' or 'validation'")
        return list(self.train if split == "train" else self.validation)

    def shuffled(self, seed: int) -> "Splits":
        """Return the same splits with the training prompts in an order drawn from `seed`."""
        order = np.random.default_rng(derive_seed(seed, "train order")).permutation(len(self.train))
        return replace(self, train=tuple(self.train[i] for i in order))


def hold_out(prompts: Sequence[Prompt], *, train_size: int | None, validation_size: int) -> Splits:
    """Hold out `validation_size` prompts at random; the first `train_size` of the rest train, or all.

    The draw is that of `DATA_SEED`; both splits keep the order of `prompts`, which must be distinct.
    """
    order = np.random.default_rng(derive_seed(DATA_SEED, "hold out")).permutation(len(prompts))
    held = set(order[:validation_size].tolist())
    rest = [prompt for i, prompt in enumerate(prompts) if i not in held]
    return Splits(tuple(rest[:train_size]), tuple(prompts[i] for i in sorted(held)))


def conversation(question: str, system_prompt: str | None) -> tuple[Message, ...]:
    """Return the messages that open an episode: the system prompt, if any, and the question."""
    opening = () if system_prompt is None else (Message("system", system_prompt),)
    return (*opening, Message("user", question))

"""Environments of one turn, or of several: prompts in two splits, and a function that scores a completion.

What a split holds does not depend on the run's seed: `DATA_SEED` alone draws it, so runs with other seeds are measured
on the same validation prompts, and a uid names the same prompt in each of them. The run's seed decides the order of
the training prompts.
"""

from collections.abc import Callable, Sequence

import numpy as np

from headrace.config import DataConfig
from headrace.environments.interfaces import Prompts, Reward, StepResult, Talks
from headrace.experience.types import Message, Prompt
from headrace.utils.seeding import derive_seed

DATA_SEED = 0
"""Seed of everything that decides which prompts a split holds."""


Turn = Callable[[Prompt, Sequence[Message], bool], StepResult]
"""Judges the last message of a conversation, which a token limit may have cut."""


class TurnEnvironment:
    """Prompts in two splits, and a function that judges each turn and may answer it."""

    def __init__(self, train: Sequence[Prompt], validation: Sequence[Prompt], turn: Turn) -> None:
        self._splits = {"train": train, "validation": validation}
        self._turn = turn

    def prompts(self, split: str) -> list[Prompt]:
        if split not in self._splits:
            raise ValueError(f"split '{split}'; expected 'train' or 'validation'")
        return list(self._splits[split])

    def step(self, prompts: Prompts, conversations: Talks, truncated: Sequence[bool]) -> list[StepResult]:
        return [self._turn(*each) for each in zip(prompts, conversations, truncated, strict=True)]


class SingleTurnEnvironment(TurnEnvironment):
    """Prompts in two splits, each completion scored by `reward`; the training prompts in an order drawn from `seed`."""

    def __init__(
        self,
        train: Sequence[Prompt],
        validation: Sequence[Prompt],
        reward: Reward,
        data: DataConfig,
        *,
        seed: int,
    ) -> None:
        if data.shuffle:
            order = np.random.default_rng(derive_seed(seed, "train order")).permutation(len(train))
            train = [train[i] for i in order]
        super().__init__(train, validation, lambda prompt, talk, cut: reward(prompt, talk[-1].content, cut))


def conversation(question: str, system_prompt: str | None) -> tuple[Message, ...]:
    """Return the messages that open an episode: the system prompt, if any, and the question."""
    opening = () if system_prompt is None else (Message("system", system_prompt),)
    return (*opening, Message("user", question))

"""What an environment is: a source of prompts, and a judge of answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headrace.experience.types import Message, Prompt


@dataclass(frozen=True)
class StepResult:
    """An environment's answer to one assistant turn.

    `reward` is added to the sample's reward; `done` ends the episode; otherwise `observation` (at least one
    message) is appended before the next turn. `correct` says whether the answer was right, where that is known.
    """

    reward: float
    done: bool = True
    observation: tuple[Message, ...] = ()
    correct: bool | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """Prompts for training and validation (disjoint), and rewards for answers."""

    def prompts(self, split: str) -> list[Prompt]:
        """Return all prompts of `train` or `validation`, in a fixed order."""
        ...

    def step(
        self, prompts: Sequence[Prompt], conversations: Sequence[Sequence[Message]], truncated: Sequence[bool]
    ) -> list[StepResult]:
        """Judge the last assistant message of each conversation; one result per conversation, in order.

        `truncated[i]` is True where the answer was cut by the token limit.
        """
        ...

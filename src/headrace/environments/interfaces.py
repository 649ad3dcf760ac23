"""What an environment is: prompts, and scores of what a model makes of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headrace.experience.types import Message, Prompt

Prompts = Sequence[Prompt]
Talks = Sequence[Sequence[Message]]
"""Conversations: of each, its messages so far."""


@dataclass(frozen=True)
class StepResult:
    """What one completion earns, and whether the episode goes on.

    reward: a finite number that fits in float32; a sample's reward is the sum over its turns.
    done: True ends the episode. False goes on with `observation`, at least one message, which the model sees before
        it writes its next completion. At `grpo.max_rollout_turns`, or without room for more tokens, it ends anyway.
    correct: whether the completion is right; None where the environment does not say. Accuracy is the share of True
        among verdicts; the last verdict of a sample counts. With `done=False` False says that a sample which ends here,
        for lack of turns or tokens, is not right; with None it would be left out.
    metrics: finite numbers by name, averaged over samples as `environment/<name>`, or as they are called where they
        begin with `reward/`.
    answer: what the completion answers, as it votes in `maj@k`; None: its text.
    """

    reward: float
    done: bool = True
    observation: tuple[Message, ...] = ()
    correct: bool | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    answer: str | None = None


class Environment(Protocol):
    """Prompts for training and validation, and scores for completions.

    `single_turn.py` is the one to copy; `games.py` has some of several turns. What `step` returns is checked: a result
    that `StepResult` does not allow ends the run with a RewardError that names the sample. An exception of `step` ends
    the run, so a completion that cannot be scored is a reward of 0, not an error.
    """

    def prompts(self, split: str) -> list[Prompt]:
        """Return all prompts of `train` or `validation`, in a fixed order; no question is in both."""
        ...

    def step(self, prompts: Prompts, conversations: Talks, truncated: Sequence[bool]) -> list[StepResult]:
        """Score the last message of each of N conversations, a completion; return N results, in order.

        `prompts[i]` is what conversation i began with; the samples of a group share it. `truncated[i]` is True where
        the token limit cut the completion. Has to be a function of its arguments, so that a run can be repeated.
        """
        ...


class Reward(Protocol):
    """Scores one completion to a prompt; all that a `SingleTurnEnvironment` needs beside prompts.

    `dataset.py` has some to copy. `prompt.answer` is the reference answer, where there is one; `prompt.info` holds
    what else the scoring needs. `truncated` is True where the token limit cut the completion.
    """

    def __call__(self, prompt: Prompt, completion: str, truncated: bool, /) -> StepResult: ...

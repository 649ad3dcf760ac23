"""A run's prompts, with those that leave no room for a completion refused or left out."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from headrace.config import RecipeConfig
from headrace.environments.build import build_environment
from headrace.environments.interfaces import Environment, StepResult
from headrace.errors import ConfigError
from headrace.experience.chat import ChatTokenizer, render_prompt
from headrace.experience.rollouts import render_with_room
from headrace.experience.types import Message, Prompt


@dataclass(frozen=True)
class FittingPrompts:
    """An environment without the prompts in `left_out`, by split."""

    environment: Environment
    kept: dict[str, list[Prompt]]
    left_out: dict[str, list[Prompt]]

    def prompts(self, split: str) -> list[Prompt]:
        return list(self.kept[split])

    def step(
        self, prompts: Sequence[Prompt], conversations: Sequence[Sequence[Message]], truncated: Sequence[bool]
    ) -> list[StepResult]:
        return self.environment.step(prompts, conversations, truncated=truncated)

    def notice(self) -> str | None:
        """Return a line that counts what is left out, and names the first; None where nothing is."""
        counts = [f"{len(prompts)} of {split}" for split, prompts in self.left_out.items() if prompts]
        if not counts:
            return None
        first = next(chain.from_iterable(self.left_out.values()))
        return (
            f"left out as too long for policy.max_total_sequence_length: {' and '.join(counts)} prompts, "
            f"first '{first.uid}' (data.overlong_prompts=skip)"
        )


def prompts_that_fit(recipe: RecipeConfig, tokenizer: ChatTokenizer) -> Environment:
    """Build the recipe's environment; every prompt of it leaves room for a completion.

    Raises:
        ConfigError: see `build_environment`; also a prompt that is too long where none is to be left out, or a split
            of which none is left.
    """
    environment = build_environment(recipe.env, recipe.data, seed=recipe.seed)
    longest = recipe.policy.max_total_sequence_length
    if recipe.data.overlong_prompts == "refuse":
        for split in ("validation", "train"):
            for prompt in environment.prompts(split):
                render_with_room(tokenizer, prompt, longest)
        return environment
    kept: dict[str, list[Prompt]] = {"train": [], "validation": []}
    left_out: dict[str, list[Prompt]] = {"train": [], "validation": []}
    for split in kept:
        for prompt in environment.prompts(split):
            fits = len(render_prompt(tokenizer, prompt.messages)) < longest
            (kept if fits else left_out)[split].append(prompt)
        if not kept[split]:
            raise ConfigError(
                f"policy.max_total_sequence_length={longest}: every prompt of {split} is too long for it; raise it"
            )
    return FittingPrompts(environment, kept, left_out)

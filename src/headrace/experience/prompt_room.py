"""A run's prompts, with those that leave no room for a completion refused, left out, or cut."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.config import RecipeConfig
from headrace.environments.build import build_environment
from headrace.environments.interfaces import Environment, Prompts, StepResult, Talks
from headrace.errors import ConfigError
from headrace.experience.chat import ChatTokenizer, render_prompt, set_template_switches
from headrace.experience.rollouts import prompt_ids, render_with_room
from headrace.experience.types import Message, Prompt

_SPLITS = ("train", "validation")


@dataclass(frozen=True)
class FittingPrompts:
    """An environment with the prompts in `kept`, by split; `changed` were too long, and are left out or cut."""

    environment: Environment
    kept: dict[str, list[Prompt]]
    changed: dict[str, list[Prompt]]
    how: str

    def prompts(self, split: str) -> list[Prompt]:
        return list(self.kept[split])

    def step(self, prompts: Prompts, conversations: Talks, truncated: Sequence[bool]) -> list[StepResult]:
        return self.environment.step(prompts, conversations, truncated=truncated)

    def notice(self) -> str | None:
        """Return a line that counts what is left out or cut, and names the first; None where nothing is."""
        counts = [f"{len(prompts)} of {split}" for split, prompts in self.changed.items() if prompts]
        if not counts:
            return None
        first = next(prompt for prompts in self.changed.values() for prompt in prompts)
        done = "left out as" if self.how == "skip" else "cut at their beginning, since they are"
        return (
            f"{done} too long for policy.max_total_sequence_length: {' and '.join(counts)} prompts, "
            f"first '{first.uid}' (data.overlong_prompts={self.how})"
        )


def prompts_that_fit(
    recipe: RecipeConfig, tokenizer: ChatTokenizer, environment: Environment | None = None
) -> Environment:
    """Build the recipe's environment (unless it is given); every prompt of it leaves room for a completion.

    The switches of `env.chat_template_kwargs` are set on the tokenizer.

    Raises:
        ConfigError: see `build_environment`; also a prompt that is too long where none is to be left out or cut, or a
            split of which none is left.
    """
    set_template_switches(tokenizer, recipe.env.chat_template_kwargs)
    environment = environment or build_environment(recipe.env, recipe.data, seed=recipe.seed)
    longest, how = recipe.policy.max_total_sequence_length, recipe.data.overlong_prompts
    if how == "refuse":
        for split in reversed(_SPLITS):
            for prompt in environment.prompts(split):
                render_with_room(tokenizer, prompt, longest)
        return environment
    kept: dict[str, list[Prompt]] = {split: [] for split in _SPLITS}
    changed: dict[str, list[Prompt]] = {split: [] for split in _SPLITS}
    for split in _SPLITS:
        for prompt in environment.prompts(split):
            fits = len(prompt_ids(tokenizer, prompt)) < longest
            if not fits:
                changed[split].append(prompt)
            if fits or how == "truncate":
                room = longest - recipe.generation.max_new_tokens
                kept[split].append(prompt if fits else _cut(tokenizer, prompt, room))
        if not kept[split]:
            raise ConfigError(
                f"policy.max_total_sequence_length={longest}: every prompt of {split} is too long for it; raise it"
            )
    return FittingPrompts(environment, kept, changed, how)


def _cut(tokenizer: ChatTokenizer, prompt: Prompt, room: int) -> Prompt:
    """Return a prompt whose last message has lost so much of its beginning that the whole has `room` tokens at most."""
    *before, last = prompt.messages

    def kept(characters: int) -> Prompt:
        text = last.content[len(last.content) - characters :]
        return replace(prompt, messages=(*before, Message(last.role, text)))

    sizes = range(1, len(last.content))
    size = bisect_right(sizes, room, key=lambda n: len(render_prompt(tokenizer, kept(n).messages)))
    if not size:
        raise ConfigError(
            f"prompt '{prompt.uid}' is too long without its last message too: data.overlong_prompts=truncate cuts that "
            "alone; raise policy.max_total_sequence_length, or set data.overlong_prompts=skip"
        )
    return kept(size)

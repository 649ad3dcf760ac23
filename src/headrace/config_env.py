"""The part of a recipe that says what a completion is worth: `env`, a section of one of several kinds."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, model_validator

from headrace.utils.renamed import with_score
from headrace.utils.section import Section, Settings
from headrace.utils.targets import TARGET

BUILT_IN_REWARDS = ("exact", "contains", "last_number", "math")
_TAKEN = ("mean", "std", "kept_mean", "shaped_mean")
Match = Literal["exact", "contains", "last_number"]


class EnvironmentSection(Section):
    """What every kind of environment has."""

    chat_template_kwargs: Settings = Field(default_factory=dict)
    """Switches of the tokenizer's chat template, such as `enable_thinking: false` or `tools: [...]`."""


class RewardFunctionConfig(Section):
    """A reward, and what it weighs."""

    target: str
    """`package.module:function`, or one that comes along: exact, contains, last_number, math."""
    weight: float = 1.0
    """The reward of a sample is the sum of weight x value."""
    name: str = ""
    """Its values are logged as `reward/NAME`; unset: the function's name."""

    @property
    def label(self) -> str:
        return self.name or self.target.rpartition(":")[2].rpartition(".")[2]

    def faults(self) -> Iterator[str]:
        if not (self.target in BUILT_IN_REWARDS or TARGET.fullmatch(self.target)):
            yield (
                f"target={self.target}: expected package.module:function, for example my_rewards:exact, or one of "
                f"{', '.join(BUILT_IN_REWARDS)}"
            )
        if "/" in self.label:
            yield f"name={self.label}: expected no slash, which begins the name of a part; set name to another"
        if self.label in _TAKEN:
            yield f"name={self.label}: reward/{self.label} is a metric of its own; set name to another"


class ReasoningGymConfig(EnvironmentSection):
    """A reasoning-gym task by name."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    """Makes this section a reasoning-gym task."""
    task: str
    """The task's name in reasoning-gym, for example spell_backward."""
    config: Settings = Field(default_factory=dict)
    """The task's own settings, as reasoning-gym names them."""
    prompt_from: str = "question"
    """`question`, or `metadata.KEY` for an entry of the task's metadata."""
    lowercase: bool = False
    """Put questions and answers in lower case, so that a model of few characters is enough."""
    score: Literal["task", "exact", "last_number"] = "task"
    """`task`: the task's own score. `exact`: 1 for exactly the right answer, ended by end-of-text. `last_number`: 1 if
    the last numbers of completion and answer are equal, since a chat model answers in a sentence."""

    @model_validator(mode="before")
    @classmethod
    def _read_switch(cls, values: object) -> object:
        return with_score(values) if isinstance(values, dict) else values


class FileSection(EnvironmentSection):
    """What environments of questions and answers have."""

    path: str | None = None
    """One file of questions, for training and to hold out of; or leave it out, and name sets in `data.train`."""
    question_key: str = "question"
    """Field of a row of `path` that holds the question."""
    answer_key: str = "answer"
    """Field of a row of `path` that holds the right answer."""


class MathConfig(FileSection):
    """Math problems, answers compared as text, and with math-verify where the texts differ."""

    kind: Literal["math"] = "math"
    """Makes this section math problems."""


def _named(value: object) -> object:
    if not isinstance(value, list | tuple):
        return value
    return [{"target": entry} if isinstance(entry, str) else entry for entry in value]


class DatasetConfig(FileSection):
    """Questions and answers, compared as text, or scored by functions of your own."""

    kind: Literal["dataset"] = "dataset"
    """Makes this section questions with answers in plain text."""
    match: Match = "exact"
    """Without `rewards`: a completion is right if it equals the answer but for outer whitespace (`exact`), if it holds
    it (`contains`), or if the last numbers of both are equal (`last_number`)."""
    rewards: Annotated[
        tuple[RewardFunctionConfig, ...],
        Field(strict=False),
        BeforeValidator(_named, json_schema_input_type=tuple[str | RewardFunctionConfig, ...]),
    ] = ()
    """Functions that score a completion, in place of `match`: `package.module:function`, or a mapping with `target`,
    `weight` and `name`."""
    reward_timeout_s: PositiveFloat | None = 30.0
    """Seconds for one call of a function; a call beyond it counts as 0. Null: no limit, and the functions run in the
    rollout's own process."""
    reward_workers: PositiveInt = 1
    """Processes in which the functions run, beside the rollout's."""

    def faults(self) -> Iterator[str]:
        labels = [function.label for function in self.rewards]
        if twice := next((label for label in labels if labels.count(label) > 1), None):
            yield f"rewards: two are called '{twice}'; give one of them a name: {{target: ..., name: ...}}"
        if self.rewards and self.match != "exact":
            yield f"match={self.match} has no effect with rewards; remove it, or list {self.match} among the rewards"


class PythonConfig(EnvironmentSection):
    """An environment of your own."""

    kind: Literal["python"] = "python"
    """Makes this section an environment by import path."""
    target: str
    """`package.module:Factory`: a class or function whose result has `step`, and `prompts` where it brings its own."""
    args: Settings = Field(default_factory=dict)
    """Arguments of the factory, by name."""

    def faults(self) -> Iterator[str]:
        if not TARGET.fullmatch(self.target):
            yield f"target={self.target}: expected package.module:Factory, for example my_env:Game"


class CalculatorConfig(EnvironmentSection):
    """Sums with a calculator: what the model writes as `<calc>12 * 3</calc>` is computed, and told in a message."""

    kind: Literal["calculator"] = "calculator"
    """Makes this section sums with a calculator."""
    terms: Annotated[int, Field(ge=2, le=20)] = 3
    """Numbers of a sum, where `data.train` names no questions."""
    largest: PositiveInt = 99
    """The largest of these numbers."""
    bonus: float = 0.0
    """Reward for a turn that uses the calculator and is understood."""
    role: Literal["tool", "user"] = "user"
    """Role of the messages that tell results."""
    hint: str = "Write <calc>12 * 3</calc> to have a sum computed; end with the answer."
    """A system message before a question that has none; empty: none."""


class GuessNumberConfig(EnvironmentSection):
    """A game: find a number; each guess is told to be too low or too high."""

    kind: Literal["guess_number"] = "guess_number"
    """Makes this section the game."""
    lowest: int = 1
    """The least number that may be meant."""
    highest: int = 20
    """The greatest one."""

    def faults(self) -> Iterator[str]:
        if self.highest <= self.lowest:
            yield f"highest={self.highest} is not above lowest={self.lowest}; raise it"


class VerifiersConfig(EnvironmentSection):
    """An environment of the package verifiers, with its own prompts and rewards."""

    kind: Literal["verifiers"] = "verifiers"
    """Makes this section an environment of the package verifiers."""
    id: str
    """Its name, as `verifiers.load_environment` takes it: a module with a function `load_environment`."""
    args: Settings = Field(default_factory=dict)
    """Arguments of that function, by name."""


_One = (
    ReasoningGymConfig
    | MathConfig
    | DatasetConfig
    | PythonConfig
    | CalculatorConfig
    | GuessNumberConfig
    | VerifiersConfig
)


class ByColumnConfig(EnvironmentSection):
    """Several environments; a column of a prompt says which one scores it."""

    kind: Literal["by_column"] = "by_column"
    """Makes this section several environments."""
    column: str = "task"
    """The column of `data.train` and `data.validation` that holds the name of an environment."""
    environments: dict[str, Annotated[_One, Field(discriminator="kind")]]
    """Environments by name. Those that make their own prompts add them."""


EnvironmentConfig = Annotated[_One | ByColumnConfig, Field(discriminator="kind")]

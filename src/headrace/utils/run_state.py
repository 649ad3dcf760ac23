"""What a checkpoint says about its run beside the weights, and what a run that goes on from it may change."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, ValidationError

from headrace.config import RecipeConfig
from headrace.errors import ConfigError
from headrace.utils.checkpoints import META_FILE, CheckpointInfo, Saved, damaged
from headrace.utils.config_errors import default_values
from headrace.utils.recipe import changed_keys, leaves, read_resolved
from headrace.utils.renamed import with_new_keys
from headrace.utils.section import written

# A checkpoint is of no use to a run that differs in one of these.
_MODEL = (
    "policy.model.path",
    "policy.model.revision",
    "policy.model.gguf_package",
    "policy.model.config",
    "policy.tokenizer",
)
_ADAPTER = ("policy.lora.rank", "policy.lora.alpha", "policy.lora.targets", "policy.lora.base")
_FIXED = ("seed", *_MODEL, *_ADAPTER, "env")
# What these change in the prompts shows in their digest.
_IN_DIGEST = ("env.path", "env.question_key", "env.answer_key", "data")
_ABOUT_THE_RUN = ("run_dir", "overwrite", "resume", "allow_changes", "logging", "code_path")
_NO_MATTER = (*_ABOUT_THE_RUN, "validation", "checkpointing", "data_plane", "cluster")
_LONGEST_VALUE = 37

Metrics = dict[str, float]


class Progress(Saved):
    """How far a run has come."""

    step: NonNegativeInt
    prompt_position: NonNegativeInt
    train_seconds: NonNegativeFloat
    warm_start_steps: NonNegativeInt
    first_validation: Metrics | None
    last_validation: Metrics
    last_validation_step: int
    idle_steps: NonNegativeInt = 0
    """Steps that learned nothing from their rewards."""
    idle_streak: NonNegativeInt = 0
    """How many of them came last, without another between."""
    prompts_ahead: list[NonNegativeInt] = Field(default_factory=list)
    """Positions after `prompt_position` whose groups were trained on or dropped (an asynchronous run)."""

    @classmethod
    def at_start(cls) -> Self:
        return cls(
            step=0,
            prompt_position=0,
            train_seconds=0.0,
            warm_start_steps=0,
            first_validation=None,
            last_validation={},
            last_validation_step=-1,
        )


class SplitState(Saved):
    """A split's prompts: how many, and a digest of texts, answers and order."""

    prompts: NonNegativeInt
    digest: str


class PromptsState(Saved):
    """The prompts that a run trains on, and those that it is measured on."""

    train: SplitState
    validation: SplitState


class RunState(Saved):
    """The state in a checkpoint; `recipe` is the resolved one that the checkpoint was trained by.

    `journal` is a position in the store's journal (`data_plane.journal.segments.Position`), where there is one.
    Checkpoints of early versions do not know their `prompts`.
    """

    progress: Progress
    prompts: PromptsState | None
    recipe: dict[str, Any]
    journal: dict[str, list[int]] | None = None


@dataclass(frozen=True)
class Change:
    """A key of the recipe that differs from the checkpoint's."""

    key: str
    old: Any
    new: Any
    matters: bool
    """Whether the steps to come are others than without the change."""

    @property
    def values(self) -> str:
        return f"{written(self.old, _LONGEST_VALUE)} -> {written(self.new, _LONGEST_VALUE)}"

    def __str__(self) -> str:
        return f"{self.key} {self.values}"


def read_state(info: CheckpointInfo) -> RunState:
    """Return a checkpoint's state; a ConfigError says what is missing there, or of another type or step."""
    remedy = f"remove the directory {info.path} to go on from an earlier one, or set overwrite=true"
    try:
        state = RunState.model_validate(_in_todays_form(info))
    except ValidationError as error:
        raise damaged(info.path / META_FILE, error, remedy, "state") from error
    if state.progress.step != info.step:
        raise ConfigError(
            f"{info.path / META_FILE}: damaged, state.progress.step is {state.progress.step} in the checkpoint of "
            f"step {info.step}; {remedy}"
        )
    return state


def _in_todays_form(info: CheckpointInfo) -> dict[str, Any]:
    """Return a checkpoint's state, also of a version that kept the progress alone; its run has the recipe."""
    state: dict[str, Any] = dict(info.state)
    if "progress" not in state and "prompt_position" in state:
        config = info.path.parent.parent / "config.yaml"
        recipe = read_resolved(config.read_text(encoding="utf-8")) if config.is_file() else {}
        state = {"progress": state, "prompts": None, "recipe": recipe}
    if isinstance(state.get("recipe"), dict):
        state["recipe"] = with_new_keys(state["recipe"])
    return state


def recipe_changes(old: Mapping[str, Any], new: Mapping[str, Any], *, allowed: bool) -> Sequence[Change]:
    """Return how a recipe differs from the checkpoint's, by key; `allowed`: also one that cannot go on from it."""
    changes: list[Change] = []
    known, defaults = dict(leaves(dict(old))), default_values(RecipeConfig)
    for key, before, after in changed_keys(old, new):
        if key not in known and key in defaults and after == defaults[key]:
            continue  # the key came with a later version
        change = Change(key, before, after, not _within(key, _NO_MATTER))
        if not allowed and _within(key, _FIXED) and not _within(key, _IN_DIGEST):
            raise ConfigError(
                f"{key} differs from that of the checkpoint ({change.values}); put the old value back, or set "
                "overwrite=true, another run_dir, or allow_changes=true to go on all the same"
            )
        changes.append(change)
    return changes


def prompt_changes(old: PromptsState, new: PromptsState) -> str | None:
    """Return what is different between two runs' prompts, None if nothing is.

    Example: `the training prompts (64 then, 70 now) and the held-out prompts (8 then, 8 now)`.
    """
    pairs = {"training": (old.train, new.train), "held-out": (old.validation, new.validation)}
    parts = [
        f"the {name} prompts ({before.prompts} then, {after.prompts} now)"
        for name, (before, after) in pairs.items()
        if before != after
    ]
    return " and ".join(parts) or None


def _within(key: str, sections: Sequence[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)

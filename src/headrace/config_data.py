"""The part of a recipe that says where prompts come from: `data`, with its training and validation sets."""

from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt

from headrace.utils.section import Integers, Section
from headrace.utils.targets import TARGET


class SourceConfig(Section):
    """One set of prompts."""

    path: str
    """A file (.jsonl, .json, .csv, .parquet), a Hugging Face dataset saved to disk, one of the hub (`org/name`), or a
    function that returns rows (`package.module:function`)."""
    split: str | None = None
    """Split of a dataset of the hub or on disk; None: `train`, or the one that there is."""
    subset: str | None = None
    """Configuration of a dataset of the hub."""
    revision: str | None = None
    """Branch, tag or commit of a dataset of the hub."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Our name: the file's name of a column. `prompt` is text or messages (unset: the first of `prompt`, `question`,
    `messages` that is there), `answer` the right answer (unset: `answer`, if there). Other columns keep their names;
    scoring code finds them in `info`."""
    size: PositiveInt | None = None
    """Prompts of it at most; None: all."""


class TrainSourceConfig(SourceConfig):
    """One training set."""

    weight: PositiveFloat | None = None
    """Its share of the prompts of an epoch, beside the other sets' weights; None: as many as it has."""


class ValidationSourceConfig(SourceConfig):
    """One validation set, and how it is measured."""

    samples: PositiveInt = 1
    """Sampled completions of each prompt."""
    greedy: bool = True
    """Measure a greedy completion of each prompt too."""
    pass_at: Integers = ()
    """Each k: the chance that one of k samples is right (`pass@k`, without bias)."""
    maj_at: Integers = ()
    """Each k: the chance that the answer which most of k samples give is right (`maj@k`)."""
    temperature: PositiveFloat | None = None
    """None: the run's."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """None: the run's."""
    top_k: PositiveInt | None = None
    """None: the run's."""
    max_new_tokens: PositiveInt | None = None
    """None: the run's."""

    def faults(self) -> Iterator[str]:
        for key in ("pass_at", "maj_at"):
            for k in getattr(self, key):
                if not 1 <= k <= self.samples:
                    yield f"{key}={list(getattr(self, key))}: {k} of samples={self.samples}; raise samples"


def _named(value: Any) -> Any:
    """Return sets by name, of a path, of one set, or of paths and sets by name."""
    if isinstance(value, str):
        value = {"path": value}
    if not isinstance(value, Mapping):
        return value
    path = value.get("path")
    if isinstance(path, str):
        name = path.partition(":")[2] if TARGET.fullmatch(path) else PurePath(path).stem or "data"
        return {name: _with_own(value, name)}
    return {name: {"path": entry} if isinstance(entry, str) else entry for name, entry in value.items()}


def _with_own(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the keys of the one set in `value`, with those under its name, as overrides and messages have them."""
    others = [k for k, entry in value.items() if k != name and isinstance(entry, Mapping) and "path" in entry]
    if others and others[0] not in SourceConfig.model_fields:
        raise ValueError(
            f"path={value['path']} is of one set without a name, beside sets by name ({', '.join(others)}); write "
            f"{name}.path"
        )
    own = None if name in SourceConfig.model_fields else value.get(name)
    if not isinstance(own, Mapping):
        return value
    rest = {key: entry for key, entry in value.items() if key != name}
    columns = [keys["columns"] for keys in (rest, own) if "columns" in keys]
    if len(columns) == 2 and all(isinstance(entry, Mapping) for entry in columns):
        own = {**own, "columns": {**columns[0], **columns[1]}}
    return {**rest, **own}


def _sets_of(source: Any) -> BeforeValidator:
    return BeforeValidator(_named, json_schema_input_type=str | source | dict[str, str | source])


class DataConfig(Section):
    """Which prompts, and how they are written."""

    train_size: PositiveInt | None = None
    """Prompts generated for training, or kept of the sets at most, of each its first, by weight or size; None: 2,048 of
    a generated task, all of the sets."""
    validation_size: PositiveInt = 256
    """Prompts held out, where no validation sets are named; no training prompt equals one of them."""
    system_prompt: str | None = None
    """A system message before every question that has none; None: none."""
    shuffle: bool = True
    """Draw the order of the training prompts from the seed, anew for each pass."""
    order: str | None = None
    """A function `package.module:function` of (prompts, epoch, seed) that returns the places of an epoch's prompts, as
    many as there are; a place may come twice. None: every prompt once, or by the sets' weights."""
    overlong_prompts: Literal["refuse", "skip", "truncate"] = "refuse"
    """A prompt that fills `policy.max_total_sequence_length`: end the run before it starts; leave the prompt out of its
    split; or cut the beginning of its last message, so that `generation.max_new_tokens` have room. A warning counts
    them."""
    train: Annotated[dict[str, TrainSourceConfig], _sets_of(TrainSourceConfig)] = Field(default_factory=dict)
    """Training sets by name. A path alone is a set of the file's name."""
    validation: Annotated[dict[str, ValidationSourceConfig], _sets_of(ValidationSourceConfig)] = Field(
        default_factory=dict
    )
    """Validation sets by name; none: `validation_size` prompts of the training sets. A path alone is a set."""

    def faults(self) -> Iterator[str]:
        weighted = [name for name, source in self.train.items() if source.weight is not None]
        if weighted and len(weighted) < len(self.train):
            other = next(name for name in self.train if name not in weighted)
            yield f"train.{other} has no weight, and train.{weighted[0]} has one; give all of them one, or none"
        if weighted and self.order is not None and self.train_size is None:
            yield (
                f"order={self.order} decides what is drawn, so that train.{weighted[0]}.weight has no effect here; "
                "remove the weights or the order, or set train_size, of which weights give each set its part"
            )

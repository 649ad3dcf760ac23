"""The part of a recipe that says what a run reports, and where to: `logging`."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from headrace.utils.renamed import with_trackers
from headrace.utils.section import Section, Strings

TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio", "jsonl", "opentelemetry"]


class WandbConfig(Section):
    """A run in Weights & Biases."""

    project: str = "headrace"
    """The project that it belongs to."""
    name: str | None = None
    """Its name there; None: the name of the run directory."""
    entity: str | None = None
    """User or team that it belongs to; None: the default of the account."""
    group: str | None = None
    """A group of runs that it is one of."""
    tags: Strings = ()
    """Words to find it by."""
    mode: Literal["online", "offline"] | None = None
    """`offline`: write to the run directory, for `wandb sync`. None: WANDB_MODE, or online."""


class MlflowConfig(Section):
    """A run in MLflow."""

    tracking_uri: str | None = None
    """A server or a folder; None: MLFLOW_TRACKING_URI, or the folder `mlruns` where headrace is started."""
    experiment: str = "headrace"
    """The experiment that it belongs to."""
    name: str | None = None
    """Its name there; None: the name of the run directory."""


class TrackioConfig(Section):
    """A run in Trackio."""

    project: str = "headrace"
    """The project that it belongs to."""
    name: str | None = None
    """Its name there; None: the name of the run directory."""
    space_id: str | None = None
    """A Hugging Face Space that shows it; None: this machine only."""


class JsonlConfig(Section):
    """Every event of a run in one file, a JSON object per line."""

    path: str | None = None
    """The file, which is appended to; None: events.jsonl in the run directory."""


class LoggingConfig(Section):
    """What a run writes beside metrics.jsonl and samples.jsonl, which are always written."""

    trackers: Annotated[tuple[TrackerName, ...], Field(strict=False)] = ("tensorboard",)
    """Where metrics and samples go as well. wandb and mlflow need `headrace[trackers]`, trackio and opentelemetry the
    extras of their names."""
    wandb: WandbConfig = WandbConfig()
    mlflow: MlflowConfig = MlflowConfig()
    trackio: TrackioConfig = TrackioConfig()
    jsonl: JsonlConfig = JsonlConfig()
    prometheus_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Answer Prometheus on this port while the run goes on (`headrace[prometheus]`); 0: any free one. None: do not."""
    prometheus_address: str = "127.0.0.1"
    """The address that the port is opened on; 0.0.0.0: every one of this machine."""
    samples_per_step: NonNegativeInt = 8
    """Samples of a step that are written to samples.jsonl and sent to the trackers."""
    tokens_of_samples: NonNegativeInt = 2
    """How many of them are written with their tokens, each with logprob, gap to the trainer's, and advantage."""
    tokens_per_sample: PositiveInt = 512
    """The most tokens that are written of one of these."""
    detail_every: NonNegativeInt = 1
    """Steps between two whose stages, store and microbatches are written to detail.jsonl, for the page; 0: none."""
    detail_mb: PositiveInt = 16
    """The most of detail.jsonl that is kept, in MB."""
    progress: Literal["auto", "on", "off"] = "auto"
    """Draw a live view of the run: on, off, or auto, which draws on a terminal only."""

    def faults(self) -> Iterator[str]:
        if twice := [name for name in self.trackers if self.trackers.count(name) > 1]:
            yield f"trackers names {twice[0]} twice, and would write everything twice; name it once"

    @model_validator(mode="before")
    @classmethod
    def _read_the_old_switch(cls, values: Any) -> Any:
        return with_trackers(values) if isinstance(values, dict) else values

    @field_validator("progress", mode="before")
    @classmethod
    def _yaml_reads_on_and_off_as_booleans(cls, value: object) -> object:
        return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value

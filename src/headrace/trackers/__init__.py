"""Where a run's metrics and samples go beside its own files: observers by `logging.trackers`, or given in Python.

Each class takes the options of its section of `logging`; one of your own derives from `Tracker`. A tracker that fails
while a run goes on is named in a warning once, and the run goes on without it.
"""

from collections.abc import Callable, Sequence
from typing import Any, Self

from headrace.algorithms.observer import RunObserver
from headrace.config import RecipeConfig
from headrace.config_logging import LoggingConfig
from headrace.progress import CompositeObserver
from headrace.trackers.base import GuardedObserver, Tracker
from headrace.trackers.jsonl import JsonlTracker
from headrace.trackers.mlflow import MlflowTracker
from headrace.trackers.opentelemetry import OpenTelemetryTracker
from headrace.trackers.prometheus import PrometheusTracker
from headrace.trackers.tensorboard import TensorBoardTracker
from headrace.trackers.trackio import TrackioTracker
from headrace.trackers.wandb import WandbTracker
from headrace.utils.run_directory import RunDirectory
from headrace.utils.section import Section

__all__ = [
    "JsonlTracker",
    "MlflowTracker",
    "OpenTelemetryTracker",
    "PrometheusTracker",
    "RunTrackers",
    "TensorBoardTracker",
    "Tracker",
    "TrackioTracker",
    "WandbTracker",
]


class RunTrackers(CompositeObserver):
    """The trackers of a recipe, then `others`; a context manager that closes trackers, which never stop a run.

    Raises:
        ConfigError: a package that a tracker needs is not installed, or it has no key to log in with.
    """

    def __init__(self, recipe: RecipeConfig, run: RunDirectory, others: Sequence[RunObserver] = ()) -> None:
        made = [_MAKE[name](recipe.logging, run) for name in recipe.logging.trackers]
        port, address = recipe.logging.prometheus_port, recipe.logging.prometheus_address
        if port is not None:
            made.append(PrometheusTracker(port, address=address, run=run.name))
        observers = [*made, *others]
        for tracker in observers:
            if isinstance(tracker, Tracker):
                tracker.settings = tracker.settings or recipe.model_dump(mode="json")
        super().__init__([GuardedObserver(o) if isinstance(o, Tracker) else o for o in observers])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for observer in self._observers:
            if isinstance(observer, GuardedObserver):
                observer.close()


def _named(section: Section, run: RunDirectory) -> dict[str, Any]:
    return {"name": run.name, **section.model_dump(exclude_none=True)}


_MAKE: dict[str, Callable[[LoggingConfig, RunDirectory], Tracker]] = {
    "tensorboard": lambda logging, run: TensorBoardTracker(run.tensorboard_dir),
    "wandb": lambda logging, run: WandbTracker(
        **_named(logging.wandb, run), directory=run.path, id_file=run.path / "wandb.id"
    ),
    "mlflow": lambda logging, run: MlflowTracker(
        **_named(logging.mlflow, run), id_file=run.path / "mlflow.id"
    ),
    "trackio": lambda logging, run: TrackioTracker(**_named(logging.trackio, run)),
    "jsonl": lambda logging, run: JsonlTracker(logging.jsonl.path or run.path / "events.jsonl"),
    "opentelemetry": lambda logging, run: OpenTelemetryTracker(run=run.name),
}

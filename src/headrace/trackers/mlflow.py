"""Runs in MLflow: on a server, or in a folder."""

import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.trackers.base import Tracker, not_installed
from headrace.utils.targets import load_optional

_MOST_PARAMS = 100  # of one request
_MOST_METRICS = 1000
_NOT_IN_A_NAME = re.compile(r"[^\w\-. /:]")
# A server that is away costs a run seconds, not minutes.
_HTTP = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}


class MlflowTracker(Tracker):
    """An MLflow run, through a client of its own: MLflow's active run and its address stay as they are.

    Raises:
        ConfigError: mlflow is not installed (mlflow-skinny is enough).
    """

    def __init__(
        self,
        *,
        tracking_uri: str | None = None,
        experiment: str = "headrace",
        name: str | None = None,
        settings: Mapping[str, Any] | None = None,
        id_file: Path | None = None,
    ) -> None:
        super().__init__(settings=settings, id_file=id_file)
        for key, value in _HTTP.items():
            os.environ.setdefault(key, value)
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow refuses folders unless one insists
        self._mlflow = load_optional("mlflow", not_installed("mlflow", "mlflow", "trackers"))
        uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or "mlruns"
        self._uri = uri if ":" in uri else Path(uri).expanduser().absolute().as_uri()
        self._experiment, self._name = experiment, name
        self._client: Any = None
        self._id = ""

    def begin(self, settings: Mapping[str, Any], first_step: int) -> None:
        client = self._client = self._mlflow.MlflowClient(tracking_uri=self._uri)
        known = self.known_id()
        if known is not None:
            self._id = known
            client.update_run(known, status="RUNNING")
            return  # parameters may be written once
        experiment = client.get_experiment_by_name(self._experiment)
        where = experiment.experiment_id if experiment else client.create_experiment(self._experiment)
        self._id = client.create_run(where, run_name=self._name).info.run_id
        self.keep_id(self._id)
        params = [self._mlflow.entities.Param(_name(key), str(value)) for key, value in settings.items()]
        for part in _parts(params, _MOST_PARAMS):
            client.log_batch(self._id, params=part)

    def log(self, values: Mapping[str, float], step: int, phase: str = "") -> None:
        now = int(time.time() * 1000)
        metrics = [
            self._mlflow.entities.Metric(_name(key), value, now, step) for key, value in values.items()
        ]
        for part in _parts(metrics, _MOST_METRICS):
            self._client.log_batch(self._id, metrics=part)

    def log_samples(self, rows: list[dict[str, Any]], step: int, split: str) -> None:
        self._client.log_dict(self._id, {"samples": rows}, f"samples/{split}_{step:06d}.json")

    def end(self, summary: Mapping[str, Any] | None) -> None:
        if summary is not None:
            self._client.log_dict(self._id, dict(summary), "summary.json")
        self._client.set_terminated(self._id, status="KILLED" if summary is None else "FINISHED")


def _name(key: str) -> str:
    return _NOT_IN_A_NAME.sub("_", key)


def _parts(items: list[Any], most: int) -> Iterator[list[Any]]:
    return (items[i : i + most] for i in range(0, len(items), most))

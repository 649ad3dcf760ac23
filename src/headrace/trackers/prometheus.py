"""A run's metrics for Prometheus: an endpoint that it reads while the run goes on."""

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.algorithms.observer import StepRecord
from headrace.errors import ConfigError
from headrace.metric_names import meaning_of
from headrace.trackers.base import Tracker
from headrace.utils.addresses import is_of_the_host
from headrace.utils.targets import load_optional

if TYPE_CHECKING:
    from prometheus_client import Metric

_NOT_IN_A_NAME = re.compile(r"[^a-zA-Z0-9_]+")
_COUNTED = ("tokens", "time_s/", "bytes/")
_GAUGES = {
    "step": "steps that are over",
    "steps_planned": "steps of the whole run",
    "checkpoint_step": "step of the newest checkpoint of this session",
    "last_step_timestamp_seconds": "unix time at which the last step was over",
}
_COUNTERS = {
    "tokens": ("tokens of the steps of this session, prompts included", ()),
    "stage_seconds": ("seconds of each stage in this session", ("stage",)),
    "column_bytes": ("bytes of each column that went through the data plane in this session", ("column",)),
}


def prometheus_name(metric: str) -> str:
    """Return a metric's name there: `headrace_reward_mean` for `reward/mean`."""
    return f"headrace_{_NOT_IN_A_NAME.sub('_', metric)}"


class PrometheusTracker(Tracker):
    """Answers `http://ADDRESS:PORT/metrics` from a thread of its own until it is closed.

    Each metric of the run is a gauge; tokens, seconds by stage and bytes by column are counters. All have the label
    `run`. Port 0 takes any free one; `port` says which.

    Raises:
        ConfigError: prometheus-client is not installed, or the port is taken.
    """

    def __init__(
        self,
        port: int,
        *,
        address: str = "127.0.0.1",
        run: str = "",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(settings=settings)
        remedy = "pip install 'headrace[prometheus]', or leave the key out"
        refusal = f"logging.prometheus_port={port}: prometheus-client is not installed; {remedy}"
        self._client = prometheus_client = load_optional("prometheus_client", refusal)
        self._run = run
        self._gauges: dict[str, float] = {}
        self._counters: dict[str, dict[tuple[str, ...], float]] = {
            name: defaultdict(float) for name in _COUNTERS
        }
        registry = prometheus_client.CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = prometheus_client.start_http_server(
                port, addr=address, registry=registry
            )
        except (OSError, OverflowError) as error:
            remedy = "another port, or 0 for any free one"
            if is_of_the_host(error):
                remedy = "logging.prometheus_address to an address of this machine"
            raise ConfigError(
                f"logging.prometheus_port={port}: cannot listen on {address} ({error}); set {remedy}"
            ) from error
        self.port = int(self._server.server_port)

    def collect(self) -> Iterable["Metric"]:
        """Yield what there is now, as prometheus-client asks for it."""
        for name, value in list(self._gauges.items()):
            text = _GAUGES.get(name) or meaning_of(name)
            gauge = self._client.Metric(prometheus_name(name), text, "gauge")
            gauge.add_sample(gauge.name, {"run": self._run}, value)
            yield gauge
        for name, (text, labels) in _COUNTERS.items():
            counter = self._client.Metric(prometheus_name(name), text, "counter")
            for given, value in list(self._counters[name].items()):
                counter.add_sample(
                    f"{counter.name}_total", {"run": self._run, **dict(zip(labels, given))}, value
                )
            yield counter

    def on_start(self, *, total_steps: int, first_step: int, info: dict[str, str]) -> None:
        super().on_start(total_steps=total_steps, first_step=first_step, info=info)
        self._gauges |= {"step": first_step - 1.0, "steps_planned": float(total_steps)}

    def on_step(self, record: StepRecord) -> None:
        super().on_step(record)
        self._counters["tokens"][()] += record.tokens
        for stage, seconds in record.timings_s.items():
            self._counters["stage_seconds"][stage,] += seconds
        for column, size in record.bytes_by_column.items():
            self._counters["column_bytes"][column,] += size
        self._gauges |= {"step": float(record.step), "last_step_timestamp_seconds": time.time()}

    def on_checkpoint(self, step: int, path: Path) -> None:
        self._gauges["checkpoint_step"] = float(step)

    def log(self, values: Mapping[str, float], step: int, phase: str = "") -> None:
        self._gauges |= {name: value for name, value in values.items() if not name.startswith(_COUNTED)}

    def close(self) -> None:
        super().close()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

"""A run as OpenTelemetry spans: the run, its steps, their stages, and what they ask of the store."""

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headrace.algorithms.observer import GREEDY_ACCURACY, LOSS, REWARD, StepRecord
from headrace.errors import ConfigError
from headrace.trackers.base import Tracker, not_installed

if TYPE_CHECKING:
    from opentelemetry.trace import Span, TracerProvider

    from headrace.data_plane.observability import DataPlaneEvent

_SHOWN = (REWARD, LOSS, GREEDY_ACCURACY)


class OpenTelemetryTracker(Tracker):
    """Makes spans `run`, `step`, one per stage, and one per store operation of this process.

    They go to `provider`; without it to the one that the process has, or else by OTLP over HTTP to where the standard
    variables say (OTEL_EXPORTER_OTLP_ENDPOINT and its kin).

    Raises:
        ConfigError: OpenTelemetry's SDK, or the OTLP exporter that has to be made, is not installed.
    """

    def __init__(
        self,
        *,
        run: str = "",
        provider: "TracerProvider | None" = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(settings=settings)
        try:
            self._own, found = _find_provider(provider, run)
            from opentelemetry import trace  # noqa: PLC0415  (optional)
        except ModuleNotFoundError as error:
            raise ConfigError(not_installed("opentelemetry", str(error.name), "opentelemetry")) from error
        from headrace.data_plane.observability import listeners  # noqa: PLC0415  (imports torch: seconds)

        self._listeners = listeners
        self._trace = trace
        self._tracer = found.get_tracer("headrace")
        self._run = run
        self._open: dict[str, Span] = {}
        self._step = 0
        self._lock = threading.RLock()  # the store is asked from threads of its users

    def begin(self, settings: Mapping[str, Any], first_step: int) -> None:
        self._begin("run", {"headrace.run": self._run, "headrace.first_step": first_step})
        self._listeners.append(self._on_store)

    def on_stage(self, step: int, stage: str) -> None:
        with self._lock:
            self._end("stage")
            if step > self._step and "step" not in self._open:
                self._begin("step", {"headrace.step": step}, "run")
            self._begin("stage", {"headrace.step": step}, "step", "run", name=stage)

    def on_step(self, record: StepRecord) -> None:
        super().on_step(record)
        with self._lock:
            self._end("stage")
            values = {name: record.metrics[name] for name in _SHOWN if name in record.metrics}
            self._end("step", {"headrace.tokens": record.tokens, **values})
            self._step = record.step

    def on_notice(self, step: int, message: str) -> None:
        if "run" in self._open:
            self._open["run"].add_event(message, {"headrace.step": step})

    def end(self, summary: Mapping[str, Any] | None) -> None:
        if self._on_store in self._listeners:
            self._listeners.remove(self._on_store)
        with self._lock:
            self._end("stage")
            self._end("step")
            self._end("run", {"headrace.completed": bool(summary and summary.get("completed"))})
        if self._own is not None:
            self._own.shutdown()

    def _on_store(self, event: "DataPlaneEvent") -> None:
        ended = time.time_ns()
        given = {
            "headrace.partition": event.partition,
            "headrace.rows": event.rows,
            "headrace.bytes": event.bytes,
            "headrace.columns": tuple(event.columns),
        }
        with self._lock:
            span = self._tracer.start_span(
                f"store.{event.op}",
                self._inside("stage", "step", "run"),
                attributes=given,
                start_time=ended - int(event.seconds * 1e9),
            )
        if event.status != "ok":
            span.set_status(self._trace.StatusCode.ERROR, event.status)
        span.end(ended)

    def _inside(self, *places: str) -> Any:
        """Return the context of the innermost span that is open."""
        parent = next((self._open[place] for place in places if place in self._open), None)
        return None if parent is None else self._trace.set_span_in_context(parent)

    def _begin(self, place: str, given: Mapping[str, Any], *parents: str, name: str | None = None) -> None:
        self._open[place] = self._tracer.start_span(name or place, self._inside(*parents), attributes=given)

    def _end(self, place: str, given: Mapping[str, Any] | None = None) -> None:
        span = self._open.pop(place, None)
        if span is not None:
            span.set_attributes(dict(given or {}))
            span.end()


def _find_provider(given: Any, run: str) -> tuple[Any, Any]:
    """Return a provider that was made here and has to be shut down, if one was, and the provider to use."""
    from opentelemetry import trace  # noqa: PLC0415  (optional)
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415  (optional)
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415  (optional)

    found = given or trace.get_tracer_provider()
    if isinstance(found, TracerProvider):
        return None, found
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415  (optional)
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415  (optional)

    made = TracerProvider(resource=Resource.create({"service.name": "headrace", "service.instance.id": run}))
    made.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return made, made

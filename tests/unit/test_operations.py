"""What a run offers to Prometheus, Grafana and OpenTelemetry, seen from their side while a tiny run goes on."""

import gzip
import json
import re
import socket
import threading
import urllib.request
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from headrace.algorithms.observer import RunObserver, StepRecord
from headrace.config import RecipeConfig
from headrace.data_plane import build_data_plane_client
from headrace.data_plane.observability import listeners
from headrace.errors import ConfigError, DataPlaneError
from headrace.metric_names import METRICS, meaning_of
from headrace.trackers import OpenTelemetryTracker, PrometheusTracker, RunTrackers
from headrace.trackers.prometheus import prometheus_name
from headrace.training import run_recipe
from headrace.utils.run_directory import RunDirectory
from tiny_recipe import tiny_recipe

pytest.importorskip("prometheus_client", reason="needs headrace[prometheus]")
sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="needs headrace[opentelemetry]")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest  # noqa: E402
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402

MONITORING = Path(__file__).parents[2] / "examples" / "monitoring"
DASHBOARD: dict[str, Any] = json.loads((MONITORING / "grafana.json").read_text())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Scraper(RunObserver):
    """Reads the endpoint after each step, as Prometheus does."""

    port: int
    pages: list[str] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)

    def on_step(self, record: StepRecord) -> None:
        self.records.append(record)
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5) as answer:
            self.pages.append(answer.read().decode())


@dataclass
class Seen:
    recipe: RecipeConfig
    scraper: Scraper
    spans: list[Any]
    by_id: dict[int, Any]

    def value(self, name: str, page: int = -1) -> float:
        (found,) = re.findall(rf"^{re.escape(name)} (\S+)$", self.scraper.pages[page], re.MULTILINE)
        return float(found)

    def parent(self, span: Any) -> str | None:
        return None if span.parent is None else str(self.by_id[span.parent.span_id].name)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """A run of two steps over the local store, scraped and traced."""
    port = free_port()
    recipe = tiny_recipe(
        tmp_path_factory.mktemp("runs") / "mine",
        grpo={"max_num_steps": 2},
        data_plane={"enabled": True, "impl": "local", "store_name": "operations"},
        logging={"prometheus_port": port},
    )
    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    scraper = Scraper(port)
    run_recipe(recipe, [OpenTelemetryTracker(run="mine", provider=provider), scraper])
    spans = list(exporter.get_finished_spans())
    return Seen(recipe, scraper, spans, {span.context.span_id: span for span in spans})


def test_each_metric_of_the_step_is_a_gauge_with_its_meaning(seen: Seen) -> None:
    record = seen.scraper.records[-1]
    for metric, value in record.metrics.items():
        assert seen.value(f'{prometheus_name(metric)}{{run="mine"}}') == pytest.approx(value)
        assert f"# HELP {prometheus_name(metric)} {meaning_of(metric)}" in seen.scraper.pages[-1]
    assert seen.value('headrace_step{run="mine"}') == 2
    assert seen.value('headrace_steps_planned{run="mine"}') == 2


def test_tokens_seconds_and_bytes_are_counted_over_the_steps(seen: Seen) -> None:
    first, second = seen.scraper.records
    assert seen.value('headrace_tokens_total{run="mine"}', 0) == first.tokens
    assert seen.value('headrace_tokens_total{run="mine"}') == first.tokens + second.tokens
    stage = 'headrace_stage_seconds_total{run="mine",stage="train"}'
    assert seen.value(stage) == pytest.approx(first.timings_s["train"] + second.timings_s["train"])
    column = 'headrace_column_bytes_total{column="input_ids",run="mine"}'
    assert seen.value(column) == first.bytes_by_column["input_ids"] + second.bytes_by_column["input_ids"]


def test_the_endpoint_ends_with_the_run(seen: Seen) -> None:
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{seen.scraper.port}/metrics", timeout=5)


def test_an_address_of_another_machine_is_told_as_such(tmp_path: Path) -> None:
    logging = {"prometheus_port": 0, "prometheus_address": "203.0.113.77"}
    recipe = tiny_recipe(tmp_path / "run", logging=logging)
    opened = RunDirectory.open(tmp_path / "run", recipe_text="")
    with (
        opened as run,
        pytest.raises(ConfigError, match=r"set logging.prometheus_address to an address of this"),
    ):
        RunTrackers(recipe, run)


def test_a_port_that_is_taken_is_an_error_before_the_run_begins(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        recipe = tiny_recipe(tmp_path / "run", logging={"prometheus_port": taken.getsockname()[1]})
        with (
            RunDirectory.open(tmp_path / "run", recipe_text="") as run,
            pytest.raises(
                ConfigError, match=r"prometheus_port=\d+: cannot listen on 127.0.0.1 .*another port"
            ),
        ):
            RunTrackers(recipe, run)


def test_a_run_with_port_0_takes_a_free_one() -> None:
    tracker = PrometheusTracker(0, run="mine")
    tracker.log({"validation/pass@4": 0.5}, 3)
    with urllib.request.urlopen(f"http://127.0.0.1:{tracker.port}/metrics", timeout=5) as answer:
        assert 'headrace_validation_pass_4{run="mine"} 0.5' in answer.read().decode()
    tracker.close()
    tracker.close()


def test_every_query_of_the_dashboard_asks_for_what_a_run_gives(seen: Seen) -> None:
    asked = {target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())}
    names = {name for query in asked for name in re.findall(r"headrace_\w+", query)}
    given = set(re.findall(r"^(headrace_\w+)\{", seen.scraper.pages[-1], re.MULTILINE))
    # Of validations and of checkpoints, which that run has none of before its last scrape.
    later = {prometheus_name(m) for m in METRICS if m.startswith("validation/")} | {
        "headrace_checkpoint_step"
    }
    assert names - given <= later
    assert len(names) > 20
    for labels in re.findall(r"\{([^}]*)\}", " ".join(asked)):
        assert labels == 'run=~"$run"'


def test_the_panels_of_the_dashboard_have_a_place_each_and_a_title() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)
    assert all(panel["title"] for panel in DASHBOARD["panels"])
    (job,) = yaml.safe_load((MONITORING / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"][0]["targets"] == ["127.0.0.1:9400"]


def test_the_run_holds_its_steps_and_a_step_its_stages(seen: Seen) -> None:
    (run,) = (span for span in seen.spans if span.name == "run")
    steps = [span for span in seen.spans if span.name == "step"]
    assert [span.attributes["headrace.step"] for span in steps] == [1, 2]
    assert {seen.parent(span) for span in steps} == {"run"}
    assert run.attributes["headrace.completed"] is True
    stages = [s for s in seen.spans if s.parent and s.parent.span_id == steps[0].context.span_id]
    in_step = [span.name for span in sorted(stages, key=lambda span: span.start_time)]
    assert in_step == ["rollout", "prev_logprobs", "advantages", "train", "update_weights"]
    for stage, record in zip(in_step, [seen.scraper.records[0]] * 5):
        (span,) = (s for s in stages if s.name == stage)
        # From one announcement to the next, which is no less than the stage itself.
        assert (span.end_time - span.start_time) / 1e9 >= record.timings_s[stage] * 0.9


def test_store_operations_lie_in_their_stages_with_rows_and_columns(seen: Seen) -> None:
    puts = [span for span in seen.spans if span.name == "store.put_samples"]
    rollouts = [span for span in puts if seen.parent(span) == "rollout"]
    assert len(rollouts) == 2
    assert rollouts[0].attributes["headrace.rows"] == seen.recipe.samples_per_step
    assert {"input_ids", "token_mask", "generation_logprobs"} <= set(
        rollouts[0].attributes["headrace.columns"]
    )
    assert {seen.parent(s) for s in puts} >= {"rollout", "prev_logprobs", "advantages"}
    for span in puts:
        stage = seen.by_id[span.parent.span_id]
        assert stage.start_time <= span.start_time <= span.end_time <= stage.end_time
    assert listeners == []


def test_an_operation_that_fails_is_an_error_span() -> None:
    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with OpenTelemetryTracker(provider=provider) as tracker:
        tracker.on_start(total_steps=1, first_step=1, info={})
        config = {"enabled": True, "impl": "local", "observability": {"enabled": True}, "store_name": "fails"}
        store = build_data_plane_client(config, bootstrap=True)
        with pytest.raises(DataPlaneError):
            store.get_samples(["nobody"], "nowhere", ["input_ids"])
        store.close()
    failed, run = exporter.get_finished_spans()
    assert (failed.name, failed.status.description) == ("store.get_samples", "error")
    assert failed.parent.span_id == run.context.span_id


class Collector(BaseHTTPRequestHandler):
    """Takes spans over HTTP, as an OpenTelemetry collector does."""

    taken: ClassVar[list[ExportTraceServiceRequest]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        packed = self.headers.get("Content-Encoding") == "gzip"
        self.taken.append(ExportTraceServiceRequest.FromString(gzip.decompress(body) if packed else body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def short_run(folder: Path) -> None:
    """Tell a recipe's trackers of a run of one stage."""
    recipe = tiny_recipe(folder, logging={"trackers": ["opentelemetry"]})
    with RunDirectory.open(folder, recipe_text="") as run, RunTrackers(recipe, run) as trackers:
        trackers.on_start(total_steps=1, first_step=1, info={})
        trackers.on_stage(1, "rollout")


def test_a_tracker_that_is_named_in_a_recipe_sends_its_spans_to_the_collector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        short_run(tmp_path / "mine")
        server.shutdown()
    (found,) = (part for request in Collector.taken for part in request.resource_spans)
    about = {item.key: item.value.string_value for item in found.resource.attributes}
    assert (about["service.name"], about["service.instance.id"]) == ("headrace", "mine")
    assert {span.name for scope in found.scope_spans for span in scope.spans} == {"run", "step", "rollout"}

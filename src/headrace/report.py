"""A run read back from its directory: totals for the final table, and the plots."""

import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from headrace.algorithms.observer import GENERATION_KL, GRAD_NORM, LAG, LOSS, REWARD, ROUTE_AGREEMENT
from headrace.dashboard.palette import colour
from headrace.errors import ConfigError
from headrace.run_tables import HELD_OUT, RunTotals, in_step_order
from headrace.utils import atomic
from headrace.utils.renamed import with_new_metrics
from headrace.utils.run_directory import RunDirectory, read_log

Record = Mapping[str, Any]

_TEXTS = ("kind", "phase")
_LINES = {
    REWARD: "mean reward",
    LOSS: "loss",
    GRAD_NORM: "gradient norm",
    GENERATION_KL: "k3 estimate of KL(generator || trainer)",
    LAG: "steps that a sample's weights lag behind, mean",
    ROUTE_AGREEMENT: "routes that the trainer would have chosen too",
}
_MARKERS = {"greedy": "o", "sampled": "s"}
_TIME, _BYTES = "time_s/", "bytes/"
_MOST_BARS = 100
_SMOOTHING = 0.8
_ABOUT = f"average of about {round(1 / (1 - _SMOOTHING))} steps"


def read_metrics(run_dir: Path) -> list[Record]:
    """Return the lines of a run's metrics.jsonl."""
    run = RunDirectory(run_dir)
    path = run.metrics_path
    records: list[Record] = []
    for line in () if run.is_marked and not path.exists() else read_log(path):
        for key, value in line.value.items():
            if key not in _TEXTS and not isinstance(value, int | float | None):
                raise ConfigError(
                    f"{path}, line {line.number}: {key} is {value!r:.40}, not a number; mend or remove the line"
                )
        records.append(with_new_metrics(line.value))
    if not records:
        raise ConfigError(f"{path}: no step has been recorded yet; try again when the run has made one")
    return records


def run_totals(records: Sequence[Record]) -> RunTotals:
    totals = RunTotals()
    for record in _of_kind(records, "step"):
        totals.add(_part(record, _TIME), _part(record, _BYTES), record.get("tokens", 0))
    return totals


def write_report(run_dir: Path) -> Path:
    path = RunDirectory(run_dir).report_path
    _save(draw_report(read_metrics(run_dir), str(run_dir)), path)
    return path


def draw_report(records: Sequence[Record], title: str) -> Any:
    """Return a figure of rewards, held-out results, loss, gradient norm, KL to the trainer, routes, time and bytes.

    What the run has not recorded has no panel.
    """
    figure = _new_figure(width=11.0, height=11.0)
    panels = _panels(records)
    # Rows of their own, so that the legends beside bars take no room from the others.
    pairs = [panels[i : i + 2] for i in range(0, len(panels), 2)]
    for row, pair in zip(figure.subfigures(len(pairs), 1, squeeze=False)[:, 0], pairs):
        for axis, draw in zip(row.subplots(1, len(pair), squeeze=False)[0], pair):
            draw(axis)
    heading = f"{title}\nthin lines: each step; thick lines: {_ABOUT}"
    figure.suptitle(_as_text(heading), fontsize=10, x=0.01, ha="left", color="#777777")
    return figure


def _panels(records: Sequence[Record]) -> list[Callable[[Any], object]]:
    drawn: list[Callable[[Any], object]] = []
    if any(_series(records, "validation", name)[0] for names in HELD_OUT.values() for name in names):
        drawn.append(partial(_draw_held_out, records=records))
    for name, label in _LINES.items():
        if _series(records, "step", name)[0]:
            drawn.append(partial(_draw_line, records=records, name=name, label=label))
    # Reward first, held-out results beside it.
    drawn[:2] = reversed(drawn[:2])
    for prefix, draw in ((_TIME, _draw_times), (_BYTES, _draw_bytes)):
        if any(values for _, values in _parts(records, prefix)):
            drawn.append(partial(draw, records=records))
    return drawn or [partial(_draw_line, records=records, name=REWARD, label=_LINES[REWARD])]


def draw_reward_plot(run_dir: Path, path: Path) -> None:
    records = read_metrics(run_dir)
    figure = _new_figure(width=7.5, height=3.6)
    axis = figure.subplots()
    _draw_line(axis, records, REWARD, _LINES[REWARD])
    kind = _draw_held_out(axis, records)
    axis.set_title(f"reward and held-out {kind}", loc="left", fontsize=10)
    axis.legend(frameon=False, fontsize=9, loc="lower right")
    _save(figure, path)


def _draw_held_out(axis: Any, records: Sequence[Record]) -> str:
    """Draw accuracies or, of an environment without verdicts, rewards; return which."""
    measured = (
        k for k, names in HELD_OUT.items() if any(_series(records, "validation", n)[0] for n in names)
    )
    kind = next(measured, "reward")
    for name, how in HELD_OUT[kind].items():
        steps, values = _series(records, "validation", name)
        if steps:
            look = {"marker": _MARKERS[how], "markersize": 4, "linewidth": 1.5, "clip_on": False}
            axis.plot(steps, values, color=colour(name), label=f"{how} {kind}", **look)
    if kind == "accuracy":
        axis.set_ylim(top=max(1.05, axis.get_ylim()[1]))
    _finish(axis, f"held-out {kind}", axis.lines)
    if axis.lines:
        axis.legend(frameon=False, fontsize=9, loc="lower right")
    return kind


def _draw_line(axis: Any, records: Sequence[Record], name: str, label: str) -> None:
    steps, values = _series(records, "step", name)
    marker = "o" if len(steps) == 1 else None
    axis.plot(steps, values, color=colour(name), alpha=0.3, linewidth=1, label=f"{label}, each step")
    axis.plot(
        steps, _smoothed(values), color=colour(name), linewidth=2, marker=marker, label=f"{label}, {_ABOUT}"
    )
    _finish(axis, label, steps)


def _draw_times(axis: Any, records: Sequence[Record]) -> None:
    rows = _parts(records, _TIME)
    names = in_step_order({name: 0 for _, values in rows for name in values})
    _draw_stack(axis, rows, names)
    _finish(axis, "seconds per step", names)


def _draw_bytes(axis: Any, records: Sequence[Record]) -> None:
    rows = _parts(records, _BYTES)
    largest = max((sum(values.values()) for _, values in rows), default=0)
    unit, factor = ("kB", 1e3) if largest < 1e6 else ("MB", 1e6)
    scaled = [(step, {name: size / factor for name, size in values.items()}) for step, values in rows]
    sums = run_totals(records).column_bytes
    names = sorted(sums, key=lambda name: -sums[name])
    _draw_stack(axis, scaled, names)
    _finish(axis, f"{unit} through the data plane per step", names)


def _draw_stack(axis: Any, rows: Sequence[tuple[int, Mapping[str, float]]], order: Sequence[str]) -> None:
    """Draw bars of stacked values, at most `_MOST_BARS`: a long run is averaged over equal spans of steps."""
    span = -(-len(rows) // _MOST_BARS)
    spans = [rows[i : i + span] for i in range(0, len(rows), span)] if span else []
    middles = [sum(step for step, _ in part) / len(part) for part in spans]
    bottom = [0.0] * len(spans)
    for name in order:
        heights = [sum(values.get(name, 0.0) for _, values in part) / len(part) for part in spans]
        look = {"color": colour(name), "edgecolor": "white"}
        axis.bar(middles, heights, bottom=bottom, width=span, label=_as_text(name), linewidth=0, **look)
        bottom = [low + height for low, height in zip(bottom, heights)]
    if order:
        # Beside the bars: on them it would hide the tall ones. Many entries are small, to end where the bars do.
        small = {"fontsize": min(8.0, 95 / len(order)), "labelspacing": 0.25}
        axis.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.02), reverse=True, **small)


def _as_text(name: str) -> str:
    """Keep matplotlib from reading formulas between the dollar signs of a path or a name."""
    return name.replace("$", r"\$")


def _finish(axis: Any, title: str, drawn: Sequence[object]) -> None:
    axis.set_title(title, loc="left", fontsize=10)
    axis.set_xlabel("step", fontsize=9)
    axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", alpha=0.25)
    axis.set_axisbelow(True)
    if not drawn:
        axis.text(0.5, 0.5, "nothing recorded", transform=axis.transAxes, ha="center", color="#888888")


def _new_figure(width: float, height: float) -> Any:
    # Without pyplot: no global state, and no display is ever opened.
    from matplotlib.figure import Figure  # noqa: PLC0415  (slow, and only for plots)

    return Figure(figsize=(width, height), dpi=110, layout="constrained")


def _save(figure: Any, path: Path) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    atomic.write_bytes(path, buffer.getvalue())


def _of_kind(records: Sequence[Record], kind: str) -> list[Record]:
    return [record for record in records if record.get("kind") == kind]


def _part(record: Record, prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in record.items() if key.startswith(prefix)}


def _parts(records: Sequence[Record], prefix: str) -> list[tuple[int, dict[str, Any]]]:
    return [(record["step"], _part(record, prefix)) for record in _of_kind(records, "step")]


def _series(records: Sequence[Record], kind: str, name: str) -> tuple[list[int], list[float]]:
    points = [(r["step"], r[name]) for r in _of_kind(records, kind) if r.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _smoothed(values: Sequence[float], weight: float = _SMOOTHING) -> list[float]:
    """Return the exponential moving average, with the bias of the first values taken out."""
    average, norm, result = 0.0, 0.0, []
    for value in values:
        average = weight * average + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        result.append(average / norm)
    return result

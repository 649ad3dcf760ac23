"""Draws the plots of `docs/performance.md` and renews its tables, from the results files.

headrace bench --save && python benchmarks/plot.py
"""

import fnmatch
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tables
from cells import Report, Reports, load, number
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

DOCS = Path(__file__).parents[1] / "docs"
BLUE, SKY, GREEN, ORANGE, RED = "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00"
PINK, BLACK, GREY = "#CC79A7", "#000000", "#8c8c8c"
"""Okabe and Ito's colours, which colour-blind readers tell apart; headrace is blue."""
PACKING = {
    "from ragged": ("headrace, ragged rows", SKY),
    "from padded": ("headrace, padded rows", BLUE),
    "NumPy loop": ("NumPy loop over padded rows", ORANGE),
    "as_nested_tensor of slices": ("as_nested_tensor of padded rows", RED),
}
PADDING = {
    "materialize": ("headrace", BLUE),
    "NumPy loop": ("NumPy loop over rows", ORANGE),
    "to_padded_tensor": ("to_padded_tensor", RED),
}
_PLAIN = {"facecolor": "white", "edgecolor": "none", "pad": 0.4}
"""What keeps lines from crossing a number."""
Targets = Sequence[tuple[float, str]]


def log_axis(axes: Axes, values: Sequence[float], *, along: str) -> None:
    """Make an axis logarithmic, with plain numbers at every power of ten, and room for labels above the bars."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values) * 1.5))
    ticks = [10.0**power for power in range(low, high + 1)]
    axis, scale, limit = (
        (axes.yaxis, axes.set_yscale, axes.set_ylim)
        if along == "y"
        else (axes.xaxis, axes.set_xscale, axes.set_xlim)
    )
    scale("log")
    axis.set_ticks(ticks, [f"{tick:,g}" if tick < 1000 else f"{tick:,.0f}" for tick in ticks])
    axis.set_minor_locator(NullLocator())
    limit(ticks[0], ticks[-1])
    axis.grid(color="black", alpha=0.12, linewidth=0.6)
    axes.set_axisbelow(True)


def codec_panel(
    axes: Axes, report: Report, path: str, ways: dict[str, tuple[str, str]], targets: Targets
) -> None:
    """Draw the copies of every way, batch by batch, each bar with its number."""
    cases = {batch: report["measurements"][f"{batch}: {path}"] for batch in tables.batches(report)}
    width, every = 0.84 / len(ways), []
    for place, (way, (label, colour)) in enumerate(ways.items()):
        found = [case[way]["ratio"] if way in case else math.nan for case in cases.values()]
        at = [batch + (place - (len(ways) - 1) / 2) * width for batch in range(len(cases))]
        bars = axes.bar(at, found, width * 0.94, label=label, color=colour)
        axes.bar_label(
            bars, ["" if math.isnan(x) else number(x) for x in found], fontsize=7, padding=2, bbox=_PLAIN
        )
        every += [value for value in found if not math.isnan(value)]
    log_axis(axes, every, along="y")
    axes.axhline(1, color="black", linewidth=0.9)
    for target, label in targets:
        axes.axhline(target, color="black", linewidth=0.9, linestyle=":")
        axes.annotate(f" {label}", (1, target), xycoords=("axes fraction", "data"), fontsize=7, va="center")
    axes.set_xticks(range(len(cases)), list(cases), fontsize=8)
    axes.set_ylabel("copies of the bytes (log)", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.legend(fontsize=7, loc="upper left", ncols=2, framealpha=1)


def draw_codec(reports: Reports) -> Figure:
    """Draw what packing and padding cost."""
    figure = Figure(figsize=(9, 7), layout="constrained")
    upper, lower = figure.subplots(2, 1)
    packing = ((1.5, "target, ragged: 1.5"), (2.5, "target, padded: 2.5"))
    codec_panel(upper, reports["codec"], "pack", PACKING, packing)
    upper.set_title("Packing: rows to their wire form, in copies of the ragged bytes", fontsize=9)
    codec_panel(lower, reports["codec"], "pad", PADDING, ((2, "target: 2"),))
    lower.set_title("Materializing: wire form to padded tensors, in copies of the padded bytes", fontsize=9)
    return figure


def draw_stores(reports: Reports) -> Figure:
    """Draw what handing 512 rows over takes, by store, and how that grows with the rows."""
    figure = Figure(figsize=(9, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(5, 4))
    store_panel(left, reports)
    if "store_scale" in reports:
        growth_panel(right, reports["store_scale"])
    else:
        right.set_axis_off()
    return figure


def store_panel(axes: Axes, reports: Reports) -> None:
    """Draw put and get of every way as pairs of bars."""
    found = {}
    if local := reports.get("local_store"):
        found["local (one process)"] = [float(x) for x in tables.local_row(local)[1:3]]
    for label, name, own in tables.STORES:
        if name in reports:
            cases = (reports[name]["measurements"][f"512 rows: {path}"] for path in ("put", "get"))
            found[label.replace("`", "")] = [case[own]["median_ms"] for case in cases]
    places = range(len(found))
    for number_, (kind, colour) in enumerate((("put", BLUE), ("get", ORANGE))):
        values = [pair[number_] for pair in found.values()]
        bars = axes.barh([place + (number_ - 0.5) * 0.4 for place in places], values, 0.37, color=colour)
        bars.set_label(kind)
        axes.bar_label(bars, [number(value) for value in values], fontsize=7, padding=2)
    axes.set_yticks(places, list(found), fontsize=8)
    axes.invert_yaxis()
    log_axis(axes, [value for pair in found.values() for value in pair], along="x")
    axes.set_xlabel("ms (log)", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.set_title("512 rows of five per-token columns", fontsize=9)
    axes.legend(fontsize=7, loc="center right", framealpha=1)


def growth_panel(axes: Axes, report: Report) -> None:
    """Draw put and get together over the rows of a batch, for few and for many columns."""
    shapes: dict[tuple[int, int], list[Report]] = {}
    for case, ways in report["measurements"].items():
        rows, columns = (int(word) for word in case.partition(":")[0].split() if word.isdigit())
        shapes.setdefault((columns, rows), []).append(ways)
    drawn = (
        (20, "adapter", "transfer_queue/simple, 20 columns", BLUE, "o-"),
        (1, "adapter", "transfer_queue/simple, 1 column", SKY, "s-"),
        (1, "raw jagged", "TransferQueue's own, jagged, 1 column", RED, "^--"),
        (20, "one copy", "two copies, 20 columns", GREY, "x:"),
    )
    every = []
    for columns, way, label, colour, style in drawn:
        points = [
            (rows, sum(ways[way]["median_ms"] for ways in both))
            for (count, rows), both in sorted(shapes.items())
            if count == columns and all(way in ways for ways in both)
        ]
        axes.plot(*zip(*points), style, color=colour, label=label, markersize=4, linewidth=1.3)
        every += [value for _, value in points]
    log_axis(axes, every, along="y")
    ticks = sorted({rows for columns, rows in shapes if columns in (1, 20)})
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
    axes.set_xlim(ticks[0] / 2, ticks[-1] * 2)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("rows (log)", fontsize=8)
    axes.set_ylabel("ms, put and get (log)", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.set_title("by rows and columns", fontsize=9)
    axes.legend(fontsize=7, loc="upper left", framealpha=1)


def draw_train(reports: Reports) -> Figure:
    """Draw tokens per second and memory of every way to train."""
    report = reports["train"]
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    names = list(report["measurements"]["step"])
    colours = [BLUE if name.startswith("headrace") else ORANGE for name in names]
    panels = (
        ("logprobs", "tokens_per_s", "scoring: tokens per second"),
        ("step", "tokens_per_s", "training step: tokens per second"),
        ("step", "peak_gib", "training step: peak memory, GiB"),
    )
    for axes, (kind, key, title) in zip(figure.subplots(1, 3, sharey=True), panels):
        values = [report["measurements"][kind][name][key] for name in names]
        bars = axes.barh(range(len(names)), values, 0.7, color=colours)
        axes.bar_label(bars, [number(value) for value in values], fontsize=7, padding=2)
        axes.set_xlim(0, 1.3 * max(values))
        axes.set_yticks(range(len(names)), names)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=4))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.tick_params(labelsize=8)
        axes.set_title(title, fontsize=9)
    axes.invert_yaxis()
    return figure


def draw_scale(reports: Reports) -> Figure:
    """Draw what the control plane takes of a step, by ranks."""
    curves = dict(reports["scale"]["notes"]["step_s_by_ranks"])
    ranks, measured, limit = curves.pop("ranks"), curves.pop("measured up to"), curves.pop("limit")
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    axes.axvspan(measured, ranks[-1], color="black", alpha=0.06, label="beyond what was measured")
    axes.axhline(limit, color="black", linewidth=0.9, linestyle=":", label=f"target: {limit:g} s")
    styles = ((SKY, "^-"), (ORANGE, "s-"), (RED, "o-"), (BLUE, "D--"))
    for (name, seconds), (colour, style) in zip(curves.items(), styles):
        axes.plot(ranks, seconds, style, color=colour, markersize=4, linewidth=1.3, label=name)
    axes.set_xscale("log", base=2)
    log_axis(axes, [seconds for curve in curves.values() for seconds in curve], along="y")
    ticks = [n for n in ranks[:-1] if n <= ranks[-1] / 1.5] + ranks[-1:]
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
    axes.set_xlim(ranks[0] / 1.15, ranks[-1] * 1.15)
    axes.tick_params(labelsize=8)
    axes.set_xlabel("ranks, 1,000 rows each (log)", fontsize=8)
    axes.set_ylabel("seconds per step (log)", fontsize=8)
    axes.legend(fontsize=7, loc="upper left", framealpha=1)
    return figure


def draw_learning(reports: Reports) -> Figure:
    """Draw reward and held-out accuracy of a language model that learns, task by task and by seed."""
    figure = Figure(figsize=(8, 3), layout="constrained")
    titles = {"smollm2_sums": "sums of one-digit numbers", "smollm2_needle": "who in the text likes it?"}
    for axes, (name, title) in zip(figure.subplots(1, 2, sharey=True), titles.items()):
        for (seed, run), colour in zip(reports[name]["runs"].items(), (BLUE, ORANGE)):
            axes.plot(range(1, len(run["reward"]) + 1), run["reward"], color=colour, linewidth=0.7, alpha=0.5)
            steps = [entry["step"] for entry in run["validation"]]
            for kind, key, style in (("greedy", "accuracy", "o-"), ("sampled", "sampled_accuracy", "s--")):
                values = [entry[key] for entry in run["validation"]]
                axes.plot(
                    steps, values, style, color=colour, markersize=4, linewidth=1.4, label=f"{seed}, {kind}"
                )
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("step; the thin line is the reward in training", fontsize=8)
        axes.set_ylim(0, 0.8)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.tick_params(labelsize=8)
    figure.axes[0].set_ylabel("held-out questions answered rightly", fontsize=8)
    figure.axes[0].legend(fontsize=7, loc="upper left")
    return figure


def draw_scaling(reports: Reports) -> Figure:
    """Draw tokens per second of a step over the GPUs beside the ideal line: a row per machine, a panel per model."""
    found = {name: _speeds(report) for name, report in tables.scaling_reports(reports).items()}
    rows = {
        name: [m for m in dict.fromkeys(case["model"] for case in speeds) if _can_grow(speeds, m)]
        for name, speeds in found.items()
    }
    figure = Figure(figsize=(9, 0.7 + 2.9 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), max(len(models) for models in rows.values()), squeeze=False)
    for across, (name, models) in zip(panels, rows.items()):
        for axes, model in zip(across, models):
            scaling_panel(axes, model, found[name])
        for axes in across[len(models) :]:
            axes.set_axis_off()
        across[0].set_ylabel(name.removeprefix("scaling_"), fontsize=8)
    drawn = {label: line for axes in panels.flat for line, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(drawn.values(), drawn.keys(), fontsize=7, loc="outside lower center", ncols=4)
    figure.supylabel("tokens per second of a step", fontsize=8)
    return figure


Speeds = Sequence[dict[str, Any]]
_SCALING_LINES = {
    ("headrace", "data"): (BLUE, "o-"),
    ("headrace compiled", "data"): (GREY, "o-"),
    ("headrace whole scores", "data"): (BLUE, "*-"),
    ("headrace", "tensor"): (GREEN, "s--"),
    ("headrace", "context"): (SKY, "^--"),
    ("headrace", "tensor and context"): (RED, "D--"),
    ("headrace", "experts of 2"): (PINK, "v--"),
    ("headrace", "experts of 4"): (BLACK, "v--"),
    ("transformers", "data"): (ORANGE, "x-"),
}


def _speeds(report: Any) -> Speeds:
    cases = report["notes"]["cases"].values()
    return [case for case in cases if case["kind"] == "speed" and "failed" not in case]


def _one_gpu(speeds: Speeds, model: str) -> float | None:
    ones = (c for c in speeds if (c["model"], c["gpus"], c["way"]) == (model, 1, "headrace"))
    return next((case["step_tokens_per_s"] for case in ones), None)


def _can_grow(speeds: Speeds, model: str) -> bool:
    return _one_gpu(speeds, model) is not None and any(c["model"] == model and c["gpus"] > 1 for c in speeds)


def scaling_panel(axes: Axes, model: str, speeds: Speeds) -> None:
    """Draw one model: each layout's line from one GPU on, and each other way's."""
    own = [case for case in speeds if case["model"] == model]
    counts = sorted({case["gpus"] for case in own})
    one = _one_gpu(speeds, model) or 0.0
    axes.plot(counts, [one * n for n in counts], ":", color="black", linewidth=1, label="ideal")
    for (way, layout), (colour, style) in _SCALING_LINES.items():
        points = {c["gpus"]: c["step_tokens_per_s"] for c in own if (c["way"], c["layout"]) == (way, layout)}
        if not points:
            continue
        if way == "headrace":
            points.setdefault(1, one)
        at = sorted(points)
        speed, label = [points[n] for n in at], f"{way}, {layout}"
        axes.plot(at, speed, style, color=colour, markersize=4, linewidth=1.3, label=label)
    axes.set_xticks(counts)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.tick_params(labelsize=8)
    axes.set_xlabel("GPUs", fontsize=8)
    axes.set_title(model, fontsize=9)


PLOTS: dict[str, tuple[Callable[[Reports], Figure], str]] = {
    "performance.png": (draw_codec, "codec"),
    "performance_stores.png": (draw_stores, "store_transfer_queue"),
    "performance_train.png": (draw_train, "train"),
    "performance_scaling.png": (draw_scaling, "scaling_*"),
    "performance_scale.png": (draw_scale, "scale"),
    "smollm2.png": (draw_learning, "smollm2_needle"),
}
"""Every plot, and the results file that it cannot do without; `*`: at least one of those."""


def main() -> None:
    """Renew the plots, as far as there are figures, and the page."""
    reports = load()
    for name, (draw, needed) in PLOTS.items():
        if fnmatch.filter(reports, needed):
            draw(reports).savefig(DOCS / name, dpi=120)
    tables.main()


if __name__ == "__main__":
    main()

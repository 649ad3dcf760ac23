"""Draws the plots of `docs/performance.md`, and its table, from the results files.

headrace bench --save && python benchmarks/plot.py
"""

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

FOLDER = Path(__file__).parent
DOCS = FOLDER.parent / "docs"
BEGIN, END = "<!-- figures: benchmarks/plot.py -->", "<!-- end of figures -->"
PACKING = {
    "from ragged": "headrace, from ragged rows",
    "from padded": "headrace, from padded rows",
    "NumPy loop": "NumPy loop over rows",
    "as_nested_tensor of slices": "as_nested_tensor of slices",
}
PADDING = {
    "materialize": "headrace",
    "NumPy loop": "NumPy loop over rows",
    "to_padded_tensor": "to_padded_tensor",
}


def load() -> dict[str, dict[str, Any]]:
    """Return the reports by benchmark."""
    reports = [json.loads(file.read_text()) for file in sorted((FOLDER / "results").glob("*.json"))]
    return {report["benchmark"]: report for report in reports if "benchmark" in report}


def ratios(report: dict[str, Any], path: str, way: str) -> dict[str, float]:
    """Return one way's ratio per batch; `to_padded_tensor` has been timed on one column alone."""
    found = {}
    for case, ways in report["measurements"].items():
        batch, _, measured = case.partition(": ")
        if measured.split()[0] == path and way in ways:
            found[batch] = ways[way]["ratio"]
    return found


def bars(axes: Axes, report: dict[str, Any], path: str, labels: dict[str, str], target: float) -> None:
    """Draw the copies of every way, batch by batch."""
    batches = list(ratios(report, path, "one copy"))
    width = 0.8 / len(labels)
    for number, (way, label) in enumerate(labels.items()):
        found = ratios(report, path, way)
        places = [place + (number - (len(labels) - 1) / 2) * width for place in range(len(batches))]
        axes.bar(places, [found.get(batch, float("nan")) for batch in batches], width, label=label)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.axhline(target, color="black", linewidth=0.8, linestyle=":")
    axes.set_yscale("log")
    axes.set_xticks(range(len(batches)), batches, fontsize=8)
    axes.set_ylabel("copies of the bytes (log)")
    axes.legend(fontsize=7)


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw what packing and padding cost."""
    figure = Figure(figsize=(9, 7), layout="constrained")
    upper, lower = figure.subplots(2, 1)
    bars(upper, report, "pack", PACKING, 2.5)
    upper.set_title("pack: rows to their wire form (solid: one copy, dotted: target)", fontsize=9)
    bars(lower, report, "pad", PADDING, 2.0)
    lower.set_title("materialize: wire form to padded tensors", fontsize=9)
    figure.savefig(path, dpi=120)


def draw_scale(report: dict[str, Any], path: Path) -> None:
    """Draw what the control plane takes of a step, by ranks."""
    curves = dict(report["notes"]["step_s_by_ranks"])
    ranks, measured, limit = curves.pop("ranks"), curves.pop("measured up to"), curves.pop("limit")
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    for name, seconds in curves.items():
        axes.plot(ranks, seconds, marker=".", label=name)
    axes.axhline(limit, color="black", linewidth=0.8, linestyle=":", label="5 % of a step of 300 s")
    axes.axvspan(measured, ranks[-1], color="black", alpha=0.06, label="beyond what was measured")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = ranks[:-2] + ranks[-1:]
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks], fontsize=8)
    axes.set_xlabel("ranks, 1,000 rows each")
    axes.set_ylabel("seconds per step (log)")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)


def table(reports: dict[str, dict[str, Any]]) -> str:
    """Return the figures that have a target, as Markdown."""
    lines = ["| benchmark | figure | measured | target | |", "| --- | --- | ---: | ---: | --- |"]
    for name, report in reports.items():
        for figure in report["figures"]:
            if figure["target"] is None:
                continue
            sign = "≥" if figure["relation"] == "at least" else "≤"
            verdict = "ok" if figure["ok"] else "**missed**"
            lines.append(
                f"| {name} | {figure['name']} | {figure['figure']:.3g} {figure['unit']} | "
                f"{sign} {figure['target']:g} | {verdict} |"
            )
    where = next(iter(reports.values()))["where"]
    versions = ", ".join(f"{package} {version}" for package, version in where["versions"].items())
    lines += ["", f"{where['processor']}, {where['cores']} cores, {where['threads']} thread; {versions}."]
    return "\n".join(lines)


def main() -> None:
    """Renew the picture and the table."""
    reports = load()
    draw(reports["codec"], DOCS / "performance.png")
    draw_scale(reports["scale"], DOCS / "performance_scale.png")
    page = DOCS / "performance.md"
    text = page.read_text()
    head, rest = text.split(BEGIN)
    page.write_text(f"{head}{BEGIN}\n{table(reports)}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()

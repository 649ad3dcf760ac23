"""Numbers of the results files as cells of a table: few digits, ranges, units, verdicts."""

import json
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from runner import digits_that_tell

RESULTS = Path(__file__).parent / "results"
NONE = "-"
Report = dict[str, Any]
Reports = dict[str, Report]

_COMMANDS = {
    "scaling": "python benchmarks/scaling.py --gpus 1 2",
    "codec_numpy": "HEADRACE_KERNEL=0 python benchmarks/codec.py --out benchmarks/results/codec_numpy.json",
}


def load(folder: Path = RESULTS) -> Reports:
    """Return the reports by the name of their file."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}


def command(name: str) -> str:
    """Return what writes a results file."""
    if name.startswith("scaling_"):
        return f"python benchmarks/scaling.py --out benchmarks/results/{name}.json"
    return _COMMANDS.get(name, f"headrace bench {name} --save")


def number(value: float, digits: int = 2) -> str:
    """Return a number with few digits: 0.0184, 1.2, 12, 109, 35,200."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.{max(digits, 3) if abs(value) >= 100 else digits}g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 1000 else f"{rounded:.10g}"


def spread(values: Iterable[float]) -> str:
    """Return the range of numbers: "1.4 to 20"."""
    found = sorted(values)
    ends = [number(value) for value in (found[0], found[-1])] if found else [NONE]
    return " to ".join(dict.fromkeys(ends))


def size(count: float) -> str:
    """Return bytes in decimal units: 14 kB."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{number(count)} {unit}"
        count /= 1000
    return f"{number(count)} GB"


def figures(report: Report, pattern: str) -> list[dict[str, Any]]:
    """Return the figures whose names match."""
    return [figure for figure in report["figures"] if fnmatchcase(figure["name"], pattern)]


def shown(figure: dict[str, Any]) -> str:
    """Return a figure with as many digits as tell it from its target."""
    return number(figure["figure"], digits_that_tell(figure["figure"], figure["target"], 2))


def heading(name: str, report: Report) -> str:
    """Return one line on where and from what a file was measured."""
    where = report["where"]
    gpu = report["notes"].get("hardware", {}).get("gpu")
    several = report["notes"].get("hardware", {}).get("gpus", 1)
    processor = f"{where['processor']}, {where['cores']} cores, {where['threads']} thread"
    machine = processor if gpu is None else gpu if several == 1 else f"{several} x {gpu}"
    commit = where["commit"][:7] + ("+" if where["uncommitted_changes"] else "")
    torch = where["versions"]["torch"]
    return f"*{machine}; torch {torch}; commit {commit}; load {where['load_1min']:g}; `{command(name)}`*"


def missing(name: str) -> str:
    """Return the line that stands for a table without its file."""
    return f"*Not measured yet: `{command(name)}`*"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table, the first column to the left and the others to the right."""
    lines = ["| " + " | ".join(columns) + " |", "| --- |" + " ---: |" * (len(columns) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def way(report: Report | None, case: str, name: str, key: str = "ratio") -> str:
    """Return a number of one measurement, or a dash."""
    found = report["measurements"].get(case, {}).get(name) if report else None
    return NONE if found is None else number(found[key])


def table(name: str, report: Report, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table under the line that says where it was measured."""
    return f"{heading(name, report)}\n\n{markdown(columns, rows)}"


def judged(held: Sequence[dict[str, Any]], runs: Report | None = None) -> tuple[str, str, str]:
    """Return figures of one kind, their target, and whether all meet it: in the results file, and in all its `runs`."""
    if not held:
        return NONE, "", ""
    ends = sorted(held, key=lambda figure: float(figure["figure"]))
    value = " to ".join(dict.fromkeys(shown(figure) for figure in (ends[0], ends[-1])))
    sign = "≥" if held[0]["relation"] == "at least" else "≤"
    limits = sorted(figure["target"] for figure in held)
    limit = " to ".join(dict.fromkeys(f"{target:.3g}" for target in (limits[0], limits[-1])))
    missed = dict.fromkeys(figure["name"].partition(".")[2] for figure in held if not figure["ok"])
    verdict = "**missed**" if missed else "met"
    if missed and any(figure["ok"] for figure in held):
        verdict += f" at {', '.join(missed)}"
    for figure in held:
        counts = (runs or {}).get(figure["name"], {"missed": 0})
        if counts["missed"]:
            place = f"{end} " if (end := figure["name"].partition(".")[2]) else ""
            verdict += f"; {place}**missed** in {counts['missed']} of {counts['runs']} runs"
    unit = {"x": "times"}.get(held[0]["unit"], held[0]["unit"])
    return f"{value} {unit}", f"{sign} {limit}", verdict

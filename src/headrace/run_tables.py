"""Where a run's time and bytes went: sums over steps, and the tables that show them."""

import io
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from headrace.algorithms import observer

HELD_OUT = {
    "accuracy": {observer.GREEDY_ACCURACY: "greedy", observer.SAMPLED_ACCURACY: "sampled"},
    "reward": {observer.GREEDY_REWARD: "greedy", observer.SAMPLED_REWARD: "sampled"},
}
"""What a validation is judged by, and its metrics: rewards where the environment gives no verdicts."""
_ENDS = ("before", "after")
_NAME_WIDTH, _NUMBER_WIDTH = 30, 12


class PlainTable(Table):
    """A table whose cells are text as it stands: a name with brackets is no markup."""

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        super().add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), **options)


@dataclass
class RunTotals:
    """Sums over the steps of a run: seconds by stage, bytes through the data plane by column, tokens."""

    steps: int = 0
    tokens: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    runs: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Stage -> steps in which it ran."""
    column_bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, timings_s: Mapping[str, float], bytes_by_column: Mapping[str, int], tokens: int) -> None:
        self.steps += 1
        self.tokens += tokens
        for stage, seconds in timings_s.items():
            self.seconds[stage] += seconds
            self.runs[stage] += 1
        for column, size in bytes_by_column.items():
            self.column_bytes[column] += size


def in_step_order(stages: Mapping[str, object]) -> list[str]:
    known = [stage for stage in observer.STAGES if stage in stages]
    return known + sorted(set(stages) - set(known))


def final_tables(totals: RunTotals) -> RenderableType:
    return Group(_stage_table(totals), *([_column_table(totals)] if totals.column_bytes else []))


def _stage_table(totals: RunTotals) -> Table:
    table = _table("stage", "total", "per step", "steps", "share")
    everything = sum(totals.seconds.values())

    def cells(name: str, seconds: float, steps: int) -> tuple[str, ...]:
        return name, format_seconds(seconds), format_seconds(seconds / steps if steps else 0.0), str(steps)

    for stage in in_step_order(totals.seconds):
        seconds = totals.seconds[stage]
        table.add_row(*cells(stage, seconds, totals.runs[stage]), _fraction(seconds, everything))
    table.add_row(*cells("all", everything, totals.steps), "", style="bold")
    return table


def _column_table(totals: RunTotals) -> Table:
    table = _table("column", "bytes", "per step", "per token", "share")
    everything = sum(totals.column_bytes.values())

    def cells(name: str, size: int) -> tuple[str, ...]:
        per_step = format_bytes(size / totals.steps) if totals.steps else "-"
        per_token = f"{size / totals.tokens:,.2f} B" if totals.tokens else "-"
        return name, format_bytes(size), per_step, per_token

    for column, size in sorted(totals.column_bytes.items(), key=lambda item: (-item[1], item[0])):
        table.add_row(*cells(column, size), _fraction(size, everything))
    table.add_row(*cells("all", everything), "", style="bold")
    return table


def _table(first: str, *others: str) -> Table:
    # As wide as is pleasant; on a narrow terminal the names fold and the numbers stay whole.
    width = _NAME_WIDTH + _NUMBER_WIDTH * len(others)
    table = PlainTable(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1), header_style="bold", min_width=width
    )
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def plain_table(*titles: str) -> Table:
    """Return a table of a column of names, and others of figures."""
    table = PlainTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in titles:
        table.add_column(title, justify="right" if table.columns else "left", overflow="fold")
    return table


def summary_table(summary: Mapping[str, Any]) -> RenderableType:
    """Return the result of a run: accuracy (or reward) before and after, and the other figures below."""
    kind = "accuracy" if any(summary.get(f"val_accuracy_{end}") is not None for end in _ENDS) else "reward"
    table = _table(f"held-out {kind}", *_ENDS)
    for prefix, label in ((f"val_{kind}", "greedy"), (f"val_{kind}_sampled", "sampled")):
        values = [summary.get(f"{prefix}_{end}") for end in _ENDS]
        if values != [None, None]:
            table.add_row(label, *(_result(kind, value) for value in values))
    figures = PlainTable.grid(padding=(0, 2, 0, 0))
    for key, value in summary.items():
        if not key.endswith(("_before", "_after")) and key != "completed":
            figures.add_row(key.replace("_", " "), format_number(value))
    return Group(*(part for part in (table, figures) if part.row_count))


def held_out(metrics: Mapping[str, float]) -> tuple[str, dict[str, str]]:
    """Return what a validation is judged by, `accuracy` or, without verdicts, `reward`; and its values as text.

    >>> held_out({"validation/accuracy": 0.5, "validation/reward": 0.7})
    ('accuracy', {'greedy': '50.0%'})
    """
    for kind, names in HELD_OUT.items():
        values = {how: _result(kind, metrics[name]) for name, how in names.items() if name in metrics}
        if values:
            break
    at_k = {name.removeprefix("validation/"): value for name, value in metrics.items() if "@" in name}
    # Of sets with names, each for itself.
    at_k = {name: value for name, value in at_k.items() if "/" in name} or at_k
    return kind, {**values, **{name: _result("accuracy", value) for name, value in at_k.items()}}


def metrics_table(metrics: Mapping[str, float]) -> RenderableType:
    table = _table("held-out prompts", "value")
    for name, value in metrics.items():
        table.add_row(
            name, _result("accuracy" if name.endswith("accuracy") or "@" in name else "reward", value)
        )
    return table


def _result(kind: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1%}" if kind == "accuracy" else format_number(value)


def render_text(renderable: RenderableType, width: int = 100) -> str:
    """Return what a terminal of `width` columns would show, as plain text without trailing spaces."""
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(renderable)
    return "".join(f"{line.rstrip()}\n" for line in capture.get().removesuffix("\n").split("\n"))


def format_number(value: object) -> str:
    """Return a float with four digits, as `0.1235` or `12,346`, and anything else as it prints."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def format_bytes(size: float) -> str:
    """Return a size in bytes with three digits and a decimal unit: `1.23 MB`."""
    if size < 1000:
        return f"{size:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        size /= 1000
        if size < 999.5 or unit == "TB":
            break
    digits = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{size:.{digits}f} {unit}"


def format_seconds(seconds: float) -> str:
    """Return `12.3 ms` below one second, `7.50 s` below two minutes, and clock time above."""
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 120:
        return f"{seconds:.2f} s"
    return format_clock(seconds)


def format_clock(seconds: float) -> str:
    """Return `1:15` or, above an hour, `1:02:05`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _fraction(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"

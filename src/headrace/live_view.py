"""What the live display shows: the state of a run, and its picture for a terminal."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headrace.algorithms.observer import (
    COLLECTORS_WAIT_S,
    FAILED_CALLS,
    GRAD_NORM,
    LAG,
    LOSS,
    REWARD,
    TOKENS_PER_S,
    StepRecord,
)
from headrace.run_tables import (
    PlainTable,
    RunTotals,
    format_bytes,
    format_clock,
    format_number,
    format_seconds,
    held_out,
    in_step_order,
)

_SPARKS = "▁▂▃▄▅▆▇█"
_HISTORY = 12
_ECHO = 4  # columns left free, so that the terminal's own ^C does not wrap and break the picture
_NARROWEST, _WIDE, _WIDEST = 20, 76, 110
_STAGE_BAR = 16
_RULER = Console(width=10 * _WIDEST)


@dataclass
class Pace:
    """How far a count has come, and how long the rest will take at the pace so far."""

    total: int
    first: int = 1
    """The first step of this session; more than 1 after a resume."""
    done: int = 0
    started_s: float = 0.0
    updated_s: float = 0.0

    def advance(self, done: int, now_s: float) -> None:
        self.done, self.updated_s = done, now_s

    def left_s(self, now_s: float) -> float | None:
        """Return the seconds left, None before the first step is over."""
        counted = self.done - self.first + 1
        if counted < 1:
            return None
        per_step = (self.updated_s - self.started_s) / counted
        return max(0.0, per_step * (self.total - self.done) - (now_s - self.updated_s))


@dataclass
class ViewState:
    """Everything the display shows."""

    title: str
    info: dict[str, str] = field(default_factory=dict)
    activity: str = "starting"
    """What runs now: a phase or a stage."""
    pace: Pace | None = None
    label: str = "step"
    metrics: dict[str, float] = field(default_factory=dict)
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    validation: tuple[int, dict[str, float]] | None = None
    last: StepRecord | None = None
    totals: RunTotals = field(default_factory=RunTotals)
    failed_calls: int = 0
    """Of collectors, in all steps of this session."""
    notice: str | None = None

    @property
    def about(self) -> str:
        return " · ".join(f"{key} {value}" for key, value in self.info.items())

    def add(self, record: StepRecord) -> None:
        self.metrics, self.last = dict(record.metrics), record
        self.totals.add(record.timings_s, record.bytes_by_column, record.tokens)
        self.failed_calls += int(record.metrics.get(FAILED_CALLS, 0))
        if math.isfinite(record.metrics.get(REWARD, math.nan)):
            self.rewards.append(record.metrics[REWARD])


def render(state: ViewState, now_s: float, console_width: int) -> RenderableType:
    """Return the picture of a state at a time of the monotonic clock.

    On a narrow terminal stands below what stands beside on others, or without its bars; nothing is cut off.
    """
    width = max(_NARROWEST, min(console_width - _ECHO, _WIDEST))
    is_narrow = width < _WIDE
    rows: list[RenderableType] = [_progress_lines(state, now_s, is_narrow)]
    if state.last is not None or state.metrics or state.validation:
        rows += [Text(), _columns(state, width - len("│  │"))]
    if state.notice:
        rows += [Text(), Text(state.notice, style="bold yellow")]
    about = state.about
    room = width - len("╭─  ─╮")
    # What does not fit into the frame would be cut off there.
    title, subtitle = (text if 0 < len(text) <= room else None for text in (state.title, about))
    if about and subtitle is None:
        rows += [Text(), Text(about, style="dim")]
    if state.title and title is None:
        rows.insert(0, Text(state.title, style="bold", overflow="fold"))
    return Panel(
        Group(*rows),
        title=title and Text(title, style="bold"),
        title_align="left",
        subtitle=subtitle and Text(subtitle, style="dim"),
        subtitle_align="left",
        border_style="cyan",
        padding=(0, 1),
        width=width,
    )


def _progress_lines(state: ViewState, now_s: float, is_narrow: bool) -> RenderableType:
    pace = state.pace
    if pace is None:
        return Text(state.activity)
    left = pace.left_s(now_s)
    times = f"{format_clock(now_s - pace.started_s)} gone"
    if left is not None:
        times += f", {format_clock(left)} left"
    label = Text(f"{state.label} {pace.done}/{pace.total}", style="bold")
    bar = ProgressBar(total=pace.total, completed=pace.done, complete_style="cyan", finished_style="green")
    grid = PlainTable.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    if is_narrow:
        grid.add_row(label, bar)
        return Group(grid, Text(times), Text(state.activity, style="magenta"))
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(width=20, style="magenta", no_wrap=True)
    grid.add_row(label, bar, times, state.activity)
    return grid


def _columns(state: ViewState, room: int) -> RenderableType:
    """Return metrics and stages beside each other where there is room, if need be without bars; else one below."""
    metrics = _metric_rows(state)
    if state.last is None:
        return metrics
    for bars, gap in ((True, 4), (False, 2)):
        grid = PlainTable.grid(padding=(0, gap, 0, 0))
        grid.add_row(metrics, _stage_rows(state, state.last, bars))
        if _RULER.measure(grid).maximum <= room:
            return grid
    return Group(metrics, Text(), _stage_rows(state, state.last, True))


def _named_values() -> Table:
    grid = PlainTable.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column()
    return grid


def _metric_rows(state: ViewState) -> Table:
    grid = _named_values()
    for name, label, form in (
        (REWARD, "reward", ".3f"),
        (LOSS, "loss", ".4f"),
        (GRAD_NORM, "grad norm", ".3f"),
        (TOKENS_PER_S, "tokens/s", ",.0f"),
    ):
        if name in state.metrics:
            trend = Text(sparkline(state.rewards), style="green") if name == REWARD else ""
            grid.add_row(label, format(state.metrics[name], form), trend)
    if LAG in state.metrics:
        waited = format_seconds(state.metrics.get(COLLECTORS_WAIT_S, 0.0))
        grid.add_row("lag", format(state.metrics[LAG], ".2f"), Text("steps", style="dim"))
        grid.add_row("collectors wait", waited)
    if state.failed_calls:
        grid.add_row("failed calls", str(state.failed_calls), Text("made again", style="dim"))
    for name, value in state.metrics.items() if state.label != "step" else ():
        grid.add_row(name, format_number(value))
    if state.validation is not None:
        step, values = state.validation
        kind, texts = held_out(values)
        for how, text in texts.items():
            grid.add_row(f"{how} {kind}", text, Text(f"step {step}", style="dim"))
    if state.last is not None and state.last.bytes_by_column:
        in_step = sum(state.last.bytes_by_column.values())
        in_all = sum(state.totals.column_bytes.values())
        grid.add_row("data plane", format_bytes(in_step), Text(f"{format_bytes(in_all)} in all", style="dim"))
    return grid


def _stage_rows(state: ViewState, last: StepRecord, bars: bool) -> Table:
    grid = _named_values()
    if bars:
        grid.add_column()
    grid.columns[-1].justify = "right"
    everything = sum(state.totals.seconds.values()) or 1.0
    for stage in in_step_order(state.totals.seconds):
        share = state.totals.seconds[stage] / everything
        seconds = last.timings_s.get(stage)
        bar = ProgressBar(total=1.0, completed=share, width=_STAGE_BAR, complete_style="blue", style="black")
        took = "" if seconds is None else format_seconds(seconds)
        grid.add_row(stage, took, *([bar] if bars else []), f"{share:.0%}")
    return grid


def sparkline(values: Sequence[float]) -> str:
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((value - low) * scale)] for value in values)

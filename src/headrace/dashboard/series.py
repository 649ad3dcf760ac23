"""A run's metrics.jsonl in columns, thinned to what a picture can show."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.utils.renamed import with_new_metrics

MOST_POINTS = 4000
"""Rows up to which a series is given whole; a longer one is given in parts of equal size, at most so many."""

Values = list[float | None]
_HEAD = ("kind", "step", "phase")


class Table:
    """Rows of numbers under names that may come and go; `steps` has one entry per row."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.columns: dict[str, Values] = {}

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        rows = len(self.steps)
        self.steps.append(step)
        for name, value in values.items():
            if name in _HEAD or not isinstance(value, int | float | None):
                continue
            column = self.columns.setdefault(name, [])
            column.extend([None] * (rows - len(column)))
            column.append(_short(value))

    def rows_from(self, start: int) -> dict[str, Any]:
        """Return the rows from number `start` on, as `payload` does, without thinning."""
        stop = len(self.steps)
        start = min(max(start, 0), stop)
        values = {name: _padded(column, start, stop) for name, column in self.columns.items()}
        some = {name: v for name, v in values.items() if any(x is not None for x in v)}
        return {"steps": self.steps[start:], "values": some}

    def payload(self, spread: Sequence[str] = (), most: int = MOST_POINTS) -> dict[str, Any]:
        """Return {"steps", "values": {name: [...]}}, and of a long table {"low", "high"} for the names in `spread`.

        A long table is cut into parts of `every` rows. A part is given by its last step and the means of its values.
        """
        rows = len(self.steps)
        if rows <= most:
            return self.rows_from(0)
        every = -(-rows // most)
        last = [self.steps[min(stop, rows) - 1] for stop in range(every, rows + every, every)]
        result: dict[str, Any] = {"steps": last, "values": {}, "low": {}, "high": {}, "every": every}
        for name, column in self.columns.items():
            parts = _parts(_padded(column, 0, rows), every)
            result["values"][name] = _reduced(parts, np.nansum, counts=True)
            if name in spread:
                result["low"][name] = _reduced(np.where(np.isnan(parts), np.inf, parts), np.min)
                result["high"][name] = _reduced(np.where(np.isnan(parts), -np.inf, parts), np.max)
        return result


class Metrics:
    """The three kinds of lines of metrics.jsonl: steps, validations, and phases before the first step."""

    def __init__(self) -> None:
        self.steps, self.validations, self.phases = Table(), Table(), Table()
        self.damaged = 0

    def add(self, record: Any) -> None:
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            self.damaged += 1
            return
        kinds = {"step": self.steps, "validation": self.validations, "phase": self.phases}
        table = kinds.get(str(record.get("kind")))
        if table is not None:
            table.add(record["step"], with_new_metrics(record))

    @property
    def counts(self) -> tuple[int, int, int]:
        return len(self.steps.steps), len(self.validations.steps), len(self.phases.steps)


def _padded(column: Values, start: int, stop: int) -> Values:
    part = column[start:stop]
    return part + [None] * (stop - start - len(part))


def _parts(values: Values, every: int) -> npt.NDArray[np.float64]:
    """Return (parts, every), NaN where there is no value."""
    flat = np.array(values, dtype=np.float64)
    short = -len(flat) % every
    return np.concatenate([flat, np.full(short, np.nan)]).reshape(-1, every)


def _reduced(parts: npt.NDArray[np.float64], how: Any, *, counts: bool = False) -> Values:
    values = how(parts, axis=1)
    if counts:
        present = (~np.isnan(parts)).sum(axis=1)
        values = np.where(present > 0, values / np.maximum(present, 1), np.nan)
    return [_short(value) for value in values.tolist()]


def _short(value: float | None) -> float | None:
    """Return a number with six digits, which no picture shows more of; None for what is not finite, or an integer of
    more than 64 bits."""
    if value is None or isinstance(value, int):
        return value if value is None or abs(value) < 1 << 63 else None
    return float(f"{value:.6g}") if math.isfinite(value) else None

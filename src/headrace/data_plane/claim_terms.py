"""What a claim asks of the tags of rows, and what a store reports of a partition."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import isnan
from numbers import Real
from typing import Any

import numpy as np
import torch

from headrace.errors import DataPlaneError, SchemaError
from headrace.utils.arguments import names_list, texts

ORDERS = ("oldest", "freshest")


@dataclass(frozen=True)
class TagRule:
    """What the tag `name` has to be for a claim to take a row: all conditions that are given hold.

    A group passes if all its rows do. A row without the tag does not pass, nor does a NaN where numbers are compared.
    `min_spread` is the least difference between the largest and the smallest value of the group: with rewards as tags,
    `TagRule("reward", min_spread=0.1)` leaves groups that teach nothing.

    Raises:
        SchemaError: no condition, a bound that is no number, or a text in place of a list.
    """

    name: str
    at_least: float | None = None
    at_most: float | None = None
    among: Sequence[Any] | None = None
    min_spread: float | None = None

    def __post_init__(self) -> None:
        texts("a rule's tag", [self.name])
        if all(getattr(self, field.name) is None for field in fields(self)[1:]):
            raise SchemaError(
                f"the rule on tag '{self.name}' asks nothing; give at_least, at_most, among or min_spread"
            )
        for bound in ("at_least", "at_most", "min_spread"):
            value = getattr(self, bound)
            if value is not None and not _is_number(value):
                raise SchemaError(f"{bound}={value!r} of the rule on tag '{self.name}'; expected a number")
        if self.among is not None:
            object.__setattr__(self, "among", values_list("among", self.among))

    def is_as_strict_as(self, other: "TagRule") -> bool:
        """Return whether it asks of the tag what `other` does, by bounds that let no more pass."""
        bounds = [
            (self.at_least, other.at_least),
            (other.at_most, self.at_most),
            (self.min_spread, other.min_spread),
        ]
        return (
            (self.name, self.among) == (other.name, other.among)
            and all((high is None) == (low is None) for high, low in bounds)
            and all(high >= low for high, low in bounds if high is not None and low is not None)
        )

    def passes(self, tags: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether rows that are handed out together do, by their tags.

        Raises:
            SchemaError: a value that is no number is to be compared.
        """
        if not all(self.name in tag for tag in tags):
            return False
        values = [tag[self.name] for tag in tags]
        if self.among is not None and not all(is_one_of(value, self.among) for value in values):
            return False
        if self.at_least is self.at_most is self.min_spread is None:
            return True
        others = [value for value in values if not isinstance(value, Real)]
        if others:
            raise SchemaError(
                f"tag '{self.name}' is {others[0]!r} in a row; a claim compares it, so it has to be a number"
            )
        if any(isnan(value) for value in values):
            return False
        low, high = min(values), max(values)
        return (
            (self.at_least is None or low >= self.at_least)
            and (self.at_most is None or high <= self.at_most)
            and (self.min_spread is None or high - low >= self.min_spread)
        )


def values_list(name: str, values: Sequence[Any]) -> tuple[Any, ...]:
    """Return values that tags may have; raises SchemaError: what `texts` refuses, or a value with an array."""
    listed = tuple(names_list(name, values))
    texts(name, [value for value in listed if isinstance(value, str)])
    other = next((value for value in listed if _holds_array(value)), None)
    if other is not None:
        raise SchemaError(
            f"{name} has {other!r}; expected values that a tag equals or not, which no array is"
        )
    return listed


def is_one_of(value: object, allowed: Sequence[Any]) -> bool:
    """Return whether a tag's value is one of a `values_list`; none that holds an array is."""
    return not _holds_array(value) and value in allowed


def _holds_array(value: object) -> bool:
    """Return whether a comparison with a value may come to several truths."""
    if isinstance(value, dict):
        return any(map(_holds_array, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_array, value))
    return isinstance(value, np.ndarray | torch.Tensor) and value.ndim > 0


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isnan(value)


def seconds(name: str, value: float, *, above_zero: bool = False) -> float:
    """Return an argument in seconds; raises DataPlaneError: it is none."""
    if _is_number(value) and (value > 0 or not above_zero):
        return float(value)
    expected = (
        "a number of seconds above 0" if above_zero else "a number of seconds, or math.inf to wait for ever"
    )
    raise DataPlaneError(f"{name}={value!r}; expected {expected}")


@dataclass(frozen=True)
class TaskReport:
    """Rows of a task: all it has had (`claimed`), of these leased and taken for good; and rows that it may claim.

    `claimed` and `finished` count rows that are cleared since. `ready` leaves columns and tags out of account.
    """

    claimed: int
    leased: int
    finished: int
    ready: int


@dataclass(frozen=True)
class LeaseReport:
    """A claim in force, and the rows of it that are not cleared."""

    claim: str
    task: str
    holder: str | None
    rows: int
    seconds_left: float


@dataclass(frozen=True)
class RowReport:
    """A row, and the last that named itself in a put of it."""

    sample_id: str
    producer: str | None
    tags: dict[str, Any]


@dataclass(frozen=True)
class PartitionReport:
    """What a partition holds, and who has it.

    `num_samples` is the most that it takes, None if it is not registered, and `group_size` the rows of a group there.
    `rows_by_producer` has no rows of puts that named no producer. `unconsumed` are the oldest rows that some task has
    not had for good, of `unconsumed_rows` in all; a partition without tasks has had none.
    """

    rows: int
    bytes_by_column: dict[str, int]
    rows_by_column: dict[str, int]
    rows_by_producer: dict[str, int]
    tasks: dict[str, TaskReport]
    leases: list[LeaseReport]
    unconsumed_rows: int
    unconsumed: list[RowReport]
    num_samples: int | None
    group_size: int


@dataclass(frozen=True)
class WaitState:
    """What a claim waits for: rows that are ready, of those `left` to the task, and how far the others are.

    `come`: of the rows `expected`, with those that are gone since. `passing`: of the ready ones, if the claim has
    rules. `written`: of those left, by column. `broken`: the size of a group, how many are not whole, and of one of
    these its uid and its rows.
    """

    ready: int
    left: int
    come: int
    expected: int
    passing: int | None
    written: dict[str, int]
    broken: tuple[int, int, str, int] | None
    leases: list[LeaseReport]

    def __str__(self) -> str:
        parts = [f"{self.ready} are ready of {self.left} not claimed yet"]
        if self.passing is not None:
            parts.append(f"{self.passing} of the ready ones pass the rules on tags (where)")
        for name, count in self.written.items():
            if count < self.left or not self.left:
                parts.append(f"column '{name}' is written for {count} of them")
        if self.broken is not None:
            size, count, uid, rows = self.broken
            text = f"samples are claimed in whole groups of {size}"
            parts.append(f"{text}, and {count} are not whole: {uid} has {rows}" if count else text)
        for lease in self.leases:
            by = f" by {lease.holder}" if lease.holder else ""
            parts.append(f"{lease.rows} are leased{by} for another {lease.seconds_left:.3g} s")
        if self.come < self.expected:
            parts.append(f"{self.come} of {self.expected} registered samples have come")
        return "; ".join(parts)

"""The samples of a run, found by text and by numbers, without their texts in memory."""

import json
import math
import mmap
import re
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.dashboard.tail import UNREADABLE

Rows = npt.NDArray[np.int64]
Sort = Literal["newest", "oldest", "highest", "lowest"]
Verdict = Literal["any", "right", "wrong", "cut"]

_SPLITS_SHOWN = 20


class _Facts(msgspec.Struct):
    """What a line is found by; a field of another type than here makes the line one that cannot be read."""

    step: Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)]
    split: str = ""
    reward: float | None = None
    correct: bool | None = None
    truncated: bool | None = None


class _Message(msgspec.Struct):
    content: Any = ""


class _Texts(msgspec.Struct):
    sample_id: Any = ""
    messages: list[_Message] = []
    prompt: Any = ""
    answer: Any = ""
    expected: Any = ""


@dataclass(frozen=True)
class Query:
    """Which samples, in which order, and which part of them.

    `text` may stand anywhere in prompt, completion, expected answer or id, in upper or lower case.
    """

    text: str = ""
    split: str = ""
    verdict: Verdict = "any"
    min_reward: float = -math.inf
    max_reward: float = math.inf
    first_step: int = 0
    last_step: int = 1 << 62
    sort: Sort = "newest"
    offset: int = 0
    limit: int = 50


class SampleIndex:
    """Where each line of samples.jsonl begins, with the numbers that it is chosen by."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._whole = msgspec.json.Decoder()
        self._facts = msgspec.json.Decoder(_Facts)
        self._texts = msgspec.json.Decoder(_Texts)
        self.clear()

    def clear(self) -> None:
        self.damaged = 0
        self._unreadable: set[int] = set()
        self.splits: list[str] = []
        self._offsets, self._lengths, self._steps = array("q"), array("q"), array("q")
        self._rewards = array("d")
        self._verdicts, self._cut, self._split = array("b"), array("b"), array("h")

    def __len__(self) -> int:
        return len(self._offsets)

    def add(self, offset: int, line: bytes) -> None:
        try:
            facts = self._facts.decode(line)
            line.decode()  # texts are passed over by the facts
        except UNREADABLE:
            self.damaged += 1
            return
        if facts.split not in self.splits and len(self.splits) < _SPLITS_SHOWN:
            self.splits.append(facts.split)
        self._offsets.append(offset)
        self._lengths.append(len(line))
        self._steps.append(facts.step)
        self._rewards.append(math.nan if facts.reward is None else facts.reward)
        self._verdicts.append(-1 if facts.correct is None else int(facts.correct))
        self._cut.append(bool(facts.truncated))
        self._split.append(self.splits.index(facts.split) if facts.split in self.splits else -1)

    def find(self, query: Query) -> tuple[int, list[dict[str, Any]]]:
        """Return how many samples match, and the part of them that is asked for, as they were written."""
        if not len(self):
            return 0, []
        rows = np.flatnonzero(self._chosen(query))
        try:
            with open(self._path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError):  # gone, or empty, since its lines were read
            return 0, []
        with mapped as data:
            if query.text:
                rows = np.intersect1d(rows, self._with_text(data, query.text), assume_unique=True)
            order = self._order(rows, query.sort)
            part = order[query.offset : query.offset + query.limit].tolist()
            return len(rows), [shown for row in part if (shown := self._shown(data, row)) is not None]

    def _shown(self, data: mmap.mmap, row: int) -> dict[str, Any] | None:
        """Return a sample; None where a number of it is none that can be held, which its facts do not tell."""
        try:
            return {"row": row, **self._whole.decode(self._line(data, row))}
        except UNREADABLE:
            self.damaged += row not in self._unreadable
            self._unreadable.add(row)
            return None

    def _chosen(self, query: Query) -> npt.NDArray[np.bool_]:
        steps, rewards = np.array(self._steps), np.array(self._rewards)
        chosen: npt.NDArray[np.bool_] = (steps >= query.first_step) & (steps <= query.last_step)
        if math.isfinite(query.min_reward):
            chosen &= rewards >= query.min_reward
        if math.isfinite(query.max_reward):
            chosen &= rewards <= query.max_reward
        if query.verdict == "cut":
            chosen &= np.array(self._cut) == 1
        elif query.verdict != "any":
            chosen &= np.array(self._verdicts) == (query.verdict == "right")
        if query.split:
            wanted = self.splits.index(query.split) if query.split in self.splits else -2
            chosen &= np.array(self._split) == wanted
        return chosen

    def _order(self, rows: Rows, sort: Sort) -> Rows:
        if sort == "newest":
            return rows[::-1]
        if sort == "oldest":
            return rows
        rewards = np.array(self._rewards)[rows]
        keys = rewards if sort == "lowest" else -rewards  # NaN comes last either way
        ordered: Rows = rows[np.argsort(keys, kind="stable")]
        return ordered

    def _line(self, data: mmap.mmap, row: int) -> bytes:
        start = self._offsets[row]
        return data[start : start + self._lengths[row]]

    def _with_text(self, data: mmap.mmap, text: str) -> Rows:
        """Return the rows whose texts hold `text`, in upper or lower case."""
        wanted = text.lower()
        needle = _searchable(json.dumps(wanted, ensure_ascii=False)[1:-1])
        lines = ((row, self._line(data, row)) for row in range(len(self)))
        # Most lines need no decoding: they have the text nowhere.
        found = (row for row, line in lines if needle in line.lower() and self._holds(line, wanted))
        return np.fromiter(found, dtype=np.int64)

    def _holds(self, line: bytes, wanted: str) -> bool:
        try:
            texts = self._texts.decode(line)
        except UNREADABLE:
            return False
        parts = [texts.sample_id, texts.prompt, texts.answer, texts.expected]
        return any(wanted in str(p).lower() for p in (*parts, *(m.content for m in texts.messages)))


def _searchable(needle: str) -> bytes:
    """Return what every line with the needle holds, once it is in lower case as far as ASCII goes."""
    if needle.upper() == needle.lower():  # a script without case
        return needle.encode()
    return max(re.split(r"[^\x00-\x7f]+", needle), key=len).encode()

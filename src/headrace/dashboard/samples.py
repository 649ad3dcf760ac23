"""The samples of a run, found by text and by numbers, without their texts in memory."""

import json
import math
import mmap
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]
Sort = Literal["newest", "oldest", "highest", "lowest"]
Verdict = Literal["any", "right", "wrong", "cut"]

_PART = 16 << 20
_SPLITS_SHOWN = 20
_FRAMES_READ = 200
_NUMERIC = set('0123456789.+-e,:{}[]" nulltruefalseinfinity')
_TEXT_KEYS = ("content", "prompt", "answer", "expected", "sample_id", "text")


class _Facts(msgspec.Struct):
    """What a line is found by; a field of another type than here makes the line one that cannot be read."""

    step: int
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
        self._facts = msgspec.json.Decoder(_Facts)
        self._texts = msgspec.json.Decoder(_Texts)
        self.clear()

    def clear(self) -> None:
        self.damaged = 0
        self.splits: list[str] = []
        self._offsets, self._lengths, self._steps = array("q"), array("q"), array("q")
        self._rewards = array("d")
        self._verdicts, self._cut, self._split = array("b"), array("b"), array("h")

    def __len__(self) -> int:
        return len(self._offsets)

    def add(self, offset: int, line: bytes) -> None:
        try:
            facts = self._facts.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
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
        with open(self._path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if query.text:
                rows = np.intersect1d(rows, self._with_text(data, query.text), assume_unique=True)
            order = self._order(rows, query.sort)
            part = order[query.offset : query.offset + query.limit].tolist()
            return len(rows), [{"row": row, **json.loads(self._line(data, row))} for row in part]

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
        needle = json.dumps(wanted, ensure_ascii=False)[1:-1]
        rows = self._candidates(data, _searchable(needle))
        if not needle.isascii() or self._is_of_the_frame(data, needle):
            rows = (row for row in rows if self._holds(self._line(data, row), wanted))
        return np.fromiter(rows, dtype=np.int64)

    def _candidates(self, data: mmap.mmap, needle: bytes) -> Iterator[int]:
        """Yield the rows whose line holds `needle` anywhere, in upper or lower case; all, for an empty one."""
        if not needle:
            yield from range(len(self))
            return
        starts = np.array(self._offsets)
        row = 0
        while row < len(starts):
            # Whole lines, so that none is cut in two.
            stop = max(int(np.searchsorted(starts, starts[row] + _PART)), row + 1)
            end = int(starts[stop]) if stop < len(starts) else self._offsets[-1] + self._lengths[-1]
            yield from self._within(data[int(starts[row]) : end].lower(), row, stop, needle)
            row = stop

    def _within(self, part: bytes, first: int, stop: int, needle: bytes) -> Iterator[int]:
        base = self._offsets[first]
        ends = (np.array(self._offsets[first:stop]) + np.array(self._lengths[first:stop]) - base).tolist()
        place, row = part.find(needle), 0
        while place >= 0:
            row = bisect_right(ends, place, lo=row)
            yield first + row
            place = part.find(needle, ends[row])

    def _is_of_the_frame(self, data: mmap.mmap, needle: str) -> bool:
        """Whether `needle` may stand in a line without standing in a text: in a key, a number, a role, a split."""
        step = max(1, len(self) // _FRAMES_READ)
        frames = [json.loads(self._line(data, row)) for row in range(0, len(self), step)]
        words = {word.lower() for frame in frames for word in _frame_of(frame)}
        return set(needle) <= _NUMERIC or any(needle in word for word in words)

    def _holds(self, line: bytes, wanted: str) -> bool:
        try:
            texts = self._texts.decode(line)
        except msgspec.DecodeError:
            return False
        parts = [texts.sample_id, texts.prompt, texts.answer, texts.expected]
        return any(wanted in str(p).lower() for p in (*parts, *(m.content for m in texts.messages)))


def _searchable(needle: str) -> bytes:
    """Return what every line with the needle holds, once it is in lower case as far as ASCII goes."""
    if needle.upper() == needle.lower():  # a script without case
        return needle.encode()
    return max(re.split(r"[^\x00-\x7f]+", needle), key=len).encode()


def _frame_of(value: Any, *, is_text: bool = False) -> Iterator[str]:
    """Yield the keys of a sample, and its texts that are no prompt, answer or id."""
    if isinstance(value, str):
        if not is_text:
            yield json.dumps(value, ensure_ascii=False)
    elif isinstance(value, list):
        for inner in value:
            yield from _frame_of(inner, is_text=is_text)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield f'"{key}": '
            yield from _frame_of(inner, is_text=key in _TEXT_KEYS)

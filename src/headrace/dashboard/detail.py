"""What detail.jsonl says of the steps that came last: spans of time, the store, microbatches."""

from collections import deque
from typing import Any

import msgspec

STEPS_SHOWN = 12


class _Begin(msgspec.Struct):
    step: int
    stage: str


class _Span(msgspec.Struct):
    step: int
    name: str
    tracks: list[str]
    start_s: float
    seconds: float
    operations: list[tuple[str, float, float]] = []


class _Column(msgspec.Struct):
    ready: int
    bytes: float


class _Partition(msgspec.Struct):
    id: Any
    rows: int
    columns: dict[str, _Column]


class _Store(msgspec.Struct):
    step: int
    partitions: list[_Partition]


class _Bin(msgspec.Struct):
    tokens: float
    rows: list[float]


class _Rank(msgspec.Struct):
    rank: int
    cost: float
    bins: list[_Bin]


class _Packing(msgspec.Struct):
    step: int
    ranks: list[_Rank]


# What the pictures need of each kind of line; a line of another kind is none of theirs.
_KINDS: dict[Any, type[msgspec.Struct]] = {
    "begin": _Begin,
    "span": _Span,
    "store": _Store,
    "packing": _Packing,
}


class Detail:
    """Keeps the lines of the last steps; what is older has been shown."""

    def __init__(self) -> None:
        self.count = 0
        self.damaged = 0
        self._steps: deque[int] = deque(maxlen=STEPS_SHOWN)
        self._begun: dict[str, Any] | None = None
        self._spans: list[dict[str, Any]] = []
        self._stores: dict[str, dict[str, Any]] = {}
        self._packing: dict[str, dict[str, Any]] = {}

    def add(self, record: Any) -> None:
        kind = record.get("kind") if isinstance(record, dict) else None
        if isinstance(kind, str) and kind not in _KINDS:
            return
        try:
            msgspec.convert(record, _KINDS[kind])
        except (KeyError, TypeError, msgspec.ValidationError):
            self.damaged += 1
            return
        step = record["step"]
        self.count += 1
        if step not in self._steps:
            self._steps.append(step)
            self._spans = [span for span in self._spans if span["step"] in self._steps]
        match record["kind"]:
            case "begin":
                self._begun = record
            case "span":
                self._spans.append(record)
            case "store":
                # A row per stage of the newest step; the stages of an older one have had their turn.
                self._stores = {s: r for s, r in self._stores.items() if r["step"] == step}
                self._stores[str(record.get("stage"))] = record
            case "packing":
                self._packing[str(record.get("stage"))] = record

    @property
    def columns(self) -> set[str]:
        """Names of the columns that the store holds."""
        found = [part["columns"] for store in self._stores.values() for part in store["partitions"]]
        return {name for columns in found for name in columns}

    def payload(self) -> dict[str, Any]:
        return {
            "begun": self._begun,
            "spans": self._spans,
            "stores": list(self._stores.values()),
            "packing": list(self._packing.values()),
        }

"""What detail.jsonl says of the steps that came last: spans of time, the store, microbatches."""

from collections import deque
from typing import Any

STEPS_SHOWN = 12
_KINDS = ("begin", "span", "store", "packing")


class Detail:
    """Keeps the lines of the last steps; what is older has been shown."""

    def __init__(self) -> None:
        self.count = 0
        self._steps: deque[int] = deque(maxlen=STEPS_SHOWN)
        self._begun: dict[str, Any] | None = None
        self._spans: list[dict[str, Any]] = []
        self._stores: dict[str, dict[str, Any]] = {}
        self._packing: dict[str, dict[str, Any]] = {}

    def add(self, record: Any) -> None:
        if not isinstance(record, dict) or record.get("kind") not in _KINDS:
            return
        step = record.get("step")
        if not isinstance(step, int):
            return
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
        found = [part.get("columns", {}) for store in self._stores.values() for part in store["partitions"]]
        return {name for columns in found for name in columns}

    def payload(self) -> dict[str, Any]:
        return {
            "begun": self._begun,
            "spans": self._spans,
            "stores": list(self._stores.values()),
            "packing": list(self._packing.values()),
        }

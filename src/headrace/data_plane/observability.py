"""What the store is asked to do: one event per operation, and totals per operation and column."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from inspect import BoundArguments, signature
from operator import length_hint
from typing import Any, Literal, TypedDict

import torch
from tensordict import TensorDict

from headrace.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from headrace.data_plane.object_codec import encode_column
from headrace.data_plane.passing_client import PassingClient
from headrace.data_plane.wire import read_wire
from headrace.distributed.multimodal import PackedTensor
from headrace.distributed.offsets_reader import OffsetsReader
from headrace.distributed.ragged import is_nested, take_apart
from headrace.errors import ClaimTimeout

Status = Literal["ok", "error", "timeout"]

_log = logging.getLogger("headrace.data_plane")

listeners: "list[Callable[[DataPlaneEvent], None]]" = []
"""Are told of the events of every MetricsDataPlaneClient of this process, as its own `on_event` is."""


@dataclass(frozen=True)
class DataPlaneEvent:
    """One operation.

    `rows` are the rows named in the call, or handed out by it; `columns` maps each column that was moved to its
    bytes (values and, for objects, their messages); `bytes` is their sum.
    """

    op: str
    partition: str
    rows: int = 0
    columns: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    status: Status = "ok"

    @property
    def bytes(self) -> int:
        return sum(self.columns.values())


class OpTotals(TypedDict):
    """Sums over the events of one operation; `errors` counts those that were not ok."""

    count: int
    rows: int
    bytes: int
    seconds: float
    errors: int


class Snapshot(TypedDict):
    """Totals since the client was made.

    `bytes_by_column` sums what puts and gets moved. `bytes_held` is what the store holds now, whoever put it.
    """

    ops: dict[str, OpTotals]
    bytes_by_column: dict[str, dict[str, int]]
    bytes_held: int


def print_event(event: DataPlaneEvent) -> None:
    """Log an event at level INFO, logger `headrace.data_plane`."""
    _log.info(
        "%s %s: %d rows, %d columns, %d bytes, %.3f ms, %s",
        event.op,
        event.partition,
        event.rows,
        len(event.columns),
        event.bytes,
        event.seconds * 1e3,
        event.status,
    )


_UNMEASURED = ("partition_report", "partition_ids", "sample_ids", "stored_bytes", "close")


@cache
def _binder(name: str) -> Callable[..., BoundArguments]:
    return signature(getattr(DataPlaneClient, name)).bind


@contextmanager
def listening(on_event: Callable[[DataPlaneEvent], None]) -> Iterator[None]:
    """Return a context in which `on_event` is one of the `listeners`."""
    listeners.append(on_event)
    try:
        yield
    finally:
        listeners.remove(on_event)


class MetricsDataPlaneClient(PassingClient):
    """Passes every call on to `inner`, and gives `on_event` one DataPlaneEvent for each, failed ones too.

    Object columns are encoded once more to know their size. What `on_event` raises reaches the caller.
    """

    def __init__(
        self, inner: DataPlaneClient, on_event: Callable[[DataPlaneEvent], None] = print_event
    ) -> None:
        self.inner = inner
        self._on_event = on_event
        self._lock = threading.Lock()
        self._ops: dict[str, OpTotals] = {}
        self._moved: dict[str, Counter[str]] = {"put": Counter(), "get": Counter()}

    def snapshot(self) -> Snapshot:
        """Return totals per operation and column so far."""
        held = self.inner.stored_bytes()
        with self._lock:
            return Snapshot(
                ops={op: OpTotals(**totals) for op, totals in self._ops.items()},
                bytes_by_column={direction: dict(columns) for direction, columns in self._moved.items()},
                bytes_held=held,
            )

    def moved_bytes(self) -> dict[str, int]:
        """Return the bytes that puts and gets have moved so far, by column."""
        with self._lock:
            return dict(sum(self._moved.values(), Counter()))

    def _pass(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name in _UNMEASURED:
            return super()._pass(name, *args, **kwargs)
        given = _binder(name)(self, *args, **kwargs).arguments
        op, method = name.replace("write", "put"), getattr(self.inner, name)
        meta: KVBatchMeta | None = given.get("meta")
        partition = given["partition_id"] if meta is None else meta.partition_id
        rows, columns = length_hint(given.get("sample_ids")) if meta is None else meta.size, dict[str, int]()
        status: Status = "error"
        start = time.perf_counter()
        try:
            result = method(**{name: value for name, value in given.items() if name != "self"})
            if op in ("put_samples", "get_samples", "get_data"):
                columns = _column_bytes(given.get("fields") if op == "put_samples" else result)
            elif op in ("register_partition", "claim_meta"):
                rows = int(given["num_samples"]) if op == "register_partition" else len(result or ())
            status = "ok"
            return result
        except ClaimTimeout:
            status = "timeout"
            raise
        finally:
            event = DataPlaneEvent(op, partition, rows, columns, time.perf_counter() - start, status)
            self._count(event)
            for tell in (self._on_event, *listeners):
                tell(event)

    def _count(self, event: DataPlaneEvent) -> None:
        with self._lock:
            totals = self._ops.setdefault(event.op, OpTotals(count=0, rows=0, bytes=0, seconds=0.0, errors=0))
            totals["count"] += 1
            totals["rows"] += event.rows
            totals["bytes"] += event.bytes
            totals["seconds"] += event.seconds
            totals["errors"] += event.status != "ok"
            if event.columns:
                self._moved["put" if event.op == "put_samples" else "get"].update(event.columns)


def _column_bytes(wire: TensorDict | None) -> dict[str, int]:
    """Return the bytes of each column: its values, or the messages that its objects become."""
    sizes: dict[str, int] = {}
    leaves = read_wire(wire) if wire is not None else {}
    read = OffsetsReader(leaves.values())
    for name, leaf in leaves.items():
        if isinstance(leaf, torch.Tensor):
            sizes[name] = (take_apart(leaf, read)[0] if is_nested(leaf) else leaf).nbytes
        else:
            sizes[name] = 0 if isinstance(leaf, PackedTensor) else sum(map(len, encode_column(name, leaf)))
    return sizes

"""What the store is asked to do: one event per operation, and totals per operation and column."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import update_wrapper
from typing import Any, Literal, TypedDict, TypeVar

import torch
from tensordict import TensorDict

from headrace.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from headrace.data_plane.object_codec import encode_column
from headrace.data_plane.wire import read_wire
from headrace.distributed.multimodal import PackedTensor
from headrace.distributed.ragged import RaggedParts
from headrace.errors import ClaimTimeout

Status = Literal["ok", "error", "timeout"]

Wrapper = TypeVar("Wrapper", bound=DataPlaneClient)
Method = TypeVar("Method", bound=Callable[..., Any])

_log = logging.getLogger("headrace.data_plane")


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


def _as_in_the_contract(method: Method) -> Method:
    """Give a method the signature and the docstring of DataPlaneClient's."""
    update_wrapper(method, getattr(DataPlaneClient, method.__name__))
    method.__isabstractmethod__ = False  # type: ignore[attr-defined]
    return method


def _passing_on(name: str) -> Callable[..., Any]:
    def call(self: "MetricsDataPlaneClient", *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    call.__name__ = name
    return _as_in_the_contract(call)


def _hiding_nothing(wrapper: type[Wrapper]) -> type[Wrapper]:
    """Have a class pass on every public method of DataPlaneClient that it does not measure itself."""
    for name, member in vars(DataPlaneClient).items():
        if not name.startswith("_") and callable(member) and name not in vars(wrapper):
            setattr(wrapper, name, _passing_on(name))
    return wrapper


@_hiding_nothing
class MetricsDataPlaneClient(DataPlaneClient):
    """Passes every call on to `inner`, and gives `on_event` one DataPlaneEvent for each, failed ones too.

    What a store has beyond the contract is to be had here as well, unmeasured.

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

    @_as_in_the_contract
    def register_partition(
        self, partition_id: str, fields: Sequence[str], num_samples: int, *args: Any, **kwargs: Any
    ) -> None:
        with self._measure("register_partition", partition_id) as record:
            self.inner.register_partition(partition_id, fields, num_samples, *args, **kwargs)
            record.rows = int(num_samples)

    @_as_in_the_contract
    def claim_meta(self, partition_id: str, *args: Any, **kwargs: Any) -> KVBatchMeta | None:
        with self._measure("claim_meta", partition_id) as record:
            meta = self.inner.claim_meta(partition_id, *args, **kwargs)
            record.rows = 0 if meta is None else meta.size
            return meta

    @_as_in_the_contract
    def get_data(self, meta: KVBatchMeta, select_fields: Sequence[str] | None = None) -> TensorDict:
        with self._measure("get_data", meta.partition_id, meta.size) as record:
            wire = self.inner.get_data(meta, select_fields)
            record.columns = _column_bytes(wire)
            return wire

    @_as_in_the_contract
    def check_consumption_status(self, partition_id: str, task_names: Sequence[str]) -> bool:
        with self._measure("check_consumption_status", partition_id):
            return self.inner.check_consumption_status(partition_id, task_names)

    @_as_in_the_contract
    def put_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
    ) -> KVBatchMeta:
        with self._measure("put_samples", partition_id, len(sample_ids)) as record:
            meta = self.inner.put_samples(sample_ids, partition_id, fields, tags)
            record.columns = _column_bytes(fields)
            return meta

    @_as_in_the_contract
    def get_samples(
        self, sample_ids: Sequence[str], partition_id: str, select_fields: Sequence[str]
    ) -> TensorDict:
        with self._measure("get_samples", partition_id, len(sample_ids)) as record:
            wire = self.inner.get_samples(sample_ids, partition_id, select_fields)
            record.columns = _column_bytes(wire)
            return wire

    @_as_in_the_contract
    def clear_samples(self, sample_ids: Sequence[str] | None, partition_id: str) -> None:
        with self._measure("clear_samples", partition_id, len(sample_ids or ())):
            self.inner.clear_samples(sample_ids, partition_id)

    def close(self) -> None:
        self.inner.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "inner" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no attribute '{name}'")
        return getattr(self.inner, name)

    @contextmanager
    def _measure(self, op: str, partition: str, rows: int = 0) -> "Iterator[_Record]":
        record = _Record(rows)
        status: Status = "error"
        start = time.perf_counter()
        try:
            yield record
            status = "ok"
        except ClaimTimeout:
            status = "timeout"
            raise
        finally:
            seconds = time.perf_counter() - start
            event = DataPlaneEvent(op, partition, record.rows, record.columns, seconds, status)
            self._count(event)
            self._on_event(event)

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


@dataclass
class _Record:
    """What an operation turned out to move."""

    rows: int
    columns: dict[str, int] = field(default_factory=dict)


def _column_bytes(wire: TensorDict | None) -> dict[str, int]:
    """Return the bytes of each column: its values, or the messages that its objects become."""
    sizes: dict[str, int] = {}
    for name, leaf in (read_wire(wire) if wire is not None else {}).items():
        if isinstance(leaf, RaggedParts):
            sizes[name] = leaf.values.nbytes
        elif isinstance(leaf, torch.Tensor):
            sizes[name] = leaf.nbytes
        else:
            sizes[name] = 0 if isinstance(leaf, PackedTensor) else sum(map(len, encode_column(name, leaf)))
    return sizes

"""Events of a store as mappings, and totals under the names that callers of NeMo-RL read."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypedDict

from tensordict import TensorDict

from headrace.data_plane import observability
from headrace.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from headrace.data_plane.observability import OpTotals, Snapshot, Status, print_event

__all__ = [
    "DataPlaneEvent",
    "DataPlaneStats",
    "MetricsDataPlaneClient",
    "OpTotals",
    "Snapshot",
    "Status",
    "log_event",
    "print_event",
]

_log = logging.getLogger("headrace.data_plane")

OPS = {
    "register_partition": "register",
    "claim_meta": "claim_meta",
    "get_data": "get_data",
    "check_consumption_status": "check_consumption_status",
    "put_samples": "put",
    "get_samples": "get",
    "clear_samples": "clear",
}
"""Operations of a client, and what events call them; others keep their name."""


class DataPlaneEvent(TypedDict):
    """One operation: `n_keys` rows named in it or handed out by it, `n_bytes` moved, `status` ok, error or timeout."""

    op: str
    partition_id: str
    n_keys: int
    n_bytes: int
    wall_ms: float
    status: str


EventCallback = Callable[[DataPlaneEvent], None]
Logger = logging.Logger | logging.LoggerAdapter  # type: ignore[type-arg]


@dataclass
class DataPlaneStats:
    """Totals of the operations that went well, and the bytes that were put through a client and not cleared since."""

    total_bytes: int = 0
    total_keys: int = 0
    total_ops: int = 0
    bytes_outstanding: int = 0
    peak_bytes_outstanding: int = 0
    max_bytes_per_key_seen: int = 0
    last_put_bytes_per_key: int = 0


def log_event(event: DataPlaneEvent) -> None:
    """Log an event at level INFO, logger `headrace.data_plane`."""
    record_with(_log)(event)


def record_with(logger: Logger) -> EventCallback:
    """Return a function that logs events with `logger` at level INFO."""

    def record(event: DataPlaneEvent) -> None:
        logger.info(
            "%(op)s %(partition_id)s: %(n_keys)d keys, %(n_bytes)d bytes, %(wall_ms).3f ms, %(status)s", event
        )

    return record


class MetricsDataPlaneClient(observability.MetricsDataPlaneClient):
    """Passes every call on to `inner`, gives `on_event` (a function or a logger) a mapping for each, and keeps totals.

    A column that is written again replaces its bytes. A key's bytes are its share of the put, the first key's share
    with what does not divide.
    """

    def __init__(self, inner: DataPlaneClient, on_event: EventCallback | Logger | None = None) -> None:
        super().__init__(inner, self._translate)
        self._tell: EventCallback | None = record_with(on_event) if isinstance(on_event, Logger) else on_event
        self._stats = DataPlaneStats()
        self._outstanding: dict[str, dict[str, dict[str, int]]] = {}  # partition, key, column
        self._last = threading.local()

    def snapshot(self) -> dict[str, Any]:  # type: ignore[override]
        """Return the fields of `DataPlaneStats`, and `bytes_outstanding_by_partition`."""
        by_partition = self.bytes_outstanding_by_partition()
        with self._lock:
            return {**asdict(self._stats), "bytes_outstanding_by_partition": by_partition}

    def bytes_outstanding_by_partition(self) -> dict[str, int]:
        with self._lock:
            return {
                partition: sum(sum(columns.values()) for columns in keys.values())
                for partition, keys in self._outstanding.items()
            }

    def put_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> KVBatchMeta:
        meta: KVBatchMeta = super().put_samples(sample_ids, partition_id, fields, tags, **options)
        # It has no rows where they were put before, and nothing was written.
        self._hold(partition_id, meta.sample_ids, self._last.columns)
        return meta

    def write_samples(
        self, sample_ids: Sequence[str], partition_id: str, fields: TensorDict, **options: Any
    ) -> None:
        super().write_samples(sample_ids, partition_id, fields, **options)
        self._hold(partition_id, list(sample_ids), self._last.columns)

    def clear_samples(self, sample_ids: Sequence[str] | None, partition_id: str, **options: Any) -> None:
        super().clear_samples(sample_ids, partition_id, **options)
        with self._lock:
            held = self._outstanding.get(partition_id, {})
            for key in list(held) if sample_ids is None else sample_ids:
                self._stats.bytes_outstanding -= sum(held.pop(key, {}).values())
            if not held:
                self._outstanding.pop(partition_id, None)

    def register_partition(self, partition_id: str, *args: Any, **options: Any) -> None:
        super().register_partition(partition_id, *args, **options)
        with self._lock:  # a partition that is opened again is empty
            held = self._outstanding.pop(partition_id, {})
            self._stats.bytes_outstanding -= sum(sum(columns.values()) for columns in held.values())

    def _hold(self, partition: str, keys: Sequence[str], columns: Mapping[str, int]) -> None:
        if not keys:
            return
        with self._lock:
            stats, total = self._stats, sum(columns.values())
            held = self._outstanding.setdefault(partition, {})
            for place, key in enumerate(keys):
                own = held.setdefault(key, {})
                before = sum(own.values())
                for name, size in columns.items():
                    own[name] = size // len(keys) + (size % len(keys) if place == 0 else 0)
                stats.bytes_outstanding += sum(own.values()) - before
            stats.peak_bytes_outstanding = max(stats.peak_bytes_outstanding, stats.bytes_outstanding)
            stats.last_put_bytes_per_key = total // len(keys)
            stats.max_bytes_per_key_seen = max(stats.max_bytes_per_key_seen, stats.last_put_bytes_per_key)

    def _translate(self, event: observability.DataPlaneEvent) -> None:
        self._last.columns = event.columns
        if event.status == "ok":
            with self._lock:
                self._stats.total_ops += 1
                self._stats.total_keys += event.rows
                self._stats.total_bytes += event.bytes
        if self._tell is not None:
            self._tell(
                DataPlaneEvent(
                    op=OPS.get(event.op, event.op),
                    partition_id=event.partition,
                    n_keys=event.rows,
                    n_bytes=event.bytes,
                    wall_ms=event.seconds * 1000,
                    status=event.status,
                )
            )

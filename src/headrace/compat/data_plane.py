"""What `nemo_rl.data_plane` names: headrace's data plane, with the names that are translated in their place."""

from typing import Any

from headrace import data_plane
from headrace.compat.column_io import TOKEN_ALIGNED_FIELDS, kv_first_write, read_columns, write_columns
from headrace.compat.factory import build_data_plane_client
from headrace.compat.interfaces import DataPlaneConfig, ObservabilityConfig
from headrace.compat.observability import DataPlaneEvent, DataPlaneStats, MetricsDataPlaneClient, log_event
from headrace.compat.submodules import submodule

__all__ = [
    "DataPlaneConfig",
    "DataPlaneEvent",
    "DataPlaneStats",
    "MetricsDataPlaneClient",
    "ObservabilityConfig",
    "TOKEN_ALIGNED_FIELDS",
    "build_data_plane_client",
    "kv_first_write",
    "log_event",
    "read_columns",
    "write_columns",
]

__path__: list[str] = []
"""Makes `nemo_rl.data_plane` a package: modules below it are found by their own names."""


def __getattr__(name: str) -> Any:
    return getattr(data_plane, name) if name in data_plane.__all__ else submodule("data_plane", name)

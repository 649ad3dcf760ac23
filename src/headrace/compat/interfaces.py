"""What `nemo_rl.data_plane.interfaces` names: metadata and client are headrace's, configs are mappings."""

from collections.abc import Callable
from typing import Any, TypedDict

from headrace.data_plane import interfaces
from headrace.data_plane.interfaces import DataPlaneClient, KVBatchMeta

__all__ = ["DataPlaneClient", "DataPlaneConfig", "KVBatchMeta", "ObservabilityConfig"]


class ObservabilityConfig(TypedDict, total=False):
    """Whether operations are told, and to whom: `callback` is a function, a logger, or text `module:name`."""

    enabled: bool
    callback: Callable[[Any], None] | Any | str | None


class DataPlaneConfig(TypedDict, total=False):
    """The store, by the keys that a NeMo-RL recipe has; headrace's own keys are taken beside them."""

    enabled: bool
    impl: str
    backend: str
    storage_capacity: int
    num_storage_units: int
    claim_meta_poll_interval_s: float
    global_segment_size: int
    local_buffer_size: int
    controller_address: str | None
    ack_timeout_ms: int
    observability: ObservabilityConfig


def __getattr__(name: str) -> Any:
    if name not in interfaces.__all__:
        raise AttributeError(f"module 'nemo_rl.data_plane.interfaces' has no attribute '{name}'")
    return getattr(interfaces, name)

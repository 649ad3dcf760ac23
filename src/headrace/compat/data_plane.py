"""What `nemo_rl.data_plane` names: headrace's data plane, with the names that are translated in their place."""

from headrace.compat.column_io import TOKEN_ALIGNED_FIELDS, kv_first_write, read_columns, write_columns
from headrace.compat.factory import build_data_plane_client
from headrace.compat.interfaces import DataPlaneConfig, ObservabilityConfig
from headrace.compat.observability import DataPlaneEvent, DataPlaneStats, MetricsDataPlaneClient, log_event
from headrace.data_plane import (
    DP_TRAIN_FIELDS,
    FIELDS,
    LP_SEED_FIELDS,
    ROUTED_EXPERTS_FIELD,
    DataPlaneClient,
    FieldSpec,
    Kind,
    KVBatchMeta,
    Layout,
    Stage,
    declare,
    fields_with_optional_routed_experts,
    materialize,
    pack_columns,
    pack_jagged_fields,
    pad_values,
    print_event,
    response_from_nested,
    round_up,
    stack_or_nest,
    to_nested_by_length,
)

__all__ = [
    "DP_TRAIN_FIELDS",
    "DataPlaneClient",
    "DataPlaneConfig",
    "DataPlaneEvent",
    "DataPlaneStats",
    "FIELDS",
    "FieldSpec",
    "KVBatchMeta",
    "Kind",
    "LP_SEED_FIELDS",
    "Layout",
    "MetricsDataPlaneClient",
    "ObservabilityConfig",
    "ROUTED_EXPERTS_FIELD",
    "Stage",
    "TOKEN_ALIGNED_FIELDS",
    "build_data_plane_client",
    "declare",
    "fields_with_optional_routed_experts",
    "kv_first_write",
    "log_event",
    "materialize",
    "pack_columns",
    "pack_jagged_fields",
    "pad_values",
    "print_event",
    "read_columns",
    "response_from_nested",
    "round_up",
    "stack_or_nest",
    "to_nested_by_length",
    "write_columns",
]

__path__: list[str] = []
"""Makes `nemo_rl.data_plane` a package: modules below it are found by their own names."""

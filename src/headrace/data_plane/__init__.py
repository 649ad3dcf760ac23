"""The data plane: a store for rollouts, addressed by sample id, and the metadata that names its rows.

A whole life of a batch, in one process:

    client = build_data_plane_client({"enabled": True, "impl": "local"}, bootstrap=True)
    meta = kv_first_write(batch, sample_ids=ids, dp_client=client, partition_id="train")
    write_columns(client, meta, {"advantages": advantages})
    data = read_columns(client, meta, DP_TRAIN_FIELDS)
    client.clear_samples(meta.sample_ids, meta.partition_id)

Needs torch and tensordict; neither Ray nor transformers.
"""

from headrace.data_plane.codec import (
    materialize,
    pack_jagged_fields,
    response_from_nested,
    stack_or_nest,
    to_nested_by_length,
)
from headrace.data_plane.column_io import kv_first_write, pack_columns, read_columns, round_up, write_columns
from headrace.data_plane.factory import build_data_plane_client
from headrace.data_plane.interfaces import (
    DataPlaneClient,
    DataPlaneConfig,
    KVBatchMeta,
    PartitionReport,
    TagRule,
)
from headrace.data_plane.journal.client import JournalDataPlaneClient, journal_of
from headrace.data_plane.journal.restore import RestoreReport, restore
from headrace.data_plane.observability import DataPlaneEvent, MetricsDataPlaneClient, print_event
from headrace.data_plane.schema import (
    DP_TRAIN_FIELDS,
    FIELDS,
    LP_SEED_FIELDS,
    ROUTED_EXPERTS_FIELD,
    FieldSpec,
    Kind,
    Layout,
    Stage,
    declare,
    fields_with_optional_routed_experts,
    pad_values,
)

__all__ = [
    "DP_TRAIN_FIELDS",
    "DataPlaneClient",
    "DataPlaneConfig",
    "DataPlaneEvent",
    "FIELDS",
    "FieldSpec",
    "JournalDataPlaneClient",
    "KVBatchMeta",
    "Kind",
    "LP_SEED_FIELDS",
    "Layout",
    "MetricsDataPlaneClient",
    "PartitionReport",
    "ROUTED_EXPERTS_FIELD",
    "RestoreReport",
    "Stage",
    "TagRule",
    "build_data_plane_client",
    "declare",
    "fields_with_optional_routed_experts",
    "journal_of",
    "kv_first_write",
    "materialize",
    "pack_columns",
    "pack_jagged_fields",
    "pad_values",
    "print_event",
    "read_columns",
    "response_from_nested",
    "restore",
    "round_up",
    "stack_or_nest",
    "to_nested_by_length",
    "write_columns",
]

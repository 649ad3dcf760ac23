import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headrace.data_plane import schema
from headrace.data_plane.schema import (
    FIELDS,
    FieldSpec,
    Kind,
    fields_with_optional_routed_experts,
    pad_values,
)
from headrace.data_plane.wire import check_declared
from headrace.errors import SchemaError


def test_the_training_columns_are_the_documented_ones() -> None:
    assert schema.DP_TRAIN_FIELDS == [
        "input_ids",
        "input_lengths",
        "generation_logprobs",
        "prev_logprobs",
        "reference_policy_logprobs",
        "advantages",
        "token_mask",
        "sample_mask",
    ]


def test_the_logprob_columns_are_the_documented_ones() -> None:
    assert schema.LP_SEED_FIELDS == ["input_ids", "input_lengths", "token_mask", "sample_mask"]


def test_the_promoted_columns_are_the_per_sample_ones() -> None:
    assert {"input_lengths", "sample_mask"} == schema.PROMOTE_1D_FIELDS


def test_every_declared_dtype_is_one_that_its_column_accepts() -> None:
    for spec in FIELDS.values():
        assert (spec.dtype is None) == (spec.kind is Kind.OBJECT)
        assert spec.dtype is None or spec.dtype in spec.accepts


@pytest.mark.parametrize("enabled", [True, False])
def test_routes_are_added_once_and_only_when_enabled(enabled: bool) -> None:
    names = ["input_ids"]
    expected = ["input_ids", "routed_experts"] if enabled else ["input_ids"]
    assert fields_with_optional_routed_experts(names, enabled=enabled) == expected
    assert fields_with_optional_routed_experts(expected, enabled=enabled) == expected
    assert names == ["input_ids"]


def test_the_pad_token_pads_input_ids_and_every_per_token_column_has_a_pad_value() -> None:
    values = pad_values(7)
    assert values["input_ids"] == 7
    assert set(values) == schema.PER_TOKEN_FIELDS


OWN = """
import torch
from headrace.data_plane import (
    DP_TRAIN_FIELDS, FieldSpec, KVBatchMeta, Kind, build_data_plane_client, declare, kv_first_write, pad_values,
)
from headrace.data_plane import schema
from headrace.data_plane.worker_mixin import TQWorkerMixin
from headrace.distributed.topology import lay_out_ranks
from headrace.distributed.worker_groups import SpawnWorkerGroup, WorkerSpec

class Worker(TQWorkerMixin):
    def __init__(self):
        self.store = build_data_plane_client({"impl": "local"}, bootstrap=True)
        rows = [torch.arange(2), torch.arange(5)]
        self.columns = {"input_ids": rows, "hints": rows, "input_lengths": torch.tensor([2, 5])}

    def cut(self):
        meta = kv_first_write(self.columns, sample_ids=["a", "b"], dp_client=self.store, partition_id="p")
        meta.extra_info.update(micro_batch_indices=[[[0, 1], [1, 2]]], micro_batch_lengths=[[2, 5]])
        batch = self._fetch(meta)
        cut = [list(m["hints"].shape) for m in batch.microbatches("dynamic", 1)]
        return cut, batch["hints"].tolist(), list(DP_TRAIN_FIELDS)

if __name__ == "__main__":
    declare(FieldSpec("hints", Kind.PER_TOKEN, torch.int64, pad=-1))
    group = SpawnWorkerGroup(WorkerSpec(Worker), lay_out_ranks(1))
    group.run_all("setup_data_plane", {"impl": "local"}, schema.added_fields())
    [(cut, padded, train)] = group.run_all("cut")
    group.shutdown()
    assert cut == [[1, 2], [1, 5]], cut
    assert padded == [[0, 1, -1, -1, -1], [0, 1, 2, 3, 4]], padded
    assert train == DP_TRAIN_FIELDS == [*schema.DP_TRAIN_FIELDS] and "hints" in train, train
    assert "hints" in schema.ROLLOUT_FIELDS and "hints" in schema.PER_TOKEN_FIELDS
"""


def test_a_column_that_a_user_declares_reaches_workers_and_every_list_of_the_table(tmp_path: Path) -> None:
    script = tmp_path / "own_column.py"
    script.write_text(OWN)
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_a_name_is_declared_in_one_way() -> None:
    own = FIELDS["advantages"]
    schema.declare(own)
    assert list(FIELDS).count("advantages") == 1
    with pytest.raises(SchemaError, match="column 'advantages' is declared as"):
        schema.declare(FieldSpec("advantages", Kind.PER_SAMPLE, torch.float32))
    assert FIELDS["advantages"] is own


def test_tensors_need_a_dtype_and_objects_have_none() -> None:
    assert FieldSpec("x", Kind.PER_SAMPLE, torch.float32).accepts == {torch.float32}
    with pytest.raises(SchemaError, match="'x' is declared as per_token with dtype=None"):
        FieldSpec("x", Kind.PER_TOKEN)
    with pytest.raises(SchemaError, match=r"'x' is declared as object with dtype=torch\.int64"):
        FieldSpec("x", Kind.OBJECT, torch.int64)


def test_a_dtype_that_a_declared_column_does_not_take_is_refused_by_name() -> None:
    check_declared("input_ids", torch.ones(1, 1, dtype=torch.int32))
    check_declared("undeclared", torch.ones(1, dtype=torch.complex64))
    with pytest.raises(SchemaError, match=r"'input_ids'.*got torch\.float32"):
        check_declared("input_ids", torch.ones(1, 1))
    with pytest.raises(SchemaError, match=r"'message_log'.*objects"):
        check_declared("message_log", torch.ones(1, dtype=torch.int64))

import pytest
import torch

from headrace.data_plane import schema
from headrace.data_plane.schema import (
    FIELDS,
    Kind,
    check_dtype,
    fields_with_optional_routed_experts,
    pad_values,
)
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


def test_a_dtype_that_a_declared_column_does_not_take_is_refused_by_name() -> None:
    check_dtype("input_ids", torch.int32)
    check_dtype("undeclared", torch.complex64)
    with pytest.raises(SchemaError, match=r"'input_ids'.*got torch\.float32"):
        check_dtype("input_ids", torch.float32)
    with pytest.raises(SchemaError, match=r"'message_log'.*objects"):
        check_dtype("message_log", torch.int64)

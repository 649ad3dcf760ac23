"""Microbatches: what the forward pass gets, how many there are, and what a loss is normalised by."""

from typing import Any

import pytest
import torch

from headrace.compat.automodel_data import (
    ProcessedInputs,
    get_microbatch_iterator,
    make_processed_microbatch_iterator,
    process_global_batch,
    process_microbatch,
    setting,
)
from headrace.compat.packing import get_flash_attention_kwargs
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.distributed.multimodal import PackedTensor
from headrace.errors import ConfigError, SchemaError
from headrace.models.automodel.data import Packing, forward_kwargs
from headrace.models.interfaces import LossType
from reference_training import PolicyGradient
from tiny_models import tiny_batch, tiny_policy_config, tiny_tokenizer

LENGTHS = [5, 9, 2, 7, 3, 8, 6, 4]
FIXED: dict[str, Any] = {"sequence_packing": {"enabled": False}, "dynamic_batching": {"enabled": False}}
PACKED: dict[str, Any] = {"sequence_packing": {"enabled": True}, "dynamic_batching": {"enabled": False}}
DYNAMIC: dict[str, Any] = {"sequence_packing": {"enabled": False}, "dynamic_batching": {"enabled": True}}
PACKING_ARGS: Any = {
    "algorithm": "modified_first_fit_decreasing",
    "input_key": "input_ids",
    "input_lengths_key": "input_lengths",
    "sequence_length_pad_multiple": 1,
    "max_tokens_per_microbatch": 16,
}
DYNAMIC_ARGS: Any = {
    "input_key": "input_ids",
    "input_lengths_key": "input_lengths",
    "sequence_length_round": 4,
    "max_tokens_per_microbatch": 24,
}


def _rows_of(batch: BatchedDataDict) -> list[list[int]]:
    """The rows' tokens without padding: names for rows that no reordering can change."""
    return [row[:n].tolist() for row, n in zip(batch["input_ids"], batch["input_lengths"].tolist())]


def _planned(kind: str, shards: int = 1, lengths: list[int] = LENGTHS) -> list[BatchedDataDict]:
    args = (
        {"dynamic_batching_args": DYNAMIC_ARGS}
        if kind == "dynamic"
        else {"sequence_packing_args": PACKING_ARGS}
    )
    parts, _ = tiny_batch(lengths).shard_by_batch_size(shards, **args)
    return list(parts)


# One microbatch.


def test_a_padded_microbatch_has_a_mask_over_each_rows_tokens_and_plain_positions() -> None:
    inputs = process_microbatch(tiny_batch([3, 5, 1]), tiny_tokenizer(), False, FIXED, 1)
    assert inputs.attention_mask is not None
    assert inputs.position_ids is not None
    assert inputs.attention_mask.dtype == torch.bool
    assert inputs.attention_mask.tolist() == [[t < n for t in range(5)] for n in (3, 5, 1)]
    assert inputs.position_ids.tolist() == [list(range(5))] * 3
    assert (inputs.seq_len, inputs.has_flash_attention, inputs.is_multimodal) == (5, False, False)


def test_a_packed_microbatch_is_one_row_with_positions_and_boundaries() -> None:
    data = tiny_batch([3, 5, 1])
    inputs = process_microbatch(data, tiny_tokenizer(), True, PACKED, 1)
    assert inputs.input_ids.tolist() == [[t for row in _rows_of(data) for t in row]]
    assert inputs.position_ids is not None
    assert inputs.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 0]]
    assert inputs.attention_mask is None
    assert inputs.has_flash_attention
    assert inputs.forward_kwargs()["cu_seq_lens_q"].tolist() == [0, 3, 8, 9]
    assert inputs.forward_kwargs()["max_length_q"] == 5


def test_a_packed_row_is_filled_to_the_multiple_as_a_sequence_of_its_own() -> None:
    cfg = {**PACKED, "make_sequence_length_divisible_by": 8}
    inputs = process_microbatch(tiny_batch([3, 6]), tiny_tokenizer(), True, cfg, 1)
    assert inputs.input_ids.shape == (1, 16)
    assert inputs.position_ids is not None
    assert inputs.position_ids[0, 9:].tolist() == list(range(7))
    assert inputs.forward_kwargs()["cu_seq_lens_q"].tolist() == [0, 3, 9, 16]
    assert inputs.input_ids[0, 9:].tolist() == [tiny_tokenizer().pad_token_id] * 7


def test_context_parallel_buffers_are_the_tensors_to_split_and_their_positions() -> None:
    inputs = process_microbatch(tiny_batch([3, 4]), tiny_tokenizer(), False, FIXED, 2)
    assert inputs.has_context_parallel
    assert inputs.seq_index is not None
    assert inputs.seq_index.tolist() == [[0, 1, 2, 3]]
    assert [b.shape[1] for b in inputs.cp_buffers] == [4, 4, 4]
    assert not process_microbatch(tiny_batch([3]), tiny_tokenizer(), False, FIXED, 1).has_context_parallel


def test_boundaries_count_as_flash_attention_in_either_form() -> None:
    ids = torch.zeros(1, 3, dtype=torch.int64)
    assert not ProcessedInputs(ids, 3).has_flash_attention
    assert ProcessedInputs(ids, 3, flash_attn_kwargs={"cu_seq_lens_q": ids}).has_flash_attention
    boundaries = get_flash_attention_kwargs(torch.tensor([3]))
    assert ProcessedInputs(ids, 3, flash_attn_kwargs=boundaries).has_flash_attention


def test_packing_cannot_be_split_over_context_parallel_ranks() -> None:
    with pytest.raises(ConfigError, match="context parallel size 2"):
        process_microbatch(tiny_batch([3]), tiny_tokenizer(), True, PACKED, 2)


def test_lengths_are_required() -> None:
    data = tiny_batch([3])
    del data["input_lengths"]
    with pytest.raises(SchemaError, match="needs the column 'input_lengths'"):
        process_microbatch(data, tiny_tokenizer(), False, FIXED, 1)


def _with_media() -> BatchedDataDict:
    data = tiny_batch([3, 4])
    data["pixel_values"] = PackedTensor([torch.ones(2, 6), torch.zeros(3, 6)], dim_to_pack=0)
    return data


def test_media_reach_the_model_and_leave_positions_to_it() -> None:
    inputs = process_microbatch(_with_media(), tiny_tokenizer(), False, FIXED, 1)
    assert inputs.is_multimodal
    assert inputs.position_ids is None
    kwargs = inputs.forward_kwargs()
    assert kwargs["pixel_values"].shape == (5, 6)
    assert kwargs["attention_mask"].shape == (2, 4)


@pytest.mark.parametrize(
    ("packing", "cp_size", "extra", "named"),
    [
        (True, 1, {}, "sequence_packing.enabled"),
        (False, 2, {}, "context parallel size 2"),
        (False, 1, {"dtensor_cfg": {"sequence_parallel": True}}, "dtensor_cfg.sequence_parallel"),
    ],
)
def test_media_are_refused_where_positions_would_be_wrong(
    packing: bool, cp_size: int, extra: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=rf"pixel_values.*{named}.*switch it off"):
        process_microbatch(_with_media(), tiny_tokenizer(), packing, {**FIXED, **extra}, cp_size)


# Iterators.


def test_fixed_size_microbatches_hold_the_rows_in_order() -> None:
    data = tiny_batch(LENGTHS)
    microbatches, length = get_microbatch_iterator(data, FIXED, 2, None, tiny_tokenizer())
    made = list(microbatches)
    assert length == len(made) == 4
    assert [row for m in made for row in _rows_of(m.data_dict)] == _rows_of(data)
    assert {(m.original_batch_size, m.original_seq_len) for m in made} == {(2, 9)}


def test_a_remainder_is_an_error_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match=r"249.*\(2\).*train_micro_batch_size"):
        get_microbatch_iterator(tiny_batch([2] * 249), FIXED, 2, None, tiny_tokenizer())


def test_the_ranks_of_a_replica_get_packed_rows_that_they_divide() -> None:
    parts = tiny_batch([5, 3, 7, 1]).microbatches("fixed", 2)
    made = [forward_kwargs(part, Packing(multiple=4, ranks=4)) for part in parts]
    assert [m["input_ids"].shape for m in made] == [(1, 8), (1, 8)]
    assert [m["cu_seq_lens_q"].tolist() for m in made] == [[0, 5, 8], [0, 7, 8]]


def test_media_cannot_be_split_over_the_ranks_of_a_replica() -> None:
    with pytest.raises(ConfigError, match=r"pixel_values.*policy\.parallel\.tensor=1"):
        forward_kwargs(_with_media(), Packing(multiple=2, ranks=2))


def test_media_cannot_be_packed_and_a_policy_says_which_switch() -> None:
    with pytest.raises(ConfigError, match=r"pixel_values.*sequence_packing\.enabled.*switch it off"):
        forward_kwargs(_with_media(), Packing())


@pytest.mark.parametrize("packed", [False, True])
def test_a_policys_forward_gets_what_a_processed_microbatch_has(packed: bool) -> None:
    data, pad = tiny_batch([3, 0, 5]), int(tiny_tokenizer().pad_token_id)
    kwargs = forward_kwargs(data, Packing(4, pad) if packed else None)
    cfg = {"make_sequence_length_divisible_by": 4}
    expected = process_microbatch(data, tiny_tokenizer(), packed, cfg, 1).forward_kwargs()
    assert {n: v.tolist() if isinstance(v, torch.Tensor) else v for n, v in kwargs.items()} == {
        n: v.tolist() if isinstance(v, torch.Tensor) else v for n, v in expected.items()
    }


def test_media_come_with_a_mask_and_without_positions() -> None:
    expected = process_microbatch(_with_media(), tiny_tokenizer(), False, FIXED, 1).forward_kwargs()
    kwargs = forward_kwargs(_with_media(), None)
    assert kwargs.keys() == expected.keys()
    assert torch.equal(kwargs["attention_mask"], expected["attention_mask"])
    assert torch.equal(kwargs["pixel_values"], expected["pixel_values"])
    assert kwargs["position_ids"] is None


@pytest.mark.parametrize("kind", ["packed", "dynamic"])
def test_planned_microbatches_hold_every_row_once_in_the_plans_order(kind: str) -> None:
    (data,) = _planned(kind)
    cfg = PACKED if kind == "packed" else DYNAMIC
    microbatches, length = get_microbatch_iterator(data, cfg, 1, None, tiny_tokenizer())
    made = list(microbatches)
    assert data.micro_batch_lengths is not None
    assert length == len(made) == len(data.micro_batch_lengths[0])
    assert [row for m in made for row in _rows_of(m.data_dict)] == _rows_of(data)
    widths = [m.processed_inputs.input_ids.shape[1] for m in made]
    if kind == "packed":
        assert widths == data.micro_batch_lengths[0]
    else:
        # Never wider than the batch is.
        assert widths == [min(n, 9) for n in data.micro_batch_lengths[0]]
        assert all(m.original_seq_len == w for m, w in zip(made, widths))


def test_a_microbatch_of_the_plan_without_rows_weighs_nothing() -> None:
    (data,) = _planned("packed", lengths=[4, 4])
    assert data.micro_batch_indices is not None
    assert data.micro_batch_lengths is not None
    data.micro_batch_indices[0].append([2, 2])
    data.micro_batch_lengths[0].append(1)
    microbatches, length = get_microbatch_iterator(data, PACKED, 1, None, tiny_tokenizer())
    last = list(microbatches)[-1]
    assert length == 2
    assert last.processed_inputs.input_ids.shape == (1, 1)
    assert not last.data_dict["token_mask"].any()
    assert not last.data_dict["sample_mask"].any()


def test_packing_is_read_from_the_config() -> None:
    data = tiny_batch([3, 4])
    (packed,) = make_processed_microbatch_iterator(iter([data]), tiny_tokenizer(), PACKED, 1)
    (padded,) = make_processed_microbatch_iterator(iter([data]), tiny_tokenizer(), FIXED, 1)
    assert packed.processed_inputs.input_ids.shape == (1, 7)
    assert padded.processed_inputs.input_ids.shape == (2, 4)


def test_a_mapping_and_the_config_model_give_the_same_settings() -> None:
    model = tiny_policy_config(dynamic_batching={"enabled": True})
    for key in ("dynamic_batching.enabled", "sequence_packing.enabled", "make_sequence_length_divisible_by"):
        assert setting(model.model_dump(), key, None) == setting(model, key, None) is not None
    assert setting(model, "dtensor_cfg.sequence_parallel", False) is False
    assert setting({}, "sequence_packing.enabled", False) is False


# Global batches.


def test_a_global_batch_counts_valid_sequences_and_tokens_after_the_first_column() -> None:
    data = tiny_batch(LENGTHS)
    data["sample_mask"][5] = 0.0
    data["token_mask"][4] = torch.tensor([1] * 3 + [0] * 6, dtype=torch.uint8)
    result = process_global_batch(data, PolicyGradient(), None, batch_idx=1, batch_size=4)
    rows = slice(4, 8)
    expected = sum(
        int(mask[1:].sum())
        for mask, keep in zip(data["token_mask"][rows], data["sample_mask"][rows].tolist())
        if keep
    )
    assert _rows_of(result["batch"]) == _rows_of(data)[rows]
    assert float(result["global_valid_seqs"]) == 3
    assert float(result["global_valid_toks"]) == expected
    assert result["global_valid_toks"].dim() == 0


def test_a_global_batch_takes_its_part_of_an_uneven_plan() -> None:
    parts, _ = tiny_batch(LENGTHS).shard_by_batch_size(1, batch_size=4, sequence_packing_args=PACKING_ARGS)
    data = parts[0]
    batch = process_global_batch(data, PolicyGradient(), None, batch_idx=1, batch_size=4)["batch"]
    assert data.micro_batch_indices is not None
    assert batch.micro_batch_indices == [data.micro_batch_indices[1]]
    assert sorted(batch["input_lengths"].tolist()) == sorted(LENGTHS[4:])


@pytest.mark.parametrize("column", ["sample_mask", "token_mask"])
def test_a_missing_mask_is_named(column: str) -> None:
    data = tiny_batch(LENGTHS)
    del data[column]
    with pytest.raises(SchemaError, match=column):
        process_global_batch(data, PolicyGradient(), None, batch_idx=0, batch_size=4)


def test_a_sequence_level_loss_needs_no_token_mask() -> None:
    data = tiny_batch(LENGTHS)
    del data["token_mask"]
    loss = PolicyGradient(LossType.SEQUENCE_LEVEL)
    result = process_global_batch(data, loss, None, batch_idx=0, batch_size=8)
    assert float(result["global_valid_seqs"]) == 8

"""The edge rules of the codec, one test each, named for the rule."""

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from headrace.data_plane.codec import (
    RowPacker,
    materialize,
    maybe_pack_jagged,
    nest,
    pack_jagged_fields,
    pack_per_token_field,
    response_from_nested,
    stack_or_nest,
    to_nested_by_length,
    unwrap_wire_stripped_payload,
)
from headrace.data_plane.wire import wire_tensordict
from headrace.distributed.columns import object_array
from headrace.distributed.multimodal import PackedTensor
from headrace.errors import SchemaError
from ragged_cases import DTYPES, arbitrary
from reference import pad, rows_of, same_bits, same_rows, unpad


def nested(*rows: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return nest([torch.tensor(row, dtype=dtype) for row in rows])


# to_nested_by_length


def test_rows_are_stripped_to_their_lengths() -> None:
    padded = torch.arange(12).reshape(3, 4)
    assert same_rows(rows_of(to_nested_by_length(padded, torch.tensor([2, 4, 1]))), unpad(padded, [2, 4, 1]))


def test_rows_of_length_zero_stay() -> None:
    packed = to_nested_by_length(torch.ones(3, 2), torch.tensor([0, 2, 0]))
    assert packed.shape[0] == 3
    assert [len(row) for row in rows_of(packed)] == [0, 2, 0]


def test_lengths_all_zero_give_empty_rows() -> None:
    assert [len(row) for row in rows_of(to_nested_by_length(torch.ones(2, 3), torch.tensor([0, 0])))] == [
        0,
        0,
    ]


def test_a_length_above_the_width_is_refused_by_row() -> None:
    with pytest.raises(SchemaError, match="row 1 has length 5"):
        to_nested_by_length(torch.ones(3, 4), torch.tensor([2, 5, 1]))


def test_a_negative_length_is_refused_by_row() -> None:
    with pytest.raises(SchemaError, match="row 2 has length -1"):
        to_nested_by_length(torch.ones(3, 4), torch.tensor([2, 3, -1]))


@pytest.mark.parametrize(
    "lengths", [torch.tensor([1, 2]), torch.tensor([[1, 2, 3]]), torch.tensor([1.0, 2.0, 3.0])]
)
def test_lengths_of_the_wrong_shape_or_dtype_are_refused(lengths: torch.Tensor) -> None:
    with pytest.raises(SchemaError, match="lengths"):
        to_nested_by_length(torch.ones(3, 4), lengths)


def test_fewer_than_two_dimensions_are_refused() -> None:
    with pytest.raises(SchemaError, match=r"expected \(N, S, ...\)"):
        to_nested_by_length(torch.ones(3), torch.tensor([1, 1, 1]))


# stack_or_nest


def test_rows_of_equal_shape_are_stacked() -> None:
    stacked = stack_or_nest([torch.ones(4, 100), torch.zeros(4, 100)])
    assert not stacked.is_nested
    assert stacked.shape == (2, 4, 100)


def test_ragged_rows_are_nested() -> None:
    rows = [torch.ones(2, 3), torch.zeros(5, 3), torch.ones(0, 3)]
    packed = stack_or_nest(rows)
    assert packed.layout == torch.jagged
    assert same_rows(rows_of(packed), rows)


def test_no_rows_give_an_empty_tensor() -> None:
    assert stack_or_nest([]).shape == (0,)


def test_single_numbers_are_stacked() -> None:
    assert stack_or_nest([torch.tensor(1), torch.tensor(2)]).tolist() == [1, 2]


@pytest.mark.parametrize(
    "other",
    [torch.zeros(4, 200), torch.zeros(4), torch.zeros(4, 100, 1), torch.zeros(4, 100, dtype=torch.float64)],
    ids=["trailing size", "fewer dims", "more dims", "dtype"],
)
def test_rows_that_differ_in_trailing_dims_or_dtype_are_refused_by_row(other: torch.Tensor) -> None:
    with pytest.raises(SchemaError, match="row 1 has shape"):
        stack_or_nest([torch.ones(4, 100), other])


# unwrap_wire_stripped_payload


def test_the_payload_of_non_tensor_data_is_unwrapped() -> None:
    assert unwrap_wire_stripped_payload(NonTensorData({"a": [1]})) == {"a": [1]}
    assert unwrap_wire_stripped_payload(NonTensorData(None)) is None


def test_a_surviving_payload_dict_is_unwrapped() -> None:
    item = TensorDict({}, batch_size=[])
    item.__dict__["_non_tensordict"] = {"data": {"role": "user"}}
    assert unwrap_wire_stripped_payload(item) == {"role": "user"}


def test_the_empty_batchless_tensordict_is_none() -> None:
    assert unwrap_wire_stripped_payload(TensorDict({}, batch_size=[])) is None


@pytest.mark.parametrize(
    "item",
    [
        TensorDict({"x": torch.ones(())}, batch_size=[]),
        TensorDict({}, batch_size=[2]),
        {"plain": "dict"},
        "text",
        0,
        [],
    ],
    ids=["with data", "with batch", "dict", "str", "zero", "list"],
)
def test_anything_else_is_returned_unchanged(item: object) -> None:
    assert unwrap_wire_stripped_payload(item) is item


# maybe_pack_jagged


def test_a_column_as_wide_as_the_longest_row_is_packed() -> None:
    packed = maybe_pack_jagged(torch.ones(2, 3, 5), torch.tensor([3, 1]))
    assert [tuple(row.shape) for row in rows_of(packed)] == [(3, 5), (1, 5)]


@pytest.mark.parametrize("shape", [(2, 4), (2, 2), (3, 3), (2,), (3,)], ids=str)
def test_a_column_of_any_other_shape_stays(shape: tuple[int, ...]) -> None:
    column = torch.ones(shape)
    assert maybe_pack_jagged(column, torch.tensor([3, 1])) is column


def test_an_empty_batch_stays() -> None:
    column = torch.ones(0, 0)
    assert maybe_pack_jagged(column, torch.tensor([], dtype=torch.int64)) is column


# pack_per_token_field


def test_a_tail_wider_than_the_longest_row_is_cut_per_row() -> None:
    padded = torch.arange(16).reshape(2, 8)
    assert same_rows(rows_of(pack_per_token_field(padded, torch.tensor([5, 3]))), unpad(padded, [5, 3]))


@pytest.mark.parametrize("shape", [(3, 8), (2,), (2, 4)], ids=["wrong N", "one dim", "too short"])
def test_the_raw_function_falls_back_to_rectangular(shape: tuple[int, ...]) -> None:
    column = torch.ones(shape)
    assert pack_per_token_field(column, torch.tensor([5, 3])) is column


# pack_jagged_fields


def test_a_batch_is_packed_column_by_column() -> None:
    texts = object_array([["a"], {"b": 1}])
    packed = pack_jagged_fields(
        {
            "input_ids": torch.tensor([[1, 2, 0, 0], [3, 4, 5, 0]]),
            "sample_mask": torch.ones(2),
            "scores": torch.ones(2, 7),
            "extra": torch.ones(2, 3),
            "texts": texts,
        },
        lengths=torch.tensor([2, 3]),
    )
    assert packed.batch_size == torch.Size([2])
    assert [row.tolist() for row in rows_of(packed["input_ids"])] == [[1, 2], [3, 4, 5]]
    assert packed["sample_mask"].shape == (2,)
    assert packed["scores"].shape == (2, 7)
    assert [len(row) for row in rows_of(packed["extra"])] == [2, 3]
    assert packed["texts"] is texts


def test_without_lengths_everything_stays_rectangular() -> None:
    packed = pack_jagged_fields({"input_ids": torch.ones(2, 3, dtype=torch.int64)}, lengths=None)
    assert packed.batch_size == torch.Size([2])
    assert not packed["input_ids"].is_nested


@pytest.mark.parametrize(
    "value", [[1, 2], "ab", 3, np.arange(2), None], ids=["list", "str", "int", "numeric array", "none"]
)
def test_other_value_types_are_a_type_error_naming_the_column(value: object) -> None:
    with pytest.raises(TypeError, match="'odd'"):
        pack_jagged_fields({"odd": value}, lengths=torch.tensor([1, 2]))  # type: ignore[dict-item]


def test_columns_named_as_token_aligned_are_packed_whatever_their_width() -> None:
    packed = pack_jagged_fields(
        {"extra": torch.ones(2, 9)}, lengths=torch.tensor([2, 3]), token_aligned_fields={"extra"}
    )
    assert [len(row) for row in rows_of(packed["extra"])] == [2, 3]


def test_a_batch_without_columns_has_the_rows_of_its_lengths() -> None:
    assert pack_jagged_fields({}, lengths=torch.tensor([1, 2])).batch_size == torch.Size([2])


def test_columns_with_different_row_counts_are_refused() -> None:
    with pytest.raises(SchemaError, match="column 'b' has 3 rows; expected 2"):
        pack_jagged_fields({"a": torch.ones(2), "b": torch.ones(3)}, lengths=None)


# RowPacker: what the write path does with declared columns


def wired(leaf: Any) -> torch.Tensor:
    column: torch.Tensor = wire_tensordict({"x": leaf}, 2)["x"]
    return column


def test_a_per_token_column_of_width_three_with_lengths_two_and_five_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"'input_ids' is 3 tokens wide; row 1 has 5 tokens"):
        RowPacker([2, 5]).pack("input_ids", torch.ones(2, 3, dtype=torch.int64))


def test_a_per_token_column_with_another_row_count_is_refused() -> None:
    with pytest.raises(SchemaError, match="'input_ids' has 3 rows; expected 2"):
        RowPacker([2, 5]).pack("input_ids", torch.ones(3, 5))


def test_a_per_token_column_of_one_dimension_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"'input_ids' has 1 dimensions; .*\(N, S\)$"):
        RowPacker([2, 5]).pack("input_ids", torch.ones(2, dtype=torch.int64))


def test_a_jagged_column_with_other_row_lengths_is_refused_with_both_sizes() -> None:
    with pytest.raises(SchemaError, match="'prev_logprobs' has 2 tokens in row 1; its sequence length is 3"):
        RowPacker([1, 3]).pack("prev_logprobs", nested([0], [0, 1]))


def test_a_jagged_column_ragged_in_another_dimension_is_refused() -> None:
    column = torch.nested.as_nested_tensor([torch.ones(1, 2), torch.ones(1, 3)], layout=torch.jagged)
    packer = RowPacker([2, 3], per_token=frozenset({"extra"}))
    with pytest.raises(SchemaError, match="ragged in dimension 2"):
        packer.pack("extra", column)


def test_routes_need_their_two_trailing_dimensions() -> None:
    packer = RowPacker([2, 1])
    packed = wired(packer.pack("routed_experts", torch.ones(2, 3, 4, 2, dtype=torch.uint8)))
    assert [tuple(row.shape) for row in rows_of(packed)] == [(2, 4, 2), (1, 4, 2)]
    with pytest.raises(SchemaError, match="'routed_experts' has 3 dimensions"):
        packer.pack("routed_experts", torch.ones(2, 3, 8, dtype=torch.uint8))


def test_advantages_of_one_value_per_sample_stay_so() -> None:
    advantages = torch.tensor([0.5, -0.5])
    assert RowPacker([2, 3]).pack("advantages", advantages) is advantages


def test_per_sample_columns_of_shape_n_by_one_become_n() -> None:
    assert RowPacker([2, 3]).pack("sample_mask", torch.ones(2, 1)).shape == (2,)
    with pytest.raises(SchemaError, match="'sample_mask' has shape"):
        RowPacker([2, 3]).pack("sample_mask", torch.ones(2, 2))


def test_objects_and_tensors_are_not_taken_for_one_another() -> None:
    with pytest.raises(SchemaError, match="'input_ids' is an array of objects"):
        RowPacker([1, 1]).pack("input_ids", object_array([1, 2]))
    with pytest.raises(SchemaError, match="'message_log' is declared as object and takes objects"):
        RowPacker([1, 1]).pack("message_log", torch.ones(2))


def test_undeclared_columns_are_never_guessed_at() -> None:
    scores = torch.ones(2, 3)
    assert RowPacker([3, 1]).pack("class_scores", scores) is scores


def test_a_column_that_shares_the_offsets_already_is_not_wrapped_again() -> None:
    packer = RowPacker([2, 1])
    packed = wired(packer.pack("input_ids", torch.ones(2, 2, dtype=torch.int64)))
    assert packer.pack("input_ids", packed) is packed
    column = nest([torch.tensor([1, 2]), torch.tensor([3])])
    assert RowPacker([2, 1]).pack("input_ids", column) is column


def test_a_jagged_column_is_not_copied() -> None:
    column = nest([torch.tensor([1, 2]), torch.tensor([3])])
    packed = wired(RowPacker([2, 1]).pack("input_ids", column))
    assert packed.values().data_ptr() == column.values().data_ptr()


def test_per_token_columns_of_a_batch_share_their_offsets() -> None:
    packer = RowPacker([2, 1])
    columns = {"prev_logprobs": torch.ones(2, 2), "generation_logprobs": nested([1.0, 2.0], [3.0])}
    wire = wire_tensordict({name: packer.pack(name, column) for name, column in columns.items()}, 2)
    total = wire["prev_logprobs"] + wire["generation_logprobs"]
    assert total.values().tolist() == [2, 3, 4]


# response_from_nested


def test_the_response_is_shifted_left_by_one() -> None:
    full = nested([10, 11, 12, 13], [20, 21, 22])
    response = response_from_nested(full, nested([1, 1], [1]))
    assert [row.tolist() for row in rows_of(response)] == [[11, 12], [21]]


def test_two_prompts_of_seven_tokens_with_responses_of_three_and_five() -> None:
    full = nested(list(range(10)), list(range(100, 112)))
    response = response_from_nested(full, nested([1] * 3, [1] * 5))
    assert [row.tolist() for row in rows_of(response)] == [[6, 7, 8], [106, 107, 108, 109, 110]]


def test_a_response_that_fills_the_row_is_refused_by_row_and_never_reads_the_neighbour() -> None:
    full = nested([0, 1, 2, 3, 4], [10, 11, 12])
    with pytest.raises(SchemaError, match="row 0 has a response of 5 tokens in 5"):
        response_from_nested(full, nested([1] * 5, [1] * 2))
    with pytest.raises(SchemaError, match="row 1 has a response of 3 tokens in 3"):
        response_from_nested(full, nested([1] * 4, [1] * 3))


def test_a_response_of_length_zero_gives_an_empty_row() -> None:
    response = response_from_nested(nested([1, 2], [3], [4, 5]), nested([], [], [1]))
    assert [row.tolist() for row in rows_of(response)] == [[], [], [4]]


def test_a_whole_group_of_empty_responses_gives_empty_rows() -> None:
    response = response_from_nested(nested([1, 2], []), nested([], []))
    assert [row.tolist() for row in rows_of(response)] == [[], []]


def test_scores_and_masks_that_are_not_jagged_are_refused_by_name() -> None:
    jagged = to_nested_by_length(torch.ones(1, 2), torch.tensor([2]))
    for full, mask, name in ((torch.ones(1, 2), jagged, "full"), (jagged, torch.ones(1, 1), "response_mask")):
        with pytest.raises(SchemaError, match=f"^{name} is dense"):
            response_from_nested(full, mask)


def test_a_response_mask_with_another_row_count_is_refused() -> None:
    with pytest.raises(SchemaError, match="1 response rows for 2 rows"):
        response_from_nested(nested([1, 2], [3]), nested([1]))


# materialize


def wire(rows: int, **columns: object) -> TensorDict:
    return TensorDict(columns, batch_size=[rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("trailing", [(), (2,), (3, 1, 2)], ids=str)
def test_every_dtype_is_padded(dtype: torch.dtype, trailing: tuple[int, ...]) -> None:
    rows = [arbitrary((n, *trailing), dtype, seed=n) for n in (2, 0, 3)]
    batch = materialize(wire(3, x=nest(rows)), pad_value_dict={"x": 1})
    assert same_bits(batch["x"], pad(rows, 3, 1))


def test_pad_to_seqlen_widens_nested_and_declared_columns_only() -> None:
    batch = materialize(
        wire(
            2,
            input_ids=nested([1, 2], [3], dtype=torch.int64),
            generation_logprobs=torch.ones(2, 2),
            advantages=torch.ones(2),
            class_scores=torch.ones(2, 3),
            image_grid=torch.ones(2, 3, 4),
            crops=nested([1], [2, 3]),
            sample_mask=torch.ones(2),
        ),
        pad_to_seqlen=8,
        pad_value_dict={"input_ids": 9},
    )
    assert batch["input_ids"].tolist() == [[1, 2] + [9] * 6, [3] + [9] * 7]
    assert batch["generation_logprobs"].tolist() == [[1.0, 1.0] + [0.0] * 6] * 2
    assert batch["advantages"].shape == (2,)
    assert batch["class_scores"].shape == (2, 3)
    assert batch["image_grid"].shape == (2, 3, 4)
    assert batch["crops"].shape == (2, 8)
    assert batch["sample_mask"].shape == (2,)


def test_a_dense_declared_column_is_widened_with_its_pad_value() -> None:
    dense = TensorDict({"input_ids": torch.ones(1, 2, dtype=torch.int64)}, batch_size=[1])
    got = materialize(dense, pad_value_dict={"input_ids": 9}, pad_to_seqlen=4)
    assert got["input_ids"].tolist() == [[1, 1, 9, 9]]


def test_pad_to_seqlen_below_the_longest_row_changes_nothing() -> None:
    assert materialize(wire(2, x=nested([1, 2, 3], [4])), pad_to_seqlen=2)["x"].shape == (2, 3)


def test_rows_of_equal_length_keep_their_shape() -> None:
    rows = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])]
    assert materialize(wire(2, x=nest(rows)))["x"].tolist() == [[[1.0], [2.0]], [[3.0], [4.0]]]


def test_lengths_three_five_four_are_padded_to_five() -> None:
    packed = to_nested_by_length(torch.ones(3, 12), torch.tensor([3, 5, 4]))
    assert materialize(wire(3, x=packed))["x"].shape == (3, 5)


def test_rows_of_length_zero_become_padding() -> None:
    assert materialize(wire(2, x=nested([], [])), pad_to_seqlen=2)["x"].tolist() == [[0, 0], [0, 0]]


def test_an_empty_shard_materializes() -> None:
    empty = pack_jagged_fields(
        {"input_ids": torch.ones(0, 0, dtype=torch.int64), "sample_mask": torch.ones(0)},
        lengths=torch.tensor([], dtype=torch.int64),
    )
    batch = materialize(empty, pad_to_seqlen=4)
    assert (batch["input_ids"].shape, batch["sample_mask"].shape) == ((0, 4), (0,))


def test_the_jagged_layout_keeps_columns_nested_and_addable() -> None:
    packed = pack_jagged_fields(
        {
            "prev_logprobs": torch.ones(2, 2),
            "generation_logprobs": torch.ones(2, 2),
            "scores": torch.ones(2, 5),
        },
        lengths=torch.tensor([2, 1]),
    )
    batch = materialize(packed, layout="jagged")
    assert batch["scores"].shape == (2, 5)
    assert (batch["prev_logprobs"] - batch["generation_logprobs"]).values().tolist() == [0, 0, 0]


def test_a_column_ragged_in_its_last_dimension_is_padded_there() -> None:
    rows = [torch.ones(4, 2), torch.ones(4, 3)]
    packed = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    batch = materialize(wire(2, x=packed))
    assert batch["x"].shape == (2, 4, 3)
    assert batch["x"][0].tolist() == [[1, 1, 0]] * 4


def test_per_sample_columns_that_a_backend_made_two_dimensional_come_back_flat() -> None:
    batch = materialize(
        wire(2, sample_mask=torch.ones(2, 1), input_lengths=nested([5], [7], dtype=torch.int64))
    )
    assert batch["sample_mask"].shape == (2,)
    assert batch["input_lengths"].tolist() == [5, 7]
    with pytest.raises(SchemaError, match="'input_lengths' has 2 values in row 1"):
        materialize(wire(2, input_lengths=nested([5], [7, 8])))


@pytest.mark.parametrize(
    "leaf",
    [
        object_array(["x", {"a": [1]}]),
        NonTensorStack(NonTensorData("x"), NonTensorData({"a": [1]})),
        LazyStackedTensorDict(NonTensorData("x"), NonTensorData({"a": [1]})),
    ],
    ids=["object array", "stack", "lazy stack"],
)
def test_object_leaves_become_object_arrays(leaf: object) -> None:
    column = materialize(wire(2, log=leaf))["log"]
    assert column.dtype == object
    assert column.tolist() == ["x", {"a": [1]}]


def test_lists_of_equal_length_stay_objects() -> None:
    column = materialize(wire(2, log=object_array([[1, 2], [3, 4]])))["log"]
    assert (column.shape, column.tolist()) == ((2,), [[1, 2], [3, 4]])


def test_one_object_for_all_rows_is_repeated() -> None:
    column = materialize(wire(3, log=NonTensorData("same", batch_size=[3])))["log"]
    assert column.tolist() == ["same"] * 3


def test_object_columns_of_a_batchless_tensordict_are_rows_too() -> None:
    carrier = TensorDict({"log": object_array(["x", None]), "ids": torch.ones(2)}, batch_size=[])
    assert materialize(carrier)["log"].tolist() == ["x", None]


def test_objects_whose_payload_was_stripped_become_none() -> None:
    stripped = TensorDict.stack([TensorDict({}, batch_size=[]), TensorDict({}, batch_size=[])])
    assert materialize(wire(2, log=stripped))["log"].tolist() == [None, None]


def test_media_rows_come_back_as_one_packed_tensor() -> None:
    rows = [PackedTensor([torch.ones(2, 3)]), PackedTensor([None])]
    batch = materialize(wire(2, images=object_array(rows)))
    assert isinstance(batch["images"], PackedTensor)
    assert [None if t is None else tuple(t.shape) for t in batch["images"].tensors] == [(2, 3), None]


def test_a_nested_tensordict_is_refused_by_name() -> None:
    with pytest.raises(SchemaError, match="'odd'"):
        materialize(wire(2, odd=TensorDict({"x": torch.ones(2)}, batch_size=[2])))


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(SchemaError, match="layout='ragged'"):
        materialize(wire(1), layout="ragged")  # type: ignore[arg-type]


def test_a_pad_value_that_does_not_fit_names_the_column() -> None:
    packed = nested([1], [2, 3], dtype=torch.uint8)
    with pytest.raises(SchemaError, match="'mask'"):
        materialize(wire(2, mask=packed), pad_value_dict={"mask": -1})


@pytest.mark.parametrize("pad", [None, "x"])
def test_a_pad_value_that_is_no_number_is_refused_with_its_column(pad: Any) -> None:
    # As of a tokenizer without a pad token.
    td = pack_jagged_fields({"input_ids": torch.ones(2, 3, dtype=torch.int64)}, lengths=torch.tensor([1, 3]))
    with pytest.raises(SchemaError, match=rf"column 'input_ids': pad value {pad} is no number.*torch\.int64"):
        materialize(td, pad_value_dict={"input_ids": pad})

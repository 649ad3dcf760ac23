import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference_packing as reference
from headrace.compat.batched_data_dict import BatchedDataDict as CallersBatch
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.distributed.multimodal import PackedTensor
from headrace.errors import ConfigError, SchemaError


def jagged(rows):
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def object_array(rows):
    array = np.empty(len(rows), dtype=object)
    array[:] = rows
    return array


def batch_of(ids):
    """A batch with one column of each kind; every column tells which row it is."""
    ids = list(ids)
    n = len(ids)
    rows = [torch.full((i % 3 + 1,), i) for i in ids]
    empty = torch.nested.nested_tensor_from_jagged(torch.zeros(0, dtype=torch.int64), torch.zeros(1).long())
    return BatchedDataDict(
        number=torch.tensor(ids, dtype=torch.int64),
        padded=torch.tensor(ids, dtype=torch.float32).reshape(n, 1).expand(n, 4).contiguous(),
        routes=torch.tensor(ids, dtype=torch.int32).reshape(n, 1, 1).expand(n, 4, 2).to(torch.uint16),
        jagged=jagged(rows) if n else empty,
        list=[{"row": i} for i in ids],
        objects=object_array([[i] * i for i in ids]) if n else np.empty(0, dtype=object),
        numbers=np.array(ids, dtype=np.float64),
        media=PackedTensor([torch.full((2, 3), i) if i % 2 else None for i in ids], dim_to_pack=0),
    )


def ids_of(batch):
    """The rows that a batch of `batch_of` holds; fails where a column disagrees or changed its kind."""
    ids = batch["number"].tolist()
    assert batch["padded"].tolist() == [[i] * 4 for i in ids]
    assert batch["routes"].to(torch.int64).tolist() == [[[i] * 2] * 4 for i in ids]
    assert batch["routes"].dtype == torch.uint16
    assert batch["jagged"].is_nested
    assert [r.tolist() for r in batch["jagged"].unbind()] == [[i] * (i % 3 + 1) for i in ids]
    assert batch["list"] == [{"row": i} for i in ids]
    assert batch["objects"].dtype == object
    assert batch["objects"].tolist() == [[i] * i for i in ids]
    assert isinstance(batch["numbers"], np.ndarray)
    assert batch["numbers"].tolist() == ids
    assert [None if t is None else t[0, 0].item() for t in batch["media"].tensors] == [
        i if i % 2 else None for i in ids
    ]
    assert batch.size == len(ids)
    return ids


# The algebra of rows, on every kind of column.


@settings(max_examples=100, deadline=None)
@given(data=st.data(), rows=st.integers(0, 9))
def test_select_slice_and_concat_do_to_every_column_what_lists_do(data, rows):
    ids = list(range(10, 10 + rows))
    batch = batch_of(ids)
    picked = data.draw(st.lists(st.integers(-rows, rows - 1), max_size=12)) if rows else []
    assert ids_of(batch.select_indices(picked)) == [ids[i] for i in picked]
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    assert ids_of(batch.slice(start, stop)) == ids[start:stop]
    parts = [batch.slice(0, start), batch.slice(start, stop), batch.slice(stop, rows)]
    assert ids_of(BatchedDataDict.from_batches(parts)) == ids
    assert ids_of(batch) == ids


@settings(max_examples=100, deadline=None)
@given(data=st.data(), rows=st.integers(1, 9))
def test_reordering_puts_row_i_at_place_i_and_undoes_a_selection(data, rows):
    ids = list(range(rows))
    places = data.draw(st.permutations(ids))
    batch = batch_of(ids)
    batch.reorder_data(places)
    assert ids_of(batch) == reference.put_at(ids, places)
    shuffled = batch_of(ids).select_indices(places)
    shuffled.reorder_data(places)
    assert ids_of(shuffled) == ids


@settings(max_examples=100, deadline=None)
@given(rows=st.integers(0, 6), repeats=st.integers(0, 3))
def test_repeat_interleave_puts_copies_beside_each_other(rows, repeats):
    batch = CallersBatch.of(batch_of(range(rows)))
    assert ids_of(batch.repeat_interleave(repeats)) == [i for i in range(rows) for _ in range(repeats)]


@settings(max_examples=100, deadline=None)
@given(parts=st.integers(0, 4), chunks=st.integers(1, 4))
def test_chunks_are_the_equal_parts_in_order(parts, chunks):
    batch = CallersBatch.of(batch_of(range(parts * chunks)))
    ids = [ids_of(batch.chunk(rank, chunks)) for rank in range(chunks)]
    assert ids == [list(range(rank * parts, (rank + 1) * parts)) for rank in range(chunks)]


def test_reorder_follows_a_permutation_that_is_not_its_own_inverse():
    batch = BatchedDataDict(x=["c", "a", "b"])
    batch.reorder_data([2, 0, 1])
    assert batch["x"] == ["a", "b", "c"]


def test_reorder_takes_tensors_and_drops_the_plan():
    batch = BatchedDataDict(x=torch.tensor([7, 8]))
    batch.micro_batch_indices, batch.micro_batch_lengths = [[[0, 2]]], [[5]]
    batch.elem_counts_per_gb = [2]
    batch.reorder_data(torch.tensor([1, 0]))
    assert batch["x"].tolist() == [8, 7]
    assert batch.micro_batch_indices is batch.micro_batch_lengths is batch.elem_counts_per_gb is None


@pytest.mark.parametrize("places", [[0, 1], [0, 0, 1], [0, 1, 3], []])
def test_reorder_refuses_what_is_no_permutation(places):
    with pytest.raises(SchemaError, match=r"expected each of 0 to 2 once"):
        BatchedDataDict(x=[1, 2, 3]).reorder_data(places)


def test_rows_are_selected_by_tensor_array_and_mask():
    batch = batch_of(range(4))
    assert ids_of(batch.select_indices(torch.tensor([3, 0]))) == [3, 0]
    assert ids_of(batch.select_indices(np.array([3, 0]))) == [3, 0]
    assert ids_of(batch.select_indices(torch.tensor([True, False, False, True]))) == [0, 3]
    assert ids_of(batch.select_indices([])) == []


@pytest.mark.parametrize("indices", [[4], [-5], [0, 9]])
def test_an_index_outside_the_batch_is_refused(indices):
    with pytest.raises(IndexError, match=f"row {max(indices, key=abs)} of a batch of 4 rows"):
        batch_of(range(4)).select_indices(indices)


def test_indices_that_are_not_integers_are_refused():
    with pytest.raises(IndexError, match=r"dtype torch\.float64; expected integers"):
        batch_of(range(4)).select_indices([0.5])


def test_a_mask_of_another_size_is_refused():
    with pytest.raises(IndexError, match=r"mask of shape \(3,\)"):
        batch_of(range(4)).select_indices(torch.tensor([True, False, True]))


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 5)])
def test_slice_bounds_outside_the_batch_are_refused(start, stop):
    with pytest.raises(IndexError, match=r"of a batch of 4 rows"):
        batch_of(range(4)).slice(start, stop)


def test_chunk_refuses_what_does_not_divide():
    with pytest.raises(ConfigError, match=r"\(5\) is not a multiple of chunks \(2\)"):
        CallersBatch.of(batch_of(range(5))).chunk(0, 2)
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        CallersBatch.of(batch_of(range(4))).chunk(2, 2)


def test_chunks_and_selections_are_copies_and_repeats_share_no_object():
    batch = CallersBatch(x=torch.zeros(4), log=[[1], [2], [3], [4]])
    batch.chunk(0, 2)["x"][0] = 9
    batch.select_indices([0])["x"][0] = 9
    assert batch["x"].tolist() == [0, 0, 0, 0]
    repeated = batch.repeat_interleave(2)
    repeated["log"][0].append("changed")
    assert repeated["log"][1] == [1]
    assert batch["log"][0] == [1]
    objects = CallersBatch(log=object_array([[1], [2]])).repeat_interleave(2)
    objects["log"][0].append("changed")
    assert objects["log"][1] == [1]


# Concatenation.


def test_from_batches_pads_to_the_widest_with_the_columns_pad_value():
    parts = [
        {"ids": torch.tensor([[1, 2], [3, 4]]), "logprobs": torch.ones(2, 2), "n": torch.tensor([2, 2])},
        {"ids": torch.tensor([[5, 6, 7]]), "logprobs": torch.ones(1, 3), "n": torch.tensor([3])},
    ]
    joined = BatchedDataDict.from_batches(parts, pad_value_dict={"ids": 9})
    assert joined["ids"].tolist() == [[1, 2, 9], [3, 4, 9], [5, 6, 7]]
    assert joined["logprobs"].tolist() == [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    assert joined["n"].tolist() == [2, 2, 3]


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.uint32]
)
@pytest.mark.parametrize("trailing", [(), (2,), (2, 3)])
def test_from_batches_pads_every_dtype_and_keeps_trailing_dimensions(dtype, trailing):
    parts = [{"x": torch.ones(2, width, *trailing).to(dtype)} for width in (3, 5)]
    joined = BatchedDataDict.from_batches(parts, pad_value_dict={"x": 1})["x"]
    assert joined.dtype == dtype
    assert torch.equal(joined, torch.ones(4, 5, *trailing).to(dtype))
    padded = BatchedDataDict.from_batches(parts)["x"].to(torch.int64)
    assert padded[:2, 3:].sum() == 0
    assert padded[2:].sum() == padded[2:].numel()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float64])
def test_from_batches_pads_floats_also_with_nan(dtype):
    parts = [{"x": torch.ones(1, width).to(dtype)} for width in (1, 2)]
    joined = BatchedDataDict.from_batches(parts, pad_value_dict={"x": float("nan")})["x"]
    assert joined.dtype == dtype
    assert joined.float().isnan().tolist() == [[False, True], [False, False]]


def test_a_batch_without_rows_has_no_say_in_width_and_dtype():
    empty, full = {"x": torch.zeros(0, 9)}, {"x": torch.tensor([[1, 2]])}
    assert BatchedDataDict.from_batches([empty, full])["x"].tolist() == [[1, 2]]
    assert BatchedDataDict.from_batches([empty, empty])["x"].shape == (0, 9)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.int64), "column 'x' has parts .*one dtype"),
        (torch.zeros(1, 4, 100), torch.zeros(1, 4, 200), "column 'x' has parts .*dimensions 0 and 1 only"),
        (torch.zeros(1), torch.zeros(1, 2), "column 'x' has parts"),
        (torch.zeros(1), [0.0], "column 'x' is a dense tensor and a list"),
        (torch.zeros(1, 2), jagged([torch.zeros(2)]), "column 'x' is a dense tensor and a jagged tensor"),
        (np.zeros(1), object_array([[1]]), "column 'x' is an array of float64 and an array of object"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused_with_the_columns_name(first, second, message):
    with pytest.raises(SchemaError, match=message):
        BatchedDataDict.from_batches([{"x": first}, {"x": second}])


def test_jagged_parts_of_different_row_shapes_are_refused():
    parts = [{"x": jagged([torch.zeros(2, width), torch.zeros(1, width)])} for width in (3, 4)]
    with pytest.raises(SchemaError, match="column 'x' has parts of different"):
        BatchedDataDict.from_batches(parts)


@pytest.mark.parametrize("pad", [-1, 300, 0.5, float("nan")])
def test_a_pad_value_that_the_dtype_cannot_hold_is_refused(pad):
    parts = [{"x": torch.zeros(1, width, dtype=torch.uint8)} for width in (1, 2)]
    with pytest.raises(SchemaError, match=rf"column 'x': pad value {pad} does not fit in torch\.uint8"):
        BatchedDataDict.from_batches(parts, pad_value_dict={"x": pad})


def test_a_column_that_one_batch_lacks_is_refused_by_name():
    with pytest.raises(SchemaError, match="batch 1 and batch 0 do not have the same columns: y"):
        BatchedDataDict.from_batches([{"x": [1], "y": [1]}, {"x": [1]}])
    with pytest.raises(SchemaError, match="no batches"):
        BatchedDataDict.from_batches([])


# The columns of a batch.


def test_columns_of_unequal_length_are_refused_by_name():
    batch = CallersBatch(x=torch.zeros(3), y=[1, 2])
    for act in (
        lambda: batch.size,
        lambda: batch.slice(0, 1),
        lambda: batch.select_indices([0]),
        lambda: batch.repeat_interleave(2),
        lambda: batch.reorder_data([0, 1, 2]),
        lambda: batch.chunk(0, 1),
        lambda: batch.shard_by_batch_size(1),
        lambda: batch.microbatches("fixed", 1),
    ):
        with pytest.raises(SchemaError, match="column 'y' has 2 rows and column 'x' has 3"):
            act()


@pytest.mark.parametrize("value", [torch.tensor(1.0), np.array(1), 3, "text", {"a": 1}])
def test_a_value_that_is_no_column_is_refused_by_name(value):
    with pytest.raises(SchemaError, match="column 'x' is a"):
        _ = BatchedDataDict(x=value).size


def test_an_empty_batch_has_no_rows():
    assert BatchedDataDict().size == 0
    assert batch_of([]).size == 0


def test_get_dict_is_the_columns_and_to_moves_them_in_place():
    batch = CallersBatch.of(batch_of(range(3)))
    assert type(batch.get_dict()) is dict
    assert batch.get_dict()["list"] is batch["list"]
    assert batch.to("cpu") is batch
    assert ids_of(batch) == [0, 1, 2]
    batch = BatchedDataDict(x=torch.zeros(2), m=PackedTensor([torch.zeros(1), None]), n=[1, 2]).to("meta")
    assert batch["x"].device.type == batch["m"].tensors[0].device.type == "meta"
    assert batch["n"] == [1, 2]


def test_truncate_cuts_dense_tensors_that_have_the_dimension_and_nothing_else():
    batch = CallersBatch.of(batch_of(range(3)))
    batch.truncate_tensors(dim=1, truncated_len=2)
    assert batch["padded"].shape == (3, 2)
    assert batch["routes"].shape == (3, 2, 2)
    assert batch["number"].shape == (3,)
    assert [len(r) for r in batch["jagged"].unbind()] == [1, 2, 3]
    batch.truncate_tensors(dim=1, truncated_len=5)
    assert batch["padded"].shape == (3, 2)


def test_a_batch_with_its_plan_and_column_facts_pickles_and_copies():
    batch = BatchedDataDict(padded=torch.zeros(2, 4), list=[{"row": 0}, {"row": 1}])
    batch.micro_batch_indices, batch.micro_batch_lengths = [[[0, 2]]], [[4]]
    batch.token_columns = {"padded"}
    for twin in (pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch)):
        assert type(twin) is BatchedDataDict
        assert twin.micro_batch_indices == [[[0, 2]]]
        assert twin.token_columns == {"padded"}
        assert twin["list"] == batch["list"]


def test_types_and_column_facts_follow_the_rows():
    batch = batch_of(range(4))
    batch.token_columns, batch.input_key = {"padded"}, "padded"
    made = [
        batch.select_indices([0]),
        batch.select_columns(["padded"]),
        batch.slice(0, 1),
        *batch.microbatches("fixed", 4),
        batch.shard_by_batch_size(2)[1],
        BatchedDataDict.from_batches([batch]),
    ]
    assert [m.token_columns for m in made] == [{"padded"}] * 6
    assert [m.input_key for m in made] == ["padded"] * 6
    assert all(type(m) is BatchedDataDict for m in made)


def test_a_batch_can_be_annotated_with_its_column_types():
    assert BatchedDataDict[dict]({"x": [1]}).size == 1

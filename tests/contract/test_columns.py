"""What a column may be, and that it comes back as it went in."""

import numpy as np
import pytest
import torch
from contract_batches import put_numbers, tokens, wire

from headrace.data_plane import DataPlaneClient, KVBatchMeta, kv_first_write, read_columns, write_columns
from headrace.data_plane.codec import nest
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.distributed.columns import object_array
from headrace.distributed.multimodal import PackedTensor
from headrace.errors import SchemaError
from ragged_cases import DTYPES, arbitrary
from reference import rows_of, same_bits, same_rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(client: DataPlaneClient, dtype: torch.dtype) -> None:
    rows = [arbitrary((n, 2), dtype, seed=n) for n in (3, 0, 1)]
    dense = arbitrary((3, 4), dtype)
    client.put_samples(["a", "b", "c"], "p", fields=wire(3, ragged=nest(rows), dense=dense))
    got = client.get_samples(["c", "a", "b"], "p", ["ragged", "dense"])
    assert same_rows(rows_of(got["ragged"]), [rows[2], rows[0], rows[1]])
    assert same_bits(got["dense"], torch.stack([dense[2], dense[0], dense[1]]))


@pytest.mark.parametrize("length", [3, 40_000])
def test_conjugate_and_negative_views_come_back_as_the_numbers_they_show(
    client: DataPlaneClient, length: int
) -> None:
    numbers = torch.complex(torch.ones(2, length), torch.full((2, length), 2.0))
    views = {"conjugate": numbers.conj(), "negative": torch._neg_view(numbers.imag.contiguous())}
    shown = {name: view.clone() for name, view in views.items()}
    ragged = torch.nested.nested_tensor_from_jagged(views["conjugate"][0], torch.tensor([0, 1, length]))
    inside = object_array([{"view": views["conjugate"][0, :2]}, None])
    client.put_samples(["a", "b"], "p", fields=wire(2, **views, ragged=ragged, inside=inside))
    got = client.get_samples(["b", "a"], "p", ["conjugate", "negative", "ragged", "inside"])
    for name, column in shown.items():
        assert same_bits(got[name], column.flip(0))
    assert torch.equal(got["ragged"].unbind()[0], shown["conjugate"][0, 1:])
    assert torch.equal(got["inside"][1]["view"], shown["conjugate"][0, :2])


def test_dense_stays_dense_and_nested_stays_nested(client: DataPlaneClient) -> None:
    fields = wire(2, dense=torch.ones(2, 3), equal=tokens([1, 2], [3, 4]), flat=torch.ones(2))
    client.put_samples(["a", "b"], "p", fields=fields)
    got = client.get_samples(["a", "b"], "p", ["dense", "equal", "flat"])
    assert got["equal"].layout == torch.jagged
    assert (got["dense"].shape, got["flat"].shape) == ((2, 3), (2,))


def test_nested_columns_come_back_with_their_longest_row(client: DataPlaneClient) -> None:
    columns = {"x": tokens([1, 2], [], [3, 4, 5]), "y": tokens([1], [2], [3])}
    client.put_samples(["a", "b", "c"], "p", fields=wire(3, **columns))
    for ids in (["a", "b", "c"], ["b", "a"], ["b"]):
        got = client.get_samples(ids, "p", ["x", "y"])
        for name in ("x", "y"):
            rows = got[name].unbind()
            padded = torch.nested.to_padded_tensor(got[name], 0)
            assert padded.shape == (len(ids), max(len(row) for row in rows))


def test_objects_come_back_as_object_arrays(client: DataPlaneClient) -> None:
    column = object_array([[{"role": "user", "ids": torch.tensor([1])}], None, "text"])
    client.put_samples(["a", "b", "c"], "p", fields=wire(3, log=column))
    got = client.get_samples(["c", "a", "b"], "p", ["log"])["log"]
    assert isinstance(got, np.ndarray)
    assert (got.dtype, got[0], got[2]) == (object, "text", None)
    assert got[1][0]["ids"].tolist() == [1]


def test_media_rows_come_back(client: DataPlaneClient) -> None:
    rows = [PackedTensor([torch.ones(2, 3)]), PackedTensor([None])]
    client.put_samples(["a", "b"], "p", fields=wire(2, images=object_array(rows)))
    got = client.get_samples(["b", "a"], "p", ["images"])["images"]
    assert [row.tensors[0] is None for row in got] == [True, False]


def test_an_empty_shard_keeps_the_kind_of_its_columns(client: DataPlaneClient) -> None:
    media, log = PackedTensor([torch.ones(2, 3), None], dim_to_pack=1), object_array([{"a": 1}, None])
    columns = {"images": media, "log": log, "input_lengths": torch.tensor([1, 2])}
    meta = kv_first_write(columns, sample_ids=["a", "b"], dp_client=client, partition_id="p")
    whole, empty = (read_columns(client, part, ["images", "log"]) for part in (meta, meta.subset([])))
    assert isinstance(empty["images"], PackedTensor)
    assert (len(empty["images"]), empty["images"].dim_to_pack) == (0, 1)
    assert isinstance(empty["log"], np.ndarray)
    joined = BatchedDataDict.from_batches([empty, whole])
    assert (len(joined["images"]), joined["log"].tolist()) == (2, [{"a": 1}, None])
    dummy = empty.make_dummy(4)
    assert isinstance(dummy["images"], PackedTensor)
    assert dummy["log"].tolist() == [None]


def test_a_value_that_cannot_be_encoded_is_refused_at_the_put(client: DataPlaneClient) -> None:
    with pytest.raises(
        SchemaError, match=r"column 'log', row 1 \(sample 'b'\): a value of type builtins.set"
    ):
        client.put_samples(["a", "b"], "p", fields=wire(2, log=object_array([1, {2}])))


def test_the_caller_may_change_its_tensors_after_a_put(client: DataPlaneClient) -> None:
    dense, values = torch.ones(2, 2), torch.ones(3)
    ragged = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 1, 3]))
    client.put_samples(["a", "b"], "p", fields=wire(2, dense=dense, ragged=ragged))
    dense.zero_()
    values.zero_()
    got = client.get_samples(["a", "b"], "p", ["dense", "ragged"])
    assert got["dense"].tolist() == [[1, 1], [1, 1]]
    assert got["ragged"].values().tolist() == [1, 1, 1]


def test_the_reader_may_change_what_it_got(client: DataPlaneClient) -> None:
    log = object_array([{"x": [1]}, {}])
    fields = wire(2, dense=torch.ones(2, 2), ragged=tokens([1], [1, 1]), log=log)
    client.put_samples(["a", "b"], "p", fields=fields)
    for ids in (["a", "b"], ["a"], ["b", "a"]):
        got = client.get_samples(ids, "p", ["dense", "ragged", "log"])
        got["dense"].zero_()
        got["ragged"].values().zero_()
        got["log"][0]["x"] = None
    again = client.get_samples(["a", "b"], "p", ["dense", "ragged", "log"])
    assert again["dense"].tolist() == [[1, 1], [1, 1]]
    assert again["ragged"].values().tolist() == [1, 1, 1]
    assert again["log"].tolist() == [{"x": [1]}, {}]


def test_columns_of_equal_lengths_can_be_added(client: DataPlaneClient) -> None:
    fields = wire(2, x=tokens([1], [1, 1]), y=tokens([2], [3, 4]))
    client.put_samples(["a", "b"], "p", fields=fields)
    got = client.get_samples(["a", "b"], "p", ["x", "y"])
    assert (got["x"] + got["y"]).values().tolist() == [3, 4, 5]


def test_the_dtype_of_a_column_is_fixed_by_what_it_holds(client: DataPlaneClient) -> None:
    put_numbers(client, ["a", "b"], x=0)
    with pytest.raises(SchemaError, match=r"'x' of partition 'p' holds dense torch\.float32 .*int64"):
        client.put_samples(["c"], "p", fields=wire(1, x=torch.tensor([1])))


@pytest.mark.parametrize(
    "other",
    [torch.ones(1, 2), nest([torch.ones(1)]), object_array([1.0])],
    ids=["shape", "ragged", "objects"],
)
def test_the_shape_and_kind_of_a_column_are_fixed_by_what_it_holds(
    client: DataPlaneClient, other: object
) -> None:
    put_numbers(client, ["a", "b"], x=0)
    with pytest.raises(SchemaError, match="holds dense"):
        client.put_samples(["b"], "p", fields=wire(1, x=other))


def test_a_column_may_change_when_all_its_rows_are_overwritten(client: DataPlaneClient) -> None:
    put_numbers(client, ["a", "b"], x=0)
    put_numbers(client, ["c"], y=0)
    client.put_samples(["c", "b", "a"], "p", fields=wire(3, x=torch.tensor([1, 2, 3])))
    assert client.get_samples(["a"], "p", ["x"])["x"].dtype == torch.int64


def test_a_cleared_column_may_change(client: DataPlaneClient) -> None:
    put_numbers(client, ["a"], x=0)
    client.clear_samples(["a"], "p")
    client.put_samples(["a"], "p", fields=wire(1, x=tokens([1, 2])))
    assert client.get_samples(["a"], "p", ["x"])["x"].is_nested


def test_two_partitions_may_hold_a_column_in_different_forms(client: DataPlaneClient) -> None:
    put_numbers(client, ["a"], "p1", x=0)
    client.put_samples(["a"], "p2", fields=wire(1, x=tokens([1, 2])))
    assert client.get_samples(["a"], "p2", ["x"])["x"].is_nested


def test_a_float_in_a_declared_integer_column_is_refused(client: DataPlaneClient) -> None:
    with pytest.raises(SchemaError, match="'input_ids' is declared as per_token"):
        client.put_samples(["a"], "p", fields=wire(1, input_ids=nest([torch.tensor([1.5])])))


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("sample_mask", torch.ones(1, 3)),
        ("sample_mask", nest([torch.ones(3)])),
        ("routed_experts", torch.ones(1, 3, 8, dtype=torch.uint8)),
        ("token_mask", torch.ones(1)),
        ("token_mask", object_array([1])),
        ("message_log", torch.ones(1)),
    ],
)
def test_declared_columns_are_held_to_their_kind(client: DataPlaneClient, name: str, column: object) -> None:
    with pytest.raises(SchemaError, match=f"'{name}'"):
        client.put_samples(["a"], "p", fields=wire(1, **{name: column}))


_QUANTIZED = torch._empty_affine_quantized((2, 3), scale=0.1, zero_point=0, dtype=torch.qint8)
_META = torch.empty(2, 3, device="meta")


@pytest.mark.parametrize(
    ("column", "what"),
    [
        (torch.ones(2, 3).to_sparse(), "of layout torch.sparse_coo"),
        (_QUANTIZED, "quantized, of dtype torch.qint8"),
        (_META, "on the device 'meta'.*"),
        (
            torch.nested.nested_tensor_from_jagged(_META[0], torch.tensor([0, 1, 3], device="meta")),
            "'meta'.*",
        ),
    ],
    ids=["sparse_coo", "quantized", "meta", "jagged meta"],
)
def test_a_tensor_whose_rows_are_no_plain_memory_is_refused(
    client: DataPlaneClient, column: torch.Tensor, what: str
) -> None:
    for act in (
        lambda: client.put_samples(["a", "b"], "p", fields=wire(2, x=column)),
        lambda: client.put_samples(["a", "b"], "p", fields=wire(2, generation_logprobs=column)),
        lambda: write_columns(client, KVBatchMeta("p", "train", ["a", "b"]), {"x": column}),
    ):
        with pytest.raises(
            SchemaError, match=rf"column '\w+' is .*{what}; expected a dense or jagged tensor"
        ):
            act()
    assert client.sample_ids("p") == []


def test_a_row_that_is_no_plain_memory_is_refused_in_a_list(client: DataPlaneClient) -> None:
    rows = [torch.ones(3), torch.ones(3).to_sparse()]
    meta = KVBatchMeta("p", "train", ["a", "b"])
    for odd, what in ((rows, "sparse_coo"), (list(_META), "meta"), ([_QUANTIZED, _QUANTIZED], "qint8")):
        with pytest.raises(SchemaError, match=f"column 'x': a row is .*{what}"):
            write_columns(client, meta, {"x": odd})


def test_tokens_that_contradict_their_declared_lengths_are_refused(client: DataPlaneClient) -> None:
    fields = wire(2, input_ids=tokens([1, 2], [3]), input_lengths=torch.tensor([2, 3]))
    with pytest.raises(
        SchemaError, match=r"'input_ids' has 1 tokens for sample 'b'; .* 'input_lengths' .* says 3"
    ):
        client.put_samples(["a", "b"], "p", fields=fields)


def test_a_column_with_another_row_count_is_refused(client: DataPlaneClient) -> None:
    with pytest.raises(SchemaError, match="column 'x' has 2 rows; expected 3"):
        client.put_samples(["a", "b", "c"], "p", fields=wire(2, x=torch.ones(2)))


def test_a_column_ragged_in_a_later_dimension_comes_back_so(client: DataPlaneClient) -> None:
    rows = [torch.arange(8).reshape(4, 2), torch.arange(12).reshape(4, 3)]
    column = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    client.put_samples(["a", "b"], "p", fields=wire(2, image=column))
    got = client.get_samples(["b", "a"], "p", ["image"])["image"]
    assert [row.tolist() for row in got.unbind()] == [rows[1].tolist(), rows[0].tolist()]

"""What the write path does to columns, and what the read path gives back."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.data_plane import (
    DP_TRAIN_FIELDS,
    DataPlaneClient,
    KVBatchMeta,
    kv_first_write,
    pack_columns,
    pad_values,
    read_columns,
    round_up,
    write_columns,
)
from headrace.data_plane.adapters.local import LocalDataPlaneClient
from headrace.data_plane.codec import nest
from headrace.data_plane.observability import MetricsDataPlaneClient
from headrace.data_plane.schema import GLOBAL_FORWARD_PAD_SEQLEN, PAD_TO_MULTIPLE
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.distributed.columns import object_array
from headrace.distributed.multimodal import PackedTensor
from headrace.errors import SampleNotFound, SchemaError
from ragged_cases import RaggedCase, ragged_cases
from reference import pad, rows_of, same_bits, same_rows, unpad

IDS = ["u_g0", "u_g1"]


def batch(**changes: Any) -> BatchedDataDict:
    columns = {
        "input_ids": torch.tensor([[1, 2, 3, 0], [4, 5, 0, 0]]),
        "input_lengths": torch.tensor([3, 2]),
        "token_mask": torch.tensor([[0, 1, 1, 0], [0, 1, 0, 0]], dtype=torch.uint8),
        "sample_mask": torch.ones(2),
        "generation_logprobs": torch.zeros(2, 4),
    }
    return BatchedDataDict({**columns, **changes})


def first_write(client: DataPlaneClient, columns: Any = None, **changes: Any) -> KVBatchMeta:
    return kv_first_write(
        batch() if columns is None else columns,
        **{"sample_ids": IDS, "dp_client": client, "partition_id": "train", **changes},
    )


# kv_first_write


def test_the_first_write_is_one_put_and_names_its_rows() -> None:
    events: list[str] = []
    client = MetricsDataPlaneClient(LocalDataPlaneClient(), lambda event: events.append(event.op))
    meta = first_write(client, extra_info={"step": 3}, tags=[{"r": 1.0}, {"r": 0.0}], pad_to_multiple=4)
    assert events == ["put_samples"]
    assert (meta.partition_id, meta.task_name, meta.sample_ids) == ("train", "train", IDS)
    assert meta.sequence_lengths == [3, 2]
    assert set(meta.fields or []) == set(batch())
    assert meta.extra_info == {"step": 3, PAD_TO_MULTIPLE: 4}
    assert meta.tags == [{"r": 1.0}, {"r": 0.0}]


def test_a_pad_multiple_of_one_is_not_noted() -> None:
    assert first_write(LocalDataPlaneClient()).extra_info == {}
    assert first_write(LocalDataPlaneClient(), pad_to_multiple=2).extra_info == {PAD_TO_MULTIPLE: 2}
    with pytest.raises(SchemaError, match="pad_to_multiple=0"):
        first_write(LocalDataPlaneClient(), pad_to_multiple=0)


def test_no_padding_travels() -> None:
    client = LocalDataPlaneClient()
    first_write(client)
    stored = client.get_samples(IDS, "train", ["input_ids", "token_mask"])
    assert [row.tolist() for row in rows_of(stored["input_ids"])] == [[1, 2, 3], [4, 5]]
    assert stored["token_mask"].values().numel() == 5


@pytest.mark.parametrize(
    "input_ids",
    [
        torch.tensor([[1, 2, 3], [4, 5, 0]]),
        nest([torch.tensor([1, 2, 3]), torch.tensor([4, 5])]),
        [torch.tensor([1, 2, 3]), torch.tensor([4, 5])],
        [[1, 2, 3], [4, 5]],
        [np.array([1, 2, 3]), np.array([4, 5])],
        np.array([[1, 2, 3], [4, 5, 9]]),
    ],
    ids=["padded", "jagged", "tensors", "lists", "arrays", "padded array"],
)
def test_per_token_columns_may_come_in_any_form(input_ids: object) -> None:
    client = LocalDataPlaneClient()
    meta = first_write(client, batch(input_ids=input_ids, input_lengths=[3, 2]))
    assert read_columns(client, meta, ["input_ids"])["input_ids"].tolist() == [[1, 2, 3], [4, 5, 0]]


def test_rows_of_equal_length_are_jagged_however_they_came() -> None:
    rows = [torch.tensor([1, 2]), torch.tensor([3, 4])]
    wire = pack_columns({"input_ids": rows, "extra": rows}, lengths=[2, 2])
    assert wire["input_ids"].is_nested
    assert wire["extra"].is_nested


def test_nothing_is_dropped_silently() -> None:
    client = LocalDataPlaneClient()
    columns = batch(
        texts=["a", {"b": 1}],
        answers=np.array(["x", "yy"]),
        rewards=np.array([0.5, 1.5], dtype=np.float32),
        grid=np.arange(4, dtype=np.uint16).reshape(2, 2),
        message_log=[[{"role": "user"}], []],
        images=PackedTensor([torch.ones(2, 3), None]),
        crops=[torch.ones(1, 3), torch.zeros(2, 3)],
        big_endian=np.array([1, 2], dtype=">i4"),
    )
    meta = first_write(client, columns)
    assert set(meta.fields or []) == set(columns)
    got = read_columns(client, meta, meta.fields or [])
    assert got["texts"].tolist() == ["a", {"b": 1}]
    assert got["answers"].tolist() == ["x", "yy"]
    assert (got["rewards"].dtype, got["rewards"].tolist()) == (torch.float32, [0.5, 1.5])
    assert (got["grid"].dtype, got["grid"].tolist()) == (torch.uint16, [[0, 1], [2, 3]])
    assert got["message_log"].tolist() == [[{"role": "user"}], []]
    assert [None if t is None else tuple(t.shape) for t in got["images"].tensors] == [(2, 3), None]
    assert got["crops"].shape == (2, 2, 3)
    assert got["big_endian"].tolist() == [1, 2]


@pytest.mark.parametrize("value", ["text", 3, None, {"a": 1}, torch.tensor(1.0)], ids=repr)
def test_a_value_that_is_no_column_is_refused_by_name(value: object) -> None:
    with pytest.raises(SchemaError, match="'odd'"):
        first_write(LocalDataPlaneClient(), batch(odd=value))


def test_a_masked_array_is_refused_since_no_column_keeps_a_mask() -> None:
    masked = np.ma.masked_array([[1, 2], [3, 4]], mask=[[False, True], [False, False]])
    for column in (masked, [masked[0], masked[1]]):
        with pytest.raises(SchemaError, match=r"column 'x': a masked array; expected one without .*\.filled"):
            pack_columns({"x": column}, lengths=[2, 2])


def test_rows_may_be_arrays_of_any_layout_and_keep_their_dtype() -> None:
    frozen = np.frombuffer(np.array([7, 8, 9], dtype=np.int32).tobytes(), dtype=np.int32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wire = pack_columns(
            {
                "input_ids": [frozen, np.array([4, 5], dtype=np.int32)],
                "spans": [frozen[::-1], torch.tensor([1], dtype=torch.int32)],
                "read_only": frozen[:2],
                "backward": np.arange(2.0)[::-1],
            },
            lengths=[3, 2],
        )
    assert (wire["input_ids"].dtype, wire["spans"].dtype) == (torch.int32, torch.int32)
    assert [row.tolist() for row in rows_of(wire["input_ids"])] == [[7, 8, 9], [4, 5]]
    assert [row.tolist() for row in rows_of(wire["spans"])] == [[9, 8, 7], [1]]
    assert (wire["read_only"].tolist(), wire["backward"].tolist()) == ([7, 8], [1.0, 0.0])


def test_an_array_of_a_dtype_that_torch_lacks_is_refused_by_name() -> None:
    with pytest.raises(SchemaError, match=r"column 'long': torch has no dtype for arrays of .*128"):
        pack_columns({"long": np.ones(2, dtype=np.longdouble)}, lengths=[1, 1])


def test_lists_without_rows_take_the_shape_of_their_declaration() -> None:
    wire = pack_columns({"input_ids": [], "sample_mask": []}, lengths=[])
    assert (wire["input_ids"].shape[0], wire["input_ids"].dtype) == (0, torch.int64)
    assert (tuple(wire["sample_mask"].shape), wire["sample_mask"].dtype) == ((0,), torch.float32)


def test_undeclared_columns_alone_say_how_many_rows_there_are() -> None:
    assert pack_columns({"scores": torch.ones(2, 3)}, lengths=None).batch_size == torch.Size([2])
    assert pack_columns({}, lengths=None).batch_size == torch.Size([0])


def test_tags_of_the_first_write_reach_the_store() -> None:
    client = LocalDataPlaneClient()
    client.register_partition("train", ["input_ids"], 2, ["learn"])
    first_write(client, tags=[{"r": 1.0}, {"r": 0.0}])
    assert client.claim_meta("train", "learn", ["input_ids"], 2).tags == [{"r": 1.0}, {"r": 0.0}]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sample_ids": "ab"}, "^sample_ids"),
        ({"columns": batch(input_lengths=object_array([3, 2]))}, "^column 'input_lengths' holds objects"),
    ],
)
def test_ids_and_lengths_of_another_type_are_refused_by_name(changes: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        first_write(LocalDataPlaneClient(), **changes)


def test_a_batch_without_lengths_is_refused() -> None:
    columns = batch()
    del columns["input_lengths"]
    with pytest.raises(SchemaError, match="'input_lengths'"):
        first_write(LocalDataPlaneClient(), columns)


def test_as_many_ids_as_rows_are_asked_for() -> None:
    with pytest.raises(SchemaError, match="2 sequence lengths for 3 sample ids"):
        first_write(LocalDataPlaneClient(), sample_ids=["a", "b", "c"])


def test_duplicate_ids_of_a_repeated_prompt_are_refused() -> None:
    with pytest.raises(SchemaError, match="repeated: 'u_g0'"):
        first_write(LocalDataPlaneClient(), sample_ids=["u_g0", "u_g0"])


def test_an_empty_shard_is_written_and_read() -> None:
    client = LocalDataPlaneClient()
    first_write(client)
    columns = {
        "input_ids": torch.empty(0, 0, dtype=torch.int64),
        "input_lengths": torch.empty(0, dtype=torch.int64),
    }
    meta = first_write(client, columns, sample_ids=[])
    assert meta.size == 0
    assert read_columns(client, meta, ["input_ids"])["input_ids"].shape == (0, 0)


# The write path holds columns to their declarations.


def test_a_column_too_narrow_for_its_lengths_is_refused_and_not_sent_rectangular() -> None:
    columns = batch(input_ids=torch.ones(2, 3, dtype=torch.int64), input_lengths=torch.tensor([2, 5]))
    with pytest.raises(SchemaError, match="'input_ids' is 3 tokens wide; row 1 has 5 tokens"):
        first_write(LocalDataPlaneClient(), columns)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (torch.ones(3, 4), "'prev_logprobs' has 3 rows; expected 2"),
        (torch.ones(2), "'prev_logprobs' has 1 dimensions"),
        (torch.ones(2, 2), "'prev_logprobs' is 2 tokens wide; row 0 has 3 tokens"),
        (torch.ones(2, 4, 1), "'prev_logprobs' has 3 dimensions"),
        (torch.ones(2, 4, dtype=torch.int64), "'prev_logprobs' is declared as per_token"),
        (
            nest([torch.ones(3), torch.ones(1)]),
            "'prev_logprobs' has 1 tokens in row 1; its sequence length is 2",
        ),
        (object_array([1, 2]), "'prev_logprobs' is an array of objects"),
        ([torch.ones(3), torch.ones(2, 2)], "column 'prev_logprobs': row 1 has shape"),
        ([torch.ones(3), ["a"]], "column 'prev_logprobs', row 1"),
    ],
)
def test_a_write_back_that_does_not_fit_names_column_row_and_sizes(column: object, message: str) -> None:
    client = LocalDataPlaneClient()
    meta = first_write(client)
    with pytest.raises(SchemaError) as caught:
        write_columns(client, meta, {"prev_logprobs": column})
    assert message in str(caught.value)
    with pytest.raises(SampleNotFound):
        client.get_samples(IDS, "train", ["prev_logprobs"])


def test_a_write_back_wider_than_the_rows_is_cut() -> None:
    client = LocalDataPlaneClient()
    meta = first_write(client)
    values = torch.arange(16.0).reshape(2, 8)
    write_columns(client, meta, {"prev_logprobs": values})
    stored = client.get_samples(IDS, "train", ["prev_logprobs"])["prev_logprobs"]
    assert same_rows(rows_of(stored), unpad(values, [3, 2]))


def test_a_write_returns_the_meta_with_the_new_columns() -> None:
    client = LocalDataPlaneClient()
    meta = first_write(client)
    written = write_columns(client, meta, {"advantages": torch.ones(2), "sample_mask": torch.zeros(2)})
    assert written is meta
    assert meta.fields is not None
    assert meta.fields[-1] == "advantages"
    assert meta.fields.count("sample_mask") == 1
    assert read_columns(client, written, ["sample_mask"])["sample_mask"].tolist() == [0, 0]


def test_advantages_of_one_number_per_sample_stay_so() -> None:
    client = LocalDataPlaneClient()
    meta = write_columns(client, first_write(client), {"advantages": [0.5, -0.5]})
    meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = 8
    assert read_columns(client, meta, ["advantages"])["advantages"].tolist() == [0.5, -0.5]


def test_a_rectangular_column_as_wide_as_the_longest_row_is_not_cut() -> None:
    client = LocalDataPlaneClient()
    scores = torch.arange(6.0).reshape(2, 3)
    meta = write_columns(client, first_write(client), {"class_scores": scores})
    assert torch.equal(read_columns(client, meta, ["class_scores"])["class_scores"], scores)


def test_a_float_that_is_no_whole_number_is_not_rounded_into_a_token() -> None:
    with pytest.raises(SchemaError, match=r"'input_ids', row 0: values of torch.float32"):
        pack_columns({"input_ids": [[1.5], [2.0]]}, lengths=[1, 1])


def test_a_number_that_the_declared_dtype_cannot_hold_is_refused_by_row() -> None:
    with pytest.raises(SchemaError, match="'token_mask', row 1"):
        pack_columns({"token_mask": [[1], [300]]}, lengths=[1, 1])


@pytest.mark.parametrize("row", [[1e300, 1.0], [1, -(10**40)], [float("nan"), 3.5e38]], ids=str)
def test_a_finite_number_does_not_become_infinite_in_a_column_of_floats(row: list[float]) -> None:
    with pytest.raises(SchemaError, match=r"'advantages', row 1: values of torch.float64 that torch.float32"):
        pack_columns({"advantages": [[0.5, 0.25], row]}, lengths=[2, 2])


def test_numbers_of_a_column_of_floats_are_rounded_once_and_nan_and_infinity_stay() -> None:
    rows = [[0.1, 2**24 + 1], [float("inf"), float("nan")]]
    packed = pack_columns({"advantages": rows}, lengths=[2, 2])["advantages"].values()
    assert packed[:3].tolist() == torch.tensor([0.1, 2**24, float("inf")]).tolist()
    assert packed[3].isnan()


def test_floats_that_are_whole_numbers_become_these_tokens() -> None:
    packed = pack_columns({"input_ids": [[2.0**24 + 1, 3]]}, lengths=[2])["input_ids"].values()
    assert packed.tolist() == [2**24 + 1, 3]


def test_a_per_token_column_needs_lengths_and_others_do_not() -> None:
    client = LocalDataPlaneClient()
    meta = KVBatchMeta("train", "train", IDS)
    with pytest.raises(SchemaError, match="'advantages' is per token"):
        write_columns(client, meta, {"advantages": torch.ones(2)})
    assert write_columns(client, meta, {"scores": torch.ones(2, 7)}).fields is None
    with pytest.raises(SchemaError, match="'scores' has 3 rows; expected 2"):
        write_columns(client, meta, {"scores": torch.ones(3)})


def test_values_with_gradients_are_written_without_them() -> None:
    wire = pack_columns({"prev_logprobs": torch.ones(1, 2, requires_grad=True)}, lengths=[2])
    assert not wire["prev_logprobs"].requires_grad
    rows = pack_columns({"prev_logprobs": [torch.ones(2, requires_grad=True)]}, lengths=[2])
    assert not rows["prev_logprobs"].requires_grad


# read_columns


def test_reads_are_padded_to_the_batch_wide_target() -> None:
    client = LocalDataPlaneClient()
    meta = first_write(client, batch(grid=torch.ones(2, 3)))
    meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = 8
    got = read_columns(client, meta, ["input_ids", "grid", "sample_mask"], pad_value_dict=pad_values(9))
    assert got["input_ids"].tolist() == [[1, 2, 3] + [9] * 5, [4, 5] + [9] * 6]
    assert (got["grid"].shape, got["sample_mask"].shape) == ((2, 3), (2,))


def test_reads_keep_the_order_of_the_meta_repeats_included() -> None:
    client = LocalDataPlaneClient()
    meta = first_write(client).subset([1, 0, 1])
    assert read_columns(client, meta, ["input_lengths"])["input_lengths"].tolist() == [2, 3, 2]
    jagged = read_columns(client, meta, ["input_ids"], layout="jagged")["input_ids"]
    assert [row.tolist() for row in rows_of(jagged)] == [[4, 5], [1, 2, 3], [4, 5]]


def test_a_training_read_gives_every_training_column() -> None:
    client = LocalDataPlaneClient()
    meta = first_write(client)
    scores = {name: torch.ones(2, 4) for name in ("prev_logprobs", "reference_policy_logprobs", "advantages")}
    got = read_columns(client, write_columns(client, meta, scores), DP_TRAIN_FIELDS)
    assert set(got) == set(DP_TRAIN_FIELDS)
    assert got.size == 2


@given(ragged_cases(min_rows=1), st.data())
def test_a_column_written_and_read_equals_row_by_row_truth(case: RaggedCase, data: st.DataObject) -> None:
    client = LocalDataPlaneClient()
    rows = len(case.lengths)
    ids = [f"s{i}" for i in range(rows)]
    packed = nest(unpad(case.padded, case.lengths))
    meta = KVBatchMeta("p", "t", ids, sequence_lengths=case.lengths)
    write_columns(client, meta, {"x": packed, "dense": case.padded})
    order = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=8))
    target = data.draw(st.integers(0, 12))
    picked = meta.subset(order)
    picked.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = target
    got = read_columns(client, picked, ["x", "dense"])
    expected = [unpad(case.padded, case.lengths)[i] for i in order]
    width = max(target, *(len(row) for row in expected))
    assert same_bits(got["x"], pad(expected, width, 0))
    assert same_bits(got["dense"], torch.stack([case.padded[i] for i in order]))


def test_round_up_is_offered_here_too() -> None:
    assert round_up(13, 8) == 16

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference_packing as reference
from headrace.compat.batched_data_dict import BatchedDataDict as CallersBatch
from headrace.distributed.batched_data_dict import (
    BatchedDataDict,
    DynamicBatchingArgs,
    SequencePackingArgs,
)
from headrace.distributed.multimodal import PackedTensor
from headrace.errors import ConfigError, SchemaError


def packing(budget, algorithm="modified_first_fit_decreasing", multiple=1):
    return SequencePackingArgs(
        max_tokens_per_microbatch=budget,
        input_key="input_ids",
        input_lengths_key="input_lengths",
        algorithm=algorithm,
        sequence_length_pad_multiple=multiple,
    )


def dynamic(budget, multiple=1):
    return DynamicBatchingArgs(
        max_tokens_per_microbatch=budget,
        input_key="input_ids",
        input_lengths_key="input_lengths",
        sequence_length_round=multiple,
    )


def batch_of(lengths, width=None):
    """Rows whose tokens, masks, logprobs (value t at position t), texts and media say which row they are."""
    n, width = len(lengths), max(lengths, default=0) if width is None else width
    inside = torch.arange(width).expand(n, width) < torch.tensor(lengths, dtype=torch.int64).reshape(n, 1)
    return BatchedDataDict(
        input_ids=(torch.arange(1, n + 1).reshape(n, 1) * inside).long(),
        input_lengths=torch.tensor(lengths, dtype=torch.int64),
        token_mask=inside.to(torch.uint8),
        sample_mask=torch.ones(n),
        logprobs=torch.arange(width).expand(n, width).float() * inside,
        text=[f"row {i}" for i in range(n)],
        scores=torch.arange(n * 3).reshape(n, 3).float(),
        objects=np.array([{"row": i} for i in range(n)], dtype=object),
    )


def rows_of(batch):
    """The rows a batch holds; fails where columns disagree."""
    rows = [int(t.removeprefix("row ")) for t in batch["text"]]
    assert [o["row"] for o in batch["objects"]] == rows
    assert batch["scores"].tolist() == [[3 * r, 3 * r + 1, 3 * r + 2] for r in rows]
    width = batch["input_ids"].shape[1]
    for i, row in enumerate(rows):
        length = int(batch["input_lengths"][i])
        assert batch["input_ids"][i].tolist() == [row + 1] * length + [0] * (width - length)
        assert batch["logprobs"][i].tolist() == [*range(length)] + [0] * (width - length)
        assert batch["token_mask"][i].tolist() == [1] * length + [0] * (width - length)
    assert batch["sample_mask"].tolist() == [1] * len(rows)
    return rows


def is_dummy(microbatch):
    return microbatch.size == 1 and float(microbatch["sample_mask"].sum()) == 0


def restored(shards, inverse):
    joined = BatchedDataDict.from_batches(shards)
    joined.reorder_data(inverse)
    return rows_of(joined)


# Contiguous shards.


@settings(max_examples=100, deadline=None)
@given(per_shard=st.integers(1, 3), shards=st.integers(1, 4), batches=st.integers(1, 3))
def test_shard_k_gets_slice_k_of_every_global_batch(per_shard, shards, batches):
    batch_size = per_shard * shards
    rows = batch_size * batches
    result = batch_of([2] * rows).shard_by_batch_size(shards, batch_size=batch_size)
    assert [rows_of(s) for s in result] == reference.contiguous_shards(range(rows), shards, batch_size)
    assert all(s.micro_batch_indices is None for s in result)
    for batch in range(batches):
        rows_here = [rows_of(s.get_batch(batch, per_shard)) for s in result]
        assert rows_here == reference.contiguous_shards(
            range(batch * batch_size, (batch + 1) * batch_size), shards, batch_size
        )


def test_without_a_batch_size_all_rows_are_one_global_batch():
    assert [rows_of(s) for s in batch_of([1] * 4).shard_by_batch_size(2)] == [[0, 1], [2, 3]]


def test_uneven_shards_leave_the_last_ones_short_or_empty_with_all_columns():
    batch = CallersBatch.of(batch_of([1] * 2))
    batch["media"] = PackedTensor([torch.ones(1), torch.ones(2)])
    shards = batch.shard_by_batch_size(4, allow_uneven_shards=True)
    assert [s.size for s in shards] == [1, 1, 0, 0]
    for shard in shards[2:]:
        assert set(shard) == set(batch)
        assert shard["input_ids"].shape == (0, 1)
        assert shard["text"] == []
        assert shard["media"].as_tensor() is None
    five = CallersBatch.of(batch_of([1] * 5))
    assert [s.size for s in five.shard_by_batch_size(2, allow_uneven_shards=True)] == [3, 2]
    with pytest.raises(ConfigError, match="allow_uneven_shards needs batch_size=None"):
        five.shard_by_batch_size(2, 5, allow_uneven_shards=True)


def test_sizes_that_do_not_divide_are_refused_with_both():
    with pytest.raises(ConfigError, match=r"\(10\) is not a multiple of batch_size \(3\)"):
        batch_of([1] * 10).shard_by_batch_size(2, batch_size=3)
    with pytest.raises(ConfigError, match=r"\(4\) is not a multiple of shards \(3"):
        batch_of([1] * 8).shard_by_batch_size(3, batch_size=4)
    with pytest.raises(ConfigError, match="cannot be passed together"):
        batch_of([1] * 8).shard_by_batch_size(
            2, sequence_packing_args=packing(9), dynamic_batching_args=dynamic(9)
        )


def test_shards_own_their_memory():
    batch = batch_of([1] * 4)
    batch.shard_by_batch_size(2)[0]["scores"][0] = 99
    assert rows_of(batch) == [0, 1, 2, 3]


# Planned shards.


@st.composite
def planned(draw):
    multiple = draw(st.sampled_from([1, 2, 4]))
    budget = multiple * draw(st.integers(1, 6))
    shards = draw(st.integers(1, 4))
    batches, rows = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    lengths = draw(st.lists(st.integers(0, budget), min_size=batches * rows, max_size=batches * rows))
    batch_size = rows if batches > 1 else draw(st.sampled_from([None, rows]))
    return lengths, shards, batch_size, budget, multiple


@settings(max_examples=100, deadline=None)
@given(case=planned(), kind=st.sampled_from(["packed", "dynamic"]))
def test_microbatches_of_all_ranks_hold_every_row_once_and_their_order_can_be_restored(case, kind):
    lengths, shards, batch_size, budget, multiple = case
    args = (
        {"sequence_packing_args": packing(budget, multiple=multiple)}
        if kind == "packed"
        else {"dynamic_batching_args": dynamic(budget, multiple)}
    )
    batch = batch_of(lengths, width=budget)
    # Scores are as wide as the tokens where the budget is 3: only the names tell them apart.
    batch.token_columns = ("input_ids", "token_mask", "logprobs")
    result, inverse = batch.shard_by_batch_size(shards, batch_size=batch_size, **args)
    assert restored(result, inverse) == list(range(len(lengths)))
    seen: list[int] = []
    for index in range(len(lengths) // (batch_size or len(lengths))):
        counts = set()
        for shard in result:
            microbatches = _microbatches(shard.get_batch(index), kind, budget, multiple)
            counts.add(len(microbatches))
            seen += [row for m in microbatches if not is_dummy(m) for row in rows_of(m)]
        assert len(counts) == 1, "ranks have different numbers of microbatches"
    assert sorted(seen) == list(range(len(lengths)))


def _microbatches(batch, kind, budget, multiple):
    if kind == "packed":
        microbatches = list(batch.microbatches("packed", 1))
        count, longest = CallersBatch.of(batch).get_microbatch_iterator_for_packable_sequences_len()
        totals = [
            sum(reference.rounded(n, multiple) for n in m["input_lengths"].tolist()) for m in microbatches
        ]
        assert max(totals) <= longest <= budget
    else:
        microbatches = list(batch.microbatches("dynamic", 1))
        count = CallersBatch.of(batch).get_microbatch_iterator_dynamic_shapes_len()
        assert all(m["input_ids"].numel() <= budget for m in microbatches)
        assert all(m["input_ids"].shape[1] % multiple == 0 for m in microbatches)
    assert count == len(microbatches)
    return microbatches


def test_a_plan_needs_a_column_of_lengths_that_fit_the_tokens():
    batch = batch_of([3, 2])
    with pytest.raises(SchemaError, match="input_lengths_key='lengths' names no column"):
        batch.shard_by_batch_size(1, sequence_packing_args={**packing(9), "input_lengths_key": "lengths"})
    batch["input_lengths"] = torch.tensor([3, 4])
    with pytest.raises(
        SchemaError, match=r"row 1 has length 4 in column 'input_lengths', more than the 3 tokens"
    ):
        batch.shard_by_batch_size(1, sequence_packing_args=packing(9))


def test_lengths_may_be_a_list_and_columns_may_have_other_names():
    batch = BatchedDataDict(data=torch.ones(8, 40), lengths=[2, 8, 4, 16, 28, 32, 2, 32])
    args = DynamicBatchingArgs(
        max_tokens_per_microbatch=32, input_key="data", input_lengths_key="lengths", sequence_length_round=4
    )
    shards, _ = batch.shard_by_batch_size(2, dynamic_batching_args=args)
    for shard in shards:
        assert shard.micro_batch_indices == [[[0, 2], [2, 3], [3, 4]]]
        shapes = [m["data"].shape for m in shard.microbatches("dynamic", 1)]
        assert shapes == [(2, 8), (1, 28), (1, 32)]


def test_global_batches_come_with_their_part_of_the_plan():
    shards, _ = batch_of([4, 4, 8, 8, 2, 2, 2, 2]).shard_by_batch_size(
        1, batch_size=4, sequence_packing_args=packing(8)
    )
    second = shards[0].get_batch(1)
    assert sorted(rows_of(second)) == [4, 5, 6, 7]
    assert second.micro_batch_indices == [[[0, 4]]]
    assert second.micro_batch_lengths == [[8]]
    assert second.elem_counts_per_gb == [4]
    assert [m.size for m in second.microbatches("packed", 1)] == [4]
    assert len(shards[0].get_batch(0, batch_size=99).micro_batch_indices[0]) == 3


def test_a_plan_attached_without_row_counts_goes_by_the_batch_size():
    batch = batch_of([1] * 4)
    batch.micro_batch_indices, batch.micro_batch_lengths = [[[0, 2]], [[0, 1], [1, 2]]], [[1], [1, 1]]
    second = batch.get_batch(1, 2)
    assert rows_of(second) == [2, 3]
    assert second.micro_batch_indices == [[[0, 1], [1, 2]]]


def test_a_global_batch_that_is_not_there_is_refused():
    batch = batch_of([1] * 4)
    with pytest.raises(ConfigError, match="needs batch_size"):
        batch.get_batch(0)
    with pytest.raises(IndexError, match="of a batch of 4 rows"):
        batch.get_batch(2, 2)
    batch.elem_counts_per_gb = [4]
    for index in (1, -1):
        with pytest.raises(IndexError, match=f"global batch {index} of 1"):
            batch.get_batch(index)


def test_planned_iterators_want_a_plan_of_one_global_batch():
    batch = CallersBatch.of(batch_of([1] * 4))
    iterators = (
        batch.make_microbatch_iterator_with_dynamic_shapes,
        batch.make_microbatch_iterator_for_packable_sequences,
        batch.get_microbatch_iterator_dynamic_shapes_len,
        batch.get_microbatch_iterator_for_packable_sequences_len,
        lambda: batch.microbatches("packed", 1),
        lambda: batch.microbatches("dynamic", 1),
    )
    for iterator in iterators:
        with pytest.raises(SchemaError, match="no microbatch plan"):
            iterator()
    batch.micro_batch_indices, batch.micro_batch_lengths = [[[0, 2]], [[0, 2]]], [[1], [1]]
    for iterator in iterators:
        with pytest.raises(SchemaError, match="2 global batches; take one with get_batch"):
            iterator()


# Microbatches of fixed size.


@settings(max_examples=100, deadline=None)
@given(count=st.integers(0, 4), size=st.integers(1, 3))
def test_fixed_size_microbatches_are_the_rows_in_order(count, size):
    batch = batch_of([1] * count * size)
    microbatches = list(batch.microbatches("fixed", size))
    assert [rows_of(m) for m in microbatches] == [
        list(range(start, start + size)) for start in range(0, count * size, size)
    ]


@pytest.mark.parametrize("size", [2, 0, 250])
def test_a_remainder_is_an_error_at_once_and_no_row_is_dropped(size):
    with pytest.raises(ConfigError, match=rf"249 rows are not a multiple of the microbatch size \({size}\)"):
        batch_of([1] * 249).microbatches("fixed", size)


# Which columns dynamic shapes cut.


def test_only_columns_as_wide_as_the_tokens_are_cut():
    batch = batch_of([2, 2], width=5)
    batch["routes"] = torch.ones(2, 5, 4, 2)
    batch["grid"] = torch.ones(2, 4, 5)
    batch["number"] = torch.ones(2)
    batch["jagged"] = torch.nested.nested_tensor([torch.ones(2), torch.ones(5)], layout=torch.jagged)
    shards, _ = batch.shard_by_batch_size(1, dynamic_batching_args=dynamic(10, multiple=3))
    (microbatch,) = shards[0].microbatches("dynamic", 1)
    assert microbatch["input_ids"].shape == microbatch["logprobs"].shape == (2, 3)
    assert microbatch["routes"].shape == (2, 3, 4, 2)
    assert microbatch["scores"].shape == (2, 3)
    assert microbatch["grid"].shape == (2, 4, 5)
    assert microbatch["number"].shape == (2,)
    assert sorted(len(r) for r in microbatch["jagged"].unbind()) == [2, 5]


def test_class_scores_as_wide_as_the_tokens_are_not_cut_where_token_columns_are_named():
    batch = batch_of([1, 2], width=3)
    shards, _ = batch.shard_by_batch_size(1, dynamic_batching_args=dynamic(6))
    (by_width,) = shards[0].microbatches("dynamic", 1)
    assert by_width["scores"].shape == (2, 2)
    # Names that the batch lacks, and a per-token column with one value per row, do no harm.
    batch.token_columns = frozenset({"input_ids", "token_mask", "logprobs", "advantages", "sample_mask"})
    shards, _ = batch.shard_by_batch_size(1, dynamic_batching_args=dynamic(6))
    (by_name,) = shards[0].microbatches("dynamic", 1)
    assert by_name["scores"].shape == (2, 3)
    assert by_name["logprobs"].shape == (2, 2)
    assert rows_of(by_name) == [0, 1]


def test_a_length_rounded_beyond_the_width_keeps_the_width():
    shards, _ = batch_of([5, 4]).shard_by_batch_size(1, dynamic_batching_args=dynamic(16, multiple=8))
    (microbatch,) = shards[0].microbatches("dynamic", 1)
    assert shards[0].micro_batch_lengths == [[8]]
    assert microbatch["input_ids"].shape == (2, 5)


def test_without_a_token_column_the_width_is_unknown():
    batch = BatchedDataDict(x=torch.ones(1, 3))
    batch.micro_batch_indices, batch.micro_batch_lengths = [[[0, 1]]], [[2]]
    with pytest.raises(SchemaError, match="token column 'input_ids' is missing"):
        batch.microbatches("dynamic", 1)
    batch.token_columns = ["x"]
    (microbatch,) = batch.microbatches("dynamic", 1)
    assert microbatch["x"].shape == (1, 2)


# Fillers.


def rich_batch(lengths):
    batch = batch_of(lengths)
    n = len(lengths)
    batch["attention_mask"] = torch.ones(n, batch["input_ids"].shape[1])
    batch["loss_multiplier"] = [1.0] * n
    batch["advantages"] = torch.full((n,), 7.0)
    batch["routes"] = torch.ones(n, batch["input_ids"].shape[1], 3, 2, dtype=torch.uint8)
    batch["numbers"] = np.arange(n)
    batch["media"] = PackedTensor([torch.ones(2, 3)] * n)
    empty = torch.nested.nested_tensor_from_jagged(torch.zeros(0), torch.zeros(1, dtype=torch.int64))
    batch["jagged"] = (
        torch.nested.nested_tensor([torch.ones(n) for n in lengths], layout=torch.jagged) if n else empty
    )
    return batch


def check_dummy(dummy, columns):
    assert set(dummy) == set(columns)
    assert dummy.size == 1
    assert dummy["input_ids"].shape == (1, 1)
    assert dummy["routes"].shape == (1, 1, 3, 2)
    assert dummy["routes"].dtype == torch.uint8
    assert dummy["input_lengths"].tolist() == [1]
    assert dummy["token_mask"].tolist() == [[0]]
    assert dummy["token_mask"].dtype == torch.uint8
    assert dummy["sample_mask"].tolist() == [0]
    assert dummy["loss_multiplier"] == [0]
    assert dummy["media"].as_tensor() is None
    assert [len(r) for r in dummy["jagged"].unbind()] == [1]
    assert dummy["scores"].shape == (1, 3)
    assert isinstance(dummy["numbers"], np.ndarray)
    assert dummy["objects"].dtype == object


def test_an_empty_pair_is_a_microbatch_that_weighs_nothing():
    batch = rich_batch([4, 2])
    batch.micro_batch_indices, batch.micro_batch_lengths = [[[0, 2], [2, 2]]], [[6, 1]]
    for microbatches in (
        batch.microbatches("packed", 1),
        batch.microbatches("dynamic", 1),
    ):
        real, dummy = microbatches
        assert rows_of(real) == [0, 1]
        check_dummy(dummy, batch)
        assert dummy["input_ids"].tolist() == [[1]]
        assert dummy["attention_mask"].tolist() == [[1]]
        assert dummy["advantages"].tolist() == [7]
        assert dummy["text"] == ["row 0"]
    assert rows_of(batch) == [0, 1]
    assert batch["sample_mask"].tolist() == [1, 1]


def test_an_empty_shard_still_runs_its_dummies():
    shards, _ = rich_batch([4]).shard_by_batch_size(2, sequence_packing_args=packing(4))
    empty = shards[1].get_batch(0)
    assert empty.size == 0
    assert empty.micro_batch_indices == [[[0, 0]]]
    (dummy,) = empty.microbatches("packed", 1)
    check_dummy(dummy, empty)
    assert dummy["text"] == [None]
    (dummy,) = empty.microbatches("dynamic", 1)
    check_dummy(dummy, empty)


def test_dummies_are_as_wide_as_the_rounding_asks():
    shards, _ = batch_of([8, 8, 8]).shard_by_batch_size(4, dynamic_batching_args=dynamic(8, multiple=4))
    widths = sorted((is_dummy(m), m["input_ids"].shape) for s in shards for m in s.microbatches("dynamic", 1))
    assert widths == [(False, (1, 8))] * 3 + [(True, (1, 4))]


def test_a_dummy_adds_nothing_to_sums_and_denominators():
    lengths = [95] * 5 + [20] * 5
    for args in ({"sequence_packing_args": packing(100)}, {"dynamic_batching_args": dynamic(100)}):
        shards, _ = batch_of(lengths).shard_by_batch_size(4, **args)
        rows, tokens = 0.0, 0.0
        for shard in shards:
            iterator = (
                shard.microbatches("packed", 1)
                if "sequence_packing_args" in args
                else shard.microbatches("dynamic", 1)
            )
            for m in iterator:
                rows += m["sample_mask"].sum().item()
                tokens += (m["token_mask"].float() * m["sample_mask"][:, None]).sum().item()
        assert (rows, tokens) == (10, sum(lengths))


def test_a_dummy_on_demand_is_one_token_wide():
    batch = rich_batch([4, 2])
    check_dummy(batch.make_dummy(), batch)
    assert batch.make_dummy(width=2)["input_ids"].shape == (1, 2)


def test_lengths_9_1_5_keep_their_tokens_through_packing_sharding_and_back():
    for shards in (1, 2, 3):
        result, inverse = batch_of([9, 1, 5]).shard_by_batch_size(
            shards, sequence_packing_args=packing(10, "first_fit_decreasing")
        )
        assert restored(result, inverse) == [0, 1, 2]

import pickle
import sys
import threading
from copy import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference_packing as reference
from headrace.data_plane.interfaces import KVBatchMeta
from headrace.data_plane.preshard import cut_meta, shard_meta_for_dp
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.distributed.bin_packing import ALGORITHMS
from headrace.distributed.worker_groups.wire import decode, encode
from headrace.errors import ConfigError, SchemaError

PLAN = ("micro_batch_indices", "micro_batch_lengths", "elem_counts_per_gb")


def packing(budget, algorithm="modified_first_fit_decreasing", multiple=1, order="planned"):
    return {
        "sequence_packing_args": {
            "max_tokens_per_microbatch": budget,
            "input_key": "input_ids",
            "input_lengths_key": "input_lengths",
            "algorithm": algorithm,
            "sequence_length_pad_multiple": multiple,
            "microbatch_order": order,
        }
    }


def dynamic(budget, multiple=1):
    return {
        "dynamic_batching_args": {
            "max_tokens_per_microbatch": budget,
            "input_key": "input_ids",
            "input_lengths_key": "input_lengths",
            "sequence_length_round": multiple,
        }
    }


def meta_of(lengths, rows=None, **more):
    rows = len(lengths) if lengths is not None else rows
    return KVBatchMeta(
        partition_id="train",
        task_name="train",
        sample_ids=[f"p{i}_g0" for i in range(rows)],
        fields=["input_ids"],
        sequence_lengths=lengths,
        tags=[{"row": i} for i in range(rows)],
        **more,
    )


@st.composite
def cases(draw):
    multiple = draw(st.sampled_from([1, 4]))
    budget = multiple * draw(st.integers(1, 10))
    shards, batches = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    rows = draw(st.integers(1, 12))
    kind = draw(st.sampled_from(["contiguous", "packed", "dynamic"]))
    args = {}
    if kind == "packed":
        order = draw(st.sampled_from(["planned", "longest_first"]))
        args = packing(budget, draw(st.sampled_from(ALGORITHMS)), multiple, order)
    elif kind == "dynamic":
        args = dynamic(budget, multiple)
    else:
        rows *= shards
    lengths = draw(st.lists(st.integers(0, budget), min_size=batches * rows, max_size=batches * rows))
    return lengths, shards, rows if batches > 1 else draw(st.sampled_from([None, rows])), args


@settings(max_examples=100, deadline=None)
@given(case=cases())
def test_metas_get_the_rows_and_the_plan_that_the_batch_itself_gets(case):
    lengths, shards, batch_size, args = case
    metas, inverse = shard_meta_for_dp(meta_of(lengths), dp_world=shards, batch_size=batch_size, **args)
    batch = BatchedDataDict(
        input_ids=torch.zeros(len(lengths), max(lengths)),
        input_lengths=torch.tensor(lengths),
        ids=[f"p{i}_g0" for i in range(len(lengths))],
    )
    sharded = batch.shard_by_batch_size(shards, batch_size=batch_size, **args)
    if isinstance(sharded, tuple):
        sharded, expected = sharded
        assert inverse == expected
    assert [m.sample_ids for m in metas] == [s["ids"] for s in sharded]
    assert [m.sequence_lengths for m in metas] == [s["input_lengths"].tolist() for s in sharded]
    for meta, shard in zip(metas, sharded):
        assert [meta.extra_info.get(key) for key in PLAN] == [getattr(shard, key) for key in PLAN]
        assert [t["row"] for t in meta.tags] == [int(i[1:-3]) for i in meta.sample_ids]
    joined = [i for m in metas for i in m.sample_ids]
    restored = joined if inverse is None else reference.put_at(joined, inverse)
    assert restored == meta_of(lengths).sample_ids


@settings(max_examples=100, deadline=None)
@given(case=cases())
def test_every_rank_has_the_same_number_of_microbatches_per_global_batch(case):
    lengths, shards, batch_size, args = case
    metas, _ = shard_meta_for_dp(meta_of(lengths), dp_world=shards, batch_size=batch_size, **args)
    if not args:
        assert all(key not in m.extra_info for m in metas for key in PLAN)
        return
    counts = [[len(batch) for batch in m.extra_info["micro_batch_indices"]] for m in metas]
    assert all(c == counts[0] for c in counts)
    assert len(counts[0]) == (len(lengths) // batch_size if batch_size else 1)


def test_contiguous_shards_of_one_global_batch_need_no_reordering():
    metas, inverse = shard_meta_for_dp(meta_of([1, 2, 3, 4]), dp_world=2)
    assert inverse is None
    assert [m.sequence_lengths for m in metas] == [[1, 2], [3, 4]]


def test_contiguous_shards_of_several_global_batches_say_how_to_reorder():
    metas, inverse = shard_meta_for_dp(meta_of([1, 2, 3, 4]), dp_world=2, batch_size=2)
    assert [m.sequence_lengths for m in metas] == [[1, 3], [2, 4]]
    assert inverse == [0, 2, 1, 3]


def test_tags_travel_and_no_dict_is_shared():
    meta = meta_of([5, 5], extra_info={"global_forward_pad_seqlen": 8})
    metas, _ = shard_meta_for_dp(meta, dp_world=2, **packing(5))
    metas[0].tags[0]["row"] = "changed"
    metas[0].extra_info["rank"] = 0
    assert [t["row"] for t in meta.tags] == [0, 1]
    assert "rank" not in metas[1].extra_info
    assert "micro_batch_indices" not in meta.extra_info


def test_facts_of_the_batch_are_copied_and_an_old_plan_is_not():
    old = {"global_forward_pad_seqlen": 16, "rollout": {"a": 1}, "micro_batch_indices": [[[0, 2]]]}
    for args in ({}, packing(9)):
        metas, _ = shard_meta_for_dp(meta_of([3, 4], extra_info=old), dp_world=2, **args)
        for meta in metas:
            assert meta.extra_info["global_forward_pad_seqlen"] == 16
            assert meta.extra_info["rollout"] == {"a": 1}
            assert meta.extra_info.get("micro_batch_indices") == ([[[0, 1]]] if args else None)
            assert (meta.partition_id, meta.task_name, meta.fields) == ("train", "train", ["input_ids"])


def test_a_repeated_id_keeps_its_place():
    meta = meta_of([2, 2])
    meta.sample_ids = ["same", "same"]
    metas, inverse = shard_meta_for_dp(meta, dp_world=1, **packing(4))
    assert metas[0].sample_ids == ["same", "same"]
    assert sorted(inverse) == [0, 1]


def test_planning_without_lengths_is_refused():
    for args in (packing(9), dynamic(9)):
        with pytest.raises(SchemaError, match="4 rows without sequence_lengths"):
            shard_meta_for_dp(meta_of(None, rows=4), dp_world=2, **args)
    metas, inverse = shard_meta_for_dp(meta_of(None, rows=4), dp_world=2)
    assert [m.size for m in metas] == [2, 2]
    assert inverse is None
    assert metas[0].sequence_lengths is None


def test_sizes_that_do_not_divide_are_refused_with_the_knob():
    with pytest.raises(ConfigError, match=r"\(10\) is not a multiple of batch_size \(4\)"):
        shard_meta_for_dp(meta_of([1] * 10), dp_world=2, batch_size=4, **packing(9))
    with pytest.raises(ConfigError, match=r"\(249\) is not a multiple of shards \(2 data-parallel ranks\)"):
        shard_meta_for_dp(meta_of([1] * 249), dp_world=2)


def test_a_sample_over_the_budget_is_refused_by_its_id():
    with pytest.raises(
        ConfigError, match=r"sample 'p1_g0' \(row 1\) has 101 tokens.*max_tokens_per_microbatch"
    ):
        shard_meta_for_dp(meta_of([60, 101]), dp_world=2, **packing(100))


def test_a_meta_without_rows_gives_every_rank_a_dummy_microbatch():
    for args in (packing(9), dynamic(9)):
        metas, inverse = shard_meta_for_dp(meta_of([]), dp_world=2, **args)
        assert inverse == []
        assert [m.extra_info["micro_batch_indices"] for m in metas] == [[[[0, 0]]]] * 2
    metas, inverse = shard_meta_for_dp(meta_of([]), dp_world=2)
    assert [m.size for m in metas] == [0, 0]
    assert inverse is None


@pytest.mark.parametrize("letter", ["s", "é"])
def test_shards_of_many_rows_have_the_rows_of_small_ones_also_after_a_pickle_and_a_message(
    letter: str,
) -> None:
    order = np.random.default_rng(0).permutation(9000)
    ids = [letter * (row % 300) + f"_g{row}" for row in range(9000)]
    meta = KVBatchMeta(
        "p", "t", ids, ["a"], [row % 7 for row in range(9000)], {"k": 1}, [{"n": row} for row in range(9000)]
    )
    bounds = [0, 3, 3, 70, 9000]
    for carried in (
        lambda part: part,
        lambda part: pickle.loads(pickle.dumps(part)),
        lambda part: decode(encode(part)),
    ):
        parts = cut_meta(meta, order, bounds)
        assert [carried(part) for part in parts] == [meta.subset(order[a:b]) for a, b in pairwise(bounds)]
    (part, *_), empty = cut_meta(meta, order, bounds), cut_meta(meta, order, bounds)[1]
    assert empty.subset([]).sample_ids == []
    assert copy(part).subset([1]).sample_ids == [ids[order[1]]]


def test_threads_that_read_the_ids_of_a_part_at_first_all_get_them():
    meta = meta_of(None, rows=4096)
    switch, threads = sys.getswitchinterval(), 4
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(40):
            (part,), start = cut_meta(meta, np.arange(4096), [0, 4096]), threading.Barrier(threads)
            read = []

            def look(part=part, start=start, read=read):
                start.wait()
                read.append(part.sample_ids)

            readers = [threading.Thread(target=look) for _ in range(threads)]
            for reader in readers:
                reader.start()
            for reader in readers:
                reader.join()
            assert [ids is part.sample_ids for ids in read] == [True] * threads
    finally:
        sys.setswitchinterval(switch)
    assert part.sample_ids == meta.sample_ids
    assert part == meta

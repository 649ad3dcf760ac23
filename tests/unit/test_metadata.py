"""The edge rules of KVBatchMeta, one test each, named for the rule."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from headrace.data_plane import KVBatchMeta
from headrace.data_plane.schema import (
    ELEM_COUNTS_PER_GB,
    GLOBAL_FORWARD_PAD_SEQLEN,
    MICRO_BATCH_INDICES,
    MICRO_BATCH_LENGTHS,
    PAD_TO_MULTIPLE,
)
from headrace.errors import SchemaError

PLAN = {MICRO_BATCH_INDICES: [[[0, 3]]], MICRO_BATCH_LENGTHS: [[7]], ELEM_COUNTS_PER_GB: [3]}


def meta(**changes: Any) -> KVBatchMeta:
    values: dict[str, Any] = {
        "partition_id": "train",
        "task_name": "train",
        "sample_ids": ["a", "b", "c"],
        "fields": ["input_ids"],
        "sequence_lengths": [3, 5, 4],
        "extra_info": {"step": 1},
        "tags": [{"r": 0.0}, {"r": 1.0}, {"r": 2.0}],
    }
    return KVBatchMeta(**{**values, **changes})


def test_size_is_the_number_of_rows() -> None:
    assert (meta().size, len(meta())) == (3, 3)


def test_the_defaults_are_unknown_and_empty() -> None:
    bare = KVBatchMeta("p", "t", ["a"])
    assert (bare.fields, bare.sequence_lengths, bare.extra_info, bare.tags) == (None, None, {}, None)


@pytest.mark.parametrize("name", ["sequence_lengths", "tags"])
def test_misaligned_lengths_or_tags_are_refused_at_construction(name: str) -> None:
    with pytest.raises(SchemaError, match=f"{name} has 2 entries for 3 sample_ids"):
        meta(**{name: [1, 2] if name == "sequence_lengths" else [{}, {}]})


def test_a_negative_length_is_refused_by_sample() -> None:
    with pytest.raises(SchemaError, match="sample 'b' has sequence length -1"):
        meta(sequence_lengths=[1, -1, 2])


def test_a_repeated_id_is_legal() -> None:
    assert meta(sample_ids=["a", "a", "b"]).subset([0, 1]).sample_ids == ["a", "a"]


def test_lengths_may_be_a_tensor() -> None:
    assert meta(sequence_lengths=torch.tensor([3, 5, 4])).sequence_lengths == [3, 5, 4]


def test_subset_keeps_ids_lengths_and_tags_together() -> None:
    part = meta().subset(torch.tensor([2, 0, 2]))
    assert part.sample_ids == ["c", "a", "c"]
    assert part.sequence_lengths == [4, 3, 4]
    assert part.tags == [{"r": 2.0}, {"r": 0.0}, {"r": 2.0}]
    assert (part.fields, part.extra_info) == (["input_ids"], {"step": 1})


def test_subset_takes_no_index_out_of_range_and_no_mask() -> None:
    with pytest.raises(IndexError, match="row 3"):
        meta().subset([3])
    for mask in ([True, False, True], torch.tensor([True, False, True]), np.array([True, False, True])):
        with pytest.raises(SchemaError, match="boolean mask"):
            meta().subset(mask)
        with pytest.raises(SchemaError, match="boolean mask"):
            meta().drop(mask)


@pytest.mark.parametrize("take", ["subset", "drop"])
def test_a_row_is_named_by_a_whole_number_within_the_meta(take: str) -> None:
    rows = getattr(meta(), take)
    for outside in (7, -4):
        with pytest.raises(IndexError, match=f"row {outside} of a meta with 3 rows"):
            rows([0, outside])
    for wrong in (
        [0, 0.5],
        torch.tensor([0, 0.5]),
        np.array([0.5]),
        [torch.tensor(0.5)],
        [float("nan")],
        ["1"],
    ):
        with pytest.raises(SchemaError, match=r"row index .*; expected a whole number"):
            rows(wrong)
    for whole in ([1.0], torch.tensor([1.0]), [np.int64(1)], [torch.tensor(1)]):
        assert rows(whole).sample_ids == rows([1]).sample_ids


@pytest.mark.parametrize("length", [2.5, float("nan"), float("inf"), "2", None])
def test_a_length_that_is_no_whole_number_is_refused_by_its_value(length: Any) -> None:
    with pytest.raises(SchemaError, match=f"sequence length {length!r}; expected a whole number of tokens"):
        meta(sequence_lengths=[3, length, 4])


def test_no_tag_dict_is_shared_between_two_metas() -> None:
    given = [{"r": 0}, {"r": 1}, {"r": 2}]
    whole = meta(tags=given)
    derived = [
        whole.subset([0, 0, 1]),
        whole.slice(0, 2),
        whole.with_fields(["x"]),
        whole.concat(whole),
        whole.drop([2]),
    ]
    dicts = [*given, *(whole.tags or [])]
    for part in derived:
        assert part is not None
        dicts.extend(part.tags or [])
    assert len({id(tag) for tag in dicts}) == len(dicts)


def test_no_extra_info_dict_is_shared_between_two_metas() -> None:
    whole = meta()
    whole.subset([0]).extra_info["step"] = 2
    whole.concat(whole).extra_info["step"] = 3
    assert whole.extra_info == {"step": 1}


def test_a_subset_drops_the_plan_and_with_fields_keeps_it() -> None:
    planned = meta(extra_info={"step": 1, **PLAN})
    assert planned.subset([0, 1]).extra_info == {"step": 1}
    assert planned.concat(planned).extra_info == {"step": 1}
    assert planned.with_fields(["x"]).extra_info == {"step": 1, **PLAN}


@pytest.mark.parametrize(("start", "stop", "ids"), [(0, 2, "ab"), (1, 99, "bc"), (-1, 3, "c"), (2, 1, "")])
def test_slice_has_the_bounds_of_a_python_slice(start: int, stop: int, ids: str) -> None:
    assert meta().slice(start, stop).sample_ids == list(ids)


def test_drop_takes_rows_away_and_gives_none_if_nothing_is_left() -> None:
    kept = meta().drop([0, -1])
    assert kept is not None
    assert (kept.sample_ids, kept.sequence_lengths, kept.tags) == (["b"], [5], [{"r": 1.0}])
    assert meta().drop([0, 1, 2]) is None


def test_with_fields_names_the_columns_of_the_same_rows() -> None:
    narrowed = meta().with_fields(["x", "y"])
    assert (narrowed.fields, narrowed.sample_ids) == (["x", "y"], ["a", "b", "c"])
    assert meta().fields == ["input_ids"]


def test_stamp_tags_sets_values_in_place() -> None:
    stamped = meta(tags=None)
    assert (
        stamped.stamp_tags({"reward": torch.tensor([0.0, 1.0, 2.0]), "kept": [True, False, True]}) is stamped
    )
    assert stamped.tags == [
        {"reward": 0.0, "kept": True},
        {"reward": 1.0, "kept": False},
        {"reward": 2.0, "kept": True},
    ]


def test_stamped_numbers_are_python_numbers() -> None:
    stamped = meta(tags=None).stamp_tags({"x": np.array([1.5, 2.5, 3.5]), "y": torch.tensor([1, 2, 3])})
    assert stamped.tags is not None
    assert {type(value) for tag in stamped.tags for value in tag.values()} == {float, int}


def test_stamping_another_number_of_values_is_refused_and_stamps_nothing() -> None:
    whole = meta()
    with pytest.raises(SchemaError, match="tag 'late' has 2 entries for 3"):
        whole.stamp_tags({"first": [1, 2, 3], "late": [1, 2]})
    assert whole.tags == [{"r": 0.0}, {"r": 1.0}, {"r": 2.0}]


def test_concat_joins_rows_in_order_and_merges_fields() -> None:
    joined = meta().concat(meta(sample_ids=["d", "e", "f"], fields=["advantages", "input_ids"]))
    assert joined.sample_ids == list("abcdef")
    assert joined.sequence_lengths == [3, 5, 4] * 2
    assert joined.fields == ["input_ids", "advantages"]
    assert joined.tags == [{"r": 0.0}, {"r": 1.0}, {"r": 2.0}] * 2


def test_concat_of_different_partitions_is_refused() -> None:
    with pytest.raises(SchemaError, match="'val' to 'train'"):
        meta().concat(meta(partition_id="val"))


@pytest.mark.parametrize("name", ["sequence_lengths", "tags"])
def test_concat_gives_none_for_what_one_part_lacks(name: str) -> None:
    assert getattr(meta().concat(meta(**{name: None})), name) is None


def test_concat_raises_a_pad_target_that_is_smaller_than_the_longest_row() -> None:
    first = meta(extra_info={GLOBAL_FORWARD_PAD_SEQLEN: 16, PAD_TO_MULTIPLE: 8})
    second = meta(sequence_lengths=[100, 1, 1], extra_info={})
    assert first.concat(second).extra_info[GLOBAL_FORWARD_PAD_SEQLEN] == 104
    assert second.concat(first).extra_info[GLOBAL_FORWARD_PAD_SEQLEN] == 104


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_concat_pads_to_what_suits_every_part_in_any_order(order: tuple[int, ...]) -> None:
    parts = [
        meta(sequence_lengths=[17, 1, 1], extra_info={GLOBAL_FORWARD_PAD_SEQLEN: 17}),
        meta(extra_info={GLOBAL_FORWARD_PAD_SEQLEN: 8, PAD_TO_MULTIPLE: 8}),
        meta(extra_info={PAD_TO_MULTIPLE: 12}),
    ]
    joined = parts[0].concat(parts[1])
    assert (joined.extra_info[GLOBAL_FORWARD_PAD_SEQLEN], joined.extra_info[PAD_TO_MULTIPLE]) == (24, 8)
    first, *others = (parts[place] for place in order)
    assert first.concat(*others).extra_info == {GLOBAL_FORWARD_PAD_SEQLEN: 24, PAD_TO_MULTIPLE: 24}


def test_a_pad_target_is_stamped_for_both_multiples_and_never_shrinks() -> None:
    rows = meta(sequence_lengths=[5, 3, 1], extra_info={PAD_TO_MULTIPLE: 4})
    rows.stamp_pad_target(6)
    assert rows.extra_info == {GLOBAL_FORWARD_PAD_SEQLEN: 12, PAD_TO_MULTIPLE: 12}
    rows.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = 13
    rows.stamp_pad_target(1)
    assert rows.extra_info == {GLOBAL_FORWARD_PAD_SEQLEN: 24, PAD_TO_MULTIPLE: 12}


@pytest.mark.parametrize("bad", [0, -8, 1.5, "8"])
def test_a_pad_multiple_that_is_no_size_is_refused(bad: Any) -> None:
    rows = meta(extra_info={PAD_TO_MULTIPLE: bad})
    with pytest.raises(SchemaError, match=f"pad_to_multiple={bad!r}; expected a whole number, 1 or more"):
        rows.concat(meta())
    with pytest.raises(SchemaError, match="pad_to_multiple="):
        meta().stamp_pad_target(bad)


def test_texts_in_place_of_lists_are_refused() -> None:
    with pytest.raises(SchemaError, match="tags='abc' is a text"):
        meta(tags="abc")
    with pytest.raises(SchemaError, match=r"tag 'r'='abc' is a text"):
        meta().stamp_tags({"r": "abc"})
    with pytest.raises(SchemaError, match="fields='input_ids' is a text"):
        meta().add_fields("input_ids")


def test_concat_keeps_the_largest_pad_target() -> None:
    parts = [meta(extra_info={GLOBAL_FORWARD_PAD_SEQLEN: n}) for n in (16, 64, 32)]
    assert parts[0].concat(*parts[1:]).extra_info[GLOBAL_FORWARD_PAD_SEQLEN] == 64


def test_concat_without_pad_targets_makes_none_up() -> None:
    assert GLOBAL_FORWARD_PAD_SEQLEN not in meta().concat(meta()).extra_info


def test_concat_of_one_part_is_that_part() -> None:
    assert meta().concat() == meta()


def test_metas_pickle() -> None:
    assert pickle.loads(pickle.dumps(meta(extra_info=PLAN))) == meta(extra_info=PLAN)

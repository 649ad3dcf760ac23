"""The metadata algebra against plain lists of records."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headrace.data_plane import KVBatchMeta
from headrace.data_plane.schema import GLOBAL_FORWARD_PAD_SEQLEN
from reference import Row, meta_rows


@st.composite
def metas(draw: st.DrawFn, min_size: int = 0) -> KVBatchMeta:
    ids = draw(st.lists(st.sampled_from("abcdefgh"), min_size=min_size, max_size=8))
    rows = len(ids)
    lengths = draw(st.none() | st.lists(st.integers(0, 40), min_size=rows, max_size=rows))
    tag = st.dictionaries(st.sampled_from(["r", "g"]), st.integers(0, 9), max_size=2)
    tags = draw(st.none() | st.lists(tag, min_size=rows, max_size=rows))
    fields = draw(st.none() | st.lists(st.sampled_from(["x", "y", "z"]), unique=True))
    extra: dict[str, Any] = draw(st.sampled_from([{}, {GLOBAL_FORWARD_PAD_SEQLEN: 16}]))
    return KVBatchMeta("p", "t", ids, fields, lengths, extra, tags)


@given(metas(min_size=1), st.data())
def test_subset_picks_records(meta: KVBatchMeta, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(-meta.size, meta.size - 1)))
    before = meta_rows(meta)
    assert meta_rows(meta.subset(rows)) == [before[i] for i in rows]
    assert meta_rows(meta) == before


@given(metas(), st.integers(-9, 9), st.integers(-9, 9))
def test_slice_slices_records(meta: KVBatchMeta, start: int, stop: int) -> None:
    assert meta_rows(meta.slice(start, stop)) == meta_rows(meta)[start:stop]


@given(metas(min_size=1), st.data())
def test_drop_removes_records(meta: KVBatchMeta, data: st.DataObject) -> None:
    gone = data.draw(st.lists(st.integers(0, meta.size - 1)))
    expected = [row for i, row in enumerate(meta_rows(meta)) if i not in gone]
    kept = meta.drop(gone)
    assert (meta_rows(kept) if kept is not None else []) == expected
    assert (kept is None) == (not expected)


@given(st.lists(metas(), min_size=1, max_size=4))
def test_concat_appends_records(parts: list[KVBatchMeta]) -> None:
    joined = parts[0].concat(*parts[1:])
    has_lengths = all(part.sequence_lengths is not None for part in parts)
    has_tags = all(part.tags is not None for part in parts)
    expected = [
        Row(row.sample_id, row.length if has_lengths else None, row.tags if has_tags else None)
        for part in parts
        for row in meta_rows(part)
    ]
    assert meta_rows(joined) == expected
    known = [part.fields for part in parts if part.fields is not None]
    assert (joined.fields is None) == (not known)
    assert set(joined.fields or []) == {name for fields in known for name in fields}
    target = joined.extra_info.get(GLOBAL_FORWARD_PAD_SEQLEN)
    assert (target is not None) == any(GLOBAL_FORWARD_PAD_SEQLEN in part.extra_info for part in parts)
    if target is not None:
        assert target >= max([16, *(joined.sequence_lengths or [])])


@given(metas(), st.data())
def test_stamp_tags_adds_to_records(meta: KVBatchMeta, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.integers(), min_size=meta.size, max_size=meta.size))
    before = meta_rows(meta)
    stamped = meta_rows(meta.stamp_tags({"r": values}))
    assert [row.tags for row in stamped] == [{**(row.tags or {}), "r": v} for row, v in zip(before, values)]
    assert [(row.sample_id, row.length) for row in stamped] == [(row.sample_id, row.length) for row in before]


@given(metas(), st.lists(st.text(max_size=3)))
def test_with_fields_changes_nothing_else(meta: KVBatchMeta, names: list[str]) -> None:
    narrowed = meta.with_fields(names)
    assert narrowed.fields == names
    assert meta_rows(narrowed) == meta_rows(meta)
    assert narrowed.extra_info == meta.extra_info

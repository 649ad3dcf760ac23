"""Routes as bytes: dtypes, the missing mark, refusals by name and digests."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.data_plane.routes_codec import (
    check_routes,
    holds_experts,
    missing_mark,
    missing_rows,
    most_experts,
    pack_routes,
    route_digest,
    row_digests,
    signed_routes,
    wire_dtype,
)
from headrace.distributed.ragged_kernel import load_kernel
from headrace.errors import SchemaError

INTEGERS = [torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64]


@st.composite
def route_lists(draw: st.DrawFn) -> tuple[list[torch.Tensor], int]:
    """Samples' routes as int64 with -1 in missing rows, and the number of experts."""
    num_experts = draw(st.sampled_from([4, 255, 256, 257, 40_000]))
    top_k = draw(st.integers(1, 4))
    layers = draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    samples = []
    for length in lengths:
        ids = torch.rand(length, layers, num_experts, generator=generator).topk(top_k).indices
        ids[torch.rand(length, layers, generator=generator) < 0.3] = -1
        samples.append(ids)
    return samples, num_experts


@given(route_lists(), st.sampled_from([torch.int16, torch.int32, torch.int64]))
@settings(max_examples=60, deadline=None)
def test_what_is_packed_comes_back_with_missing_rows_marked(
    routes: tuple[list[torch.Tensor], int], dtype: torch.dtype
) -> None:
    samples, num_experts = routes
    top_k = samples[0].shape[-1]
    if not holds_experts(dtype, num_experts, top_k):
        dtype = torch.int32
    wire = pack_routes([ids.to(dtype) for ids in samples], num_experts=num_experts)
    assert wire.dtype == wire_dtype(num_experts, top_k)
    assert wire.dtype.itemsize == (1 if num_experts + (top_k == 1) <= 256 else 2)
    parts = torch.split(wire, [len(ids) for ids in samples])
    for ids, part in zip(samples, parts, strict=True):
        assert torch.equal(signed_routes(part), ids)
        assert torch.equal(missing_rows(part), (ids == -1).all(-1))
        assert torch.equal(row_digests(part), row_digests(ids))
    check_routes(wire, num_experts=num_experts, num_layers=wire.shape[1], top_k=top_k)


def test_rows_of_the_wire_dtype_are_joined_as_they_are() -> None:
    rows = [
        torch.tensor([[[1, 2]], [[255, 255]]], dtype=torch.uint8),
        torch.tensor([[[3, 0]]], dtype=torch.uint8),
    ]
    assert torch.equal(pack_routes(rows, num_experts=8), torch.cat(rows))


@pytest.mark.parametrize(
    ("num_experts", "top_k", "dtype"),
    [
        (128, 8, torch.uint8),
        (256, 2, torch.uint8),
        (255, 1, torch.uint8),
        (256, 1, torch.int16),
        (257, 8, torch.int16),
        (32_768, 8, torch.int16),
        (32_769, 8, torch.uint16),
        (65_536, 2, torch.uint16),
    ],
)
def test_the_wire_dtype_has_room_for_every_id_and_the_mark(
    num_experts: int, top_k: int, dtype: torch.dtype
) -> None:
    assert wire_dtype(num_experts, top_k) == dtype
    assert holds_experts(dtype, num_experts, top_k)
    last = torch.full((1, 1, top_k), num_experts - 1) - torch.arange(top_k)
    missing = torch.full((1, 1, top_k), -1)
    wire = pack_routes([torch.cat([last, missing])], num_experts=num_experts)
    assert torch.equal(signed_routes(wire), torch.cat([last, missing]))


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("top_k", [1, 2])
def test_as_many_experts_as_a_dtype_holds_are_told_from_the_mark(dtype: torch.dtype, top_k: int) -> None:
    most = most_experts(dtype, top_k)
    assert holds_experts(dtype, most, top_k)
    assert not holds_experts(dtype, most + 1, top_k)
    last = (torch.full((1, 1, top_k), most - 1) - torch.arange(top_k)).to(dtype)
    ids = torch.cat([last, torch.full_like(last, missing_mark(dtype))])
    assert missing_rows(ids).tolist() == [[False], [True]]
    check_routes(ids, num_experts=most, num_layers=1, top_k=top_k)


def test_qwen3_30b_costs_384_bytes_per_token() -> None:
    ids = torch.rand(16, 48, 128, generator=torch.Generator().manual_seed(0)).topk(8).indices
    wire = pack_routes([ids.to(torch.int32)], num_experts=128)
    assert wire.nbytes / len(ids) == 384


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("bad", [300, 128, -2])
def test_an_id_that_would_wrap_is_refused_when_packed(dtype: torch.dtype, bad: int) -> None:
    ids = torch.tensor([[[1, bad]]], dtype=dtype)
    with pytest.raises(SchemaError, match=f"sample 1: expert id {bad}; expected -1 or 0..127"):
        pack_routes([torch.tensor([[[1, 2]]], dtype=dtype), ids], num_experts=128)


@pytest.mark.parametrize("compiled", ["0", "1"])
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize(("num_experts", "row"), [(256, [-1, 3]), (256, [3, -1]), (128, [-1, 3])])
def test_a_row_that_is_partly_missing_is_refused_when_packed(
    num_experts: int, row: list[int], dtype: torch.dtype, compiled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.arange(24).view(4, 3, 2).to(dtype)
    ids[1] = -1
    bad = ids.clone()
    bad[2, 1] = torch.tensor(row, dtype=dtype)
    monkeypatch.setenv("HEADRACE_KERNEL", compiled)
    load_kernel.cache_clear()
    try:
        with pytest.raises(
            SchemaError, match=r"sample 1, token 2, layer 1: experts .*partly missing"
        ) as caught:
            pack_routes([ids, bad], num_experts=num_experts)
    finally:
        load_kernel.cache_clear()
    assert str(row) in str(caught.value)


def test_packing_refuses_samples_that_do_not_belong_together() -> None:
    with pytest.raises(SchemaError, match="0 samples"):
        pack_routes([], num_experts=8)
    with pytest.raises(SchemaError, match=r"\(1, 2\), \(2, 2\)"):
        pack_routes([torch.zeros(3, 1, 2).int(), torch.zeros(3, 2, 2).int()], num_experts=8)
    with pytest.raises(SchemaError, match=r"torch.uint8 cannot hold 300 experts"):
        pack_routes([torch.zeros(3, 1, 2, dtype=torch.uint8)], num_experts=300)
    for dtype in (torch.float32, torch.bool):
        with pytest.raises(SchemaError, match=f"routes of dtype {dtype}; expected one of"):
            pack_routes([torch.zeros(3, 1, 2, dtype=dtype)], num_experts=8)
    with pytest.raises(SchemaError, match="at most 65536"):
        wire_dtype(65_537, 2)
    with pytest.raises(SchemaError, match="at most 65535"):
        wire_dtype(65_536, 1)
    with pytest.raises(SchemaError, match=r"torch.float32; expected one of torch.uint8"):
        missing_mark(torch.float32)


def good_routes() -> torch.Tensor:
    return torch.rand(6, 3, 8, generator=torch.Generator().manual_seed(1)).topk(2).indices


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([3, 3], "an expert twice"),
        ([0, 0], "an expert twice"),
        ([3, 8], r"outside 0\.\.7"),
        ([3, -1], "partly missing"),
    ],
    ids=["twice", "zeros", "out-of-range", "partly-missing"],
)
def test_a_bad_row_is_refused_with_sample_token_and_layer(
    dtype: torch.dtype, row: list[int], reason: str
) -> None:
    ids = good_routes()
    ids[4, 1] = torch.tensor(row)
    with pytest.raises(SchemaError, match=rf"sample 'b_g1', token 1, layer 1: .*{reason}"):
        check_routes(
            ids.to(dtype),
            num_experts=8,
            num_layers=3,
            top_k=2,
            lengths=[3, 0, 3],
            sample_ids=["a_g0", "e", "b_g1"],
        )


def test_id_300_in_a_column_of_256_experts_is_refused() -> None:
    ids = good_routes().to(torch.int16)
    ids[0, 2, 1] = 300
    with pytest.raises(SchemaError, match=r"token 0, layer 2: experts \[\d, 300\], outside 0\.\.255"):
        check_routes(ids, num_experts=256, num_layers=3, top_k=2)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_good_routes_with_missing_rows_pass(dtype: torch.dtype) -> None:
    ids = good_routes()
    ids[2] = -1
    check_routes(ids.to(dtype), num_experts=8, num_layers=3, top_k=2)
    check_routes(ids[:0].to(dtype), num_experts=8, num_layers=3, top_k=2)


def test_expert_255_of_256_is_not_taken_for_the_mark() -> None:
    ids = torch.tensor([[[255, 1]], [[255, 255]]], dtype=torch.uint8)
    check_routes(ids, num_experts=256, num_layers=1, top_k=2)
    assert missing_rows(ids).tolist() == [[False], [True]]
    with pytest.raises(SchemaError, match="cannot hold 256 experts and the missing mark"):
        check_routes(ids[..., :1], num_experts=256, num_layers=1, top_k=1)


@pytest.mark.parametrize("shape", [(6, 4, 2), (6, 3, 1), (6, 6)])
def test_a_wrong_layer_or_k_axis_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(SchemaError, match=r"expected \(tokens, 3 layers, 2 experts per token\)"):
        check_routes(torch.zeros(shape, dtype=torch.uint8), num_experts=8, num_layers=3, top_k=2)


def test_every_pair_of_places_is_compared_for_duplicates() -> None:
    for first in range(5):
        for second in range(first + 1, 5):
            ids = torch.arange(5).view(1, 1, 5).clone()
            ids[0, 0, second] = first
            with pytest.raises(SchemaError, match="an expert twice"):
                check_routes(ids, num_experts=8, num_layers=1, top_k=5)


def flipped(ids: torch.Tensor) -> torch.Tensor:
    return ids.flip(-1)


@pytest.mark.parametrize(
    "change",
    [
        flipped,
        lambda ids: ids.roll(1, 1),
        lambda ids: ids.roll(1, 0),
        lambda ids: torch.where(ids == 3, 4, ids),
    ],
    ids=["order-of-experts", "layer-shift", "token-shift", "one-id"],
)
def test_digests_see_every_change(change: Any) -> None:
    ids = good_routes()
    assert route_digest(change(ids)) != route_digest(ids)


def test_digests_depend_on_content_alone() -> None:
    ids = good_routes()
    ids[1, 2] = -1
    assert {route_digest(ids.to(dtype)) for dtype in INTEGERS} == {route_digest(ids)}
    # A value from another process and day: the digest is part of recorded traces.
    assert route_digest(torch.tensor([[[1, 2], [3, 0]]])) == "f9fccbfc590f951f"
    rows = row_digests(ids)
    assert torch.equal(row_digests(ids[2:4]), rows[2:4])
    assert torch.equal(row_digests(ids.roll(1, 0))[1:], rows[:-1])
    assert len(set(rows.tolist())) == len(rows)


@pytest.mark.parametrize("token", [4095, 4096, 9000])
def test_a_bad_row_far_behind_is_found_and_named(token: int) -> None:
    ids = torch.tensor([0, 1], dtype=torch.uint8).expand(9001, 3, 2).clone()
    ids[token, 2] = 7
    with pytest.raises(SchemaError, match=rf"sample 'b', token {token - 4000}, layer 2"):
        check_routes(ids, num_experts=8, num_layers=3, top_k=2, lengths=[4000, 5001], sample_ids=["a", "b"])

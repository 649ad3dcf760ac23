"""Rows for a batch, layer maps and agreement, against per-row reference code."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.data_plane.routes_codec import check_routes
from headrace.errors import ReplayError
from headrace.models.router_replay import (
    AlignedRoutes,
    LayerMap,
    ReplayStats,
    align_jagged,
    align_packed,
    align_padded,
    find_difference,
    route_agreement,
)
from headrace.models.router_replay.diagnosis import find_cause

EXPERTS, LAYERS, TOP_K = 8, 3, 2


def routes(tokens: int, seed: int = 0, experts: int = EXPERTS, top_k: int = TOP_K) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, LAYERS, experts, generator=generator).topk(top_k).indices.to(torch.uint8)


def assert_padding_is_spread(aligned: AlignedRoutes) -> None:
    for row in aligned.padding.nonzero().flatten().tolist():
        expected = [(row * TOP_K + j) % EXPERTS for j in range(TOP_K)]
        assert aligned.ids[row].tolist() == [expected] * LAYERS
    check_routes(aligned.ids, num_experts=EXPERTS, num_layers=LAYERS, top_k=TOP_K)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(0, 3), st.booleans())
@settings(max_examples=50, deadline=None)
def test_jagged_and_padded_rows_land_beside_their_tokens(lengths: list[int], extra: int, left: bool) -> None:
    width = max(lengths) + extra
    values = routes(sum(lengths))
    aligned = align_jagged(values, lengths, width, num_experts=EXPERTS, left=left)
    grid = torch.zeros(len(lengths), width, LAYERS, TOP_K, dtype=torch.uint8)
    mask = torch.zeros(len(lengths), width)
    start = 0
    for i, length in enumerate(lengths):
        first = width - length if left else 0
        for t in range(length):
            assert torch.equal(aligned.ids[i * width + first + t], values[start + t])
            grid[i, first + t] = values[start + t]
            mask[i, first + t] = 1
        start += length
    assert torch.equal(aligned.padding, mask.flatten() == 0)
    assert_padding_is_spread(aligned)
    padded = align_padded(grid, mask, num_experts=EXPERTS)
    assert torch.equal(padded.ids, aligned.ids)
    assert torch.equal(padded.padding, aligned.padding)


def test_packed_rows_keep_their_order_and_are_padded_at_the_end() -> None:
    values = routes(5)
    aligned = align_packed(values, 8, num_experts=EXPERTS)
    assert torch.equal(aligned.ids[:5], values)
    assert aligned.padding.tolist() == [False] * 5 + [True] * 3
    assert_padding_is_spread(aligned)


def test_a_hundred_padding_rows_load_eight_experts_on_four_ranks_evenly() -> None:
    aligned = align_packed(routes(0), 100, num_experts=8)
    per_expert = torch.bincount(aligned.ids[:, 0].flatten().long(), minlength=8)
    assert per_expert.view(4, 2).sum(1).tolist() == [50, 50, 50, 50]


def test_the_routes_that_are_padded_stay_as_they_were() -> None:
    padded = routes(4).unflatten(0, (2, 2))
    before = padded.clone()
    align_padded(padded, torch.zeros(2, 2), num_experts=EXPERTS)
    assert torch.equal(padded, before)


def test_rows_that_do_not_fit_their_batch_are_refused() -> None:
    with pytest.raises(ReplayError, match=r"\(4, 3, 2\) beside a mask"):
        align_padded(routes(4), torch.ones(2, 2), num_experts=EXPERTS)
    with pytest.raises(ReplayError, match="for 3 packed tokens"):
        align_packed(routes(4), 3, num_experts=EXPERTS)
    with pytest.raises(ReplayError, match="4 tokens for samples of 5 tokens"):
        align_jagged(routes(4), [2, 3], 3, num_experts=EXPERTS)
    with pytest.raises(ReplayError, match="the longest of 3, padded to 2"):
        align_jagged(routes(5), [2, 3], 2, num_experts=EXPERTS)
    with pytest.raises(ReplayError, match="2 experts per token of num_experts=1"):
        align_packed(routes(1), 2, num_experts=1)


def test_a_layer_map_selects_the_mixture_layers() -> None:
    layers = LayerMap(5, (1, 2, 4))
    ids = routes(4)
    everything = torch.full((4, 5, TOP_K), 255, dtype=torch.uint8)
    everything[:, [1, 2, 4]] = ids
    assert torch.equal(layers.select(everything), ids)
    assert layers.payload_axis(3) == "moe"
    assert layers.payload_axis(5) == "all"
    assert LayerMap(3, (0, 1, 2)).payload_axis(3) == "moe"
    assert LayerMap(3, (0, 1, 2)).select(ids) is ids


def test_a_layer_axis_that_does_not_fit_or_could_mean_two_things_is_refused() -> None:
    with pytest.raises(ReplayError, match="routes have 3 layers; expected all 5 decoder layers"):
        LayerMap(5, (1, 2, 4)).select(routes(4))
    with pytest.raises(
        ReplayError, match="4 layers is neither: the model has 5 decoder layers and 3 routers"
    ):
        LayerMap(5, (1, 2, 4)).payload_axis(4)
    # Two routers in each mixture layer, and as many dense layers as mixture layers.
    two_each = LayerMap(4, (1, 1, 3, 3))
    with pytest.raises(ReplayError, match="could be either"):
        two_each.payload_axis(4)
    with pytest.raises(ReplayError, match="several in one layer"):
        two_each.select(routes(4))


@given(st.integers(0, 12), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_agreement_is_what_sets_of_experts_say(tokens: int, seed: int) -> None:
    left, right = routes(tokens, seed, experts=5, top_k=3), routes(tokens, seed + 1, experts=5, top_k=3)
    right[: tokens // 2] = left[: tokens // 2].flip(-1)
    left[1:2, 0] = 255
    mask = torch.rand(tokens, generator=torch.Generator().manual_seed(seed)) < 0.8
    rows, exact, iou, differing, compared = [0] * LAYERS, [0] * LAYERS, [0.0] * LAYERS, 0, 0
    for t in range(tokens):
        differs = seen = False
        for layer in range(LAYERS):
            a, b = set(left[t, layer].tolist()), set(right[t, layer].tolist())
            if not mask[t] or a == {255}:
                continue
            seen = True
            rows[layer] += 1
            exact[layer] += a == b
            iou[layer] += len(a & b) / len(a | b)
            differs |= a != b
        compared += seen
        differing += differs
    found = route_agreement(left, right, mask)
    assert list(found.compared) == rows
    assert list(found.exact) == exact
    assert list(found.iou) == pytest.approx(iou, abs=1e-6)
    assert (found.tokens_compared, found.tokens_differing) == (compared, differing)
    half = route_agreement(left[:5], right[:5], mask[:5]) + route_agreement(left[5:], right[5:], mask[5:])
    assert half.agreement() == pytest.approx(found.agreement())


def test_agreement_metrics_are_shares() -> None:
    left = torch.tensor([[[1, 2], [3, 4]], [[1, 2], [3, 4]]])
    right = torch.tensor([[[2, 1], [3, 4]], [[1, 2], [3, 5]]])
    found = route_agreement(left, right)
    assert found.agreement() == pytest.approx(
        {"route_exact": 3 / 4, "route_iou": (3 + 1 / 3) / 4, "route_tokens_differing": 0.5}
    )
    metrics = found.metrics("train")
    assert [metrics[f"router_replay/exact_layer_{layer}"] for layer in (0, 1)] == [1.0, 0.5]
    assert [metrics[f"router_replay/iou_layer_{layer}"] for layer in (0, 1)] == pytest.approx([1.0, 2 / 3])
    assert metrics["router_replay/train/route_exact"] == metrics["router_replay/route_exact"] == 3 / 4
    nothing = route_agreement(left[:0], right[:0])
    assert nothing.agreement() == {}
    assert "router_replay/exact_layer_0" not in nothing.metrics("train")
    with pytest.raises(ReplayError, match=r"\(2, 2, 2\) against \(1, 2, 2\)"):
        route_agreement(left, right[:1])


def misfit(exact: list[int], floor: float) -> str | None:
    return ReplayStats(compared=(100,) * len(exact), exact=tuple(exact)).misfit(floor)


def test_the_share_of_exact_choices_is_held_to_its_floor_in_all_layers_and_to_half_of_it_in_each() -> None:
    assert misfit([95, 66, 81], 0.8) is None
    assert "79.7% of 300 recorded choices" in str(misfit([95, 63, 81], 0.8))
    one_layer = misfit([99] * 40 + [39], 0.8)
    assert one_layer is not None
    assert "39.0% of 100 recorded choices in layer 40" in one_layer
    assert misfit([99] * 40 + [40], 0.8) is None
    assert misfit([0], 0.0) is None
    assert ReplayStats().misfit(0.8) is None
    nothing = route_agreement(routes(3), torch.full_like(routes(3), 255))
    assert nothing.misfit(0.8) is None


def test_no_cause_is_named_where_none_explains_half_of_the_difference() -> None:
    native = [routes(20, seed) for seed in range(4)]
    assert find_cause([(rows, rows) for rows in native]) is None
    assert find_cause([(routes(20, seed + 9), rows) for seed, rows in enumerate(native)]) is None
    assert find_cause([]) is None
    far = find_cause([(rows.roll(-3, 0), rows) for rows in native])
    assert far is not None
    assert far.text.startswith("a lead of 3 tokens")
    assert far.fraction == 1


def test_equal_traces_have_no_difference_and_missing_rows_are_not_one() -> None:
    ids = routes(6)
    assert find_difference(ids, ids.to(torch.int32)) is None
    found = ids.clone()
    found[2] = 255
    assert find_difference(ids, found) is None


@pytest.mark.parametrize(("by", "detail"), [(1, "token 1 before it"), (-2, "token 2 after it")])
def test_a_token_shift_is_named(by: int, detail: str) -> None:
    ids = routes(8)
    found = find_difference(ids, ids.roll(by, 0))
    assert found is not None
    assert found.kind == "token_shift"
    assert detail in found.detail
    assert (found.token, found.layer) == (0, 0)


def test_a_layer_shift_is_named() -> None:
    ids = routes(8)
    found = find_difference(ids, ids.roll(1, 1))
    assert found is not None
    assert found.kind == "layer_shift"
    assert "layer 1 below it" in found.detail


def test_renamed_experts_are_named() -> None:
    ids = routes(16)
    physical = torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(0))
    found = find_difference(ids, physical[ids.long()])
    assert found is not None
    assert found.kind == "renamed_experts"


def test_rows_of_an_earlier_call_and_single_rows_are_named() -> None:
    ids, previous = routes(8), routes(8, seed=1)
    mixed = ids.clone()
    mixed[5:] = previous[5:]
    found = find_difference(ids, mixed, previous=previous)
    assert found is not None
    assert (found.kind, found.token) == ("stale", 5)
    single = ids.clone()
    single[3, 1] = single[3, 1].flip(0)
    found = find_difference(ids, single, previous=previous)
    assert found is not None
    assert (found.kind, found.token, found.layer, found.rows) == ("rows", 3, 1, 1)
    found = find_difference(ids, ids[:-1])
    assert found is not None
    assert (found.kind, found.detail) == ("shape", "(8, 3, 2) expected, (7, 3, 2) found")

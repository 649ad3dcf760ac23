from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.distributed.ragged import (
    RowLayout,
    gather_dense,
    gather_rows,
    gather_spans,
    nested_from_ragged,
    offsets_from_lengths,
    own_copy,
    ragged_from_nested,
    ragged_indices,
    row_lengths,
)
from headrace.distributed.ragged_kernel import load_kernel
from headrace.errors import SchemaError
from ragged_cases import DTYPES, RaggedCase, arbitrary, pad_ragged, ragged_cases, strip_padding
from reference import pad, rows_of, same_bits, same_rows, unpad


@pytest.fixture(scope="module", autouse=True, params=["compiled", "Python"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test runs with the C extension, if it was built here, and without."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HEADRACE_KERNEL", "0" if request.param == "Python" else "1")
        load_kernel.cache_clear()
        if load_kernel() is None and request.param == "compiled":
            pytest.skip("the C extension was not built")
        yield
    load_kernel.cache_clear()


def cut(values: torch.Tensor, offsets: torch.Tensor) -> list[torch.Tensor]:
    bounds = offsets.tolist()
    return [values[a:b] for a, b in pairwise(bounds)]


@given(ragged_cases())
def test_stripping_gives_each_row_without_its_padding(case: RaggedCase) -> None:
    values, offsets = strip_padding(case.padded, torch.tensor(case.lengths))
    assert same_rows(cut(values, offsets), unpad(case.padded, case.lengths))


@given(ragged_cases(), st.integers(0, 3), st.sampled_from([0, 1]))
def test_padding_gives_each_row_with_the_pad_value_after_it(
    case: RaggedCase, spare: int, pad_value: int
) -> None:
    rows = unpad(case.padded, case.lengths)
    width = max(case.lengths) + spare
    padded = pad_ragged(torch.cat(rows), offsets_from_lengths(torch.tensor(case.lengths)), width, pad_value)
    assert same_bits(padded, pad(rows, width, pad_value))


def test_layouts_of_one_batch_share_the_offsets_that_they_have_on_a_device() -> None:
    layout, device = RowLayout([3, 0, 2]), torch.device("cpu")
    wider, given = layout.with_width(7), torch.tensor([0, 3, 3, 5])
    assert layout.fits(given)
    assert not layout.fits(torch.tensor([0, 3, 4, 5]))
    assert layout.fits(given.clone())
    assert layout.offsets_on(device) is given
    assert wider.offsets_on(device) is given


def test_a_layout_copies_by_offsets_of_its_own_whatever_became_of_those_that_fit() -> None:
    apart = torch.tensor([[0, 9], [2, 9], [6, 9]])[:, 0]
    for given_offsets in (apart, apart.to(torch.int32), apart.clone()):
        layout = RowLayout([2, 4])
        assert layout.fits(given_offsets, given_offsets)
        assert layout.offsets_on(torch.device("cpu")).is_contiguous()
        given_offsets += 1000
        padded = layout.pad(torch.arange(6))
        assert padded.tolist() == [[0, 1, 0, 0], [2, 3, 4, 5]]
        assert layout.strip(padded).tolist() == list(range(6))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_offsets_and_lengths_that_lie_apart_in_memory_come_out_side_by_side(dtype: torch.dtype) -> None:
    table = torch.tensor([[0, 2], [3, 1], [6, 0]], dtype=dtype)
    for nested, rows in (
        (torch.nested.nested_tensor_from_jagged(torch.arange(6), table[:, 0]), [[0, 1, 2], [3, 4, 5]]),
        (
            torch.nested.nested_tensor_from_jagged(torch.arange(6), table[:, 0], lengths=table[:2, 1]),
            [[0, 1], [3]],
        ),
    ):
        values, offsets, _ = ragged_from_nested(nested)
        assert offsets.dtype == torch.int64
        assert offsets.is_contiguous()
        assert [row.tolist() for row in cut(values, offsets)] == rows


@given(ragged_cases(), st.data())
def test_rows_are_gathered_in_any_order_with_repeats(case: RaggedCase, data: st.DataObject) -> None:
    rows = unpad(case.padded, case.lengths)
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=12))
    offsets = offsets_from_lengths(torch.tensor(case.lengths))
    values, new_offsets = gather_rows(torch.cat(rows), offsets, torch.tensor(chosen, dtype=torch.int64))
    assert same_rows(cut(values, new_offsets), [rows[i] for i in chosen])


@pytest.mark.parametrize("width", [1, 17, 300, 5000])
@pytest.mark.parametrize("rows", [3, 700])
@pytest.mark.parametrize("trailing", [(), (3, 2)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.float8_e4m3fn, torch.int64])
def test_every_size_regime_round_trips(
    width: int, rows: int, trailing: tuple[int, ...], dtype: torch.dtype
) -> None:
    if rows * width > 300_000:
        rows = 40
    generator = torch.Generator().manual_seed(width)
    lengths = torch.randint(0, width + 1, (rows,), generator=generator)
    padded = arbitrary((rows, width, *trailing), dtype)
    values, offsets = strip_padding(padded, lengths)
    kept = torch.arange(width) < lengths[:, None]
    assert same_bits(values, padded[kept])
    again = pad_ragged(values, offsets, width, 3)
    assert same_bits(again[kept], values)
    assert (again[~kept].to(torch.float32) == 3).all()
    order = torch.randperm(rows, generator=generator)
    gathered, gathered_offsets = gather_rows(values, offsets, order)
    assert same_bits(
        pad_ragged(gathered, gathered_offsets, width, 0), pad_ragged(values, offsets, width, 0)[order]
    )


@pytest.mark.parametrize("mean", [2, 200])
def test_thousands_of_spans_are_joined_in_order(mean: int) -> None:
    generator = torch.Generator().manual_seed(mean)
    lengths = torch.randint(0, 2 * mean, (3000,), generator=generator)
    offsets = offsets_from_lengths(lengths)
    values = torch.arange(int(offsets[-1]), dtype=torch.int32)
    order = torch.randperm(3000, generator=generator)
    gathered, _ = gather_rows(values, offsets, order)
    rows = torch.split(values, lengths.tolist())
    assert torch.equal(gathered, torch.cat([rows[i] for i in order.tolist()]))


def test_gathered_spans_may_overlap_and_be_empty() -> None:
    values = torch.arange(10)
    spans = gather_spans(values, torch.tensor([7, 0, 6, 2]), torch.tensor([3, 0, 2, 1]))
    assert spans.tolist() == [7, 8, 9, 6, 7, 2]


def test_padded_rows_that_lie_apart_in_memory_are_stripped() -> None:
    base = torch.arange(60).reshape(4, 15)
    for view in (base[:, 2:9], base[1:, :7], base[:, :14:2], base[:1].expand(3, 15)):
        lengths = torch.tensor([1, 5, 0, 7][: len(view)])
        values, offsets = strip_padding(view, lengths)
        assert same_rows(cut(values, offsets), unpad(view, lengths.tolist()))


def test_rows_without_padding_share_memory_with_the_input() -> None:
    padded = torch.arange(6).reshape(2, 3)
    values, _ = strip_padding(padded, torch.tensor([3, 3]))
    assert values.data_ptr() == padded.data_ptr()


def test_one_layout_serves_columns_of_several_dtypes() -> None:
    layout = RowLayout([2, 0, 3], width=4)
    for dtype in DTYPES:
        values = arbitrary((5, 2), dtype)
        assert same_bits(layout.strip(layout.pad(values, 1)), values)


def test_no_rows_and_rows_without_tokens_are_layouts_too() -> None:
    assert RowLayout([]).pad(torch.empty(0, 3)).shape == (0, 0, 3)
    assert RowLayout([], width=4).strip(torch.empty(0, 4)).shape == (0,)
    assert RowLayout([0, 0], width=2).pad(torch.empty(0), 7).tolist() == [[7.0, 7.0], [7.0, 7.0]]
    assert RowLayout([0, 0]).strip(torch.empty(2, 0, 5)).shape == (0, 5)


def test_gradients_flow_through_padding_stripping_and_gathering() -> None:
    values = torch.arange(5.0, requires_grad=True)
    offsets = torch.tensor([0, 2, 2, 5])
    padded = pad_ragged(values, offsets, 4, -1.0)
    stripped, _ = strip_padding(padded, torch.tensor([1, 0, 2]))
    gathered, _ = gather_rows(stripped, torch.tensor([0, 1, 1, 3]), torch.tensor([2, 2, 0]))
    gathered.sum().backward()
    assert padded.tolist()[1] == [-1.0] * 4
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, 0.0, 2.0, 2.0, 0.0]


def test_token_rows_and_positions_follow_the_offsets() -> None:
    rows, positions = ragged_indices(torch.tensor([0, 3, 3, 5]))
    assert (rows.tolist(), positions.tolist()) == ([0, 0, 0, 2, 2], [0, 1, 2, 0, 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dense_rows_of_every_dtype_are_gathered(dtype: torch.dtype) -> None:
    values = arbitrary((4, 3), dtype)
    expected = torch.stack([values[i] for i in (2, 2, 0)])
    assert same_bits(gather_dense(values, torch.tensor([2, 2, 0])), expected)


def test_nested_tensors_come_apart_and_together_without_a_copy() -> None:
    values, offsets = torch.arange(5), torch.tensor([0, 2, 2, 5])
    nested = nested_from_ragged(values, offsets)
    back, back_offsets, dim = ragged_from_nested(nested)
    assert nested.layout == torch.jagged
    assert back.data_ptr() == values.data_ptr()
    assert (back_offsets.tolist(), dim) == ([0, 2, 2, 5], 1)


def test_nested_tensors_know_their_longest_row_so_that_torch_pads_to_it() -> None:
    values, offsets = torch.arange(12).view(6, 2), torch.tensor([0, 2, 2, 6])
    nested = nested_from_ragged(values, offsets)
    assert torch.equal(torch.nested.to_padded_tensor(nested, 9), pad_ragged(values, offsets, None, 9))
    shorter = nested_from_ragged(values[:2], torch.tensor([0, 1, 2]))
    assert torch.nested.to_padded_tensor(shorter, 0).shape == (2, 1, 2)
    empty = nested_from_ragged(values[:0], torch.zeros(3, dtype=torch.int64))
    assert torch.nested.to_padded_tensor(empty, 0).shape == (2, 0, 2)
    wanted = nested_from_ragged(values.float().requires_grad_(), offsets)
    assert torch.nested.to_padded_tensor(wanted, 0).shape == (3, 4, 2)
    later = nested_from_ragged(values, offsets, ragged_dim=2)
    assert later._max_seqlen == 4  # type: ignore[attr-defined]


def test_nested_tensors_around_one_offsets_object_can_be_added() -> None:
    offsets = torch.tensor([0, 2, 5])
    total = nested_from_ragged(torch.ones(5), offsets) + nested_from_ragged(torch.arange(5.0), offsets)
    assert total.values().tolist() == [1, 2, 3, 4, 5]


def test_a_nested_tensor_with_holes_is_closed_up() -> None:
    holes = torch.nested.narrow(
        torch.arange(12).reshape(3, 4),
        1,
        torch.tensor([0, 1, 2]),
        torch.tensor([2, 3, 0]),
        layout=torch.jagged,
    )
    values, offsets, _ = ragged_from_nested(holes)
    assert (values.tolist(), offsets.tolist()) == ([0, 1, 5, 6, 7], [0, 2, 5, 5])


def test_a_nested_tensor_of_strided_layout_is_taken_by_rows() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)])
    values, offsets, _ = ragged_from_nested(nested)
    assert (values.shape, offsets.tolist()) == ((3, 3), [0, 2, 3])


def test_the_ragged_dimension_is_the_declared_one() -> None:
    nested = torch.nested.as_nested_tensor(
        [torch.arange(8).reshape(4, 2), torch.arange(12).reshape(4, 3)], layout=torch.jagged
    )
    values, offsets, dim = ragged_from_nested(nested)
    assert (values.shape, offsets.tolist(), dim) == ((5, 4), [0, 2, 5], 2)
    again = nested_from_ragged(values, offsets, ragged_dim=2)
    assert [row.tolist() for row in again.unbind()] == [row.tolist() for row in nested.unbind()]


def test_gradients_flow_through_a_nested_tensor() -> None:
    values = torch.arange(3.0, requires_grad=True)
    back, _, _ = ragged_from_nested(nested_from_ragged(values, torch.tensor([0, 1, 3])))
    (2 * back).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [2.0, 2.0, 2.0]
    assert same_rows(
        rows_of(nested_from_ragged(values.detach(), torch.tensor([0, 1, 3]))),
        list(values.detach().split([1, 2])),
    )


@pytest.mark.parametrize("lengths", [torch.tensor([1.0]), torch.tensor([[1]]), torch.tensor([True])], ids=str)
def test_lengths_are_whole_numbers_one_per_row(lengths: torch.Tensor) -> None:
    with pytest.raises(SchemaError, match="integers"):
        row_lengths(lengths)


def test_a_negative_length_is_refused_with_its_row() -> None:
    with pytest.raises(SchemaError, match="row 1 has length -2"):
        row_lengths([3, -2])


def test_a_row_longer_than_the_width_is_refused_with_its_row() -> None:
    with pytest.raises(SchemaError, match="row 2 has length 5; the padded width is 4"):
        RowLayout([1, 2, 5], width=4)


def test_values_that_do_not_match_the_lengths_are_refused() -> None:
    with pytest.raises(SchemaError, match="add up to 3"):
        RowLayout([1, 2]).pad(torch.zeros(4))
    with pytest.raises(SchemaError, match=r"expected \(2, 2, ...\)"):
        RowLayout([1, 2]).strip(torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("pad_value", "dtype"),
    [
        (-1, torch.uint8),
        (300, torch.uint8),
        (2**70, torch.uint8),
        (0.5, torch.int64),
        (2, torch.bool),
        (1e6, torch.float16),
        (-65_520, torch.float16),
        (1e39, torch.bfloat16),
        (1e300, torch.float32),
        (10**400, torch.float64),
        (1e6, torch.float8_e4m3fn),
        (float("inf"), torch.float8_e4m3fn),
    ],
    ids=lambda value: str(value)[:12],
)
def test_a_pad_value_that_the_dtype_cannot_hold_is_refused(pad_value: float, dtype: torch.dtype) -> None:
    with pytest.raises(SchemaError, match="does not fit"):
        pad_ragged(torch.zeros(1, dtype=dtype), torch.tensor([0, 1, 1]), 2, pad_value)


@pytest.mark.parametrize(
    ("pad_value", "dtype", "written"),
    [
        (65_504, torch.float16, 65_504.0),
        (0.1, torch.float16, 0.0999755859375),
        (1e-30, torch.float16, 0.0),
        (float("-inf"), torch.float16, float("-inf")),
        (-448.0, torch.float8_e4m3fn, -448.0),
        (2**24 + 1, torch.float32, 2.0**24),
        (True, torch.bfloat16, 1.0),
    ],
)
def test_a_pad_value_of_floating_point_is_rounded(
    pad_value: float, dtype: torch.dtype, written: float
) -> None:
    padded = pad_ragged(torch.zeros(1, dtype=dtype), torch.tensor([0, 1, 1]), 1, pad_value)
    assert padded.to(torch.float64).tolist() == [[0.0], [written]]
    nan = pad_ragged(torch.zeros(1, dtype=dtype), torch.tensor([0, 1, 1]), 1, float("nan"))
    assert nan.to(torch.float64).isnan().tolist() == [[False], [True]]


@settings(max_examples=20)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=6))
def test_offsets_and_lengths_are_inverse(lengths: list[int]) -> None:
    assert offsets_from_lengths(torch.tensor(lengths)).diff().tolist() == lengths


@pytest.mark.parametrize("tokens", [100, 40_001, 5_000_000])
def test_a_copy_of_ones_own_is_equal_and_apart_at_every_size(tokens: int) -> None:
    given = torch.randint(0, 2**40, (tokens + 1,))[1:]
    for tensor in (given, given.to(torch.bool), given.to(torch.bfloat16), given.view(-1, 1).expand(-1, 2)):
        copy = own_copy(tensor)
        assert (copy.dtype, copy.shape, copy.is_contiguous()) == (tensor.dtype, tensor.shape, True)
        assert torch.equal(copy, tensor)
        assert copy.data_ptr() != tensor.data_ptr()


def test_conjugate_and_negative_views_are_copied_as_the_numbers_they_show() -> None:
    rows = torch.complex(torch.arange(6.0), torch.full((6,), 2.0)).reshape(2, 3)
    for view in (rows.conj(), torch._neg_view(rows.imag.contiguous())):
        shown, lengths = view.clone(), torch.tensor([3, 1])
        values, offsets = strip_padding(view, lengths)
        assert torch.equal(values, torch.cat([shown[0], shown[1, :1]]))
        assert torch.equal(pad_ragged(view.flatten()[:4], offsets), pad_ragged(shown.flatten()[:4], offsets))
        spans = gather_spans(view.flatten(), torch.tensor([4, 0]), torch.tensor([2, 1]))
        assert torch.equal(spans, torch.cat([shown.flatten()[4:], shown.flatten()[:1]]))

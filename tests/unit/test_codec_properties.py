"""Pack and materialize against row-by-row truth, for every dtype and shape of row."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from headrace.data_plane.codec import (
    RowPacker,
    materialize,
    maybe_pack_jagged,
    nest,
    pack_per_token_field,
    response_from_nested,
    stack_or_nest,
    to_nested_by_length,
)
from headrace.data_plane.wire import wire_tensordict
from ragged_cases import RaggedCase, ragged_cases
from reference import pad, response_scores, rows_of, same_bits, same_rows, unpad


@given(ragged_cases())
def test_packing_by_length_keeps_each_row(case: RaggedCase) -> None:
    packed = to_nested_by_length(case.padded, torch.tensor(case.lengths))
    assert same_rows(rows_of(packed), unpad(case.padded, case.lengths))


@given(ragged_cases())
def test_every_packing_function_agrees_where_all_apply(case: RaggedCase) -> None:
    lengths = torch.tensor(case.lengths)
    expected = unpad(case.padded, case.lengths)
    exact = case.padded[:, : max(case.lengths)]
    packer = RowPacker(lengths, per_token=frozenset({"x"}))

    def packed(column: torch.Tensor) -> torch.Tensor:
        wire: torch.Tensor = wire_tensordict({"x": packer.pack("x", column)}, len(case.lengths))["x"]
        return wire

    assert same_rows(rows_of(pack_per_token_field(case.padded, lengths)), expected)
    assert same_rows(rows_of(maybe_pack_jagged(exact, lengths)), expected)
    assert same_rows(rows_of(packed(case.padded)), expected)
    assert same_rows(rows_of(packed(nest(expected))), expected)


@given(ragged_cases(), st.integers(0, 12), st.sampled_from([0, 1]))
def test_materialize_undoes_packing(case: RaggedCase, target: int, pad_value: int) -> None:
    packed = to_nested_by_length(case.padded, torch.tensor(case.lengths))
    wire = TensorDict({"x": packed}, batch_size=[len(case.lengths)])
    batch = materialize(wire, pad_value_dict={"x": pad_value}, pad_to_seqlen=target)
    rows = unpad(case.padded, case.lengths)
    assert same_bits(batch["x"], pad(rows, max(max(case.lengths), target), pad_value))


@given(ragged_cases())
def test_the_jagged_layout_keeps_each_row(case: RaggedCase) -> None:
    packed = to_nested_by_length(case.padded, torch.tensor(case.lengths))
    batch = materialize(TensorDict({"x": packed}, batch_size=[len(case.lengths)]), layout="jagged")
    assert same_rows(rows_of(batch["x"]), unpad(case.padded, case.lengths))


@given(ragged_cases())
def test_rows_are_stacked_if_equal_and_nested_if_not(case: RaggedCase) -> None:
    rows = unpad(case.padded, case.lengths)
    joined = stack_or_nest(rows)
    assert joined.is_nested == (len(set(case.lengths)) > 1)
    assert same_rows(rows_of(joined) if joined.is_nested else list(joined), rows)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=6))
def test_responses_are_the_scores_before_each_token(sizes: list[tuple[int, int]]) -> None:
    sizes = [(length, min(response, length - 1)) for length, response in sizes]
    values = torch.arange(float(sum(length for length, _ in sizes)))
    rows = list(values.split([length for length, _ in sizes]))
    responses = [response for _, response in sizes]
    masks = nest([torch.ones(response) for response in responses])
    assert same_rows(rows_of(response_from_nested(nest(rows), masks)), response_scores(rows, responses))

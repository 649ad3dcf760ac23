"""Packing sequences into rows."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.compat.packing import get_flash_attention_kwargs, pack_sequences
from headrace.errors import SchemaError


def _padded(lengths: list[int], width: int) -> torch.Tensor:
    ids = torch.zeros(len(lengths), width, dtype=torch.int64)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.arange(1, length + 1) + 100 * row
    return ids


@given(st.lists(st.integers(0, 6), min_size=1, max_size=8), st.data())
def test_packed_rows_hold_the_sequences_end_to_end(lengths: list[int], data: st.DataObject) -> None:
    cuts = sorted(
        data.draw(st.sets(st.integers(1, len(lengths) - 1)) if len(lengths) > 1 else st.just(set()))
    )
    bounds = [0, *cuts, len(lengths)]
    sizes = [stop - start for start, stop in itertools.pairwise(bounds)]
    least = data.draw(st.integers(0, 20))
    ids = _padded(lengths, 6)

    packed, positions, mask = pack_sequences(
        ids, torch.tensor(lengths), sizes, padding_value=-1, min_seq_len=least
    )

    totals = [sum(lengths[a:b]) for a, b in itertools.pairwise(bounds)]
    width = max([*totals, least])
    assert packed.shape == positions.shape == (len(sizes), width)
    assert mask is not None
    assert mask.shape == (len(sizes), width, width)
    for row, (first, last) in enumerate(itertools.pairwise(bounds)):
        tokens, places, owners = [], [], []
        for sequence in range(first, last):
            tokens += ids[sequence, : lengths[sequence]].tolist()
            places += range(lengths[sequence])
            owners += [sequence] * lengths[sequence]
        rest = width - len(tokens)
        assert packed[row].tolist() == tokens + [-1] * rest
        assert positions[row].tolist() == places + [0] * rest
        for t in range(width):
            seen = {s for s in range(len(owners)) if t < len(owners) and owners[s] == owners[t] and s <= t}
            assert set(mask[row, t].nonzero().flatten().tolist()) == seen


def test_boundaries_are_cumulative_lengths_in_int32() -> None:
    kwargs = get_flash_attention_kwargs(torch.tensor([3, 0, 5]))
    assert kwargs.cu_seqlens_q.tolist() == [0, 3, 3, 8]
    assert kwargs.cu_seqlens_q.dtype == torch.int32
    assert (kwargs.max_seqlen_q, kwargs.max_seqlen_k) == (5, 5)
    assert set(kwargs.as_forward_kwargs()) == {
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
    }


def test_a_length_beyond_the_width_is_refused_by_row() -> None:
    with pytest.raises(SchemaError, match="row 1 has length 9"):
        pack_sequences(torch.zeros(2, 4, dtype=torch.int64), torch.tensor([4, 9]), [2])


def test_sizes_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(SchemaError, match=r"got 2 sequences.*sum 3"):
        pack_sequences(torch.zeros(2, 4, dtype=torch.int64), torch.tensor([4, 2]), [2, 1])

"""The rule of one length per sample against a plain account of every row."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from headrace.data_plane.adapters.local import LocalDataPlaneClient
from headrace.data_plane.codec import nest
from headrace.errors import SchemaError

COLUMNS = ("input_ids", "prev_logprobs", "advantages")
ROWS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True)
PUTS = st.tuples(
    st.just("put"),
    ROWS,
    st.lists(st.sampled_from(COLUMNS), min_size=1, max_size=3, unique=True),
    st.lists(st.integers(0, 2), min_size=4, max_size=4),
)
CLEARS = st.tuples(st.just("clear"), ROWS, st.just([]), st.just([]))


def fields(names: list[str], lengths: list[int]) -> TensorDict:
    columns: dict[str, Any] = {
        name: nest([torch.ones(n).to(torch.int64 if name == "input_ids" else torch.float32) for n in lengths])
        for name in names
    }
    return TensorDict(columns, batch_size=[len(lengths)])


@settings(deadline=None)
@given(st.lists(st.one_of(PUTS, PUTS, CLEARS), max_size=12))
def test_a_put_is_refused_exactly_when_a_row_would_have_two_lengths(steps: list[Any]) -> None:
    client = LocalDataPlaneClient()
    held: dict[str, dict[str, int]] = {}
    for kind, rows, names, sizes in steps:
        if kind == "clear":
            client.clear_samples(rows, "p")
            held = {row: columns for row, columns in held.items() if row not in rows}
            continue
        after = {row: {**held.get(row, {}), **dict.fromkeys(names, n)} for row, n in zip(rows, sizes)}
        is_legal = all(len(set(columns.values())) == 1 for columns in after.values())
        try:
            client.put_samples(rows, "p", fields=fields(names, sizes[: len(rows)]))
        except SchemaError:
            assert not is_legal
        else:
            assert is_legal
            held |= after
    client.close()

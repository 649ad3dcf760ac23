"""Message logs: joined to padded rows, taken apart into columns, and put together again."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.compat.message_log import (
    attach_message_log_view,
    batched_message_log_to_flat_message,
    decompose_message_log,
)
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.distributed.multimodal import PackedTensor
from headrace.distributed.ragged import nested_from_ragged, offsets_from_lengths
from headrace.errors import SchemaError


def message(role: str, *tokens: int, **more: Any) -> dict[str, Any]:
    """Return a message whose text is its tokens, spelled."""
    return {
        "role": role,
        "content": str(tokens),
        "token_ids": torch.tensor(tokens, dtype=torch.int64),
        **more,
    }


LOGS = [
    [message("user", 1, 2), message("assistant", 3, generation_logprobs=torch.tensor([-0.5]))],
    [message("user", 4)],
]


def test_messages_are_joined_in_order_and_padded_on_the_right() -> None:
    flat, lengths = batched_message_log_to_flat_message(LOGS, pad_value_dict={"token_ids": 9})
    assert isinstance(flat, BatchedDataDict)
    assert flat["token_ids"].tolist() == [[1, 2, 3], [4, 9, 9]]
    assert lengths.tolist() == [3, 1]
    assert lengths.dtype == torch.int64
    assert flat["role"] == [["user", "assistant"], ["user"]]
    assert flat["content"] == [["(1, 2)", "(3,)"], ["(4,)"]]


def test_the_width_is_rounded_up_to_the_multiple() -> None:
    flat, lengths = batched_message_log_to_flat_message(LOGS, make_sequence_length_divisible_by=8)
    assert flat["token_ids"].shape == (2, 8)
    assert lengths.tolist() == [3, 1]


def test_a_message_without_a_tensor_that_others_have_is_filled_per_token() -> None:
    flat, _ = batched_message_log_to_flat_message(LOGS, {"generation_logprobs": 7.0})
    assert flat["generation_logprobs"].tolist() == [[7.0, 7.0, -0.5], [7.0, 7.0, 7.0]]


def test_values_that_are_no_tensors_are_listed_with_none_where_a_message_lacks_them() -> None:
    logs = [[message("user", 1, name="a"), message("assistant", 2)], [message("user", 3)]]
    assert batched_message_log_to_flat_message(logs)[0]["name"] == [["a", None], [None]]


def test_trailing_dimensions_are_kept() -> None:
    logs = [[message("user", 1, 2, routes=torch.ones(2, 3, 4))], [message("user", 3)]]
    flat, _ = batched_message_log_to_flat_message(logs)
    assert flat["routes"].shape == (2, 2, 3, 4)
    assert flat["routes"][1].count_nonzero() == 0


def test_media_of_a_log_become_one_row() -> None:
    first, second = (PackedTensor(torch.full((n, 2), n), dim_to_pack=0) for n in (1, 3))
    logs = [[message("user", 1, images=first), message("user", 2, images=second)], [message("user", 3)], []]
    images = batched_message_log_to_flat_message(logs)[0]["images"]
    assert [None if t is None else t.tolist() for t in images.tensors] == [
        [[1, 1], [3, 3], [3, 3], [3, 3]],
        None,
        None,
    ]


def test_a_log_without_messages_is_an_empty_row() -> None:
    flat, lengths = batched_message_log_to_flat_message([[message("user", 5)], []])
    assert flat["token_ids"].tolist() == [[5], [0]]
    assert lengths.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("logs", "fault"),
    [
        ([], "no message logs"),
        (
            [[message("user", 1)], [{"role": "user", "content": "x"}]],
            "log 1, message 0 has no tensor 'token_ids'",
        ),
        (
            [[message("user", 1), message("user", x=torch.ones(2)), message("user", x=torch.ones(2, 2))]],
            r"log 0, message 2: 'x' is \(2, 2\)",
        ),
        (
            [[message("user", 1, x=torch.ones(1))], [message("user", 1, x=torch.ones(1, dtype=torch.int64))]],
            "log 1, message 0: 'x' is .* torch.int64",
        ),
        (
            [[message("user", 1, x=torch.ones(1)), message("user", 1, x="text")]],
            "log 0, message 1: 'x' is a str",
        ),
    ],
    ids=["no logs", "no tokens", "trailing dims", "dtype", "kind"],
)
def test_what_does_not_join_is_refused_by_log_and_message(logs: Any, fault: str) -> None:
    with pytest.raises(SchemaError, match=fault):
        batched_message_log_to_flat_message(logs)


def test_a_log_is_taken_apart_into_lengths_roles_and_texts() -> None:
    columns = decompose_message_log([*LOGS, []])
    assert columns["turn_lengths"].tolist() == [[2, 1], [1, 0], [0, 0]]
    assert columns["turn_roles"].tolist() == [["user", "assistant"], ["user"], []]
    assert columns["turn_contents"].tolist() == [["(1, 2)", "(3,)"], ["(4,)"], []]
    assert columns["response_token_lengths"].tolist() == [1, 0, 0]


def test_the_response_is_the_first_assistant_message() -> None:
    log = [message("user", 1), message("assistant", 2, 3), message("user", 4), message("assistant", 5)]
    assert decompose_message_log([log])["response_token_lengths"].tolist() == [2]


def test_a_message_without_a_role_is_refused() -> None:
    with pytest.raises(SchemaError, match="log 0, message 1 has no 'role'"):
        decompose_message_log([[message("user", 1), {"content": "x"}]])


LOG_SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=4), min_size=1, max_size=5)


@settings(deadline=None)
@given(LOG_SHAPES, st.booleans())
def test_logs_that_were_taken_apart_come_back(shapes: list[list[int]], jagged: bool) -> None:
    roles = ["user", "assistant"]
    logs = [
        [message(roles[turn % 2], *range(10 * row, 10 * row + n)) for turn, n in enumerate(shape)]
        for row, shape in enumerate(shapes)
    ]
    flat, lengths = batched_message_log_to_flat_message(logs)
    ids = flat["token_ids"] if "token_ids" in flat else torch.zeros(len(logs), 0, dtype=torch.int64)
    if jagged:
        values = torch.cat([row[:n] for row, n in zip(ids, lengths.tolist())])
        ids = nested_from_ragged(values, offsets_from_lengths(lengths))
    batch = BatchedDataDict(
        {"input_ids": ids, "generation_logprobs": ids.float(), **decompose_message_log(logs)}
    )
    attach_message_log_view(batch)
    for got, log in zip(batch["message_log"], logs, strict=True):
        for message_got, wanted in zip(got, log, strict=True):
            assert (message_got["role"], message_got["content"]) == (wanted["role"], wanted["content"])
            assert torch.equal(message_got["token_ids"], wanted["token_ids"])
            assert ("generation_logprobs" in message_got) == (wanted["role"] == "assistant")


def test_attached_tokens_are_views_of_the_batch() -> None:
    batch = BatchedDataDict({"input_ids": torch.tensor([[1, 2, 3]]), **decompose_message_log(LOGS[:1])})
    attach_message_log_view(batch)
    batch["input_ids"][0, 2] = 8
    assert batch["message_log"][0][1]["token_ids"].tolist() == [8]


def test_without_the_columns_nothing_is_attached() -> None:
    batch = BatchedDataDict({"input_ids": torch.ones(1, 3, dtype=torch.int64)})
    attach_message_log_view(batch)
    assert list(batch) == ["input_ids"]


def test_lengths_of_other_rows_are_refused() -> None:
    batch = BatchedDataDict({"input_ids": torch.tensor([[1, 2]]), **decompose_message_log(LOGS[:1])})
    with pytest.raises(SchemaError, match="row 0: the messages have 3 tokens and 'input_ids' has 2"):
        attach_message_log_view(batch)

"""Conversations with their tokens: message logs to padded rows, to columns, and back.

A message log is one sample's messages in order. A message is a dict with `role`, `content` (text) and `token_ids`
(L,), or `input_ids` in its place, and further values of any kind: tensors along the message's tokens (logprobs,
masks), media as PackedTensors, or anything else.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from headrace.compat.conversations import (
    TOKEN_IDS,
    add_loss_mask_to_message_log,
    get_first_index_that_differs,
    get_formatted_message_log,
    get_keys_from_message_log,
    message_log_shape,
    message_log_to_flat_messages,
    remap_dataset_keys,
)
from headrace.data_plane.object_codec import ObjectArray
from headrace.data_plane.schema import INPUT_IDS
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.distributed.columns import object_array
from headrace.distributed.multimodal import PackedTensor
from headrace.distributed.ragged import RowLayout
from headrace.distributed.ragged_cpu import PadValue
from headrace.errors import SchemaError
from headrace.utils.rounding import round_up

__all__ = [
    "GENERATION_LOGPROBS",
    "MESSAGE_LOG_BULK_FIELDS",
    "add_loss_mask_to_message_log",
    "attach_message_log_view",
    "batched_message_log_to_flat_message",
    "decompose_message_log",
    "get_first_index_that_differs",
    "get_formatted_message_log",
    "get_keys_from_message_log",
    "message_log_shape",
    "message_log_to_flat_messages",
    "reconstruct_message_log",
    "remap_dataset_keys",
]

MessageLog = Sequence[Mapping[str, Any]]

GENERATION_LOGPROBS = "generation_logprobs"
MESSAGE_LOG = "message_log"

TURN_LENGTHS, TURN_ROLES, TURN_CONTENTS = "turn_lengths", "turn_roles", "turn_contents"
RESPONSE_LENGTHS = "response_token_lengths"
MESSAGE_LOG_BULK_FIELDS = (TURN_LENGTHS, TURN_ROLES, TURN_CONTENTS, RESPONSE_LENGTHS)
"""The columns of `decompose_message_log`."""


def batched_message_log_to_flat_message(
    message_log_batch: Sequence[MessageLog],
    pad_value_dict: Mapping[str, PadValue] | None = None,
    make_sequence_length_divisible_by: int = 1,
) -> tuple[BatchedDataDict, torch.Tensor]:
    """Join the messages of each log, key by key, and pad the rows on the right.

    Tensors are joined along their first dimension; a message without a tensor that others have is filled with
    one pad value per token. Media make one PackedTensor row per log. Other values make one list per log, None
    where a message lacks the key. The pad value of a key is its entry in `pad_value_dict`, or else 0.

    Example: logs of 2 + 1 tokens and of 1 token give `token_ids` (2, 3) and lengths [3, 1].

    Returns:
        The columns by key, tensors (N, S, ...) with S a multiple of `make_sequence_length_divisible_by`; and
        the tokens of each log, (N,) int64.

    Raises:
        SchemaError: no logs, a message without `token_ids`, or tensors of one key that do not join, with log and
            message.
    """
    if not message_log_batch:
        raise SchemaError("no message logs to join; expected at least one")
    named = any(TOKEN_IDS in message for log in message_log_batch for message in log)
    spelled = any(INPUT_IDS in message for log in message_log_batch for message in log)
    tokens = INPUT_IDS if spelled and not named else TOKEN_IDS
    counts = [_token_counts(log, row, tokens) for row, log in enumerate(message_log_batch)]
    pads = pad_value_dict or {}
    flat: dict[str, Any] = {}
    for key in dict.fromkeys(key for log in message_log_batch for message in log for key in message):
        values = [[message.get(key) for message in log] for log in message_log_batch]
        example = next((value for row in values for value in row if value is not None), None)
        if isinstance(example, torch.Tensor):
            pad_value = pads.get(key, 0)
            flat[key] = _join(key, values, counts, example, pad_value, make_sequence_length_divisible_by)
        elif isinstance(example, PackedTensor):
            flat[key] = _join_media(values, example)
        else:
            flat[key] = values
    return BatchedDataDict(flat), torch.tensor([sum(row) for row in counts], dtype=torch.int64)


def decompose_message_log(message_log_batch: Sequence[MessageLog]) -> dict[str, torch.Tensor | ObjectArray]:
    """Return what is left of the logs once their tokens stand in `input_ids`, as columns of N rows.

    A message without `token_ids` counts 0 tokens.

    Returns:
        `turn_lengths`: (N, T) int64, tokens of each message, 0 after a log's last; `turn_roles` and
        `turn_contents`: a list of texts per log; `response_token_lengths`: (N,) int64, tokens of the first
        assistant message, 0 without one.

    Raises:
        SchemaError: a message without `role`, with log and message.
    """
    roles = [[_role(m, row, turn) for turn, m in enumerate(log)] for row, log in enumerate(message_log_batch)]
    lengths = [[len(m.get(TOKEN_IDS, ())) for m in log] for log in message_log_batch]
    turns = RowLayout([len(row) for row in lengths])
    flat = torch.tensor([count for row in lengths for count in row], dtype=torch.int64)
    responses = [
        next((count for role, count in zip(*row) if role == "assistant"), 0) for row in zip(roles, lengths)
    ]
    return {
        TURN_LENGTHS: turns.pad(flat),
        TURN_ROLES: object_array(roles),
        TURN_CONTENTS: object_array([[m.get("content", "") for m in log] for log in message_log_batch]),
        RESPONSE_LENGTHS: torch.tensor(responses, dtype=torch.int64),
    }


def attach_message_log_view(batch: BatchedDataDict) -> None:
    """Set `batch["message_log"]` from the columns of `decompose_message_log` and the token columns, in place.

    Every message gets `role`, `content` and `token_ids`, an assistant message also `generation_logprobs` where
    the batch has that column; both are views of the batch's (N, S) or jagged rows. Without `input_ids` or
    without the decomposed columns, nothing happens.

    Raises:
        SchemaError: a log of more tokens than its row of `input_ids`.
    """
    needed = (INPUT_IDS, TURN_LENGTHS, TURN_ROLES, TURN_CONTENTS)
    if any(name not in batch for name in needed):
        return
    logprobs = batch.get(GENERATION_LOGPROBS)
    ids, lengths, roles, contents = (batch[name] for name in needed)
    batch[MESSAGE_LOG] = reconstruct_message_log(ids, lengths, roles, contents, logprobs)


def reconstruct_message_log(
    input_ids: torch.Tensor,
    turn_lengths: torch.Tensor,
    turn_roles: Sequence[Sequence[str]] | ObjectArray,
    turn_contents: Sequence[Sequence[str]] | ObjectArray,
    generation_logprobs: torch.Tensor | None = None,
) -> list[list[dict[str, Any]]]:
    """Return the logs that `decompose_message_log` took apart, of their columns and the token columns.

    Every message gets `role`, `content` and `token_ids`, an assistant message also `generation_logprobs` where they
    are given; both are views of the (N, S) or jagged rows.

    Raises:
        SchemaError: a log of more tokens than its row of `input_ids`.
    """
    ids = input_ids.unbind()
    logprobs = [None] * len(ids) if generation_logprobs is None else generation_logprobs.unbind()
    columns = zip(ids, logprobs, turn_lengths.tolist(), turn_roles, turn_contents)
    return [_log(row, *parts) for row, parts in enumerate(columns)]


def _log(
    row: int,
    ids: torch.Tensor,
    logprobs: torch.Tensor | None,
    lengths: Sequence[int],
    roles: Sequence[str],
    contents: Sequence[str],
) -> list[dict[str, Any]]:
    if sum(lengths) > len(ids):
        raise SchemaError(
            f"row {row}: the messages have {sum(lengths)} tokens and '{INPUT_IDS}' has {len(ids)}; "
            f"'{TURN_LENGTHS}' must belong to these rows"
        )
    log: list[dict[str, Any]] = []
    start = 0
    for role, content, length in zip(roles, contents, lengths):
        message = {"role": role, "content": content, TOKEN_IDS: ids[start : start + length]}
        if logprobs is not None and role == "assistant":
            message[GENERATION_LOGPROBS] = logprobs[start : start + length]
        log.append(message)
        start += length
    return log


def _token_counts(log: MessageLog, row: int, tokens: str) -> list[int]:
    for turn, message in enumerate(log):
        if not isinstance(message.get(tokens), torch.Tensor):
            raise SchemaError(f"log {row}, message {turn} has no tensor '{tokens}'; got {sorted(message)}")
    return [len(message[tokens]) for message in log]


def _role(message: Mapping[str, Any], row: int, turn: int) -> str:
    if "role" not in message:
        raise SchemaError(f"log {row}, message {turn} has no 'role'; got {sorted(message)}")
    return str(message["role"])


def _join(
    key: str,
    values: Sequence[Sequence[Any]],
    counts: Sequence[Sequence[int]],
    example: torch.Tensor,
    pad_value: PadValue,
    multiple: int,
) -> torch.Tensor:
    for row, log in enumerate(values):
        for turn, value in enumerate(log):
            if value is not None and not _joins(value, example):
                raise SchemaError(
                    f"log {row}, message {turn}: '{key}' is {_form(value)}, which does not join "
                    f"{_form(example)}; tensors of one key may differ in their first dimension only"
                )
    pieces = [
        [example.new_full((n, *example.shape[1:]), pad_value) if v is None else v for v, n in zip(*row)]
        for row in zip(values, counts)
    ]
    lengths = [sum(len(piece) for piece in row) for row in pieces]
    layout = RowLayout(lengths, round_up(max(lengths), multiple))
    return layout.pad(torch.cat([piece for row in pieces for piece in row]), pad_value)


def _joins(value: Any, example: torch.Tensor) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.dim() > 0
        and (value.shape[1:], value.dtype, value.device) == (example.shape[1:], example.dtype, example.device)
    )


def _form(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"{tuple(value.shape)} {value.dtype} on {value.device}"


def _join_media(values: Sequence[Sequence[Any]], example: PackedTensor) -> PackedTensor:
    kind = type(example)
    none = kind([None], example.dim_to_pack)
    rows = [[none if value is None else value for value in log] or [none] for log in values]
    return kind.flattened_concat([kind.concat(row) for row in rows])

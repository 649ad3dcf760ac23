"""A prompt's completions as rows of a store."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from headrace.compat.batched_data_dict import BatchedDataDict
from headrace.compat.column_io import full_lengths, plain_media
from headrace.compat.conversations import TOKEN_IDS
from headrace.compat.message_log import GENERATION_LOGPROBS, batched_message_log_to_flat_message
from headrace.compat.prompt_groups import PromptGroupRecord
from headrace.data_plane.column_io import pack_columns
from headrace.data_plane.routes_codec import missing_mark
from headrace.data_plane.schema import (
    FIELDS,
    INPUT_IDS,
    INPUT_LENGTHS,
    ROUTED_EXPERTS_FIELD,
    SAMPLE_MASK,
    TOKEN_MASK,
)
from headrace.distributed.multimodal import PackedTensor
from headrace.errors import SchemaError

WEIGHT_VERSION = "weight_version"
"""Tag of a row: the version of the weights that sampled it."""


def record_to_train_batch(record: PromptGroupRecord, *, pad_value_dict: Mapping[str, int]) -> BatchedDataDict:
    """Return one row per completion, padded on the right.

    `pad_value_dict` has the pad values by name of a message's key (`token_ids`), 0 for others.

    Returns:
        `input_ids`, `generation_logprobs` (0 where nothing was generated) and `token_mask` (1 for an assistant's
        tokens), (N, S) each; `input_lengths`, `sample_mask` and `total_reward`, (N,); `prompt_ids_for_adv` (N, P): the
        prompt's tokens, which name the group; `routed_experts` (N, S, layers, k) where a message has them, others
        marked missing; and media of the messages.

    Raises:
        SchemaError: no completions, or messages that do not join.
    """
    if not record.completions:
        raise SchemaError(
            f"the record of prompt {record.prompt_idx} has no completions; expected at least one"
        )
    routes = _route_example(record)
    logs = [[_train_message(m, routes) for m in c.message_log] for c in record.completions]
    # Padding is no choice of experts.
    mark = {} if routes is None else {ROUTED_EXPERTS_FIELD: missing_mark(routes.dtype)}
    flat, lengths = batched_message_log_to_flat_message(logs, {**pad_value_dict, **mark})
    rows = len(record.completions)
    prompt = torch.cat([torch.as_tensor(m[TOKEN_IDS]) for m in record.prompt] or [torch.zeros(0).long()])
    media = {name: value for name, value in flat.items() if isinstance(value, PackedTensor)}
    batch: dict[str, Any] = {
        INPUT_IDS: flat[TOKEN_IDS],
        INPUT_LENGTHS: lengths,
        GENERATION_LOGPROBS: flat[GENERATION_LOGPROBS],
        TOKEN_MASK: flat[TOKEN_MASK],
        SAMPLE_MASK: torch.ones(rows),
        "prompt_ids_for_adv": prompt.expand(rows, -1),
        "total_reward": torch.tensor([float(c.reward) for c in record.completions]),
        **media,
    }
    if routes is not None:
        batch[ROUTED_EXPERTS_FIELD] = flat[ROUTED_EXPERTS_FIELD]
    return BatchedDataDict(batch)


def pack_payload(
    train_batch: Mapping[str, Any], *, weight_version: int, group_id: str
) -> tuple[list[str], TensorDict, list[dict[str, Any]]]:
    """Return ids, columns and tags for `put_samples`: ids `<group_id>_g<i>`, and one tag `weight_version` each.

    Columns are those of `train_batch` that are tensors, object arrays or media; tokens travel without padding. Rows
    without `input_lengths` count as full width.

    Raises:
        SchemaError: neither `input_lengths` nor a column of tokens, or columns that do not fit together.
    """
    known = train_batch.get(INPUT_LENGTHS)
    told = full_lengths(train_batch) if known is None else known
    if told is None:
        raise SchemaError(
            f"the batch has neither '{INPUT_LENGTHS}' nor a column of tokens; got {sorted(train_batch)}"
        )
    lengths = torch.as_tensor(told).reshape(-1)
    columns: dict[str, Any] = {
        n: c
        for n, c in plain_media(train_batch).items()
        if isinstance(c, torch.Tensor | np.ndarray | PackedTensor)
    }
    if ROUTED_EXPERTS_FIELD in columns:
        columns[ROUTED_EXPERTS_FIELD] = _storable_routes(columns[ROUTED_EXPERTS_FIELD])
    rows = len(lengths)
    fields = pack_columns(columns, lengths=lengths, rows=rows)
    ids = [f"{group_id}_g{place}" for place in range(rows)]
    return ids, fields, [{WEIGHT_VERSION: weight_version} for _ in range(rows)]


def _route_example(record: PromptGroupRecord) -> torch.Tensor | None:
    messages = (m for c in record.completions for m in c.message_log)
    found = (m[ROUTED_EXPERTS_FIELD] for m in messages if m.get(ROUTED_EXPERTS_FIELD) is not None)
    return next(found, None)


def _train_message(message: Mapping[str, Any], routes: torch.Tensor | None) -> dict[str, Any]:
    """Return what training takes of a message; the caller's stays as it is."""
    ids = torch.as_tensor(message[TOKEN_IDS])
    answers = message["role"] == "assistant"
    logprobs = message.get(GENERATION_LOGPROBS)
    kept: dict[str, Any] = {
        TOKEN_IDS: ids,
        GENERATION_LOGPROBS: torch.zeros(len(ids)) if logprobs is None else logprobs,
        TOKEN_MASK: torch.full((len(ids),), int(answers), dtype=ids.dtype),
        **{name: value for name, value in message.items() if isinstance(value, PackedTensor)},
    }
    if routes is not None:
        own = message.get(ROUTED_EXPERTS_FIELD)
        missing = routes.new_full((len(ids), *routes.shape[1:]), missing_mark(routes.dtype))
        kept[ROUTED_EXPERTS_FIELD] = missing if own is None else own
    return kept


def _storable_routes(routes: torch.Tensor) -> torch.Tensor:
    """Return routes in a dtype that the store takes; wider ids must fit in 16 bits."""
    if routes.dtype in FIELDS[ROUTED_EXPERTS_FIELD].accepts:
        return routes
    narrow = routes.to(torch.int16)
    if not bool((narrow.to(routes.dtype) == routes).all()):
        raise SchemaError(
            f"column '{ROUTED_EXPERTS_FIELD}' of {routes.dtype} has ids that int16 cannot hold; expected at most 32767"
        )
    return narrow

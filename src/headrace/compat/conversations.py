"""Conversations message by message: keys, shapes, loss masks, and their text as a chat template writes it."""

from collections.abc import Mapping, MutableMapping, Sequence
from itertools import takewhile
from typing import Any

import torch

from headrace.compat.data_specs import TaskDataSpec
from headrace.distributed.multimodal import PackedTensor
from headrace.errors import ConfigError, SchemaError

Message = Mapping[str, Any]

TOKEN_IDS = "token_ids"
TOKEN_LOSS_MASK = "token_loss_mask"


def message_log_to_flat_messages(message_log: Sequence[Message]) -> dict[str, Any]:
    """Join a conversation's messages key by key: tensors along their first dimension, media to one row, the rest lists.

    A message without a key adds nothing to it.

    Raises:
        SchemaError: tensors of one key that do not join.
    """
    flat: dict[str, Any] = {}
    for key in dict.fromkeys(key for message in message_log for key in message):
        values = [message[key] for message in message_log if key in message]
        if all(isinstance(value, PackedTensor) for value in values):
            columns = [type(values[0]).flattened_concat([value]) for value in values]
            flat[key] = type(values[0]).flattened_concat([type(values[0]).concat(columns)])
        elif all(isinstance(value, torch.Tensor) for value in values):
            forms = {(value.dim(), value.shape[1:], value.device) for value in values}
            if len(forms) != 1:
                shapes = ", ".join(str(tuple(value.shape)) for value in values)
                raise SchemaError(
                    f"tensors for key='{key}' must have same number of dimensions, sizes behind the first, and device; "
                    f"got {shapes}"
                )
            if not values[0].dim():
                raise SchemaError(
                    f"tensors for key='{key}' are single numbers; expected one number per token"
                )
            flat[key] = torch.cat(values)
        else:
            flat[key] = values
    return flat


def get_keys_from_message_log(message_log: Sequence[Message], keys: Sequence[str]) -> list[dict[str, Any]]:
    """Return the messages with these keys alone; those that a message lacks are left out."""
    return [{key: message[key] for key in keys if key in message} for message in message_log]


def add_loss_mask_to_message_log(
    batch_message_log: Sequence[Sequence[MutableMapping[str, Any]]],
    roles_to_train_on: Sequence[str] = ("assistant",),
    only_unmask_final: bool = False,
) -> None:
    """Give every message a `token_loss_mask`, in place: 1 for all tokens of these roles, 0 for the others'.

    With `only_unmask_final`, the last message of each log is 1, whoever speaks, and all others 0.
    """
    for log in batch_message_log:
        for place, message in enumerate(log):
            last = place == len(log) - 1
            trains = last if only_unmask_final else message["role"] in roles_to_train_on
            ids = message[TOKEN_IDS]
            message[TOKEN_LOSS_MASK] = torch.ones_like(ids) if trains else torch.zeros_like(ids)


def message_log_shape(message_log: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the shapes of each message's tensors; of a list, those of its items."""

    def shape(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.shape
        return [shape(item) for item in value] if isinstance(value, list) else None

    return [
        {key: shape(value) for key, value in message.items() if shape(value) is not None}
        for message in message_log
    ]


def get_first_index_that_differs(str1: str, str2: str) -> int:
    """Return how many characters two texts begin with alike.

    >>> get_first_index_that_differs("hello world", "hello")
    5
    """
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(str1, str2)))


def get_formatted_message_log(
    message_log: Sequence[Message],
    tokenizer: Any,
    task_data_spec: TaskDataSpec,
    add_bos_token: bool = True,
    add_eos_token: bool = True,
    add_generation_prompt: bool = False,
    tools: Sequence[Any] | None = None,
    debug: bool = False,
) -> list[dict[str, Any]]:
    """Return the messages with the text that the chat template writes for each, and its `token_ids` (L,).

    A message's text is what the template adds when the message does, so that all texts in a row are the whole
    conversation. With `add_generation_prompt` the opening of an answer belongs to the message before it.

    Args:
        task_data_spec: Its `system_prompt` becomes the first message; its `prompt` is filled with the first user
            message's content, in the place of `{}`.
        add_bos_token: Whether the first text begins with the tokenizer's begin token, if it has one.
        add_eos_token: Whether the last text, if an assistant's, ends with the tokenizer's end token.
        debug: Taken, and without effect; log what you get.

    Raises:
        ConfigError: a prompt with braces that are no place for the content.
    """
    messages = _with_prompts(message_log, task_data_spec)
    formatted: list[dict[str, Any]] = []
    before = ""
    for place, message in enumerate(messages):
        opens = add_generation_prompt and message["role"] != "assistant"
        told = [{key: m[key] for key in m if key != TOKEN_IDS} for m in messages[: place + 1]]
        text: str = tokenizer.apply_chat_template(
            told, tokenize=False, add_generation_prompt=opens, add_special_tokens=False, tools=tools
        )
        own = text[get_first_index_that_differs(before, text) :]
        before = text
        if place == 0:
            own = _begun(own, tokenizer.bos_token, wanted=add_bos_token)
        if place == len(messages) - 1 and message["role"] == "assistant":
            own = _ended(own, tokenizer.eos_token, wanted=add_eos_token)
        ids = tokenizer(own, add_special_tokens=False, return_tensors="pt")["input_ids"][0]
        formatted.append({**message, "content": own, TOKEN_IDS: ids.to(torch.int64)})
    return formatted


def _with_prompts(message_log: Sequence[Message], spec: TaskDataSpec) -> list[dict[str, Any]]:
    messages = [dict(message) for message in message_log]
    if spec.prompt is not None:
        first = next((message for message in messages if message["role"] == "user"), None)
        if first is not None:
            first["content"] = _filled(spec, first["content"])
    if spec.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": spec.system_prompt})
    return messages


def _filled(spec: TaskDataSpec, question: Any) -> str:
    try:
        return str(spec.prompt).format(question)
    except (LookupError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"prompt_file={spec.prompt_file}: the question finds no place in its text ({error!r}); it goes where {{}} "
            "stands, and {{ and }} stand for braces"
        ) from error


def _begun(text: str, token: str | None, *, wanted: bool) -> str:
    if not token:
        return text
    bare = text.removeprefix(token)
    return token + bare if wanted else bare


def _ended(text: str, token: str | None, *, wanted: bool) -> str:
    if not token or not wanted or text.rstrip().endswith(token):
        return text
    return text + token


def remap_dataset_keys(dataset: Any, mapping_dict: Mapping[str, str]) -> Any:
    """Return a data set (of `datasets`) whose rows have the columns `mapping_dict`, old name to new, alone."""

    def renamed(row: Mapping[str, Any]) -> dict[str, Any]:
        return {new: row[old] for old, new in mapping_dict.items()}

    gone = [name for name in dataset.column_names if name not in mapping_dict.values()]
    return dataset.map(renamed, remove_columns=gone)

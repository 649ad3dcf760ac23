"""Conversations, data specs and tokenizers as a caller of NeMo-RL uses them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from nemo_rl.algorithms.utils import get_tokenizer
from nemo_rl.data.interfaces import DatumSpec, TaskDataSpec
from nemo_rl.data.llm_message_utils import (
    MESSAGE_LOG_BULK_FIELDS,
    add_loss_mask_to_message_log,
    attach_message_log_view,
    batched_message_log_to_flat_message,
    decompose_message_log,
    get_first_index_that_differs,
    get_formatted_message_log,
    get_keys_from_message_log,
    message_log_shape,
    message_log_to_flat_messages,
    reconstruct_message_log,
    remap_dataset_keys,
)
from nemo_rl.data.multimodal_utils import PackedTensor
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_names import calls

from headrace.errors import ConfigError, SchemaError
from tiny_models import tiny_tokenizer

MODULE = "data.llm_message_utils"


def message(role: str, *ids: int, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": f"<{role}>", "token_ids": torch.tensor(ids, dtype=torch.int64), **more}


LOGS = [
    [message("user", 1, 2, 3), message("assistant", 4, 5)],
    [message("user", 6, 7), message("assistant", 8, 9, 10, 11), message("tool", 12)],
]


@calls(MODULE, "message_log_to_flat_messages", "get_keys_from_message_log", "message_log_shape")
@calls(MODULE, "get_first_index_that_differs")
def test_a_conversation_is_read_key_by_key() -> None:
    log = [
        {"input_ids": torch.tensor([1, 2]), "text": "a"},
        {"input_ids": torch.tensor([3]), "mask": torch.ones(1)},
    ]
    flat = message_log_to_flat_messages(log)
    assert flat["input_ids"].tolist() == [1, 2, 3]
    assert flat["text"] == ["a"]
    assert flat["mask"].tolist() == [1.0]
    assert message_log_to_flat_messages([]) == {}
    with pytest.raises(SchemaError, match="tensors for key='x' must have same number of dimensions"):
        message_log_to_flat_messages([{"x": torch.ones(2, 2)}, {"x": torch.ones(2)}])
    with pytest.raises(SchemaError, match="tensors for key='x' are single numbers"):
        message_log_to_flat_messages([{"x": torch.tensor(1)}, {"x": torch.tensor(2)}])
    assert get_keys_from_message_log(LOGS[0], ["role", "nowhere"]) == [
        {"role": "user"},
        {"role": "assistant"},
    ]
    assert message_log_shape([{"x": torch.ones(2, 3), "y": [torch.ones(1)], "z": "text"}]) == [
        {"x": torch.Size([2, 3]), "y": [torch.Size([1])]}
    ]
    assert [get_first_index_that_differs(*p) for p in (("hello", "hello!"), ("hi1", "hello"), ("", "a"))] == [
        5,
        1,
        0,
    ]


def test_media_of_several_messages_are_one_row() -> None:
    log = [{"pixels": PackedTensor(torch.ones(2, 3), 0)}, {}, {"pixels": PackedTensor(torch.zeros(1, 3), 0)}]
    pixels = message_log_to_flat_messages(log)["pixels"]
    assert len(pixels) == 1
    mixed = [log[0], {"pixels": None}]
    assert message_log_to_flat_messages(mixed)["pixels"] == [log[0]["pixels"], None]
    assert pixels.as_tensor().tolist() == [[1.0] * 3, [1.0] * 3, [0.0] * 3]


@calls(MODULE, "add_loss_mask_to_message_log")
def test_loss_masks_follow_the_roles() -> None:
    def masks(**options: Any) -> list[list[int]]:
        log = [message("system", 1), message("user", 2), message("assistant", 3, 4)]
        add_loss_mask_to_message_log([log], **options)
        return [m["token_loss_mask"].tolist() for m in log]

    assert masks() == [[0], [0], [1, 1]]
    assert masks(roles_to_train_on=["assistant", "system"]) == [[1], [0], [1, 1]]
    assert masks(roles_to_train_on=["system"], only_unmask_final=True) == [[0], [0], [1, 1]]


@calls(MODULE, "batched_message_log_to_flat_message")
def test_conversations_become_padded_rows_by_token_ids_or_input_ids() -> None:
    flat, lengths = batched_message_log_to_flat_message(
        LOGS, pad_value_dict={"token_ids": 9}, make_sequence_length_divisible_by=4
    )
    assert flat["token_ids"].tolist() == [[1, 2, 3, 4, 5, 9, 9, 9], [6, 7, 8, 9, 10, 11, 12, 9]]
    assert lengths.tolist() == [5, 7]
    by_other_name = [[{"input_ids": torch.tensor([1, 2])}], [{"input_ids": torch.tensor([3])}]]
    flat, lengths = batched_message_log_to_flat_message(by_other_name)
    assert (flat["input_ids"].tolist(), lengths.tolist()) == ([[1, 2], [3, 0]], [2, 1])


@calls(MODULE, "decompose_message_log", "reconstruct_message_log", "attach_message_log_view")
def test_a_conversation_taken_apart_is_put_together_again() -> None:
    columns = decompose_message_log(LOGS)
    assert set(columns) == set(MESSAGE_LOG_BULK_FIELDS)
    assert columns["turn_lengths"].tolist() == [[3, 2, 0], [2, 4, 1]]
    assert columns["response_token_lengths"].tolist() == [2, 4]
    ids = torch.tensor([[1, 2, 3, 4, 5, 0, 0], [6, 7, 8, 9, 10, 11, 12]])
    logprobs = -ids.float()
    rebuilt = reconstruct_message_log(
        ids,
        columns["turn_lengths"],
        columns["turn_roles"],
        columns["turn_contents"],
        generation_logprobs=logprobs,
    )
    for log, original in zip(rebuilt, LOGS):
        assert [(m["role"], m["content"], m["token_ids"].tolist()) for m in log] == [
            (m["role"], m["content"], m["token_ids"].tolist()) for m in original
        ]
    assert rebuilt[1][1]["generation_logprobs"].tolist() == [-8.0, -9.0, -10.0, -11.0]
    assert "generation_logprobs" not in rebuilt[0][0]
    assert rebuilt[0][1]["token_ids"].data_ptr() == ids[0, 3:].data_ptr()
    batch = BatchedDataDict({"input_ids": ids, **columns})
    attach_message_log_view(batch)
    assert batch["message_log"][1][2]["token_ids"].tolist() == [12]
    bare = BatchedDataDict({"input_ids": ids})
    attach_message_log_view(bare)
    assert list(bare) == ["input_ids"]


# Text.


@calls(MODULE, "get_formatted_message_log")
@pytest.mark.parametrize("opens", [False, True])
def test_the_texts_of_the_messages_are_the_template_of_the_whole(opens: bool) -> None:
    tokenizer = tiny_tokenizer()
    log = [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "ef"},
    ]
    formatted = get_formatted_message_log(
        log, tokenizer, TaskDataSpec(), True, True, add_generation_prompt=opens, tools=None, debug=False
    )
    assert [m["content"] for m in formatted] == [
        "<|begin|>ab<|answer|>",
        "c<|end|>",
        "d<|answer|>",
        "ef<|end|>",
    ]
    whole = tokenizer.apply_chat_template(log, tokenize=True, return_dict=False)
    assert torch.cat([m["token_ids"] for m in formatted]).tolist() == whole
    assert [m["role"] for m in formatted] == [m["role"] for m in log]


def test_begin_and_end_tokens_can_be_left_out_or_added_where_the_template_has_none() -> None:
    tokenizer = tiny_tokenizer()
    log = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    bare = get_formatted_message_log(log, tokenizer, TaskDataSpec(), add_bos_token=False)
    assert bare[0]["content"] == "a<|answer|>"
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    plain = get_formatted_message_log(log, tokenizer, TaskDataSpec())
    assert [m["content"] for m in plain] == ["<|begin|>a", "b<|end|>"]
    kept = get_formatted_message_log(log, tokenizer, TaskDataSpec(), False, False)
    assert [m["content"] for m in kept] == ["a", "b"]


@calls("data.interfaces", "TaskDataSpec", "TaskDataSpec.copy_defaults")
def test_a_task_brings_its_prompts(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("say {}")
    (tmp_path / "system.txt").write_text("s")
    spec = TaskDataSpec(task_name="math", prompt_file=str(tmp_path / "prompt.txt"), num_frames=4)
    spec.copy_defaults(
        TaskDataSpec(task_name="other", system_prompt_file=str(tmp_path / "system.txt"), num_frames=8)
    )
    assert (spec.task_name, spec.prompt, spec.system_prompt, spec.num_frames) == ("math", "say {}", "s", 4)
    formatted = get_formatted_message_log([{"role": "user", "content": "a"}], tiny_tokenizer(), spec)
    assert [m["content"] for m in formatted] == ["<|begin|>s<|answer|>", "say a<|answer|>"]
    with pytest.raises(ConfigError, match="prompt_file=/nowhere cannot be read"):
        TaskDataSpec(prompt_file="/nowhere")
    datum: DatumSpec = {
        "message_log": [],
        "length": 0,
        "extra_env_info": None,
        "loss_multiplier": 1.0,
        "idx": 0,
    }
    assert datum["idx"] == 0


@pytest.mark.parametrize("text", ["in \\boxed{answer}: {}", "in \\boxed{}: {}", "{", "{0.x}"])
def test_a_prompt_whose_braces_are_no_places_of_the_question_is_a_mistake_in_its_file(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / "prompt.txt").write_text(text)
    spec = TaskDataSpec(prompt_file=tmp_path / "prompt.txt")
    with pytest.raises(ConfigError, match=r"prompt_file=.*/prompt.txt: .*\{\{ and \}\} stand for braces"):
        get_formatted_message_log([{"role": "user", "content": "a"}], tiny_tokenizer(), spec)


@calls(MODULE, "remap_dataset_keys")
def test_the_columns_of_a_data_set_are_renamed_and_others_dropped() -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"question": ["a", "b"], "answer": ["1", "2"], "note": ["x", "y"]})
    renamed = remap_dataset_keys(data, {"question": "input", "answer": "answer"})
    assert sorted(renamed.column_names) == ["answer", "input"]
    assert renamed[1] == {"input": "b", "answer": "2"}


# Tokenizers.


def test_get_tokenizer_loads_what_a_recipe_names(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    chat = [{"role": "user", "content": "ab"}]
    loaded = get_tokenizer({"name": str(tmp_path)})
    assert loaded.pad_token == loaded.eos_token == "<|end|>"
    assert loaded.apply_chat_template(chat, tokenize=False) == "<|begin|>ab<|answer|>"
    plain = get_tokenizer({"name": str(tmp_path), "chat_template": None})
    assert plain.apply_chat_template(chat, tokenize=False) == "ab"
    (tmp_path / "mine.jinja").write_text("{{ greeting }}{{ messages[0]['content'] }}")
    own = get_tokenizer(
        {
            "name": str(tmp_path),
            "chat_template": str(tmp_path / "mine.jinja"),
            "chat_template_kwargs": {"greeting": "hi "},
        }
    )
    assert own.apply_chat_template(chat, tokenize=False) == "hi ab"
    with pytest.raises(ConfigError, match=r"tokenizer\.name=/nowhere: .*"):
        get_tokenizer({"name": "/nowhere"})
    with pytest.raises(ConfigError, match="expected 'name'"):
        get_tokenizer({"path": "x"})

"""Rollouts of NeMo-RL: groups of completions, their rows, and routes as text."""

from typing import Any

import pytest
import torch
from nemo_rl.data.multimodal_utils import PackedTensor
from nemo_rl.data_plane.adapters.noop import NoOpDataPlaneClient
from nemo_rl.experience.interfaces import (
    NEMO_GYM_TASK_INDEX_KEY,
    NEXT_NEMO_GYM_TASK_INDEX_KEY,
    Completion,
    PromptGroupRecord,
)
from nemo_rl.experience.payload import pack_payload, record_to_train_batch
from nemo_rl.utils import routed_experts_codec
from nemo_rl.utils.routed_experts_codec import decode_routed_experts, encode_routed_experts
from nemo_rl_names import calls

from headrace.errors import SchemaError

PROMPT = [10, 11]


def message(role: str, *ids: int, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": "", "token_ids": torch.tensor(ids), **more}


def completion(reward: float, *, observed: tuple[int, ...] = (30,), **first: Any) -> Completion:
    log = [
        message("user", *PROMPT, **first),
        message("assistant", 20, 21, generation_logprobs=torch.tensor([-0.1, -0.2])),
        message("user", *observed),
    ]
    return Completion(message_log=log, env_extras=None, truncated=False, reward=reward)


def record(*completions: Completion) -> PromptGroupRecord:
    return PromptGroupRecord(
        prompt_idx=3,
        prompt=[message("user", *PROMPT)],
        extra_env_info=None,
        metadata={"task_name": "test"},
        completions=list(completions),
        rollout_metrics={},
    )


@calls("experience.interfaces", "Completion", "PromptGroupRecord")
@calls("experience.payload", "record_to_train_batch", "pack_payload")
def test_a_group_becomes_rows_and_the_rows_go_into_the_store() -> None:
    group = record(completion(1.0), completion(2.0, observed=(30, 31)))
    batch = record_to_train_batch(group, pad_value_dict={"token_ids": 9})
    assert batch["input_ids"].tolist() == [[10, 11, 20, 21, 30, 9], [10, 11, 20, 21, 30, 31]]
    assert batch["input_lengths"].tolist() == [5, 6]
    assert batch["token_mask"].tolist() == [[0, 0, 1, 1, 0, 0]] * 2
    assert batch["sample_mask"].tolist() == [1.0, 1.0]
    torch.testing.assert_close(batch["generation_logprobs"], torch.tensor([[0, 0, -0.1, -0.2, 0, 0]] * 2))
    assert batch["prompt_ids_for_adv"].tolist() == [PROMPT, PROMPT]
    assert batch["total_reward"].tolist() == [1.0, 2.0]
    assert "routed_experts" not in batch
    assert set(group.completions[0].message_log[0]) == {"role", "content", "token_ids"}
    ids, fields, tags = pack_payload(batch, weight_version=7, group_id="g")
    assert ids == ["g_g0", "g_g1"]
    assert tags == [{"weight_version": 7}] * 2
    client = NoOpDataPlaneClient()
    meta = client.put_samples(ids, "p", fields, tags)
    assert (meta.sequence_lengths, meta.tags) == ([5, 6], tags)
    rows = client.get_samples(["g_g0"], "p", ["input_ids", "total_reward"])
    assert [row.tolist() for row in rows["input_ids"].unbind()] == [[10, 11, 20, 21, 30]]
    client.close()
    assert (NEMO_GYM_TASK_INDEX_KEY, NEXT_NEMO_GYM_TASK_INDEX_KEY) == ("_ng_task_index", "next_ng_task_index")


def test_routes_and_media_of_messages_come_along_and_messages_without_routes_are_marked_missing() -> None:
    routes = torch.tensor([[[0, 1]], [[2, 3]]], dtype=torch.int32)
    media = PackedTensor(torch.ones(2, 4), 0)
    group = record(completion(1.0, routed_experts=routes, pixel_values=media), completion(0.0))
    batch = record_to_train_batch(group, pad_value_dict={})
    assert batch["routed_experts"][0, :3].tolist() == [[[0, 1]], [[2, 3]], [[-1, -1]]]
    assert bool((batch["routed_experts"][1] == -1).all())
    assert batch["pixel_values"].logical_segment_counts_by_row() == [1, 0]
    _, fields, _ = pack_payload(batch, weight_version=0, group_id="g")
    assert fields["routed_experts"].dtype == torch.int16
    client = NoOpDataPlaneClient()
    client.put_samples(["a", "b"], "p", fields)
    client.close()


def test_a_payload_without_input_lengths_has_rows_of_full_width() -> None:
    ids = torch.tensor([[1, 2, 0]])
    _, fields, _ = pack_payload({"input_ids": ids, "note": "x"}, weight_version=0, group_id="g")
    assert [row.tolist() for row in fields["input_ids"].unbind()] == [[1, 2, 0]]
    assert list(fields.keys()) == ["input_ids"]
    with pytest.raises(SchemaError, match="input_lengths"):
        pack_payload({"score": torch.ones(1)}, weight_version=0, group_id="g")


def test_a_record_without_completions_is_refused() -> None:
    with pytest.raises(SchemaError, match="prompt 3 has no completions"):
        record_to_train_batch(record(), pad_value_dict={})


# Routes as text.


@calls("utils.routed_experts_codec", "encode_routed_experts", "decode_routed_experts")
@pytest.mark.parametrize("name", ["int8", "int16", "int32", "uint8", "uint16"])
def test_routes_come_back_from_text_bytes_and_nested_lists(name: str) -> None:
    dtype = getattr(torch, name)
    routes = torch.randint(0, 100, (7, 3, 2), generator=torch.Generator().manual_seed(0)).to(dtype)
    payload = encode_routed_experts(routes)
    assert payload.startswith(f"{routed_experts_codec._MAGIC}:{name}:7x3x2:")
    for given in (payload, payload.encode(), routes.tolist()):
        assert torch.equal(decode_routed_experts(given, torch.int32), routes.to(torch.int32))
    assert routed_experts_codec._WIRE_TORCH_DTYPES[name] is dtype
    assert routed_experts_codec._TORCH_DTYPE_NAMES[dtype] == name


def test_elements_of_routes_are_little_endian_and_missing_rows_survive() -> None:
    routes = torch.tensor([[[1, -1]], [[256, 2]]], dtype=torch.int16)
    assert encode_routed_experts(routes) == "nrlre1:int16:2x1x2:AQD//wABAgA="
    assert decode_routed_experts("nrlre1:int16:2x1x2:AQD//wABAgA=", torch.int16).tolist() == routes.tolist()


@pytest.mark.parametrize(
    ("payload", "fault"),
    [
        ("not-an-envelope", "no envelope"),
        ("nrlre1:int64:1x1x1:AAAAAAAAAAA=", "dtype"),
        ("nrlre1:int16:5x1x2:AQD//wABAgA=", "expected 2 for each element"),
        ("nrlre1:int16:2x1:AQD//wABAgA=", "expected 2 for each element"),
        ("nrlre1:int16:axbxc:AQD//wABAgA=", "damaged"),
        ("nrlre1:int16:2x1x2:*", "damaged"),
        ([[1, 2]], r"expected integers \(tokens, layers, k\)"),
        ([[[300, 1]]], "cannot hold"),
        ("nrlre1:int8:4294967296x4294967296x1:", "expected 1 for each element"),
        ([[[1, 2]], [[3]]], r"nested lists of integers \(tokens, layers, k\)"),
        ([[[1, None]]], "nested lists of integers"),
        ([[["1"]]], "nested lists of integers"),
        ([[[2**70]]], "nested lists of integers"),
        (None, "nested lists of integers"),
    ],
)
def test_damaged_routes_are_refused(payload: Any, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        decode_routed_experts(payload, torch.int8)


def test_only_routes_of_three_dimensions_and_a_known_dtype_are_encoded() -> None:
    with pytest.raises(ValueError, match="shape"):
        encode_routed_experts(torch.zeros(3, 2, dtype=torch.int16))
    with pytest.raises(ValueError, match="dtype"):
        encode_routed_experts(torch.zeros(2, 3, 2, dtype=torch.int64))

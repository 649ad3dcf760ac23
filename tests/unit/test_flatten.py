"""Flattening: columns equal naive rows bit for bit, nothing is padded, and faults name the sample."""

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.data_plane.schema import FIELDS, ROLLOUT_FIELDS
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.errors import SchemaError
from headrace.experience.flatten import PER_SAMPLE_KEYS, flatten, per_sample_values
from headrace.experience.types import Message, Prompt, Rollout
from reference_experience import naive_padded
from tiny_models import tiny_policy


def sample(number: int, prompt_tokens: int, response_tokens: int, **changes: Any) -> Rollout:
    """Return a sample with random content of the given lengths, the same one for the same number."""
    draws = random.Random(number)
    length = prompt_tokens + response_tokens
    made = Rollout(
        sample_id=f"p{number // 2}@1_g{number % 2}",
        prompt=Prompt(f"p{number // 2}", (Message("user", "hi"),)),
        group_index=number % 2,
        token_ids=[draws.randrange(1, 2**40) for _ in range(length)],
        token_mask=[0] * prompt_tokens + [1] * response_tokens,
        logprobs=[0.0] * prompt_tokens + [math.log(draws.random() or 0.5) for _ in range(response_tokens)],
        messages=[Message("user", "hi"), Message("assistant", f"answer {number}")],
        reward=draws.random(),
        truncated=draws.random() < 0.5,
        turns=1,
        weight_version=4,
        correct=draws.choice([True, False, None]),
    )
    return replace(made, **changes)


def samples(*lengths: tuple[int, int]) -> list[Rollout]:
    return [sample(i, p, r) for i, (p, r) in enumerate(lengths)]


LENGTHS = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(LENGTHS)
def test_every_row_of_every_column_is_the_samples_own(lengths: list[tuple[int, int]]) -> None:
    rollouts = samples(*lengths)
    columns = flatten(rollouts)
    for i, rollout in enumerate(rollouts):
        assert columns["input_ids"][i].tolist() == rollout.token_ids
        assert columns["token_mask"][i].tolist() == rollout.token_mask
        assert columns["generation_logprobs"][i].tolist() == np.float32(rollout.logprobs).tolist()
        assert columns["input_lengths"][i] == len(rollout.token_ids)
        assert columns["message_log"][i] == [{"role": m.role, "content": m.content} for m in rollout.messages]
    assert columns["sample_mask"].tolist() == [1.0] * len(rollouts)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 5))
def test_padding_afterwards_equals_padding_row_by_row(lengths: list[tuple[int, int]], multiple: int) -> None:
    rollouts = samples(*lengths)
    width = -(-max(p + r for p, r in lengths) // multiple) * multiple
    policy = tiny_policy(pad_token="z", make_sequence_length_divisible_by=multiple)
    batch = policy.padded(BatchedDataDict(flatten(rollouts)))
    pad = policy.tokenizer.pad_token_id
    assert pad != 0
    assert batch["input_ids"].tolist() == naive_padded([r.token_ids for r in rollouts], width, pad)
    assert batch["token_mask"].tolist() == naive_padded([r.token_mask for r in rollouts], width, 0)
    logprobs = [np.float32(r.logprobs).tolist() for r in rollouts]
    assert batch["generation_logprobs"].tolist() == naive_padded(logprobs, width, 0.0)


def test_the_columns_are_those_of_the_first_put_with_their_declared_dtypes() -> None:
    columns = flatten(samples((2, 3), (1, 0)))
    assert {*ROLLOUT_FIELDS, "message_log"} == set(columns)
    for name in ROLLOUT_FIELDS:
        assert columns[name].dtype == FIELDS[name].dtype
    assert columns["message_log"].dtype == object


def test_columns_hold_as_many_values_as_there_are_tokens() -> None:
    columns = flatten(samples((2, 3), (1, 0), (4, 5)))
    assert columns["input_lengths"].tolist() == [5, 1, 9]
    for name in ("input_ids", "token_mask", "generation_logprobs"):
        assert columns[name].values().numel() == 15, name
        assert columns[name].offsets().tolist() == [0, 5, 6, 15]


def test_rows_of_equal_length_stay_rows() -> None:
    columns = flatten(samples((2, 3), (3, 2), (4, 1)))
    assert columns["input_ids"].is_nested
    assert [len(row) for row in columns["input_ids"].unbind()] == [5, 5, 5]


def test_a_batch_of_empty_responses_is_legal() -> None:
    columns = flatten(samples((3, 0), (2, 0)))
    assert columns["token_mask"].values().tolist() == [0] * 5
    assert per_sample_values(samples((3, 0)))["response_tokens"].tolist() == [0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 3, 5])
def test_a_logprob_that_is_not_finite_names_sample_and_position(bad: float, position: int) -> None:
    rollouts = samples((2, 3), (1, 0), (2, 4), (1, 1))
    rollouts[2].logprobs[position] = bad
    message = rf"'generation_logprobs' of sample 'p1@1_g0' is {bad} at position {position} \(1 "
    with pytest.raises(SchemaError, match=message):
        flatten(rollouts)


@pytest.mark.parametrize("name", ["token_ids", "token_mask", "logprobs"])
def test_lists_of_different_lengths_name_the_sample_and_the_sizes(name: str) -> None:
    rollouts = samples((2, 3), (1, 2))
    getattr(rollouts[1], name).pop()
    with pytest.raises(SchemaError, match=rf"sample 'p0@1_g1' has lists of different lengths \(.*{name} 2"):
        flatten(rollouts)


def test_a_repeated_sample_id_is_refused() -> None:
    rollouts = samples((2, 3), (1, 2))
    rollouts[1].sample_id = rollouts[0].sample_id
    with pytest.raises(SchemaError, match="sample id 'p0@1_g0' appears twice"):
        flatten(rollouts)


def test_no_rollouts_are_refused() -> None:
    with pytest.raises(SchemaError, match="no rollouts"):
        flatten([])


def test_per_sample_values_are_those_of_the_samples() -> None:
    rollouts = samples((2, 3), (2, 1), (5, 0), (5, 2))
    # Two turns: prompt, answer, observation, answer.
    rollouts[3].token_mask = [0, 0, 1, 0, 0, 1, 1]
    rollouts[3].turns = 2
    values = per_sample_values(rollouts)
    assert tuple(values) == PER_SAMPLE_KEYS
    assert values["sample_id"] == [r.sample_id for r in rollouts]
    assert values["uid"] == ["p0@1", "p0@1", "p1@1", "p1@1"]
    assert values["prompt_uid"] == ["p0", "p0", "p1", "p1"]
    assert values["correct"] == [r.correct for r in rollouts]
    assert values["reward"].tolist() == np.float32([r.reward for r in rollouts]).tolist()
    assert values["truncated"].tolist() == [r.truncated for r in rollouts]
    assert values["group"].tolist() == [0, 0, 1, 1]
    assert values["group_index"].tolist() == [0, 1, 0, 1]
    assert values["prompt_tokens"].tolist() == [2, 2, 5, 2]
    assert values["response_tokens"].tolist() == [3, 1, 0, 3]
    assert values["longest_turn_tokens"].tolist() == [3, 1, 0, 2]
    assert values["total_tokens"].tolist() == [5, 3, 5, 7]
    assert values["turns"].tolist() == [1, 1, 1, 2]
    assert values["weight_version"].tolist() == [4, 4, 4, 4]
    assert all(len(v) == 4 for v in values.values())

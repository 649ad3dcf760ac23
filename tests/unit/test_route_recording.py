"""Routes recorded by the Hugging Face generator, joined over turns, and as a column."""

from typing import Any

import pytest
import torch

from headrace.config import GenerationConfig
from headrace.data_plane.routes_codec import RouteShape, missing_rows
from headrace.errors import ConfigError, GenerationError, SchemaError
from headrace.experience.flatten import flatten, per_sample_values
from headrace.experience.rollout_routes import append_routes, check_recorded, route_facts, routes_column
from headrace.experience.types import Prompt, Rollout
from headrace.models.generation.build import build_generator
from headrace.models.generation.hf import HFGenerator
from headrace.models.generation.interfaces import GenerationOutput, SamplingParams
from headrace.models.router_replay import Routes, install
from tiny_models import tiny_generation_config, tiny_model, tiny_tokenizer

SHAPE = RouteShape(num_layers=2, top_k=3, num_experts=8)
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [5, 6, 7], [13]]


def generator(**changes: Any) -> HFGenerator:
    return HFGenerator(
        tiny_model("qwen3_moe"), tiny_tokenizer(), tiny_generation_config(**changes), record_routes=True
    )


def full_forward_routes(tokens: list[int]) -> torch.Tensor:
    """The routes of one sequence, all at once and without a cache: the naive truth."""
    model = tiny_model("qwen3_moe")
    install(model)
    routes = Routes.record()
    with torch.no_grad():
        model(input_ids=torch.tensor([tokens]), routes=routes)
    return routes.ids


def rollout(name: str, tokens: list[int], routes: torch.Tensor | None) -> Rollout:
    mask = [0] + [1] * (len(tokens) - 1)
    return Rollout(
        f"{name}_g0",
        Prompt(name, ()),
        0,
        tokens,
        mask,
        [0.0] * len(tokens),
        [],
        1.0,
        True,
        1,
        0,
        routes=routes,
    )


def random_rows(tokens: int, seed: int = 0) -> torch.Tensor:
    drawn = torch.rand(tokens, 2, 8, generator=torch.Generator().manual_seed(seed))
    return drawn.topk(3).indices.to(torch.uint8)


@pytest.mark.parametrize("batch_size", [2, 8])
def test_recorded_routes_are_those_of_a_full_forward_of_prompt_and_answer(batch_size: int) -> None:
    # Left padding, a shared prefill of equal prompts, and rows that end early.
    made = generator(batch_size=batch_size)
    params = SamplingParams(max_new_tokens=8, stop_token_ids=tuple(range(5, 25)))
    output = made.generate(PROMPTS, params, seed=3)
    assert len({len(t) for t in output.token_ids}) > 1
    assert output.routes is not None
    for prompt, answer, routes in zip(PROMPTS, output.token_ids, output.routes):
        assert routes.dtype == torch.uint8
        assert torch.equal(routes, full_forward_routes([*prompt, *answer])[:-1])


def test_recording_changes_neither_tokens_nor_logprobs() -> None:
    plain = HFGenerator(tiny_model("qwen3_moe"), tiny_tokenizer(), tiny_generation_config())
    params = SamplingParams(max_new_tokens=6)
    without, with_routes = (g.generate(PROMPTS, params, seed=1) for g in (plain, generator()))
    assert without.routes is None
    assert (without.token_ids, without.logprobs) == (with_routes.token_ids, with_routes.logprobs)


def test_a_call_that_wants_no_routes_gets_none_and_the_same_tokens() -> None:
    recording = generator()
    wanted = recording.generate(PROMPTS, SamplingParams(max_new_tokens=5), seed=3)
    plain = recording.generate(PROMPTS, SamplingParams(max_new_tokens=5, record_routes=False), seed=3)
    assert wanted.routes is not None
    assert plain.routes is None
    assert (plain.token_ids, plain.logprobs) == (wanted.token_ids, wanted.logprobs)


def test_one_new_token_records_the_prompt_alone() -> None:
    output = generator().generate(PROMPTS, SamplingParams(max_new_tokens=1), seed=0)
    assert output.routes is not None
    assert [len(r) for r in output.routes] == [3, 5, 3, 1]


def test_the_last_token_of_a_turn_gets_its_route_from_the_next_prefill() -> None:
    made, params = generator(), SamplingParams(max_new_tokens=4, greedy=True)
    first = made.generate([[5, 6]], params, seed=0)
    sample = rollout("a", [5, 6, *first.token_ids[0]], None)
    assert first.routes is not None
    append_routes(sample, first.routes[0])
    assert sample.routes is not None
    assert len(sample.routes) == len(sample.token_ids) - 1
    sample.token_ids += [20, 21]
    second = made.generate([sample.token_ids], params, seed=0)
    sample.token_ids += second.token_ids[0]
    assert second.routes is not None
    append_routes(sample, second.routes[0])
    assert torch.equal(sample.routes, full_forward_routes(sample.token_ids)[:-1])


def test_a_later_turn_keeps_the_routes_that_earlier_answers_were_sampled_with() -> None:
    sample = rollout("a", [1, 2, 3], None)
    append_routes(sample, random_rows(2, seed=1))
    sample.token_ids += [4, 5]
    append_routes(sample, random_rows(4, seed=2))
    assert sample.routes is not None
    assert torch.equal(sample.routes, torch.cat([random_rows(2, seed=1), random_rows(4, seed=2)[2:]]))


def test_an_answer_that_is_cut_keeps_as_many_routes_as_tokens() -> None:
    sample = rollout("a", [1, 2, 3], None)
    append_routes(sample, random_rows(6))
    assert sample.routes is not None
    assert len(sample.routes) == 3


def test_a_dense_model_cannot_record_and_the_generator_is_not_built() -> None:
    with pytest.raises(ConfigError, match=r"policy\.router_replay\.enabled.*no router"):
        build_generator(GenerationConfig(), tiny_model("llama"), tiny_tokenizer(), record_routes=True)


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (None, "returned no routes"),
        ([], "routes of 0 samples"),
        ([random_rows(4)], r"sample 'a_g0'.*\(4, 2, 3\).*expected \(5, 2, 3\)"),
        ([random_rows(5).int()], "torch.int32"),
        ([random_rows(5)[:, :1]], r"\(5, 1, 3\)"),
    ],
)
def test_a_generator_that_says_it_records_and_does_not_is_refused(routes: Any, message: str) -> None:
    output = GenerationOutput([[7, 8, 9]], [[0.0] * 3], [False], routes=routes)
    with pytest.raises(GenerationError, match=message):
        check_recorded(output, [rollout("a", [1, 2, 3], None)], SHAPE)


def test_the_column_holds_every_route_and_marks_tokens_without_one() -> None:
    rollouts = [rollout("a", [1, 2, 3], random_rows(2)), rollout("b", [4, 5], random_rows(2, seed=5))]
    flat = flatten(rollouts, route_shape=SHAPE)
    column = flat["routed_experts"].values()
    assert torch.equal(column[:2], random_rows(2))
    assert torch.equal(column[3:], random_rows(2, seed=5))
    assert missing_rows(column)[:, 0].tolist() == [False, False, True, False, False]
    assert "routed_experts" not in flatten(rollouts)


def faulty(change: Any) -> torch.Tensor:
    rows = random_rows(3).to(torch.uint8)
    change(rows)
    return rows


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (None, "sample 'b_g0' has no routes"),
        (random_rows(3).to(torch.int16), "torch.int16"),
        (random_rows(5), "routes of 5 tokens and 4 tokens"),
        (random_rows(3)[:, :, :2], r"\(3, 2, 2\)"),
        (faulty(lambda r: r[1, 1].fill_(0)), "sample 'b_g0', token 1, layer 1.*twice"),
        (faulty(lambda r: r[2, 0, 0].fill_(9)), "sample 'b_g0', token 2, layer 0.*outside"),
        (faulty(lambda r: r[0, 0, 1].fill_(255)), "sample 'b_g0', token 0, layer 0.*partly missing"),
    ],
)
def test_routes_that_no_router_can_have_chosen_are_refused_with_sample_token_and_layer(
    routes: Any, message: str
) -> None:
    rollouts = [rollout("a", [1, 2, 3], random_rows(2)), rollout("b", [4, 5, 6, 7], routes)]
    with pytest.raises(SchemaError, match=message):
        routes_column(rollouts, SHAPE)


def test_facts_count_rows_without_a_record_and_leave_out_the_last_token() -> None:
    gap = random_rows(4)
    gap[1, 0] = 255
    rollouts = [
        rollout("a", [1, 2, 3], random_rows(2)),
        rollout("b", [1, 2, 3, 4, 5], gap),
        rollout("c", [1, 2, 3, 4, 5], random_rows(1)),
    ]
    missing, digests = route_facts(rollouts)
    assert missing.tolist() == [0.0, 0.125, 0.75]
    assert len(set(digests.tolist())) == 3
    values = per_sample_values(rollouts)
    assert torch.equal(values["routes_digest"], digests)


def test_a_digest_sees_a_shift_by_one_token_and_another_samples_routes() -> None:
    rows, tokens = random_rows(4), [1, 2, 3, 4, 5]
    cases = [
        rollout("a", tokens, rows),
        rollout("b", tokens, rows.roll(1, dims=0)),
        rollout("c", [1, 2, 3, 5, 4], rows),
        rollout("d", tokens, random_rows(4, seed=9)),
    ]
    digests = route_facts(cases)[1].tolist()
    assert len(set(digests)) == 4


def test_a_digest_sees_a_shift_over_equal_tokens() -> None:
    rows, tokens = random_rows(4), [7, 7, 7, 7, 7]
    recorded, shifted = route_facts([rollout("a", tokens, rows), rollout("a", tokens, rows.roll(1, dims=0))])[
        1
    ]
    assert recorded != shifted

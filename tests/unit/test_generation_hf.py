import pytest
import torch
from transformers import GenerationConfig

from headrace.models.generation.interfaces import SamplingParams
from reference_generation import (
    END,
    FAMILIES,
    PROMPTS,
    answer,
    endless_generator_of,
    generator_of,
    greedy_answer,
    model_of,
    quantiles_of,
)

FILTERS = [{}, {"temperature": 0.6}, {"temperature": 1.4, "top_k": 6, "top_p": 0.8}]


def assert_same_answers(one, two):
    assert one.token_ids == two.token_ids
    assert one.truncated == two.truncated
    for a, b in zip(one.logprobs, two.logprobs, strict=True):
        assert a == pytest.approx(b, abs=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_are_those_of_transformers_generate(family):
    model = model_of(family)
    output = generator_of(family).generate(PROMPTS, SamplingParams(20, greedy=True), seed=0)
    plan = GenerationConfig(max_new_tokens=20, do_sample=False, eos_token_id=END, pad_token_id=0)
    for prompt, ids, truncated in zip(PROMPTS, output.token_ids, output.truncated, strict=True):
        expected = model.generate(torch.tensor([prompt]), generation_config=plan)[0, len(prompt) :].tolist()
        assert ids == expected
        assert truncated == (expected[-1] != END)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_logprobs_are_those_of_a_full_forward_pass_without_temperature(family):
    model = model_of(family)
    params = SamplingParams(12, greedy=True, temperature=3.0, top_k=2)
    output = generator_of(family).generate(PROMPTS, params, seed=0)
    for prompt, ids, logprobs in zip(PROMPTS, output.token_ids, output.logprobs, strict=True):
        expected_ids, expected = greedy_answer(model, prompt, 12, {END})
        assert ids == expected_ids
        assert logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("filters", FILTERS)
def test_sampled_answers_are_those_of_a_cacheless_loop_over_single_prompts(family, filters):
    model = model_of(family)
    output = generator_of(family).generate(PROMPTS, SamplingParams(14, **filters), seed=3)
    for i, draws in enumerate(quantiles_of(len(PROMPTS), 14, 3)):
        ids, logprobs, finished = answer(model, PROMPTS[i], draws, {END}, **filters)
        assert (output.token_ids[i], output.truncated[i]) == (ids, not finished)
        assert output.logprobs[i] == pytest.approx(logprobs, abs=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_leave_the_batch_do_not_change_the_others(family):
    prompts, stops = PROMPTS * 4, (END, 5, 8, 11)
    stayed = endless_generator_of(family).generate(prompts, SamplingParams(24), seed=1)
    left = generator_of(family).generate(prompts, SamplingParams(24, stop_token_ids=stops), seed=1)
    assert {len(ids) for ids in stayed.token_ids} == {24}
    cuts = []
    for i, ids in enumerate(stayed.token_ids):
        ends = [t + 1 for t, token in enumerate(ids) if token in stops]
        cut = ends[0] if ends else len(ids)
        cuts.append(cut)
        assert left.token_ids[i] == ids[:cut]
        assert left.truncated[i] == (not ends)
        assert left.logprobs[i] == pytest.approx(stayed.logprobs[i][:cut], abs=1e-5)
    assert len(set(cuts)) > 3


@pytest.mark.parametrize("params", [SamplingParams(16), SamplingParams(16, greedy=True)])
def test_batch_size_changes_no_answer_and_no_order(params):
    prompts = PROMPTS * 3
    whole = generator_of(batch_size=64).generate(prompts, params, seed=5)
    for batch_size in (1, 4, 7):
        assert_same_answers(generator_of(batch_size=batch_size).generate(prompts, params, seed=5), whole)


def test_a_padded_prompt_is_answered_as_it_is_alone():
    together = generator_of().generate(PROMPTS, SamplingParams(16, greedy=True), seed=0)
    for prompt, ids, logprobs in zip(PROMPTS, together.token_ids, together.logprobs, strict=True):
        alone = generator_of().generate([prompt], SamplingParams(16, greedy=True), seed=0)
        assert alone.token_ids == [ids]
        assert alone.logprobs[0] == pytest.approx(logprobs, abs=1e-5)


def test_one_seed_gives_the_same_bits_and_another_seed_other_answers():
    generator = generator_of()
    first, again, other = (generator.generate(PROMPTS, SamplingParams(16), seed=s) for s in (11, 11, 12))
    assert (first.token_ids, first.logprobs) == (again.token_ids, again.logprobs)
    assert first.token_ids != other.token_ids


def test_sampling_leaves_the_global_random_state_alone():
    generator = generator_of()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    generator.generate(PROMPTS, SamplingParams(4), seed=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_samples_of_one_prompt_differ_and_follow_the_models_distribution():
    draws = 4000
    output = generator_of(batch_size=draws).generate([PROMPTS[0]] * draws, SamplingParams(1), seed=0)
    counts = torch.bincount(torch.tensor(output.token_ids)[:, 0], minlength=21)
    with torch.no_grad():
        expected = model_of()(torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(-1) * draws
    seen = expected > 5
    chi_square = float(((counts - expected)[seen] ** 2 / expected[seen]).sum())
    # At most 20 degrees of freedom: 0.1 % of samples exceed 45.3.
    assert int(seen.sum()) > 3
    assert chi_square < 45.3


def test_a_conversation_passed_again_goes_on_where_it_stopped():
    generator = generator_of()
    first = generator.generate(PROMPTS, SamplingParams(6, greedy=True), seed=0)
    whole = generator.generate(PROMPTS, SamplingParams(12, greedy=True), seed=0)
    open_rows = [i for i, truncated in enumerate(first.truncated) if truncated]
    rest = generator.generate(
        [PROMPTS[i] + first.token_ids[i] for i in open_rows], SamplingParams(6, greedy=True), seed=0
    )
    assert len(open_rows) > 1
    assert [first.token_ids[i] + ids for i, ids in zip(open_rows, rest.token_ids, strict=True)] == [
        whole.token_ids[i] for i in open_rows
    ]


def test_metrics_count_what_was_generated():
    output = generator_of().generate(PROMPTS, SamplingParams(9), seed=0)
    tokens = sum(len(ids) for ids in output.token_ids)
    assert output.metrics["generated_tokens"] == tokens
    assert output.metrics["truncated_fraction"] == pytest.approx(sum(output.truncated) / len(PROMPTS))
    assert output.metrics["tokens_per_s"] == pytest.approx(tokens / output.metrics["generate_s"])


def test_no_prompts_give_no_answers():
    output = generator_of().generate([], SamplingParams(4), seed=0)
    assert (output.token_ids, output.logprobs, output.truncated) == ([], [], [])
    assert output.metrics["generated_tokens"] == 0

import weakref

import pytest
import torch

from headrace.config import GenerationConfig
from headrace.errors import ConfigError, GenerationError, HeadraceError
from headrace.models.generation.build import build_generator
from headrace.models.generation.interfaces import SamplingParams, sampling_params
from headrace.models.generation.weights import WeightStream
from reference_generation import (
    POSITIONS,
    PROMPTS,
    TOKENIZER,
    endless_generator_of,
    generator_of,
    model_of,
)

GREEDY = SamplingParams(8, greedy=True)


def test_an_empty_prompt_is_refused_by_its_place():
    with pytest.raises(ConfigError, match="prompt 1 is empty"):
        generator_of().generate([[1, 2], [], [3]], GREEDY, seed=0)


def test_a_prompt_that_could_pass_the_position_limit_is_refused_with_both_numbers_and_the_knob():
    generator = generator_of()
    with pytest.raises(
        ConfigError, match=r"prompt 1 has 57 tokens.*generation.max_new_tokens=8.*64 positions"
    ):
        generator.generate([[1], [5] * (POSITIONS - 7)], GREEDY, seed=0)
    assert len(generator.generate([[5] * (POSITIONS - 8)], GREEDY, seed=0).token_ids) == 1


def test_every_row_is_answered_within_its_own_room_as_it_is_alone():
    prompts = [[1, 5, 6, 3], [1] * 47, [1] * 60]
    params = SamplingParams(32, greedy=True, max_total_tokens=POSITIONS)
    generator = endless_generator_of("llama")
    output = generator.generate(prompts, params, seed=0)
    assert [len(ids) for ids in output.token_ids] == [32, 17, 4] == [params.limit(len(p)) for p in prompts]
    assert [len(logprobs) for logprobs in output.logprobs] == [32, 17, 4]
    assert output.truncated == [True] * 3
    alone = [generator.generate([p], params, seed=0).token_ids[0] for p in prompts]
    assert output.token_ids == alone


def test_a_prompt_that_fills_the_whole_row_is_refused_with_both_numbers_and_the_knob():
    with pytest.raises(
        ConfigError, match=r"prompt 1 has 9 tokens.*max_total_tokens=9.*policy.max_total_sequence_length"
    ):
        generator_of().generate([[1], [1] * 9], SamplingParams(8, max_total_tokens=9), seed=0)


@pytest.mark.parametrize("bad", [-1, len(TOKENIZER)])
def test_a_token_outside_the_vocabulary_is_refused(bad):
    with pytest.raises(
        ConfigError, match=f"token id {bad}, outside the model's vocabulary of {len(TOKENIZER)}"
    ):
        generator_of().generate([[1, bad]], GREEDY, seed=0)


@pytest.mark.parametrize(
    ("params", "named"),
    [
        (SamplingParams(0), "max_new_tokens=0"),
        (SamplingParams(4, temperature=0.0), "temperature=0.0"),
        (SamplingParams(4, top_k=0), "top_k=0"),
        (SamplingParams(4, top_p=0.0), "top_p=0.0"),
    ],
)
def test_params_out_of_range_are_refused_by_name(params, named):
    with pytest.raises(ConfigError, match=named):
        generator_of().generate(PROMPTS, params, seed=0)


@pytest.mark.parametrize("greedy", [True, False])
def test_logits_that_are_not_finite_name_the_prompt(greedy):
    model = model_of("llama")
    # Token 13 occurs in prompt 4 alone.
    model.model.embed_tokens.weight.data[13] = torch.nan
    generator = build_generator(GenerationConfig(), model, TOKENIZER)
    with pytest.raises(GenerationError, match="prompt 4: logprob nan at new token 0"):
        generator.generate(PROMPTS, SamplingParams(1, greedy=greedy), seed=0)


@pytest.mark.parametrize("family", ["llama", "tied", "moe"])
def test_updated_weights_answer_as_a_generator_built_from_them(family):
    generator = generator_of(family, seed=0)
    trained = model_of(family, seed=1)
    before = generator.generate(PROMPTS, GREEDY, seed=0)
    generator.update_weights(trained.named_parameters(), version=3)
    after = generator.generate(PROMPTS, GREEDY, seed=0)
    assert generator.weight_version == 3
    assert before.token_ids != after.token_ids
    fresh = generator_of(family, seed=1).generate(PROMPTS, GREEDY, seed=0)
    assert (after.token_ids, after.logprobs) == (fresh.token_ids, fresh.logprobs)


def test_tied_embeddings_update_under_either_name_or_both():
    trained = model_of("tied", seed=1)
    expected = generator_of("tied", seed=1).generate(PROMPTS, GREEDY, seed=0)
    both = dict(trained.state_dict())
    assert "lm_head.weight" in both
    for dropped in ("lm_head.weight", "model.embed_tokens.weight", None):
        generator = generator_of("tied", seed=0)
        generator.update_weights(((n, t) for n, t in both.items() if n != dropped), version=1)
        assert generator.generate(PROMPTS, GREEDY, seed=0).logprobs == expected.logprobs


def broken_updates():
    good = dict(model_of("tied", seed=1).state_dict())
    norm, head = "model.norm.weight", "lm_head.weight"
    without_norm = {n: t for n, t in good.items() if n != norm}
    return {
        "missing: model.norm.weight": without_norm.items(),
        "unknown: extra.weight": [*good.items(), ("extra.weight", torch.zeros(1))],
        r"wrong shape: model.norm.weight \(3,\) \(expected \(32,\)\)": {**good, norm: torch.zeros(3)}.items(),
        "given twice: model.norm.weight": [*good.items(), (norm, good[norm])],
        "tied here but different": {**good, head: good[head] + 1}.items(),
    }


@pytest.mark.parametrize("fault", list(broken_updates()))
def test_a_broken_update_names_the_fault_and_changes_nothing(fault):
    generator = generator_of("tied", seed=0)
    before = generator.generate(PROMPTS, GREEDY, seed=0)
    with pytest.raises(GenerationError, match=fault):
        generator.update_weights(broken_updates()[fault], version=9)
    assert generator.weight_version == 0
    assert generator.generate(PROMPTS, GREEDY, seed=0).logprobs == before.logprobs


def stream_of(model, made=None, fail_at=-1, **changes):
    """Stream copies of a model's parameters; `made` holds the copies that are still there, `changes` shapes."""
    weights = dict(model.named_parameters())

    def copies():
        for index, (name, weight) in enumerate(weights.items()):
            if index == fail_at:
                raise HeadraceError("the trainer is gone")
            copy = weight.detach().clone()
            if made is not None:
                made.add(copy)
                most.append(sum(t.nbytes for t in made))
            yield name, copy
            del copy

    most = [0]
    return WeightStream({**{n: w.shape for n, w in weights.items()}, **changes}, copies()), most


@pytest.mark.parametrize("family", ["llama", "tied", "moe"])
def test_a_stream_of_weights_is_copied_as_it_comes_one_weight_after_the_other(family):
    generator, trained, made = generator_of(family, seed=0), model_of(family, seed=1), weakref.WeakSet()
    stream, most = stream_of(trained, made)
    generator.update_weights(stream, version=3)
    sizes = [p.nbytes for p in trained.parameters()]
    assert len(made) == 0
    assert max(most) <= 2 * max(sizes) < sum(sizes), "the one that is copied, and the one that is made"
    fresh = generator_of(family, seed=1).generate(PROMPTS, GREEDY, seed=0)
    after = generator.generate(PROMPTS, GREEDY, seed=0)
    assert (generator.weight_version, after.token_ids, after.logprobs) == (3, fresh.token_ids, fresh.logprobs)


def test_a_stream_that_does_not_fit_is_refused_before_its_first_weight():
    generator, trained = generator_of("llama", seed=0), model_of("llama", seed=1)
    before = generator.generate(PROMPTS, GREEDY, seed=0)
    faults = {
        "unknown: other": {"other": (1,)},
        r"wrong shape: lm_head.weight \(3,\)": {"lm_head.weight": (3,)},
    }
    for fault, changes in faults.items():
        made = weakref.WeakSet()
        stream, most = stream_of(trained, made, **changes)
        with pytest.raises(GenerationError, match=fault):
            generator.update_weights(stream, version=9)
        assert most == [0]
    assert generator.weight_version == 0
    assert generator.generate(PROMPTS, GREEDY, seed=0).logprobs == before.logprobs


def test_nothing_is_generated_with_weights_of_two_updates():
    generator, trained = generator_of("llama", seed=0), model_of("llama", seed=1)
    with pytest.raises(HeadraceError, match="the trainer is gone"):
        generator.update_weights(stream_of(trained, fail_at=2)[0], version=4)
    with pytest.raises(GenerationError, match="broke off midway"):
        generator.generate(PROMPTS, GREEDY, seed=0)
    assert generator.weight_version == 0
    shapes = {name: p.shape for name, p in trained.named_parameters()}
    short = WeightStream(shapes, list(trained.named_parameters())[:-1])
    with pytest.raises(GenerationError, match=r"ended before lm_head\.weight"):
        generator.update_weights(short, version=4)
    with pytest.raises(GenerationError, match=r"holds other .*not announced"):
        generator.update_weights(WeightStream(shapes, [("other", torch.zeros(1))]), version=4)
    generator.update_weights(stream_of(trained)[0], version=4)
    expected = generator_of("llama", seed=1).generate(PROMPTS, GREEDY, seed=0)
    assert generator.generate(PROMPTS, GREEDY, seed=0).logprobs == expected.logprobs


def test_every_fault_of_an_update_is_named_at_once():
    good = dict(model_of("llama").state_dict())
    del good["model.norm.weight"], good["lm_head.weight"]
    with pytest.raises(
        GenerationError, match=r"unknown: other.*missing: .*model.norm.weight, lm_head.weight"
    ):
        generator_of("llama").update_weights([*good.items(), ("other", torch.zeros(1))], version=1)


def test_bfloat16_rounds_parameters_and_leaves_buffers_and_accepts_float32_updates():
    model, trained = model_of("llama"), model_of("llama", seed=1)
    generator = build_generator(GenerationConfig(precision="bfloat16"), model, TOKENIZER)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    generator.update_weights(trained.state_dict().items(), version=1)
    assert torch.equal(model.lm_head.weight, trained.lm_head.weight.bfloat16())
    output = generator.generate(PROMPTS, SamplingParams(8), seed=0)
    exact = build_generator(GenerationConfig(), trained, TOKENIZER).generate(
        PROMPTS, SamplingParams(8), seed=0
    )
    first = [logprobs[0] for logprobs in output.logprobs]
    assert first != [logprobs[0] for logprobs in exact.logprobs]
    agreeing = [i for i, ids in enumerate(output.token_ids) if ids[0] == exact.token_ids[i][0]]
    assert len(agreeing) > 3
    assert [first[i] for i in agreeing] == pytest.approx([exact.logprobs[i][0] for i in agreeing], abs=0.1)


def test_an_embedding_tied_to_the_head_stays_tied_in_bfloat16():
    model = model_of("tied")
    build_generator(GenerationConfig(precision="bfloat16"), model, TOKENIZER)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_dropout_and_gradients_are_off():
    model = model_of("llama")
    model.config.attention_dropout = 0.5
    generator = build_generator(GenerationConfig(), model.train(), TOKENIZER)
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert generator.generate(PROMPTS, GREEDY, seed=0).token_ids == (
        generator_of("llama").generate(PROMPTS, GREEDY, seed=0).token_ids
    )


def test_release_changes_no_answer_and_shutdown_ends_generation():
    generator = generator_of()
    before = generator.generate(PROMPTS, GREEDY, seed=0)
    generator.release()
    assert generator.generate(PROMPTS, GREEDY, seed=0).logprobs == before.logprobs
    generator.shutdown()
    generator.shutdown()
    with pytest.raises(GenerationError, match="after shutdown"):
        generator.generate(PROMPTS, GREEDY, seed=0)


def test_a_backend_that_is_not_there_is_refused_with_those_that_are():
    cfg = GenerationConfig().model_copy(update={"backend": "other"})
    with pytest.raises(
        ConfigError, match=r"generation\.backend='other' is not there; choose one of: hf, sglang, vllm"
    ):
        build_generator(cfg, model_of(), TOKENIZER)


def test_an_engine_argument_that_headrace_sets_is_refused_with_the_key_that_decides_it():
    cfg = GenerationConfig(backend="vllm", vllm={"args": {"dtype": "float16"}})
    with pytest.raises(
        ConfigError, match=r"generation\.vllm\.args\.dtype=float16: headrace sets it; .*precision"
    ):
        build_generator(cfg, model_of(), TOKENIZER)


def test_an_engine_that_is_not_installed_is_named_with_the_way_to_install_it():
    with pytest.raises(
        ConfigError, match=r"generation\.backend=vllm: .*vllm.*; pip install 'headrace\[vllm\]'"
    ):
        build_generator(GenerationConfig(backend="vllm"), model_of(), TOKENIZER)


def test_params_of_a_recipe_carry_every_sampling_key():
    cfg = GenerationConfig(
        max_new_tokens=7, temperature=0.5, top_p=0.9, top_k=3, stop_strings=("x",), stop_token_ids=(4,)
    )
    expected = SamplingParams(7, 0.5, 0.9, 3, False, (4,), ("x",))
    assert sampling_params(cfg) == expected

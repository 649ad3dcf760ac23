"""The contract of Generator, held by every backend: in place, and by two engines in processes of their own.

`NAME@beside` get weights through shared memory, `NAME@apart` by a broadcast, and `NAME@ranks` is one engine of two
tensor-parallel ranks. HEADRACE_GENERATORS names them (those of hf, and sglang, unless set), HEADRACE_ENGINE_PYTHON the
interpreter of the processes. `make test-engines` runs it on vLLM's CPU build, which needs an environment of its own.
Behind `sglang` stands the server of tests/sglang_server.
"""

import logging
import os
import signal
from collections.abc import Iterator
from inspect import signature
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.config import GenerationConfig, SGLangConfig, VLLMConfig
from headrace.errors import ConfigError, GenerationError
from headrace.experience.live_generator import LiveGenerator
from headrace.models.generation.build import build_generator
from headrace.models.generation.engine_generator import EngineGenerator, VLLMGenerator
from headrace.models.generation.interfaces import GenerationOutput, Generator, SamplingParams
from headrace.models.generation.sglang import SGLangGenerator
from headrace.models.generation.weights import WeightStream
from headrace.models.sampling import filter_logits
from sglang_path import sglang_on_path
from tiny_models import CHARACTERS, build_character_tokenizer

BACKENDS = os.environ.get("HEADRACE_GENERATORS", "hf,sglang,hf@beside,hf@apart").split(",")
TOKENIZER = build_character_tokenizer(CHARACTERS)
END = TOKENIZER.eos_token_id
PROMPTS = [TOKENIZER.encode(text) for text in ("ab", "hello", "x", "hello", "a longer one")]
GREEDY = SamplingParams(12, greedy=True)
BLOCK = 32
"""Tokens whose keys and values vLLM caches together."""
SGLANG = SGLangConfig(sleep="all")


def model_of(seed: int, *, unknown: int = 0) -> Any:
    """Return a model that has scores for `unknown` ids without a token."""
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=len(TOKENIZER) + unknown,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=True,
        eos_token_id=END,
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def build(backend: str, *, unknown: int = 0) -> Generator:
    name, _, place = backend.partition("@")
    engines, ranks = (1, 2) if place == "ranks" else (2, 1)
    values: dict[str, Any] = {"backend": name, "max_new_tokens": 12}
    if place:
        python = os.environ.get("HEADRACE_ENGINE_PYTHON")
        placement = "beside" if place == "beside" else "apart"
        values |= {"placement": placement, "engines": engines, "python": python}
    args = {"enforce_eager": True, "max_model_len": 128, "block_size": BLOCK}
    values |= {"sglang": SGLANG, "vllm": VLLMConfig(args=args, tensor_parallel=ranks if place else 1)}
    cfg = GenerationConfig(**values)
    with sglang_on_path():
        return build_generator(cfg, model_of(0, unknown=unknown), TOKENIZER)


@pytest.fixture(scope="module", params=BACKENDS)
def started(request: pytest.FixtureRequest) -> Iterator[Generator]:
    generator = build(request.param)
    yield generator
    generator.shutdown()


@pytest.fixture
def generator(started: Generator) -> Generator:
    """The backend with the weights of model 0."""
    if started.weight_version != 0:
        started.update_weights(model_of(0).state_dict().items(), 0)
    return started


@torch.no_grad()
def scored(model: Any, prompt: list[int], new: list[int], **filters: Any) -> list[float]:
    """Return the logprobs of new tokens by one forward pass over all, under the filters of sampling."""
    logits = model(torch.tensor([prompt + new])).logits[0, len(prompt) - 1 : -1].float()
    kept = filter_logits(logits, **filters) if filters else logits
    return kept.log_softmax(-1).gather(-1, torch.tensor(new)[:, None])[:, 0].tolist()


def assert_scored(output: GenerationOutput, model: Any, **filters: Any) -> None:
    for prompt, new, logprobs in zip(PROMPTS, output.token_ids, output.logprobs, strict=True):
        assert logprobs == pytest.approx(scored(model, prompt, new, **filters), abs=1e-5)


def greedy_tokens(model: Any, prompt: list[int], limit: int = 12) -> list[int]:
    new: list[int] = []
    while len(new) < limit and END not in new:
        with torch.no_grad():
            new.append(int(model(torch.tensor([prompt + new])).logits[0, -1].argmax()))
    return new


def test_greedy_tokens_and_logprobs_are_those_of_a_full_forward_pass(generator: Generator) -> None:
    output = generator.generate(PROMPTS, GREEDY, seed=0)
    model = model_of(0)
    assert output.token_ids == [greedy_tokens(model, prompt) for prompt in PROMPTS]
    assert output.truncated == [new[-1] != END for new in output.token_ids]
    assert_scored(output, model)


@pytest.mark.parametrize(
    "filters",
    [
        {"temperature": 1.0},
        {"temperature": 1.4, "top_k": 6},
        {"temperature": 1.4, "top_p": 0.8},
        {"temperature": 1.4, "top_k": 6, "top_p": 0.8},
    ],
    ids=str,
)
def test_logprobs_are_of_the_distribution_that_was_sampled(
    generator: Generator, filters: dict[str, Any]
) -> None:
    if isinstance(generator, SGLangGenerator) and len(filters) == 3:
        with pytest.raises(ConfigError, match=r"top_k=6 with .*top_p=0.8: .* set one of both"):
            generator.generate(PROMPTS, SamplingParams(12, **filters), seed=3)
        return
    output = generator.generate(PROMPTS, SamplingParams(12, **filters), seed=3)
    assert_scored(output, model_of(0), **{"top_k": None, "top_p": 1.0, **filters})


def test_a_seed_gives_the_same_completions_and_equal_prompts_different_ones(generator: Generator) -> None:
    params = SamplingParams(12)
    first = generator.generate(PROMPTS, params, seed=1)
    assert generator.generate(PROMPTS, params, seed=1).token_ids == first.token_ids
    assert generator.generate(PROMPTS, params, seed=2).token_ids != first.token_ids
    assert PROMPTS[1] == PROMPTS[3]
    assert first.token_ids[1] != first.token_ids[3]


def test_a_stop_id_ends_a_completion_and_belongs_to_it(generator: Generator) -> None:
    free = generator.generate(PROMPTS, GREEDY, seed=0).token_ids
    stop = free[0][2]
    output = generator.generate(PROMPTS, SamplingParams(12, greedy=True, stop_token_ids=(stop,)), seed=0)
    for new, before, truncated in zip(output.token_ids, free, output.truncated, strict=True):
        end = before.index(stop) + 1 if stop in before else len(before)
        assert new == before[:end]
        assert truncated == (new[-1] not in (stop, END))
    assert {stop, END} <= set(output.stop_token_ids)


def test_a_stop_string_ends_a_completion_with_the_token_that_completes_it(generator: Generator) -> None:
    free = generator.generate(PROMPTS, GREEDY, seed=0).token_ids
    text = TOKENIZER.decode(free[1][1:3])
    output = generator.generate(PROMPTS, SamplingParams(12, greedy=True, stop_strings=(text,)), seed=0)
    end = next(i for i in range(1, 13) if text in TOKENIZER.decode(free[1][:i]))
    assert output.token_ids[1] == free[1][:end]
    assert output.truncated[1] is False


def test_no_completion_passes_its_own_limit(generator: Generator) -> None:
    params = SamplingParams(12, greedy=True, max_total_tokens=14)
    output = generator.generate(PROMPTS, params, seed=0)
    for prompt, new in zip(PROMPTS, output.token_ids, strict=True):
        assert len(new) <= params.limit(len(prompt))


def test_a_further_turn_continues_the_conversation(generator: Generator) -> None:
    first = generator.generate(PROMPTS, GREEDY, seed=0).token_ids
    model = model_of(0)
    longer = [[*prompt, *new, *TOKENIZER.encode("go")] for prompt, new in zip(PROMPTS, first, strict=True)]
    again = generator.generate(longer, GREEDY, seed=0)
    assert again.token_ids == [greedy_tokens(model, prompt) for prompt in longer]


def test_completions_after_each_update_are_those_of_the_new_weights(generator: Generator) -> None:
    for version, streamed in ((1, False), (2, True)):
        model = model_of(version)
        # A trainer streams its parameters, of which tied ones are one.
        weights = dict(model.named_parameters() if streamed else model.state_dict())
        shapes = {name: tensor.shape for name, tensor in weights.items()}
        generator.update_weights(
            WeightStream(shapes, weights.items()) if streamed else weights.items(), version
        )
        assert generator.weight_version == version
        output = generator.generate(PROMPTS, GREEDY, seed=0)
        assert output.token_ids == [greedy_tokens(model, prompt) for prompt in PROMPTS]
        assert_scored(output, model)


@torch.no_grad()
def scored_over_old_keys(
    models: tuple[Any, Any], prompt: list[int], of_old: list[int], of_new: list[int]
) -> list[float]:
    """Return the logprobs of `of_new` by the second model, over the first one's keys and values of all full blocks."""
    tokens, begun = [*prompt, *of_old, *of_new], len(prompt) + len(of_old)
    kept = (begun - 1) // BLOCK * BLOCK
    cache = models[0](torch.tensor([tokens[:kept]]), use_cache=True).past_key_values
    # Newer transformers have another name for it.
    keyword = "cache" if "cache" in signature(models[1].forward).parameters else "past_key_values"
    logits = models[1](torch.tensor([tokens[kept:]]), **{keyword: cache}).logits[0, begun - 1 - kept : -1]
    return logits.float().log_softmax(-1).gather(-1, torch.tensor(of_new)[:, None])[:, 0].tolist()


@pytest.mark.parametrize("keeps", [False, True])
def test_answers_go_on_with_new_weights_over_new_keys_or_where_an_engine_keeps_them_over_old_ones(
    generator: Generator, keeps: bool
) -> None:
    piece, models, looks = 12, (model_of(0), model_of(1)), iter(range(9))
    prompts = [TOKENIZER.encode(text) for text in ("a long prompt of blocks", "x" * 50, "hello " * 6)]
    live = LiveGenerator(generator, piece, keeps_cache=keeps)

    def refresh() -> None:
        if next(looks) == 1:
            live.update_weights(models[1].state_dict().items(), 1)

    live.refresh = refresh
    # The second answer ends in its first piece; of two engines one then has more to do than the other.
    output = live.generate(prompts, SamplingParams(2 * piece, max_total_tokens=60), seed=5)
    assert max(map(len, output.token_ids)) == 2 * piece
    has_cache = keeps and isinstance(generator, VLLMGenerator)
    for prompt, new, logprobs in zip(prompts, output.token_ids, output.logprobs):
        first, second = new[:piece], new[piece:]
        expected = scored(models[0], prompt, first)
        if second:
            over_new = scored(models[1], prompt + first, second)
            over_old = scored_over_old_keys(models, prompt, first, second)
            assert over_old != pytest.approx(over_new, abs=1e-2)
            expected += over_old if has_cache else over_new
        assert logprobs == pytest.approx(expected, abs=1e-5)
    again = generator.generate(prompts, GREEDY, seed=0)
    for prompt, new, logprobs in zip(prompts, again.token_ids, again.logprobs):
        assert logprobs == pytest.approx(scored(models[1], prompt, new), abs=1e-5)


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape"])
def test_an_update_that_does_not_fit_is_refused_and_changes_nothing(generator: Generator, fault: str) -> None:
    # Engines share prompts out by the lengths of earlier answers, and the shapes of their batches reach the last bits.
    generator.generate(PROMPTS, GREEDY, seed=0)
    before = generator.generate(PROMPTS, GREEDY, seed=0)
    weights = dict(model_of(1).named_parameters())
    name = "model.layers.1.mlp.down_proj.weight"
    tensor = weights.pop(name)
    if fault != "missing":
        weights |= {"another": tensor, name: tensor} if fault == "unknown" else {name: tensor[:-1]}
    with pytest.raises(GenerationError, match="another" if fault == "unknown" else r"layers\.1\.mlp"):
        generator.update_weights(weights.items(), generator.weight_version + 1)
    after = generator.generate(PROMPTS, GREEDY, seed=0)
    assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)


def test_a_stop_id_at_the_limit_ends_a_completion_and_no_prompts_give_none(generator: Generator) -> None:
    whole = generator.generate(PROMPTS[1:2], GREEDY, seed=0).token_ids[0]
    place = next(i for i, token in enumerate(whole) if token not in whole[:i] and i > 0)
    params = SamplingParams(place + 1, greedy=True, stop_token_ids=(whole[place],))
    output = generator.generate(PROMPTS[1:2], params, seed=0)
    assert (output.token_ids, output.truncated) == ([whole[: place + 1]], [False])
    assert generator.generate([], GREEDY, seed=0).token_ids == []


def test_caches_may_be_released_between_calls(generator: Generator) -> None:
    before = generator.generate(PROMPTS, GREEDY, seed=0)
    generator.release()
    assert generator.generate(PROMPTS, GREEDY, seed=0).token_ids == before.token_ids


def test_an_empty_prompt_is_refused_by_its_place(generator: Generator) -> None:
    with pytest.raises(ConfigError, match="prompt 1 is empty"):
        generator.generate([[5], []], GREEDY, seed=0)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if "@" not in b])
def test_a_generator_that_has_ended_says_so_and_another_takes_its_place(backend: str) -> None:
    first = build(backend)
    expected = first.generate(PROMPTS, GREEDY, seed=0).token_ids
    first.shutdown()
    first.shutdown()
    with pytest.raises(GenerationError, match="after shutdown"):
        first.generate(PROMPTS, GREEDY, seed=0)
    second = build(backend)
    assert second.generate(PROMPTS, GREEDY, seed=0).token_ids == expected
    second.shutdown()


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b in ("hf", "vllm")])
def test_ids_without_a_token_are_not_part_of_the_distribution(backend: str) -> None:
    generator = build(backend, unknown=40)
    try:
        output = generator.generate(PROMPTS, SamplingParams(12, temperature=2.0), seed=4)
    finally:
        generator.shutdown()
    assert all(token < len(TOKENIZER) for new in output.token_ids for token in new)
    ids = torch.arange(len(TOKENIZER), len(TOKENIZER) + 40)
    assert_scored(output, model_of(0, unknown=40), temperature=2.0, unknown_ids=ids)


@pytest.mark.parametrize("started", [b for b in BACKENDS if b.endswith(("@beside", "@apart"))], indirect=True)
def test_the_prompts_of_a_killed_engine_go_to_the_other(
    started: EngineGenerator, generator: Generator, caplog: pytest.LogCaptureFixture
) -> None:
    expected = generator.generate(PROMPTS, GREEDY, seed=0).token_ids
    pid = started.pids[0]
    os.kill(pid, signal.SIGKILL)
    with caplog.at_level(logging.WARNING):
        output = generator.generate(PROMPTS, GREEDY, seed=0)
    assert output.token_ids == expected
    assert output.metrics["engines_lost"] == 1
    (said,) = caplog.messages
    assert f"(pid {pid}) was killed by SIGKILL" in said
    assert "started again" in said
    assert pid not in started.pids

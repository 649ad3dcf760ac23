"""Requests that vLLM takes no part of, or would answer otherwise than asked.

In the environment of `make test-engines`.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from test_generators import GREEDY, PROMPTS, TOKENIZER, model_of

from headrace.config import GenerationConfig, VLLMConfig
from headrace.errors import ConfigError
from headrace.models.generation.build import build_generator
from headrace.models.generation.interfaces import SamplingParams

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM (make test-engines)")
LONGEST = 64


@pytest.fixture(scope="module")
def generator() -> Iterator[Any]:
    """An engine that takes half of the model's positions."""
    args = {"enforce_eager": True, "max_model_len": LONGEST}
    generator = build_generator(
        GenerationConfig(backend="vllm", vllm=VLLMConfig(args=args)), model_of(0), TOKENIZER
    )
    yield generator
    generator.shutdown()


@pytest.mark.parametrize(
    ("prompt", "params", "told"),
    [
        ([5] * 70, GREEDY, r"prompt 1 has 70 tokens.* max_model_len=64; raise it \(generation\.vllm\.args\)"),
        ([5] * (LONGEST - 11), GREEDY, "prompt 1 has 53 tokens; with 12 new ones that is more"),
        ([5, 5000], GREEDY, "prompt 1: vLLM refuses it: .*5000"),
        ([5], SamplingParams(12, temperature=2.5), r"vLLM refuses it: temperature must be in \[0, 2\]"),
        ([5], SamplingParams(12, temperature=0.005), r"generation\.temperature=0\.005 it would draw as at 0\.01"),
    ],
)  # fmt: skip
def test_what_vllm_would_not_answer_as_asked_is_refused_and_nothing_of_it_is_left(
    generator: Any, prompt: list[int], params: SamplingParams, told: str
) -> None:
    before = generator.generate(PROMPTS, GREEDY, seed=0)
    with pytest.raises(ConfigError, match=told):
        generator.generate([PROMPTS[0], prompt], params, seed=0)
    after = generator.generate(PROMPTS, GREEDY, seed=0)
    assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)


def test_a_prompt_and_its_answer_may_fill_the_engines_length(generator: Any) -> None:
    output = generator.generate([[5] * (LONGEST - 12)], GREEDY, seed=0)
    assert len(output.token_ids[0]) == 12

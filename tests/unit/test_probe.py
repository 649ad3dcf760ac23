"""What the mismatch guard asks the generator."""

import math

import pytest

from headrace.errors import GenerationError
from headrace.experience.probe import complete
from headrace.models.generation.hf import HFGenerator
from headrace.models.generation.interfaces import SamplingParams
from tiny_models import tiny_generation_config, tiny_model, tiny_tokenizer


def build() -> HFGenerator:
    return HFGenerator(tiny_model("llama"), tiny_tokenizer(), tiny_generation_config())


def test_completions_are_those_of_one_call_with_their_prompts() -> None:
    prompts, params = [[5, 6, 7], [8]], SamplingParams(4)
    output = build().generate(prompts, params, seed=3)
    probed, metrics = complete(build(), prompts, params, 3)
    assert [row.prompt for row in probed] == prompts
    assert [row.new for row in probed] == output.token_ids
    assert [row.logprobs for row in probed] == output.logprobs
    assert [row.routes for row in probed] == [None, None]
    assert metrics["generated_tokens"] == sum(map(len, output.token_ids))


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_logprob_that_is_not_finite_is_refused_with_its_prompt(value: float) -> None:
    generator = build()
    generate = generator.generate

    def broken(*args: object, seed: int) -> object:
        output = generate(*args, seed=seed)  # type: ignore[arg-type]
        output.logprobs[1][2] = value
        return output

    generator.generate = broken  # type: ignore[assignment]
    with pytest.raises(GenerationError, match=f"prompt 1 of the mismatch guard with logprob {value}"):
        complete(generator, [[5, 6, 7], [8]], SamplingParams(4), 3)

"""A model with more scores than its tokenizer has tokens: never sampled, and scored as if the rest were not there."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.errors import ConfigError, GenerationError
from headrace.experience.rollouts import RolloutSettings, run_rollouts
from headrace.models.automodel.setup import load_model, load_tokenizer
from headrace.models.generation.build import build_generator
from headrace.models.generation.interfaces import GenerationOutput, SamplingParams
from headrace.models.policy.workers.automodel_worker import AutomodelPolicyWorker
from reference_experience import BigramGenerator, GuessingGame, character_tokenizer
from tiny_models import CONFIGS, tiny_generation_config, tiny_policy_config

PROMPTS = [[1, 9, 8, 3], [1, 20, 3]] * 20
WIDE = tiny_policy_config("llama", model={"config": {**CONFIGS["llama"], "vocab_size": 200}})


@pytest.mark.parametrize("filters", [{}, {"temperature": 3.0}, {"top_k": 150}, {"top_p": 0.99}], ids=str)
def test_an_id_without_a_token_is_never_sampled_and_scores_agree(filters: dict[str, Any]) -> None:
    generation = tiny_generation_config(**filters)
    tokenizer = load_tokenizer(WIDE)
    generator = build_generator(generation, load_model(WIDE, seed=0), tokenizer)
    sampling = SamplingParams(8, **filters)
    answers = generator.generate(PROMPTS, sampling, seed=0)
    assert max(map(max, answers.token_ids)) < len(tokenizer) == 64
    greedy = generator.generate(PROMPTS[:2], replace(sampling, greedy=True), seed=0)
    assert max(map(max, greedy.token_ids)) < 64

    rows = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, answers.token_ids)]
    width = max(map(len, rows))
    data = BatchedDataDict(
        {
            "input_ids": torch.tensor([row + [0] * (width - len(row)) for row in rows]),
            "input_lengths": torch.tensor([len(row) for row in rows]),
        }
    )
    worker = AutomodelPolicyWorker(WIDE, generation, tokenizer=tokenizer, seed=0)
    scored = worker.get_logprobs(data)["logprobs"]
    for prompt, logprobs, row in zip(PROMPTS, answers.logprobs, scored):
        ours = row[len(prompt) : len(prompt) + len(logprobs)]
        torch.testing.assert_close(ours, torch.tensor(logprobs), rtol=0, atol=1e-4)


class HoleyGenerator(BigramGenerator):
    """An engine that does not leave ids without a token out."""

    def generate(self, *args: Any, **kwargs: Any) -> GenerationOutput:
        output = super().generate(*args, **kwargs)
        output.token_ids[7][0] = 400
        return output


def play(generator: BigramGenerator, tokenizer: Any) -> Any:
    game = GuessingGame()
    settings = RolloutSettings(SamplingParams(5), max_total_tokens=64)
    return run_rollouts(
        game.prompts("train"),
        generator=generator,
        tokenizer=tokenizer,
        environment=game,
        settings=settings,
        group_size=3,
        seed=0,
        tag="0",
    )


def test_an_engine_that_samples_such_an_id_is_refused_by_sample() -> None:
    tokenizer = character_tokenizer()
    with pytest.raises(
        GenerationError, match=r"sample 'train2@0_g1': the generator sampled id 400, for which"
    ):
        play(HoleyGenerator(tokenizer), tokenizer)


class OwnEndGenerator(BigramGenerator):
    """An engine whose model has an end of its own, which the tokenizer takes for a letter."""

    def generate(self, prompts: Any, params: SamplingParams, *, seed: int) -> GenerationOutput:
        own = self._letters[0]
        ids = [[self._letters[1], own] for _ in prompts]
        return GenerationOutput(ids, [[-1.0, -1.0]] * len(ids), [False] * len(ids), stop_token_ids=(own,))


def test_an_end_token_of_the_models_own_is_not_in_the_judged_text() -> None:
    tokenizer = character_tokenizer()
    rollouts, _ = play(OwnEndGenerator(tokenizer), tokenizer)
    assert {r.messages[-1].content for r in rollouts} == {"b"}


def test_a_generator_tells_every_id_that_ends_its_answers() -> None:
    model, tokenizer = load_model(WIDE, seed=0), load_tokenizer(WIDE)
    model.generation_config.eos_token_id = [2, 30]
    generator = build_generator(tiny_generation_config(), model, tokenizer)
    output = generator.generate(PROMPTS[:1], SamplingParams(2, stop_token_ids=(40,)), seed=0)
    assert output.stop_token_ids == (2, 30, 40)
    with pytest.raises(
        ConfigError, match=r"generation.stop_token_ids holds 200, outside the model's vocabulary of 200"
    ):
        generator.generate(PROMPTS[:1], SamplingParams(2, stop_token_ids=(200,)), seed=0)


def test_a_tokenizer_with_an_id_beyond_the_model_is_refused_whatever_its_number_of_tokens() -> None:
    for highest, fits in ((63, True), (64, False)):
        core = Tokenizer(WordLevel({"a": 0, "b": highest}, unk_token="a"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="a")
        if fits:
            load_model(tiny_policy_config("llama"), seed=0, tokenizer=tokenizer)
            continue
        with pytest.raises(ConfigError, match=r"tokenizer has 65 tokens and the model vocab_size=64"):
            load_model(tiny_policy_config("llama"), seed=0, tokenizer=tokenizer)

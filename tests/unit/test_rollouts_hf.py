"""Rollouts with a real model: what is recorded is what a plain forward pass over the whole row gives."""

from typing import Any

import pytest
import torch

from headrace.config import GenerationConfig
from headrace.environments.interfaces import StepResult
from headrace.experience.rollouts import RolloutSettings, run_rollouts
from headrace.experience.types import Message, Prompt, Rollout
from headrace.models.generation.hf import HFGenerator
from headrace.models.generation.interfaces import SamplingParams
from reference_generation import POSITIONS, TOKENIZER, endless_generator_of
from tiny_models import tiny_model, tiny_tokenizer

PROMPTS = [Prompt(f"p{n}", (Message("user", "abcdefgh"[:n]),)) for n in (2, 5, 5, 8)]


class TwoQuestions:
    """Asks once more after the first answer, in words that depend on it."""

    def prompts(self, split: str) -> list[Prompt]:
        return PROMPTS

    def step(self, prompts: Any, conversations: Any, truncated: Any) -> list[StepResult]:
        return [self._judge(c) for c in conversations]

    def _judge(self, conversation: Any) -> StepResult:
        answers = [m for m in conversation if m.role == "assistant"]
        if len(answers) == 2:
            return StepResult(reward=1.0, correct=True)
        again = "again" + "!" * (len(answers[0].content) % 3)
        return StepResult(reward=0.0, done=False, observation=(Message("user", again),))


@pytest.fixture(scope="module")
def batch() -> list[Rollout]:
    tokenizer = tiny_tokenizer()
    generator = HFGenerator(tiny_model("llama"), tokenizer, GenerationConfig())
    rollouts, _ = run_rollouts(
        PROMPTS,
        generator=generator,
        tokenizer=tokenizer,
        environment=TwoQuestions(),
        settings=RolloutSettings(SamplingParams(max_new_tokens=6), max_total_tokens=40, max_turns=2),
        group_size=3,
        seed=0,
    )
    return rollouts


def test_every_answer_is_scored_as_by_one_forward_pass_over_its_row(batch: list[Rollout]) -> None:
    model = tiny_model("llama").eval()
    assert {r.turns for r in batch} == {2}
    for rollout in batch:
        ids = torch.tensor([rollout.token_ids])
        with torch.no_grad():
            scores = torch.log_softmax(model(ids).logits[0, :-1].float(), dim=-1)
        scored = scores.gather(1, ids[0, 1:, None])[:, 0]
        mask = torch.tensor(rollout.token_mask[1:], dtype=torch.bool)
        recorded = torch.tensor(rollout.logprobs[1:])
        torch.testing.assert_close(recorded[mask], scored[mask], atol=1e-4, rtol=0)
        assert recorded[~mask].eq(0).all()


def test_prompts_and_observations_are_in_the_row_as_the_template_writes_them(batch: list[Rollout]) -> None:
    tokenizer = tiny_tokenizer()
    for rollout in batch:
        question = [{"role": "user", "content": rollout.prompt.messages[0].content}]
        head = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(rollout.token_ids).startswith(head)
        assert rollout.messages[2].content in tokenizer.decode(
            [i for i, m in zip(rollout.token_ids, rollout.token_mask) if not m]
        )


def test_a_prompt_that_nearly_fills_the_positions_takes_no_room_from_a_short_one_and_ends_no_run() -> None:
    prompts = [Prompt(f"p{n}", (Message("user", "a" * n),)) for n in (3, 45)]
    batch, _ = run_rollouts(
        prompts,
        generator=endless_generator_of("llama"),
        tokenizer=TOKENIZER,
        environment=TwoQuestions(),
        settings=RolloutSettings(SamplingParams(max_new_tokens=32), max_total_tokens=POSITIONS),
        group_size=2,
        seed=0,
    )
    prompt_tokens = [r.token_mask.index(1) for r in batch]
    assert prompt_tokens == [5, 5, 47, 47]
    assert [r.response_tokens for r in batch] == [32, 32, POSITIONS - 47, POSITIONS - 47]
    assert all(r.truncated for r in batch)

"""Dynamic sampling: which groups count as useful, how many are drawn, and that metrics are of all of them."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.algorithms.grpo import Collected, Session, collect, score
from headrace.algorithms.loss import NLLLoss
from headrace.algorithms.prompt_loader import PromptLoader
from headrace.config import RecipeConfig
from headrace.distributed.worker_groups import LocalWorkerGroup
from headrace.environments.interfaces import StepResult
from headrace.experience.rollouts import RolloutSettings
from headrace.experience.sync_rollout_actor import SyncRolloutActor
from headrace.experience.types import Message, Prompt
from headrace.models.generation.interfaces import GenerationOutput, SamplingParams
from reference_experience import LETTERS, BigramGenerator, character_tokenizer
from tiny_models import tiny_policy
from tiny_recipe import tiny_recipe

GROUP = 4


class Judge:
    """Gives the samples of prompt number i the rewards `rewards[i]` in turn, and keeps what it gave.

    Prompts beyond the last entry have equal rewards of 0. Odd prompts have no verdict, and a metric.
    """

    def __init__(self, rewards: Sequence[Sequence[float]]) -> None:
        self._rewards = rewards
        self._judged: Counter[str] = Counter()
        self.given: list[StepResult] = []

    def prompts(self, split: str) -> list[Prompt]:
        return [Prompt(str(i), (Message("user", LETTERS[i % 26]),)) for i in range(64)]

    def step(self, prompts: Sequence[Prompt], *_: Any, **__: Any) -> list[StepResult]:
        results = [self._judge(prompt) for prompt in prompts]
        self.given += results
        return results

    def _judge(self, prompt: Prompt) -> StepResult:
        number, turn = int(prompt.uid), self._judged[prompt.uid] % GROUP
        self._judged[prompt.uid] += 1
        reward = self._rewards[number][turn] if number < len(self._rewards) else 0.0
        if number % 2:
            return StepResult(reward, metrics={"size": reward + number})
        return StepResult(reward, correct=reward > 0)


class Counting(BigramGenerator):
    """Keeps its outputs; reports a count, a time, a rate and a share as an engine does."""

    def __init__(self) -> None:
        super().__init__(character_tokenizer(), end=0.2)
        self.outputs: list[GenerationOutput] = []

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, seed: int
    ) -> GenerationOutput:
        output = super().generate(prompts, params, seed=seed)
        output.metrics |= {"made_tokens": float(sum(map(len, output.token_ids))), "busy_s": 2.0}
        output.metrics["truncated_fraction"] = sum(output.truncated) / len(output.truncated)
        self.outputs.append(output)
        return output


def collected(
    tmp_path: Path, rewards: Sequence[Sequence[float]], **grpo: Any
) -> tuple[RecipeConfig, Collected, Judge, Counting]:
    """Collect a step of 4 groups of 4 from prompts in order."""
    sampling = {"enabled": True, "max_refills": grpo.pop("max_refills", 8)}
    recipe = tiny_recipe(tmp_path, grpo={"dynamic_sampling": sampling, **grpo}, data={"shuffle": False})
    judge, generator = Judge(rewards), Counting()
    settings = RolloutSettings.from_recipe(recipe)
    actor = SyncRolloutActor(generator, character_tokenizer(), judge, settings)
    policy = tiny_policy()
    prompts = PromptLoader(judge.prompts("train"), seed=0, shuffle=False)
    session = Session(recipe, policy, LocalWorkerGroup(actor), judge, prompts, NLLLoss())
    with policy.step_rows(32, GROUP):
        return recipe, collect(session, 1), judge, generator


VARIED, EQUAL = [1.0, 0.0, 0.0, 0.0], [0.0] * GROUP


def test_metrics_are_of_all_samples_drawn_and_the_kept_ones_have_a_name_of_their_own(tmp_path: Path) -> None:
    # One useful group in four, so three more rounds of four are drawn.
    rewards = [VARIED if i % 4 == 1 else EQUAL for i in range(16)]
    recipe, step, judge, generator = collected(tmp_path, rewards)
    given = [r.reward for r in judge.given]
    made = [len(ids) for output in generator.outputs for ids in output.token_ids]
    cut = [truncated for output in generator.outputs for truncated in output.truncated]
    metrics = step.metrics
    assert len(given) == len(made) == 64
    assert metrics["reward/mean"] == metrics["rollout/reward_mean"] == pytest.approx(4 / 64)
    assert metrics["reward/std"] == pytest.approx((4 / 64 * 60 / 64) ** 0.5)
    assert metrics["generation/new_tokens"] == metrics["generator/made_tokens"] == sum(made)
    assert metrics["generation/calls"] == len(generator.calls) == 4
    assert metrics["generation/completions"] == 64
    assert metrics["generation/prompt_tokens"] == sum(len(row) for call in generator.calls for row in call)
    assert metrics["generator/busy_s"] == 8.0
    assert metrics["generator/rows_max"] == 16
    assert metrics["generator/truncated_fraction"] == pytest.approx(sum(cut) / 64)
    assert metrics["rollout/truncated_fraction"] == pytest.approx(sum(cut) / 64)
    assert metrics["rollout/response_tokens_max"] == max(made)
    assert metrics["rollout/response_tokens_mean"] == pytest.approx(sum(made) / 64)
    assert metrics["rollout/accuracy"] == 0.0
    sizes = [r.metrics["size"] for r in judge.given if r.metrics]
    assert metrics["environment/size"] == pytest.approx(sum(sizes) / len(sizes))
    assert metrics["dynamic_sampling/rounds"] == 4
    assert metrics["dynamic_sampling/varied_fraction"] == metrics["dynamic_sampling/useful_fraction"] == 0.25
    kept = score(recipe, step.table, {}, step.weights).metrics
    assert "reward/mean" not in kept
    assert kept["reward/kept_mean"] == kept["reward/shaped_mean"] == 0.25


def test_dummies_of_weight_zero_are_in_no_metric_of_the_kept_samples(tmp_path: Path) -> None:
    recipe, step, *_ = collected(tmp_path, [VARIED, [0.7] * GROUP], max_refills=1)
    assert step.weights.tolist().count(0.0) == 3 * GROUP
    kept = score(recipe, step.table, {}, step.weights).metrics
    assert kept["reward/kept_mean"] == kept["reward/shaped_mean"] == 0.25
    none = score(recipe, step.table, {}, torch.zeros(16)).metrics
    assert "reward/kept_mean" not in none


def test_a_refill_draws_what_the_share_of_useful_groups_asks_for(tmp_path: Path) -> None:
    # 2 of 4, then 1 missing of 4 at that share: 4, of which 1 is useful; then 1 missing at 3 of 8: 3.
    rewards = [VARIED, VARIED, EQUAL, EQUAL, EQUAL, EQUAL, VARIED, EQUAL, EQUAL, VARIED, EQUAL]
    _, step, _, generator = collected(tmp_path, rewards)
    assert [len(call) // GROUP for call in generator.calls] == [4, 4, 3]
    assert step.metrics["dynamic_sampling/useful_fraction"] == pytest.approx(4 / 11)


def test_without_a_useful_group_a_whole_round_is_drawn_again(tmp_path: Path) -> None:
    _, step, _, generator = collected(tmp_path, [EQUAL], max_refills=3)
    assert [len(call) // GROUP for call in generator.calls] == [4, 4, 4]
    assert generator.releases == 0  # one that sleeps would have to be woken for each round
    assert not step.weights.any()
    assert step.metrics["dynamic_sampling/varied_fraction"] == 0.0


@pytest.mark.parametrize(
    ("reward", "useful"),
    [
        ({"clip": [0.0, 1.0]}, False),  # makes 2 and 3 equal
        ({"clip": [0.0, 2.5]}, True),
        ({"scale": 0.0}, False),
        ({"scale": 1e-46, "offset": 1.0}, False),  # float32 cannot tell them apart
        ({"clip": [0.0, 1.0], "overlong_penalty": 1.0, "overlong_buffer_tokens": 8}, False),
    ],
)
def test_groups_are_told_apart_by_scaled_and_clipped_rewards(
    tmp_path: Path, reward: dict[str, Any], useful: bool
) -> None:
    rewards = [[2.0, 3.0, 3.0, 2.0]] * 8
    recipe, step, *_ = collected(tmp_path, rewards, max_refills=2, reward=reward)
    assert bool(step.weights.all()) == bool(step.weights.any()) == useful
    assert bool(score(recipe, step.table, {}, step.weights).advantages.any()) == useful


def test_a_loader_that_is_asked_for_no_prompts_gives_none_and_stays_where_it_is() -> None:
    prompts = PromptLoader(["a", "b", "c"], seed=0, shuffle=False)
    prompts.used = {0}
    assert (prompts.take(0), prompts.take(2), prompts.take(0), prompts.position) == ([], ["b", "c"], [], 3)

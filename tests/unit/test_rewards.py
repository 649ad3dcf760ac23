import math
from itertools import groupby
from pathlib import Path

import pytest
import torch

from headrace.algorithms.grpo import score
from headrace.algorithms.rewards import check_rewards, overlong_mask, shape_rewards, subtract_kl
from headrace.algorithms.rollout_table import RolloutTable
from headrace.config import RewardConfig
from headrace.errors import ConfigError, RewardError
from headrace.experience.flatten import per_sample_values
from headrace.experience.rollouts import RolloutSettings, run_rollouts
from headrace.models.generation.interfaces import SamplingParams
from reference_experience import BigramGenerator, GuessingGame, character_tokenizer
from tiny_recipe import tiny_recipe

IDS = [f"p{i}_g0" for i in range(8)]


def test_good_rewards_become_float32_in_order():
    rewards = check_rewards([1, 0.5, True, torch.tensor(2.0)], IDS[:4])
    assert rewards.dtype == torch.float32
    assert rewards.tolist() == [1.0, 0.5, 1.0, 2.0]


def test_a_tensor_of_rewards_is_accepted():
    assert check_rewards(torch.tensor([1, 2], dtype=torch.float64), IDS[:2]).tolist() == [1.0, 2.0]


def test_no_samples_have_no_rewards():
    assert check_rewards([], []).shape == (0,)


@pytest.mark.parametrize(
    "bad", [None, math.nan, math.inf, -math.inf, 1e39, 10**400, "1.0", torch.ones(2), [1.0]], ids=repr
)
def test_a_reward_that_is_no_finite_number_names_its_sample(bad):
    with pytest.raises(RewardError, match="'p1_g0'") as caught:
        check_rewards([0.0, bad, 1.0], IDS[:3])
    assert "p0_g0" not in str(caught.value)
    assert "p2_g0" not in str(caught.value)


def test_five_bad_rewards_are_named_and_the_rest_counted():
    with pytest.raises(RewardError) as caught:
        check_rewards([math.nan] * 8, IDS)
    message = str(caught.value)
    assert [i for i in IDS if i in message] == IDS[:5]
    assert "and 3 more" in message


def test_too_few_rewards_name_the_samples_without_one():
    with pytest.raises(RewardError, match=r"got 6 rewards for 8 samples.*'p6_g0', 'p7_g0'"):
        check_rewards([0.0] * 6, IDS)


def test_too_many_rewards_are_refused():
    with pytest.raises(RewardError, match="got 9 rewards for 8 samples"):
        check_rewards([0.0] * 9, IDS)


def test_a_two_dimensional_tensor_of_rewards_is_refused():
    with pytest.raises(RewardError, match="'p0_g0'"):
        check_rewards(torch.ones(2, 1), IDS[:2])


def shape(rewards, tokens, truncated, cfg, limit=16):
    return shape_rewards(
        torch.tensor(rewards),
        torch.tensor(tokens),
        torch.tensor(truncated),
        cfg,
        max_new_tokens=limit,
        sample_ids=IDS[: len(rewards)],
    )


def test_the_default_section_changes_nothing():
    rewards = [0.1, -3.0, 0.0]
    assert torch.equal(shape(rewards, [1, 2, 0], [False] * 3, RewardConfig()), torch.tensor(rewards))


def test_scale_comes_before_offset_and_clip_comes_last():
    cfg = RewardConfig(scale=2.0, offset=-1.0, clip=(-1.0, 2.0))
    assert shape([0.0, 1.0, 4.0, -4.0], [1] * 4, [False] * 4, cfg).tolist() == [-1.0, 1.0, 2.0, -1.0]


def test_the_overlong_penalty_follows_equation_13_of_dapo():
    # L_max = 16, L_cache = 4: free up to 12 tokens, then (12 - |y|) / 4, then -1.
    cfg = RewardConfig(overlong_penalty=1.0, overlong_buffer_tokens=4)
    tokens = [0, 12, 13, 14, 16, 20]
    assert shape([1.0] * 6, tokens, [False] * 6, cfg).tolist() == [1.0, 1.0, 0.75, 0.5, 0.0, 0.0]


def test_over_several_turns_the_longest_one_is_held_against_the_limit_of_a_turn(tmp_path: Path):
    tokenizer, game = character_tokenizer(), GuessingGame()
    rollouts, _ = run_rollouts(
        game.prompts("train"),
        generator=BigramGenerator(tokenizer),
        tokenizer=tokenizer,
        environment=game,
        settings=RolloutSettings(SamplingParams(max_new_tokens=5), max_total_tokens=64, max_turns=4),
        group_size=4,
        seed=7,
    )
    recipe = tiny_recipe(
        tmp_path,
        generation={"max_new_tokens": 5},
        grpo={
            "num_prompts_per_step": 4,
            "num_generations_per_prompt": 4,
            "reward": {"overlong_penalty": 1.0, "overlong_buffer_tokens": 3},
        },
    )
    table = RolloutTable.from_values(per_sample_values(rollouts))
    rewards = score(recipe, table, {}, torch.ones(len(rollouts))).rewards
    for rollout, reward in zip(rollouts, rewards.tolist(), strict=True):
        turns = [len(list(run)) for kind, run in groupby(rollout.token_mask) if kind]
        penalty = min(max((max(turns, default=0) - 2) / 3, 0), 1) if not rollout.truncated else 1
        assert reward == pytest.approx(rollout.reward - penalty)
    assert any(not r.truncated and r.longest_turn_tokens < 5 < r.response_tokens for r in rollouts)


def test_a_cut_response_pays_the_whole_penalty_however_short():
    cfg = RewardConfig(overlong_penalty=0.5, overlong_buffer_tokens=4)
    assert shape([1.0, 1.0], [3, 3], [False, True], cfg).tolist() == [1.0, 0.5]


def test_the_clip_does_not_hide_the_penalty():
    cfg = RewardConfig(clip=(0.0, 1.0), overlong_penalty=1.0, overlong_buffer_tokens=2)
    assert shape([0.0], [16], [False], cfg).tolist() == [-1.0]


def test_a_buffer_longer_than_the_response_limit_is_refused_by_its_keys():
    cfg = RewardConfig(overlong_penalty=1.0, overlong_buffer_tokens=17)
    with pytest.raises(ConfigError, match=r"overlong_buffer_tokens=17.*max_new_tokens=16"):
        shape([1.0], [1], [False], cfg)


@pytest.mark.parametrize(
    ("cfg", "named"),
    [
        (RewardConfig(scale=1e300), r"'p1_g0' \(1e\+300\)"),
        (RewardConfig(offset=-1e39), r"'p0_g0' \(-1e\+39\), 'p1_g0' \(-1e\+39\)"),
        (RewardConfig(overlong_penalty=1e300, overlong_buffer_tokens=16), r"'p1_g0' \(-1e\+300\)"),
    ],
)
def test_a_reward_beyond_float32_after_shaping_is_refused_by_its_sample(cfg: RewardConfig, named: str):
    rewards, truncated = torch.tensor([0.0, 1.0]), torch.tensor([False, False])
    with pytest.raises(RewardError, match=rf"float32: {named}; expected.*grpo\.reward\.scale"):
        shape_rewards(rewards, torch.tensor([0, 16]), truncated, cfg, max_new_tokens=16, sample_ids=IDS[:2])


def test_a_clip_saves_a_reward_that_scaling_takes_beyond_float32():
    cfg = RewardConfig(scale=1e300, clip=(-1.0, 1.0))
    assert shape([0.5, -0.5], [1, 1], [False, False], cfg).tolist() == [1.0, -1.0]


def test_overlong_filtering_masks_cut_samples_only_when_on():
    truncated = torch.tensor([False, True])
    on = overlong_mask(truncated, RewardConfig(overlong_filtering=True))
    assert on.dtype == torch.float32
    assert on.tolist() == [1.0, 0.0]
    assert overlong_mask(truncated, RewardConfig()).tolist() == [1.0, 1.0]


def test_kl_is_taken_from_the_reward():
    cfg = RewardConfig(kl_coefficient=0.5)
    shaped = subtract_kl(torch.tensor([1.0, 0.0]), torch.tensor([0.5, -2.0]), cfg, IDS[:2])
    assert shaped.tolist() == [0.75, 1.0]


def test_without_a_coefficient_kl_is_not_read():
    rewards = torch.tensor([1.0])
    assert torch.equal(subtract_kl(rewards, torch.tensor([math.nan]), RewardConfig(), IDS[:1]), rewards)
    assert torch.equal(subtract_kl(rewards, None, RewardConfig(), IDS[:1]), rewards)


def test_a_coefficient_without_kl_is_refused():
    with pytest.raises(RewardError, match=r"kl_coefficient=0\.5"):
        subtract_kl(torch.tensor([1.0]), None, RewardConfig(kl_coefficient=0.5), IDS[:1])


def test_a_kl_charge_beyond_float32_names_the_sample():
    with pytest.raises(RewardError, match=r"'p1_g0'.*grpo\.reward\.kl_coefficient"):
        subtract_kl(torch.zeros(2), torch.tensor([0.0, 1.0]), RewardConfig(kl_coefficient=1e300), IDS[:2])


def test_kl_that_is_not_finite_names_the_sample():
    cfg = RewardConfig(kl_coefficient=0.5)
    with pytest.raises(RewardError, match="'p1_g0'"):
        subtract_kl(torch.zeros(2), torch.tensor([0.0, math.nan]), cfg, IDS[:2])
    with pytest.raises(RewardError, match="'p0_g0'; expected"):
        subtract_kl(torch.zeros(2), torch.tensor([math.inf, 0.0]), cfg, IDS[:2])

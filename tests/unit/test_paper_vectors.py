"""Numbers worked out by hand from the equations of the papers; nothing here is computed by the code under test.

Most of it is about one small batch, two answers to one prompt, with ratios r = policy / previous policy:

    answer   tokens   advantage   r
    a        1        +1          1.5
    b        3        -1          1, 0.5, 1.1
"""

from math import log
from typing import Any

import pytest
import torch

from headrace.algorithms.advantages import AdvantageResult, TokenKL, compute_advantages
from headrace.algorithms.loss import PolicyGradientLoss, kl_estimate
from headrace.algorithms.rewards import shape_rewards
from headrace.algorithms.sample_stats import kl_to_go_stats, token_advantages
from headrace.config import LossConfig, RewardConfig
from tiny_recipe import bare_recipe

RATIOS = [[1.5], [1.0, 0.5, 1.1]]
ADVANTAGES = [1.0, -1.0]


def padded(rows: list[list[float]], fill: float = 0.0) -> torch.Tensor:
    """Rows behind a prompt of one token, in float64."""
    width = max(map(len, rows))
    return torch.tensor([[fill, *row, *[fill] * (width - len(row))] for row in rows], dtype=torch.float64)


def loss_and_gradient(
    cfg: LossConfig,
    ratios: list[list[float]] = RATIOS,
    advantages: list[float] = ADVANTAGES,
    *,
    generator_ratios: list[list[float]] | None = None,
    reference_ratio: float = 1.0,
    prev: float = -3.0,
) -> tuple[float, list[float]]:
    """Return the loss, and its gradient by the logprob of each token, row after row.

    `generator_ratios` are previous policy / generator; `reference_ratio` is reference / policy at every token.
    """
    mask = padded([[1.0] * len(row) for row in ratios])
    before = prev * mask
    logprobs = (before + padded([[log(r) for r in row] for row in ratios])).requires_grad_()
    gaps = padded([[log(r) for r in row] for row in generator_ratios or [[1.0] * len(r) for r in ratios]])
    loss, _ = PolicyGradientLoss(cfg)(
        logprobs,
        {
            "token_mask": mask,
            "sample_mask": torch.ones(len(ratios)),
            "advantages": torch.tensor(advantages),
            "prev_logprobs": before,
            "generation_logprobs": before - gaps,
            "reference_policy_logprobs": logprobs.detach() + log(reference_ratio) * mask,
        },
        global_valid_seqs=torch.tensor(float(len(ratios))),
        global_valid_toks=mask.sum(),
    )
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad[mask > 0].tolist()


def advantages_of(
    algorithm: str,
    rewards: list[float],
    groups: list[int],
    tokens: list[int] | None = None,
    kl: TokenKL | None = None,
    **advantage: Any,
) -> AdvantageResult:
    cfg = bare_recipe(algorithm, grpo={"advantage": advantage}).grpo.advantage
    lengths = torch.tensor(tokens or [1] * len(rewards))
    return compute_advantages(
        torch.tensor(rewards), torch.tensor(groups), torch.ones(len(rewards)), lengths, cfg, kl=kl
    )


# Advantages.


def test_grpo_divides_the_distance_from_the_groups_mean_by_its_standard_deviation() -> None:
    # DeepSeekMath, section 4.1.2: A = (r - mean) / std. Rewards 1, 0, 0, 0: mean 1/4, deviations 3/4 and three times
    # -1/4, squares 9/16 + 3/16 = 3/4, over n - 1 = 3: 1/4, std 1/2.
    result = advantages_of("grpo", [1, 0, 0, 0], [0] * 4)
    assert result.advantages.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_dr_grpo_does_not_divide() -> None:
    # Dr. GRPO, section 3.2: A = r - mean.
    result = advantages_of("dr_grpo", [1, 0, 0, 0], [0] * 4)
    assert result.advantages.tolist() == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_rloo_takes_the_mean_of_the_others() -> None:
    # arXiv:2402.14740, section 3.3: r_i - mean of the others. 1 - (0 + .5) / 2, 0 - (1 + .5) / 2, .5 - (1 + 0) / 2.
    result = advantages_of("rloo", [1, 0, 0.5], [0] * 3)
    assert result.advantages.tolist() == pytest.approx([0.75, -0.75, 0.0])


def test_reinforce_plus_plus_normalises_over_the_tokens_of_the_batch() -> None:
    # REINFORCE++: A = (A - mean) / std over the batch. 10 tokens of return 1 and 90 of return 0: mean 0.1, variance
    # (10 x 0.81 + 90 x 0.01) / 100 = 0.09, std 0.3; 0.9 / 0.3 = 3 and -0.1 / 0.3 = -1/3.
    result = advantages_of("reinforce_plus_plus", [1, 0], [0, 1], [10, 90])
    assert result.advantages.tolist() == pytest.approx([3.0, -0.333333], abs=2e-5)


def test_reinforce_plus_plus_with_baseline_takes_the_groups_mean_first() -> None:
    # Groups (1, 0) and (1, 1) of one token each: A' = 0.5, -0.5, 0, 0; mean 0, variance 0.5 / 4, std 0.3535534.
    # With 1, 3, 1 and 1 tokens: mean (0.5 - 1.5) / 6 = -1/6; deviations 2/3, three of -1/3, two of 1/6; squares
    # 4/9 + 3/9 + 2/36 = 5/6, over 6: 5/36, std 0.3726780; 1.788854, -0.894427, 0.447214.
    rewards, groups = [1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1]
    even = advantages_of("reinforce_plus_plus", rewards, groups, minus_baseline=True)
    assert even.advantages.tolist() == pytest.approx([1.414214, -1.414214, 0, 0], abs=1e-5)
    uneven = advantages_of("reinforce_plus_plus", rewards, groups, [1, 3, 1, 1], minus_baseline=True)
    assert uneven.advantages.tolist() == pytest.approx([1.788854, -0.894427, 0.447214, 0.447214], abs=1e-5)


def test_reinforce_plus_plus_charges_each_token_for_the_kl_from_it_on() -> None:
    # A_t = r - beta x sum of KL(i) for i >= t, beta 0.2, KL = log(policy / reference). Answer a: reward 1, KL 0.5
    # and 1: KL to go 1.5 and 1, returns 0.7 and 0.8. Answer b: reward 0, KL 1: return -0.2. Mean 1.3 / 3 = 0.433333;
    # deviations 0.266667, 0.366667, -0.633333; squares 0.071111 + 0.134444 + 0.401111 = 0.606667, over 3: 0.202222,
    # std 0.449691; 0.593000, 0.815375, -1.408375.
    data = {
        "token_mask": padded([[1, 1], [1]]),
        "prev_logprobs": padded([[-1.0, -1.0], [-2.0]]),
        "reference_policy_logprobs": padded([[-1.5, -2.0], [-3.0]]),
    }
    sums = kl_to_go_stats(data, kl_kind="k1")
    assert sums["kl_to_go_sum"].tolist() == [2.5, 1.0]
    assert sums["kl_to_go_squares"].tolist() == [3.25, 1.0]
    kl = TokenKL(0.2, sums["kl_to_go_sum"], sums["kl_to_go_squares"])
    result = advantages_of("reinforce_plus_plus", [1, 0], [0, 1], [2, 1], kl)
    column = token_advantages(
        data | {"mean_advantages": result.advantages}, kl_kind="k1", kl_scale=result.kl_scale
    )["advantages"]
    assert column.tolist() == [
        pytest.approx([0, 0.593000, 0.815375], abs=1e-5),
        pytest.approx([0, -1.408375, 0], abs=1e-5),
    ]


def test_dapos_penalty_rises_over_the_buffer_before_the_limit() -> None:
    # DAPO, equation 13, with limit 20 and buffer 4: 0 up to 16 tokens, (16 - 18) / 4 = -0.5 at 18, -1 at 20.
    cfg = bare_recipe("dapo").grpo.reward
    assert cfg == RewardConfig(overlong_penalty=1.0, overlong_buffer_tokens=4)
    shaped = shape_rewards(
        torch.ones(3),
        torch.tensor([16, 18, 20]),
        torch.tensor([False] * 3),
        cfg,
        max_new_tokens=20,
        sample_ids=["a", "b", "c"],
    )
    assert shaped.tolist() == [1.0, 0.5, 0.0]


# Losses.


def test_grpo() -> None:
    # DeepSeekMath, equation 3. a: min(1.5, 1.2) = 1.2. b: min(-1, -1) = -1; min(-0.5, -0.8) = -0.8;
    # min(-1.1, -1.1) = -1.1; their mean -2.9 / 3 = -0.966667. J = (1.2 - 0.966667) / 2 = 0.116667.
    # Gradients of -J: a and the second token of b are clipped; r / (2 x 3) for the others of b: 1/6, 1.1/6.
    loss, gradient = loss_and_gradient(bare_recipe("grpo").loss)
    assert loss == pytest.approx(-0.116667, abs=1e-6)
    assert gradient == pytest.approx([0, 0.166667, 0, 0.183333], abs=1e-6)


def test_grpo_with_its_kl() -> None:
    # Equation 4: ref / policy - log(ref / policy) - 1 = 2 - 0.693147 - 1 = 0.306853 at every token, so that its mean
    # is that too; beta 0.04: -0.116667 + 0.012274 = -0.104393. Its gradient is 1 - ref / policy = -1 per token:
    # -0.04 / 2 for a, -0.04 / 6 for each of b, beside those without KL.
    cfg = bare_recipe("grpo", loss={"kl_coefficient": 0.04}).loss
    loss, gradient = loss_and_gradient(cfg, reference_ratio=2.0)
    assert loss == pytest.approx(-0.104393, abs=1e-6)
    assert gradient == pytest.approx([-0.02, 0.16, -0.006667, 0.176667], abs=1e-6)


def test_dapo() -> None:
    # DAPO, equation 8: clips 0.2 and 0.28, one mean over all tokens. min(1.5, 1.28) - 2.9 = -1.62, over 4: -0.405.
    loss, gradient = loss_and_gradient(bare_recipe("dapo").loss)
    assert loss == pytest.approx(0.405)
    assert gradient == pytest.approx([0, 0.25, 0, 0.275])


def test_dr_grpo() -> None:
    # Dr. GRPO: sums over tokens, divided by answers x a constant, here 20. (1.2 - 2.9) / (2 x 20) = -0.0425.
    loss, gradient = loss_and_gradient(bare_recipe("dr_grpo").loss)
    assert loss == pytest.approx(0.0425)
    assert gradient == pytest.approx([0, 0.025, 0, 0.0275])


def test_rloo() -> None:
    # The gradient of answer i's logprob is (r_i - baseline_i) / k, the same at each of its tokens: here -A / (2 x 20).
    _, gradient = loss_and_gradient(bare_recipe("rloo").loss, [[1.0], [1.0, 1.0, 1.0]])
    assert gradient == pytest.approx([-0.025, 0.025, 0.025, 0.025])


def test_reinforce_plus_plus() -> None:
    # PPO's clip at 0.2, one mean over all tokens: (1.2 - 2.9) / 4 = -0.425.
    loss, gradient = loss_and_gradient(bare_recipe("reinforce_plus_plus").loss)
    assert loss == pytest.approx(0.425)
    assert gradient == pytest.approx([0, 0.25, 0, 0.275])


def test_gspo() -> None:
    # GSPO, equations 5 and 7: s = 1.5 for a, (1 x 0.5 x 1.1) ** (1 / 3) = 0.819321 for b. With clips 3e-4 and 4e-4:
    # min(1.5, 1.0004) = 1.0004 and min(-0.819321, -0.9997) = -0.9997; J = (1.0004 - 0.9997) / 2 = 0.00035.
    loss, gradient = loss_and_gradient(bare_recipe("gspo").loss)
    assert loss == pytest.approx(-0.00035, abs=1e-8)
    assert gradient == [0.0] * 4


def test_gspo_within_its_clips() -> None:
    # J = (1.5 - 0.819321) / 2 = 0.340340. Equation 10: the gradient of s is s x the mean of d logprob: -1.5 / 2 for
    # a, 0.819321 / (2 x 3) = 0.136554 for each token of b.
    cfg = bare_recipe("gspo", loss={"clip_low": 0.6, "clip_high": 0.6}).loss
    loss, gradient = loss_and_gradient(cfg)
    assert loss == pytest.approx(-0.340340, abs=1e-6)
    assert gradient == pytest.approx([-0.75, 0.136554, 0.136554, 0.136554], abs=1e-6)


def test_gspo_weighs_answers_and_not_tokens() -> None:
    # Answers of 1 and 9 tokens, ratios 1, advantages 1 and -1: J = (1 - 1) / 2 = 0; a token has 1 / 2 and 1 / 18.
    loss, gradient = loss_and_gradient(bare_recipe("gspo").loss, [[1.0], [1.0] * 9])
    assert loss == pytest.approx(0, abs=1e-12)
    assert gradient == pytest.approx([-0.5, *[1 / 18] * 9])


def test_cispo() -> None:
    # MiniMax-M1, equation 4: mean over tokens of clip(r) A log p, the weight without gradient, no lower bound, at
    # most 5. Logprobs -3 + log 6 = -1.208241 and -3 + log 0.5 = -3.693147, A = 2: weights 5 and 0.5, terms
    # 5 x 2 x -1.208241 = -12.082405 and 0.5 x 2 x -3.693147 = -3.693147; -J = 15.775552 / 2 = 7.887776.
    loss, gradient = loss_and_gradient(bare_recipe("cispo").loss, [[6.0, 0.5]], [2.0])
    assert loss == pytest.approx(7.887776, abs=1e-6)
    assert gradient == pytest.approx([-5.0, -0.5])


@pytest.mark.parametrize(
    ("kind", "loss", "gradient"),
    [
        # TIS: min(w, 2) = 0.4, 1.5, 2; their mean 1.3.
        ("tis", -1.3, [-0.133333, -0.5, -0.666667]),
        # IcePop: w in [0.5, 2], else 0: 0, 1.5, 0; their mean 0.5.
        ("icepop", -0.5, [0, -0.5, 0]),
    ],
)
def test_corrections_for_the_generator(kind: Any, loss: float, gradient: list[float]) -> None:
    # w = previous policy / generator = 0.4, 1.5, 3; ratios 1, advantage 1, one mean over three tokens.
    cfg = LossConfig(importance_correction=kind, importance_low=0.5, importance_high=2.0)
    got, by_token = loss_and_gradient(cfg, [[1.0] * 3], [1.0], generator_ratios=[[0.4, 1.5, 3.0]])
    assert got == pytest.approx(loss)
    assert by_token == pytest.approx(gradient, abs=1e-6)


def test_estimators_of_the_kl() -> None:
    # Schulman's k1, k2 and k3 for policy 0.9 and reference 0.5: d = log 1.8 = 0.587787; d^2 / 2 = 0.172747;
    # 1 / 1.8 - 1 + d = 0.143342.
    policy, reference = torch.tensor([0.9]).log(), torch.tensor([0.5]).log()
    got = [kl_estimate(policy, reference, kind).item() for kind in ("k1", "k2", "k3")]
    assert got == pytest.approx([0.587787, 0.172747, 0.143342], abs=1e-6)

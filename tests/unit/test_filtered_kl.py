"""The KL to the reference, where top-k or top-p cut what is sampled: it is of both policies as they are without."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import reference_algorithms
from headrace.algorithms.grpo import _row_stats, score
from headrace.algorithms.loss import NLLLoss, PolicyGradientLoss, kl_estimate
from headrace.algorithms.rollout_table import RolloutTable
from headrace.algorithms.run import train
from headrace.algorithms.sample_stats import sample_stats, token_advantages
from headrace.config import LossConfig
from headrace.errors import SchemaError
from headrace.models.automodel.scoring import Scoring, TokenScorer
from headrace.models.policy.workers.automodel_worker import AutomodelPolicyWorker
from headrace.models.sampling import selected_logprobs
from recorder import NeverStop, Recorder
from reference_training import PolicyGradient, gradients, largest_gap, naive_logprobs
from tiny_models import tiny_batch, tiny_generation_config, tiny_model, tiny_policy_config, tiny_tokenizer
from tiny_recipe import tiny_recipe

LENGTHS = [9, 4, 12, 7, 5, 3, 11, 8]
FILTERS: list[dict[str, Any]] = [{"top_p": 0.5}, {"top_k": 1}, {"top_k": 9, "top_p": 0.7, "temperature": 0.8}]


def worker_for(filters: dict[str, Any]) -> Any:
    """A worker whose policy has learnt a little since its reference was taken."""
    worker = AutomodelPolicyWorker(
        tiny_policy_config("llama", logprob_chunk_tokens=5),
        tiny_generation_config(**filters),
        tokenizer=tiny_tokenizer(),
        seed=0,
        with_reference=True,
    )
    worker.train(tiny_batch(LENGTHS, seed=3), PolicyGradient())
    return worker


def truth(model: Any, temperature: float = 1.0) -> torch.Tensor:
    data = tiny_batch(LENGTHS)
    with torch.no_grad():
        return naive_logprobs(model, data["input_ids"], data["input_lengths"], temperature=temperature)


@pytest.mark.parametrize("filters", [{"top_p": 0.5}, {"top_k": 1}])
def test_the_kl_of_a_likely_token_does_not_vanish_under_filters(filters: dict[str, Any]) -> None:
    # Policy .90/.06/.04, reference .50/.30/.20, token 0: k3 = 5 / 9 - 1 + log(9 / 5).
    policy, reference = (torch.tensor([p]).log() for p in ([0.90, 0.06, 0.04], [0.50, 0.30, 0.20]))
    token = torch.tensor([0])
    cut, whole, of_reference = (
        torch.cat([torch.zeros(1), selected_logprobs(logits, token, **options)])[None]
        for logits, options in ((policy, filters), (policy, {}), (reference, {}))
    )
    assert cut.tolist() == [[0.0, 0.0]], "the filter leaves one token"
    data = {
        "token_mask": torch.tensor([[0, 1]]),
        "sample_mask": torch.ones(1),
        "advantages": torch.zeros(1),
        "generation_logprobs": cut,
        "prev_logprobs": cut,
        "reference_policy_logprobs": of_reference,
        "unfiltered_logprobs": whole,
        "prev_unfiltered_logprobs": whole,
    }
    one = torch.tensor(1.0)
    loss_fn = PolicyGradientLoss(LossConfig(kl_coefficient=2.0), filtered=True)
    loss, metrics = loss_fn(cut, data, global_valid_seqs=one, global_valid_toks=one)
    assert metrics["kl"].item() == pytest.approx(0.1433, abs=1e-4)
    assert loss.item() == pytest.approx(0.2867, abs=1e-4)
    assert sample_stats(data, kl_kind="k3")["kl_sum"].tolist() == pytest.approx([0.1433], abs=1e-4)


@pytest.mark.parametrize("filters", FILTERS)
def test_workers_score_the_reference_and_where_asked_the_policy_without_filters(
    filters: dict[str, Any],
) -> None:
    worker, data = worker_for(filters), tiny_batch(LENGTHS)
    temperature = filters.get("temperature", 1.0)
    reference = worker.get_reference_policy_logprobs(data)["reference_logprobs"]
    torch.testing.assert_close(reference, truth(worker._reference.model, temperature), rtol=0, atol=1e-5)
    both = worker.get_logprobs(data, unfiltered=True)
    torch.testing.assert_close(
        both["unfiltered_logprobs"], truth(worker.model, temperature), rtol=0, atol=1e-5
    )
    alone = worker.get_logprobs(data)
    assert list(alone) == ["logprobs"]
    assert torch.equal(both["logprobs"], alone["logprobs"])
    assert (both["logprobs"] - both["unfiltered_logprobs"]).abs().max() > 0.01


@pytest.mark.parametrize("filters", FILTERS)
def test_the_loss_adds_the_kl_of_the_policies_without_filters(filters: dict[str, Any]) -> None:
    worker, data = worker_for(filters), tiny_batch(LENGTHS)
    data["reference_policy_logprobs"] = worker.get_reference_policy_logprobs(data)["reference_logprobs"]
    loss_fn = PolicyGradientLoss(LossConfig(kl_coefficient=1.0, kl_kind="k2"), filtered=True)
    metrics = worker.train(data, loss_fn, eval_mode=True, gbs=len(LENGTHS))["metrics"][0]
    temperature, mask = filters.get("temperature", 1.0), tiny_batch(LENGTHS)["token_mask"][:, 1:]
    policy, reference = (truth(model, temperature) for model in (worker.model, worker._reference.model))
    expected = (kl_estimate(policy, reference, "k2")[:, 1:] * mask).sum() / mask.sum()
    assert expected > 1e-5
    assert metrics["kl"] == pytest.approx(expected.item(), rel=1e-3)


@pytest.mark.parametrize("chunk", [4, 1000])
def test_gradients_flow_through_both_numbers_of_a_token(chunk: int) -> None:
    model, plain = tiny_model("llama"), tiny_model("llama")
    scoring = Scoring(temperature=0.8, top_k=3, chunk_tokens=chunk)
    scores = TokenScorer(model, scoring)(tiny_batch(LENGTHS), with_unfiltered=True)
    weight = tiny_batch(LENGTHS)["advantages"]
    assert scores.unfiltered is not None
    (scores.logprobs * weight + scores.unfiltered * weight.square()).sum().backward()
    data = tiny_batch(LENGTHS)
    cut, whole = (
        naive_logprobs(plain, data["input_ids"], data["input_lengths"], temperature=0.8, **filters)
        for filters in ({"top_k": 3}, {})
    )
    (cut * weight + whole * weight.square()).sum().backward()
    assert largest_gap(gradients(model), gradients(plain)) < 1e-4


def test_without_filters_both_numbers_are_one() -> None:
    scores = TokenScorer(tiny_model("llama"), Scoring())(tiny_batch(LENGTHS), with_unfiltered=True)
    assert scores.unfiltered is scores.logprobs


def test_a_loss_with_kl_that_gets_no_unfiltered_logprobs_says_so() -> None:
    shape = (2, 3)
    loss_fn = PolicyGradientLoss(LossConfig(kl_coefficient=0.1), filtered=True)
    assert "unfiltered_logprobs" in loss_fn.required_columns
    columns = dict.fromkeys(loss_fn.required_columns - {"unfiltered_logprobs"}, torch.ones(shape))
    columns["sample_mask"] = torch.ones(2)
    one = torch.tensor(1.0)
    with pytest.raises(SchemaError, match="'unfiltered_logprobs': the KL"):
        loss_fn(torch.zeros(shape), columns, global_valid_seqs=one, global_valid_toks=one)
    assert "unfiltered_logprobs" not in PolicyGradientLoss(LossConfig(), filtered=True).required_columns


@pytest.mark.parametrize("kl", [0.3, 0.0])
def test_returns_are_of_the_tokens_that_the_trainers_filter_leaves(tmp_path: Path, kl: float) -> None:
    recipe = tiny_recipe(
        tmp_path,
        grpo={
            "num_prompts_per_step": 4,
            "num_generations_per_prompt": 4,
            "advantage": {"estimator": "reinforce_plus_plus"},
            "reward": {"kl_coefficient": kl},
        },
    )
    prev = torch.tensor([[0, -1.0, -torch.inf, -2.0], [0, -0.5, -0.75, 0]])
    reference = torch.tensor([[0, -1.25, -3.0, -1.0], [0, -1.0, -0.25, 0]])
    data = {
        "token_mask": torch.tensor([[0, 1, 1, 1], [0, 1, 1, 0]]),
        "generation_logprobs": torch.full((2, 4), -0.5),
        "prev_logprobs": prev,
        "reference_policy_logprobs": reference,
    }
    counts = [torch.tensor([3, 2])] * 3
    no, zeros = torch.zeros(2, dtype=torch.bool), torch.zeros(2)
    table = RolloutTable(
        ["a", "b"],
        ["p", "q"],
        torch.tensor([1.0, 0.0]),
        no,
        *counts,
        zeros,
        zeros,
        zeros,
        [None] * 2,
        [{}] * 2,
    )
    stats = _row_stats(data, kl_kind="k1", by_token=kl > 0)
    scored = score(recipe, table, stats, torch.ones(2))
    kls = [[0.25, -1.0], [0.5, -0.5]]  # of the tokens that are left
    expected = reference_algorithms.token_advantages(
        [1.0, 0.0], [0, 1], [True, True], kls, recipe.grpo.advantage, kl
    )
    data["mean_advantages"] = scored.advantages
    found = token_advantages(data, kl_kind="k1", kl_scale=scored.kl_scale)["advantages"]
    assert found[0, [1, 3]].tolist() == pytest.approx(expected[0], rel=1e-4)
    assert found[1, [1, 2]].tolist() == pytest.approx(expected[1], rel=1e-4)


def test_answers_of_the_warm_start_are_learnt_without_filters() -> None:
    worker, data = worker_for({"top_k": 1}), tiny_batch(LENGTHS)
    result = worker.train(data, NLLLoss(filtered=True), eval_mode=True, gbs=len(LENGTHS))
    mask = tiny_batch(LENGTHS)["token_mask"][:, 1:]
    expected = -(truth(worker.model)[:, 1:] * mask).sum() / mask.sum()
    assert result["loss"].item() == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize(
    ("generation", "kl", "said"), [({"top_p": 0.9}, 0.1, 1), ({"top_p": 0.9}, 0.0, 0), ({}, 0.1, 0)]
)
def test_a_run_says_once_that_filtered_samples_estimate_the_kl_with_a_bias(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, generation: dict[str, Any], kl: float, said: int
) -> None:
    recipe = tiny_recipe(
        tmp_path,
        generation={**generation, "max_new_tokens": 4},
        loss={"kl_coefficient": kl},
        grpo={"max_num_steps": 1},
        validation={"at_start": False, "at_end": False},
        checkpointing={"enabled": False},
        data={"train_size": 8, "validation_size": 2},
    )
    with caplog.at_level(logging.WARNING, logger="headrace"):
        train(recipe, tmp_path, Recorder(), NeverStop())
    assert sum("biased" in message for message in caplog.messages) == said

"""The in-memory loop and the data-plane loop, over every store, give the same numbers, bit for bit."""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.algorithms.loss import PolicyGradientLoss
from headrace.algorithms.run import build_session, start_loop
from headrace.config import RecipeConfig
from ray_session import MOONCAKE, SIMPLE, fresh_store
from recorder import NeverStop, Recorder
from tiny_recipe import tiny_recipe

STEPS = 3
LEARNERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dynamic_sampling": {
        "grpo": {
            "num_prompts_per_step": 4,
            "num_generations_per_prompt": 4,
            "max_num_steps": STEPS,
            "dynamic_sampling": {"enabled": True, "max_refills": 3},
        }
    },
    "reference_and_correction": {
        "loss": {
            "kl_coefficient": 0.05,
            "importance_correction": "tis",
            "max_sequence_logprob_error": 1.5,
        },
        "grpo": {
            "num_prompts_per_step": 4,
            "num_generations_per_prompt": 4,
            "max_num_steps": STEPS,
            "reward": {"kl_coefficient": 0.01, "overlong_filtering": True},
        },
        # Some letters end an answer, so that some samples are cut, and more are not.
        "generation": {"max_new_tokens": 8, "stop_token_ids": list(range(10, 18))},
    },
    "token_advantages_under_filters": {
        "generation": {"top_p": 0.8, "top_k": 40},
        "loss": {"kl_coefficient": 0.05, "importance_correction": "tis"},
        "grpo": {
            "advantage": {"estimator": "reinforce_plus_plus", "minus_baseline": True},
            "reward": {"kl_coefficient": 0.05},
        },
    },
    "two_updates_per_rollout": {"policy_gbs": 8},
    "on_policy_shortcut": {"loss": {"force_on_policy_ratio": True}},
}


class RecordingLoss:
    """A loss that keeps a copy of all that it is given."""

    def __init__(self, inner: PolicyGradientLoss) -> None:
        self.inner, self.loss_type = inner, inner.loss_type
        self.required_columns = inner.required_columns
        self.seen: list[dict[str, torch.Tensor]] = []

    def __call__(self, logprobs: torch.Tensor, data: Mapping[str, Any], **counts: torch.Tensor) -> Any:
        columns = {k: v.detach().clone() for k, v in data.items() if isinstance(v, torch.Tensor)}
        self.seen.append({**columns, "logprobs": logprobs.detach().clone()})
        return self.inner(logprobs, data, **counts)


def run_steps(recipe: RecipeConfig) -> dict[str, Any]:
    session = build_session(recipe)
    try:
        recorder = Recorder()
        loop = start_loop(session, recorder, NeverStop())
        loss = RecordingLoss(loop.session.loss_fn)
        loop.session.loss_fn = loss
        assert loop.run()
        weights = {name: w.clone() for name, w in session.policy.named_weights()}
    finally:
        session.close()
    return {"records": recorder.steps, "samples": recorder.samples, "seen": loss.seen, "weights": weights}


InMemory = Callable[[str, str], dict[str, Any]]
MEMORY: dict[str, Any] = {"enabled": False}
LOCAL: dict[str, Any] = {"impl": "local"}
STORES = {"transfer_queue/simple": SIMPLE, "transfer_queue/mooncake_cpu": MOONCAKE}
ENGINES = {"transfer_queue/simple": "transfer_queue_engine", "transfer_queue/mooncake_cpu": "mooncake_engine"}


def recipe_for(tmp_path: Path, batching: str, learner: str, *, data_plane: dict[str, Any]) -> RecipeConfig:
    changes = dict(LEARNERS[learner])
    gbs = changes.pop("policy_gbs", None)
    recipe = tiny_recipe(
        tmp_path,
        batching=batching,
        data_plane=data_plane,
        checkpointing={"enabled": False},
        **changes,
    )
    recipe = recipe.model_copy(update={"grpo": recipe.grpo.model_copy(update={"max_num_steps": STEPS})})
    if gbs:
        policy = recipe.policy.model_copy(update={"train_global_batch_size": gbs})
        recipe = recipe.model_copy(update={"policy": policy})
    return recipe


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory: pytest.TempPathFactory) -> InMemory:
    """Return what gives the run in memory, which every store is compared with and which is taken once."""

    @cache
    def run(batching: str, learner: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("memory")
        return run_steps(recipe_for(folder, batching, learner, data_plane=MEMORY))

    return run


@pytest.mark.parametrize("learner", LEARNERS)
@pytest.mark.parametrize("batching", ["fixed", "dynamic", "packed"])
def test_both_loops_are_bit_identical_over_three_steps(
    tmp_path: Path, batching: str, learner: str, in_memory: InMemory
) -> None:
    plane = run_steps(recipe_for(tmp_path, batching, learner, data_plane=LOCAL))
    memory = in_memory(batching, learner)
    check_bit_identical(plane, memory)
    for a, b in zip(plane["seen"], memory["seen"]):
        assert ("prev_logprobs" in a) == ("prev_logprobs" in b) == (learner != "on_policy_shortcut")
    if learner == "token_advantages_under_filters":
        check_token_advantages(plane["seen"])


def check_token_advantages(seen: list[dict[str, torch.Tensor]]) -> None:
    """The KL makes them differ within rows, and over the tokens of each step they have mean 0 and variance 1."""
    rows = [(a, m > 0) for part in seen for a, m in zip(part["advantages"], part["token_mask"])]
    assert all(advantages.shape == mask.shape for advantages, mask in rows)
    assert any(advantages[mask].std(correction=0) > 1e-3 for advantages, mask in rows)
    every = torch.cat([advantages[mask] for advantages, mask in rows])
    assert abs(every.mean().item()) < 1e-5
    assert every.square().mean().item() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("batching", ["fixed", "dynamic", "packed"])
@pytest.mark.parametrize("store", ENGINES)
def test_a_loop_over_another_store_is_bit_identical_to_the_one_in_memory(
    tmp_path: Path, store: str, batching: str, request: pytest.FixtureRequest, in_memory: InMemory
) -> None:
    request.getfixturevalue(ENGINES[store])
    learner = "token_advantages_under_filters"  # reads and writes every column that a step can have
    plane = run_steps(recipe_for(tmp_path, batching, learner, data_plane=fresh_store(STORES[store])))
    memory = in_memory(batching, learner)
    check_bit_identical(plane, memory)


def test_dynamic_sampling_leaves_no_row_in_transfer_queue(
    tmp_path: Path, transfer_queue_engine: None, in_memory: InMemory
) -> None:
    store = fresh_store(SIMPLE)
    plane = run_steps(recipe_for(tmp_path, "packed", "dynamic_sampling", data_plane=store))
    memory = in_memory("packed", "dynamic_sampling")
    check_bit_identical(plane, memory)
    assert any(r.metrics["dynamic_sampling/rounds"] > 1 for r in plane["records"]), "nothing was filtered"


def check_bit_identical(plane: dict[str, Any], memory: dict[str, Any], steps: int = STEPS) -> None:
    """Metrics, samples, weights, and every microbatch: its rows, their order and all columns that the loss sees."""
    assert len(plane["records"]) == len(memory["records"]) == steps
    for a, b in zip(plane["records"], memory["records"]):
        assert comparable(a.metrics) == comparable(b.metrics)
        assert a.tokens == b.tokens
    trained = [r.metrics for r in plane["records"] if r.metrics["train/skipped_updates"] == 0]
    assert any(metrics["train/loss"] != 0 for metrics in trained), "a loss of zero proves nothing"
    assert plane["samples"] == memory["samples"]
    assert len(plane["seen"]) == len(memory["seen"])
    for a, b in zip(plane["seen"], memory["seen"]):
        for name in a.keys() & b.keys():
            assert torch.equal(a[name], b[name]), name
        expected = {"logprobs", "input_ids", "token_mask", "advantages", "generation_logprobs"}
        assert expected <= a.keys() & b.keys()
    assert plane["weights"].keys() == memory["weights"].keys()
    for name, weight in plane["weights"].items():
        assert torch.equal(weight, memory["weights"][name]), name


def comparable(metrics: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in metrics.items() if not k.endswith(("_s", "per_s", "seconds"))}

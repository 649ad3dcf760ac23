"""What a training call reports of its updates, and how a run ends where one is not finite."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.algorithms.run import build_session, start_loop
from headrace.algorithms.updates import check_finite, update_metrics
from headrace.config import RecipeConfig
from headrace.errors import HeadraceError, RewardError
from headrace.models.interfaces import LossFn
from headrace.models.policy.results import StepResult, aggregate_train_results, collect_steps, combine_metrics
from recorder import NeverStop, Recorder
from tiny_recipe import tiny_recipe

STORES: dict[str, Any] = {"memory": {"enabled": False}, "local": {"impl": "local"}}


def aggregated(*ranks: list[StepResult]) -> dict[str, Any]:
    columns = [collect_steps(steps) for steps in ranks]
    return aggregate_train_results(columns, num_ranks=len(ranks), total_flops=1.0, theoretical_tflops=0.0)


def step(loss: float = 0.0, norm: float = 0.0, outcome: Any = "updated", **metrics: float) -> StepResult:
    return StepResult(loss, norm, metrics, 1, 1, outcome)


def test_minima_and_maxima_are_taken_over_updates_microbatches_and_ranks() -> None:
    first = [
        step(ratio_min=0.9, ratio_max=1.2, ratio_mean=0.5),
        step(ratio_min=0.8, ratio_max=1.1, ratio_mean=0.4),
    ]
    second = [
        step(ratio_min=0.7, ratio_max=1.3, ratio_mean=0.5),
        step(ratio_min=0.95, ratio_max=1.5, ratio_mean=0.4),
    ]
    metrics = aggregated(first, second)["all_mb_metrics"]
    assert metrics == pytest.approx({"ratio_min": 0.7, "ratio_max": 1.5, "ratio_mean": 0.9})


def test_an_update_without_tokens_leaves_the_others_metrics_as_they_are() -> None:
    empty = step(0.0, 0.0, "no_tokens", ratio_min=math.inf, ratio_max=-math.inf, ratio_mean=0.0)
    trained = aggregated([step(2.0, 3.0, ratio_min=0.9, ratio_max=1.2, ratio_mean=1.0), empty])
    assert trained["all_mb_metrics"] == {"ratio_min": 0.9, "ratio_max": 1.2, "ratio_mean": 1.0}
    assert (float(trained["loss"]), float(trained["grad_norm"])) == (2.0, 3.0)
    metrics = update_metrics(trained, 2)
    assert (metrics["train/skipped_updates"], metrics["train/nonfinite_updates"]) == (1.0, 0.0)
    alone = aggregated([empty])
    assert alone["all_mb_metrics"] == {}
    assert (float(alone["loss"]), alone["updates"], alone["skipped_updates"]) == (0.0, 0, 1)


def test_a_value_that_is_not_a_number_hides_behind_no_other() -> None:
    for parts in ([math.nan, 1.0], [1.0, math.nan]):
        combined = combine_metrics([{"a_min": v, "a_max": v, "a": v} for v in parts])
        assert all(math.isnan(value) for value in combined.values())


def test_replicas_that_do_not_agree_on_an_update_are_refused() -> None:
    with pytest.raises(HeadraceError, match="do not agree"):
        aggregated([step()], [step(outcome="no_tokens")])


def test_a_fault_without_a_suspect_names_the_global_batch() -> None:
    bad = StepResult(math.inf, math.nan, {}, 1, 1, "not_finite", [], [f"a_g{i}" for i in range(4)])
    other = StepResult(0.0, math.nan, {}, 1, 1, "not_finite", [], [f"b_g{i}" for i in range(4)])
    trained = aggregated([bad], [other])
    message = (
        r"step 7, update 1 of 1: loss inf and gradient norm nan.*no single sample.*'a_g0'.*'b_g0' and 3 more"
    )
    with pytest.raises(HeadraceError, match=message):
        check_finite(trained, "stop", "step 7")
    check_finite(trained, "skip_step", "step 7")


class PoisonedLoss:
    """Makes the second sample of the second group worthless from some call on."""

    def __init__(self, inner: LossFn, *, spared_calls: int) -> None:
        self.inner, self.loss_type, self.left = inner, inner.loss_type, spared_calls

    def __call__(self, logprobs: torch.Tensor, data: Mapping[str, Any], **counts: torch.Tensor) -> Any:
        self.left -= 1
        bad = torch.tensor([i.endswith("_g1") and self.left < 0 for i in data["sample_id"]])
        prev = torch.where(bad[:, None], torch.nan, data["prev_logprobs"])
        data["prev_logprobs"].copy_(prev)
        return self.inner(logprobs, data, **counts)


def poisoned_run(recipe: RecipeConfig) -> tuple[Recorder, dict[str, torch.Tensor], str | None]:
    session = build_session(recipe)
    try:
        recorder = Recorder()
        loop = start_loop(session, recorder, NeverStop())
        loop.session.loss_fn = PoisonedLoss(loop.session.loss_fn, spared_calls=4)
        try:
            loop.run()
            message = None
        except HeadraceError as error:
            message = str(error)
        return recorder, {n: w.clone() for n, w in session.policy.named_weights()}, message
    finally:
        session.close()


def two_steps(tmp_path: Path, store: str, **loss: Any) -> RecipeConfig:
    """Each step has one update of four microbatches."""
    return tiny_recipe(
        tmp_path,
        data_plane=STORES[store],
        grpo={"max_num_steps": 2},
        loss=loss,
        validation={"at_start": False, "at_end": False},
        checkpointing={"enabled": False},
    )


@pytest.mark.parametrize("store", STORES)
def test_a_loss_that_is_not_finite_stops_the_run_with_step_and_samples(tmp_path: Path, store: str) -> None:
    recorder, weights, message = poisoned_run(two_steps(tmp_path, store))
    assert message is not None
    assert message.startswith("step 2, update 1 of 1: loss nan and gradient norm")
    assert "at fault" in message
    assert message.count("@2.0_g1'") == 4
    assert "_g0'" not in message
    assert "loss.on_non_finite=skip_step" in message
    assert [record.step for record in recorder.steps] == [1]
    assert all(bool(w.isfinite().all()) for w in weights.values())


def test_skipping_goes_on_with_the_weights_before_and_counts_the_update(tmp_path: Path) -> None:
    recorder, weights, message = poisoned_run(two_steps(tmp_path, "local", on_non_finite="skip_step"))
    assert message is None
    assert [record.metrics["train/nonfinite_updates"] for record in recorder.steps] == [0, 1]
    assert [record.metrics["train/skipped_updates"] for record in recorder.steps] == [0, 1]
    assert math.isnan(recorder.steps[1].metrics["train/loss"])
    assert all(bool(w.isfinite().all()) for w in weights.values())


def test_rewards_that_overflow_in_shaping_stop_the_first_step_by_sample(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"max_num_steps": 1, "reward": {"scale": 1e300, "offset": 1e300}}
    recipe = tiny_recipe(
        tmp_path, grpo=changes, validation={"at_start": False}, checkpointing={"enabled": False}
    )
    session = build_session(recipe)
    try:
        with pytest.raises(RewardError, match=r"@1\.0_g0' \(1e\+300\).*grpo\.reward\.scale"):
            start_loop(session, Recorder(), NeverStop()).run()
    finally:
        session.close()

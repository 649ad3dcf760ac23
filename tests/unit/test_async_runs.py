"""Whole asynchronous runs of a tiny model: lag, collectors, resume, stops, validation, and what is refused."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.algorithms.async_utils.staleness_sampler import InOrderSampler
from headrace.algorithms.observer import StepRecord
from headrace.algorithms.run import train
from headrace.config import RecipeConfig
from headrace.errors import ConfigError, HeadraceError
from headrace.utils.recipe import load_recipe
from recorder import NeverStop, Recorder, StopAfter
from tiny_recipe import tiny_recipe


class TooGenerous(InOrderSampler):
    """A sampler of a user's own that lets everything pass."""

    def may_begin(self, made_for: int, version: int) -> bool:
        return True


def run(
    directory: Path,
    stopper: Any = None,
    asynchrony: dict[str, Any] | None = None,
    observer: Recorder | None = None,
    **changes: Any,
) -> Recorder:
    directory.mkdir(exist_ok=True)
    recorder = observer or Recorder()
    section = {"enabled": True, **(asynchrony or {})}
    changes = {"loss": {"importance_correction": "tis"}, **changes}
    recipe = tiny_recipe(directory, batching="packed", **{"async": section}, **changes)
    train(recipe, directory, recorder, stopper or NeverStop())
    return recorder


@pytest.mark.parametrize(
    "asynchrony",
    [
        {"max_lag": 2, "collectors": 2},
        {"max_lag": 1, "on_stale": "drop", "order": "freshest", "prompts_per_call": 1},
        {"max_lag": 1, "on_update": "resume", "piece_tokens": 3},
    ],
    ids=["in order, two collectors", "whatever is ready", "answers go on with new weights"],
)
def test_a_run_with_a_lag_trains_within_its_bound(tmp_path: Path, asynchrony: dict[str, Any]) -> None:
    made = run(tmp_path, asynchrony=asynchrony)
    assert [record.step for record in made.steps] == [1, 2, 3, 4, 5]
    lags = [record.metrics["async/lag_max"] for record in made.steps]
    assert max(lags) <= asynchrony["max_lag"]
    assert lags[0] == 0
    assert all("wait" in record.timings_s for record in made.steps)
    assert made.summary["completed"]


def test_dynamic_sampling_trains_on_groups_with_a_signal_and_reports_all_samples(tmp_path: Path) -> None:
    sampling = {"dynamic_sampling": {"enabled": True, "max_refills": 5}}
    made = run(tmp_path, asynchrony={"max_lag": 1, "prompts_per_call": 2}, grpo=sampling)
    assert len(made.steps) == 5
    flat = [record for record in made.steps if record.metrics.get("async/flat_groups")]
    assert flat, "nothing was dropped"
    assert all(r.metrics["reward/mean"] != r.metrics["reward/kept_mean"] for r in flat)
    assert all(r.metrics["train/grad_norm"] > 0 for r in made.steps)


def slowly(completion: str) -> float:
    time.sleep(0.5)
    return float(len(completion) % 2)


def test_the_first_part_of_a_step_stays_leased_while_the_next_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "sums.csv").write_text("question,answer\n" + "".join(f"{n}+1,{n + 1}\n" for n in range(16)))
    told = tiny_recipe(
        tmp_path,
        batching="packed",
        grpo={"max_num_steps": 1},
        data={"validation_size": 8, "train_size": 8},
        validation={"at_start": False, "at_end": False},
        # A part is two calls of four answers, which take two seconds each.
        **{"async": {"enabled": True, "max_lag": 0, "prompts_per_call": 1, "micro_steps": 2, "lease_s": 3.0}},
    ).model_dump()
    told["policy"]["tokenizer"]["characters"] = "0123456789+"
    told["env"] = {
        "kind": "dataset",
        "path": str(tmp_path / "sums.csv"),
        "rewards": ["test_async_runs:slowly"],
    }
    made = Recorder()
    train(RecipeConfig.model_validate(told), tmp_path, made, NeverStop())
    (step,) = made.steps
    assert step.timings_s["wait"] > 2 * 3.0


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_a_step_in_parts_is_the_whole_step_but_for_rounding(tmp_path: Path, aggregation: str) -> None:
    loss = {"aggregation": aggregation, "importance_correction": "tis", "max_sequence_logprob_error": 1.5}
    lag, steps = {"max_lag": 0, "prompts_per_call": 1}, {"max_num_steps": 2}
    whole = run(tmp_path / "whole", asynchrony=lag, loss=loss, grpo=steps)
    parts = run(tmp_path / "parts", asynchrony={**lag, "micro_steps": 2}, loss=loss, grpo=steps)
    for a, b in zip(whole.steps, parts.steps, strict=True):
        told = {k: v for k, v in a.metrics.items() if not k.startswith(("async", "generation", "generator"))}
        told = {k: v for k, v in told.items() if not k.endswith(("_s", "flops"))}
        assert {k: b.metrics[k] for k in told} == pytest.approx(told, rel=1e-3, abs=1e-5)
        assert a.metrics["train/grad_norm"] > 0


def test_a_stopped_run_without_a_lag_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def numbers(made: Recorder) -> dict[int, dict[str, float]]:
        own = ("async/", "generation/seconds")
        return {
            r.step: {k: v for k, v in r.metrics.items() if not k.startswith(own) and not k.endswith("_s")}
            for r in made.steps
        }

    lag = {"max_lag": 0}
    whole = run(tmp_path / "whole", asynchrony=lag)
    first = run(tmp_path / "parts", StopAfter(10), asynchrony=lag)
    assert 0 < len(first.steps) < 5
    second = run(tmp_path / "parts", asynchrony=lag)
    assert {**numbers(first), **numbers(second)} == numbers(whole)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_run_that_goes_on_beyond_its_last_step_measures_the_weights_that_it_ends_with(
    tmp_path: Path, enabled: bool
) -> None:
    changes: dict[str, Any] = {
        "asynchrony": {"enabled": enabled, "max_lag": 0, "validation": "beside"},
        "validation": {"at_start": False, "batch_size": 8},
    }
    first = run(tmp_path, StopAfter(10), **changes)
    steps = len(first.steps)
    assert (steps > 1, first.validations) == (True, [])
    made = run(tmp_path, grpo={"max_num_steps": steps - 1}, **changes)
    assert (made.steps, [step for step, _ in made.validations]) == ([], [steps])
    assert made.summary["val_reward_after"] is not None


def with_groups(per_step: int, **grpo: Any) -> dict[str, Any]:
    return {
        "grpo": {"num_prompts_per_step": per_step, **grpo},
        "policy": {"train_global_batch_size": 4 * per_step},
    }


@pytest.mark.parametrize("groups", [8, 6])
def test_a_run_that_goes_on_with_steps_of_another_size_takes_those_of_the_synchronous_loop(
    tmp_path: Path, groups: int
) -> None:
    losses = {}
    for enabled in (True, False):
        made, folder = list[StepRecord](), tmp_path / str(enabled)
        for sizes in (with_groups(4, max_num_steps=3), with_groups(groups)):
            made += run(folder, asynchrony={"enabled": enabled, "max_lag": 0}, **sizes).steps
        assert [record.step for record in made] == [1, 2, 3, 4, 5]
        losses[enabled] = [(r.metrics["train/loss"], r.metrics["train/grad_norm"]) for r in made]
    assert losses[True] == losses[False]


def prompts_of(made: Recorder) -> list[list[str]]:
    return [[s["sample_id"].partition("@")[0] for s in samples[::4]] for _, _, samples in made.samples]


def test_prompts_that_were_used_out_of_turn_are_passed_over_by_a_synchronous_run_too(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"logging": {"samples_per_step": 16}, "validation": {"at_end": False}}
    off, on = {"enabled": False}, {"max_lag": 0}
    stream = sum(prompts_of(run(tmp_path / "whole", asynchrony=off, **changes)), list[str]())
    folder = tmp_path / "parts"
    run(folder, asynchrony=off, grpo={"max_num_steps": 2}, **changes)
    # As of a run with async.on_stale=drop.
    file = folder / "checkpoints" / "step_000002" / "checkpoint.json"
    saved = json.loads(file.read_text())
    saved["state"]["progress"]["prompts_ahead"] = [10, 13]
    file.write_text(json.dumps(saved))
    made = run(folder, asynchrony=off, grpo={"max_num_steps": 4}, **changes)
    assert prompts_of(made) == [[stream[at] for at in step] for step in ((8, 9, 11, 12), (14, 15, 16, 17))]
    (last,) = prompts_of(run(folder, asynchrony=on, **changes))
    assert last[:2] == stream[18:]


class Crash(Recorder):
    """Ends the run in step 5, when groups of the next step have been put."""

    def on_stage(self, step: int, stage: str) -> None:
        if (step, stage) == (5, "train"):
            time.sleep(0.4)
            raise KeyboardInterrupt


WHATEVER_IS_READY = {"on_stale": "drop", "order": "freshest"}


@pytest.mark.parametrize(
    ("groups", "then", "now"),
    [
        (8, {"room": 16}, {"room": 16}),
        (8, {"room": 16, **WHATEVER_IS_READY}, {"room": 16, **WHATEVER_IS_READY}),
        (4, WHATEVER_IS_READY, {}),
    ],
    ids=["larger steps", "larger steps of whatever is ready", "in order, after steps of whatever is ready"],
)
def test_groups_of_prompts_that_were_cut_otherwise_are_made_again_after_a_crash_and_ids_come_anew(
    tmp_path: Path, groups: int, then: Any, now: Any, caplog: pytest.LogCaptureFixture
) -> None:
    changes = {
        "data": {"train_size": 2},  # so that a prompt comes again at once
        "data_plane": {"journal": {"enabled": True}},
        "checkpointing": {"save_period": 3},
    }
    cut = {"max_lag": 2, "prompts_per_call": 2}
    with pytest.raises(KeyboardInterrupt):
        run(
            tmp_path,
            observer=Crash(),
            asynchrony={**cut, **then},
            **with_groups(4, max_num_steps=9),
            **changes,
        )
    made = run(tmp_path, asynchrony={**cut, **now}, **with_groups(groups), **changes)
    assert [(r.step, r.metrics["async/failed_calls"]) for r in made.steps] == [(4, 0), (5, 0)]
    assert not [message for message in caplog.messages if "rows" in message]


def test_an_asynchronous_run_begins_the_step_anew_in_which_a_synchronous_one_crashed(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "data_plane": {"journal": {"enabled": True}},
        "checkpointing": {"save_period": 3},
    }
    # So that the step's partition has room for the asynchronous run's groups.
    sampling = {"dynamic_sampling": {"enabled": True}}
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, observer=Crash(), asynchrony={"enabled": False}, grpo=sampling, **changes)
    made = run(tmp_path, asynchrony={"on_stale": "drop"}, **changes)
    assert [record.step for record in made.steps] == [4, 5]


def test_a_validation_beside_training_is_of_the_weights_that_it_names(tmp_path: Path) -> None:
    validation = {"period": 2, "batch_size": 8}
    lag = {"max_lag": 0}
    between = run(tmp_path / "between", asynchrony=lag, validation=validation)
    beside = run(tmp_path / "beside", asynchrony={**lag, "validation": "beside"}, validation=validation)
    assert [step for step, _ in between.validations] == [0, 2, 4, 5]
    assert {0, 5} <= {step for step, _ in beside.validations}
    known = dict(between.validations)
    assert all(metrics == known[step] for step, metrics in beside.validations if step in known)


def test_a_sampler_of_ones_own_cannot_break_the_bound(tmp_path: Path) -> None:
    own = {"max_lag": 0, "sampler": "test_async_runs:TooGenerous", "room": 12, "prompts_per_call": 4}
    with pytest.raises(HeadraceError, match=r"weights of sample '.*' are \d steps old, and async.max_lag=0"):
        run(tmp_path, asynchrony=own)


TWO_RANKS_OF_EIGHT = ("policy.workers=2", "policy.train_micro_batch_size=8")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["loss.importance_correction=none"], "set loss.importance_correction=tis"),
        (
            ["loss.force_on_policy_ratio=true"],
            "loss.force_on_policy_ratio=true takes samples to be of the present",
        ),
        (["data_plane.enabled=false"], "data_plane.enabled=true or null"),
        (["policy.workers=2"], "data_plane.impl=transfer_queue where policy.workers=2"),
        (["grpo.dynamic_sampling.enabled=true", "async.room=7"], "set 8 or more, or remove it"),
        (["data_plane.storage_capacity=31"], "cannot hold the 32 samples of async.room=8 groups"),
        (["async.prompts_per_call=3"], "does not divide grpo.num_prompts_per_step=4"),
        (["async.collectors=3"], "async.collectors=3 do not divide"),
        (["async.room=3"], "async.room=3 cannot hold"),
        (["async.micro_steps=3"], "async.micro_steps=3 does not divide"),
        (["async.micro_steps=2", "policy.train_global_batch_size=8"], "is one update in parts"),
        (["async.micro_steps=2", "policy.train_micro_batch_size=16"], "parts of 8 samples"),
        (
            ["async.micro_steps=2", "data_plane.impl=transfer_queue", *TWO_RANKS_OF_EIGHT],
            "parts of 8 samples, which are not divisible by 16",
        ),
        (["async.micro_steps=2", "algorithm=reinforce_plus_plus"], "takes advantages within groups"),
        (["async.on_update=resume", "generation.stop_strings=[x]"], "generation.stop_strings may lie across"),
        (
            ["async.on_update=resume", "async.kv_cache=keep"],
            "set generation.backend=vllm, or async.kv_cache=rec",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(tmp_path: Path, overrides: list[str], said: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "run_dir: r\npolicy: {model: {path: m}, train_global_batch_size: 16}\ngeneration: {max_new_tokens: 20}\n"
        "grpo: {num_prompts_per_step: 4, num_generations_per_prompt: 4}\nenv: {kind: dataset, path: d}\n"
        "loss: {importance_correction: tis}\nasync: {enabled: true}\n"
    )
    load_recipe(path, [])
    with pytest.raises(ConfigError) as told:
        load_recipe(path, overrides)
    assert said in str(told.value)
    assert "\n" not in str(told.value)


def test_a_sampler_that_lacks_a_method_is_told_which(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"async.sampler=collections:Counter has no may_begin\(\)"):
        run(tmp_path, asynchrony={"sampler": "collections:Counter"})

"""What a run tells of the inside of its steps: numbers of its rows, bounded by keys, and nothing with them at 0."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.algorithms.observer import STAGES, RunObserver
from headrace.dashboard.detail import STEPS_SHOWN, Detail
from headrace.dashboard.runs import find_runs
from headrace.data_plane.observability import MetricsDataPlaneClient, listening
from headrace.distributed.balance import row_costs
from headrace.distributed.plan_report import bins_of
from headrace.distributed.planner import plan_microbatches
from headrace.training import run_recipe
from headrace.utils.run_directory import RunDirectory
from tiny_recipe import tiny_recipe


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("detail") / "run"
    changes = {"grpo": {"max_num_steps": 2}, "logging": {"samples_per_step": 3, "tokens_per_sample": 14}}
    run_recipe(tiny_recipe(path, batching="packed", **changes))
    return path


def test_each_stage_of_each_step_has_a_span_and_says_who_works(run_dir: Path) -> None:
    spans = [line for line in lines(run_dir / "detail.jsonl") if line["kind"] == "span"]
    ran = [[span["name"] for span in spans if span["step"] == step] for step in (1, 2)]
    expected = ["rollout", "prev_logprobs", "advantages", "train", "update_weights"]
    assert ran == [expected, [*expected, "validation", "checkpoint"]]
    assert {name for step in ran for name in step} <= set(STAGES)
    recorded = [line for line in lines(run_dir / "metrics.jsonl") if line["kind"] == "step"]
    for span in spans:
        if span["name"] in ("rollout", "train"):
            assert span["seconds"] == pytest.approx(
                recorded[span["step"] - 1][f"time_s/{span['name']}"], abs=0.02
            )
    assert {tuple(span["tracks"]) for span in spans} == {
        ("rollout",),
        ("ranks",),
        ("driver",),
        ("rollout", "ranks"),
    }


def test_operations_of_the_store_lie_within_their_stage(run_dir: Path) -> None:
    spans = [line for line in lines(run_dir / "detail.jsonl") if line["kind"] == "span"]
    operations = [(span, *one) for span in spans for one in span["operations"]]
    assert {name for _, name, _, _ in operations} == {"put_samples", "get_samples"}
    for span, _, start_s, seconds in operations:
        assert span["start_s"] - 0.01 <= start_s
        assert start_s + seconds <= span["start_s"] + span["seconds"] + 0.01


def test_the_store_is_shown_with_rows_and_bytes_by_column_after_each_stage(run_dir: Path) -> None:
    stores = [
        line for line in lines(run_dir / "detail.jsonl") if line["kind"] == "store" and line["step"] == 1
    ]
    assert [store["stage"] for store in stores] == ["rollout", "prev_logprobs", "advantages", "train"]
    (first,), (last,) = stores[0]["partitions"], stores[-1]["partitions"]
    assert "prev_logprobs" not in first["columns"]
    assert last["columns"]["prev_logprobs"]["ready"] == last["rows"] == 16
    metrics = next(line for line in lines(run_dir / "metrics.jsonl") if line["kind"] == "step")
    # Put once, and read by prev_logprobs, train and, of two rows, the tokens.
    assert 2 < metrics["bytes/input_ids"] / last["columns"]["input_ids"]["bytes"] < 4
    assert set(last["tasks"]) == {"prev_lp", "ref_lp", "train"}
    assert last["left_count"] == 16


def test_tokens_of_samples_are_written_with_their_logprobs_gaps_and_advantages(run_dir: Path) -> None:
    samples = lines(run_dir / "samples.jsonl")
    assert ["tokens" in sample for sample in samples] == [True, True, False] * 2
    for sample in samples:
        if "tokens" not in sample:
            continue
        tokens = sample["tokens"]
        prompt, answer = (message["content"] for message in sample["messages"])
        own = [text for text, is_own in zip(tokens["text"], tokens["mask"]) if is_own]
        assert tokens["text"][1 : 1 + len(prompt)] == list(prompt)
        letters = "".join(text for text in own if len(text) == 1)  # an answer leaves control tokens out
        assert letters
        assert answer.startswith(letters)
        assert len(tokens["text"]) <= 14
        for name in ("logprob", "gap", "advantage"):
            assert [value is not None for value in tokens[name]] == [bool(m) for m in tokens["mask"]]
        drawn = [value for value in tokens["advantage"] if value is not None]
        assert drawn == [pytest.approx(sample["advantage"], abs=1e-3)] * len(own)
        # Made and scored by the same weights in float32.
        assert max(abs(gap) for gap in tokens["gap"] if gap is not None) < 1e-3
        assert all(value < 0 for value in tokens["logprob"] if value is not None)


def test_the_page_has_all_of_it(run_dir: Path) -> None:
    (run,) = find_runs([run_dir])
    run.poll()
    detail = run.payload()["detail"]
    assert [store["stage"] for store in detail["stores"]] == [
        "rollout",
        "prev_logprobs",
        "advantages",
        "train",
    ]
    assert {store["step"] for store in detail["stores"]} == {2}
    assert [record["step"] for record in detail["packing"]] == [2]
    assert detail["begun"]["stage"] == "checkpoint"


def test_rows_in_memory_have_spans_and_microbatches_and_no_store(tmp_path: Path) -> None:
    run_recipe(tiny_recipe(tmp_path / "run", grpo={"max_num_steps": 1}, data_plane={"enabled": False}))
    kinds = {line["kind"] for line in lines(tmp_path / "run" / "detail.jsonl")}
    assert kinds == {"begin", "span", "packing"}
    assert "gap" in lines(tmp_path / "run" / "samples.jsonl")[0]["tokens"]


def test_keys_at_0_write_nothing(tmp_path: Path) -> None:
    off = {"detail_every": 0, "tokens_of_samples": 0}
    run_recipe(tiny_recipe(tmp_path / "run", grpo={"max_num_steps": 1}, logging=off))
    assert not (tmp_path / "run" / "detail.jsonl").exists()
    assert "tokens" not in lines(tmp_path / "run" / "samples.jsonl")[0]


def test_an_observer_of_ones_own_is_told_every_so_many_steps(tmp_path: Path) -> None:
    told: list[int] = []

    class Own(RunObserver):
        def on_detail(self, step: int, kind: str, values: dict[str, Any]) -> None:
            told.append(step)

    changes = {
        "grpo": {"max_num_steps": 5},
        "logging": {"detail_every": 3},
        "validation": {"at_start": False},
    }
    run_recipe(tiny_recipe(tmp_path / "run", **changes), [Own()])
    assert set(told) == {1, 3}


PACKED = {
    "algorithm": "first_fit_decreasing",
    "sequence_length_pad_multiple": 4,
    "max_tokens_per_microbatch": 64,
}
KEYS = {"input_key": "input_ids", "input_lengths_key": "input_lengths"}
PLANS = {
    "packed": {"sequence_packing_args": {**PACKED, **KEYS}},
    "similar-length": {
        "dynamic_batching_args": {"max_tokens_per_microbatch": 64, "sequence_length_round": 8, **KEYS}
    },
    "padded": {},
}


@pytest.mark.parametrize("form", PLANS)
def test_microbatches_hold_each_row_once_and_no_more_than_their_tokens(form: str) -> None:
    lengths = np.random.default_rng(0).integers(3, 40, 24).tolist()
    plan = plan_microbatches(lengths, shards=2, batch_size=12, **PLANS[form])  # type: ignore[arg-type]
    report = bins_of(plan, 3)
    assert report["form"] == form
    bins = [one for rank in report["ranks"] for one in rank["bins"]]
    assert sorted(row for one in bins for row in one["rows"]) == sorted(lengths)
    assert all(sum(one["rows"]) <= one["tokens"] for one in bins)
    if form != "padded":
        assert all(one["tokens"] <= 64 == report["budget"] for one in bins)
    else:
        assert {one["tokens"] / len(one["rows"]) for one in bins} == {max(lengths)}
    costs = row_costs(np.array(lengths), plan.attention_ratio)
    assert sum(rank["cost"] for rank in report["ranks"]) == costs.sum()
    assert len({len(rank["bins"]) for rank in report["ranks"]}) == 1


def test_detail_takes_no_more_room_than_its_key_says(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for step in range(400):
        run.append_detail({"kind": "span", "step": step, "name": "x" * 80}, 20_000)
        held = [path for path in (run.detail_path, run.older_detail_path) if path.exists()]
        assert sum(path.stat().st_size for path in held) <= 20_000
    kept = [line["step"] for path in (run.older_detail_path, run.detail_path) for line in lines(path)]
    assert kept == list(range(kept[0], 400))
    assert len(kept) > 70


def test_the_page_keeps_the_last_steps_and_passes_over_lines_that_it_does_not_know() -> None:
    detail = Detail()
    for step in range(100):
        detail.add(
            {
                "kind": "span",
                "step": step,
                "tracks": ["ranks"],
                "name": "train",
                "start_s": step,
                "seconds": 1,
            }
        )
    for strange in (None, [], {"kind": "span"}, {"kind": "other", "step": 1}, {"kind": "span", "step": "x"}):
        detail.add(strange)
    assert [span["step"] for span in detail.payload()["spans"]] == list(range(100 - STEPS_SHOWN, 100))
    assert detail.count == 100


def test_listeners_hear_every_client_of_the_process_while_they_listen() -> None:
    from headrace.data_plane.adapters.local import LocalDataPlaneClient

    heard: list[str] = []
    first, second = (MetricsDataPlaneClient(LocalDataPlaneClient(), lambda event: None) for _ in range(2))
    with listening(lambda event: heard.append(event.op)):
        first.register_partition("a", ["x"], 2, ["train"])
        second.clear_samples(None, "b")
    first.clear_samples(None, "a")
    assert heard == ["register_partition", "clear_samples"]
    assert math.isfinite(first.snapshot()["bytes_held"])

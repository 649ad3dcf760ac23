"""The whole loop on a Ray cluster, policy and rollouts in actors, over TransferQueue: the run of one process."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from headrace.algorithms.run import build_session, start_loop
from headrace.config import RecipeConfig
from ray_session import SIMPLE, fresh_store
from recorder import NeverStop, Recorder
from tiny_recipe import MODEL, tiny_recipe

CLOSE: dict[str, float] = {"rtol": 0.0, "atol": 1e-5}
OBSERVED = {"observability": {"enabled": True}}
NAMES = ("train/loss", "train/grad_norm", "train/entropy", "reward/mean", "train/lr")


def run_steps(recipe: RecipeConfig) -> dict[str, Any]:
    session = build_session(recipe)
    try:
        recorder = Recorder()
        assert start_loop(session, recorder, NeverStop()).run()
        weights = {name: w.clone() for name, w in session.policy.named_weights()}
    finally:
        session.close()
    return {"recorder": recorder, "steps": recorder.steps, "weights": weights}


def on_the_cluster(directory: Path, workers: int, **changes: Any) -> RecipeConfig:
    policy = {"workers": workers, "parallel": {"launcher": "ray"}, **changes.pop("policy", {})}
    store = {**fresh_store(SIMPLE), **OBSERVED}
    return tiny_recipe(
        directory, batching="packed", cpu_threads=1, policy=policy, data_plane=store, **changes
    )


def in_one_process(directory: Path, **changes: Any) -> RecipeConfig:
    off = {"enabled": False}
    return tiny_recipe(directory, batching="packed", cpu_threads=1, data_plane=off, **changes)


def numbers(steps: list[Any]) -> torch.Tensor:
    return torch.tensor([[r.metrics[name] for name in NAMES] for r in steps])


REFILLED: dict[str, Any] = {
    "loss": {"kl_coefficient": 0.05},
    "grpo": {
        "num_prompts_per_step": 4,
        "num_generations_per_prompt": 4,
        "dynamic_sampling": {"enabled": True, "max_refills": 3},
    },
}
REPLAYED: dict[str, Any] = {"policy": {"router_replay": {"enabled": True}}}
LEARNERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dynamic_sampling_with_reference": REFILLED,
    "router_replay": REPLAYED,
    "all_of_these": {**REFILLED, **REPLAYED},
    # Sharded ranks send their weights straight to engines in actors of their own: the first one, or each its own.
    **{
        f"engines_{placement}": {
            "generation": {"placement": placement, "engines": 2, "guard": {"enabled": False}}
        }
        for placement in ("apart", "beside")
    },
}


# What says which part is at fault where one of these two fails; the two placements differ in how weights go.
@pytest.mark.parametrize(
    "learner",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in ("all_of_these", "engines_beside")))
        for name in LEARNERS
    ],
)
def test_actors_take_the_steps_of_one_process(
    tmp_path: Path, learner: str, transfer_queue_engine: None
) -> None:
    changes = LEARNERS[learner]
    grpo = {"max_num_steps": 3, **changes.get("grpo", {})}
    changes = {**changes, "grpo": grpo, "validation": {"period": 1, "batch_size": 8}}
    cluster = run_steps(on_the_cluster(tmp_path, 2, **changes))
    alone = run_steps(in_one_process(tmp_path, **{**changes, "generation": {}}))
    torch.testing.assert_close(numbers(cluster["steps"]), numbers(alone["steps"]), **CLOSE)
    assert numbers(alone["steps"])[:, 0].abs().max() > 1e-3, "a loss of zero proves nothing"
    assert [r.tokens for r in cluster["steps"]] == [r.tokens for r in alone["steps"]]
    assert cluster["recorder"].validations == alone["recorder"].validations
    pairs = zip(cluster["recorder"].samples, alone["recorder"].samples)
    for (_, _, got), (_, _, want) in pairs:
        assert [s["messages"] for s in got] == [s["messages"] for s in want]
        assert [s["sample_id"] for s in got] == [s["sample_id"] for s in want]
    for name, weight in alone["weights"].items():
        torch.testing.assert_close(cluster["weights"][name], weight, rtol=0.0, atol=1e-4)
    if learner.startswith("engines_"):
        assert all(r.metrics["generator/weights_gb"] > 0 for r in cluster["steps"])
    if REPLAYED.items() <= changes.items():
        for record in cluster["steps"]:
            counts = {
                stage: record.metrics[f"router_replay/{stage}/replayed"]
                for stage in ("prev_logprobs", "train")
            }
            assert all(count > 0 for count in counts.values())


ROWS, SAMPLES = 16, 1


class Bytes(NamedTuple):
    """Of one step: bytes through the driver, bytes through the store, and tokens."""

    driver: float
    store: float
    tokens: int


def traffic(directory: Path, prompt_tokens: int) -> list[Bytes]:
    """Return what every step after the first moves, whose rows have this many tokens and their answers."""
    directory.mkdir()
    path = directory / "prompts.jsonl"
    letters = "abcdefghijklmnopqrstuvwxyz"
    rows = [
        {"question": f"{letters[i]}{letters[i // 2]}" * (prompt_tokens // 2), "answer": letters[i]}
        for i in range(12)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = on_the_cluster(
        directory,
        1,
        data={"train_size": 8, "validation_size": 4},
        policy={
            "model": {"config": {**MODEL, "max_position_embeddings": 4096}},
            "max_total_sequence_length": prompt_tokens + 16,
            "sequence_packing": {
                "enabled": True,
                "train_mb_tokens": prompt_tokens * 4 + 64,
                "logprob_mb_tokens": prompt_tokens * 4 + 64,
            },
        },
        grpo={"max_num_steps": 3},
        validation={"period": 0, "at_start": False, "at_end": False},
        logging={"samples_per_step": SAMPLES, "tokens_of_samples": 0},
    )
    questions = {"kind": "dataset", "path": str(path)}
    recipe = RecipeConfig.model_validate({**recipe.model_dump(), "env": questions})
    steps = run_steps(recipe)["steps"]
    assert all(ROWS * prompt_tokens <= r.tokens <= ROWS * (prompt_tokens + 16) for r in steps)
    return [
        Bytes(r.metrics["data_plane/driver_bytes"], sum(r.bytes_by_column.values()), r.tokens)
        for r in steps[1:]
    ]


SHARES = {64: (0.10, 0.20), 2048: (0.0, 0.01)}
"""Between what bounds the driver's share of a step's bytes lies, by tokens of a prompt."""


def test_the_drivers_bytes_per_row_are_constant_and_their_share_falls_with_the_length(
    tmp_path: Path, transfer_queue_engine: None
) -> None:
    steps = {length: traffic(tmp_path / str(length), length) for length in SHARES}
    # The text of the samples that the recipe wants shown is all that grows with the length.
    rest = {length: [s.driver - SAMPLES * length for s in of] for length, of in steps.items()}
    for length, (low, high) in SHARES.items():
        assert len(steps[length]) == 2
        for step, own in zip(steps[length], rest[length]):
            # So few rows share what each message says of itself, 100 bytes a row of it names of columns and classes.
            # Tags of the weights' version, the time of a put, and the call that makes way for training are of the rest.
            assert own / ROWS < 700
            assert own == pytest.approx(rest[64][0], rel=0.03)
            assert step.store / step.tokens == pytest.approx(54, rel=0.03)
            assert low < step.driver / step.store < high

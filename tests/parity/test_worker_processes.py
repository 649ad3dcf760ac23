"""Two worker processes train as one does: in-memory loop on spawned processes, batches, order, resume."""

from pathlib import Path
from typing import Any

import pytest
import torch

from group_worker import running_children
from headrace.algorithms.grpo import Session
from headrace.algorithms.run import build_session, start_loop, train
from headrace.config import RecipeConfig
from recorder import NeverStop, Recorder, StopAfter
from tiny_models import tiny_batch
from tiny_recipe import tiny_recipe

LENGTHS = [9, 4, 12, 7, 5, 3, 11, 8, 10, 6, 2, 12, 9, 9, 4, 1]
CLOSE: dict[str, float] = {"rtol": 0.0, "atol": 1e-5}


def in_memory(
    directory: Path, workers: int, batching: str, steps: int, *, expert: int = 1, **changes: Any
) -> RecipeConfig:
    return tiny_recipe(
        directory,
        batching=batching,
        cpu_threads=1,
        policy={"workers": workers, "parallel": {"expert": expert}},
        # Of itself a run of several processes has its rows in the driver's memory.
        data_plane={"enabled": False} if workers == 1 else {},
        grpo={"num_prompts_per_step": 4, "num_generations_per_prompt": 4, "max_num_steps": steps},
        **changes,
    )


def three_steps(session: Session) -> dict[str, Any]:
    try:
        rows = tiny_batch(LENGTHS)
        rows["input_ids"] %= 50
        logprobs = session.policy.get_logprobs(rows)["logprobs"]
        size = session.policy.num_parameters
        recorder = Recorder()
        assert start_loop(session, recorder, NeverStop()).run()
        weights = {name: w.clone() for name, w in session.policy.named_weights()}
        version = session.policy.weight_version
    finally:
        session.close()
    return {
        "logprobs": logprobs,
        "size": size,
        "steps": recorder.steps,
        "weights": weights,
        "version": version,
    }


def losses(recorder_steps: list[Any]) -> torch.Tensor:
    names = ("train/loss", "train/grad_norm", "train/entropy", "train/lr")
    return torch.tensor([[r.metrics[name] for name in names] for r in recorder_steps])


# Ranks of padded batches, on gloo: test_worker_sharded.
@pytest.mark.parametrize(
    ("batching", "expert"),
    [
        *(pytest.param(kind, 1, marks=pytest.mark.slow) for kind in ("fixed", "dynamic", "packed")),
        ("packed", 2),
    ],
)
def test_two_processes_take_the_steps_of_one_and_keep_row_order(
    tmp_path: Path, batching: str, expert: int
) -> None:
    before = running_children()
    alone = three_steps(build_session(in_memory(tmp_path, 1, batching, 3)))
    pair = three_steps(build_session(in_memory(tmp_path, 2, batching, 3, expert=expert)))
    assert running_children() == before
    torch.testing.assert_close(pair["logprobs"], alone["logprobs"], **CLOSE)
    assert pair["logprobs"].abs().sum(1).unique().numel() >= len(LENGTHS) - 1, "rows have to differ"
    torch.testing.assert_close(losses(pair["steps"]), losses(alone["steps"]), **CLOSE)
    assert losses(alone["steps"])[:, 0].abs().max() > 1e-3, "a loss of zero proves nothing"
    assert [r.tokens for r in pair["steps"]] == [r.tokens for r in alone["steps"]]
    assert pair["weights"].keys() == alone["weights"].keys()
    for name, weight in alone["weights"].items():
        torch.testing.assert_close(pair["weights"][name], weight, **CLOSE)
    assert (pair["size"], pair["version"]) == (alone["size"], alone["version"])


def test_a_run_on_two_processes_stops_and_goes_on(tmp_path: Path) -> None:
    def run(name: str, workers: int, stopper: Any) -> list[Any]:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        recorder = Recorder()
        train(in_memory(directory, workers, "packed", 4), directory, recorder, stopper)
        return recorder.steps

    before = running_children()
    whole = run("whole", 1, NeverStop())
    first = run("parts", 2, StopAfter(8))
    second = run("parts", 2, NeverStop())
    assert 0 < len(first) < 4, "the first part has to stop in the middle"
    assert [r.step for r in [*first, *second]] == [1, 2, 3, 4]
    torch.testing.assert_close(losses([*first, *second]), losses(whole), **CLOSE)
    assert running_children() == before


@pytest.mark.parametrize(
    ("policy", "enabled"),
    [
        ({"workers": 2}, True),
        ({"parallel": {"launcher": "ray"}}, True),
        ({"parallel": {"launcher": "ray"}}, None),
    ],
    ids=str,
)
def test_a_local_store_for_several_processes_is_refused_by_both_keys(
    tmp_path: Path, policy: dict[str, Any], enabled: bool | None
) -> None:
    with pytest.raises(ValueError, match=r"data_plane\.impl=local.*policy\.workers=") as caught:
        tiny_recipe(tmp_path, policy=policy, data_plane={"enabled": enabled})
    for remedy in ("data_plane.impl=transfer_queue", "data_plane.enabled=false"):
        assert remedy in str(caught.value)

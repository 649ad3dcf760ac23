"""A capture that goes wrong between engine and digest: the run stops before weights change, and names the fault."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.algorithms.run import build_session, start_loop
from headrace.config import RecipeConfig
from headrace.distributed.worker_groups import LocalWorkerGroup
from headrace.errors import HeadraceError, ReplayError, SchemaError
from headrace.models.generation.interfaces import GenerationOutput, Generator
from headrace.models.router_replay.trace import check_run
from headrace.utils.run_directory import RunDirectory
from recorder import NeverStop, Recorder
from tiny_recipe import MODEL, tiny_recipe

Rows = list[torch.Tensor]
Fault = Callable[[Rows, Rows], Rows]


def fitted(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Rows of another sample, as many as this one has."""
    return rows.repeat(-(-size // len(rows)), 1, 1)[:size].clone()


def late_by_one(rows: Rows, earlier: Rows) -> Rows:
    return [r.roll(1, dims=0) for r in rows]


def early_by_one(rows: Rows, earlier: Rows) -> Rows:
    return [r.roll(-1, dims=0) for r in rows]


def of_the_step_before(rows: Rows, earlier: Rows) -> Rows:
    return [fitted(old, len(r)) for r, old in zip(rows, earlier)] if earlier else rows


def of_the_next_sample(rows: Rows, earlier: Rows) -> Rows:
    return [fitted(other, len(r)) for r, other in zip(rows, rows[1:] + rows[:1])]


def layers_swapped(rows: Rows, earlier: Rows) -> Rows:
    return [r.flip(1) for r in rows]


def experts_renamed(rows: Rows, earlier: Rows) -> Rows:
    return [(r + 1) % 4 for r in rows]


def constant(rows: Rows, earlier: Rows) -> Rows:
    return [torch.arange(r.shape[-1], dtype=r.dtype).expand_as(r).clone() for r in rows]


FAULTS = [
    (late_by_one, "a lag of 1 token"),
    (early_by_one, "a lead of 1 token"),
    (of_the_step_before, "rows of the step before"),
    (of_the_next_sample, "rows of other samples"),
    (layers_swapped, "rows of other layers: layer 0 has those of layer 1, layer 1 has those of layer 0"),
    (experts_renamed, "renamed experts"),
    (constant, r"constant rows: almost all are experts \[0, 1\]"),
]


class Faulty:
    """An engine whose routes are changed before anybody has seen them."""

    def __init__(self, inner: Generator, fault: Fault) -> None:
        self._inner, self._fault, self._earlier = inner, fault, []
        self.route_shape = inner.route_shape
        self.update_weights, self.release, self.shutdown = inner.update_weights, inner.release, inner.shutdown

    @property
    def weight_version(self) -> int:
        return self._inner.weight_version

    def generate(self, *args: Any, **kwargs: Any) -> GenerationOutput:
        output = self._inner.generate(*args, **kwargs)
        if output.routes is None:  # a validation
            return output
        rows = list(output.routes)
        output.routes[:] = self._fault(rows, self._earlier)
        self._earlier = rows
        return output


def recipe(
    run_dir: Path, *, on_policy: bool = False, policy: dict[str, Any] | None = None, **replay: Any
) -> RecipeConfig:
    return tiny_recipe(
        run_dir,
        batching="packed",
        policy={"router_replay": {"enabled": True, **replay}, **(policy or {})},
        generation={"precision": "bfloat16"},
        loss={"force_on_policy_ratio": on_policy},
        grpo={"max_num_steps": 2},
        data_plane={"enabled": False},
        checkpointing={"enabled": False},
    )


def unchanged(rows: Rows, earlier: Rows) -> Rows:
    return rows


def run(made: RecipeConfig, fault: Fault) -> tuple[Recorder, Exception | None, bool]:
    """Return what a run with a faulty engine reports, what stops it, and whether that step left the weights alone."""
    session, recorder = build_session(made), Recorder()
    try:
        assert isinstance(session.rollouts, LocalWorkerGroup)
        actor = session.rollouts.worker
        actor.generator = Faulty(actor.generator, fault)
        error: Exception | None = None
        try:
            traces = RunDirectory(Path(made.run_dir)).traces_dir
            start_loop(session, recorder, NeverStop(), trace_dir=traces).run()
        except HeadraceError as caught:
            error = caught
        return recorder, error, session.policy.weight_version == len(recorder.steps)
    finally:
        session.close()


@pytest.mark.parametrize("on_policy", [False, True], ids=["scoring", "on-policy"])
@pytest.mark.parametrize(("fault", "name"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_wrong_capture_is_refused_by_name_before_weights_change(
    tmp_path: Path, fault: Fault, name: str, on_policy: bool
) -> None:
    recorder, error, untouched = run(recipe(tmp_path, on_policy=on_policy), fault)
    stage = "train" if on_policy else "prev_logprobs"
    with pytest.raises(ReplayError, match=rf"stage '{stage}': .*min_exact_fraction=80\.0%; .*{name}"):
        raise error or AssertionError("the run went on")
    assert len(recorder.steps) == (fault is of_the_step_before)
    assert untouched


def test_a_share_of_zero_lets_the_run_go_on_and_its_trace_is_not_called_sound(tmp_path: Path) -> None:
    recorder, error, _ = run(recipe(tmp_path, min_exact_fraction=0, trace=True), late_by_one)
    assert error is None
    for record in recorder.steps:
        assert record.metrics["router_replay/prev_logprobs/route_exact"] < 0.6
    with pytest.raises(
        ReplayError, match=r"step 1, stage 'prev_logprobs': .*min_exact_fraction=80\.0%; .*a lag of 1 token"
    ):
        check_run(tmp_path)


@pytest.mark.parametrize("on_policy", [False, True], ids=["scoring", "on-policy"])
def test_agreement_is_that_of_the_weights_that_sampled(tmp_path: Path, on_policy: bool) -> None:
    """At a rate that moves the routers far; with scoring, in four updates per step."""
    policy = {"train_global_batch_size": 16 if on_policy else 4, "optimizer": {"lr": 0.3}}
    recorder, error, _ = run(recipe(tmp_path, on_policy=on_policy, policy=policy), unchanged)
    assert error is None
    compared, other = ("train", "prev_logprobs") if on_policy else ("prev_logprobs", "train")
    for record in recorder.steps:
        share = record.metrics["router_replay/route_exact"]
        assert share > 0.9
        assert record.metrics[f"router_replay/{compared}/route_exact"] == share
        assert f"router_replay/{other}/route_exact" not in record.metrics


def test_an_engine_that_fills_no_rows_of_one_expert_per_token_is_refused(tmp_path: Path) -> None:
    made = recipe(tmp_path, policy={"model": {"config": {**MODEL, "num_experts_per_tok": 1}}})
    recorder, error, _ = run(made, lambda rows, _: [torch.zeros_like(r) for r in rows])
    assert not recorder.steps
    with pytest.raises(SchemaError, match=r"sample '.*': all \d+ rows .* are expert 0, as in a buffer"):
        raise error or AssertionError("the run went on")

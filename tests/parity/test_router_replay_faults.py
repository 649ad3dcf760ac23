"""A router that disobeys in a run: the step stops, at the stage in which it did and before it changes more."""

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.algorithms.run import build_session, start_loop
from headrace.errors import ReplayError
from recorder import NeverStop, Recorder
from tiny_recipe import tiny_recipe


def swap_the_experts_of_a_layer(session: Any) -> None:
    """Have the last layer of the trained model give every token the experts of the one before it."""

    def change(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if "routes" in kwargs:
            kwargs["routes"] = tuple(r._replace(given=r.given.roll(1, dims=0)) for r in kwargs["routes"])
        return args, kwargs

    layers = session.policy.workers.worker.model.model.layers
    layers[-1].register_forward_pre_hook(change, with_kwargs=True)


@pytest.mark.parametrize(("on_policy", "stage"), [(False, "prev_logprobs"), (True, "train")])
@pytest.mark.parametrize("store", [False, True], ids=["memory", "store"])
def test_a_router_that_does_not_use_what_it_was_given_stops_the_run(
    tmp_path: Path, store: bool, on_policy: bool, stage: str
) -> None:
    recipe = tiny_recipe(
        tmp_path,
        batching="packed",
        policy={"router_replay": {"enabled": True}},
        loss={"force_on_policy_ratio": on_policy},
        grpo={"max_num_steps": 1},
        data_plane={"enabled": store},
        checkpointing={"enabled": False},
    )
    session, recorder = build_session(recipe), Recorder()
    try:
        before = {name: w.clone() for name, w in session.policy.named_weights()}
        swap_the_experts_of_a_layer(session)
        with pytest.raises(ReplayError, match=rf"stage '{stage}'.*\(used\).*did not use the rows"):
            start_loop(session, recorder, NeverStop()).run()
        same = [torch.equal(w, before[name]) for name, w in session.policy.named_weights()]
    finally:
        session.close()
    assert recorder.steps == []
    assert all(same)

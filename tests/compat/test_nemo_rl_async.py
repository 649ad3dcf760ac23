"""Buffers and samplers of NeMo-RL's asynchronous loop, over a real store."""

import asyncio
import io
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from nemo_rl.algorithms.async_utils.interfaces import ReplayBufferProtocol
from nemo_rl.algorithms.async_utils.replay_buffer import ReplayBuffer, ReplayBufferImpl, TQReplayBuffer
from nemo_rl.algorithms.async_utils.staleness_sampler import (
    BaseSampler,
    CustomSamplerConfig,
    InOrderSampler,
    InOrderSamplerConfig,
    PromptGroupSampler,
    ReadyFirstSampler,
    ReadyFirstSamplerConfig,
    WeightFifoSampler,
    WeightFifoSamplerConfig,
    WindowedSampler,
    WindowedSamplerConfig,
    create_sampler,
    required_buffer_capacity_for_config,
)
from nemo_rl.data_plane import build_data_plane_client
from nemo_rl.data_plane.adapters.noop import NoOpDataPlaneClient
from nemo_rl.experience.interfaces import Completion, PromptGroupRecord
from nemo_rl_names import calls

from headrace.data_plane.passing_client import PassingClient
from headrace.errors import ConfigError, DataPlaneError, ReplayError, SchemaError
from ray_session import fresh_store

BUFFER, SAMPLER = "algorithms.async_utils.replay_buffer", "algorithms.async_utils.staleness_sampler"


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


# In memory.


def trajectory(name: str) -> dict[str, Any]:
    return {"batch": {"data": name}, "rollout_metrics": {"reward": 1.0}}


def filled(*entries: tuple[int, int], room: int = 10, drops: bool = False) -> ReplayBufferImpl:
    """Return a buffer of trajectories of (version, target), named by their place."""
    buffer = ReplayBufferImpl(max_size=room, drop_incomplete_targets_on_restore=drops)
    for place, (version, target) in enumerate(entries):
        assert (
            buffer.add(trajectory(f"t{place}"), weight_version=version, target_weight_version=target)
            == "success"
        )
    return buffer


@calls(
    BUFFER,
    "ReplayBuffer",
    "ReplayBufferImpl",
    *(
        f"ReplayBufferImpl.{name}"
        for name in (
            "add",
            "sample",
            "size",
            "clear",
            "get_debug_info",
            "get_last_target_weight_already_generated",
            "get_existing_target_weights",
            "get_trajectories_needed",
            "has_complete_batch",
        )
    ),
)
def test_a_step_takes_what_is_meant_for_it_and_what_is_too_old_is_dropped() -> None:
    buffer = filled((0, 5), (4, 5), (3, 6), (5, 5), room=4)
    assert isinstance(buffer, ReplayBufferProtocol)
    assert isinstance(ReplayBuffer(2, True), ReplayBufferImpl)
    assert buffer.add(trajectory("more"), 5, 6) == "full"
    assert buffer.get_existing_target_weights() == {5, 6}
    assert buffer.get_trajectories_needed(5, 3, max_age_steps=None) == 0
    assert buffer.get_trajectories_needed(5, 3, max_age_steps=1) == 1
    assert not buffer.has_complete_batch(5, 3, max_age_steps=1)
    assert buffer.sample(num_prompt_groups=3, current_weight_version=5, max_age_steps=2) is None
    assert buffer.get_last_target_weight_already_generated() == -1
    taken = buffer.sample(num_prompt_groups=2, current_weight_version=5, max_age_steps=2)
    assert taken is not None
    assert [t["batch"]["data"] for t in taken["trajectories"]] == ["t1", "t3"]
    assert taken["avg_trajectory_age"] == 0.5
    assert buffer.get_debug_info() == {
        "total_trajectories": 1,
        "trajectory_versions": [3],
        "target_weight_versions": [6],
        "target_weight_counts": {6: 1},
        "last_target_weight_already_generated": 5,
        "max_size": 4,
    }
    buffer.clear()
    assert buffer.size() == 0
    with pytest.raises(ConfigError, match="max_size=0"):
        ReplayBufferImpl(0, False)


def held(buffer: ReplayBufferImpl) -> list[tuple[int, int]]:
    info = buffer.get_debug_info()
    return list(zip(info["trajectory_versions"], info["target_weight_versions"]))


@calls(
    BUFFER,
    *(f"ReplayBufferImpl.{n}" for n in ("state_dict", "load_state_dict", "save_to_path", "load_from_path")),
)
@pytest.mark.parametrize(
    ("saved", "options", "kept", "watermark"),
    [
        ([(5, 6), (6, 7)], {}, [(5, 6), (6, 7)], -1),
        ([(0, 1), (1, 2), (1, 2), (2, 3)], {"current_training_step": 2}, [(1, 2), (1, 2), (2, 3)], 1),
        ([(0, 5), (1, 5), (4, 5)], {"current_training_step": 5, "max_age_steps": 1}, [(4, 5)], 4),
        ([(0, 5), (4, 5), (4, 6)], {"max_age_steps": 1}, [], -1),
        ([(4, 5), (4, 5), (4, 6)], {}, [(4, 5), (4, 5)], 4),
        ([], {"current_training_step": 5}, [], 4),
    ],
)
def test_a_saved_buffer_comes_back_without_what_the_step_cannot_use(
    saved: Any, options: Any, kept: Any, watermark: int, tmp_path: Path
) -> None:
    if options or len(saved) == 3:
        options = {"num_prompts_per_step": 2, **options}
    path = str(tmp_path / "deep" / "buffer.pt")
    (tmp_path / "deep").mkdir()
    filled(*saved).save_to_path(path)
    by_file, by_state = filled((9, 9)), filled((9, 9))
    by_file.load_from_path(path, **options)
    by_state.load_state_dict(filled(*saved).state_dict(), **options)
    for buffer in (by_file, by_state):
        assert held(buffer) == kept
        assert buffer.get_last_target_weight_already_generated() == watermark


def test_a_restore_keeps_what_fits_and_begins_incomplete_steps_anew_where_asked() -> None:
    state = filled((1, 2), (1, 2), (2, 3)).state_dict()
    small = filled(room=1)
    small.load_state_dict(state, current_training_step=2)
    assert held(small) == [(1, 2)]
    anew = filled(drops=True)
    anew.load_state_dict(state, num_prompts_per_step=2, current_training_step=2)
    assert held(anew) == [(1, 2), (1, 2)]
    with pytest.raises(SchemaError, match="Checkpoint missing required keys"):
        anew.load_state_dict({"trajectories": []})
    with pytest.raises(SchemaError, match="inconsistent replay buffer lengths"):
        anew.load_state_dict({**state, "trajectory_versions": [1]})


# Over a store.


def record(reward: float = 1.0, **first: Any) -> PromptGroupRecord:
    def completion() -> Completion:
        log = [
            {"role": "user", "content": "", "token_ids": torch.tensor([1, 2]), **first},
            {"role": "assistant", "content": "", "token_ids": torch.tensor([3])},
        ]
        return Completion(message_log=log, env_extras=None, truncated=False, reward=reward)

    prompt = [{"role": "user", "content": "", "token_ids": torch.tensor([1, 2])}]
    return PromptGroupRecord(0, prompt, None, {}, [completion(), completion()], {})


@pytest.fixture
def store() -> Any:
    client = NoOpDataPlaneClient()
    client.register_partition("rollouts", ["input_ids"], 64, ["train"])
    yield client
    client.close()


def over(client: Any, **options: Any) -> TQReplayBuffer:
    return TQReplayBuffer(client, "rollouts", pad_value_dict={"token_ids": 0}, **options)


def add(buffer: TQReplayBuffer, weight: int, step: int | None = None, *, end: int | None = None) -> str:
    name = buffer.reserve(weight_version=weight, target_step=step)
    run(buffer.commit(name, record(), weight, weight if end is None else end))
    return name


@calls(
    BUFFER,
    "TQReplayBuffer",
    *(
        f"TQReplayBuffer.{n}"
        for n in (
            "reserve",
            "commit",
            "remove",
            "remove_group",
            "size",
            "count_for_target_step",
            "promote_ready_group",
        )
    ),
)
def test_groups_are_reserved_in_order_written_and_removed(store: Any) -> None:
    buffer = over(store)
    first = buffer.reserve(weight_version=3, target_step=5, group_id="first")
    second = buffer.reserve(weight_version=4)
    assert (first, buffer.size(), len(buffer)) == ("first", 2, 2)
    meta = run(buffer.commit(second, record(), start_weight_version=4, end_weight_version=6))
    assert meta.sample_ids == [f"{second}_g0", f"{second}_g1"] == store.sample_ids("rollouts")
    assert (meta.tags, meta.sequence_lengths) == ([{"weight_version": 4}] * 2, [3, 3])
    assert buffer.ready_list == [False, True]
    assert (buffer.start_weight_list, buffer.end_weight_list) == ([3, 4], [-1, 6])
    assert (buffer.meta_list, buffer.target_step_list) == ([None, meta], [5, None])
    assert [buffer.count_for_target_step(step) for step in (5, 6)] == [1, 0]
    add(buffer, 4, 8)
    near = add(buffer, 4, 7)
    assert buffer.promote_ready_group(to_target_step=5) == near
    assert buffer.promote_ready_group(to_target_step=8) is None
    assert buffer.count_for_target_step(5) == 2
    with pytest.raises(IndexError, match=r"out of range: 9; size=4"):
        run(buffer.remove([0, 9], remove_in_dp=True))
    assert buffer.size() == 4
    assert run(buffer.remove([1], remove_in_dp=False)) == 1
    assert len(store.sample_ids("rollouts")) == 6
    assert run(buffer.remove_group(near, remove_in_dp=True))
    assert not run(buffer.remove_group("nowhere"))
    assert len(store.sample_ids("rollouts")) == 4
    with pytest.raises(SchemaError, match="group 'first' is reserved already"):
        buffer.reserve(weight_version=1, group_id="first")


def test_a_group_that_cannot_be_written_leaves_no_row(store: Any) -> None:
    buffer = over(store, require_routed_experts=True)
    with pytest.raises(SchemaError, match="group 'x' is not reserved"):
        run(buffer.commit("x", record(), 0, 0))
    name = buffer.reserve(weight_version=0)
    with pytest.raises(ReplayError, match=r"router_replay\.enabled=true requires routed_experts"):
        run(buffer.commit(name, record(), 0, 0))
    routes = torch.tensor([[[0, 1]], [[2, 3]]], dtype=torch.int16)
    run(buffer.commit(name, record(routed_experts=routes), 0, 0))
    assert buffer.ready_list == [True]
    full = build_data_plane_client(fresh_store({"enabled": True, "impl": "local", "storage_capacity": 1}))
    late = over(full)
    name = late.reserve(weight_version=0)
    with pytest.raises(DataPlaneError):
        run(late.commit(name, record(), 0, 0))
    assert (full.sample_ids("rollouts"), late.ready_list) == ([], [False])
    full.close()


class Slow(PassingClient):
    """A store whose puts begin, and go on when they may."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.begun, self.may_go_on = threading.Event(), threading.Event()

    def put_samples(self, *args: Any, **options: Any) -> Any:
        self.begun.set()
        assert self.may_go_on.wait(10)
        return self.inner.put_samples(*args, **options)


@pytest.mark.parametrize("how", ["removed", "cancelled"])
def test_a_group_that_is_given_up_while_it_is_put_leaves_no_row(store: Any, how: str) -> None:
    slow = Slow(store)
    buffer = over(slow)
    name = buffer.reserve(weight_version=0)

    async def give_up() -> Any:
        commit = asyncio.create_task(buffer.commit(name, record(), 0, 0))
        await asyncio.to_thread(slow.begun.wait, 10)
        if how == "removed":
            assert await buffer.remove_group(name, remove_in_dp=True)
        else:
            commit.cancel()
            await asyncio.sleep(0.05)
        slow.may_go_on.set()
        return (await asyncio.gather(commit, return_exceptions=True))[0]

    outcome = run(give_up())
    assert store.sample_ids("rollouts") == []
    assert buffer.ready_list == ([] if how == "removed" else [False])
    assert isinstance(outcome, SchemaError if how == "removed" else asyncio.CancelledError)


@calls(BUFFER, "TQReplayBuffer.state_dict", "TQReplayBuffer.load_state_dict")
def test_ready_groups_come_back_with_their_rows_from_a_file(store: Any) -> None:
    buffer = over(store)
    names = [add(buffer, 1, end=2), add(buffer, 5, 7)]
    buffer.reserve(weight_version=6)
    file = io.BytesIO()
    torch.save(run(buffer.state_dict(saved_capacity=8)), file)
    file.seek(0)
    state = torch.load(file, weights_only=False)
    assert [group["group_id"] for group in state["groups"]] == names
    other = NoOpDataPlaneClient()
    again = over(other)
    expected = {"expected_partition_id": "rollouts", "expected_group_size": 2}
    assert run(again.load_state_dict(state, max_groups=8, **expected)) == 2
    assert (again.start_weight_list, again.end_weight_list) == ([1, 5], [2, 5])
    assert (again.target_step_list, again.ready_list) == ([None, 7], [True, True])
    ids = buffer.meta_list[1].sample_ids
    rows = [client.get_samples(ids, "rollouts", ["input_ids", "total_reward"]) for client in (store, other)]
    assert [r.tolist() for r in rows[0]["input_ids"].unbind()] == [
        r.tolist() for r in rows[1]["input_ids"].unbind()
    ]
    for change, fault in (
        ({"groups": None}, "missing required keys"),
        ({"partition_id": "p"}, "partition_id mismatch"),
        ({"groups": [{"meta": None}]}, "missing keys"),
        ({"groups": [state["groups"][0]] * 2}, "duplicate sample_id"),
    ):
        broken = {**state, **change}
        if change.get("groups", 0) is None:
            del broken["groups"]
        with pytest.raises(SchemaError, match=fault):
            run(over(other).load_state_dict(broken, max_groups=8, **expected))
    with pytest.raises(SchemaError, match="misaligned"):
        run(over(other).load_state_dict(state, max_groups=8, **{**expected, "expected_group_size": 3}))
    with pytest.raises(SchemaError, match=r"max_buffered_rollouts >= 2"):
        run(over(other).load_state_dict(state, max_groups=1, **expected))
    other.close()


def test_a_smaller_buffer_takes_the_freshest_groups_and_says_so(store: Any, caplog: Any) -> None:
    buffer = over(store)
    for weight in (1, 3, 2):
        add(buffer, weight)
    state = run(buffer.state_dict(saved_capacity=8))
    other = NoOpDataPlaneClient()
    small = over(other)
    options = {"max_groups": 2, "expected_partition_id": "rollouts", "expected_group_size": 2}
    assert run(small.load_state_dict(state, **options)) == 2
    assert small.start_weight_list == [3, 2]
    assert "capacity changed from 8 to 2 groups" in caplog.text
    other.close()


# Samplers.

METHODS = ("admit", "select", "evict", "should_abort_inflight", "is_on_policy", "required_buffer_capacity")
KINDS = {
    "windowed": (WindowedSampler, WindowedSamplerConfig, "max_staleness_versions"),
    "ready_first": (ReadyFirstSampler, ReadyFirstSamplerConfig, "max_staleness_versions"),
    "weight_fifo": (WeightFifoSampler, WeightFifoSamplerConfig, "max_staleness_versions"),
    "in_order": (InOrderSampler, InOrderSamplerConfig, "max_lookahead_versions"),
}


def pick(sampler: Any, weight: int, least: int = 1, most: int = 8) -> list[str] | None:
    """Return the groups that a step takes, by their ids."""
    meta, count = run(
        sampler.select(current_train_weight=weight, min_prompt_groups=least, max_prompt_groups=most)
    )
    if meta is None:
        return None
    groups = list(dict.fromkeys(sample_id.rpartition("_g")[0] for sample_id in meta.sample_ids))
    assert len(groups) == count
    return groups


@calls(SAMPLER, "create_sampler", "required_buffer_capacity_for_config", "CustomSamplerConfig")
@calls(SAMPLER, *(config.__name__ for _, config, _ in KINDS.values()))
@calls(SAMPLER, *(f"BaseSampler.{name}" for name in (*METHODS, "set_dispatch_index")))
@pytest.mark.parametrize("name", KINDS)
def test_a_sampler_is_built_from_its_config_and_says_what_room_it_needs(name: str) -> None:
    kind, config, window = KINDS[name]
    for cfg in (config(**{window: 2}), {"name": name, window: 2}):
        sampler: Any = create_sampler(None, cfg)
        assert type(sampler) is kind
        assert isinstance(sampler, PromptGroupSampler)
        assert isinstance(sampler, BaseSampler)
        assert getattr(sampler, window) == 2
        room = None if name == "windowed" else 12
        assert required_buffer_capacity_for_config(cfg, groups_per_step=4) == room
        assert sampler.required_buffer_capacity(4) == room
    assert not sampler.is_on_policy()
    assert create_sampler(None, {"name": name, window: 0}).is_on_policy()
    with pytest.raises(ValueError, match="0"):
        config(**{window: -1})
    with pytest.raises(ConfigError, match=f"{window}=-1; expected 0 or more"):
        kind(None, **{window: -1})
    aborts = sampler.should_abort_inflight(start_weight_version=2, current_train_weight=5)
    assert aborts == (name == "windowed")
    assert not sampler.should_abort_inflight(start_weight_version=3, current_train_weight=5)


class Mine(InOrderSampler):
    """A sampler of a caller's own."""


class NoSampler:
    """A class that is no sampler."""

    def __init__(self, buffer: Any) -> None: ...


def test_a_sampler_of_ones_own_is_named_by_its_class() -> None:
    sampler: Any = create_sampler(
        None, CustomSamplerConfig(target="test_nemo_rl_async:Mine", max_lookahead_versions=3)
    )
    assert type(sampler).__name__ == "Mine"
    assert sampler.max_lookahead_versions == 3
    with pytest.raises(ConfigError, match=r"sampler\.name=newest; expected one of windowed, .*, custom"):
        create_sampler(None, {"name": "newest"})
    with pytest.raises(ConfigError, match=r"sampler: unknown key 'max_staleness'; did you mean"):
        create_sampler(None, {"name": "windowed", "max_staleness": 2})
    with pytest.raises(ConfigError, match="is not a class"):
        create_sampler(None, CustomSamplerConfig(target="test_nemo_rl_async:run"))
    with pytest.raises(ConfigError, match="has not all methods"):
        create_sampler(None, {"name": "custom", "target": "test_nemo_rl_async:NoSampler"})


@calls(
    SAMPLER,
    "WindowedSampler",
    *(f"WindowedSampler.{n}" for n in ("admit", "select", "should_abort_inflight")),
)
def test_a_windowed_sampler_takes_what_is_fresh_enough_and_drops_the_rest(store: Any) -> None:
    buffer = over(store)
    old, edge, new, future = (add(buffer, weight) for weight in (2, 3, 5, 6))
    buffer.reserve(weight_version=5)
    sampler = WindowedSampler(buffer, max_staleness_versions=2)
    assert [run(sampler.admit(trainer_version_fn=lambda: 0)) for _ in range(3)] == [None] * 3
    assert pick(sampler, 5, least=3) is None
    assert pick(WindowedSampler(buffer, max_staleness_versions=2, sample_freshest_first=True), 5, most=1) == [
        new
    ]
    assert pick(sampler, 5) == [edge]
    assert len(store.sample_ids("rollouts")) == 8
    assert run(sampler.evict(current_train_weight=5)) == 1
    assert sorted(store.sample_ids("rollouts")) == sorted(
        f"{g}_g{i}" for g in (edge, new, future) for i in range(2)
    )
    assert old not in {sample.rpartition("_g")[0] for sample in store.sample_ids("rollouts")}
    assert buffer.ready_list == [True, False]
    with pytest.raises(ConfigError, match="min_prompt_groups=0"):
        pick(sampler, 5, least=0)


@calls(SAMPLER, "ReadyFirstSampler", "ReadyFirstSampler.select", "ReadyFirstSampler.evict")
def test_a_ready_first_sampler_takes_groups_in_their_order_however_old(store: Any) -> None:
    buffer = over(store)
    groups = [add(buffer, weight) for weight in (1, 3, 2, 4)]
    sampler = ReadyFirstSampler(buffer, max_staleness_versions=1)
    assert run(sampler.evict(current_train_weight=9)) == 0
    assert pick(sampler, 3, least=3, most=3) == groups[:3]
    assert buffer.start_weight_list == [4]


@calls(SAMPLER, "WeightFifoSampler", "WeightFifoSampler.select")
def test_a_fifo_sampler_finishes_the_oldest_weights_first(store: Any) -> None:
    buffer = over(store)
    first, new, second = (add(buffer, weight) for weight in (3, 5, 3))
    sampler = WeightFifoSampler(buffer, max_staleness_versions=5)
    assert pick(sampler, 5, least=3) is None
    assert pick(sampler, 5) == [first, second]
    assert pick(sampler, 5) == [new]
    assert pick(sampler, 5) is None


@calls(SAMPLER, "InOrderSampler", "InOrderSampler.select", "InOrderSampler.evict")
def test_an_in_order_sampler_takes_what_is_meant_for_the_step(store: Any) -> None:
    buffer = over(store)
    past, now, later = (add(buffer, 100, step) for step in (4, 5, 6))
    buffer.reserve(weight_version=0, target_step=4)
    sampler = InOrderSampler(buffer, max_lookahead_versions=1)
    assert pick(sampler, 5) == [now]
    assert run(sampler.evict(current_train_weight=5)) == 1
    assert buffer.target_step_list == [6, 4]
    assert pick(sampler, 6) == [later]
    assert past not in {sample.rpartition("_g")[0] for sample in store.sample_ids("rollouts")}


def test_gated_samplers_begin_no_more_batches_than_their_window_and_stamp_steps_in_order() -> None:
    async def admitted(sampler: Any, version: int) -> Any:
        try:
            return await asyncio.wait_for(sampler.admit(trainer_version_fn=lambda: version), timeout=0.05)
        except TimeoutError:
            return "waits"

    fifo = WeightFifoSampler(None, max_staleness_versions=1)
    assert [run(admitted(fifo, version)) for version in (0, 0, 0, 1, 1)] == [
        None,
        None,
        "waits",
        None,
        "waits",
    ]
    ordered = InOrderSampler(None, max_lookahead_versions=1)
    assert [run(admitted(ordered, 0)) for _ in range(3)] == [0, 1, "waits"]
    ordered.set_dispatch_index(7)
    assert [run(admitted(ordered, 7)) for _ in range(3)] == [7, 8, "waits"]

"""Worker groups, as processes of this machine and as Ray actors: one interface, one set of guarantees."""

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from group_worker import BULK_BYTES, BULK_ITEMS, GroupWorker, running_children, wait_until_gone
from headrace.distributed.topology import RankLayout, lay_out_ranks
from headrace.distributed.worker_groups import (
    LocalWorkerGroup,
    RankSettings,
    SpawnWorkerGroup,
    WorkerSpec,
)
from headrace.distributed.worker_groups.remote import RemoteWorkerGroup
from headrace.distributed.worker_groups.wire import encode
from headrace.errors import ConfigError, HeadraceError

Start = Callable[..., RemoteWorkerGroup]
SETTINGS = RankSettings(threads=1, timeout_s=60.0)


def start_spawn(layout: RankLayout, **kwargs: Any) -> RemoteWorkerGroup:
    spec = WorkerSpec(GroupWorker, kwargs=kwargs)
    return SpawnWorkerGroup(spec, layout, settings=SETTINGS, grace_s=1.0)


def start_ray(layout: RankLayout, **kwargs: Any) -> RemoteWorkerGroup:
    from headrace.distributed.worker_groups.ray_group import RayWorkerGroup

    # Several groups at a time find room on the one CPU of the test cluster.
    spec = WorkerSpec(GroupWorker, kwargs=kwargs)
    return RayWorkerGroup(spec, layout, settings=SETTINGS, grace_s=1.0, cpus_per_worker=0.1)


@pytest.fixture(scope="module", params=["spawn", "ray"])
def start(request: pytest.FixtureRequest) -> Start:
    if request.param == "spawn":
        return start_spawn
    request.getfixturevalue("ray_cluster")
    return start_ray


@pytest.fixture(scope="module")
def group(start: Start) -> Iterator[RemoteWorkerGroup]:
    """Two replicas of one rank; every test leaves it usable."""
    group = start(lay_out_ranks(2), scale=10.0)
    pids = pids_of(group)
    yield group
    group.shutdown()
    group.shutdown()
    assert wait_until_gone(pids)


def pids_of(group: RemoteWorkerGroup) -> list[int]:
    return [place["pid"] for place in group.run_all("place")]


def test_a_failed_call_lets_go_of_what_it_held_without_the_cyclic_collector(group: RemoteWorkerGroup) -> None:
    for _ in range(2):
        with pytest.raises(HeadraceError, match="holds 1"):
            group.run_all("fail_holding")
        with pytest.raises(HeadraceError, match="holds 1"):
            list(group.stream("stream_holding"))
    assert group.run_all("still_held") == [0, 0]


def test_ranks_are_processes_with_their_environment_and_threads(group: RemoteWorkerGroup) -> None:
    places = group.run_all("place")
    assert len({os.getpid(), *(p["pid"] for p in places)}) == 3
    assert [p["RANK"] for p in places] == [p["LOCAL_RANK"] for p in places] == [0, 1]
    assert all(p["WORLD_SIZE"] == p["LOCAL_WORLD_SIZE"] == 2 for p in places)
    assert all(p["threads"] == 1 for p in places)
    assert (group.dp_size, group.world_size) == (2, 2)


def test_each_replica_gets_its_shard_and_all_the_common_arguments(group: RemoteWorkerGroup) -> None:
    shards = [torch.arange(3.0), torch.arange(5.0)]
    assert [float(t) for t in group.run_sharded("total", shards, times=2.0)] == [260.0, 260.0]
    assert group.run_sharded("tag", ["a", "b"]) == [(0, "a"), (1, "b")]
    with pytest.raises(ValueError, match="3 shards for 2 replicas"):
        group.run_sharded("tag", [1, 2, 3])


def test_large_tensors_come_back_whole(group: RemoteWorkerGroup) -> None:
    shards = [torch.arange(700_000), torch.arange(900_000).view(3, -1)[:, 1:]]
    results = group.run_sharded("tag", shards)
    assert all(torch.equal(back, sent) for (_, back), sent in zip(results, shards, strict=True))


def test_a_stream_yields_what_the_first_rank_yields(group: RemoteWorkerGroup) -> None:
    streamed = dict(group.stream("weights", 4))
    assert {name: w.tolist() for name, w in streamed.items()} == {f"w{i}": [2.0 * i] * 3 for i in range(4)}


def test_a_stream_that_is_given_up_leaves_the_group_usable(group: RemoteWorkerGroup) -> None:
    stream = group.stream("weights", 6)
    assert next(iter(stream))[0] == "w0"
    with pytest.raises(HeadraceError, match="weights still streams"):
        group.run_all("place")
    stream.close()  # type: ignore[attr-defined]
    assert group.run_sharded("tag", [1, 2]) == [(0, 1), (1, 2)]


def test_an_error_in_a_stream_is_raised_where_it_is_read(group: RemoteWorkerGroup) -> None:
    stream = group.stream("weights", 5, fail_at=2)
    assert [next(stream)[0], next(stream)[0]] == ["w0", "w1"]
    with pytest.raises(HeadraceError, match=r"ValueError: no weight 2 \(rank . of 2, in weights; .*too"):
        next(stream)
    assert len(group.run_all("place")) == 2


def test_a_stream_goes_from_one_group_to_another_and_both_stay_usable(
    group: RemoteWorkerGroup, start: Start
) -> None:
    target = start(lay_out_ranks(1))
    try:
        for version in (7, 8):
            group.stream_to(target, "few_weights", "take", version)
            expected = {f"w{i}": [2.0 * i] * 3 for i in range(5)}
            assert target.run_all("show") == [{**expected, "version": version}]
        with pytest.raises(HeadraceError, match="no such version"):
            group.stream_to(target, "few_weights", "take", -1)
        with pytest.raises(HeadraceError, match=r"no weight 3 .*in broken_weights"):
            group.stream_to(target, "broken_weights", "take", 9)
        group.stream_to(target, "few_weights", "take", 10)
        assert target.run_all("show") == [{**expected, "version": 10}]
    finally:
        target.shutdown()


def test_a_stream_to_a_worker_that_is_gone_ends_with_an_error(group: RemoteWorkerGroup, start: Start) -> None:
    target = start(lay_out_ranks(1))
    os.kill(target.run_all("place")[0]["pid"], signal.SIGKILL)
    try:
        with pytest.raises(HeadraceError, match=r"receiver of take has died|was killed"):
            group.stream_to(target, "few_weights", "take", 1)
    finally:
        target.shutdown()
    assert len(group.run_all("place")) == 2, "the sender lives on"


def test_actors_stream_past_the_driver(ray_cluster: str) -> None:
    sender, target = start_ray(lay_out_ranks(2)), start_ray(lay_out_ranks(1))
    try:
        before = sender.transferred_bytes + target.transferred_bytes
        sender.stream_to(target, "few_weights", "take", 1)
        calls = sender.transferred_bytes + target.transferred_bytes - before
        assert calls < 100, "the calls alone, no tensor"
        streamed = sum(encode(item).nbytes for item in sender.stream("few_weights"))
        moved = sender.transferred_bytes + target.transferred_bytes - before - calls
        assert moved == calls + streamed, "every tensor too"
    finally:
        sender.shutdown()
        target.shutdown()


def test_an_actor_takes_a_stream_in_parts_while_it_is_made(ray_cluster: str) -> None:
    sender, target = start_ray(lay_out_ranks(1)), start_ray(lay_out_ranks(1))
    try:
        sender.stream_to(target, "bulk", "take_bulk", 1)
        (seen,) = target.run_all("show")
        assert seen["items"] == BULK_ITEMS
        assert 0 < seen["waiting"] < BULK_ITEMS * BULK_BYTES / 2, "a few messages of 16 MiB, not all items"
    finally:
        sender.shutdown()
        target.shutdown()


def test_a_stream_that_its_sender_breaks_off_ends_for_the_receiver_too(ray_cluster: str) -> None:
    sender, target = start_ray(lay_out_ranks(2)), start_ray(lay_out_ranks(1))
    try:
        with pytest.raises(HeadraceError, match=r"no weight 3 .*in broken_weights"):
            sender.stream_to(target, "broken_weights", "take", 9)
        assert "version" not in target.run_all("show")[0], "what came is no whole stream"
        sender.stream_to(target, "few_weights", "take", 10)
        assert target.run_all("show")[0]["version"] == 10
    finally:
        sender.shutdown()
        target.shutdown()


def test_a_workers_own_error_keeps_its_class_and_tells_rank_and_traceback(group: RemoteWorkerGroup) -> None:
    with pytest.raises(ConfigError, match=r"^rows that do not fit \(rank 1 of 2, in fail\)$") as caught:
        group.run_all("fail", 1)
    assert "group_worker.py" in str(caught.value.__cause__)
    assert "raise kind" in str(caught.value.__cause__)


def test_any_other_error_is_named_in_a_headrace_error(group: RemoteWorkerGroup) -> None:
    with pytest.raises(HeadraceError, match=r"^KeyError: .*rank 0 of 2, in fail\)$") as caught:
        group.run_all("fail", 0, KeyError)
    assert type(caught.value) is HeadraceError
    with pytest.raises(HeadraceError, match=r"has no attribute 'nothing' \(rank .* failed too: rank .\)"):
        group.run_all("nothing")
    with pytest.raises(HeadraceError, match=r"<lambda> cannot be sent to a worker"):
        group.run_all("nameless")
    assert len(group.run_all("place")) == 2, "after errors that every rank survives, the group goes on"


def test_arguments_that_cannot_be_sent_reach_no_worker(group: RemoteWorkerGroup) -> None:
    with pytest.raises(TypeError, match="cannot be sent to a worker"):
        group.run_sharded("tag", [1, lambda: None])
    assert group.run_sharded("tag", [1, 2]) == [(0, 1), (1, 2)]


@contextmanager
def no_free_descriptor() -> Iterator[None]:
    """Let this process open nothing more for a moment."""
    before, taken = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, before[1]))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    ("method", "given"), [("tag", torch.ones(1 << 20)), ("many", 1 << 20)], ids=["call", "answer"]
)
def test_a_call_that_breaks_off_on_its_way_ends_the_group_with_the_reason(method: str, given: Any) -> None:
    group = start_spawn(lay_out_ranks(2))
    pids = pids_of(group)
    with no_free_descriptor(), pytest.raises(OSError, match="Too many open files"):
        group.run_all(method, given)
    for _ in range(2):
        with pytest.raises(HeadraceError, match=r"the worker group is gone, OSError: .*Too many open files"):
            group.run_all("place")
    assert group.has_ended
    assert wait_until_gone(pids)
    group.shutdown()


def test_ranks_of_a_replica_share_its_shard_and_only_the_leader_answers(start: Start) -> None:
    group = start(lay_out_ranks(2, tensor=2))
    pids = pids_of(group)
    assert (group.dp_size, group.world_size, len(pids)) == (1, 2, 1)
    assert group.run_sharded("tag", ["rows"]) == [(0, "rows")]
    # Both ranks summed the same shard.
    assert [float(t) for t in group.run_sharded("total", [torch.ones(3)])] == [6.0]
    started = time.monotonic()
    with pytest.raises(HeadraceError, match=r"^ZeroDivisionError: before its peers \(rank 1 of 2"):
        group.run_all("fail_before_collective", 1)
    assert time.monotonic() - started < 30, "the peer in the collective must not be waited for"
    with pytest.raises(HeadraceError, match="the worker group is gone, ZeroDivisionError"):
        group.run_all("place")
    assert wait_until_gone(pids)
    group.shutdown()


def test_a_killed_worker_is_noticed_and_ends_the_group(start: Start) -> None:
    group = start(lay_out_ranks(2))
    pids = pids_of(group)
    os.kill(pids[1], signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(HeadraceError, match="rank 1 of 2, in sleep") as caught:
        group.run_all("sleep", 60.0)
    assert time.monotonic() - started < 20
    if isinstance(group, SpawnWorkerGroup):
        assert f"worker process {pids[1]} was killed by SIGKILL" in str(caught.value)
    assert wait_until_gone(pids)
    group.shutdown()


@pytest.mark.parametrize("ends", ["well", "by a death"])
def test_nobody_listens_where_the_processes_of_a_group_met_when_it_has_ended(ends: str) -> None:
    group = start_spawn(lay_out_ranks(1))
    (address,) = group.run_all("meeting")
    with socket.create_connection(address):
        pass
    if ends == "well":
        group.shutdown()
    else:
        os.kill(*pids_of(group), signal.SIGKILL)
        with pytest.raises(HeadraceError):
            group.run_all("place")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


def test_an_actor_that_was_killed_is_called_by_its_name_once_and_briefly(ray_cluster: str) -> None:
    from headrace.distributed.worker_groups.ray_group import RayWorkerGroup

    group = RayWorkerGroup(
        WorkerSpec(GroupWorker),
        lay_out_ranks(1),
        settings=SETTINGS,
        alone="the rollout actor",
        cpus_per_worker=0,
    )
    (pid,) = pids_of(group)
    with pytest.raises(ConfigError, match=r"^rows that do not fit \(the rollout actor, in fail\)$"):
        group.run_all("fail", 0)
    os.kill(pid, signal.SIGKILL)
    died = rf"the rollout actor has died: pid {pid} on [\d.]+ was killed or crashed, perhaps for memory \(in sleep\)"
    with pytest.raises(HeadraceError, match=f"^{died}$"):
        group.run_all("sleep", 60.0)
    with pytest.raises(HeadraceError, match=f"^cannot run place: {died}$"):
        group.run_all("place")
    group.shutdown()


def test_a_worker_that_cannot_be_built_leaves_nothing_behind(start: Start) -> None:
    before = running_children()
    with pytest.raises(ConfigError, match=r"nothing there \(rank 1 of 2, in start-up\)"):
        start(lay_out_ranks(2), fail_on=1)
    if start is start_spawn:
        assert running_children() == before


class Counted(float):
    """Counts how often it was pickled."""

    pickled = 0

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        Counted.pickled += 1
        return float, (float(self),)


def test_a_spec_is_pickled_for_each_process_and_once_more_to_look_where_its_code_is() -> None:
    start_spawn(lay_out_ranks(3), scale=Counted(1.0)).shutdown()
    assert Counted.pickled == 3 + 1


DRIVER = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from group_worker import GroupWorker
from headrace.distributed.topology import lay_out_ranks
from headrace.distributed.worker_groups import RankSettings, SpawnWorkerGroup, WorkerSpec

if __name__ == "__main__":
    interrupts = []
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: interrupts.append(1))
    group = SpawnWorkerGroup(WorkerSpec(GroupWorker), lay_out_ranks(2), settings=RankSettings(threads=1))
    print(*group.pids, flush=True)
    print(group.run_all("sleep", 2.0), len(interrupts), flush=True)
    group.run_all("sleep", 4.0)
"""


def test_ctrl_c_and_a_hangup_reach_the_driver_only_and_a_killed_driver_leaves_no_worker(
    tmp_path: Path,
) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER.format(tests=str(Path(__file__).parents[1])))
    driver = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert driver.stdout is not None
    try:
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 2
        for number in (signal.SIGINT, signal.SIGHUP):
            os.killpg(driver.pid, number)
        assert driver.stdout.readline() == "[0, 1] 2\n"
    finally:
        driver.kill()
        driver.wait()
    # Each is in a call of four seconds and finds nobody to answer to.
    assert wait_until_gone(pids, 60.0)


def test_ranks_and_leaders_follow_the_layout() -> None:
    assert lay_out_ranks(8, context=2, tensor=2).replicas == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert lay_out_ranks(3).replicas == [[0], [1], [2]]


def test_the_local_group_has_the_same_interface() -> None:
    class Worker:
        def double(self, shard: int, *, plus: int = 0) -> int:
            return 2 * shard + plus

        def count(self, n: int) -> Iterator[int]:
            yield from range(n)

        def shutdown(self) -> None:
            ended.append(True)

    ended: list[bool] = []
    group = LocalWorkerGroup(Worker())
    assert (group.dp_size, group.world_size) == (1, 1)
    assert group.run_sharded("double", [4], plus=1) == [9]
    assert group.run_all("double", 4) == [8]
    assert list(group.stream("count", 3)) == [0, 1, 2]
    with pytest.raises(ValueError, match="2 shards"):
        group.run_sharded("double", [1, 2])
    group.shutdown()
    assert ended == [True]


def test_nodes_without_headrace_get_what_is_installed_here() -> None:
    pytest.importorskip("ray", reason="needs headrace[ray]")
    from headrace.distributed.virtual_cluster import project_runtime_env

    env = project_runtime_env()
    pinned = dict(entry.split("==") for entry in env["pip"])
    assert {"torch", "tensordict", "transformers", "ray"} <= pinned.keys()
    assert pinned["torch"] == torch.__version__.split("+")[0]
    assert "pytest" not in pinned
    assert (Path(env["py_modules"][0]) / "errors.py").is_file()


@pytest.mark.parametrize("sizes", [{"num_nodes": 3}, {"gpus_per_node": 1}], ids=str)
def test_workers_that_nodes_cannot_share_are_refused_before_ray_starts(sizes: dict[str, int]) -> None:
    pytest.importorskip("ray", reason="needs headrace[ray]")
    from headrace.distributed.virtual_cluster import RayVirtualCluster

    with pytest.raises(ConfigError, match=r"policy\.workers=2 cannot share"):
        RayVirtualCluster(2, **sizes)


def test_a_cluster_with_too_few_gpus_is_refused_at_once(ray_cluster: str) -> None:
    from headrace.distributed.virtual_cluster import RayVirtualCluster

    with pytest.raises(ConfigError, match=r"cluster\.gpus_per_node=2: the Ray cluster has 0 nodes"):
        RayVirtualCluster(2, gpus_per_node=2)

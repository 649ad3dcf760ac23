"""A driver that attaches to a running Ray cluster of two nodes through RAY_ADDRESS; all in processes of their own."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from group_worker import wait_until_gone

TESTS = str(Path(__file__).parents[1])

CLUSTER = """
import sys
from ray.cluster_utils import Cluster

cluster = Cluster()
for _ in range(2):
    cluster.add_node(num_cpus=1, num_gpus=1, include_dashboard=False, object_store_memory=80 * 1024**2)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""

WORKERS = """
import json, sys
sys.path.insert(0, {tests!r})
import ray, torch
from group_worker import GroupWorker
from headrace.distributed.topology import lay_out_ranks
from headrace.distributed.worker_groups import RankSettings, WorkerSpec
from headrace.distributed.worker_groups.ray_group import RayWorkerGroup
from ray.util import placement_group_table

settings = RankSettings(threads=1)
group = RayWorkerGroup(WorkerSpec(GroupWorker), lay_out_ranks(2), settings=settings, num_nodes=2)
cluster = group.cluster
room = placement_group_table(cluster.placement_group)
found = {{
    "nodes": list(room["bundles_to_node_id"].values()),
    "cpus_per_worker": cluster.cpus_per_worker,
    "runtime_env": cluster.runtime_env,
    "places": group.run_all("place"),
    "totals": [float(t) for t in group.run_sharded("total", [torch.ones(2), torch.ones(3)])],
}}
group.shutdown()
found["connected_after_shutdown"] = ray.is_initialized()
print(json.dumps(found))
"""

ROOM_ONLY = """
import json, os, signal
import ray
from headrace.distributed.virtual_cluster import RayVirtualCluster

signals = []
signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
cluster = RayVirtualCluster(2, num_nodes=2)
os.kill(os.getpid(), signal.SIGTERM)
found = {
    "runtime_env": cluster.runtime_env,
    "nodes": len(ray.nodes()),
    "cpus": ray.cluster_resources()["CPU"],
    "signals": signals,
}
cluster.shutdown()
print(json.dumps(found))
"""

TOKEN_HEAD = """
import sys
import ray

ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=80 * 1024**2)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""

CONNECT = """
from headrace.distributed.ray_connection import connect
from headrace.errors import TransportError
try:
    connect()
    print("connected")
except TransportError as error:
    print(error)
"""

ROOM = """
from headrace.distributed.virtual_cluster import RayVirtualCluster
RayVirtualCluster({})
"""


def drive(script: str, address: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a driver script with RAY_ADDRESS set."""
    return subprocess.run(
        [sys.executable, *options, "-c", script],
        env={**os.environ, "RAY_ADDRESS": address, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def answer(script: str, address: str, *options: str, **environment: str) -> dict[str, Any]:
    done = drive(script, address, *options, **environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[str]:
    """Two Ray nodes of one CPU each on this machine; their address."""
    pytest.importorskip("ray", reason="needs headrace[ray]")
    cluster = subprocess.Popen(
        [sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert cluster.stdout is not None
    assert cluster.stdin is not None
    address = cluster.stdout.readline().strip()
    assert address
    yield address
    cluster.stdin.close()
    assert cluster.wait(60) == 0


@pytest.fixture(scope="module")
def first_driver(two_nodes: str) -> dict[str, Any]:
    """What a driver with two workers has found, after its end."""
    return answer(WORKERS.format(tests=TESTS), two_nodes)


def test_workers_spread_over_the_nodes_of_the_cluster_that_ray_address_names(
    first_driver: dict[str, Any],
) -> None:
    assert len(set(first_driver["nodes"])) == 2
    assert first_driver["cpus_per_worker"] == 1.0
    places = first_driver["places"]
    assert [place["RANK"] for place in places] == [0, 1]
    assert [(place["LOCAL_RANK"], place["LOCAL_WORLD_SIZE"]) for place in places] == [(0, 1)] * 2
    assert first_driver["totals"] == [5.0, 5.0]
    # The nodes run this headrace, so there is nothing to send.
    assert first_driver["runtime_env"] is None


def test_a_driver_that_ends_disconnects_and_leaves_the_cluster_to_the_next_one(
    first_driver: dict[str, Any], two_nodes: str
) -> None:
    assert first_driver["connected_after_shutdown"] is False
    assert wait_until_gone([place["pid"] for place in first_driver["places"]])
    # Room for two workers of one CPU each: the first driver's have given theirs back.
    second = answer(ROOM_ONLY, two_nodes)
    assert (second["nodes"], second["cpus"]) == (2, 2.0)
    # A run that attaches still leaves a checkpoint on SIGTERM.
    assert second["signals"] == [signal.SIGTERM]


def test_nodes_with_another_headrace_than_the_driver_get_the_drivers_environment(
    two_nodes: str, tmp_path: Path
) -> None:
    source, package = Path(headrace.__file__).parent, tmp_path / "headrace"
    package.mkdir()
    for entry in source.iterdir():
        if not entry.name.startswith("__"):
            (package / entry.name).symlink_to(entry)
    (package / "__init__.py").write_text('__version__ = "99.0"\n')
    installed = tmp_path / "headrace-99.0.dist-info"
    installed.mkdir()
    lines = ("Metadata-Version: 2.1", "Name: headrace", "Version: 99.0", "Requires-Dist: torch>=2.11", "")
    (installed / "METADATA").write_text("\n".join(lines))
    env = answer(ROOM_ONLY, two_nodes, PYTHONPATH=str(tmp_path))["runtime_env"]
    assert env["pip"] == [f"torch=={torch.__version__.split('+')[0]}"]
    assert (Path(env["py_modules"][0]) / "errors.py").is_file()


def test_a_checkout_on_the_path_that_is_not_installed_attaches_like_any_other(
    two_nodes: str, tmp_path: Path
) -> None:
    for entry in Path(torch.__file__).parents[1].iterdir():
        if "headrace" not in entry.name:
            (tmp_path / entry.name).symlink_to(entry)
    # The package alone: an installation leaves its metadata beside it.
    (tmp_path / "headrace").symlink_to(Path(headrace.__file__).parent)
    path = str(tmp_path)
    script = "import importlib.metadata as m\nassert not [*m.distributions(name='headrace')]\n"
    # Without the site's packages, where headrace is installed.
    found = answer(script + ROOM_ONLY, two_nodes, "-S", PYTHONPATH=path)
    assert found["runtime_env"] is None


def test_more_nodes_than_the_cluster_has_are_refused_with_both_numbers(two_nodes: str) -> None:
    done = drive(ROOM.format("3, num_nodes=3"), two_nodes)
    assert done.returncode != 0
    assert "cluster.num_nodes=3" in done.stderr
    assert "the Ray cluster has 2 nodes" in done.stderr


def test_gpus_for_the_rollout_actor_that_the_cluster_lacks_are_refused_at_once_with_both_numbers(
    two_nodes: str,
) -> None:
    done = drive(ROOM.format("2, num_nodes=2, gpus_per_node=1, gpus_beside=1"), two_nodes)
    last = done.stderr.splitlines()[-1]
    assert "the run needs 3 GPUs and the Ray cluster has 2: the workers take 2 (policy.workers)" in last
    assert "the rollout actor 1 beside them (cluster.rollout_gpus" in last
    assert "cluster.autoscales=true" in last
    assert "no room yet" not in done.stderr


def test_nodes_that_an_autoscaler_may_add_are_waited_for_as_long_as_the_knob_says(two_nodes: str) -> None:
    done = drive(ROOM.format("3, num_nodes=3, autoscales=True, startup_timeout_s=6.0"), two_nodes)
    assert "Ray has no room yet for 3 x 1 CPU, 0 GPU (free: 2 CPU, 2 GPU); waiting up to 6 s" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert "Ray found no room for 3 x 1 CPU, 0 GPU within 6 s; it has 2 CPU, 2 GPU in all" in last
    assert "cluster.startup_timeout_s" in last


OTHER = """
import ray, sys
from headrace.config import DataPlaneConfig
from headrace.data_plane.adapters.transfer_queue import list_stores

ray.init(address="auto", log_to_driver=False)
own = ray.get_runtime_context().gcs_address
for address in (own, f"localhost:{own.rpartition(':')[2]}", "auto", "127.0.0.1:1"):
    print("asked", address, file=sys.stderr)
    assert list_stores(DataPlaneConfig(ray_address=address)) == {}
"""


def test_an_address_that_is_not_used_since_the_process_is_on_another_cluster_is_told(two_nodes: str) -> None:
    done = drive(OTHER, two_nodes)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("asked") or "is not used" in line]
    assert [line.startswith("asked") for line in told] == [True, True, True, True, False]
    expected = (
        "data_plane.ray_address=127.0.0.1:1 is not used: this process is connected to the Ray cluster at "
    )
    assert expected + two_nodes in told[-1]


def test_an_address_where_nothing_listens_is_named_at_once() -> None:
    pytest.importorskip("ray", reason="needs headrace[ray]")
    done = drive(ROOM_ONLY, "127.0.0.1:1")
    assert done.returncode != 0
    last = done.stderr.splitlines()[-1]
    assert "cannot connect to Ray at RAY_ADDRESS=127.0.0.1:1: nothing listens there" in last


def test_an_address_where_something_else_listens_is_named_soon() -> None:
    pytest.importorskip("ray", reason="needs headrace[ray]")
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        start = time.monotonic()
        done = drive(ROOM_ONLY, address)
        took_s = time.monotonic() - start
    assert done.returncode != 0
    last = done.stderr.splitlines()[-1]
    assert f"cannot connect to Ray at RAY_ADDRESS={address}: something listens there, but does not" in last
    # Ray by itself takes two minutes.
    assert took_s < 60


def test_a_driver_without_the_clusters_token_is_told_what_sets_it(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs headrace[ray]")
    token = tmp_path / "token"
    token.write_text("8c1f" * 8)
    mine = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    with subprocess.Popen(
        [sys.executable, "-c", TOKEN_HEAD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **mine},
    ) as head:
        assert head.stdout is not None
        address = head.stdout.readline().strip()
        assert address
        said = [
            drive(CONNECT, address, **environment).stdout.splitlines()[-1]
            for environment in (
                {"RAY_AUTH_MODE": "disabled"},
                {**mine, "RAY_AUTH_TOKEN_PATH": "nowhere"},
                mine,
            )
        ]
    *refused, connected = said
    assert connected == "connected"
    for text in refused:
        assert f"cannot connect to Ray at RAY_ADDRESS={address}" in text
        assert "RAY_AUTH_MODE" in text
        assert "RAY_AUTH_TOKEN_PATH" in text

"""A client process of a transfer_queue store that stalls with a lease, and is killed while it waits."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from contract_batches import claim, numbers, put_numbers, register

from headrace.data_plane import build_data_plane_client
from ray_session import SEVERAL, SIMPLE, fresh_store

pytest.importorskip("transfer_queue", reason="needs headrace[ray]")
import ray

from headrace.data_plane.adapters.transfer_queue_cluster import find_index

# Leases four rows, stalls until a line comes in, and tries what a holder does; then waits for rows, and for room.
PROCESS = """
import json, sys, threading
import torch
from tensordict import TensorDict
from headrace.data_plane import build_data_plane_client, write_columns
from headrace.errors import DataPlaneError

client = build_data_plane_client(json.loads(sys.argv[1]), bootstrap=False)
meta = client.claim_meta("p", "train", ["x"], 4, lease_s=1.0, holder="stalled")
print(json.dumps(meta.sample_ids), flush=True)
sys.stdin.readline()

def outcome(call):
    try:
        call()
    except DataPlaneError as error:
        return type(error).__name__
    return "done"

late = torch.full((4,), 9.0)
print(json.dumps({
    "write": outcome(lambda: write_columns(client, meta, {"x": late})),
    "clear": outcome(lambda: client.clear_samples(meta.sample_ids, "p", claim=meta.extra_info["claim"])),
    "finish": outcome(lambda: client.finish_claim(meta)),
    "renew": outcome(lambda: client.renew_claim(meta, 60)),
    "release": outcome(lambda: client.release_claim(meta)),
}), flush=True)
sys.stdin.readline()
for wait in (
    lambda: client.claim_meta("p", "train", ["x"], 4, timeout_s=600),
    lambda: client.wait_for_room("p", 6, 600),
):
    threading.Thread(target=wait, daemon=True).start()
print("waits", flush=True)
threading.Event().wait()
"""


@pytest.fixture(scope="module", params=[SIMPLE, SEVERAL], ids=["one index", "two indexes"])
def store(
    request: pytest.FixtureRequest, transfer_queue_engine: None, ray_cluster: str
) -> Iterator[tuple[Any, dict[str, Any]]]:
    config = {**fresh_store(request.param), "ray_address": ray_cluster}
    client = build_data_plane_client(config, bootstrap=True)
    register(client, "train", rows=8)
    put_numbers(client, list("abcd"), x=0)
    yield client, config
    client.close()


@pytest.fixture(scope="module")
def other(store: tuple[Any, dict[str, Any]]) -> Iterator["subprocess.Popen[str]"]:
    """A process that has leased four rows."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = subprocess.Popen(
        [sys.executable, "-c", PROCESS, json.dumps(store[1])],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


def go_on(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("go on\n")
    process.stdin.flush()


def told(process: "subprocess.Popen[str]") -> Any:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def becomes(value: int, read: Callable[[], int], within_s: float = 20) -> bool:
    deadline = time.monotonic() + within_s
    while read() != value and time.monotonic() < deadline:
        time.sleep(0.05)
    return read() == value


def test_a_holder_that_stalls_longer_than_its_lease_changes_nothing_any_more(
    store: tuple[Any, dict[str, Any]], other: "subprocess.Popen[str]"
) -> None:
    client, _ = store
    assert json.loads(told(other)) == list("abcd")
    os.kill(other.pid, signal.SIGSTOP)
    mine = client.claim_meta("p", "train", ["x"], 4, timeout_s=20, lease_s=60)
    assert mine.sample_ids == list("abcd"), "the end of the lease gives the rows to whoever waits"
    os.kill(other.pid, signal.SIGCONT)
    go_on(other)
    refused = dict.fromkeys(("write", "clear", "finish", "renew"), "ClaimExpired")
    assert json.loads(told(other)) == {**refused, "release": "done"}
    assert numbers(client, list("abcd"), "x") == [0, 1, 2, 3]
    client.clear_samples(mine.sample_ids, "p", claim=mine.extra_info["claim"])
    assert client.sample_ids("p") == []


def test_a_process_that_is_killed_while_it_waits_takes_nothing_and_is_forgotten(
    store: tuple[Any, dict[str, Any]], other: "subprocess.Popen[str]"
) -> None:
    """The last test of the process."""
    client, _ = store
    put_numbers(client, list("efg"), x=0)
    go_on(other)
    assert told(other) == "waits"

    def held() -> int:
        def count(_: Any) -> int:
            calls = (one.call for one in gc.get_objects() if type(one).__name__ == "_Held")
            return sum(call.wait_s > 0 for call in calls)

        client.sample_ids("p")  # the index keeps the last call that came
        index: Any = find_index("simple")
        found: int = ray.get(index.__ray_call__.remote(count), timeout=30)
        return found

    assert becomes(2, held), "one waits for a fourth row, the other for room for six"
    other.kill()
    other.wait()
    assert becomes(0, held)
    put_numbers(client, ["h"], x=3)
    assert claim(client, 4) == list("efgh")

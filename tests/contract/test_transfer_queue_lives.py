"""What a process that dies, or closes, leaves behind in a transfer_queue store, and who frees it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from contract_batches import numbers, put_numbers

from headrace.data_plane import build_data_plane_client
from headrace.errors import DataPlaneError
from ray_session import SIMPLE, fresh_store

pytest.importorskip("transfer_queue", reason="needs headrace[ray]")
from typer.testing import CliRunner

from headrace.cli import app

# Overwrites rows and closes; opens two stores; and dies with a put stored, before it is committed.
PROCESS = """
import json, os, signal, sys, torch
from tensordict import TensorDict
from headrace.config import DataPlaneConfig
from headrace.data_plane.adapters.transfer_queue import TransferQueueDataPlaneClient

class Dies(TransferQueueDataPlaneClient):
    dies = False

    def _ask(self, operation, *arguments, **options):
        if self.dies and operation in ("put", "commit"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._ask(operation, *arguments, **options)

stores = {name: DataPlaneConfig(**config) for name, config in json.loads(sys.argv[1]).items()}
fields = TensorDict({f"x{i}": torch.ones(2) for i in range(16)}, batch_size=[2])
worker = Dies(stores["worked in"], bootstrap=False)
for _ in range(2):
    worker.put_samples(["a", "b"], "p", fields=fields)
worker.close()
for name in ("left", "left, too"):
    Dies(stores[name], bootstrap=True).put_samples(["a", "b"], "p", fields=fields)
writer = Dies(stores["written to"], bootstrap=False)
writer.dies = True
writer.put_samples(["a", "b"], "p", fields=fields)
"""

# Has two stores, and closes the one that it has opened first before the other.
TWO_STORES = """
import json, sys, torch
from tensordict import TensorDict
from headrace.data_plane import build_data_plane_client
from headrace.errors import ClaimTimeout

first, second = (build_data_plane_client(c, bootstrap=True) for c in json.loads(sys.argv[1]))
first.close()
second.register_partition("p", ["x"], 2, ["t"])
second.put_samples(["a"], "p", fields=TensorDict({"x": torch.ones(1)}, batch_size=[1]))
try:
    second.claim_meta("p", "t", ["x"], 2, timeout_s=1.5)
except ClaimTimeout:
    second.close()
"""


def becomes(value: int, read: Callable[[], int]) -> bool:
    deadline = time.monotonic() + 10
    while read() != value and time.monotonic() < deadline:
        time.sleep(0.05)
    return read() == value


def run_process(script: str, stores: object) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", script, json.dumps(stores)]
    return subprocess.run(command, env=environment, check=False, timeout=200, capture_output=True, text=True)


def left_of(name: str) -> list[str]:
    """Return what TransferQueue has of a store that is closed."""
    watch: Any = build_data_plane_client(fresh_store(SIMPLE), bootstrap=True)
    blocks = watch._link.blocks
    listing = blocks._client.async_get_partition_list()
    partitions = blocks._result(listing, "listing", watch._deadline())
    watch.close()
    return [partition for partition in partitions if partition.startswith(f"headrace/{name}/")]


@pytest.fixture(scope="module")
def stores(transfer_queue_engine: None, ray_cluster: str) -> dict[str, dict[str, Any]]:
    """The config of each store that the process below uses."""
    names = ("worked in", "written to", "left", "left, too")
    return {name: {**fresh_store(SIMPLE), "ray_address": ray_cluster} for name in names}


@pytest.fixture(scope="module")
def opened(stores: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The stores that are this process's, after another one has worked in them and is dead."""
    mine = {
        name: build_data_plane_client(stores[name], bootstrap=True) for name in ("worked in", "written to")
    }
    done = run_process(PROCESS, stores)
    assert done.returncode == -signal.SIGKILL, done.stderr
    yield mine
    for client in mine.values():
        client.close()


def test_a_put_whose_process_was_killed_before_the_commit_leaves_no_block_to_the_next_clear(
    opened: dict[str, Any],
) -> None:
    client = opened["written to"]
    assert client.stored_blocks() == 16, "the process died with its blocks stored"
    client.clear_samples(None, "p")
    assert client.stored_blocks() == 0


def test_a_worker_that_overwrites_and_closes_hands_over_what_it_has_not_dropped(
    opened: dict[str, Any],
) -> None:
    client = opened["worked in"]
    assert numbers(client, ["b", "a"], "x3") == [1, 1]
    assert becomes(16, client.stored_blocks)


def headrace(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_a_store_whose_driver_crashed_is_listed_as_left_and_can_be_dropped(
    opened: dict[str, Any], stores: dict[str, dict[str, Any]]
) -> None:
    left, live = stores["left, too"]["store_name"], stores["written to"]["store_name"]
    code, text = headrace("store", "list")
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.split()}
    assert code == 0
    assert (rows[left][2], rows[left][-1], rows[live][-1]) == ("2", "gone", "alive")
    assert headrace("store", "drop", left) == (0, f"store '{left}' is dropped\n")
    assert left not in headrace("store", "list")[1]
    code, text = headrace("store", "drop", left)
    assert (code, f"no store '{left}'" in text) == (1, True)
    code, text = headrace("store", "drop", live)
    assert (code, "which lives; close it there, or add --force" in text) == (1, True)


def test_a_name_whose_driver_crashed_goes_to_the_next_who_opens_it_and_is_empty(
    opened: dict[str, Any], stores: dict[str, dict[str, Any]]
) -> None:
    attached = build_data_plane_client(stores["left"], bootstrap=False)
    taken: Any = build_data_plane_client(stores["left"], bootstrap=True)
    assert (taken.stored_blocks(), taken.partition_ids()) == (0, [])
    put_numbers(taken, ["c"], x=5)
    with pytest.raises(DataPlaneError, match="is closed"):
        numbers(attached, ["c"], "x")
    with pytest.raises(DataPlaneError, match="open already, by process"):
        build_data_plane_client(stores["left"], bootstrap=True)
    assert numbers(taken, ["c"], "x") == [5]
    taken.close()
    attached.close()


def test_a_store_that_is_dropped_by_force_is_closed_to_its_clients(opened: dict[str, Any]) -> None:
    config = fresh_store(SIMPLE)
    mine = build_data_plane_client(config, bootstrap=True)
    put_numbers(mine, ["a"], x=1)
    assert headrace("store", "drop", config["store_name"], "--force")[0] == 0
    with pytest.raises(DataPlaneError, match="is closed"):
        numbers(mine, ["a"], "x")
    mine.close()


def test_a_store_that_is_cleared_and_closed_leaves_nothing_in_transfer_queue_and_nothing_to_warn_of(
    transfer_queue_engine: None, caplog: pytest.LogCaptureFixture
) -> None:
    config = fresh_store(SIMPLE)
    mine = build_data_plane_client(config, bootstrap=True)
    put_numbers(mine, ["a"], x=1)
    mine.clear_samples(None, "p")
    mine.close()
    assert left_of(config["store_name"]) == []
    assert caplog.text == ""


def test_of_two_stores_of_a_process_the_one_that_is_closed_first_keeps_nothing_from_the_other(
    transfer_queue_engine: None, ray_cluster: str
) -> None:
    two = [{**fresh_store(SIMPLE), "ray_address": ray_cluster} for _ in range(2)]
    done = run_process(TWO_STORES, two)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [left_of(config["store_name"]) for config in two] == [[], []]


def test_blocks_that_could_not_be_dropped_in_time_are_told_with_the_reason(
    transfer_queue_engine: None, caplog: pytest.LogCaptureFixture
) -> None:
    config = fresh_store(SIMPLE)
    mine: Any = build_data_plane_client(config, bootstrap=True)
    mine._link.blocks.drop_later("headrace/some", [1, 2], 0.0, lambda: None)
    assert becomes(1, lambda: len(caplog.messages))
    assert caplog.messages == ["2 blocks of headrace/some are left in TransferQueue: TimeoutError()"]
    mine.close()

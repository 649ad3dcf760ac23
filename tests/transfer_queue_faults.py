"""Kills each process of a transfer_queue store in turn and prints what its clients saw, as JSON.

Run as a script: it needs a Ray cluster of its own. With the address of one, it is a client there, in a Ray job of its
own, which looks once a line comes in.
"""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray
import torch
from tensordict import TensorDict

from headrace.data_plane.adapters.transfer_queue import TransferQueueDataPlaneClient
from headrace.data_plane.interfaces import DataPlaneConfig
from headrace.errors import DataPlaneError

TIMEOUT_S = 30.0


def attempt(call: Any) -> dict[str, Any]:
    start = time.monotonic()
    try:
        call()
        outcome, message = "ok", ""
    except DataPlaneError as error:
        outcome, message = type(error).__name__, str(error)
    return {"outcome": outcome, "message": message, "seconds": time.monotonic() - start}


def process_of(actor: Any) -> int:
    pid: int = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=30)
    return pid


# Two blocks: one in each of two storage units.
FIELDS = TensorDict({"x": torch.arange(4), "y": torch.arange(4)}, batch_size=[4])


def look_from_another_job(address: str) -> None:
    """Print what this process sees, and before that, that it is ready."""
    config = DataPlaneConfig(impl="transfer_queue", timeout_s=TIMEOUT_S, ray_address=address)
    client = TransferQueueDataPlaneClient(config, bootstrap=False)
    assert client.get_samples(list("dcba"), "p", ["x"])["x"].tolist() == [3, 2, 1, 0]
    print("READY", flush=True)
    sys.stdin.readline()
    seen = {
        "get": attempt(lambda: client.get_samples(list("abcd"), "p", ["x", "y"])),
        "put": attempt(lambda: client.put_samples(list("efgh"), "p", fields=FIELDS)),
        "close": attempt(client.close),
    }
    print(json.dumps(seen), flush=True)


def start_another_job() -> "subprocess.Popen[str]":
    """Return a process that has read from the store."""
    command = [sys.executable, __file__, ray.get_runtime_context().gcs_address]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    while (line := other.stdout.readline()) != "READY\n":
        assert line, "the other job has ended"
    return other


def waiting_claim(client: TransferQueueDataPlaneClient) -> "tuple[threading.Thread, list[Any]]":
    """Return a thread that claims more rows than will come, and what it will have seen."""
    client.register_partition("waited for", ["x"], 4, ["t"])
    seen: list[Any] = []

    def claim() -> None:
        seen.append(attempt(lambda: client.claim_meta("waited for", "t", ["x"], 4, timeout_s=60)))

    thread = threading.Thread(target=claim, daemon=True)
    thread.start()
    return thread, seen


def run(victim: str, units: int, indexes: int = 1) -> dict[str, Any]:
    config = DataPlaneConfig(
        impl="transfer_queue", timeout_s=TIMEOUT_S, num_storage_units=units, indexes=indexes
    )
    client = TransferQueueDataPlaneClient(config, bootstrap=True)
    client.put_samples(list("abcd"), "p", fields=FIELDS)
    assert client.get_samples(list("dcba"), "p", ["x"])["x"].tolist() == [3, 2, 1, 0]
    assert client._engine is not None
    actors = client._engine.actors
    (*index, controller), storage = actors[: indexes + 1], actors[indexes + 1 :]
    pids = [process_of(actor) for actor in actors]
    victims = {"index": index[-1:], "controller": [controller], "storage": storage[-1:]}[
        victim.removeprefix("second ")
    ]
    thread, waited = waiting_claim(client) if "index" in victim else (None, [])
    other = start_another_job() if victim == "storage" else None
    doomed = [process_of(actor) for actor in victims]
    for actor in victims:
        ray.kill(actor)
    while any(Path(f"/proc/{pid}").exists() for pid in doomed):
        time.sleep(0.05)
    theirs = json.loads(other.communicate("now\n", timeout=100)[0]) if other is not None else {}
    if thread is not None:
        thread.join(60)
    seen = {
        "put": attempt(lambda: client.put_samples(list("efgh"), "p", fields=FIELDS)),
        "get": attempt(lambda: client.get_samples(list("abcd"), "p", ["x", "y"])),
        "claim": attempt(lambda: client.claim_meta("p", "t", ["x"], 1, timeout_s=1)),
        "clear": attempt(lambda: client.clear_samples(list("abcd"), "p")),
        "close": attempt(client.close),
    }
    return {"seen": seen, "seen by another job": theirs, "pids": pids, "waited": waited}


def start_too_slowly() -> dict[str, Any]:
    config = DataPlaneConfig(impl="transfer_queue", startup_timeout_s=0.5)
    seen = attempt(lambda: TransferQueueDataPlaneClient(config, bootstrap=True))
    return {"seen": {"start": seen}, "pids": []}


def main() -> None:
    ray.init("local", num_cpus=1, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    report = {
        victim: run(victim, units) for victim, units in (("storage", 2), ("controller", 1), ("index", 1))
    }
    report["second index"] = run("second index", 1, indexes=2)
    report["slow start"] = start_too_slowly()
    ray.shutdown()
    print("REPORT" + json.dumps(report))


if __name__ == "__main__":
    look_from_another_job(sys.argv[1]) if sys.argv[1:] else main()

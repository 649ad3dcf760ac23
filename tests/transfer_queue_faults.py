"""Kills each process of a transfer_queue store in turn and prints what its clients saw, as JSON.

Run as a script: it needs a Ray cluster of its own.
"""

import json
import logging
import os
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


def run(victim: str, units: int) -> dict[str, Any]:
    config = DataPlaneConfig(impl="transfer_queue", timeout_s=TIMEOUT_S, num_storage_units=units)
    client = TransferQueueDataPlaneClient(config, bootstrap=True)
    # Two blocks: one in each of two storage units.
    fields = TensorDict({"x": torch.arange(4), "y": torch.arange(4)}, batch_size=[4])
    client.put_samples(list("abcd"), "p", fields=fields)
    assert client.get_samples(list("dcba"), "p", ["x"])["x"].tolist() == [3, 2, 1, 0]
    assert client._engine is not None
    index, controller, *storage = client._engine.actors
    pids = [process_of(actor) for actor in (index, controller, *storage)]
    victims = {"index": [index], "controller": [controller], "storage": storage[-1:]}[victim]
    doomed = [process_of(actor) for actor in victims]
    for actor in victims:
        ray.kill(actor)
    while any(Path(f"/proc/{pid}").exists() for pid in doomed):
        time.sleep(0.05)
    seen = {
        "put": attempt(lambda: client.put_samples(list("efgh"), "p", fields=fields)),
        "get": attempt(lambda: client.get_samples(list("abcd"), "p", ["x", "y"])),
        "claim": attempt(lambda: client.claim_meta("p", "t", ["x"], 1, timeout_s=1)),
        "clear": attempt(lambda: client.clear_samples(list("abcd"), "p")),
        "close": attempt(client.close),
    }
    return {"seen": seen, "pids": pids}


def start_too_slowly() -> dict[str, Any]:
    config = DataPlaneConfig(impl="transfer_queue", startup_timeout_s=0.5)
    seen = attempt(lambda: TransferQueueDataPlaneClient(config, bootstrap=True))
    return {"seen": {"start": seen}, "pids": []}


def main() -> None:
    ray.init("local", num_cpus=1, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    report = {
        victim: run(victim, units) for victim, units in (("storage", 2), ("controller", 1), ("index", 1))
    }
    report["slow start"] = start_too_slowly()
    ray.shutdown()
    print("REPORT" + json.dumps(report))


if __name__ == "__main__":
    main()

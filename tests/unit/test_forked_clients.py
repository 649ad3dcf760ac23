"""Clients that a fork copies into another process, as multiprocessing does on Linux unless it is told otherwise."""

import subprocess
import sys
from pathlib import Path

import pytest

FORK = """
import os, sys
import torch
from headrace.data_plane import build_data_plane_client, kv_first_write
from headrace.errors import DataPlaneError

folder, impl, with_journal = sys.argv[1:]
config = {"enabled": True, "impl": impl, "journal": {"enabled": with_journal == "1", "folder": folder}}
store = build_data_plane_client(config, bootstrap=True)
store.register_partition("train", ["input_ids"], 2, ["train"])

def put(client, name):
    batch = {"input_ids": [torch.arange(3)], "input_lengths": torch.tensor([3])}
    kv_first_write(batch, sample_ids=[name], dp_client=client, partition_id="train")

def attempt(what, *arguments, **named):
    try:
        what(*arguments, **named)
        print("went through", flush=True)
    except DataPlaneError as error:
        print(error, flush=True)

child = os.fork()
if not child:
    attempt(put, store, "theirs_g0")
    attempt(store.claim_meta, "train", "train", ["input_ids"], 1)
    attempt(build_data_plane_client, config, bootstrap=False)
    store.close()
    os._exit(0)
os.waitpid(child, 0)
put(store, "ours_g0")
print(os.getpid(), child, *store.sample_ids("train"))
store.close()
"""


@pytest.mark.parametrize("journal", ["0", "1"])
@pytest.mark.parametrize("impl", ["local", "transfer_queue"])
def test_a_client_that_a_fork_has_copied_refuses_to_work_and_leaves_the_store_alone(
    tmp_path: Path, impl: str, journal: str
) -> None:
    run = [sys.executable, "-c", FORK, str(tmp_path), impl, journal]
    put, claim, attach, ours = subprocess.run(
        run, capture_output=True, text=True, check=True, timeout=300
    ).stdout.splitlines()
    home, child, *ids = ours.split()
    for text in (put, claim):
        assert f"process {home}" in text
        assert f"process {child}" in text
        assert "'spawn'" in text
    assert ("impl=transfer_queue" if impl == "local" else "'spawn'") in attach
    assert ids == ["ours_g0"]

"""A journal whose host's clock is set back between two lives of a run, each of which has several processes."""

import json
import subprocess
import sys
from pathlib import Path

LIVES = """
import json, os, sys, time
from pathlib import Path
import torch
from headrace.data_plane import JournalDataPlaneClient, build_data_plane_client, kv_first_write, restore
from headrace.data_plane.adapters.local import LocalDataPlaneClient

folder, real = Path(sys.argv[1]), time.time_ns

def opened():
    journal = {"enabled": True, "folder": str(folder), "fsync": "never"}
    return build_data_plane_client({"journal": journal}, bootstrap=True)

def put(client, uid):
    batch = {"input_ids": torch.ones(2, 3, dtype=torch.int64), "input_lengths": torch.tensor([3, 2])}
    ids = [f"{uid}_g0", f"{uid}_g1"]
    kv_first_write(batch, sample_ids=ids, dp_client=client, partition_id="train", once=True)

def process(do, *arguments):
    # Each has its own memory of the time.
    child = os.fork()
    if not child:
        do(*arguments)
        os._exit(0)
    return child

def live(do, ahead_s):
    time.time_ns = lambda: real() + int(ahead_s * 1e9)
    assert os.waitpid(process(do), 0)[1] == 0

def first():
    client = opened()
    client.register_partition("train", ["input_ids"], 100, ["train"], grpo_group_size=2)
    put(client, "trained"), put(client, "left")

def worker(is_open, go_on):
    # A client of the same store, as it were: a local store has clients in its own process alone.
    client = JournalDataPlaneClient(LocalDataPlaneClient(), folder, fsync="never")
    os.write(is_open, b" ")
    os.read(go_on, 1)
    put(client, "by a worker, trained"), put(client, "by a worker, left")

def second():
    ours = opened()
    (opens, is_open), (go_on, restored) = os.pipe(), os.pipe()
    other = process(worker, is_open, go_on)
    os.read(opens, 1)
    restore(ours, folder)
    os.write(restored, b" ")
    assert os.waitpid(other, 0)[1] == 0
    for uid in ("trained", "by a worker, trained"):
        ours.clear_samples([f"{uid}_g0", f"{uid}_g1"], "train")

def last():
    client = opened()
    restore(client, folder)
    print(json.dumps(client.sample_ids("train")), flush=True)

live(first, 3600)
live(second, 0)
live(last, 0)
"""


def test_a_clock_that_is_set_back_between_two_lives_brings_nothing_back_and_loses_nothing(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", LIVES, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    uids = ("left", "by a worker, left")
    assert json.loads(done.stdout) == [f"{uid}_g{i}" for uid in uids for i in (0, 1)]

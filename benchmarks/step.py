"""What does the data plane add to a GRPO step: seconds per stage, bytes per column?

The demo: the loop over the data plane against the loop with rows in memory, the same steps from the same weights, held
to bit-identical losses and gradient norms. Judged by processor time, since a step is mostly arithmetic and the
difference is smaller than what neighbours on the machine cause.

A simulated step (512 rows of up to 4k tokens, 8 ranks in threads, compute replaced by sleep): ranks that fetch from
the local store against a driver that gathers, pads, splits and sends. A hop between driver and rank is a pickle
either way; the store's own copies stand for its hop.
"""

import math
import pickle
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from columns import Batch, lognormal, make_batch
from run import Bench, main

from headrace.algorithms.grpo import Session, StepResult, run_step
from headrace.algorithms.loop import update_weights
from headrace.algorithms.run import build_session
from headrace.data_plane import KVBatchMeta, kv_first_write, read_columns, write_columns
from headrace.data_plane.adapters.local import LocalDataPlaneClient
from headrace.data_plane.preshard import shard_meta_for_dp
from headrace.utils.recipe import load_recipe
from headrace.utils.timer import Timer

SLOWER, FASTER, DRIVER_PERCENT = 1.03, 2.0, 1.0
_DEMO_ROUNDS = 41
"""A step varies by more, from round to round, than the loops differ."""
RECIPE = "demo_moe"
RANKS, COMPUTE_S = 8, 0.005
SCORED = ("input_ids", "token_mask")


class DemoLoop:
    """The demo's session over one kind of rows, one step per call."""

    def __init__(self, folder: str, *, data_plane: bool, quick: bool) -> None:
        changes = [
            f"run_dir={folder}",
            f"data_plane.enabled={str(data_plane).lower()}",
            "warm_start.enabled=false",
            *(["grpo.num_prompts_per_step=8", "policy.train_global_batch_size=64"] if quick else []),
        ]
        recipe = load_recipe(RECIPE, changes)
        self.session: Session = build_session(recipe)
        update_weights(self.session)
        self.timer, self.results = Timer(), list[StepResult]()

    def step(self) -> None:
        """Run the next step."""
        result = run_step(self.session, len(self.results) + 1, self.timer)
        update_weights(self.session)
        self.results.append(result)


def demo(bench: Bench) -> None:
    """Both loops in turn."""
    with tempfile.TemporaryDirectory() as folder:
        memory = DemoLoop(f"{folder}/memory", data_plane=False, quick=bench.quick)
        plane = DemoLoop(f"{folder}/plane", data_plane=True, quick=bench.quick)
        torch.set_num_threads(1)
        try:
            ways = {"in memory": memory.step, "data plane": plane.step}
            rounds = bench.repeats if bench.quick else _DEMO_ROUNDS
            times = bench.race("demo step", ways, clock=time.process_time, repeats=rounds)
        finally:
            memory.session.close()
            plane.session.close()
    for one, other in zip(memory.results, plane.results, strict=True):
        for name in ("train/loss", "train/grad_norm", "reward/mean"):
            assert one.metrics[name] == other.metrics[name], name
    steps = len(plane.results)
    bench.notes["demo"] = {
        "seconds_per_stage": {
            name: {stage: round(total / steps, 5) for stage, total in loop.timer.totals().items()}
            for name, loop in (("in memory", memory), ("data plane", plane))
        },
        "bytes_per_column_and_step": plane.results[-1].bytes_by_column,
    }
    bench.figure("demo_slower", times["data plane"].ratio, "x", at_most=SLOWER)


class Ledger:
    """Counts the bytes that pass through the driver."""

    def __init__(self) -> None:
        self.driver_bytes = 0

    def hop(self, value: Any) -> Any:
        """Send a value between the driver and another process."""
        data = pickle.dumps(value, protocol=5)
        self.driver_bytes += len(data)
        return pickle.loads(data)


def in_ranks(work: Callable[[int], Any]) -> list[Any]:
    """Run all ranks at once."""
    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(work, range(RANKS)))


def fake_logprobs(input_ids: torch.Tensor) -> torch.Tensor:
    """What stands for a forward: a sleep, and numbers that tell rows apart."""
    time.sleep(COMPUTE_S)
    return input_ids.float().mul_(-0.01)


def checksum(data: Any) -> float:
    """What stands for training: a sleep, and a number that depends on every column."""
    time.sleep(COMPUTE_S)
    return float(sum(data[name].double().sum() for name in sorted(data.keys())))


def driver_gather(rollouts: list[dict[str, list[torch.Tensor]]], ledger: Ledger) -> float:
    """The driver gathers all rows, pads them, splits them, and sends them; twice, as logprobs come between."""
    parts = [ledger.hop(part) for part in rollouts]
    padded = {
        name: torch.nn.utils.rnn.pad_sequence([row for part in parts for row in part[name]], batch_first=True)
        for name in parts[0]
    }

    def shards(columns: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        cut = {name: column.chunk(RANKS) for name, column in columns.items()}
        return [ledger.hop({name: cut[name][rank].clone() for name in cut}) for rank in range(RANKS)]

    seeds = shards({name: padded[name] for name in SCORED})
    scores = in_ranks(lambda rank: fake_logprobs(seeds[rank]["input_ids"]))
    padded["prev_logprobs"] = torch.cat([ledger.hop(score) for score in scores])
    trained = shards(padded)
    return float(sum(in_ranks(lambda rank: checksum(trained[rank]))))


def through_store(rollouts: list[dict[str, list[torch.Tensor]]], names: list[str], ledger: Ledger) -> float:
    """Rollout workers put rows, ranks fetch theirs; the driver sees metadata."""
    client = LocalDataPlaneClient()

    def put(rank: int) -> KVBatchMeta:
        rows = rollouts[rank]
        lengths = torch.tensor([len(row) for row in rows["input_ids"]])
        ids = [f"{rank}.{row}" for row in range(len(lengths))]
        batch = {**rows, "input_lengths": lengths}
        return kv_first_write(batch, sample_ids=ids, dp_client=client, partition_id="train")

    parts = [ledger.hop(meta) for meta in in_ranks(put)]
    metas, _ = shard_meta_for_dp(parts[0].concat(*parts[1:]), dp_world=RANKS)
    shards = [ledger.hop(meta) for meta in metas]

    def score(rank: int) -> None:
        data = read_columns(client, shards[rank], SCORED)
        write_columns(client, shards[rank], {"prev_logprobs": fake_logprobs(data["input_ids"])})

    in_ranks(score)
    total = sum(in_ranks(lambda rank: checksum(read_columns(client, shards[rank], names))))
    client.close()
    return float(total)


def split_rollouts(batch: Batch) -> list[dict[str, list[torch.Tensor]]]:
    """Return each rollout worker's rows: everything but the logprobs that a rank computes."""
    columns = {name: rows for name, rows in batch.ragged().items() if name != "prev_logprobs"}
    share = len(batch.lengths) // RANKS
    return [
        {name: rows[rank * share : (rank + 1) * share] for name, rows in columns.items()}
        for rank in range(RANKS)
    ]


def simulated(bench: Bench) -> None:
    """Both ways of moving the same rollouts."""
    rows, longest = (64, 256) if bench.quick else (512, 4096)
    batch = make_batch(lognormal(rows, longest // 3, longest, shortest=longest // 16))
    rollouts, names = split_rollouts(batch), list(batch.padded)
    gather, store = Ledger(), Ledger()
    sums = driver_gather(rollouts, gather), through_store(rollouts, names, store)
    assert math.isclose(*sums, rel_tol=1e-9), sums
    times = bench.race(
        "simulated step",
        {
            "through the store": lambda: through_store(rollouts, names, Ledger()),
            "driver gathers": lambda: driver_gather(rollouts, Ledger()),
        },
        clock=time.perf_counter,
    )
    sizes = {name: column.element_size() for name, column in batch.padded.items()}
    ragged = sum(int(batch.lengths.sum()) * size for size in sizes.values())
    padded = sum(batch.padded[name].numel() * size for name, size in sizes.items())
    bench.notes["simulated"] = {
        "ragged_bytes": ragged,
        "padding_avoided_bytes": padded - ragged,
        "driver_bytes": {"driver gathers": gather.driver_bytes, "through the store": store.driver_bytes},
        "compute_s_per_stage": COMPUTE_S,
    }
    percent = 100 * store.driver_bytes / gather.driver_bytes
    if not bench.quick:
        bench.figure("simulated_driver_bytes", percent, "%", at_most=DRIVER_PERCENT)
        bench.figure("simulated_faster", times["driver gathers"].ratio, "x", at_least=FASTER)


def measure(bench: Bench) -> None:
    """The demo, then the simulation."""
    demo(bench)
    simulated(bench)


if __name__ == "__main__":
    main(measure, __doc__)

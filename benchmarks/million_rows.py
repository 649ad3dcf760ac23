"""Does the local store slow down, or keep anything, over a million rows that are put, claimed and cleared?

A partition of 8,192 rows in groups of 8 is kept half full. Each round a producer puts 512 rows; a trainer leases
512 by a rule on their tags, writes a column under its claim and clears them under it. So it goes on in a run that
never empties its partition. Seconds are this thread's processor seconds for 100,000 rows. Memory is what Python and
NumPy hold (`tracemalloc`, in a pass of its own, since it slows down) and what of the process lies in RAM; their
start is after the first 100,000 rows, when all code is loaded and the store has its size.

The second way puts with `once`, which remembers eight bytes of each id.
"""

import gc
import time
import tracemalloc
from dataclasses import dataclass, field
from pathlib import Path

import torch
from run import Bench, main
from tensordict import TensorDict

from headrace.data_plane import TagRule, write_columns
from headrace.data_plane.adapters.local import LocalDataPlaneClient
from headrace.distributed.ragged import nested_from_ragged

ROWS, SPAN = 1_000_000, 100_000
QUICK_ROWS, QUICK_SPAN = 20_480, 4_096
PER_PUT, GROUP, CAPACITY = 512, 8, 8192
SLOWER, GROWN = 1.3, 1.1
_PAGE = 4096


@dataclass
class Run:
    """A store, a producer and a trainer that take turns."""

    once: bool
    made: int = 0
    trained: int = 0
    client: LocalDataPlaneClient = field(default_factory=LocalDataPlaneClient)

    def __post_init__(self) -> None:
        self.client.register_partition("p", ["input_ids"], CAPACITY, ["train"], GROUP)
        offsets = torch.arange(0, 8 * PER_PUT + 1, 8)
        self.columns = TensorDict(
            {
                "input_ids": nested_from_ragged(torch.arange(8 * PER_PUT), offsets),
                "input_lengths": torch.full((PER_PUT,), 8),
            },
            batch_size=[PER_PUT],
        )
        while self.made < CAPACITY // 2:
            self.produce()

    def produce(self) -> None:
        """Put the next groups."""
        ids = [f"{row // GROUP}_g{row % GROUP}" for row in range(self.made, self.made + PER_PUT)]
        tags = [{"weight_version": self.made // CAPACITY, "reward": row % 2} for row in range(PER_PUT)]
        self.client.put_samples(ids, "p", self.columns, tags, producer="me", once=self.once)
        self.made += PER_PUT

    def train(self) -> None:
        """Lease the oldest groups that pass, write a column, and clear them."""
        rules = [TagRule("weight_version", at_least=0), TagRule("reward", min_spread=0.5)]
        meta = self.client.claim_meta("p", "train", ["input_ids"], PER_PUT, lease_s=60, where=rules)
        assert meta is not None
        first = self.trained // GROUP
        assert meta.sample_ids[0] == f"{first}_g0", (meta.sample_ids[0], first)
        write_columns(self.client, meta, {"advantages": torch.zeros(PER_PUT)})
        self.client.clear_samples(meta.sample_ids, "p", claim=meta.extra_info["claim"])
        self.trained += meta.size

    def go(self, rows: int) -> float:
        """Put, claim and clear so many rows more; the processor seconds."""
        start, until = time.thread_time(), self.trained + rows
        while self.trained < until:
            self.produce()
            self.train()
        return time.thread_time() - start


def resident_bytes() -> int:
    """Return the memory of this process that lies in RAM."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def timed(bench: Bench, once: bool, rows: int, span: int) -> None:
    """Time each span of rows, and compare the resident memory after the first and the last."""
    run, way = Run(once), "once" if once else "plain"
    seconds = [run.go(span)]
    start = resident_bytes()
    seconds += [run.go(span) for _ in range(rows // span - 1)]
    bench.notes[f"{way}: processor seconds of each {span} rows"] = [round(value, 3) for value in seconds]
    bench.figure(f"last_to_first.{way}", seconds[-1] / seconds[0], "times", at_most=SLOWER)
    bench.figure(f"us_per_row.{way}", sum(seconds) / rows * 1e6, "us/row")
    bench.figure(f"resident.{way}", resident_bytes() / start, "times", at_most=GROWN)


def traced(bench: Bench, once: bool, rows: int, span: int) -> None:
    """Compare what Python and NumPy hold after the first span and after the last."""
    run, way = Run(once), "once" if once else "plain"
    tracemalloc.start()
    held: list[int] = []
    for count in (span, rows - span):
        run.go(count)
        gc.collect()
        held.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    report = run.client.partition_report("p")
    assert (report.rows, report.leases) == (CAPACITY // 2, []), report
    bench.notes[f"{way}: bytes held"] = held
    if once:
        bench.figure("bytes_per_id.once", (held[1] - held[0]) / (rows - span), "B/row")
    else:
        bench.figure("held.plain", held[1] / held[0], "times", at_most=GROWN)


def measure(bench: Bench) -> None:
    """Time a million rows in either way, then trace the memory of both."""
    rows, span = (QUICK_ROWS, QUICK_SPAN) if bench.quick else (ROWS, SPAN)
    for once in (False, True):
        timed(bench, once, rows, span)
    for once in (False, True):
        traced(bench, once, rows, span)


if __name__ == "__main__":
    main(measure, __doc__)

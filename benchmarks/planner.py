"""What does planning cost, and how even are its plans, from 512 to a million rows and 1 to 1,024 ranks?

Against the lower bound (the mean load, or the longest row), beside a Karmarkar-Karp partition of the same lengths
(plain Python, so only for some thousand rows).
"""

import heapq
import resource
import time
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray
from run import Bench, main

from headrace.data_plane import KVBatchMeta
from headrace.data_plane.preshard import shard_meta_for_dp

SECONDS, MEGABYTES, IMBALANCE_PERCENT = 2.0, 300.0, 1.0
BUDGET = 8192
PACKING: dict[str, Any] = {
    "algorithm": "modified_first_fit_decreasing",
    "input_key": "input_ids",
    "input_lengths_key": "input_lengths",
    "sequence_length_pad_multiple": 1,
    "max_tokens_per_microbatch": BUDGET,
}
Ints = NDArray[np.int64]


def make_meta(rows: int) -> KVBatchMeta:
    """Rows of lognormal length, 200 tokens in the middle and 1,500 at most."""
    draw = np.random.default_rng(rows).lognormal(np.log(200), 0.8, rows)
    lengths = np.clip(draw, 1, 1500).astype(np.int64).tolist()
    ids = [f"sample{row}" for row in range(rows)]
    return KVBatchMeta("train", "train", ids, fields=["input_ids"], sequence_lengths=lengths)


def loads(metas: list[KVBatchMeta], power: int = 1) -> Ints:
    """Sum over each rank's rows of length to the `power`."""
    return np.array([(np.array(meta.sequence_lengths, np.int64) ** power).sum() for meta in metas])


def imbalance(values: Ints) -> float:
    """Percent by which the fullest rank is above the mean."""
    return float((values.max() / values.mean() - 1) * 100)


def fill(metas: list[KVBatchMeta]) -> float:
    """Percent of the budget of all microbatches that is tokens."""
    microbatches = sum(len(batch) for meta in metas for batch in meta.extra_info["micro_batch_indices"])
    return float(100 * loads(metas).sum() / (microbatches * BUDGET))


def karmarkar_karp(lengths: list[int], ranks: int) -> Ints:
    """Loads of the largest-differencing partition: the two states that differ most are joined, crosswise."""
    order = count()
    heap = [(-length, next(order), [0] * (ranks - 1) + [length]) for length in lengths]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, _, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        joined = sorted(a + b for a, b in zip(one, reversed(other)))
        heapq.heappush(heap, (joined[0] - joined[-1], next(order), joined))
    return np.array(heap[0][2])


def check(meta: KVBatchMeta, metas: list[KVBatchMeta], inverse: list[int] | None) -> None:
    """Every row is on one rank, in a microbatch within the budget; all ranks have as many microbatches."""
    ids = [sample_id for shard in metas for sample_id in shard.sample_ids]
    assert inverse is not None
    # `reorder_data(inverse)` puts row i of the rank-order concatenation at place inverse[i].
    assert [ids[i] for i in np.argsort(inverse)] == meta.sample_ids
    counts = set()
    for shard in metas:
        rows = np.concatenate([[0], np.cumsum(shard.sequence_lengths or [])])
        pairs = [pair for batch in shard.extra_info["micro_batch_indices"] for pair in batch]
        counts.add(len(pairs))
        assert max((int(rows[stop] - rows[start]) for start, stop in pairs), default=0) <= BUDGET
    assert len(counts) == 1


def plan(meta: KVBatchMeta, ranks: int) -> tuple[float, float, list[KVBatchMeta], list[int] | None]:
    """Return the seconds of a plan, the MiB by which the process's peak grew, and the plan."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.thread_time()
    metas, inverse = shard_meta_for_dp(meta, dp_world=ranks, sequence_packing_args=PACKING)
    seconds = time.thread_time() - start
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return seconds, grown, metas, inverse


def measure_size(bench: Bench, rows: int, ranks: int, *, with_targets: bool) -> None:
    """Plan one batch several times."""
    case, meta = f"{rows}x{ranks}", make_meta(rows)
    # The first plan meets a fresh process, so its growth is the plan's own peak.
    _, mebibytes, metas, inverse = plan(meta, ranks)
    check(meta, metas, inverse)
    flops = imbalance(loads(metas, power=2))
    bench.figure(
        f"imbalance.{case}", imbalance(loads(metas)), "%", at_most=IMBALANCE_PERCENT if with_targets else None
    )
    bench.figure(f"fill.{case}", fill(metas), "%")
    bench.notes[case] = {"attention_flops_imbalance_percent": round(flops, 3)}
    del metas, inverse
    times = bench.race(
        case,
        {"plan": lambda: shard_meta_for_dp(meta, dp_world=ranks, sequence_packing_args=PACKING)},
        repeats=min(bench.repeats, 10 if rows < 500_000 else 3) if not bench.quick else bench.repeats,
    )
    seconds = times["plan"].median_s
    if with_targets:
        bench.figure(f"seconds.{case}", seconds, "s", at_most=SECONDS)
        bench.figure(f"memory.{case}", mebibytes, "MiB", at_most=MEGABYTES)
    else:
        bench.figure(f"us_per_row.{case}", seconds / rows * 1e6, "us/row")


def against_karmarkar_karp(bench: Bench, rows: int, ranks: int) -> None:
    """Hold the fullest rank to the lower bound, beside the best partition heuristic, which packs nothing."""
    meta = make_meta(rows)
    lengths = meta.sequence_lengths or []
    ours = loads(plan(meta, ranks)[2])
    start = time.perf_counter()
    other = karmarkar_karp(lengths, ranks)
    seconds = time.perf_counter() - start
    bound = max(max(lengths), sum(lengths) / ranks)
    above, other_above = (float(100 * (found.max() / bound - 1)) for found in (ours, other))
    note = f"Karmarkar-Karp: {other_above:.4f} %, in {seconds:.2f} s of plain Python"
    bench.figure(f"above_lower_bound.{rows}x{ranks}", above, "%", at_most=IMBALANCE_PERCENT, note=note)


def measure(bench: Bench) -> None:
    """The largest first, so that the peak of the process is its own."""
    if bench.quick:
        measure_size(bench, 4096, 8, with_targets=True)
        return
    measure_size(bench, 1_048_576, 1024, with_targets=True)
    measure_size(bench, 131_072, 1024, with_targets=False)
    measure_size(bench, 8192, 64, with_targets=False)
    measure_size(bench, 512, 8, with_targets=False)
    measure_size(bench, 512, 1, with_targets=False)
    against_karmarkar_karp(bench, 8192, 64)
    against_karmarkar_karp(bench, 4096, 8)
    against_karmarkar_karp(bench, 512, 8)


if __name__ == "__main__":
    main(measure, __doc__)

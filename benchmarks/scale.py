"""What does the control plane cost at 10,000 ranks and 10 million samples, where does it break, and what helps?

A step of GRPO with every rank at 1,000 rows, whatever the number of ranks. Run as they are, at several sizes: the
driver's metadata (concat, planning, encoding), dispatch to actors by RayWorkerGroup, and the class that keeps the
store's books, called as its server calls it. What one machine cannot run goes on by the growth of the measured
points; `scale_model.py` has the arithmetic and every assumption. Each size is timed once: growth is what counts.
No GPU, no bulk and no network is measured.
Needs headrace[ray].
"""

import logging
import resource
import time
from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any
from zlib import crc32

import numpy as np
import ray
import torch
from msgspec import Raw
from planner import PACKING, imbalance, loads, make_meta
from run import Bench, main
from scale_model import (
    ASSUMPTIONS,
    DRIVER_BYTES,
    GROUP_RANKS,
    INDEX_PARTS,
    PUT_ROWS,
    ROWS_PER_RANK,
    SHARE,
    STAGES,
    STEP_S,
    TIMEOUT_S,
    TOKENS,
    Costs,
    Curve,
    ScatteredCurve,
    breaks_at,
)

from headrace.data_plane import KVBatchMeta, pack_columns
from headrace.data_plane.adapters.transfer_queue_index import Indexes, operation_of, reply_to
from headrace.data_plane.adapters.transfer_queue_socket import Call, calls, encoder, opened, sealed
from headrace.data_plane.preshard import shard_meta_for_dp
from headrace.data_plane.schema import (
    DP_TRAIN_FIELDS,
    FIELDS,
    INPUT_LENGTHS,
    LP_SEED_FIELDS,
    ROLLOUT_FIELDS,
    Kind,
)
from headrace.data_plane.store.blocks import PackedColumns, pack
from headrace.data_plane.store.columns import Chunk, Put, checked_put
from headrace.distributed.topology import lay_out_ranks
from headrace.distributed.worker_groups.ray_group import RayWorkerGroup
from headrace.distributed.worker_groups.remote import RemoteWorkerGroup
from headrace.distributed.worker_groups.wire import encode

TARGET_RANKS = 10_000
PER_RANK, PER_PUT = int(ROWS_PER_RANK.value), int(PUT_ROWS.value)
PLAN_RANKS, TAGGED_RANKS = (256, 1024, TARGET_RANKS), (256, 1024)
INDEX_RANKS, DISPATCH_RANKS = (64, 256, 1024), (64, 256, 1024)
QUICK_RANKS = (4, 8)
SAMPLED_RANKS = 64
"""Ranks whose calls to the index are timed; all ranks' rows are in the books."""
BY_RANK = ("select for logprobs", "put logprobs", "select for training")
LIMITS = {
    "driver": "the driver takes 5 % of a 300 s step",
    "index": "one index takes 5 % of a 300 s step",
    "step": "both, and the network, take 5 % of a 300 s step",
    "timeout": "the last rank waits data_plane.timeout_s for its select",
    "memory": "the driver's metadata takes 64 GiB",
}
STORE, PARTITION, OWNER, SECRET = "scale", "train", b"driver", b"secret"
Seconds = dict[int, float]


def seconds_of(work: Any, *arguments: Any) -> tuple[float, Any]:
    """Return this thread's processor seconds, and the result."""
    start = time.thread_time()
    result = work(*arguments)
    return time.thread_time() - start, result


# The driver.


def tagged_meta(rows: int) -> KVBatchMeta:
    """A rollout's meta: ids, lengths, columns, and the tags that SyncRolloutActor stamps."""
    meta = make_meta(rows)
    meta.stamp_tags(
        {
            "reward": [float(row % 2) for row in range(rows)],
            "uid": [f"step7/prompt{row // 8}" for row in range(rows)],
            "group_index": [row % 8 for row in range(rows)],
            "weight_version": [7] * rows,
            "truncated": [False] * rows,
        }
    )
    return meta.with_fields([*ROLLOUT_FIELDS, "message_log"])


def untagged(meta: KVBatchMeta) -> KVBatchMeta:
    """What TQPolicy plans with: workers read no tags."""
    bare = meta.with_fields(LP_SEED_FIELDS)
    bare.tags = None
    return bare


def plan(meta: KVBatchMeta, ranks: int) -> list[KVBatchMeta]:
    """What TQPolicy does with a meta before a dispatch."""
    return shard_meta_for_dp(untagged(meta), dp_world=ranks, sequence_packing_args=PACKING)[0]


def measure_planning(sizes: Sequence[int]) -> tuple[Seconds, list[KVBatchMeta]]:
    """Seconds of one plan by ranks, the best of three but of the full size; and the shards of the largest."""
    found: Seconds = {}
    shards: list[KVBatchMeta] = []
    for ranks in sizes:
        meta = make_meta(ranks * PER_RANK)
        rounds = []
        for _ in range(1 if ranks == TARGET_RANKS else 3):
            shards.clear()
            seconds, shards = seconds_of(plan, meta, ranks)
            rounds.append(seconds)
        assert sum(shard.size for shard in shards) == meta.size
        found[ranks] = min(rounds)
    return found, shards


def measure_joining(sizes: Sequence[int]) -> tuple[Seconds, float]:
    """Seconds of joining a step's puts by ranks; bytes of a row in the driver's memory during a dispatch."""
    found: Seconds = {}
    for ranks in sizes:
        before = resident_bytes()
        meta = tagged_meta(ranks * PER_RANK)
        puts = [meta.slice(row, row + PER_PUT) for row in range(0, meta.size, PER_PUT)]
        found[ranks], whole = seconds_of(puts[0].concat, *puts[1:])
        assert whole.sample_ids == meta.sample_ids
        del puts, whole
        shards = plan(meta, ranks)
        memory = (resident_bytes() - before) / meta.size
        del shards
    return found, memory


def message_bytes(shards: Sequence[KVBatchMeta]) -> float:
    """Return the bytes of a row in a rank's message."""
    return sum(len(encode(((shard,), {})).head) for shard in shards) / sum(shard.size for shard in shards)


def resident_bytes() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


class Echo:
    """Stands for every rank's actor: takes a call and answers at once."""

    def call(self, *_call: Any) -> bytes:
        """Answer nothing."""
        return encode(None).head


class OneActorGroup(RayWorkerGroup):
    """The driver's side of a RayWorkerGroup, with one actor in the place of all."""

    def __init__(self, ranks: int, actor: Any) -> None:
        RemoteWorkerGroup.__init__(self, lay_out_ranks(ranks))
        self._actors, self._parts = [actor] * ranks, {}


def measure_dispatch(sizes: Sequence[int], shards: Sequence[KVBatchMeta]) -> Seconds:
    """Processor seconds of the driver, all its threads, to send every rank its meta and take all answers.

    One actor answers them all, so answers come one by one, as they do where ranks take different times.
    """
    found: Seconds = {}
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
        object_store_memory=2**30,
    )
    try:
        actor = ray.remote(num_cpus=0)(Echo).remote()
        OneActorGroup(1, actor).run_sharded("warm_up", [shards[0]])
        for ranks in sizes:
            group, mine = OneActorGroup(ranks, actor), list(islice(cycle(shards), ranks))
            start = time.process_time()
            answers = group.run_sharded("nothing", mine)
            found[ranks] = time.process_time() - start
            assert answers == [None] * ranks
    finally:
        ray.shutdown()
    return found


# The index.


class Books:
    """The index of a step's rows, as its server keeps it: calls come and go as messages."""

    def __init__(self, rows: int) -> None:
        self._indexes = Indexes()
        self._store, _ = self._indexes.open_store(OWNER, STORE, rows, "this benchmark")
        self._puts = 0
        self.answer_bytes_of_select = 0

    def ask(self, operation: str, *arguments: object) -> tuple[float, Any]:
        """Return processor seconds to read a request, run it and write the answer; and the answer."""
        message = encoder.encode(arguments)
        request = sealed(SECRET, Call(OWNER, self._store, operation, Raw(message)))
        start = time.thread_time()
        answer, _ = reply_to(SECRET, opened(SECRET, request, calls), self._indexes.run)
        seconds = time.thread_time() - start
        if operation == "locate":
            self.answer_bytes_of_select = sum(map(len, answer))
        return seconds, opened(SECRET, answer, operation_of(operation, self._store).reply).answer

    def put(self, ids: list[str], packed: PackedColumns, tags: list[dict[str, Any]] | None = None) -> float:
        """Announce and commit rows whose blocks are like those of `packed`."""
        self._puts += 1
        begun, ticket = self.ask("begin_put", OWNER, Put(PARTITION, ids, tags, {}), packed.columns, 60.0)
        slots = [self._puts * 1000 + number for number in range(len(packed.blocks))]
        return begun + self.ask("commit", ticket, slots, None)[0]


def chunks_of(rows: int, names: Sequence[str]) -> dict[str, Chunk]:
    """Columns of rows of 1,000 tokens, as a client packs them."""
    lengths = torch.full((rows,), int(TOKENS.value))
    values: dict[str, Any] = {}
    for name in names:
        spec = FIELDS[name]
        is_wide = spec.kind is Kind.PER_TOKEN and not spec.broadcast
        shape = (rows, int(TOKENS.value)) if is_wide else (rows,)
        values[name] = lengths if name == INPUT_LENGTHS else torch.zeros(shape, dtype=spec.dtype)
    wire = pack_columns(values, lengths=lengths, rows=rows)
    return checked_put([str(row) for row in range(rows)], "p", wire, None)[1]


def packed_like(rows: int, names: Sequence[str]) -> PackedColumns:
    """Blocks of `rows` rows of declared columns, cut as a put cuts them."""
    return pack(chunks_of(rows, names))


def measure_index(bench: Bench, rows: int, rank_rows: int) -> dict[str, float]:
    """Seconds by operation in a step of `rows` rows; what is timed for some ranks is scaled to all."""
    books, meta = Books(rows), tagged_meta(rows)
    ids, tags = meta.sample_ids, meta.tags or []
    total = {"put rollouts": put_rollouts(books, ids, tags)}
    total["put advantages"] = books.put(ids, packed_like(rows, ["advantages"]))
    sample = np.random.default_rng(0).permutation(rows)
    sample = sample[: min(SAMPLED_RANKS, rows // rank_rows) * rank_rows]
    by_rank = [[ids[row] for row in np.sort(some)] for some in sample.reshape(-1, rank_rows)]
    scale = rows / sample.size
    select = put = 0.0
    for name in ("prev_logprobs", "reference_policy_logprobs"):
        select += sum(books.ask("locate", PARTITION, mine, LP_SEED_FIELDS)[0] for mine in by_rank)
        packed = packed_like(rank_rows, [name])
        put += sum(books.put(mine, packed) for mine in by_rank)
    total |= {"select for logprobs": scale * select, "put logprobs": scale * put}
    trained = [books.ask("locate", PARTITION, mine, DP_TRAIN_FIELDS) for mine in by_rank]
    total["select for training"] = scale * sum(seconds for seconds, _ in trained)
    total["clear"] = books.ask("clear", PARTITION, ids, None)[0]
    bench.notes[f"index, {rows} rows, {rank_rows} of a rank"] = {
        "us_per_row": {name: round(1e6 * seconds / rows, 3) for name, seconds in total.items()},
        "blocks_that_a_rank_reads": sum(len(where.blocks) for where in trained[0][1].values()),
        "answer_bytes_per_row": round(books.answer_bytes_of_select / rank_rows, 1),
    }
    return total


def put_rollouts(books: Books, ids: list[str], tags: list[dict[str, Any]]) -> float:
    """Seconds to commit all rows with their tags, put by put."""
    seconds = 0.0
    full = packed_like(min(PER_PUT, len(ids)), ROLLOUT_FIELDS)
    for start in range(0, len(ids), PER_PUT):
        mine = slice(start, start + PER_PUT)
        rows = len(ids[mine])
        packed = full if rows == full_rows(full) else packed_like(rows, ROLLOUT_FIELDS)
        seconds += books.put(ids[mine], packed, tags[mine])
    return seconds


def full_rows(packed: PackedColumns) -> int:
    """Return the rows of a put."""
    return sum(block.rows for block in packed.columns[INPUT_LENGTHS])


# Partitioning.


def planned_in_groups(bench: Bench, rows: int, ranks: int, groups: int) -> None:
    """Plan groups of rows on groups of ranks, each alone: how even are the ranks of all groups together?"""
    meta = make_meta(rows)
    group_of = np.array([crc32(sample_id.encode()) % groups for sample_id in meta.sample_ids])
    seconds = 0.0
    shards: list[KVBatchMeta] = []
    for group in range(groups):
        mine = meta.subset(np.flatnonzero(group_of == group))
        spent, parts = seconds_of(plan, mine, ranks // groups)
        seconds, shards = max(seconds, spent), [*shards, *parts]
    counts = [sum(map(len, shard.extra_info["micro_batch_indices"])) for shard in shards]
    share = ranks // groups
    bench.figure(
        f"groups_imbalance.{rows}x{ranks}", imbalance(loads(shards)), "%", note="rows to groups by hash of id"
    )
    bench.notes[f"planned in {groups} groups"] = {
        "slowest_group_s": round(seconds, 3),
        "microbatches_per_rank": [int(n) for n in (min(counts), max(counts))],
        "filler_share_percent": round(100 * (1 - sum(counts) / (max(counts) * groups * share)), 2),
    }


def curves(bench: Bench) -> Costs:
    """Measure all parts and give each as a curve over ranks, for a whole step."""
    stages = STAGES.value
    joins, memory = measure_joining(QUICK_RANKS if bench.quick else TAGGED_RANKS)
    plans, shards = measure_planning(QUICK_RANKS if bench.quick else PLAN_RANKS)
    case = f"{max(plans)}x{PER_RANK}"
    bench.figure(f"plan.{case}", plans[max(plans)], "s", note="one plan, run as it is")
    bench.figure(f"plan_imbalance.{case}", imbalance(loads(shards)), "%")
    bench.notes["peak_mib_after_the_largest_plan"] = (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    )
    message, shards = message_bytes(shards), shards[:SAMPLED_RANKS]
    dispatch = measure_dispatch(QUICK_RANKS if bench.quick else DISPATCH_RANKS, shards)
    by_operation: dict[str, Seconds] = {}
    for ranks in QUICK_RANKS if bench.quick else INDEX_RANKS:
        for operation, seconds in measure_index(bench, ranks * PER_RANK, PER_RANK).items():
            by_operation.setdefault(operation, {})[ranks] = seconds
    return Costs(
        driver={
            "concat": Curve(joins),
            "plan": Curve({ranks: stages * seconds for ranks, seconds in plans.items()}),
            "dispatch": Curve({ranks: stages * seconds for ranks, seconds in dispatch.items()}),
        },
        index={
            name: (ScatteredCurve if name in BY_RANK else Curve)(points)
            for name, points in by_operation.items()
        },
        driver_bytes_per_row=memory,
        message_bytes_per_row=message,
    )


def measure_part(bench: Bench, ranks: int) -> float:
    """Seconds of one of several indexes that share the ids by hash: all ranks ask each of them for a part."""
    parts = int(INDEX_PARTS.value)
    by_operation = measure_index(bench, ranks * PER_RANK // parts, max(PER_RANK // parts, 1))
    return sum(by_operation.values())


def measure(bench: Bench) -> None:
    """Measure the parts, then let the model say what a step costs, where it breaks, and what helps."""
    costs = curves(bench)
    ranks = QUICK_RANKS[-1] if bench.quick else TARGET_RANKS
    part_s = measure_part(bench, ranks)
    planned_in_groups(bench, *((8_000, 8, 2) if bench.quick else (1_024_000, 1024, 4)))
    group = GROUP_RANKS.value
    limit = SHARE.value * STEP_S.value
    rows = f"{ranks}x{PER_RANK}"

    bench.figure(f"driver.{rows}", costs.driver_s(ranks), "s", note="plans, dispatch and answers of a step")
    bench.figure(f"index.{rows}", costs.index_s(ranks), "s", note="one index, all its operations in a step")
    bench.figure(f"step.{rows}", costs.step_s(ranks), "s", note="one driver, one index")
    split = costs.driver_s(ranks) + part_s + costs.network_s(ranks)
    bench.figure(
        f"step_index_parts.{rows}", split, "s", note=f"{INDEX_PARTS.value:.0f} indexes by hash of the id"
    )
    grouped = costs.grouped_step_s(ranks, group)
    bench.figure(f"step_groups.{rows}", grouped, "s", note=f"a driver and an index per {group:.0f} ranks")
    for name, cost, most in (
        ("driver", costs.driver_s, limit),
        ("index", costs.index_s, limit),
        ("step", costs.step_s, limit),
        ("timeout", costs.index["select for training"].value, TIMEOUT_S.value),
        ("memory", costs.driver_memory_bytes, DRIVER_BYTES.value),
    ):
        bench.figure(f"ranks_until.{name}", breaks_at(cost, most), "ranks", note=LIMITS[name])
    bench.figure("message", costs.message_bytes_per_row, "B/row")
    bench.figure("driver_memory", costs.driver_bytes_per_row, "B/row")
    bench.notes["curves"] = {
        side: {name: curve.as_json() for name, curve in part.items()}
        for side, part in (("driver", costs.driver), ("index", costs.index))
    }
    shown = [2**power for power in range(3, 14)] + [TARGET_RANKS]
    bench.notes["step_s_by_ranks"] = {
        "ranks": shown,
        "measured up to": max(QUICK_RANKS if bench.quick else INDEX_RANKS),
        "limit": limit,
        **{
            name: [round(cost(n), 4) for n in shown]
            for name, cost in (
                ("one driver", costs.driver_s),
                ("one index", costs.index_s),
                ("one driver, one index", costs.step_s),
                (f"groups of {group:.0f} ranks", lambda n: costs.grouped_step_s(n, group)),
            )
        },
    }
    bench.notes["assumptions"] = {name: given._asdict() for name, given in ASSUMPTIONS.items()}


if __name__ == "__main__":
    main(measure, __doc__)

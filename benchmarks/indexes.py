"""How many ranks does a run carry with one, two and four indexes of a TransferQueue store?

The step of `scale`, with 1,000 rows of 1,000 tokens for every rank. Each index is a process of its own behind its
socket; this process asks them as rollout actor, driver and ranks do, and all keep what the store keeps, but the bytes
of the blocks. An index's processor time is read from the system, and an operation counts by the index that took the
longest, since the others work at the same time. The driver's part is measured by `scale`, and its own calls to the
store are added. Each size is run once.
Needs headrace[ray].
"""

import itertools
import multiprocessing as mp
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from run import Bench, main
from scale import (
    BY_RANK,
    PER_PUT,
    PER_RANK,
    QUICK_RANKS,
    SAMPLED_RANKS,
    chunks_of,
    measure_dispatch,
    measure_joining,
    measure_planning,
    message_bytes,
    tagged_meta,
)
from scale_model import SHARE, STAGES, STEP_S, Costs, Curve, ScatteredCurve, breaks_at

from headrace.data_plane.adapters.transfer_queue_ask import IndexAsker
from headrace.data_plane.adapters.transfer_queue_index import Indexes, IndexServer, operation_of
from headrace.data_plane.adapters.transfer_queue_several import Several
from headrace.data_plane.adapters.transfer_queue_socket import Endpoint, IndexClient
from headrace.data_plane.schema import (
    DP_TRAIN_FIELDS,
    LP_SEED_FIELDS,
    ROLLOUT_FIELDS,
)
from headrace.data_plane.store.blocks import PackedColumns, pack
from headrace.data_plane.store.claims import Registration
from headrace.data_plane.store.columns import Chunk, Put
from headrace.distributed.ray_connection import Deadline

INDEXES, RANKS, PLAN_RANKS = (1, 2, 4), (64, 256, 1024), (256, 1024)
QUICK_INDEXES = (1, 2)
GROUP, PARTITION, NAME = 8, "train", "benchmark"
RANKS_WANTED = 1500.0
Seconds = dict[int, float]


def serve(pipe: Any) -> None:
    """Be an index until the pipe closes."""
    server = IndexServer("127.0.0.1", b"secret")
    indexes = Indexes(server.is_alive)
    server.start(indexes)
    pipe.send((server.endpoint.address, server.endpoint.port))
    pipe.recv()


def processor_s(process: int) -> float:
    """Seconds that all threads of a process have run."""
    tasks = Path(f"/proc/{process}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


class Store:
    """A store of some indexes, as its clients see it; blocks get slots, and their bytes go nowhere."""

    def __init__(self, endpoints: Sequence[Endpoint], rows: int) -> None:
        deadline = Deadline(60, "a key")
        self.clients = [IndexClient(endpoint, [], deadline, operation_of) for endpoint in endpoints]
        self._slots = itertools.count()
        first, *others = self.clients
        told = (NAME, rows, "this benchmark")
        opened = first.ask(
            "open_store", first.owner, *told, len(endpoints), what="opening", deadline=deadline
        )
        self._store, _ = opened.answer
        for client in others:
            client.ask("join_store", client.owner, *told, self._store, what="opening", deadline=deadline)
        asker = IndexAsker(self.clients, self._store, NAME, 600.0, lambda index: [], lambda *garbage: None)
        self._several = Several(asker) if others else None

    def ask(self, operation: str, *arguments: object) -> Any:
        """Ask the index, or all."""
        deadline = Deadline(600, "a key")
        if self._several is not None:
            more = (deadline,) if operation == "locate" else ()
            return getattr(self._several, operation)(*arguments, *more)
        return (
            self.clients[0]
            .ask(operation, *arguments, what=operation, deadline=deadline, store=self._store)
            .answer
        )

    def put(self, put: Put, chunks: dict[str, Chunk]) -> None:
        """Put rows, as the client does; the backend is `simple`."""
        if self._several is not None:
            self._several.put(put, chunks, self._stored, gives_rows=True, deadline=Deadline(600, "a key"))
            return
        packed = pack(chunks, gives_rows=True)
        ticket = self.ask("begin_put", self.clients[0].owner, put, packed.columns, 600.0)
        self.ask("commit", ticket, self._stored(packed), None)

    def _stored(self, packed: PackedColumns) -> list[int]:
        return list(itertools.islice(self._slots, len(packed.blocks)))

    def close(self) -> None:
        """Disconnect."""
        for client in self.clients:
            client.close()


@contextmanager
def processes(count: int) -> Iterator[tuple[list[int], list[Endpoint]]]:
    """Start indexes; their process ids, and where they listen."""
    spawn = mp.get_context("spawn")
    started = []
    for _ in range(count):
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=serve, args=(theirs,), daemon=True)
        process.start()
        started.append((process, ours))
    try:
        endpoints = [Endpoint(*pipe.recv(), b"secret") for _, pipe in started]
        yield [process.pid or 0 for process, _ in started], endpoints
    finally:
        for process, pipe in started:
            pipe.send(None)
            process.join()


class Meter:
    """Processor seconds by operation: of each index, and of the process that asks."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self.by_index: dict[str, list[float]] = {}
        self.asking: dict[str, float] = {}

    def run(self, name: str, work: Callable[[], object], scale: float = 1.0) -> None:
        """Do some work; what is done for a part of the ranks counts `scale` times."""
        before, start = [processor_s(pid) for pid in self._pids], time.process_time()
        work()
        spent = [scale * (processor_s(pid) - was) for pid, was in zip(self._pids, before)]
        total = self.by_index.get(name, [0.0] * len(spent))
        self.by_index[name] = [a + b for a, b in zip(total, spent)]
        self.asking[name] = self.asking.get(name, 0.0) + scale * (time.process_time() - start)


def one_step(store: Store, meter: Meter, ranks: int) -> None:
    """Do what a step asks of the store: rollouts, advantages, two scoring stages, training, the end."""
    rows = ranks * PER_RANK
    ids = [f"step7/prompt{row // GROUP}_g{row % GROUP}" for row in range(rows)]
    tags = tagged_meta(min(PER_PUT, rows)).tags or []
    store.ask("register", Registration(PARTITION, rows, ("train",), GROUP))
    chunks = chunks_of(min(PER_PUT, rows), ROLLOUT_FIELDS)

    def rollouts() -> None:
        for start in range(0, rows, PER_PUT):
            mine = ids[start : start + PER_PUT]
            own = chunks if len(mine) == len(tags) else chunks_of(len(mine), ROLLOUT_FIELDS)
            store.put(Put(PARTITION, mine, tags[: len(mine)], {}), own)

    meter.run("put rollouts", rollouts)
    advantages = chunks_of(rows, ["advantages"])
    told = Put(PARTITION, ids, None, {}, tells=False)
    meter.run("put advantages", lambda: store.put(told, advantages))
    sample = np.random.default_rng(0).permutation(rows)[: min(SAMPLED_RANKS, ranks) * PER_RANK]
    by_rank = [[ids[row] for row in np.sort(some)] for some in sample.reshape(-1, PER_RANK)]
    scale = rows / sample.size
    for name in ("prev_logprobs", "reference_policy_logprobs"):
        meter.run("select for logprobs", lambda: _selects(store, by_rank, LP_SEED_FIELDS), scale)
        own = chunks_of(PER_RANK, [name])
        meter.run("put logprobs", lambda own=own: _puts(store, by_rank, own), scale)
    meter.run("select for training", lambda: _selects(store, by_rank, DP_TRAIN_FIELDS), scale)
    meter.run("clear", lambda: store.ask("clear", PARTITION, ids, None))


def _selects(store: Store, by_rank: Sequence[list[str]], names: Sequence[str]) -> None:
    for mine in by_rank:
        located = store.ask("locate", PARTITION, mine, list(names))
        assert len(located) == len(names)


def _puts(store: Store, by_rank: Sequence[list[str]], chunks: dict[str, Chunk]) -> None:
    for mine in by_rank:
        store.put(Put(PARTITION, mine, None, {}, tells=False), chunks)


def measure_indexes(bench: Bench, count: int) -> tuple[dict[str, Seconds], dict[str, Seconds]]:
    """Seconds by operation and ranks: of the index that took the longest, and of who asked."""
    slowest: dict[str, Seconds] = {}
    asking: dict[str, Seconds] = {}
    for ranks in QUICK_RANKS if bench.quick else RANKS:
        with processes(count) as (pids, endpoints):
            store, meter = Store(endpoints, ranks * PER_RANK), Meter(pids)
            one_step(store, meter, ranks)
            store.close()
        for name, seconds in meter.by_index.items():
            slowest.setdefault(name, {})[ranks] = max(seconds)
            asking.setdefault(name, {})[ranks] = meter.asking[name]
        bench.notes[f"{count} indexes, {ranks} ranks"] = {
            "us_per_row_of_each_index": {
                name: [round(1e6 * one / (ranks * PER_RANK), 3) for one in seconds]
                for name, seconds in meter.by_index.items()
            },
            "us_per_row_of_who_asks": {
                name: round(1e6 * seconds / (ranks * PER_RANK), 3) for name, seconds in meter.asking.items()
            },
        }
    return slowest, asking


def measure(bench: Bench) -> None:
    """Measure the driver once, and the indexes by their number; tell where both take 5 % of a step."""
    joins, _ = measure_joining(QUICK_RANKS if bench.quick else PLAN_RANKS)
    plans, shards = measure_planning(QUICK_RANKS if bench.quick else PLAN_RANKS)
    dispatch = measure_dispatch(QUICK_RANKS if bench.quick else RANKS, shards)
    message = message_bytes(shards)
    del shards
    shared = {
        "concat": Curve(joins),
        **{
            name: Curve({ranks: STAGES.value * seconds for ranks, seconds in found.items()})
            for name, found in (("plan", plans), ("dispatch", dispatch))
        },
    }
    limit = SHARE.value * STEP_S.value
    shown = [2**power for power in range(6, 13)]
    for count in QUICK_INDEXES if bench.quick else INDEXES:
        slowest, asking = measure_indexes(bench, count)
        own = {f"its {name}": Curve(asking[name]) for name in ("put advantages", "clear")}
        index = {
            name: (ScatteredCurve if name in BY_RANK else Curve)(points) for name, points in slowest.items()
        }
        costs = Costs(shared | own, index, 0.0, message)
        for name, cost in (("driver", costs.driver_s), ("index", costs.index_s), ("step", costs.step_s)):
            wanted = RANKS_WANTED if (count, name) == (4, "step") else None
            note = f"{count} indexes: {name} takes 5 % of a 300 s step"
            bench.figure(
                f"ranks_until.{name}.{count}", breaks_at(cost, limit), "ranks", at_least=wanted, note=note
            )
        bench.notes[f"curves, {count} indexes"] = {
            side: {name: curve.as_json() for name, curve in part.items()}
            for side, part in (("driver", costs.driver), ("index", costs.index))
        }
        bench.notes[f"step_s_by_ranks, {count} indexes"] = {
            "ranks": shown,
            **{
                name: [round(cost(n), 3) for n in shown]
                for name, cost in (
                    ("driver", costs.driver_s),
                    ("index", costs.index_s),
                    ("step", costs.step_s),
                )
            },
        }
    bench.figure("message", message, "B/row", note="of a dispatch, without tags")
    bench.notes["measured_up_to_ranks"] = {
        "indexes": RANKS[-1],
        "plan": PLAN_RANKS[-1],
        "dispatch": RANKS[-1],
    }
    bench.notes["processors"] = os.cpu_count()


if __name__ == "__main__":
    main(measure, __doc__)

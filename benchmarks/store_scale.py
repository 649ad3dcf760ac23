"""How does the store grow? Rows from 8 to 65,536, columns from 1 to 20, clients from 1 to 4 at once.

The adapter over transfer_queue/simple; TransferQueue's own calls beside it where they take less than some seconds
(rows times columns up to 4,096), and one copy of the bytes. Several clients are processes that put, get and clear
batches of their own at the same time. Needs headrace[ray].
"""

import multiprocessing as mp
import time
from collections.abc import Callable
from typing import Any

import ray
import torch
from columns import lognormal, make_batch, uniform
from run import Bench, main
from store_transfer_queue import adapter, check, one_copy, raw, stores, without_padding
from tensordict import TensorDict

from headrace.data_plane import DataPlaneClient, build_data_plane_client

SHAPES = ((8, 1), (8, 20), (64, 5), (512, 1), (512, 20), (4096, 5), (65_536, 1), (65_536, 20))
QUICK_SHAPES = ((8, 1), (64, 5))
RAW_CELLS, CLIENTS, LONG_ROWS = 4096, (1, 2, 4), 512


def one_shape(bench: Bench, client: DataPlaneClient, rows: int, columns: int) -> None:
    """Put and get rows x columns by every way."""
    lengths = lognormal(rows, 300, 700, shortest=50) if rows <= LONG_ROWS else uniform(rows, 1, 16)
    batch = make_batch(lengths, columns=columns)
    jagged = without_padding(batch)
    table = {"adapter": adapter(client, batch, jagged), "one copy": one_copy(batch, jagged)}
    if rows * columns <= RAW_CELLS:
        name = f"{rows}x{columns}"
        table["raw jagged"] = raw(batch, f"j{name}", jagged)
        table["raw padded"] = raw(batch, f"d{name}", TensorDict(dict(batch.padded), batch_size=[rows]))
    check(table, list(batch.padded) if rows <= LONG_ROWS else [])

    def clear() -> None:
        for way in table.values():
            way.clear()

    case, repeats, clock = f"{rows} rows x {columns} columns", min(7, bench.repeats), time.perf_counter
    puts: dict[str, Callable[[], object]] = {name: way.put for name, way in table.items()}
    put = bench.race(f"{case}: put", puts, between=clear, clock=clock, repeats=repeats)
    clear()
    for way in table.values():
        way.put()
    gets: dict[str, Callable[[], object]] = {name: way.get for name, way in table.items()}
    get = bench.race(f"{case}: get", gets, clock=clock, repeats=repeats)
    clear()
    for name, times in (("put", put), ("get", get)):
        bench.figure(f"{name}.{rows}x{columns}", 1e3 * times["adapter"].median_s, "ms")


def work(config: dict[str, Any], number: int, rounds: int, barrier: Any, answers: Any) -> None:
    """Be one of several clients: put, get and clear, `rounds` times; answer with the seconds."""
    torch.set_num_threads(1)
    client = build_data_plane_client(config, bootstrap=False)
    batch = make_batch(lognormal(128, 300, 700, shortest=50))
    fields, ids = without_padding(batch), batch.ids
    for turn in range(rounds + 1):
        if turn == 1:
            barrier.wait()
            start = time.perf_counter()
        client.put_samples(ids, f"p{number}", fields=fields)
        got = client.get_samples(ids, f"p{number}", list(batch.padded))
        assert torch.equal(got["input_ids"].values(), fields["input_ids"].values())
        client.clear_samples(None, f"p{number}")
    answers.put(time.perf_counter() - start)
    client.close()


def several_clients(bench: Bench, config: dict[str, Any]) -> None:
    """Let processes work at once, and compare what they do per second with one client alone."""
    spawn, rounds = mp.get_context("spawn"), 5 if bench.quick else 40
    per_second: dict[int, float] = {}
    for count in CLIENTS[:2] if bench.quick else CLIENTS:
        barrier, answers = spawn.Barrier(count), spawn.Queue()
        workers = [
            spawn.Process(target=work, args=(config, number, rounds, barrier, answers))
            for number in range(count)
        ]
        for worker in workers:
            worker.start()
        seconds = [answers.get(timeout=120) for _ in workers]
        for worker in workers:
            worker.join()
        per_second[count] = count * rounds / max(seconds)
        bench.figure(f"clients.{count}", per_second[count], "rounds/s", note="128 rows: put, get, clear")
    bench.notes["clients_against_one"] = {n: round(v / per_second[1], 2) for n, v in per_second.items()}


def measure(bench: Bench) -> None:
    """Time all shapes, then several clients."""
    with stores("simple") as client:
        for rows, columns in QUICK_SHAPES if bench.quick else SHAPES:
            one_shape(bench, client, rows, columns)
        address = ray.get_runtime_context().gcs_address
        several_clients(bench, {"impl": "transfer_queue", "ray_address": address})


if __name__ == "__main__":
    main(measure, __doc__)

"""What does the local store cost: put, get, one rank's rows, two columns, clear, many rows, several clients?

Copies are copies (`clone`) of the ragged bytes of all columns. Before each way runs, the caches are filled with other
bytes, as they are between the stages of a training step. Both sides write to memory that the process has used before
(`page_faults` says so), except where a buffer reaches 32 MiB: that comes fresh from the system for both.

`notes` says where the time of a put and a get goes: the copies of the values themselves, the jagged tensors that a get
returns, the checks of what is put, and the rest, which is bookkeeping.
"""

import heapq
import threading
import time
from collections.abc import Callable

import torch
from columns import Batch, lognormal, make_batch, uniform
from run import Bench, main
from tensordict import TensorDict

from headrace.data_plane import pack_jagged_fields
from headrace.data_plane.adapters.local import LocalDataPlaneClient
from headrace.data_plane.wire import check_declared, read_wire
from headrace.distributed.ragged import nested_from_ragged, own_copy

PUT_GET_COPIES, PUT_GET_US_PER_ROW, EIGHTH_SHARE, EIGHTH_CONSTANT_MS = 3.0, 3.0, 1.5, 5.0
BYTES_OF_A_ROW = 8192
"""Mean size of a row from which copies are what a put and a get cost; below, it is the bookkeeping per row."""
RANKS, CLIENTS = 8, 4


class Store:
    """One batch and a store of its own."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.ids, self.names = batch, batch.ids, list(batch.padded)
        self.wire = pack_jagged_fields(
            batch.padded, lengths=batch.lengths, token_aligned_fields=set(self.names)
        )
        self.values = [self.wire[name].values() for name in self.names]
        self.client = LocalDataPlaneClient()

    def put(self) -> None:
        """Write all rows."""
        self.client.put_samples(self.ids, "p", fields=self.wire)

    def get(self) -> TensorDict:
        """Read all rows."""
        return self.client.get_samples(self.ids, "p", self.names)

    def clear(self) -> None:
        """Remove all rows."""
        self.client.clear_samples(None, "p")

    def put_get(self) -> TensorDict:
        """Write, then read, all rows."""
        self.put()
        return self.get()

    def copy(self) -> list[torch.Tensor]:
        """Copy the bytes of all columns."""
        return [value.clone() for value in self.values]

    def check(self) -> None:
        """What comes back is what was put."""
        got = self.put_get()
        for name in self.names:
            assert torch.equal(got[name].values(), self.wire[name].values()), name
            assert torch.equal(got[name].offsets(), self.wire[name].offsets()), name
        self.clear()


def rank_rows(lengths: torch.Tensor) -> list[int]:
    """The rows of the first of eight ranks, balanced by tokens: longest first, to the rank with the fewest."""
    loads = [(0, rank) for rank in range(RANKS)]
    mine: list[int] = []
    for row in torch.argsort(lengths, descending=True).tolist():
        load, rank = heapq.heappop(loads)
        heapq.heappush(loads, (load + int(lengths[row]), rank))
        if rank == 0:
            mine.append(row)
    return sorted(mine)


def where_the_time_goes(bench: Bench, case: str, store: Store, evict: Callable[[], object]) -> None:
    """Time the parts of a put and a get that no store could do without, with caches as cold.

    Two copies, made as the store makes them; the jagged tensors of the result, which torch's constructor makes one by
    one; the columns of the put taken out of its TensorDict and held to their declarations; the ids, each read
    once to refuse a repeated one. The rest is the books: what is where, how long each row is, and the meta of a put.
    """
    got = store.get()
    parts = [(got[name].values(), got[name].offsets()) for name in store.names]
    wholes = {
        "one copy": store.copy,
        "one copy, past the caches": lambda: [own_copy(value) for value in store.values],
        "jagged tensors around what is there": lambda: [nested_from_ragged(*part) for part in parts],
        "columns taken out and checked": lambda: [
            check_declared(*column) for column in read_wire(store.wire).items()
        ],
        "ids checked": lambda: len(set(store.ids)),
        "get": store.get,
    }
    times = bench.race(f"{case}: parts of a put and a get", wholes, between=evict)
    plain_ms, copy_ms, nested_ms, columns_ms, ids_ms, get_ms = (times[way].median_s * 1e3 for way in wholes)
    put_get_ms = bench.measurements[f"{case}: all rows"]["put + get"]["median_ms"]
    put_ms = put_get_ms - get_ms
    bench.notes[f"{case}: where the time goes"] = {
        "put_and_get_ms": round(put_get_ms, 3),
        "two_copies_ms": round(2 * copy_ms, 3),
        "jagged_tensors_of_the_result_ms": round(nested_ms, 3),
        "bookkeeping_of_the_get_ms": round(get_ms - copy_ms - nested_ms, 3),
        "bookkeeping_of_the_put_ms": round(put_ms - copy_ms, 3),
        "of_which_columns_taken_out_and_checked_ms": round(columns_ms, 3),
        "of_which_ids_checked_ms": round(ids_ms, 3),
        "copies_without_any_books": round((2 * copy_ms + nested_ms + columns_ms + ids_ms) / plain_ms, 2),
    }


def whole_batches(bench: Bench, evict: Callable[[], object]) -> None:
    """Put, get and clear batches of usual and of short rows."""
    shapes = {"64x200": lognormal(64, 80, 200, shortest=20)}
    if not bench.quick:
        shapes = {
            "512x1500": lognormal(512, 600, 1500, shortest=200),
            "2048x1500": lognormal(2048, 600, 1500, shortest=200),
            "8192x256": uniform(8192, 32, 256),
        }
    for case, lengths in shapes.items():
        store = Store(make_batch(lengths))
        store.check()

        def fresh(store: Store = store) -> None:
            store.clear()
            evict()

        times = bench.race(
            f"{case}: all rows", {"one copy": store.copy, "put + get": store.put_get}, between=fresh
        )
        store.put()
        where_the_time_goes(bench, case, store, evict)
        mean_bytes = sum(value.nbytes for value in store.values) / len(store.ids)
        held = mean_bytes >= BYTES_OF_A_ROW or bench.quick
        bench.figure(
            f"put_get.{case}",
            times["put + get"].ratio,
            "copies",
            at_most=PUT_GET_COPIES if held else None,
            note="" if held else f"{mean_bytes:.0f} bytes a row: bound by the cost per row",
        )
        if not held:
            per_row_us = times["put + get"].median_s / len(store.ids) * 1e6
            bench.figure(f"per_row.{case}", per_row_us, "us/row", at_most=PUT_GET_US_PER_ROW)


def many_rows(bench: Bench) -> None:
    """Tiny rows, where bookkeeping is all there is; and a few rows of many columns."""
    rows = 4096 if bench.quick else 65_536
    store = Store(make_batch(uniform(rows, 1, 8)))
    store.check()
    times = bench.race(
        f"{rows} rows of 1 to 8 tokens",
        {"one copy": store.copy, "put + get": store.put_get},
        between=store.clear,
    )
    per_row_us = times["put + get"].median_s / rows * 1e6
    bench.figure(f"per_row.{rows}", per_row_us, "us/row", at_most=PUT_GET_US_PER_ROW)
    for columns in (1, 20):
        for few in (8, 512):
            small = Store(make_batch(uniform(few, 1, 64), columns=columns))
            bench.race(
                f"{few} rows, {columns} columns",
                {"one copy": small.copy, "put + get": small.put_get},
                between=small.clear,
            )


def parts(bench: Bench, evict: Callable[[], object]) -> None:
    """One rank's rows, and some of the columns, of a batch that is in the store."""
    rows = 512 if bench.quick else 4096
    store = Store(make_batch(lognormal(rows, 600, 1500, shortest=200), columns=8))
    store.put()
    mine = rank_rows(store.batch.lengths)
    ids = [store.ids[row] for row in mine]
    got = store.client.get_samples(ids, "p", store.names)
    for name in store.names:
        for row, tensor in zip(mine, got[name].unbind()):
            assert torch.equal(tensor, store.batch.padded[name][row, : len(tensor)]), (name, row)
    two = store.names[:2]
    times = bench.race(
        f"{rows} rows, 8 columns: parts",
        {
            "all rows": store.get,
            "one rank's eighth": lambda: store.client.get_samples(ids, "p", store.names),
            "two of eight columns": lambda: store.client.get_samples(store.ids, "p", two),
        },
        between=evict,
    )
    constant_ms = (
        times["one rank's eighth"].median_s - EIGHTH_SHARE / RANKS * times["all rows"].median_s
    ) * 1e3
    bench.figure(
        "eighth",
        constant_ms,
        "ms",
        at_most=EIGHTH_CONSTANT_MS,
        note=f"beyond {EIGHTH_SHARE} eighths of the read of all {rows} rows",
    )


def several_clients(bench: Bench) -> None:
    """Clients that put and get at once, each its own rows, in threads: what the lock costs them."""
    store = Store(make_batch(lognormal(64 if bench.quick else 512, 600, 1500, shortest=200)))
    wire, names, rows = store.wire, store.names, len(store.ids)

    def work(client: int) -> None:
        ids = [f"{client}.{row}" for row in range(rows)]
        store.client.put_samples(ids, "p", fields=wire)
        store.client.get_samples(ids, "p", names)

    def at_once() -> None:
        threads = [threading.Thread(target=work, args=(client,)) for client in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def in_turn() -> None:
        for client in range(CLIENTS):
            work(client)

    times = bench.race(
        f"{CLIENTS} clients",
        {"in turn": in_turn, "at once": at_once},
        clock=time.perf_counter,
        between=store.clear,
    )
    bench.figure("clients_at_once", times["at once"].ratio, "of in turn")


def measure(bench: Bench) -> None:
    """Time everything, on one thread (the clients at once have one each)."""
    whole_batches(bench, bench.evict_caches)
    many_rows(bench)
    parts(bench, bench.evict_caches)
    several_clients(bench)


if __name__ == "__main__":
    main(measure, __doc__)

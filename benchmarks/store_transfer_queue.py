"""Does packing pay? The adapter against TransferQueue's own calls, Ray's object store and one copy of the bytes.

All in one process and in turn: put, get of all rows, of one rank's eighth (balanced by length), of two of eight
columns, and clear, for 512 rows of per-token columns; what each way returns is held against what was put before
anything is timed. Then 65,536 rows of a few numbers, by the adapter alone: TransferQueue's own calls take ten
seconds. Targets are for the full size. `store_mooncake` asks the same of the other backend. Needs headrace[ray].
"""

import cProfile
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from columns import Batch, lognormal, make_batch, uniform
from omegaconf import OmegaConf
from run import Bench, main
from tensordict import TensorDict

from headrace.data_plane import DataPlaneClient, KVBatchMeta, build_data_plane_client
from headrace.data_plane.preshard import shard_meta_for_dp
from headrace.distributed.ragged import RowLayout, nested_from_ragged

TIMES_JAGGED, TIMES_PADDED_GET, MANY_ROWS_S = 10.0, 3.0, 1.0
EIGHTHS, CONSTANT_S = 1.5, 0.005
RANKS = 8


@dataclass
class Way:
    """One way to store a batch, and what it gives back."""

    put: Callable[[], Any]
    get: Callable[[], Any]
    clear: Callable[[], Any]
    expected: TensorDict


def make(rows: int, columns: int) -> Batch:
    """Rows as rollouts have them: 150 to 1,500 tokens."""
    return make_batch(lognormal(rows, 600, 1500, shortest=150), columns=columns)


def without_padding(batch: Batch) -> TensorDict:
    """The columns of a batch as jagged tensors around the same offsets."""
    layout = RowLayout(batch.lengths, next(iter(batch.padded.values())).shape[1])
    columns = {name: nested_from_ragged(layout.strip(c), layout.offsets) for name, c in batch.padded.items()}
    return TensorDict(columns, batch_size=[len(batch.lengths)])


def eighth(batch: Batch) -> list[str]:
    """The ids of one of eight ranks, as the planner balances them."""
    lengths = batch.lengths.tolist()
    meta = KVBatchMeta("p", "train", batch.ids, sequence_lengths=lengths)
    limit = {"max_tokens_per_microbatch": 4 * max(lengths)}
    shards, _ = shard_meta_for_dp(meta, dp_world=RANKS, dynamic_batching_args=limit)
    return shards[0].sample_ids


def adapter(client: DataPlaneClient, batch: Batch, jagged: TensorDict) -> Way:
    """The store of headrace."""
    ids, names = batch.ids, list(batch.padded)
    return Way(
        lambda: client.put_samples(ids, "p", fields=jagged),
        lambda: client.get_samples(ids, "p", names),
        lambda: client.clear_samples(None, "p"),
        jagged,
    )


def raw(batch: Batch, partition: str, fields: TensorDict, names: Sequence[str] | None = None) -> Way:
    """TransferQueue's own calls."""
    ids, wanted = batch.ids, list(names or batch.padded)
    return Way(
        lambda: tq.kv_batch_put(ids, partition, fields),
        lambda: tq.kv_batch_get(ids, partition, wanted),
        lambda: tq.kv_clear(ids, partition),
        fields,
    )


def one_copy(batch: Batch, jagged: TensorDict) -> Way:
    """What a copy of the same bytes takes, and no store."""
    values = [jagged[name].values() for name in batch.padded]
    held: list[torch.Tensor] = list(values)
    return Way(
        lambda: [part.clone() for part in values],
        lambda: TensorDict(
            {
                name: nested_from_ragged(part.clone(), jagged[name].offsets())
                for name, part in zip(batch.padded, held)
            },
            batch_size=[len(batch.ids)],
        ),
        lambda: None,
        jagged,
    )


def object_store_padded(batch: Batch) -> Way:
    """Ray's object store with the padded columns as a dict."""
    held: list[Any] = []
    padded = TensorDict(dict(batch.padded), batch_size=[len(batch.ids)])
    return Way(
        lambda: held.append(ray.put({name: column.numpy() for name, column in batch.padded.items()})),
        lambda: {name: torch.from_numpy(column.copy()) for name, column in ray.get(held[-1]).items()},
        held.clear,
        padded,
    )


def object_store_packed(batch: Batch, jagged: TensorDict) -> Way:
    """Ray's object store with all columns in one buffer, which the reader copies out of."""
    held: list[Any] = []
    values = {name: jagged[name].values() for name in batch.padded}
    ends = np.cumsum([part.nbytes for part in values.values()]).tolist()

    def put() -> None:
        buffer = np.concatenate([part.view(torch.uint8).numpy() for part in values.values()])
        held.append(ray.put((buffer, jagged["input_ids"].offsets().numpy())))

    def get() -> TensorDict:
        buffer, offsets = ray.get(held[-1])
        bounds = torch.from_numpy(offsets.copy())
        columns = {
            name: nested_from_ragged(
                torch.from_numpy(buffer[end - part.nbytes : end].copy()).view(part.dtype), bounds
            )
            for (name, part), end in zip(values.items(), ends)
        }
        return TensorDict(columns, batch_size=[len(batch.ids)])

    return Way(put, get, held.clear, jagged)


def all_ways(client: DataPlaneClient, batch: Batch) -> dict[str, Way]:
    """Every way to store a batch, the adapter first."""
    jagged = without_padding(batch)
    padded = TensorDict(dict(batch.padded), batch_size=[len(batch.ids)])
    return {
        "adapter": adapter(client, batch, jagged),
        "raw jagged": raw(batch, "j", jagged),
        "raw padded": raw(batch, "d", padded),
        "Ray, padded dict": object_store_padded(batch),
        "Ray, one buffer": object_store_packed(batch, jagged),
        "one copy": one_copy(batch, jagged),
    }


def check(table: dict[str, Way], names: Sequence[str]) -> None:
    """Every way gives the batch back."""
    for name, way in table.items():
        way.put()
        got = way.get()
        for column in names:
            for one, other in zip(got[column].unbind(), way.expected[column].unbind(), strict=True):
                assert torch.equal(one, other), f"{name} returned another '{column}'"
                assert one.dtype == other.dtype, f"{name} returned '{column}' in another dtype"
        way.clear()


def usual_batch(bench: Bench, client: DataPlaneClient, *, held: bool) -> None:
    """Put, get and clear five per-token columns; with `held`, figures are held to their targets."""
    rows = 32 if bench.quick else 512
    batch = make(rows, 5)
    table = all_ways(client, batch)
    check(table, list(batch.padded))

    def clear_all() -> None:
        for way in table.values():
            way.clear()

    def put_all() -> None:
        for way in table.values():
            way.put()

    clock = time.perf_counter
    puts = bench.race(
        f"{rows} rows: put", {n: w.put for n, w in table.items()}, between=clear_all, clock=clock
    )
    clear_all()
    put_all()
    gets = bench.race(f"{rows} rows: get", {n: w.get for n, w in table.items()}, clock=clock)
    clear_all()
    stores = {n: w for n, w in table.items() if n != "one copy"}
    repeats = min(5, bench.repeats)
    bench.race(
        f"{rows} rows: clear",
        {n: w.clear for n, w in stores.items()},
        between=lambda: [way.put() for way in stores.values()],
        clock=clock,
        repeats=repeats,
    )
    clear_all()
    wanted = (TIMES_JAGGED, TIMES_JAGGED, TIMES_PADDED_GET) if held else (None, None, None)
    ratios = (puts["raw jagged"].ratio, gets["raw jagged"].ratio, gets["raw padded"].ratio)
    names = ("put_faster_than_raw_jagged", "get_faster_than_raw_jagged", "get_faster_than_raw_padded")
    for name, ratio, target in zip(names, ratios, wanted):
        bench.figure(name, ratio, "x", at_least=target)
    bench.figure("put_faster_than_raw_padded", puts["raw padded"].ratio, "x")
    for name, times in (("put", puts), ("get", gets)):
        bench.figure(f"{name}_copies", 1 / times["one copy"].ratio, "copies of the bytes")


def one_rank(bench: Bench, client: DataPlaneClient, rows: int, *, held: bool) -> None:
    """Read the rows of one of eight ranks, which lie scattered over the batch."""
    batch = make(rows, 5)
    ids, names, some = batch.ids, list(batch.padded), eighth(batch)
    jagged = without_padding(batch)
    client.put_samples(ids, "p", fields=jagged)
    got, row_of = client.get_samples(some, "p", names), {name: i for i, name in enumerate(ids)}
    for name in names:
        expected = jagged[name].unbind()
        for one, sample in zip(got[name].unbind(), some, strict=True):
            assert torch.equal(one, expected[row_of[sample]])
    ways: dict[str, Callable[[], object]] = {
        "all rows": lambda: client.get_samples(ids, "p", names),
        "an eighth": lambda: client.get_samples(some, "p", names),
    }
    times = bench.race(f"{rows} rows: one rank's eighth", ways, clock=time.perf_counter)
    bench.notes[f"eighth.{rows}, ms per read by function"] = profile(ways["an eighth"])
    client.clear_samples(None, "p")
    limit = EIGHTHS / RANKS * times["all rows"].median_s + CONSTANT_S
    note = f"limit: {EIGHTHS} eighths of all rows' {1e3 * times['all rows'].median_s:.1f} ms + 5 ms"
    target = 1e3 * limit if held else None
    bench.figure(f"eighth.{rows}", 1e3 * times["an eighth"].median_s, "ms", at_most=target, note=note)


def profile(read: Callable[[], object], reads: int = 20) -> dict[str, float]:
    """Return where this thread's time goes: milliseconds per read in the functions that take most, callees apart.

    `poll` is waiting: for the storage units, which gather the rows and send them over TCP, and for the index.
    """
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(reads):
        read()
    profiler.disable()
    entries = sorted(profiler.getstats(), key=lambda entry: -entry.inlinetime)[:8]
    names = [getattr(entry.code, "co_qualname", None) or str(entry.code) for entry in entries]
    return {name: round(1e3 * entry.inlinetime / reads, 3) for name, entry in zip(names, entries)}


def two_of_eight(bench: Bench, client: DataPlaneClient) -> None:
    """Read two of eight columns."""
    rows = 32 if bench.quick else 512
    batch = make(rows, 8)
    names = list(batch.padded)
    jagged = without_padding(batch)
    padded = TensorDict(dict(batch.padded), batch_size=[rows])
    table = {
        "raw jagged": raw(batch, "j8", jagged, names[:2]),
        "raw padded": raw(batch, "d8", padded, names[:2]),
    }
    client.put_samples(batch.ids, "p", fields=jagged)
    for way in table.values():
        way.put()
    got = client.get_samples(batch.ids, "p", names[:2])
    assert list(got.keys()) == names[:2]
    assert all(torch.equal(got[name].values(), jagged[name].values()) for name in names[:2])
    ways: dict[str, Callable[[], object]] = {
        "two columns": lambda: client.get_samples(batch.ids, "p", names[:2]),
        "eight columns": lambda: client.get_samples(batch.ids, "p", names),
        **{f"{name}, two columns": way.get for name, way in table.items()},
    }
    times = bench.race(
        f"{rows} rows: two of eight columns", ways, clock=time.perf_counter, repeats=min(7, bench.repeats)
    )
    bench.figure("two_of_eight_columns", 1 / times["eight columns"].ratio, "of the time of eight")
    client.clear_samples(None, "p")
    for way in table.values():
        way.clear()


def many_rows(bench: Bench, client: DataPlaneClient, *, held: bool) -> None:
    """Rows of a few numbers, where the cost is all per row."""
    rows = 1024 if bench.quick else 65_536
    for columns in (1, 5):
        batch = make_batch(uniform(rows, 1, 3), columns=columns)
        fields = without_padding(batch)
        way = adapter(client, batch, fields)
        way.put()
        got = way.get()
        for name in batch.padded:
            assert torch.equal(got[name].values(), fields[name].values())
            assert torch.equal(got[name].offsets(), fields[name].offsets())
        clock, case = time.perf_counter, f"{rows} rows, {columns} columns"
        get = bench.race(f"{case}: get", {"adapter": way.get}, clock=clock)
        put = bench.race(f"{case}: put", {"adapter": way.put}, between=way.clear, clock=clock)
        way.clear()
        target, name = MANY_ROWS_S if held else None, f"{rows}" if columns == 1 else f"{rows}x{columns}"
        bench.figure(f"put.{name}", put["adapter"].median_s, "s", at_most=target)
        bench.figure(f"get.{name}", get["adapter"].median_s, "s", at_most=target)


@contextmanager
def stores(backend: str, **changes: Any) -> Iterator[DataPlaneClient]:
    """Start Ray, TransferQueue's own engine (simple) and the adapter's."""
    # TransferQueue's own controller and storage unit reserve a CPU each.
    ray.init("local", num_cpus=4, include_dashboard=False, logging_level=logging.WARNING, log_to_driver=False)
    settings = {
        "controller": {"polling_mode": True},
        "backend": {"SimpleStorage": {"num_data_storage_units": 1}},
    }
    tq.init(OmegaConf.create(settings))
    config = {"impl": "transfer_queue", "backend": backend, **changes}
    client = build_data_plane_client(config, bootstrap=True)
    try:
        yield client
    finally:
        client.close()
        tq.close()
        ray.shutdown()


def measure_backend(bench: Bench, client: DataPlaneClient, *, held: bool) -> None:
    """Ask all questions of one backend."""
    usual_batch(bench, client, held=held)
    for rows in (64,) if bench.quick else (512, 4096):
        one_rank(bench, client, rows, held=held)
    two_of_eight(bench, client)
    many_rows(bench, client, held=held)


def measure(bench: Bench) -> None:
    """Time everything over the simple backend."""
    with stores("simple") as client:
        measure_backend(bench, client, held=not bench.quick)


if __name__ == "__main__":
    main(measure, __doc__)

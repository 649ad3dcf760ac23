"""Does packing pay? The adapter against TransferQueue's own put and get, jagged and padded, in one process.

512 rows of five per-token columns: what each way returns is held against what was put before anything is timed. 65,536
rows of one tiny column: the adapter alone, with a limit of one second (TransferQueue's own calls take ten).
Needs headrace[ray].
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
import torch
import transfer_queue as tq
from columns import PER_TOKEN, lognormal, make_batch, uniform
from omegaconf import OmegaConf
from run import Bench, main
from tensordict import TensorDict

from headrace.data_plane import DataPlaneClient, build_data_plane_client, pack_columns

TIMES_JAGGED, TIMES_PADDED_GET, MANY_ROWS_S = 10.0, 3.0, 1.0


@dataclass
class Way:
    """One way to store the batch, and what it gives back."""

    put: Callable[[], Any]
    get: Callable[[], TensorDict]
    clear: Callable[[], Any]
    expected: TensorDict


def ways(client: DataPlaneClient, rows: int) -> dict[str, Way]:
    """The adapter, and TransferQueue's own calls with both layouts, over the same rows."""
    batch = make_batch(lognormal(rows, 600, 1500, shortest=150))
    ids, names = batch.ids, list(PER_TOKEN)
    jagged = pack_columns(batch.padded, lengths=batch.lengths)
    padded = TensorDict(dict(batch.padded), batch_size=[rows])

    def raw(partition: str, fields: TensorDict) -> Way:
        return Way(
            lambda: tq.kv_batch_put(ids, partition, fields),
            lambda: tq.kv_batch_get(ids, partition, names),
            lambda: tq.kv_clear(ids, partition),
            fields,
        )

    adapter = Way(
        lambda: client.put_samples(ids, "p", fields=jagged),
        lambda: client.get_samples(ids, "p", names),
        lambda: client.clear_samples(None, "p"),
        jagged,
    )
    return {"adapter": adapter, "raw jagged": raw("j", jagged), "raw padded": raw("d", padded)}


def check(table: dict[str, Way]) -> None:
    """Every way gives the batch back."""
    for name, way in table.items():
        way.put()
        got = way.get()
        for column in PER_TOKEN:
            for one, other in zip(got[column].unbind(), way.expected[column].unbind(), strict=True):
                assert torch.equal(one, other), f"{name} returned another '{column}'"
                assert one.dtype == other.dtype, f"{name} returned '{column}' in another dtype"
        way.clear()


def usual_batch(bench: Bench, client: DataPlaneClient) -> None:
    """Put by every way, get by every way, clear by every way, in turn."""
    rows = 32 if bench.quick else 512
    table = ways(client, rows)
    check(table)
    for way in table.values():
        way.put()
    gets = bench.race(
        f"{rows} rows: get", {name: way.get for name, way in table.items()}, clock=time.perf_counter
    )

    def clear_all() -> None:
        for way in table.values():
            way.clear()

    clear_all()
    puts = bench.race(
        f"{rows} rows: put",
        {name: way.put for name, way in table.items()},
        between=clear_all,
        clock=time.perf_counter,
    )
    clear_all()
    bench.figure("put_faster_than_raw_jagged", puts["raw jagged"].ratio, "x", at_least=TIMES_JAGGED)
    bench.figure("get_faster_than_raw_jagged", gets["raw jagged"].ratio, "x", at_least=TIMES_JAGGED)
    bench.figure("get_faster_than_raw_padded", gets["raw padded"].ratio, "x", at_least=TIMES_PADDED_GET)
    bench.figure("put_faster_than_raw_padded", puts["raw padded"].ratio, "x")


def many_rows(bench: Bench, client: DataPlaneClient) -> None:
    """Rows of a few numbers, where the cost is all per row."""
    rows = 1024 if bench.quick else 65_536
    batch = make_batch(uniform(rows, 1, 3), columns=1)
    fields, ids, names = pack_columns(batch.padded, lengths=batch.lengths), batch.ids, list(batch.padded)
    client.put_samples(ids, "many", fields=fields)
    got = client.get_samples(ids, "many", names)
    for name in names:
        assert torch.equal(got[name].values(), fields[name].values())
        assert torch.equal(got[name].offsets(), fields[name].offsets())
    get = bench.race(
        f"{rows} rows: get",
        {"adapter": lambda: client.get_samples(ids, "many", names)},
        clock=time.perf_counter,
    )
    put = bench.race(
        f"{rows} rows: put",
        {"adapter": lambda: client.put_samples(ids, "many", fields=fields)},
        between=lambda: client.clear_samples(None, "many"),
        clock=time.perf_counter,
    )
    bench.figure(f"put.{rows}", put["adapter"].median_s, "s", at_most=MANY_ROWS_S)
    bench.figure(f"get.{rows}", get["adapter"].median_s, "s", at_most=MANY_ROWS_S)


def measure(bench: Bench) -> None:
    """Start Ray, TransferQueue's own engine and the adapter's, and time both batches."""
    # TransferQueue's own controller and storage unit reserve a CPU each.
    ray.init(num_cpus=4, include_dashboard=False, logging_level=logging.WARNING, log_to_driver=False)
    settings = {
        "controller": {"polling_mode": True},
        "backend": {"SimpleStorage": {"num_data_storage_units": 1}},
    }
    tq.init(OmegaConf.create(settings))
    client = build_data_plane_client({"impl": "transfer_queue"}, bootstrap=True)
    try:
        usual_batch(bench, client)
        many_rows(bench, client)
    finally:
        client.close()
        tq.close()
        ray.shutdown()


if __name__ == "__main__":
    main(measure, __doc__)

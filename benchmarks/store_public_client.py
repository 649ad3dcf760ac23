"""Would TransferQueue's public client do for the store's blocks? It and its kv calls against the messages spoken today.

The same store three times over one engine, apart from how its blocks travel: put, get of all rows and of one rank's
eighth, 512 and 4,096 rows of five per-token columns. The public client reads values, here blocks, as a whole.
Needs headrace[ray].
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
import transfer_queue as tq
from run import Bench, main
from store_transfer_queue import eighth, make, stores, without_padding
from tensordict import TensorDict

from headrace.data_plane import DataPlaneClient
from headrace.data_plane.adapters.transfer_queue import TransferQueueDataPlaneClient
from headrace.data_plane.adapters.transfer_queue_cluster import (
    STARTUP_KNOB,
    find_index,
    wait_for_connection,
)
from headrace.data_plane.adapters.transfer_queue_mooncake import FIELD, as_rows, batch_meta, get_blocks
from headrace.data_plane.adapters.transfer_queue_socket import Blocks
from headrace.data_plane.interfaces import DataPlaneConfig
from headrace.data_plane.store.blocks import BlockInfo, Frames, PackedColumns, select_rows
from headrace.data_plane.store.columns import Rows
from headrace.distributed.ragged import nested_from_ragged
from headrace.distributed.ray_connection import Deadline


def one_row_each(packed: PackedColumns) -> TensorDict:
    """The blocks of a put, one flat row each."""
    rows = nested_from_ragged(packed.buffer, torch.tensor(packed.bounds), 1)
    return TensorDict({FIELD: rows}, batch_size=[len(packed.blocks)])


def some_of(whole: Sequence[torch.Tensor], rows: Sequence[Rows | None]) -> list[Frames | torch.Tensor]:
    """Return blocks, or some rows of them."""
    return [
        block if some is None else select_rows(Frames.split(block), some) for block, some in zip(whole, rows)
    ]


class PublicClient(Blocks):
    """`async_put` and `async_get_data`; reads go by slot, without the controller."""

    def put(self, partition: str, packed: PackedColumns, deadline: Deadline) -> list[int]:
        """Store blocks."""
        slots = self._result(self._reserve(partition, [b.number for b in packed.blocks]), "reserve", deadline)
        meta = batch_meta(partition, slots, [block.flat_bytes for block in packed.blocks])
        self._result(self._open().async_put(one_row_each(packed), meta), "put", deadline)
        return slots

    def get(
        self, partition: str, blocks: Sequence[BlockInfo], rows: Sequence[Rows | None], deadline: Deadline
    ) -> list[Frames | torch.Tensor]:
        """Return blocks, or the rows asked for of blocks that came as a whole."""
        whole = self._result(get_blocks(self._open(), partition, blocks), "get", deadline)
        return some_of(whole, rows)


class KvCalls(PublicClient):
    """`kv_batch_put` and `kv_batch_get`; all goes by key, so the controller is asked each time."""

    def put(self, partition: str, packed: PackedColumns, deadline: Deadline) -> list[int]:
        """Store blocks, and return numbers that nobody looks at."""
        tq.kv_batch_put([str(block.number) for block in packed.blocks], partition, one_row_each(packed))
        return list(range(len(packed.blocks)))

    def get(
        self, partition: str, blocks: Sequence[BlockInfo], rows: Sequence[Rows | None], deadline: Deadline
    ) -> list[Frames | torch.Tensor]:
        """Return blocks, or the rows asked for of blocks that came as a whole."""
        whole = as_rows(tq.kv_batch_get([str(block.number) for block in blocks], partition, [FIELD])[FIELD])
        return some_of(whole, rows)

    def drop(self, partition: str, keys: Sequence[str], deadline: Deadline) -> None:
        """Remove blocks."""
        tq.kv_clear(list(keys), partition)


def store_over(kind: type[Blocks]) -> TransferQueueDataPlaneClient:
    """Open a store on the engine that is up, whose blocks travel in another way."""
    config = DataPlaneConfig(impl="transfer_queue", store_name=kind.__name__)
    client = TransferQueueDataPlaneClient(config, bootstrap=True)
    deadline = Deadline(config.startup_timeout_s, STARTUP_KNOB)
    connection = wait_for_connection(find_index(config.backend), deadline)
    client._link = replace(client._open(), blocks=kind(connection, deadline))
    return client


def race(bench: Bench, clients: Mapping[str, DataPlaneClient], rows: int) -> None:
    """Put and get the same rows over all stores, in turn."""
    batch = make(rows, 5)
    jagged, ids, names, some = without_padding(batch), batch.ids, list(batch.padded), eighth(batch)

    def clear() -> None:
        for client in clients.values():
            client.clear_samples(None, "p")

    for way, client in clients.items():
        client.put_samples(ids, "p", fields=jagged)
        got = client.get_samples(ids, "p", names)
        assert all(torch.equal(got[name].values(), jagged[name].values()) for name in names), way
    repeats, clock = bench.repeats if rows < 1000 else min(7, bench.repeats), time.perf_counter
    times = {}
    for what, mine in (("get", ids), ("eighth", some)):
        reads = {way: partial(client.get_samples, mine, "p", names) for way, client in clients.items()}
        times[what] = bench.race(f"{rows} rows: {what}", reads, clock=clock, repeats=repeats)
    puts = {way: partial(client.put_samples, ids, "p", jagged) for way, client in clients.items()}
    times["put"] = bench.race(f"{rows} rows: put", puts, between=clear, clock=clock, repeats=repeats)
    clear()
    for what, timing in times.items():
        for way in list(clients)[1:]:
            bench.figure(f"{what}.{rows}.{way}", timing[way].ratio, "of today's time")


def measure(bench: Bench) -> None:
    """Time all ways."""
    with stores("simple") as today:
        others = {"public client": store_over(PublicClient), "kv calls": store_over(KvCalls)}
        for rows in (64,) if bench.quick else (512, 4096):
            race(bench, {"messages": today, **others}, rows)
        for client in others.values():
            blocks = client._open().blocks
            client.close()
            blocks.close()


if __name__ == "__main__":
    main(measure, __doc__)

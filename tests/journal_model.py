"""A naive model of a journaled store: rows as a dict of dicts, and operations that do to both what they say."""

import copy
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from headrace.data_plane import (
    DataPlaneClient,
    JournalDataPlaneClient,
    KVBatchMeta,
    kv_first_write,
    pack_jagged_fields,
    restore,
    write_columns,
)
from headrace.data_plane.adapters.local import LocalDataPlaneClient
from headrace.data_plane.journal.records import Taken
from headrace.data_plane.journal.segments import records, segments, size_of
from headrace.data_plane.wire import read_wire
from headrace.distributed.columns import object_array
from headrace.errors import DataPlaneError, SchemaError

LENGTHS = {f"{uid}_g{i}": 1 + (3 * number + i) % 5 for number, uid in enumerate("abcd") for i in range(2)}
IDS = list(LENGTHS)
Rows = dict[str, dict[str, Any]]


def columns_of(ids: list[str], names: list[str], value: int) -> TensorDict:
    """Return columns whose numbers say when they were written."""
    lengths = torch.tensor([LENGTHS[i] for i in ids])
    made: dict[str, Any] = {}
    for name in names:
        if name == "input_ids":
            made[name] = torch.nested.nested_tensor(
                [torch.full((LENGTHS[i],), value) for i in ids], layout=torch.jagged
            )
        elif name == "score":
            made[name] = torch.full((len(ids),), float(value))
        else:
            made[name] = object_array([{"made": value, "id": i} for i in ids])
    return pack_jagged_fields(made, lengths=lengths)


class Model:
    """Partitions as they should be; `rows` are what is in the store, `consumed` which of them a task has had."""

    def __init__(self) -> None:
        self.rows: dict[str, Rows] = {}
        self.consumed: dict[str, set[str]] = {}

    def left(self) -> dict[str, Rows]:
        """Return what a restore has to give back."""
        return {
            partition: {
                i: columns for i, columns in rows.items() if i not in self.consumed.get(partition, ())
            }
            for partition, rows in self.rows.items()
            if rows.keys() - self.consumed.get(partition, set())
        }

    def snapshot(self) -> dict[str, Rows]:
        return copy.deepcopy(self.left())

    def register(self, client: DataPlaneClient, partition: str, group_size: int | None) -> None:
        client.register_partition(partition, ["input_ids"], 6, ["train"], group_size)
        self.rows[partition], self.consumed[partition] = {}, set()

    def put(
        self, client: DataPlaneClient, partition: str, ids: list[str], names: list[str], value: int
    ) -> None:
        try:
            client.put_samples(ids, partition, columns_of(ids, names, value), [{"made": value}] * len(ids))
        except DataPlaneError:
            return  # more samples than the partition takes
        for sample_id in ids:
            row = self.rows.setdefault(partition, {}).setdefault(sample_id, {})
            row.update(dict.fromkeys([*names, "tag"], value))

    def refused_put(self, client: DataPlaneClient, partition: str, ids: list[str]) -> None:
        try:
            client.put_samples(ids, partition, TensorDict({"input_ids": torch.zeros(len(ids))}, [len(ids)]))
        except SchemaError:
            return
        raise AssertionError("floats were taken for ids of tokens")

    def clear(self, client: DataPlaneClient, partition: str, ids: list[str] | None) -> None:
        client.clear_samples(ids, partition)
        for sample_id in list(self.rows.get(partition, {})) if ids is None else ids:
            self.rows.get(partition, {}).pop(sample_id, None)
            self.consumed.get(partition, set()).discard(sample_id)

    def claim(self, client: DataPlaneClient, partition: str) -> None:
        if partition in self.consumed:
            meta = client.claim_meta(partition, "train", ["input_ids"], 2, blocking=False)
            self.consumed[partition] |= set(() if meta is None else meta.sample_ids)


def contents(client: DataPlaneClient) -> dict[str, Rows]:
    """Return what a store holds, in the model's form; every value is checked to be that of one write."""
    found: dict[str, Rows] = {}
    for partition in client.partition_ids():
        for sample_id in client.sample_ids(partition):
            found.setdefault(partition, {})[sample_id] = _row(client, partition, sample_id)
    return found


def _row(client: DataPlaneClient, partition: str, sample_id: str) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, leaf in read_wire(client.get_data(KVBatchMeta(partition, "train", [sample_id]))).items():
        if isinstance(leaf, torch.Tensor) and leaf.is_nested:
            values = set(leaf.values().tolist())
            assert leaf.offsets().tolist() == [0, LENGTHS[sample_id]]
        elif isinstance(leaf, torch.Tensor):
            values = set(leaf.tolist())
        else:
            assert leaf[0]["id"] == sample_id
            values = {leaf[0]["made"]}
        assert len(values) == 1
        row[name] = int(values.pop())
    tagged = client.put_samples([sample_id], partition)
    assert tagged.tags is not None
    row["tag"] = tagged.tags[0]["made"]
    return row


def bytes_written(folder: Path) -> int:
    """Return the bytes of all files of a journal with one writer whose files are all there.

    They end with a put, not with the note that the store has taken it: that is no operation of its own.
    """
    *others, last = segments(folder)
    sizes = [size_of(folder, segment) for segment in others]
    *before, record = records(folder, last, 0, size_of(folder, last))
    return sum(sizes) + (before[-1].end if isinstance(record.head, Taken) else record.end)


def cut_to(folder: Path, size: int) -> None:
    """Keep the first `size` bytes of a journal with one writer, as a crash would leave them."""
    for path in sorted(folder.glob("*/*.journal")):
        kept = min(size, path.stat().st_size)
        size -= kept
        if kept:
            with open(path, "r+b") as file:
                file.truncate(kept)
        else:
            path.unlink()


def journaled(folder: Path, **options: Any) -> JournalDataPlaneClient:
    return JournalDataPlaneClient(LocalDataPlaneClient(), folder, **{"fsync": "never", **options})


def restored(folder: Path, **options: Any) -> LocalDataPlaneClient:
    client = LocalDataPlaneClient()
    restore(client, folder, **options)
    return client


def put_group(
    client: Any,
    number: int,
    tokens: int = 3,
    partition: str = "train",
    once: bool = False,
    v: int | None = None,
) -> list[str]:
    """Put a group, with the tag `v` if there is one; return the ids that were written."""
    ids = [f"u{number}_g{i}" for i in range(2)]
    rows = [torch.arange(tokens + i) for i in range(2)]
    batch = {"input_ids": rows, "input_lengths": torch.tensor([len(row) for row in rows])}
    tags = None if v is None else [{"v": v}] * 2
    meta = kv_first_write(
        batch, sample_ids=ids, dp_client=client, partition_id=partition, once=once, tags=tags
    )
    if meta.size:
        write_columns(client, meta, {"advantages": torch.tensor([0.5, number])})
    return meta.sample_ids

"""The books of the local store, and what observability counts of it, against a plain account of every row."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from headrace.data_plane.adapters.local import LocalDataPlaneClient
from headrace.data_plane.codec import nest
from headrace.data_plane.object_codec import encode
from headrace.data_plane.observability import MetricsDataPlaneClient
from headrace.distributed.columns import object_array
from reference import rows_of

IDS = "abcdef"
SOME = st.lists(st.sampled_from(IDS), min_size=1, max_size=6, unique=True)
# Whole partitions in their order are common in a run, and have a way of their own through the books.
ROWS = st.one_of(SOME, st.just(list(IDS)), st.just(list(IDS[:4])))
STEPS = st.tuples(
    st.sampled_from(["put", "put", "get", "clear", "clear all"]),
    ROWS,
    st.sampled_from([("x",), ("input_ids",), ("x", "input_ids", "log")]),
)


def columns(ids: list[str], names: tuple[str, ...], number: int) -> TensorDict:
    tokens = [torch.full((1 + IDS.index(i),), number) for i in ids]
    made: dict[str, Any] = {
        "x": torch.tensor([float(number * 100 + IDS.index(i)) for i in ids]),
        "input_ids": nest(tokens),
        "log": object_array([[{"role": i, "content": "y" * number}] for i in ids]),
    }
    return TensorDict({name: made[name] for name in names}, batch_size=[len(ids)])


def plain_rows(column: Any) -> list[Any]:
    if isinstance(column, torch.Tensor) and column.is_nested:
        return [row.tolist() for row in rows_of(column)]
    return list(column.tolist())


class Blocks:
    """The blocks of one column, counted plainly: a put makes one, which shrinks when less than half is in use."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.blocks: list[dict[str, int]] = []
        self.in_use: list[set[str]] = []

    def write(self, ids: list[str], values: list[Any]) -> None:
        self.drop(ids)
        self.blocks.append({row: self._bytes(value) for row, value in zip(ids, values)})
        self.in_use.append(set(ids))

    def drop(self, ids: list[str]) -> None:
        kept = [(block, rows.difference(ids)) for block, rows in zip(self.blocks, self.in_use)]
        self.in_use = [rows for _, rows in kept if rows]
        self.blocks = [
            {row: size for row, size in block.items() if row in rows or 2 * len(rows) >= len(block)}
            for block, rows in kept
            if rows
        ]

    @property
    def nbytes(self) -> int:
        offsets = sum(8 * (len(block) + 1) for block in self.blocks) if self.name == "input_ids" else 0
        return offsets + sum(sum(block.values()) for block in self.blocks)

    def _bytes(self, value: Any) -> int:
        if self.name == "log":
            return len(encode(value))
        return 4 if self.name == "x" else 8 * len(value)


@settings(deadline=None)
@given(st.lists(STEPS, max_size=14))
def test_every_row_is_what_was_put_last_and_every_byte_is_counted(steps: list[Any]) -> None:
    client = MetricsDataPlaneClient(LocalDataPlaneClient(), lambda _: None)
    held: dict[str, dict[str, Any]] = {}
    blocks = {name: Blocks(name) for name in ("x", "input_ids", "log")}
    for number, (kind, ids, names) in enumerate(steps):
        if kind == "put":
            fields = columns(ids, names, number)
            meta = client.put_samples(ids, "p", fields=fields)
            for name in names:
                blocks[name].write(ids, plain_rows(fields[name]))
                for row, value in zip(ids, plain_rows(fields[name])):
                    held.setdefault(row, {})[name] = value
            whole = all("input_ids" in held[row] for row in ids)
            assert meta.sequence_lengths == ([1 + IDS.index(i) for i in ids] if whole else None)
        elif kind == "get":
            there = [row for row in ids if all(name in held.get(row, {}) for name in names)]
            if there:
                got = client.get_samples(there, "p", names)
                for name in names:
                    assert plain_rows(got[name]) == [held[row][name] for row in there]
        else:
            client.clear_samples(ids if kind == "clear" else None, "p")
            gone = ids if kind == "clear" else list(held)
            held = {r: c for r, c in held.items() if r not in gone}
            for column in blocks.values():
                column.drop(gone)
        assert client.snapshot()["bytes_held"] == sum(column.nbytes for column in blocks.values())
        known = client.inner.sample_ids("p") if steps else []
        assert sorted(known) == sorted(held)
    client.close()

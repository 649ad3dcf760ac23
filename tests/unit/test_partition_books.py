"""The books of a store's partitions: what is left of them, and what a claim costs."""

import time
import tracemalloc

import numpy as np
import pytest
import torch

from headrace.data_plane.codec import nest
from headrace.data_plane.leaves import as_leaf
from headrace.data_plane.requests import ClaimRequest, Registration
from headrace.data_plane.store.chunks import chunk_from_leaf
from headrace.data_plane.store.partition import Partition
from headrace.data_plane.store.sample_store import LocalStore
from headrace.errors import DataPlaneError, SchemaError


def registration(name: str, rows: int, group_size: int | None = None) -> Registration:
    return Registration.of(name, [], rows, ["train"], group_size, None, None)


def claim(name: str, rows: int) -> ClaimRequest:
    return ClaimRequest.of(name, "train", [], rows, False)


def fill_and_end(store: LocalStore, first: int, count: int) -> float:
    """Open, fill and clear partitions; the seconds that each takes, at best."""
    best = 1.0
    for number in range(first, first + count):
        start = time.perf_counter()
        for name in (f"registered {number}", f"by hand {number}"):
            if name.startswith("registered"):
                store.register(registration(name, 2))
            store.put(name, ["a", "b"], {}, None, {})
            store.clear(name, None)
        best = min(best, time.perf_counter() - start)
    return best


def test_partitions_that_have_ended_take_neither_memory_nor_time() -> None:
    store = LocalStore(8)
    tracemalloc.start()
    early_s = fill_and_end(store, 0, 50)
    fill_and_end(store, 50, 1000)
    before = tracemalloc.get_traced_memory()[0]
    fill_and_end(store, 1050, 2000)
    late_s = fill_and_end(store, 3050, 50)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 100_000  # 25 bytes for each of 4,100
    assert late_s < 3 * early_s
    assert store.sample_ids() == {}


def test_of_the_partitions_that_have_ended_the_latest_can_be_filled_again() -> None:
    store = LocalStore(8)
    fill_and_end(store, 0, 1001)
    for name in ("registered 1", "registered 1000"):
        store.put(name, ["a"], {}, None, {})
        assert store.claim(claim(name, 1)) is not None
    with pytest.raises(DataPlaneError, match="unknown partition 'registered 0'"):
        store.claim(claim("registered 0", 1))


def test_the_writer_says_which_columns_say_lengths_also_those_that_the_books_do_not_know() -> None:
    def put(name: str, rows: torch.Tensor, **lengths: list[int]) -> None:
        chunk = chunk_from_leaf(name, as_leaf(name, rows), ["a", "b"])
        said = {column: np.array(numbers) for column, numbers in lengths.items()}
        store.put("p", ["a", "b"], {name: [chunk]}, None, said)

    store = LocalStore(8)
    put("hint", torch.ones(2, 3), hint=[3, 3])
    with pytest.raises(SchemaError, match=r"'other' has 4 tokens for sample 'b'; column 'hint' .* says 3"):
        put("other", nest([torch.ones(3), torch.ones(4)]), other=[3, 4])
    put("hint", torch.ones(2))
    put("other", nest([torch.ones(3), torch.ones(4)]), other=[3, 4])


@pytest.mark.parametrize("group_size", [None, 4])
def test_a_claim_costs_what_it_hands_out(group_size: int | None) -> None:
    def claims(rows: int) -> float:
        partition = Partition[object]("p", registration("p", rows, group_size))
        partition.put([f"u{i // 4}_g{i % 4}" for i in range(rows)], None, {}, None, {})
        times = []
        for first in range(0, 4096, 64):
            start = time.perf_counter()
            slots = partition.claim(claim("p", 64))
            times.append(time.perf_counter() - start)
            assert np.array_equal(slots, np.arange(first, first + 64))
        return float(np.median(times))

    small, large = claims(4096), claims(262_144)
    assert large < 5 * small, f"{small * 1e6:.0f} us of 4,096 rows, {large * 1e6:.0f} us of 262,144"

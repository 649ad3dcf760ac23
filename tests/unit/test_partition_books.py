"""The books of a store's partitions: what is left of them, and what a claim costs."""

import time
import tracemalloc
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from headrace.data_plane.claim_terms import TagRule, TaskReport
from headrace.data_plane.codec import nest
from headrace.data_plane.store.claims import ClaimRequest, Registration
from headrace.data_plane.store.columns import Chunk, Column, Put, Slots, chunk_of_leaf
from headrace.data_plane.store.partition import Partition
from headrace.data_plane.store.sample_store import SampleStore
from headrace.data_plane.wire import read_wire
from headrace.errors import DataPlaneError, SchemaError


def registration(name: str, rows: int, group_size: int = 1) -> Registration:
    return Registration(name, rows, ("train",), group_size)


def claim(name: str, rows: int) -> ClaimRequest:
    return ClaimRequest(name, "train", [], rows)


def fill_and_end(store: SampleStore[Chunk], first: int, count: int) -> float:
    """Open, fill and clear partitions; the seconds that each takes, at best."""
    best = 1.0
    for number in range(first, first + count):
        start = time.perf_counter()
        for name in (f"registered {number}", f"by hand {number}"):
            if name.startswith("registered"):
                store.register(registration(name, 2))
            store.put(Put(name, ["a", "b"], None, {}), {})
            store.clear(name, None)
        best = min(best, time.perf_counter() - start)
    return best


def test_partitions_that_have_ended_take_neither_memory_nor_time() -> None:
    store = SampleStore[Chunk](8)
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
    store = SampleStore[Chunk](8)
    fill_and_end(store, 0, 1001)
    for name in ("registered 1", "registered 1000"):
        store.put(Put(name, ["a"], None, {}), {})
        assert store.claim(claim(name, 1)) is not None
    with pytest.raises(DataPlaneError, match="unknown partition 'registered 0'"):
        store.claim(claim("registered 0", 1))


def test_the_writer_says_which_columns_say_lengths_also_those_that_the_books_do_not_know() -> None:
    def put(name: str, rows: torch.Tensor, **lengths: list[int]) -> None:
        leaf = read_wire(TensorDict({name: rows}, batch_size=[2]))[name]
        chunk = chunk_of_leaf(name, leaf, ["a", "b"], [])  # type: ignore[arg-type]
        said = {column: np.array(numbers, np.int32) for column, numbers in lengths.items()}
        store.put(Put("p", ["a", "b"], None, said), {name: [chunk]})

    store = SampleStore[Chunk](8)
    put("hint", torch.ones(2, 3), hint=[3, 3])
    with pytest.raises(SchemaError, match=r"'other' has 4 tokens for sample 'b'; column 'hint' .* says 3"):
        put("other", nest([torch.ones(3), torch.ones(4)]), other=[3, 4])
    put("hint", torch.ones(2))
    put("other", nest([torch.ones(3), torch.ones(4)]), other=[3, 4])


@pytest.mark.parametrize("group_size", [1, 4])
def test_a_claim_costs_what_it_hands_out(group_size: int) -> None:
    def claims(rows: int) -> float:
        partition = Partition[Chunk]("p", registration("p", rows, group_size))
        put = Put("p", [f"u{i // 4}_g{i % 4}" for i in range(rows)], None, {})
        partition.write(put, {}, partition.locate(put.ids))
        times = []
        for first in range(0, 4096, 64):
            start = time.perf_counter()
            claimed = partition.claim(claim("p", 64))
            times.append(time.perf_counter() - start)
            assert claimed is not None
            assert np.array_equal(claimed[1].at, np.arange(first, first + 64))
        return float(np.median(times))

    small, large = claims(4096), claims(262_144)
    assert large < 5 * small, f"{small * 1e6:.0f} us of 4,096 rows, {large * 1e6:.0f} us of 262,144"


@pytest.mark.parametrize("order", ["oldest", "freshest"])
def test_a_claim_costs_no_more_where_single_rows_never_get_ready(order: str) -> None:
    """At either end of the order lies a row without the column, and all between them are claimed bit by bit."""

    def last_claims(rows: int) -> float:
        store = SampleStore[Chunk](rows)
        store.register(registration("p", rows))
        ids = [f"s{i}" for i in range(rows)]
        leaf = read_wire(TensorDict({"x": torch.zeros(rows - 2)}, batch_size=[rows - 2]))["x"]
        store.put(Put("p", ids, None, {}), {})
        chunk = chunk_of_leaf("x", leaf, ids[1:-1], [])  # type: ignore[arg-type]
        store.put(Put("p", ids[1:-1], None, {}), {"x": [chunk]})
        times = []
        wanted = ClaimRequest("p", "train", ["x"], 128, order=order)
        for _ in range(rows // 128 - 1):
            start = time.thread_time()
            assert store.claim(wanted) is not None
            times.append(time.thread_time() - start)
        return float(np.median(times[-16:]))

    small, large = last_claims(4096), last_claims(131_072)
    assert large < 3 * small, f"{small * 1e6:.0f} us of 4,096 rows, {large * 1e6:.0f} us of 131,072"


class Judge(TagRule):
    """A rule that counts the groups that it is asked about."""

    judged = 0

    def passes(self, tags: Sequence[Mapping[str, Any]]) -> bool:
        Judge.judged += 1
        return super().passes(tags)


def test_groups_that_a_rule_has_refused_are_judged_again_only_when_their_tags_change() -> None:
    def put(uid: int, low: float, high: float) -> None:
        ids = [f"{uid}_g0", f"{uid}_g1"]
        store.put(Put("p", ids, [{"v": low, "made": uid}, {"v": high, "made": uid}], {}), {})

    def judged(rule: Judge, *expected: int) -> int:
        before = Judge.judged
        facts = store.claim(ClaimRequest("p", "train", [], 2, where=[rule]))
        uids = [] if facts is None else [int(name.split("_")[0]) for name in facts.sample_ids[::2]]
        assert uids == list(expected)
        return Judge.judged - before

    store = SampleStore[Chunk](4096)
    store.register(registration("p", 4096, 2))
    for uid in range(100):
        put(uid, 0, 0)
    spread = Judge("v", min_spread=1)
    assert [judged(spread), judged(spread)] == [100, 0]
    put(100, 0, 1)
    assert judged(spread, 100) == 1
    store.put(Put("p", ["7_g1"], [{"v": 1}], {}), {})
    assert judged(spread, 7) == 1
    # Slots that are numbered anew keep what is known of them.
    store.put(Put("p", [f"{uid}_g{i}" for uid in range(200, 1400) for i in range(2)], [{}] * 2400, {}), {})
    store.clear("p", [f"{uid}_g{i}" for uid in [*range(5), *range(200, 1400)] for i in range(2)])
    assert judged(spread) == 0
    # A group that lost a sample and got another one is another.
    store.clear("p", ["50_g0"])
    store.put(Put("p", ["50_g0"], [{"v": 3}], {}), {})
    assert judged(spread, 50) == 1
    # A bound that rises with time lets no older rows pass; one that falls may.
    assert judged(Judge("made", at_least=90), 90) > 0
    assert judged(Judge("made", at_least=95), 95) == 9
    assert judged(Judge("made", at_least=1000)) == 4
    assert judged(Judge("made", at_least=1001)) == 0
    assert judged(Judge("made", at_least=80), 80) > 0
    assert judged(Judge("made", at_least=0, at_most=5), 5) > 0


def test_a_clear_of_parts_of_many_puts_costs_what_they_are() -> None:
    def drop_s(blocks: int) -> float:
        leaf = read_wire(TensorDict({"x": torch.zeros(8)}, batch_size=[8]))["x"]
        chunk = chunk_of_leaf("x", leaf, list("abcdefgh"), [])  # type: ignore[arg-type]
        best = 10.0
        for _ in range(3):
            column = Column[Chunk]()
            column.write(Slots(np.arange(8 * blocks)), [chunk] * blocks)
            slots = np.arange(8 * blocks)
            start = time.thread_time()
            column.drop(slots[slots % 8 < 5])
            best = min(best, time.thread_time() - start)
            assert column.nbytes == 3 * 4 * blocks
        return best

    small, large = drop_s(1000), drop_s(16_000)
    assert large < 32 * small, f"{small * 1e3:.0f} ms of 1,000 puts, {large * 1e3:.0f} ms of 16 times as many"


class Stream:
    """A store whose rows come and go: each round puts 128, and claims, marks done and clears the 128 oldest."""

    def __init__(self) -> None:
        self.store = SampleStore[Chunk](2048)
        self.store.register(registration("p", 2048, 8))
        self.made = 0
        for _ in range(8):
            self.produce()

    def produce(self) -> None:
        ids = [f"{row // 8}_g{row % 8}" for row in range(self.made, self.made + 128)]
        self.store.put(Put("p", ids, [{"v": 1}] * 128, {}, producer="me"), {})
        self.made += 128

    def round_s(self) -> float:
        """Make one round, and return the seconds of processor time it took."""
        start = time.thread_time()
        self.produce()
        wanted = ClaimRequest("p", "train", [], 128, lease_s=60, where=[TagRule("v", at_least=0)])
        facts = self.store.claim(wanted)
        assert facts is not None
        self.store.put(Put("p", facts.sample_ids, None, {}, claim=facts.claim), {})
        self.store.clear("p", facts.sample_ids, facts.claim)
        return time.thread_time() - start


def test_rows_that_come_and_go_leave_a_store_as_small_as_it_was() -> None:
    stream = Stream()
    tracemalloc.start()
    for _ in range(16):
        stream.round_s()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(76):
        stream.round_s()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert after < 1.1 * before
    report = stream.store.report("p", 0).tasks["train"]
    assert report == TaskReport(stream.made - 1024, 0, stream.made - 1024, 1024)


def test_rows_that_come_and_go_leave_a_store_as_fast_as_a_new_one() -> None:
    old, new = Stream(), Stream()
    for _ in range(92):
        old.round_s()
    # In turns: a machine that slows down for a while slows both.
    pairs = [(old.round_s(), new.round_s()) for _ in range(16)]
    late, early = (min(times) for times in zip(*pairs, strict=True))
    assert late < 1.3 * early

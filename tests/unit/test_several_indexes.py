"""Several indexes of a store, each behind a socket of its own, against one that has all rows."""

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.data_plane.claim_terms import PartitionReport, TagRule
from headrace.data_plane.store.blocks import BlockInfo
from headrace.data_plane.store.claims import ClaimRequest, Registration
from headrace.data_plane.store.columns import Put, RowFacts
from headrace.data_plane.store.merge import owner_of
from headrace.data_plane.store.sample_store import SampleStore
from headrace.errors import (
    CapacityExceeded,
    ClaimExpired,
    DataPlaneError,
    HeadraceError,
    SchemaError,
    TransportError,
)

pytest.importorskip("transfer_queue", reason="needs headrace[ray]")

from headrace.data_plane.adapters.transfer_queue_ask import IndexAsker
from headrace.data_plane.adapters.transfer_queue_index import Indexes, IndexServer, operation_of
from headrace.data_plane.adapters.transfer_queue_several import Several
from headrace.data_plane.adapters.transfer_queue_socket import IndexClient
from headrace.distributed.ray_connection import Deadline

ROWS, SIZE = 24, 2


def within(seconds: float = 10.0) -> Deadline:
    return Deadline(seconds, "a key")


class Process:
    """A client's process: its connections to the indexes of a store. Rows have ids and tags, so no blocks."""

    def __init__(
        self, servers: Sequence[IndexServer], store: str | None = None, timeout_s: float = 10.0
    ) -> None:
        self.clients = [IndexClient(server.endpoint, [], within(), operation_of) for server in servers]
        first, *others = self.clients
        told = (first.owner, "one", ROWS, "me")
        self.store: str = store or self._asked(first, "open_store", *told, len(servers))[0]
        for client in others if store is None else ():
            self._asked(client, "join_store", client.owner, *told[1:], self.store)
        asker = IndexAsker(
            self.clients, self.store, "one", timeout_s, lambda index: [], lambda *garbage: None
        )
        self.store_client = Several(asker)

    def _asked(self, client: IndexClient, operation: str, *arguments: object) -> Any:
        return client.ask(operation, *arguments, what=operation, deadline=within()).answer

    def put(self, *ids: str, tag: int = 0, **options: Any) -> RowFacts | None:
        put = Put("p", list(ids), [{"v": tag}] * len(ids), {}, **options)
        return self.store_client.put(
            put, {}, lambda packed: [], gives_rows=True, deadline=within(), tags=put.tags
        )

    def claim(self, rows: int, wait_s: float = 0.0, **options: Any) -> RowFacts | None:
        return self.store_client.claim(ClaimRequest("p", "train", [], rows, **options), wait_s)

    def close(self) -> None:
        for client in self.clients:
            client.close()


@pytest.fixture(scope="module", params=[2, 5])
def servers(request: pytest.FixtureRequest) -> list[IndexServer]:
    made = []
    for _ in range(request.param):
        server = IndexServer("127.0.0.1", b"secret")
        indexes = Indexes(server.is_alive)
        server.start(indexes)
        made.append(server)
    return made


@pytest.fixture
def process(servers: list[IndexServer]) -> Iterator[Process]:
    process = Process(servers)
    process.store_client.register(Registration("p", ROWS, ("train",), SIZE))
    yield process
    process._asked(process.clients[0], "close_store", process.store)
    process.close()


def group(uid: object) -> list[str]:
    return [f"{uid}_g0", f"{uid}_g1"]


def outcome(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    try:
        return call(*arguments, **options)
    except HeadraceError as error:
        return type(error).__name__, str(error)


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("put"),
            st.lists(st.integers(0, 8), min_size=1, max_size=3, unique=True),
            st.integers(0, 1),
        ),
        st.tuples(st.sampled_from(["half", "drop"]), st.integers(0, 8), st.integers(0, 1)),
        st.tuples(
            st.just("claim"), st.integers(1, 3), st.sampled_from(["oldest", "freshest", "partial", "rule"])
        ),
        st.tuples(
            st.just("lease"), st.integers(1, 3), st.sampled_from(["oldest", "freshest", "partial", "rule"])
        ),
        st.tuples(st.just("end"), st.integers(0, 5), st.sampled_from(["finish", "release", "renew"])),
        st.tuples(
            st.just("under"),
            st.integers(0, 5),
            st.tuples(st.sampled_from(["put", "clear"]), st.lists(st.integers(0, 8), max_size=2)),
        ),
        st.tuples(st.just("clear"), st.lists(st.integers(0, 8), max_size=2), st.just(0)),
        st.tuples(st.just("report"), st.just(0), st.just(0)),
    ),
    max_size=25,
)


class Both:
    """One store and several indexes that are asked for the same; claims are named by their places."""

    def __init__(self, process: Process) -> None:
        self.process, self.several = process, process.store_client
        self.one: SampleStore[BlockInfo] = SampleStore(ROWS)
        self.claims: list[tuple[str, str]] = []
        for store in (self.one, self.several):
            store.register(Registration("p", ROWS, ("train",), SIZE))

    def put(self, ids: list[str], tag: int, claims: tuple[str | None, str | None] = (None, None)) -> None:
        got = outcome(self.process.put, *ids, tag=tag, claim=claims[0])
        put = Put("p", ids, [{"v": tag}] * len(ids), {}, claims[1])
        expected = outcome(self.one.put, put, {})
        if isinstance(expected[0], RowFacts):
            expected = expected[0]._replace(sample_ids=[])
        self.check(got, expected)

    def claim(self, rows: int, how: str, lease_s: float | None) -> None:
        where = [TagRule("v", at_least=1)] if how == "rule" else []
        order = how if how == "freshest" else "oldest"
        request = ClaimRequest("p", "train", [], rows, how == "partial", lease_s, "me", where, order)
        got, expected = self.several.claim(request, 0.0), self.one.claim(request)
        if got is not None and expected is not None and got.claim and expected.claim:
            self.claims.append((got.claim, expected.claim))
        self.check(got, expected)
        # Of several groups that are not whole, either may be the one that is named; leases come in any order.
        texts = (self.several.claim_timeout_text(request), self.one.claim_timeout_text(request))
        same = [re.sub(r"whole: '[^']*' has 1|another [\d.]+ s", "", text) for text in texts]
        assert sorted(same[0].split("; ")) == sorted(same[1].split("; "))

    def check(self, got: Any, expected: Any) -> None:
        assert self.named(got, 0) == self.named(expected, 1)

    def named(self, answer: Any, which: int) -> str:
        """Return an answer as text, with the places of claims in place of their ids; leases in the order of these."""
        if isinstance(answer, PartitionReport):
            order = [ids[which] for ids in self.claims]
            leases = sorted(answer.leases, key=lambda lease: order.index(lease.claim))
            answer = replace(answer, leases=leases)
        text = repr(answer)
        for place, ids in enumerate(self.claims):
            text = text.replace(ids[which], f"claim {place}")
        return re.sub(r"seconds_left=[\d.]+", "", text)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS)
def test_several_indexes_hand_out_report_and_refuse_what_one_does(process: Process, steps: Any) -> None:
    both = Both(process)
    one, several = both.one, both.several
    for doing, what, how in steps:
        if doing == "put":
            both.put([name for uid in what for name in group(uid)], how)
        elif doing == "half":
            both.put([f"{what}_g{how}"], how)
        elif doing == "drop":
            both.check(several.clear("p", [f"{what}_g{how}"]), one.clear("p", [f"{what}_g{how}"]) or None)
        elif doing in ("claim", "lease"):
            both.claim(SIZE * what, how, None if doing == "claim" else 60.0)
        elif doing == "clear":
            ids = [name for uid in what for name in group(uid)]
            both.check(several.clear("p", ids), one.clear("p", ids) or None)
        elif doing == "report":
            both.check(several.report("p", 100), one.report("p", 100))
        elif what < len(both.claims):
            mine, its = both.claims[what]
            if doing == "under":
                ids = [name for uid in how[1] for name in group(uid)]
                if how[0] == "put":
                    both.put(ids, 1, (mine, its))
                else:
                    both.check(
                        outcome(several.clear, "p", ids, mine), outcome(one.clear, "p", ids, its) or None
                    )
            else:
                more = (60.0,) if how == "renew" else ()
                both.check(
                    outcome(getattr(several, how), "p", mine, *more),
                    outcome(getattr(one, how), "p", its, *more),
                )
        assert several.sample_ids() == one.sample_ids()
        assert several.room("p") == one.room("p")
        assert several.is_consumed("p", ["train"]) == one.is_consumed("p", ["train"])


def test_rows_of_a_group_lie_in_one_index_and_groups_in_all() -> None:
    owners = {uid: {owner_of(name, 4) for name in group(f"step3/{uid}")} for uid in range(1000)}
    assert all(len(indexes) == 1 for indexes in owners.values())
    counts = np.bincount([index for (index,) in owners.values()])
    assert len(counts) == 4
    assert min(counts) > 200


def test_claims_of_two_processes_at_once_share_no_row_and_leave_none(
    process: Process, servers: list[IndexServer]
) -> None:
    for uid in range(ROWS // SIZE):
        process.put(*group(uid))
    others = [Process(servers, process.store) for _ in range(4)]
    got: list[str] = []

    def work(other: Process) -> None:
        while (facts := other.claim(3 * SIZE, 10.0, allow_partial=True)) is not None and facts.sample_ids:
            got.extend(facts.sample_ids)

    threads = [threading.Thread(target=work, args=(other,)) for other in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for other in others:
        other.close()
    assert sorted(got) == sorted(name for uid in range(ROWS // SIZE) for name in group(uid))


@pytest.mark.parametrize("ends", ["released", "run out"])
def test_a_claim_over_all_indexes_ends_in_all(process: Process, ends: str) -> None:
    for uid in range(10):
        process.put(*group(uid))
    lease_s = 60.0 if ends == "released" else 0.05
    facts = process.claim(20, lease_s=lease_s)
    assert facts is not None
    assert facts.claim is not None
    assert process.claim(2) is None
    if ends == "released":
        process.store_client.release("p", facts.claim)
    again = process.claim(20, 10.0)
    assert again is not None
    assert again.sample_ids == facts.sample_ids
    with pytest.raises(ClaimExpired):
        process.store_client.finish("p", facts.claim)


def test_a_claim_that_has_ended_in_one_index_ends_in_the_others(process: Process) -> None:
    for uid in range(10):
        process.put(*group(uid))
    facts = process.claim(20, lease_s=60)
    assert facts is not None
    assert facts.claim is not None
    client = process.clients[-1]
    client.ask("release", "p", facts.claim, what="release", deadline=within(), store=process.store)
    with pytest.raises(ClaimExpired):
        process.store_client.renew("p", facts.claim, 60)
    again = process.claim(20)
    assert again is not None
    assert again.sample_ids == facts.sample_ids


def test_a_claim_is_done_when_its_rows_are_cleared_in_all_indexes(process: Process) -> None:
    for uid in range(10):
        process.put(*group(uid))
    facts = process.claim(20, lease_s=60)
    assert facts is not None
    assert facts.claim is not None
    several = process.store_client
    several.clear("p", facts.sample_ids[:-2], facts.claim)
    several.renew("p", facts.claim, 60)
    assert [lease.rows for lease in several.report("p", 0).leases] == [2]
    several.clear("p", facts.sample_ids[-2:], facts.claim)
    assert several.report("p", 0).leases == []
    for client in process.clients:
        with pytest.raises(ClaimExpired):
            client.ask("hold", "p", facts.claim, 0.0, what="hold", deadline=within(), store=process.store)
    with pytest.raises(ClaimExpired):
        several.finish("p", facts.claim)


def test_what_indexes_ask_of_a_process_does_not_pile_up_there(process: Process) -> None:
    first, *_ = process.clients
    begin = ("begin_part", first.owner, Put("p", group(2), None, {}), {}, 60.0, False)
    first.ask(*begin, what="begin", deadline=within(), store=process.store)
    for _ in range(3):
        # A clear asks after all whose blocks are on their way.
        process.store_client.clear("p", None)
    time.sleep(0.2)
    process.store_client.sample_ids()
    assert not first._lifeline.poll(200)


def test_a_put_that_one_index_refuses_is_refused_by_all(process: Process) -> None:
    for uid in range(10):
        process.put(f"{uid}_g0")
    with pytest.raises(SchemaError, match="group '3' of partition 'p' has 1 samples and gets 2 more"):
        process.put(*(f"{uid}_g{g}" for uid in (*range(3), 4, 5) for g in (1,)), "3_g1", "3_g2")
    with pytest.raises(CapacityExceeded, match=r"a put of 16 new samples .*num_samples=24 and holds 10"):
        process.put(*(name for uid in range(20, 28) for name in group(uid)))
    assert process.store_client.sample_ids() == {"p": [f"{uid}_g0" for uid in range(10)]}
    assert process.store_client.room("p") == ROWS - 10


def test_a_partition_whose_groups_a_tag_names_lies_in_one_index(
    process: Process, servers: list[IndexServer]
) -> None:
    other = Process(servers, process.store)
    process.put(*group("before"))
    assert other.store_client.sample_ids() == {"p": group("before")}
    process.store_client.register(Registration("p", ROWS, ("train",), SIZE, "v"))
    # Both know rows by their ids until the first is told otherwise.
    for number in range(6):
        other.put(f"a{number}", f"b{number}", tag=number)
    facts = process.claim(12)
    assert facts is not None
    assert facts.sample_ids == [name for number in range(6) for name in (f"a{number}", f"b{number}")]
    other.store_client.clear("p", [f"a{number}" for number in range(6)])
    assert process.store_client.sample_ids() == {"p": [f"b{number}" for number in range(6)]}
    process.store_client.register(Registration("p", ROWS, ("train",), SIZE))
    other.put(*group("after"), *group("then"))
    assert process.store_client.sample_ids() == {"p": [*group("after"), *group("then")]}
    other.close()


def test_rows_that_another_process_marks_as_consumed_are_found_where_a_tag_names_the_groups(
    process: Process, servers: list[IndexServer]
) -> None:
    other = Process(servers, process.store)
    process.store_client.register(Registration("p", ROWS, ("train",), SIZE, "v"))
    for number in range(6):
        process.put(f"a{number}", f"b{number}", tag=number)
    other.store_client.mark_consumed("p", "train", [f"{letter}{n}" for n in range(5) for letter in "ab"])
    facts = process.claim(2)
    assert facts is not None
    assert facts.sample_ids == ["a5", "b5"]
    other.close()


def test_a_put_that_was_cut_short_between_two_indexes_names_what_is_there(process: Process) -> None:
    ids = [name for uid in range(10) for name in group(uid)]
    process.put(*ids[:2], once=True)
    with pytest.raises(SchemaError, match="with once=True has '0_g0', '0_g1', which partition 'p' has had"):
        process.put(*ids, once=True)
    assert process.put(*ids[2:], once=True) is not None
    assert process.put(*ids, once=True) is None


def test_an_unknown_partition_is_an_error_of_all(process: Process) -> None:
    for call in (
        lambda: process.store_client.report("q", 1),
        lambda: process.store_client.room("q"),
        lambda: process.store_client.is_consumed("q", ["train"]),
        lambda: process.store_client.claim(ClaimRequest("q", "train", [], 1), 5.0),
    ):
        with pytest.raises(DataPlaneError, match="unknown partition 'q'"):
            call()


def test_a_claim_that_one_of_several_indexes_does_not_answer_ends_in_time() -> None:
    goes_on = threading.Event()

    class Stalled(Indexes):
        def run(self, call: Any) -> Any:
            if call.operation == "ready":
                goes_on.wait()
            return super().run(call)

    servers = [IndexServer("127.0.0.1", b"secret") for _ in range(2)]
    for server, kind in zip(servers, (Indexes, Stalled)):
        server.start(kind(server.is_alive))
    process = Process(servers, timeout_s=0.5)
    process.store_client.register(Registration("p", ROWS, ("train",), SIZE))
    for wait_s in (0.0, 0.5):
        start = time.monotonic()
        with pytest.raises(TransportError, match=r"operation 'ready' .* no answer within 0.5 s"):
            process.claim(2, wait_s)
        assert time.monotonic() - start < 3
    goes_on.set()
    process.put(*group("a"))
    facts = process.claim(2)
    assert facts is not None
    assert facts.sample_ids == group("a")
    process.close()

"""Claims under random schedules, against books that keep a state per group and look at all of them each time."""

import threading
import time
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace.data_plane.claim_terms import TagRule
from headrace.data_plane.store import claims, partition
from headrace.data_plane.store.claims import ClaimRequest, Registration
from headrace.data_plane.store.columns import Chunk, Put
from headrace.data_plane.store.sample_store import SampleStore
from headrace.errors import ClaimExpired, SchemaError

TASKS, ROWS, SIZE = ("train", "log"), 24, 2
GROUPS = st.integers(0, 11)


@dataclass
class Claimed:
    """A claim that somebody has seen, in force or not."""

    task: str
    rows: list[str]
    ends: float


@dataclass
class Naive:
    """Rows by id, with their versions, and the whole groups in the order in which they became whole."""

    versions: dict[str, int] = field(default_factory=dict)
    whole: list[int] = field(default_factory=list)
    had: dict[str, set[str]] = field(default_factory=lambda: {task: set() for task in TASKS})
    leases: dict[str, Claimed] = field(default_factory=dict)
    ever: set[str] = field(default_factory=set)

    def expire(self, now: float) -> None:
        for claim in [claim for claim, lease in self.leases.items() if lease.ends <= now]:
            self.give_back(claim)

    def give_back(self, claim: str) -> None:
        lease = self.leases.pop(claim)
        self.had[lease.task] -= {row for row in lease.rows if row in self.versions}

    def put(self, rows: list[str], version: int) -> None:
        for row in rows:
            is_new = row not in self.versions
            self.versions[row] = version
            uid = uid_of(row)
            if is_new and all(other in self.versions for other in rows_of(uid)):
                self.whole.append(uid)
        self.ever |= set(rows)

    def clear(self, rows: list[str]) -> None:
        for row in rows:
            self.versions.pop(row, None)
            for task in TASKS:
                self.had[task].discard(row)
            for lease in self.leases.values():
                lease.rows = [other for other in lease.rows if other != row]
        self.whole = [uid for uid in self.whole if all(row in self.versions for row in rows_of(uid))]

    def claimable(self, task: str, least: int | None, order: str) -> list[int]:
        uids = [
            uid
            for uid in self.whole
            if not self.had[task] & set(rows_of(uid))
            and (least is None or all(self.versions[row] >= least for row in rows_of(uid)))
        ]
        return uids if order == "oldest" else uids[::-1]


def rows_of(uid: int) -> list[str]:
    return [f"{uid}_g{index}" for index in range(SIZE)]


def uid_of(row: str) -> int:
    return int(row.partition("_")[0])


class Schedule(RuleBasedStateMachine):
    """Producers, holders of two tasks and a clock; every answer is held to the naive books."""

    @initialize()
    def open(self) -> None:
        self.now = 0.0
        self.store = SampleStore[Chunk](ROWS, lambda: self.now)
        self.store.register(Registration("p", ROWS, TASKS, SIZE))
        self.naive = Naive()
        self.seen: dict[str, Claimed] = {}
        self.trained: list[tuple[str, str]] = []

    def put_rows(
        self, rows: list[str], version: int, claim: str | None = None, *, once: bool = False
    ) -> bool:
        put = Put("p", rows, [{"v": version} for _ in rows], {}, claim, "me", once)
        return self.store.put(put, {})[0] is not None

    @rule(uid=GROUPS, version=st.integers(0, 3), part=st.sampled_from([(0, 1), (0,), (1,), (1, 0)]))
    def put(self, uid: int, version: int, part: tuple[int, ...]) -> None:
        rows = [rows_of(uid)[index] for index in part]
        assert self.put_rows(rows, version)
        self.naive.put(rows, version)

    @rule(uid=GROUPS, version=st.integers(0, 3))
    def put_once(self, uid: int, version: int) -> None:
        """The first put with `once` begins the memory of what is cleared; so all puts of a run use it here or none."""
        rows = rows_of(uid)
        old = [row in self.naive.versions for row in rows]
        if any(old) and not all(old):
            with pytest.raises(SchemaError, match="beside new ones"):
                self.put_rows(rows, version, once=True)
        elif all(old):
            assert not self.put_rows(rows, version, once=True)

    @rule(
        task=st.sampled_from(TASKS),
        groups=st.integers(1, 3),
        lease_s=st.sampled_from([None, 1.0, 2.0, 5.0]),
        least=st.sampled_from([None, 1, 2]),
        order=st.sampled_from(["oldest", "freshest"]),
    )
    def claim(self, task: str, groups: int, lease_s: float | None, least: int | None, order: str) -> None:
        where = [] if least is None else [TagRule("v", at_least=least)]
        facts = self.store.claim(
            ClaimRequest("p", task, [], groups * SIZE, lease_s=lease_s, where=where, order=order)
        )
        self.naive.expire(self.now)
        uids = self.naive.claimable(task, least, order)[:groups]
        if len(uids) < groups:
            assert facts is None
            return
        assert facts is not None
        assert [uid_of(row) for row in facts.sample_ids[::SIZE]] == uids
        assert sorted(facts.sample_ids) == sorted(row for uid in uids for row in rows_of(uid))
        self.naive.had[task] |= set(facts.sample_ids)
        if lease_s is not None:
            assert facts.claim is not None
            lease = Claimed(task, facts.sample_ids, self.now + lease_s)
            self.naive.leases[facts.claim] = lease
            self.seen[facts.claim] = lease

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(data=st.data(), does=st.sampled_from(["renew", "release", "finish", "write", "clear"]))
    def hold(self, data: st.DataObject, does: str) -> None:
        """The holder of any claim there ever was does something, in time or late."""
        if not self.seen:
            return
        claim = data.draw(st.sampled_from(sorted(self.seen)))
        self.naive.expire(self.now)
        lease = self.naive.leases.get(claim)
        if does == "release":
            self.store.release("p", claim)
            if lease is not None:
                self.naive.give_back(claim)
            return
        rows = list(self.seen[claim].rows)
        act = {
            "renew": lambda: self.store.renew("p", claim, 4.0),
            "finish": lambda: self.store.finish("p", claim),
            "write": lambda: self.put_rows(rows, 9, claim),
            "clear": lambda: self.store.clear("p", rows, claim),
        }[does]
        if lease is None:
            with pytest.raises(ClaimExpired):
                act()
            return
        act()
        if does == "renew":
            lease.ends = self.now + 4.0
        elif does == "finish":
            del self.naive.leases[claim]
        elif does == "write":
            self.naive.put(rows, 9)
        else:
            self.naive.clear(rows)
            del self.naive.leases[claim]

    @rule(rows=st.lists(st.sampled_from([row for uid in range(12) for row in rows_of(uid)]), max_size=8))
    def clear(self, rows: list[str]) -> None:
        self.store.clear("p", rows)
        self.naive.clear(rows)

    @invariant()
    def the_books_agree(self) -> None:
        """No row is in two claims in force, and each is free, leased or had, as the naive books say."""
        self.naive.expire(self.now)
        report = self.store.report("p", ROWS)
        assert report.rows == len(self.naive.versions)
        assert {lease.claim: lease.rows for lease in report.leases} == {
            claim: len(lease.rows) for claim, lease in self.naive.leases.items()
        }
        for task in TASKS:
            held = [row for lease in self.naive.leases.values() if lease.task == task for row in lease.rows]
            assert len(held) == len(set(held)) == report.tasks[task].leased
            assert report.tasks[task].ready == SIZE * len(self.naive.claimable(task, None, "oldest"))
        leased = {row for lease in self.naive.leases.values() for row in lease.rows}
        had = set.intersection(*self.naive.had.values()) - leased
        assert {row.sample_id for row in report.unconsumed} == set(self.naive.versions) - had


def test_no_row_has_two_holders_and_none_is_lost_whatever_the_schedule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # So that gaps are closed, and slots numbered anew, also in partitions as small as these.
    monkeypatch.setattr(partition, "_FEW_SLOTS", 4)
    # And so that claims go over them in several windows.
    monkeypatch.setattr(claims, "_WINDOW", 2)
    Schedule.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
    Schedule.TestCase("runTest").runTest()


@pytest.mark.parametrize("rows_come", [True, False])
def test_a_wait_looks_at_nothing_until_something_changes(rows_come: bool) -> None:
    """Also while a lease of another partition, which nobody asks for, has run out."""
    looks = 0

    def clock() -> float:
        nonlocal looks
        looks += 1
        return time.monotonic()

    store = SampleStore[Chunk](ROWS, clock)
    for name in ("p", "q"):
        store.register(Registration(name, 4, ("train",)))
        store.put(Put(name, ["a"], None, {}), {})
        lease_s = 60.0 if name == "p" else 1e-9
        assert store.claim(ClaimRequest(name, "train", [], 1, lease_s=lease_s)) is not None
    looks = 0
    if rows_come:
        threading.Timer(0.2, store.put, (Put("p", ["b"], None, {}), {})).start()
        assert store.claim(ClaimRequest("p", "train", [], 1), 10.0) is not None
    else:
        assert not store.has_room("p", 4, 0.2)
    assert looks < 20

"""Calls that wait in the index of a TransferQueue store: held, answered when their rows come, and dropped with their
client."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from headrace.data_plane.store.claims import ClaimRequest, Registration
from headrace.data_plane.store.columns import Put
from headrace.errors import DataPlaneError

pytest.importorskip("transfer_queue", reason="needs headrace[ray]")

import zmq

from headrace.data_plane.adapters import transfer_queue_index
from headrace.data_plane.adapters.transfer_queue_index import Indexes, IndexServer, operation_of
from headrace.data_plane.adapters.transfer_queue_socket import IndexClient, sealed
from headrace.distributed.ray_connection import Deadline


class Client:
    """A process's connection to the index, and the store that it asks."""

    def __init__(self, server: IndexServer, store: str = "") -> None:
        self.connection = IndexClient(server.endpoint, [], Deadline(10, "a key"), operation_of)
        self.store = store

    def ask(self, operation: str, *arguments: object, wait_s: float = 0.0, store: str | None = None) -> Any:
        done = self.connection.ask(
            operation,
            *arguments,
            what=operation,
            deadline=Deadline(10, "a key"),
            store=self.store if store is None else store,
            wait_s=wait_s,
        )
        return done.answer

    def put(self, *ids: str) -> None:
        ticket = self.ask("begin_put", self.connection.owner, Put("p", list(ids), None, {}), {}, 60.0)
        self.ask("commit", ticket, [], None)

    def claim(self, rows: int, wait_s: float = 0.0, lease_s: float | None = None) -> Any:
        request = ClaimRequest("p", "train", [], rows, lease_s=lease_s)
        facts = self.ask("claim", request, 0.0, wait_s=wait_s)
        return None if facts is None else facts.sample_ids


@pytest.fixture
def server() -> IndexServer:
    server = IndexServer("127.0.0.1", b"secret")
    indexes = Indexes(server.is_alive)
    server.start(indexes)
    return server


@pytest.fixture
def client(server: IndexServer) -> Iterator[Client]:
    client = Client(server)
    client.store = client.ask("open_store", client.connection.owner, "one", 8, "me", 1)[0]
    client.ask("register", Registration("p", 8, ("train",)))
    yield client
    client.connection.close()


def waiting(
    client: Client, rows: int, wait_s: float, lease_s: float | None = None
) -> "tuple[threading.Thread, list[Any]]":
    """Return a thread whose claim the index holds, and what it will have got."""
    got: list[Any] = []

    def work() -> None:
        try:
            got.append(client.claim(rows, wait_s, lease_s))
        except (DataPlaneError, zmq.ZMQError) as error:
            got.append(str(error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    time.sleep(0.1)
    assert thread.is_alive()
    return thread, got


def test_a_held_claim_is_answered_by_the_put_that_it_waits_for_and_holds_up_nobody(
    server: IndexServer, client: Client
) -> None:
    other = Client(server, client.store)
    thread, got = waiting(other, 2, 30)
    client.put("a")
    assert client.ask("sample_ids") == {"p": ["a"]}
    assert thread.is_alive()
    start = time.monotonic()
    client.put("b")
    thread.join(5)
    assert time.monotonic() - start < 0.5, "the claim was looked for, not woken"
    assert got == [["a", "b"]]
    other.connection.close()


def test_held_claims_are_answered_in_the_order_in_which_they_came(
    server: IndexServer, client: Client
) -> None:
    others = [Client(server, client.store) for _ in range(3)]
    held = [waiting(other, 1, 30) for other in others]
    client.put("a", "b", "c")
    for thread, _ in held:
        thread.join(5)
    assert [got for _, got in held] == [[["a"]], [["b"]], [["c"]]]


def test_a_held_call_ends_with_its_time_with_a_lease_or_with_its_store(
    server: IndexServer, client: Client
) -> None:
    start = time.monotonic()
    assert client.claim(1, 0.2) is None
    assert 0.2 <= time.monotonic() - start < 1
    client.put("a")
    assert client.claim(1, lease_s=0.3) == ["a"]
    start = time.monotonic()
    assert client.claim(1, 30) == ["a"]
    assert time.monotonic() - start < 0.9, "the end of the lease was looked for, not waited for"
    other = Client(server, client.store)
    thread, got = waiting(other, 1, 30)
    client.ask("close_store", client.store, store="")
    thread.join(5)
    assert "store 'one' is closed" in got[0]


def test_a_client_that_is_gone_takes_nothing(
    server: IndexServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_queue_index, "LOOK_S", 0.05)
    gone = Client(server, client.store)
    thread, _ = waiting(gone, 1, 30)
    # As a process that is killed: its connections end, whatever it was waiting for.
    gone.connection._lifeline.close(linger=0)
    time.sleep(0.3)
    client.put("a")
    assert client.claim(1) == ["a"]
    assert thread.is_alive()
    gone.connection.close()
    thread.join(5)


@pytest.mark.parametrize("lease_s", [None, 60.0])
def test_rows_that_a_claim_hands_to_a_client_that_has_just_gone_are_not_lost(
    server: IndexServer, client: Client, monkeypatch: pytest.MonkeyPatch, lease_s: float | None
) -> None:
    monkeypatch.setattr(transfer_queue_index, "LOOK_S", 60.0)
    client.put("a")
    gone, other = Client(server, client.store), Client(server, client.store)
    thread, _ = waiting(gone, 2, 30, lease_s)
    other_thread, got = waiting(other, 2, 30)
    gone.connection.close()
    thread.join(5)
    time.sleep(0.1)
    client.put("b")
    other_thread.join(5)
    assert got == [["a", "b"]]
    other.connection.close()


def test_a_producer_is_held_until_rows_are_cleared(server: IndexServer, client: Client) -> None:
    client.put(*"abcdefgh")
    assert client.ask("has_room", "p", 1, 0.0) is False
    timer = threading.Timer(0.1, client.ask, ("clear", "p", ["a"], None))
    timer.start()
    assert client.ask("has_room", "p", 1, 0.0, wait_s=30) is True
    timer.join()


def test_a_message_that_cannot_be_read_is_answered_and_the_index_goes_on(
    server: IndexServer, client: Client
) -> None:
    class Other(msgspec.Struct, array_like=True):
        owner: int

    link = client.connection._lifeline
    link.send_multipart(sealed(b"secret", Other(5)))  # type: ignore[arg-type]
    assert link.poll(5000)
    body = link.recv_multipart()[1]
    assert b"a request that the index cannot read" in body
    assert client.ask("sample_ids") == {"p": []}

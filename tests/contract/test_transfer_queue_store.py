"""What holds for a store in TransferQueue beyond the contract."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from contract_batches import numbers, put_numbers, tokens, wire

from headrace.data_plane import build_data_plane_client
from headrace.data_plane.store.blocks import BlockError, pack
from headrace.data_plane.store.columns import Put, chunk_of_leaf
from headrace.errors import (
    CapacityExceeded,
    ClaimExpired,
    ClaimTimeout,
    ConfigError,
    DataPlaneError,
    SchemaError,
    TransportError,
)
from ray_session import MOONCAKE, SIMPLE, fresh_store

pytest.importorskip("transfer_queue", reason="needs headrace[ray]")

ENGINES = {"simple": (SIMPLE, "transfer_queue_engine"), "mooncake": (MOONCAKE, "mooncake_engine")}


@pytest.fixture(params=ENGINES)
def store(request: pytest.FixtureRequest) -> dict[str, Any]:
    config, engine = ENGINES[request.param]
    request.getfixturevalue(engine)
    return fresh_store(config)


@pytest.fixture
def client(store: dict[str, Any]) -> Iterator[Any]:
    opened = build_data_plane_client(store, bootstrap=True)
    yield opened
    opened.close()


def becomes(value: int, read: Callable[[], int]) -> bool:
    # Garbage that a client was given and did not come to drop goes to another after a minute.
    deadline = time.monotonic() + 75
    while read() != value and time.monotonic() < deadline:
        time.sleep(0.05)
    return read() == value


def within(seconds: float) -> Any:
    from headrace.distributed.ray_connection import Deadline

    return Deadline(seconds, "a key")


def test_overwritten_and_cleared_blocks_leave_transfer_queue(client: Any) -> None:
    for first in (0, 10, 20):
        put_numbers(client, ["a", "b"], x=first)
    assert becomes(1, client.stored_blocks)
    put_numbers(client, ["c"], "q", x=0, y=1)
    client.clear_samples(["a"], "p")
    assert numbers(client, ["b"], "x") == [21]
    client.clear_samples(["b"], "p")
    assert client.stored_blocks() == 2
    client.clear_samples(None, "q")
    assert client.stored_blocks() == 0


def test_a_refused_put_leaves_no_block(store: dict[str, Any]) -> None:
    client: Any = build_data_plane_client({**store, "storage_capacity": 2}, bootstrap=True)
    put_numbers(client, ["a", "b"], x=0)
    with pytest.raises(CapacityExceeded):
        put_numbers(client, ["c"], x=0)
    with pytest.raises(SchemaError):
        client.put_samples(["a"], "p", fields=wire(1, x=torch.tensor([1])))
    assert becomes(1, client.stored_blocks)
    assert numbers(client, ["a", "b"], "x") == [0, 1]
    client.close()


def test_a_closed_store_leaves_no_block_to_the_next_of_its_name(store: dict[str, Any]) -> None:
    first = build_data_plane_client(store, bootstrap=True)
    put_numbers(first, ["a"], x=0)
    first.close()
    second: Any = build_data_plane_client(store, bootstrap=True)
    assert (second.stored_blocks(), second.partition_ids()) == (0, [])
    second.close()


def test_lost_blocks_are_an_error_and_never_fewer_rows(client: Any) -> None:
    put_numbers(client, ["a", "b"], x=0)
    put_numbers(client, ["c", "d"], x=5)
    blocks, partition = client._open().blocks, client._partition
    blocks.drop(partition, [int(blocks.keys(partition, within(10))[0])], within(10))
    with pytest.raises(TransportError, match="block"):
        client.get_samples(["a", "b", "c", "d"], "p", ["x"])
    assert numbers(client, ["d", "c"], "x") == [6, 5]


@pytest.mark.parametrize("store", ["simple"], indirect=True)
def test_a_slot_that_holds_another_block_by_now_is_a_lost_block(client: Any) -> None:
    ids = [f"s{i}" for i in range(8)]
    put_numbers(client, ids, x=0)
    (slot,) = client._ask("locate", "p", ids, ["x"])["x"].blocks["slot"].tolist()
    fewer = pack({"x": chunk_of_leaf("x", torch.zeros(2), ["a", "b"], [])})
    client._open().blocks._units.put([slot], fewer.frames, "putting a block", within(10))
    for asked in (["s7", "s0"], ["s1", "s0"], ids):
        with pytest.raises(BlockError, match="block"):
            client.get_samples(asked, "p", ["x"])


def test_attaching_to_a_store_that_nobody_opened_is_an_error(store: dict[str, Any]) -> None:
    with pytest.raises(DataPlaneError, match="never opened"):
        build_data_plane_client(store, bootstrap=False)


def test_rows_survive_many_overwrites_by_several_clients(client: Any, store: dict[str, Any]) -> None:
    ids = [f"s{i}" for i in range(32)]
    put_numbers(client, ids, x=0)

    def write(start: int) -> None:
        mine = build_data_plane_client(store, bootstrap=False)
        for _ in range(10):
            mine.put_samples(ids[start : start + 8], "p", fields=wire(8, x=torch.arange(start, start + 8.0)))
        mine.close()

    def read(_: int) -> bool:
        return all(numbers(client, ids[::-1], "x") == [float(31 - i) for i in range(32)] for _ in range(10))

    with ThreadPoolExecutor(6) as pool:
        writers = [pool.submit(write, start) for start in (0, 8, 16, 24)]
        assert all(pool.map(read, range(2)))
        for writer in writers:
            writer.result()
    assert becomes(4, client.stored_blocks)


ATTACH = """
import json, sys, torch
from headrace.data_plane import build_data_plane_client
from tensordict import TensorDict
client = build_data_plane_client(json.loads(sys.argv[1]), bootstrap=False)
got = client.get_samples(["b", "a"], "p", ["x"])["x"]
client.put_samples(["c"], "p", fields=TensorDict({"x": got[1:].clone() if not got.is_nested else got}, batch_size=[1]))
client.close()
"""


def test_another_process_reads_and_writes_and_its_rows_outlive_it(
    client: Any, store: dict[str, Any], ray_cluster: str
) -> None:
    import json

    put_numbers(client, ["a", "b"], x=7)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    config = json.dumps({**store, "ray_address": ray_cluster})
    subprocess.run([sys.executable, "-c", ATTACH, config], env=environment, check=True, timeout=120)
    assert numbers(client, ["c", "a", "b"], "x") == [7, 7, 8]


def test_sixty_thousand_short_rows_take_seconds_at_most(client: Any) -> None:
    ids = [f"s{i}" for i in range(65_536)]
    fields = wire(65_536, x=torch.arange(65_536), y=torch.zeros(65_536, 1))
    start = time.monotonic()
    client.put_samples(ids, "p", fields=fields)
    got = client.get_samples(ids, "p", ["x", "y"])
    assert time.monotonic() - start < 5
    assert torch.equal(got["x"], fields["x"])
    assert got["y"].shape == (65_536, 1)


@pytest.mark.slow
def test_a_hundred_and_twenty_eight_connections_at_once_all_work(client: Any) -> None:
    from headrace.data_plane.adapters.transfer_queue_cluster import find_index, wait_for_connection
    from headrace.data_plane.adapters.transfer_queue_socket import Blocks

    connection = wait_for_connection(find_index(client._config.backend), within(30))

    def work(worker: int) -> bool:
        mine = Blocks(connection, within(120))
        chunk = chunk_of_leaf("x", torch.full((1, 16 + worker), worker), ["a"], [])
        mine.put("many", pack({"x": chunk}), within(120))
        mine.close()
        return True

    with ThreadPoolExecutor(128) as pool:
        assert all(pool.map(work, range(128)))
    blocks = client._open().blocks
    assert len(blocks.keys("many", within(30))) == 128
    blocks.drop_partition("many", within(30))


def test_a_mooncake_port_that_is_taken_is_refused(mooncake_engine: None) -> None:
    import socket

    from headrace.data_plane.adapters.transfer_queue_mooncake import MooncakeMaster

    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1]
        with pytest.raises(ConfigError, match=f"mooncake_master_port={port}"):
            MooncakeMaster("127.0.0.1", port, 5)


MASTER = """
import time
from headrace.data_plane.adapters.transfer_queue_mooncake import MooncakeMaster
print(MooncakeMaster("127.0.0.1", None, 30).address, flush=True)
time.sleep(600)
"""


def test_the_mooncake_master_ends_with_the_process_that_started_it_even_when_that_is_killed() -> None:
    import socket

    pytest.importorskip("mooncake", reason="needs headrace[mooncake]")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    driver = subprocess.Popen(
        [sys.executable, "-c", MASTER], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert driver.stdout is not None
    host, port = driver.stdout.readline().strip().split(":")
    socket.create_connection((host, int(port)), 5).close()
    driver.kill()
    driver.wait()

    def is_up() -> int:
        with socket.socket() as probe:
            return int(probe.connect_ex((host, int(port))) == 0)

    assert becomes(0, is_up)


def test_objects_and_ragged_rows_lie_beside_each_other(client: Any) -> None:
    fields = wire(2, x=tokens([], [1, 2, 3]))
    client.put_samples(["a", "b"], "p", fields=fields)
    got = client.get_samples(["b", "a"], "p", ["x"])["x"]
    assert [row.tolist() for row in got.unbind()] == [[1, 2, 3], []]


def test_a_claim_that_waits_asks_the_index_once(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    ask = client._link.index.ask
    monkeypatch.setattr(
        client._link.index,
        "ask",
        lambda name, *given, **options: (asked.append(name), ask(name, *given, **options))[1],
    )
    client.register_partition("p", ["x"], 4, ["train"])
    timer = threading.Timer(0.5, put_numbers, (client, ["a"]), {"x": 0})
    timer.start()
    assert client.claim_meta("p", "train", ["x"], 1, timeout_s=20).sample_ids == ["a"]
    timer.join()
    with pytest.raises(ClaimTimeout):
        client.claim_meta("p", "train", ["x"], 1, timeout_s=0.5)
    assert asked == ["register", "claim", "begin_put", "commit", "claim", "claim_timeout_text"]


def test_a_put_whose_lease_runs_out_on_its_way_writes_nothing_and_leaves_no_block(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.register_partition("p", ["x"], 4, ["train"])
    put_numbers(client, ["a"], x=0)
    meta = client.claim_meta("p", "train", ["x"], 1, lease_s=60)
    store, blocks = client._link.blocks.put, client.stored_blocks()

    def slow(*given: Any) -> Any:
        client.renew_claim(meta, 1e-9)
        return store(*given)

    monkeypatch.setattr(client._link.blocks, "put", slow)
    with pytest.raises(ClaimExpired):
        client.put_samples(["a"], "p", fields=wire(1, y=torch.ones(1)), claim=meta.extra_info["claim"])
    assert list(client.partition_report("p").bytes_by_column) == ["x"]
    assert becomes(blocks, client.stored_blocks)


@pytest.mark.parametrize(
    ("operation", "arguments", "says"),
    [
        ("locate", ("p", 5, []), "ValidationError: Expected `array`, got `int`"),
        ("clear", ("p",), "ValidationError: Expected `array` of length 3"),
        ("hand_out", (b"me",), "has no operation 'hand_out'"),
    ],
    ids=["of another type", "too few", "not listed"],
)
def test_an_unexpected_error_in_the_index_reaches_the_caller_and_the_index_goes_on(
    client: Any, operation: str, arguments: tuple[object, ...], says: str
) -> None:
    put_numbers(client, ["a"], x=1)
    with pytest.raises(DataPlaneError, match=says) as caught:
        client._ask(operation, *arguments)
    assert type(caught.value) is DataPlaneError
    put_numbers(client, ["b"], x=2)
    assert numbers(client, ["a", "b"], "x") == [1, 2]


def test_an_answer_that_cannot_be_sent_is_an_error_of_the_caller_and_the_index_goes_on(client: Any) -> None:
    # Three blocks that claim 2**63 - 1 bytes each: their sum is more than a message can hold.
    columns = pack({"x": chunk_of_leaf("x", torch.zeros(2), ["a", "b"], [])}).columns
    (block,) = columns["x"]
    huge = {name: [block._replace(nbytes=2**63 - 1)] for name in "xyz"}
    ticket = client._ask("begin_put", client._open().index.owner, Put("p", ["a", "b"], None, {}), huge, 60.0)
    client._ask("commit", ticket, [0, 1, 2], None)
    with pytest.raises(DataPlaneError, match="OverflowError") as caught:
        client.stored_bytes()
    assert type(caught.value) is DataPlaneError
    assert client.sample_ids("p") == ["a", "b"]

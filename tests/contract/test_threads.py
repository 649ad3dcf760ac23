"""Several threads on one store, and the end of clients."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from contract_batches import numbers, put_numbers, tokens, wire

from headrace.data_plane import DataPlaneClient, build_data_plane_client
from headrace.errors import DataPlaneError
from reference import rows_of

OPEN_FILES = Path("/proc/self/fd")


def test_concurrent_puts_and_gets_of_many_clients_lose_nothing(
    client: DataPlaneClient, config: dict[str, Any]
) -> None:
    def work(worker: int) -> bool:
        mine = build_data_plane_client(config, bootstrap=False)
        for step in range(2):
            ids = [f"{worker}_{step}_{i}" for i in range(4)]
            rows = [[worker, step, i] * (i + 1) for i in range(4)]
            mine.put_samples(ids, "p", fields=wire(4, x=tokens(*rows)))
            got = rows_of(mine.get_samples(ids[::-1], "p", ["x"])["x"])
            if [row.tolist() for row in got] != rows[::-1]:
                return False
            mine.clear_samples(ids[:2], "p")
        mine.close()
        return True

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(40)))
    left = [f"{w}_{s}_{i}" for w in range(40) for s in range(2) for i in (2, 3)]
    assert client.get_samples(left, "p", ["x"]).batch_size[0] == len(left)


def test_concurrent_claims_share_no_row(client: DataPlaneClient) -> None:
    client.register_partition("p", ["x"], 400, ["train"])
    claimed: list[str] = []

    def consume() -> None:
        for _ in range(10):
            meta = client.claim_meta("p", "train", ["x"], 10, timeout_s=20)
            assert meta is not None
            claimed.extend(meta.sample_ids)

    consumers = [threading.Thread(target=consume) for _ in range(4)]
    for thread in consumers:
        thread.start()
    for start in range(0, 400, 25):
        put_numbers(client, [f"s{i}" for i in range(start, start + 25)], x=0)
    for thread in consumers:
        thread.join(30)
    assert sorted(claimed) == sorted(f"s{i}" for i in range(400))
    assert client.check_consumption_status("p", ["train"])


@pytest.mark.skipif(not OPEN_FILES.exists(), reason="needs /proc")
def test_a_hundred_calls_leave_no_file_open(client: DataPlaneClient) -> None:
    put_numbers(client, ["a"], x=0)
    before = len(list(OPEN_FILES.iterdir()))
    for _ in range(50):
        put_numbers(client, ["a"], x=0)
        numbers(client, ["a"], "x")
    assert len(list(OPEN_FILES.iterdir())) <= before + 2


def test_attached_clients_see_the_same_store(client: DataPlaneClient, config: dict[str, Any]) -> None:
    attached = build_data_plane_client(config, bootstrap=False)
    put_numbers(attached, ["a"], x=1)
    attached.close()
    assert numbers(client, ["a"], "x") == [1]


def test_close_may_be_called_twice_and_ends_the_client(client: DataPlaneClient) -> None:
    client.close()
    client.close()
    calls: list[Callable[[], object]] = [
        lambda: client.get_samples(["a"], "p", ["x"]),
        lambda: client.put_samples(["a"], "p"),
        lambda: client.clear_samples(["a"], "p"),
        lambda: client.register_partition("p", [], 1, []),
        lambda: client.claim_meta("p", "t", [], 1),
        lambda: client.check_consumption_status("p", []),
    ]
    for call in calls:
        with pytest.raises(DataPlaneError, match="closed"):
            call()


def test_closing_the_store_ends_attached_clients_and_waiting_claims(
    client: DataPlaneClient, config: dict[str, Any]
) -> None:
    attached = build_data_plane_client(config, bootstrap=False)
    client.register_partition("p", ["x"], 1, ["train"])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(attached.claim_meta, "p", "train", ["x"], 1, timeout_s=30)
        client.close()
        with pytest.raises(DataPlaneError, match="closed"):
            waiting.result(timeout=10)
    with pytest.raises(DataPlaneError, match="closed"):
        attached.get_samples(["a"], "p", ["x"])

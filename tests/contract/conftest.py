"""The contract of DataPlaneClient, held by every store. A new adapter joins by one line in STORES."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from contract_batches import Start

from headrace.data_plane import DataPlaneClient, build_data_plane_client
from ray_session import MOONCAKE, SEVERAL, SIMPLE, fresh_store

STORES: dict[str, dict[str, Any]] = {
    "local": {"impl": "local"},
    "transfer_queue-simple": SIMPLE,
    "transfer_queue-mooncake": MOONCAKE,
}
ENGINES = {
    "transfer_queue-simple": "transfer_queue_engine",
    "transfer_queue-several": "transfer_queue_engine",
    "transfer_queue-mooncake": "mooncake_engine",
}


JOURNALED, SEVERAL_INDEXES = "local-journal", "transfer_queue-several"


@pytest.fixture(
    params=[
        *(f"{store}{wrapper}" for store in STORES for wrapper in ("", "-metrics")),
        SEVERAL_INDEXES,
        JOURNALED,
    ]
)
def config(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """The config of one kind of store, by itself or behind the metrics wrapper, or with a journal."""
    if request.param == JOURNALED:
        journal = {
            "enabled": True,
            "folder": str(tmp_path / "journal"),
            "segment_bytes": 200_000,
            "fsync": "never",
        }
        return {**fresh_store(STORES["local"]), "journal": journal}
    if request.param == SEVERAL_INDEXES:
        request.getfixturevalue(ENGINES[SEVERAL_INDEXES])
        return fresh_store(SEVERAL)
    name = request.param.removesuffix("-metrics")
    observed = {"observability": {"enabled": name != request.param}}
    if name in ENGINES:
        request.getfixturevalue(ENGINES[name])
    return {**fresh_store(STORES[name]), **observed}


@pytest.fixture
def start(config: dict[str, Any]) -> Iterator[Start]:
    """Start a store (`start(storage_capacity=8)`); it is closed after the test."""
    clients: list[DataPlaneClient] = []

    def build(**changes: Any) -> DataPlaneClient:
        clients.append(build_data_plane_client({**config, **changes}, bootstrap=True))
        return clients[-1]

    yield build
    for client in clients:
        client.close()


@pytest.fixture
def client(start: Start) -> DataPlaneClient:
    """The client that started a store."""
    return start()

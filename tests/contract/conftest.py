"""The contract of DataPlaneClient, held by every store. A new adapter joins by one line in CONFIGS."""

from collections.abc import Iterator
from typing import Any

import pytest
from contract_batches import Start

from headrace.data_plane import DataPlaneClient, build_data_plane_client
from ray_session import MOONCAKE, SIMPLE, fresh_store

CONFIGS: dict[str, dict[str, Any]] = {
    "local": {"impl": "local"},
    "local-metrics": {"impl": "local", "observability": {"enabled": True}},
    "transfer_queue-simple": SIMPLE,
    "transfer_queue-mooncake": MOONCAKE,
}
ENGINES = {"transfer_queue-simple": "transfer_queue_engine", "transfer_queue-mooncake": "mooncake_engine"}


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The config of one kind of store."""
    if request.param in ENGINES:
        request.getfixturevalue(ENGINES[request.param])
        return fresh_store(CONFIGS[request.param])
    return CONFIGS[request.param]


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

"""One Ray cluster for a whole test session; tests of the transfer_queue store share its processes, too."""

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import pytest

_stores = itertools.count()

SIMPLE: dict[str, Any] = {"impl": "transfer_queue", "backend": "simple", "timeout_s": 30.0}
SEVERAL: dict[str, Any] = {**SIMPLE, "indexes": 2}
MOONCAKE: dict[str, Any] = {
    "impl": "transfer_queue",
    "backend": "mooncake_cpu",
    "timeout_s": 30.0,
    "global_segment_size": 256 * 1024**2,
    "local_buffer_size": 64 * 1024**2,
}


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """Start Ray with one CPU; its address."""
    ray = pytest.importorskip("ray", reason="needs headrace[ray]")
    context = ray.init(
        address="local",  # also where another cluster runs on this machine
        num_cpus=1,
        include_dashboard=False,
        logging_level=logging.WARNING,
        log_to_driver=False,
        object_store_memory=128 * 1024 * 1024,
    )
    yield context.address_info["address"]
    ray.shutdown()


@pytest.fixture(scope="session")
def transfer_queue_engine(ray_cluster: str) -> Iterator[None]:
    """Keep the processes of transfer_queue/simple up, for stores of one index or two that come and go."""
    pytest.importorskip("transfer_queue", reason="needs headrace[ray]")
    yield from _keep(SEVERAL)


@pytest.fixture(scope="session")
def mooncake_engine(ray_cluster: str) -> Iterator[None]:
    """Keep the processes of transfer_queue/mooncake_cpu up."""
    pytest.importorskip("transfer_queue", reason="needs headrace[ray]")
    pytest.importorskip("mooncake.store", reason="needs headrace[mooncake]", exc_type=ImportError)
    yield from _keep(MOONCAKE)


def _keep(config: dict[str, Any]) -> Iterator[None]:
    from headrace.data_plane import build_data_plane_client

    keeper = build_data_plane_client({**config, "store_name": "keeper"}, bootstrap=True)
    yield
    keeper.close()


def fresh_store(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a store that no other test has."""
    return {**config, "store_name": f"test{next(_stores)}"}

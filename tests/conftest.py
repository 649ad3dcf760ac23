"""Puts `tests/` on the path, so that tests share reference code, and keeps the hub out of reach."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent))
# A first example may build a kernel, and a busy machine takes its time.
settings.register_profile("headrace", deadline=None)
settings.load_profile("headrace")

RAY_TESTS = ("[ray", "transfer_queue", "mooncake")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every file a worker of its own under `pytest -n`, and one worker all tests of the session's Ray."""
    for item in items:
        names = {*getattr(item, "fixturenames", ())}
        uses_ray = "ray_cluster" in names or any(word in item.nodeid.partition("::")[2] for word in RAY_TESTS)
        item.add_marker(pytest.mark.xdist_group("ray" if uses_ray else item.path.stem))


from ray_session import mooncake_engine, ray_cluster, transfer_queue_engine  # noqa: E402, F401  (fixtures; need the path)

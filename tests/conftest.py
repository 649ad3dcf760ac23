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

from ray_session import mooncake_engine, ray_cluster, transfer_queue_engine  # noqa: E402, F401  (fixtures; need the path)
from wheel_session import installed_wheel  # noqa: E402, F401  (a fixture; needs the path)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Deal the files of `--dist loadfile`."""
    if config.getvalue("dist") != "loadfile":
        return None
    from suite_order import Scheduling

    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run long files first where several processes share the suite; alone, a process runs them as they stand."""
    if hasattr(config, "workerinput"):
        from suite_order import place

        items.sort(key=place)

"""How pytest-xdist deals the suite to its processes (`make test`): whole files, the long ones first.

All files on the session's Ray cluster go to one process, so that the cluster starts once, with the processes of its
stores. They are two fifths of the suite's time; with more than half, the other process would wait at the end.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

_ROOT = Path(__file__).parents[1]
_ON_RAY = ("ray_cluster", "transfer_queue_engine", "mooncake_engine")
_LONG = (
    "test_cluster_cli",
    "test_worker_sharded",
    "test_worker_processes",
    "test_virtual_cluster_attach",
    "test_router_replay_ranks",
    "test_router_replay_parallel",
    "test_bench_train",
    "test_bench",
    "test_panels_and_report",
    "test_bring_your_own",
    "test_docs_add",
)


@cache
def on_ray(file: str) -> bool:
    """Return whether a test file, or the conftest.py of its folder, names a fixture of the session's cluster."""
    path = _ROOT / file
    sources = [path, *([] if path.parent.name == "tests" else [path.with_name("conftest.py")])]
    return any(name in s.read_text(encoding="utf-8") for s in sources if s.exists() for name in _ON_RAY)


def place(item: pytest.Item) -> int:
    """Return where a test's file stands; equal places keep their order."""
    file = item.nodeid.split("::", 1)[0]
    if on_ray(file):
        return 0
    stem = Path(file).stem
    return 1 + (_LONG.index(stem) if stem in _LONG else len(_LONG))


class Scheduling(LoadFileScheduling):
    """Deals files, and those on Ray as one."""

    def _split_scope(self, nodeid: str) -> str:
        file: Any = super()._split_scope(nodeid)
        return "on Ray" if on_ray(file) else str(file)

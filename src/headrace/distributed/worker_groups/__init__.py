"""Groups of workers behind one interface: in this process, in local processes, or as Ray actors.

`ray_group` loads Ray and is imported by name only.
"""

from headrace.distributed.worker_groups.interfaces import LocalWorkerGroup, WorkerGroup
from headrace.distributed.worker_groups.rank import RankSettings, WorkerSpec
from headrace.distributed.worker_groups.spawn import SpawnWorkerGroup
from headrace.distributed.worker_groups.wire import registered

__all__ = [
    "LocalWorkerGroup",
    "RankSettings",
    "SpawnWorkerGroup",
    "WorkerGroup",
    "WorkerSpec",
    "registered",
]

"""Groups of policy workers behind one interface, wherever they run."""

from collections.abc import Sequence
from typing import Any, Protocol


class WorkerGroup(Protocol):
    """Data-parallel workers, addressed by data-parallel rank."""

    @property
    def dp_size(self) -> int:
        """Number of replicas."""
        ...

    def run_sharded(self, method: str, shards: Sequence[Any], **common: Any) -> list[Any]:
        """Call `method(shard, **common)` on each replica with its shard; results in replica order."""
        ...

    def run_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method with equal arguments on every replica; results in replica order."""
        ...

    def shutdown(self) -> None:
        """End the workers; may be called twice."""
        ...


class LocalWorkerGroup:
    """One worker in the calling process."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    @property
    def dp_size(self) -> int:
        """Always 1."""
        return 1

    def run_sharded(self, method: str, shards: Sequence[Any], **common: Any) -> list[Any]:
        """Call the worker with the only shard."""
        if len(shards) != 1:
            raise ValueError(f"got {len(shards)} shards for a group of one worker")
        return [getattr(self.worker, method)(shards[0], **common)]

    def run_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call the worker."""
        return [getattr(self.worker, method)(*args, **kwargs)]

    def shutdown(self) -> None:
        """Nothing runs elsewhere, so nothing is to be ended."""

"""What a policy asks of its workers, and the group of one worker in the calling process."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol


class WorkerGroup(Protocol):
    """Workers in replicas: each replica works on its own rows, the ranks inside it on the same ones."""

    @property
    def dp_size(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def run_sharded(self, method: str, shards: Sequence[Any], **common: Any) -> list[Any]:
        """Call `method(shard, **common)` on every rank, with the shard of its replica.

        Returns:
            One result per replica, in replica order: its leader's.
        """
        ...

    def run_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method with equal arguments on every rank; one result per replica, its leader's."""
        ...

    @property
    def transferred_bytes(self) -> int: ...

    def stream(self, method: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Call a generator method on every rank, and yield what the first rank's yields.

        Every rank runs its generator to the end, so collectives inside stay in step. The group takes no other
        call until the stream has been read or closed.
        """
        ...

    def stream_to(self, target: "WorkerGroup", method: str, into: str, *args: Any) -> None:
        """Give what the first rank's generator `method` yields to `into(items, *args)` of `target`'s only worker.

        Every rank runs its generator to the end. Between Ray actors, the items do not pass through this process.
        """
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

    @property
    def world_size(self) -> int:
        """Always 1."""
        return 1

    @property
    def transferred_bytes(self) -> int:
        """Always 0: nothing leaves the process."""
        return 0

    def run_sharded(self, method: str, shards: Sequence[Any], **common: Any) -> list[Any]:
        """Call the worker with the only shard."""
        if len(shards) != 1:
            raise ValueError(f"got {len(shards)} shards for a group of one worker")
        return [getattr(self.worker, method)(shards[0], **common)]

    def run_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return [getattr(self.worker, method)(*args, **kwargs)]

    def stream(self, method: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
        yield from getattr(self.worker, method)(*args, **kwargs)

    def stream_to(self, target: WorkerGroup, method: str, into: str, *args: Any) -> None:
        target.run_all(into, list(self.stream(method)), *args)

    def shutdown(self) -> None:
        """Let the worker let go of what it holds; nothing runs elsewhere."""
        self.worker.shutdown()

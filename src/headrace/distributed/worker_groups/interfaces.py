"""What a policy asks of its workers, and the group of one worker in the calling process."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from typing import Any

from headrace.distributed.worker_groups.rank import Seat

Reader = Callable[..., Generator[Any, None, None]]


class WorkerGroup(ABC):
    """Workers in replicas: each replica works on its own rows, the ranks inside it on the same ones."""

    dp_size: int
    world_size: int
    transferred_bytes: int = 0
    """Bytes of arguments and results that went between processes by way of this one."""

    @property
    def has_ended(self) -> bool:
        """Whether the workers are gone."""
        return False

    def run_sharded(self, method: str, shards: Sequence[Any], **common: Any) -> list[Any]:
        """Call `method(shard, **common)` on every rank, with the shard of its replica.

        Returns:
            One result per replica, in replica order: its leader's.
        """
        raise NotImplementedError

    @abstractmethod
    def run_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method with equal arguments on every rank; one result per replica, its leader's."""

    def stream(self, method: str, *args: Any, **kwargs: Any) -> Generator[Any, None, None]:
        """Call a generator method on every rank, and yield what the first rank's yields.

        Every rank runs its generator to the end, so collectives inside stay in step. The group takes no other
        call until the stream has been read or closed.
        """
        raise NotImplementedError

    def stream_to(
        self, target: "WorkerGroup", method: str, into: str, *args: Any, given: Sequence[Any] = ()
    ) -> None:
        """Give what the first rank's `method(*given)` yields to `into(items, *args)` of `target`'s only worker.

        The first item goes at once. Every rank runs its generator to the end. Between Ray actors, the items do not pass
        through this process.
        """
        with closing(self.stream(method, *given)) as items:
            target.take_stream(items, into, *args)

    def take_stream(self, items: Iterable[Any], into: str, *args: Any) -> None:
        self.run_all(into, list(items), *args)

    def reader(self, method: str) -> Reader:
        """Return what calls a generator method of the group's only worker, from any thread, and on Ray any process."""
        raise NotImplementedError

    def seats(self) -> list[Seat]:
        """Return where each rank is, for Ray actors that are to join it there; nothing outside Ray."""
        return []

    def restart(self) -> None:
        """Start the workers anew, as they were at first, after they have ended."""
        raise NotImplementedError

    @abstractmethod
    def shutdown(self) -> None:
        """End the workers; may be called twice."""


class LocalWorkerGroup(WorkerGroup):
    """One worker in the calling process, called directly."""

    dp_size = 1
    world_size = 1

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def run_sharded(self, method: str, shards: Sequence[Any], **common: Any) -> list[Any]:
        if len(shards) != 1:
            raise ValueError(f"got {len(shards)} shards for a group of one worker")
        return [getattr(self.worker, method)(shards[0], **common)]

    def run_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return [getattr(self.worker, method)(*args, **kwargs)]

    def stream(self, method: str, *args: Any, **kwargs: Any) -> Generator[Any, None, None]:
        yield from getattr(self.worker, method)(*args, **kwargs)

    def take_stream(self, items: Iterable[Any], into: str, *args: Any) -> None:
        getattr(self.worker, into)(items, *args)

    def reader(self, method: str) -> Reader:
        reader: Reader = getattr(self.worker, method)
        return reader

    def shutdown(self) -> None:
        self.worker.shutdown()

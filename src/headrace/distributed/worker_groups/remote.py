"""What every group of other processes has in common: who is sent what, and what becomes of failures.

When a rank fails, the others may wait for it in a collective. They get a short grace to answer; if all do, the
group lives on. Otherwise it is ended, and every later call says why.
"""

import sys
import time
from abc import abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from headrace.distributed.topology import RankLayout
from headrace.distributed.worker_groups.failures import WorkerFailure, describe_error, raise_failures
from headrace.distributed.worker_groups.interfaces import WorkerGroup
from headrace.distributed.worker_groups.rank import Answer, Call, RankSettings, Reply, WorkerSpec
from headrace.distributed.worker_groups.wire import Payload, decode, encode
from headrace.errors import HeadraceError

GRACE_S = 5.0


class RemoteWorkerGroup(WorkerGroup):
    """A worker per rank of `layout`, each in a process of its own.

    A worker's error is raised on the driver with its rank; its class is kept where it is one of
    `headrace.errors`, and its traceback is the cause. `alone` is what messages call a group of one, such as "the
    rollout actor".
    """

    def __init__(self, layout: RankLayout, *, grace_s: float = GRACE_S, alone: str | None = None) -> None:
        self._alone = alone
        self._replicas = layout.replicas
        self._grace_s = grace_s
        self._busy: str | None = None
        self._ended: str | None = None
        self._is_shut = False
        self.dp_size, self.world_size = layout.data, layout.size

    # How a group reaches its ranks.

    def _open(self, spec: WorkerSpec, settings: RankSettings | None) -> None:
        """Start the ranks; if that fails, nothing of them is left."""
        with ExitStack() as undo:
            undo.callback(self.shutdown)
            self._start(spec, settings or RankSettings())
            undo.pop_all()

    @abstractmethod
    def _start(self, spec: WorkerSpec, settings: RankSettings) -> None:
        """Start every rank and wait until all have built their workers."""

    @abstractmethod
    def _post(self, calls: Mapping[int, Call]) -> None:
        """Send each rank its call; a rank that cannot be reached is noticed by `_wait`."""

    @abstractmethod
    def _wait(self, ranks: set[int], timeout_s: float | None) -> list[tuple[int, Answer]]:
        """Return answers of some of `ranks`, at least one unless the time is over; a lost process is one."""

    @abstractmethod
    def _end(self, *, gently: bool) -> None:
        """End every process; `gently` gives the ranks time to leave their process group."""

    # The interface.

    @property
    def has_ended(self) -> bool:
        return self._ended is not None

    def run_sharded(self, method: str, shards: Sequence[Any], **common: Any) -> list[Any]:
        if len(shards) != self.dp_size:
            raise ValueError(f"got {len(shards)} shards for {self.dp_size} replicas")
        return self._run(method, [encode(((shard,), common)) for shard in shards])

    def run_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return self._run(method, [encode((args, kwargs))] * self.dp_size)

    def stream(self, method: str, *args: Any, **kwargs: Any) -> Generator[Any, None, None]:
        self._begin_stream(method, encode((args, kwargs)))
        values = self._answers(method)
        try:
            for _, value in values:
                yield decode(value)
        finally:
            # The ranks go on to the end of an abandoned stream.
            for _ in values:
                pass

    def _begin_stream(self, method: str, arguments: Payload, sink: Any = None) -> None:
        """Have every rank run its generator; the first rank's items go to `sink`, or come here."""
        first = Call(method, arguments, streams=True, keeps=sink is None, sink=sink)
        others = Call(method, arguments, streams=True, keeps=False)
        self._begin(method, {rank: others if rank else first for rank in range(self.world_size)})

    def shutdown(self) -> None:
        self._is_shut = True
        if self._ended is None:
            self._ended = "it was shut down"
            self._end(gently=self._busy is None)

    # Calls and answers.

    def _run(self, method: str, arguments: Sequence[Payload]) -> list[Any]:
        calls = {
            rank: Call(method, argument, keeps=rank == ranks[0])
            for ranks, argument in zip(self._replicas, arguments)
            for rank in ranks
        }
        self._begin(method, calls)
        values = dict(self._answers(method))
        return [decode(values[ranks[0]]) for ranks in self._replicas]

    def _begin(self, method: str, calls: Mapping[int, Call]) -> None:
        if self._ended is not None:
            gone = "" if self._alone else "the worker group is gone, "
            raise HeadraceError(f"cannot run {method}: {gone}{self._ended}")
        if self._busy is not None:
            raise HeadraceError(
                f"cannot run {method}: {self._busy} still streams; read it to its end or close it"
            )
        self._busy = method
        self.transferred_bytes += sum(call.arguments.nbytes for call in calls.values())
        with ExitStack() as undo:
            undo.callback(self._break_off, method, [])
            self._post(calls)
            undo.pop_all()

    def _answers(self, doing: str) -> Iterator[tuple[int, Payload]]:
        """Yield (rank, value) until every rank has answered; then raise what failed, if anything did."""
        pending = set(range(self.world_size))
        failures: list[WorkerFailure] = []
        deadline: float | None = None
        finished = False
        try:
            while pending and not any(f.is_lost for f in failures):
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                for rank, answer in self._wait(pending, left):
                    if isinstance(answer, Reply):
                        if answer.value is not None:
                            self.transferred_bytes += answer.value.nbytes
                            yield rank, answer.value
                        if not answer.is_last:
                            continue
                    else:
                        failures.append(answer)
                        deadline = deadline or time.monotonic() + self._grace_s
                    pending.discard(rank)
            finished = True
        finally:
            self._busy = None
            if (pending or any(f.is_lost for f in failures)) and not self._ended:
                self._break_off(doing, failures)
        if finished and failures:
            raise_failures(failures, world_size=self.world_size, doing=doing, alone=self._alone)

    def _break_off(self, doing: str, failures: Sequence[WorkerFailure]) -> None:
        """End the group amid a call: answers that still come would be taken for those of the next call.

        Without failures, an error of this process or an interrupt is on its way.
        """
        error, why = sys.exception(), "a call was interrupted"
        if failures:
            why = failures[0].summary
        elif isinstance(error, Exception):
            why = describe_error(0, error).summary
        self._busy, self._ended = None, f"{why} (in {doing})"
        self._end(gently=False)

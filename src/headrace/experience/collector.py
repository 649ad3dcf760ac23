"""A collector: a thread that takes tickets and has a rollout actor turn their prompts into rows of the store.

Rows go from the actor to the store; the thread sees metadata only. The actor may be in this process or in another.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.distributed.worker_groups import WorkerGroup
from headrace.errors import ConfigError, GeneratorLost, HeadraceError
from headrace.experience.types import Prompt
from headrace.models.policy.results import Traffic, moved_by
from headrace.utils.background import in_background

_log = logging.getLogger(__name__)

_CALLS_NOTED = 64
POSITION, MADE_FOR = "position", "made_for"
"""Tags: a group's place in the stream of prompts, and the step that it was made for."""


@dataclass(frozen=True)
class Ticket:
    """The prompts of one call, with all that decides what comes out beside the weights.

    It is minted once: a call that failed is made again by the same ticket, so that the ids of its samples stay.
    `positions` are the places of the prompts in the stream, `made_for` is the step that should train on them.
    """

    made_for: int
    positions: tuple[int, ...]
    prompts: Sequence[Prompt | str]
    seed: int
    tag: str
    attempt: int = 0

    def request(self, producer: str) -> dict[str, Any]:
        """Return what `SyncRolloutActor.rollout_to_tq` takes."""
        tags = {POSITION: list(self.positions), MADE_FOR: [self.made_for] * len(self.positions)}
        prompts = list(self.prompts)
        return {"prompts": prompts, "seed": self.seed, "tag": self.tag, "tags": tags, "producer": producer}


class Tickets(Protocol):
    """Where collectors get their work; all methods may be called from any thread."""

    def next(self) -> Ticket | None:
        """Wait for a ticket; None: there will be none any more."""
        ...

    def done(self, ticket: Ticket, calls: Mapping[str, float]) -> None:
        """The ticket's rows are in the store; `calls` are the metrics of the generator's calls."""
        ...

    def failed(self, ticket: Ticket, error: HeadraceError, *, has_begun: bool) -> None:
        """No row of the ticket is in the store; `has_begun`: answers may have been drawn with its seed."""
        ...

    def give_back(self, ticket: Ticket, *, for_weights: bool = False) -> None:
        """Nothing of the ticket was made, and others may; `for_weights`: once they are published again."""
        ...

    def retire(self, name: str, error: HeadraceError) -> None:
        """The collector can make nothing any more."""
        ...

    def stop(self, error: BaseException) -> None:
        """Nothing can be made any more."""
        ...


class Collector:
    """Makes samples until there are no more tickets; `rollouts` is a group of one `CollectingActor`.

    Before each call the actor takes the newest weights, if it has older ones; `has_weights` says whether they are where
    they were published. `lock` is held during a call. `moved` is what the calls so far have moved.
    """

    def __init__(
        self,
        name: str,
        rollouts: WorkerGroup,
        tickets: Tickets,
        *,
        partition_id: str,
        group_size: int,
        tag_keys: Iterable[str],
        has_weights: Callable[[], bool] = lambda: True,
    ) -> None:
        self.rollouts, self.lock = rollouts, threading.Lock()
        self.has_retired = False
        """Whether its actor can make nothing any more."""
        self.moved = self._moved_before = Traffic()
        self.name = name
        self.calls: deque[tuple[float, float]] = deque(maxlen=_CALLS_NOTED)
        """When each of the last calls began, as `time.time` has it, and its seconds; who shows them takes them out."""
        self._tickets, self._has_weights = tickets, has_weights
        self._arguments = {
            "partition_id": partition_id,
            "group_size": group_size,
            "carry_keys": [],
            "tag_keys": list(tag_keys),
        }
        self._running: Future[None] | None = None

    def start(self) -> None:
        self._running = in_background(self._run, self.name)
        self._running.add_done_callback(self._tell)

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread, or so long."""
        if self._running is not None:
            wait([self._running], timeout_s)

    def take_weights(self) -> int:
        """Have the actor take the newest weights, and return their version; called with `lock` held.

        An actor that has died is started again.

        Raises:
            GeneratorLost: it has no engine any more, or could not be started again.
        """
        try:
            return int(self.rollouts.run_all("take_weights")[0])
        except HeadraceError as error:
            if not self.rollouts.has_ended:
                raise
            _log.warning("%s: %s; it is started again", self.name, error)
        self._moved_before = Traffic(self.moved.by_column)
        try:
            self.rollouts.restart()
        except HeadraceError as error:
            raise GeneratorLost(
                f"{self.name}: its rollout actor could not be started again: {error}"
            ) from error
        return int(self.rollouts.run_all("take_weights")[0])

    def retire(self, error: GeneratorLost) -> None:
        """Make no more samples."""
        if not self.has_retired:
            self.has_retired = True
            self._tickets.retire(self.name, error)

    def _run(self) -> None:
        while not self.has_retired and (ticket := self._tickets.next()) is not None:
            self._make(ticket)

    def _tell(self, running: "Future[None]") -> None:
        if (error := running.exception()) is not None:
            self._tickets.stop(error)

    def _make(self, ticket: Ticket) -> None:
        has_begun = False
        try:
            with self.lock:
                self.take_weights()
                has_begun = True
                started, begun = time.time(), time.perf_counter()
                made = self.rollouts.run_all("rollout_to_tq", ticket.request(self.name), **self._arguments)
                self.calls.append((started, time.perf_counter() - begun))
                self.moved = self._moved_before + moved_by(self.rollouts)
        except ConfigError:
            raise
        except GeneratorLost as error:
            self._tickets.give_back(ticket)
            self.retire(error)
        except HeadraceError as error:
            if self._has_weights():
                self._tickets.failed(ticket, error, has_begun=has_begun)
            else:
                self._tickets.give_back(ticket, for_weights=True)
        else:
            self._tickets.done(ticket, made[0][3])

"""Hands out tickets: which prompts are answered next, and when; counts calls that fail.

A ticket goes out once the sampler lets it begin and the store has room for its rows beside those that are being made.
A call that fails keeps its room, and its ticket goes out again before all others, with the same ids; with another seed,
if answers may have been drawn with its own.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, islice
from threading import Condition, Lock

from headrace.algorithms.async_utils.staleness_sampler import InOrderSampler, StalenessSampler
from headrace.algorithms.prompt_loader import PromptLoader
from headrace.errors import ClaimTimeout, GenerationError, HeadraceError
from headrace.experience.collector import Ticket
from headrace.experience.metrics import combine_calls
from headrace.utils.seeding import derive_seed

_log = logging.getLogger(__name__)
_LOOK_S = 0.5
"""How long a wait for the store's room lasts before it is looked whether a failed call is to be made again."""

_WAITED, _FAILED = "async/collectors_wait_s", "async/failed_calls"
_LOST, _RESTORED = "async/lost_collectors", "async/restored_weights"
_NOTED = (_WAITED, _FAILED, _LOST, _RESTORED)

Drop = Callable[[int], Collection[int]]
"""Clears the groups that a step and those after it cannot use; returns their positions."""
Room = Callable[[int, float], None]
"""Waits until the store has room for so many rows; raises ClaimTimeout after so many seconds."""


@dataclass(frozen=True)
class Plan:
    """How the stream of prompts is cut: into steps of `per_step` prompts, and calls of `per_call`.

    The step `first_step` takes its prompts from `position` on. `trained` are later positions whose groups earlier steps
    have used, `there` those whose groups are in the store already. After `last_step` no ticket is made for a later one.
    With `in_order` a step takes the groups made for it alone, so that no call is for two; elsewhere calls begin at
    multiples of `per_call`. Either way a group has the same id in every run.
    """

    per_step: int
    per_call: int
    group_size: int
    seed: int
    first_step: int
    position: int
    last_step: int | None
    sampler: StalenessSampler
    trained: frozenset[int] = frozenset()
    there: frozenset[int] = frozenset()

    @property
    def in_order(self) -> bool:
        return isinstance(self.sampler, InOrderSampler)

    def made_for(self, position: int, dropped: int) -> int:
        """Return the step that a position is for, when so many groups were dropped, whose places later ones take."""
        gone = dropped + sum(at < position for at in self.trained)
        return self.first_step + max(position - self.position - gone, 0) // self.per_step

    def calls(self) -> Iterator["Call"]:
        """Yield the calls that are still to be made, without end."""
        gone, per_step = self.trained | self.there, self.per_step // self.per_call
        number = (self.first_step - 1) * per_step if self.in_order else self.position // self.per_call
        start = self.position if self.in_order else number * self.per_call
        stream = (at for at in count(start) if not (self.in_order and at in self.trained))
        while True:
            cut = islice(stream, self.per_call)
            if positions := [at for at in cut if at >= self.position and at not in gone]:
                yield Call(*divmod(number, per_step), positions)
            number += 1


@dataclass(frozen=True)
class Call:
    """Positions that are answered together, and the name of their call: its number in a step, counted from 0."""

    step: int
    number: int
    positions: Sequence[int]


class Dispatcher:
    """The tickets of a run, for any number of threads; what it knows of the weights is their version."""

    def __init__(
        self,
        plan: Plan,
        prompts: PromptLoader,
        room: Room,
        drop: Drop,
        *,
        most_rows: int,
        max_failures: int,
        collectors: int = 1,
    ) -> None:
        """`most_rows` are in the making at a time, and in the store beside those that were there."""
        self._plan, self._prompts, self._room = plan, prompts, room
        self._drop = drop
        self._most_rows, self._max_failures = most_rows, max_failures
        self._changed = Condition()
        # One thread at a time looks for room, so that what it finds is still there when it takes it.
        self._turn = Lock()
        self._calls_to_come, self._again = plan.calls(), deque[Ticket]()
        self._next = next(self._calls_to_come)
        self.version = plan.first_step - 2  # before the first weights nothing may begin
        self._rows_in_making, self._dropped = 0, 0
        # Positions from the first one on whose group has not been used, and later ones whose groups have.
        self._first, self._used = plan.position, set(plan.trained)
        self._still_there = set(plan.there)
        self._dropping = Lock()
        self._failures, self._collectors = 0, collectors
        self._noted = dict.fromkeys(_NOTED, 0.0)
        self._calls: list[Mapping[str, float]] = []
        self._is_closed = False
        self.lacks_weights = False
        """Whether the weights that were published last have to be published again."""
        self.error: BaseException | None = None

    # For collectors.

    def next(self) -> Ticket | None:
        started = time.perf_counter()
        with self._turn:
            ticket = self._take()
        with self._changed:
            self._noted[_WAITED] += time.perf_counter() - started
        return ticket

    def done(self, ticket: Ticket, calls: Mapping[str, float]) -> None:
        with self._changed:
            self._rows_in_making -= self._rows(ticket)
            self._calls.append(calls)
            step = self.version + 1
        self.drop(step)

    def failed(self, ticket: Ticket, error: HeadraceError, *, has_begun: bool) -> None:
        attempt = ticket.attempt + 1
        other = replace(ticket, attempt=attempt, seed=derive_seed(ticket.seed, "again", attempt))
        self.give_back(other if has_begun else ticket)
        self.count_failure(error)

    def give_back(self, ticket: Ticket, *, for_weights: bool = False) -> None:
        with self._changed:
            self.lacks_weights |= for_weights
            self._again.append(ticket)
            self._changed.notify_all()

    def retire(self, name: str, error: HeadraceError) -> None:
        with self._changed:
            self._collectors -= 1
            left = self._collectors
            self._noted[_LOST] += 1
        if left:
            _log.warning("%s makes no more samples: %s; its work goes to the other %d", name, error, left)
        else:
            self.stop(error)

    def wait_for_weights(self) -> bool:
        """Wait until they are published again; False: nothing will be any more."""
        with self._changed:
            self.lacks_weights = True
            self._changed.wait_for(lambda: self._is_closed or not self.lacks_weights)
            return not self.lacks_weights

    def count_failure(self, error: HeadraceError) -> None:
        """Count a call that failed; too many within a step are the run's error."""
        with self._changed:
            self._failures += 1
            self._noted[_FAILED] += 1
        if self._failures > self._max_failures:
            self.stop(
                GenerationError(
                    f"{self._failures} calls for samples failed within one step, and async.max_failures="
                    f"{self._max_failures} may; the last one: {error}"
                )
            )

    def stop(self, error: BaseException) -> None:
        with self._changed:
            self.error = self.error or error
        self.close()

    def _take(self) -> Ticket | None:
        """Wait for the next ticket and the room of its rows."""
        while True:
            with self._changed:
                self._changed.wait_for(self._has_next)
                if self._is_closed:
                    return None
                if self._again:
                    return self._again.popleft()
                ticket = self._mint()
                # What was in the store before takes no room, or later steps' groups could keep out an earlier one's.
                taken = self._rows_in_making - len(self._still_there) * self._plan.group_size
                wanted = taken + self._rows(ticket)
            try:
                self._room(wanted, _LOOK_S)
            except ClaimTimeout:
                continue
            with self._changed:
                self._rows_in_making += self._rows(ticket)
                self._next = next(self._calls_to_come)
            return ticket

    def _has_next(self) -> bool:
        return self._is_closed or (not self.lacks_weights and (bool(self._again) or self._may_begin()))

    def _may_begin(self) -> bool:
        plan, positions = self._plan, self._next.positions
        made_for = plan.made_for(positions[0], self._dropped)
        if self._rows_in_making + len(positions) * plan.group_size > self._most_rows:
            return False
        if self.version < plan.first_step - 1 or (plan.last_step is not None and made_for > plan.last_step):
            return False
        return plan.sampler.may_begin(made_for, self.version)

    def _mint(self) -> Ticket:
        plan, call = self._plan, self._next
        # As the synchronous loop has them, whose step is one call.
        return Ticket(
            plan.made_for(call.positions[0], self._dropped),
            tuple(call.positions),
            self._prompts.at(call.positions),
            derive_seed(plan.seed, "rollout", call.step + 1, call.number),
            f"{call.step + 1}.{call.number}",
        )

    def _rows(self, ticket: Ticket) -> int:
        return len(ticket.positions) * self._plan.group_size

    # For the trainer.

    def publish(self, version: int) -> None:
        """There are weights of this version; calls may fail anew, if it is a new one."""
        with self._changed:
            if version > self.version:
                self._failures = 0
            self.version, self.lacks_weights = version, False
            self._changed.notify_all()

    def count_restored(self) -> None:
        """The keeper of the weights was started again."""
        with self._changed:
            self._noted[_RESTORED] += 1

    def used(self, positions: Iterable[int]) -> None:
        """These groups were trained on, or dropped."""
        with self._changed:
            self._used.update(positions)
            self._still_there -= self._used
            while self._first in self._used:
                self._used.remove(self._first)
                self._first += 1

    def drop(self, step: int) -> None:
        """Drop what this step cannot use; other groups take the places of those."""
        with self._dropping:
            gone = self._drop(step)
            self.used(gone)
        with self._changed:
            self._dropped += len(gone)
            self._changed.notify_all()

    @contextmanager
    def without_drops(self) -> Iterator[None]:
        """Return a context in which what is in the store goes with what `progress` says."""
        with self._dropping:
            yield

    def progress(self) -> tuple[int, list[int]]:
        """Return the first position whose group has not been used, and the later ones whose groups have."""
        with self._changed:
            return self._first, sorted(self._used)

    def close(self) -> None:
        """Hand out no more tickets; may be called twice."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def take_metrics(self) -> dict[str, float]:
        """Return what the calls since the last time have come to, and how long collectors have waited for tickets."""
        with self._changed:
            calls, self._calls = self._calls, []
            noted, self._noted = self._noted, dict.fromkeys(self._noted, 0.0)
        return {**(combine_calls(calls) if calls else {}), **noted}

"""Blocks that a process has in hand: it stores them for a put, or drops them.

Who has them, and for how long, is known before anything happens to them, so what a process leaves behind that dies,
or that goes silent, is freed by another one.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

_LOOK_S = 1.0


class Lease(NamedTuple):
    """Keys of blocks, the process that has them in hand, when that ends, and what is to become of them."""

    owner: bytes
    ends: float
    keys: Sequence[str]
    purpose: Any = None


class Leases:
    """Leases by ticket; `is_alive` says whether an owner's process is."""

    def __init__(self, is_alive: Callable[[bytes], bool]) -> None:
        self._is_alive = is_alive
        self._open: dict[int, Lease] = {}
        self._tickets = itertools.count()
        self._next_look = 0.0

    def grant(self, owner: bytes, keys: Sequence[str], limit_s: float, purpose: Any = None) -> int:
        """Return the ticket of a new lease."""
        ticket = next(self._tickets)
        self._open[ticket] = Lease(owner, time.monotonic() + limit_s, keys, purpose)
        return ticket

    def get(self, ticket: int) -> Lease | None:
        return self._open.get(ticket)

    def end(self, tickets: Iterable[int]) -> list[str]:
        """End leases, and return their keys; a ticket that is not open is ignored."""
        ended = [self._open.pop(ticket, None) for ticket in tickets]
        return [key for lease in ended if lease is not None for key in lease.keys]

    def end_lost(self, *, at_once: bool) -> list[str]:
        """End the leases that have run out or whose owner is gone, and return their keys.

        Owners are looked for once a second, or `at_once`.
        """
        now = time.monotonic()
        gone: set[bytes] = set()
        if self._open and (at_once or now >= self._next_look):
            self._next_look = now + _LOOK_S
            owners = {lease.owner for lease in self._open.values()}
            gone = {owner for owner in owners if not self._is_alive(owner)}
        return self.end([t for t, lease in self._open.items() if lease.ends <= now or lease.owner in gone])

"""Errors on their way from a rank to the driver."""

import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from torch.distributed import DistError

from headrace import errors
from headrace.errors import HeadraceError, TransportError


@dataclass(frozen=True)
class WorkerFailure:
    """What went wrong on one rank.

    `kind` is the class to raise on the driver: the error's own where it is one of `headrace.errors`. `is_echo`:
    another rank's failure is the likely cause. `is_lost`: the process is gone.
    """

    rank: int
    kind: type[HeadraceError]
    summary: str
    trace: str = ""
    is_echo: bool = False
    is_lost: bool = False


class WorkerTraceback(Exception):
    """The traceback of an error in another process; the cause of the error raised on the driver."""


def describe_error(rank: int, error: Exception) -> WorkerFailure:
    own = isinstance(error, HeadraceError)
    kind = next((c for c in type(error).__mro__ if getattr(errors, c.__name__, None) is c), HeadraceError)
    return WorkerFailure(
        rank=rank,
        kind=kind,
        summary=str(error) if own else f"{type(error).__name__}: {error}",
        trace="".join(traceback.format_exception(error)).rstrip(),
        is_echo=isinstance(error, TransportError | DistError) or "gloo" in str(error).lower(),
    )


def lost(rank: int, process: str, exit_code: int | None) -> WorkerFailure:
    how = "has ended" if exit_code is None else f"ended with exit code {exit_code}"
    if exit_code is not None and exit_code < 0:
        how = f"was killed by {signal.Signals(-exit_code).name}"
    if exit_code == -signal.SIGKILL:
        how += ", perhaps for memory"
    return WorkerFailure(rank, HeadraceError, f"{process} {how}", is_lost=True)


def raise_failures(
    failures: Sequence[WorkerFailure], *, world_size: int, doing: str, alone: str | None = None
) -> NoReturn:
    """Raise what explains `failures`: a lost process, else an error that no other rank caused.

    The message names the rank, or `alone` where a group of one has a name; the cause is the traceback there.
    """
    first = min(failures, key=lambda f: (not f.is_lost, f.is_echo))
    others = sorted(f.rank for f in failures if f is not first)
    also = f"; failed too: rank {', '.join(map(str, others))}" if others else ""
    who = alone or f"rank {first.rank} of {world_size}"
    # A group of one says itself who it was that died.
    where = f"in {doing}" if alone and first.is_lost else f"{who}, in {doing}"
    message = f"{first.summary} ({where}{also})"
    raise first.kind(message) from (WorkerTraceback(f"\n\n{first.trace}") if first.trace else None)

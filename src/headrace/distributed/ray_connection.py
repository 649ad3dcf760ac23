"""How a process connects to a Ray cluster, the one that was named or one of its own, and waits for what runs there."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray
from ray.exceptions import AuthenticationError, GetTimeoutError, RayActorError, RayError, RayTaskError

from headrace.errors import DataPlaneError, HeadraceError, TransportError
from headrace.utils.forks import in_forks
from headrace.utils.interrupt import HANGUP, held_back

NAMESPACE = "headrace"
_LOOPBACK = ("127.0.0.1", "::1")
_CONNECT_S = 10.0
# In a process of its own, which can be given up: Ray itself would try for minutes.
_PROBE = "import sys; from ray._raylet import GcsClient; print(flush=True); GcsClient(address=sys.argv[1])"
_ANSWER_S = 20.0
# After this long without an answer, a caller asks Ray whether the other end is alive, and waits for that so long.
_PATIENCE_S = _PING_TIMEOUT_S = 1.0


_log = logging.getLogger(__name__)
_lock = threading.Lock()
_users, _is_ours = 0, False
_is_forked = False
"""Whether a fork has copied a connection into this process, where it answers nothing."""


def _note_fork() -> None:
    global _is_forked
    _is_forked = ray.is_initialized()


in_forks(_note_fork)


class Connected(NamedTuple):
    """What `connect` did: it connected this process, and started the cluster; False: that was so before."""

    connects: bool = False
    starts: bool = False


def connect_until(
    undo: ExitStack,
    address: str | None = None,
    *,
    knob: str = "RAY_ADDRESS",
    may_start: bool = True,
    **local: Any,
) -> bool:
    """Connect this process to Ray, as `connect` does, until the last such `undo` ends; return whether that starts it.

    A connection that somebody else has made stays.
    """
    global _users, _is_ours
    with _lock:
        connects, starts = connect(address, knob=knob, may_start=may_start, **local)
        _users, _is_ours = _users + 1, connects or (_is_ours and _users > 0)
    undo.callback(_leave)
    return starts


def _leave() -> None:
    global _users
    with _lock:
        _users -= 1
        if _is_ours and not _users:
            ray.shutdown()


def connect(
    address: str | None = None, *, knob: str = "RAY_ADDRESS", may_start: bool = True, **local: Any
) -> Connected:
    """Connect this process to Ray, unless it is.

    The cluster is the one at `address`, which the key `knob` gives; else the one at RAY_ADDRESS; else a local one
    that is started here with the options `local`, or, where that may not be, the one on this machine. What the
    process did on SIGTERM, it still does. Ray says errors only.

    Raises:
        TransportError: no cluster there; at once where nothing listens, and after 20 s where something else does. A
            process that was forked from one with a connection.
    """
    if _is_forked:
        raise TransportError(
            f"process {os.getpid()} was forked from one that is connected to Ray, and cannot use that connection. "
            "Start processes by multiprocessing's 'spawn'"
        )
    if ray.is_initialized():
        own = ray.get_runtime_context().gcs_address
        if address and not _is_at(address, own):
            _log.warning(
                "%s=%s is not used: this process is connected to the Ray cluster at %s already",
                knob,
                address,
                own,
            )
        return Connected()
    if not address:
        address, knob = os.environ.get("RAY_ADDRESS"), "RAY_ADDRESS"
    starts = not address and may_start
    try:
        if address:
            _check_listening(address)
        # Ray keeps Ctrl-C from the processes that it starts, and not a terminal's end, which is the driver's to handle.
        with _sigterm_handler_kept(), held_back(HANGUP), ExitStack() as undo:
            undo.callback(ray.shutdown)
            ray.init(
                address="local" if starts else address or "auto",
                namespace=NAMESPACE,
                logging_level=logging.ERROR,
                log_to_driver=False,
                **({"include_dashboard": False, **local} if starts else {}),
            )
            undo.pop_all()
    except (ConnectionError, ValueError, RuntimeError, RayError) as error:
        where = f"at {knob}={address}" if address else "on this machine"
        raise TransportError(f"cannot connect to Ray {where}: {_reason(error)}") from error
    return Connected(connects=True, starts=starts)


def _reason(error: BaseException) -> str:
    """Return what Ray says; of a refused token it says so further back only, in many lines."""
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, AuthenticationError) or "InvalidAuthToken" in str(behind):
            return (
                "it wants a token that this process does not have, or the other way round; set RAY_AUTH_MODE=token and "
                "RAY_AUTH_TOKEN_PATH (or RAY_AUTH_TOKEN), or RAY_AUTH_MODE=disabled, for cluster and drivers alike"
            )
        behind = behind.__cause__ or behind.__context__
    return str(error)


def _is_at(address: str, cluster: str) -> bool:
    """Return whether `address` may be that of a cluster, whose own is `cluster`; what is no host:port may be."""
    (host, _, port), (own_host, _, own_port) = address.rpartition(":"), cluster.rpartition(":")
    if "://" in address or not port.isdecimal():
        return True
    try:
        hosts = {str(found[4][0]) for found in socket.getaddrinfo(host.strip("[]"), int(port))}
    except (OSError, OverflowError):
        return False
    return port == own_port and (own_host.strip("[]") in hosts or not hosts.isdisjoint(_LOOPBACK))


@contextmanager
def _sigterm_handler_kept() -> Iterator[None]:
    """Put back a handler that `ray.init` has replaced in the block, so that a run can still be stopped."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _check_listening(address: str) -> None:
    """Raise ConnectionError if no Ray cluster answers at `address`, a host:port; any other form of address passes.

    Ray by itself tries for minutes, and then ends the process.
    """
    host, _, port = address.rpartition(":")
    if "://" in address or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except OSError as error:
        raise ConnectionError(f"nothing listens there ({error}); start the head node first") from error
    if not _answers_or_refuses(address):
        raise ConnectionError(
            f"something listens there, but does not answer as a Ray head node within {_ANSWER_S:.3g} s; give the "
            "address that `ray start --head` printed (its port is 6379 by default, 8265 is the dashboard's and "
            "10001 that of ray://)"
        )


def _answers_or_refuses(address: str) -> bool:
    """Return whether a Ray client comes to an end at `address`; how, Ray says best when it connects."""
    command = [sys.executable, "-c", _PROBE, address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as probe:
        try:
            assert probe.stdout is not None
            probe.stdout.read(1)  # Ray is loaded; the time counts from now.
            probe.wait(_ANSWER_S)
        except subprocess.TimeoutExpired:
            return False
        finally:
            probe.kill()
    return True


class Deadline:
    """The moment at which an operation is given up; `knob` is the key that moves it."""

    def __init__(self, seconds: float, knob: str) -> None:
        self.seconds, self.knob = seconds, knob
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """The seconds left; a little, even when it has passed."""
        return max(self._end - time.monotonic(), 0.001)

    def is_over(self) -> bool:
        return time.monotonic() >= self._end

    def missed(self, what: str) -> TransportError:
        return TransportError(
            f"{what}: no answer within {self.seconds:.3g} s, and Ray knows of no process that died; if the cluster is "
            f"only slow, raise {self.knob}"
        )


@dataclass
class Part:
    """A process that others need: what a message calls it, its Ray actor, and whether it is known to be gone."""

    label: str
    actor: Any
    is_lost: bool = False


def wait_for(
    has_come: Callable[[float], object], parts: Sequence[Part], what: str, deadline: Deadline
) -> None:
    """Wait until `has_come`, which waits as long as it is told, says so; after each second, look for `parts`."""
    check_parts(parts, what)
    while not has_come(min(deadline.left, _PATIENCE_S)):
        check_parts(parts, what, ask=True)
        if deadline.is_over():
            raise deadline.missed(what)


def check_parts(parts: Sequence[Part], what: str, *, ask: bool = False) -> None:
    """Raise TransportError if one of `parts` is known to be gone, by Ray if it is asked and says so soon."""
    pings = {part.actor.__ray_ready__.remote(): part for part in parts} if ask else {}
    for ping in ray.wait(list(pings), num_returns=len(pings), timeout=_PING_TIMEOUT_S)[0] if pings else ():
        try:
            ray.get(ping)
        except RayError:
            pings[ping].is_lost = True
    for part in parts:
        if part.is_lost:
            raise TransportError(
                f"{what}: {part.label} has died, or the client that started the store has closed it. What only it held "
                "is lost: end the run and start it again, it goes on from its newest checkpoint"
            )


def answers(references: Any, what: str, deadline: Deadline) -> Any:
    """Return the value of a Ray reference, or of a list of them."""
    try:
        return ray.get(references, timeout=deadline.left)
    except GetTimeoutError as error:
        raise deadline.missed(what) from error
    except RayTaskError as error:
        if isinstance(error.cause, HeadraceError):
            raise error.cause from None
        raise DataPlaneError(f"{what}: {type(error.cause).__name__}: {error.cause}") from error
    except RayActorError as error:
        raise TransportError(
            f"{what}: the process that answers has died, or the client that started it has closed it"
        ) from error
    except RayError as error:
        raise TransportError(f"{what}: {error}") from error

"""How a process comes to a Ray cluster: one that was named, or one of its own on this machine."""

import logging
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import ray

from headrace.errors import TransportError
from headrace.utils.interrupt import HANGUP, held_back

NAMESPACE = "headrace"
_CONNECT_S = 10.0
# In a process of its own, which can be given up: Ray itself would try for minutes.
_PROBE = "import sys; from ray._raylet import GcsClient; print(flush=True); GcsClient(address=sys.argv[1])"
_ANSWER_S = 20.0


def connect(address: str | None, *, named_by: str, **local: Any) -> None:
    """Connect this process to the cluster at `address`, or start a local one with the options `local`.

    `named_by` is the knob that the address comes from. What the process did on SIGTERM, it still does. Ray says
    errors only.

    Raises:
        TransportError: no cluster there; at once where nothing listens, and after 20 s where something else does.
    """
    try:
        if address:
            _check_listening(address)
        # Ray keeps Ctrl-C from the processes that it starts, and not a terminal's end, which is the driver's to handle.
        with _sigterm_handler_kept(), held_back(HANGUP), ExitStack() as undo:
            undo.callback(ray.shutdown)
            ray.init(
                address=address or "local",
                namespace=NAMESPACE,
                logging_level=logging.ERROR,
                log_to_driver=False,
                **({} if address else {"include_dashboard": False, **local}),
            )
            undo.pop_all()
    except (ConnectionError, ValueError, RuntimeError) as error:
        where = f"at {named_by}={address}" if address else "on this machine"
        raise TransportError(f"cannot connect to Ray {where}: {error}") from error


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

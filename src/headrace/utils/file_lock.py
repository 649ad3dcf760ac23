"""A lock on a file that says who writes in its folder, and dies with the process."""

import logging
import os
import time
from pathlib import Path

from headrace.errors import ConfigError

try:
    import fcntl
except ModuleNotFoundError:  # not on every system
    fcntl = None  # type: ignore[assignment]

_log = logging.getLogger(__name__)


def take_lock(path: Path, knob: str) -> int | None:
    """Lock a file, made if absent, and return its descriptor; the lock goes with that, or with the process.

    None: this system has no locks.

    Raises:
        ConfigError: a process has it; the key `knob` names the file's folder.
    """
    if fcntl is None:
        _log.warning("%s: this system has no file locks; start no second run in this directory", path.parent)
        return None
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    # A dashboard that looks whether somebody writes here has it for a moment.
    for wait_s in (0.02, 0.1, None):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError as error:
            if wait_s is not None:
                time.sleep(wait_s)
                continue
            owner = os.read(lock, 32).decode().strip()
            os.close(lock)
            raise ConfigError(
                f"{knob}={path.parent}: process {owner} is writing there; wait for it to end, or set another {knob}"
            ) from error
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def is_held(lock: Path) -> bool:
    """Whether a process has the lock; where there are no locks, whether one of its number lives on this machine."""
    try:
        with open(lock, "rb") as file:
            held = _is_locked(file.fileno())
            return _lives(int(file.read(32))) if held is None else held
    except (OSError, ValueError):
        return False


def _is_locked(file: int) -> bool | None:
    """Whether somebody has the lock of a file; None: this system or file system has none."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    fcntl.flock(file, fcntl.LOCK_UN)
    return False


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except PermissionError:  # it is another user's
        return True
    except (OSError, OverflowError):
        return False
    return process > 0

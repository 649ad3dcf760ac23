"""The processes of a run, wherever Ray has put them: all inherit an environment variable that the test gives it."""

import time
from pathlib import Path


def marked(mark: str) -> dict[int, str]:
    """Return the processes that a run has started and that live: pid and command."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if mark.encode() in environment and state not in "ZX":
            found[int(entry.name)] = command
    return found


def survivors(mark: str, within_s: float = 20.0) -> dict[int, str]:
    """Return what is still there when the time is over."""
    deadline = time.monotonic() + within_s
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left

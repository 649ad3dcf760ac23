"""What a fork does to a client of the store: it copies it, and nothing that the copy writes is seen by the others."""

import os
from collections.abc import Callable

from headrace.errors import DataPlaneError


def in_forks(do: Callable[[], None]) -> None:
    """Have `do` called in every process that is forked from this one; where a system has no forks, never."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=do)


def after_fork(home: int) -> DataPlaneError:
    """Return the error of a client that is used in another process than `home`, which made it."""
    return DataPlaneError(
        f"this client of the store is of process {home}, and a fork has copied it into process {os.getpid()}: what is "
        "put here would be in no store. Start processes by multiprocessing's 'spawn', and give each a client of its "
        "own: build_data_plane_client(cfg, bootstrap=False) with data_plane.impl=transfer_queue"
    )

"""A policy worker that is killed, or stopped, amid its work, where and when a test says."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.data_plane.interfaces import KVBatchMeta
from headrace.models.policy.workers.automodel_worker import AutomodelPolicyWorker

FETCH, WRITE_BACK, PID = "fetch", "write_back", "pid"


class DyingWorker(AutomodelPolicyWorker):
    """The first rank to come to a place of which there is a file in the folder sends itself a signal there.

    It removes the file, and writes its pid beside it.
    """

    def __init__(self, folder: Path, *args: Any, sends: int = signal.SIGKILL, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._folder, self._sends = folder, sends

    def _read_wire(self, meta: KVBatchMeta) -> Any:
        found = super()._read_wire(meta)
        self._perhaps_die(FETCH)
        return found

    def _write_back(self, meta: KVBatchMeta, fields: Mapping[str, Any]) -> None:
        """Die before the write, beside a rank that has written its rows or writes them."""
        self._perhaps_die(WRITE_BACK)
        super()._write_back(meta, fields)

    def _perhaps_die(self, where: str) -> None:
        try:
            (self._folder / where).unlink()
        except FileNotFoundError:
            return
        (self._folder / PID).write_text(str(os.getpid()))
        os.kill(os.getpid(), self._sends)

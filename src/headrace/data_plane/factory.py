"""The one place that chooses a store."""

import os
from collections.abc import Mapping
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from headrace.config import DataPlaneConfig
from headrace.data_plane.adapters import check_version
from headrace.data_plane.adapters.local import LocalDataPlaneClient
from headrace.data_plane.interfaces import DataPlaneClient
from headrace.data_plane.journal.client import JournalDataPlaneClient
from headrace.data_plane.observability import MetricsDataPlaneClient, print_event
from headrace.errors import ConfigError
from headrace.utils import atomic
from headrace.utils.config_errors import validated
from headrace.utils.file_lock import take_lock
from headrace.utils.paths import user_path

_FOLDER_KEY = "data_plane.journal.folder"


def build_data_plane_client(cfg: DataPlaneConfig | Mapping[str, Any], *, bootstrap: bool) -> DataPlaneClient:
    """Return a client of the store that `cfg` describes.

    The driver passes `bootstrap=True` and starts the store; closing that client ends it. Workers pass False and
    attach. With `observability.enabled` the client is a MetricsDataPlaneClient that logs every operation; with
    `journal.enabled`, a JournalDataPlaneClient is inside of it.

    Example: `build_data_plane_client({"enabled": True, "impl": "local"}, bootstrap=True)`.

    Raises:
        ConfigError: `enabled` is false, a key or value that the config does not take, an `impl` that is not
            installed, or, bootstrap: a journal's folder in which another store that is open writes.
        DataPlaneError: bootstrap: a store of that name is open; otherwise: nothing to attach to.
        WriteError: the journal's folder is none.
    """
    config = validated(DataPlaneConfig, cfg, "data_plane")
    if config.enabled is False:
        raise ConfigError(
            "data_plane.enabled=false, so there is no store to connect to; set it to true, or use the in-memory loop"
        )
    folder = config.journal.folder
    if config.journal.enabled and folder is None:
        raise ConfigError(f"{_FOLDER_KEY} is not set; set it to a directory that every process reaches")
    client = _connect(config, bootstrap)
    if config.journal.enabled and folder is not None:
        sizes = config.journal.model_dump(include={"segment_bytes", "max_bytes", "fsync"})
        with ExitStack() as undo:
            undo.callback(client.close)
            place, lock = user_path(folder, _FOLDER_KEY), None
            if bootstrap:  # clients of one store share a folder, and stores do not
                with atomic.naming(place):
                    place.mkdir(parents=True, exist_ok=True)
                    lock = take_lock(place / "lock", _FOLDER_KEY)
            client = JournalDataPlaneClient(client, place, lock=lock, **sizes)
            undo.pop_all()
    return MetricsDataPlaneClient(client, print_event) if config.observability.enabled else client


def _connect(config: DataPlaneConfig, bootstrap: bool) -> DataPlaneClient:
    if config.impl == "local":
        if bootstrap:
            return LocalDataPlaneClient.start(config.storage_capacity, config.store_name)
        return LocalDataPlaneClient.attach(config.store_name)
    client: DataPlaneClient = transfer_queue().TransferQueueDataPlaneClient(config, bootstrap=bootstrap)
    return client


def transfer_queue() -> ModuleType:
    """Return the adapter, which loads Ray; a ConfigError if it cannot be used."""
    # Read when the native libraries are loaded.
    os.environ.setdefault("GLOG_minloglevel", "2")
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    check_version()
    try:
        import headrace.data_plane.adapters.transfer_queue as adapter  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"data_plane.impl=transfer_queue cannot be used: {error}. Install headrace[ray], or set "
            "data_plane.impl=local"
        ) from error
    return adapter

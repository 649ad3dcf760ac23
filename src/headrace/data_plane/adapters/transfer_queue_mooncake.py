"""Mooncake for TransferQueue: the master process, the processes that lend memory, and blocks in that memory.

The memory of the store is lent by storage units alone: other clients mount none, so a worker that ends takes no
data with it, and memory is `num_storage_units` times `global_segment_size`, whatever the number of workers.
"""

import importlib.util
import ipaddress
import os
import socket
import stat
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from tensordict import TensorDict
from transfer_queue.metadata import BatchMeta

from headrace.config import DataPlaneConfig
from headrace.data_plane.store.blocks import BlockError, BlockInfo, PackedColumns, call_bounds
from headrace.distributed.ragged import nested_from_ragged, ragged_from_nested
from headrace.errors import ConfigError, TransportError

FIELD = "block"
"""The one field of TransferQueue that holds blocks."""
_POLL_S = 0.05
_STOP_TIMEOUT_S = 10.0
# Ends the master when this process ends, however it does: `cat` returns when the pipe closes.
_GUARD = '"$@" & child=$!; cat >/dev/null; kill "$child" 2>/dev/null; wait "$child"'


def check_installed() -> None:
    """Raise ConfigError if the Mooncake wheel is not usable."""
    if importlib.util.find_spec("mooncake") is None:
        raise ConfigError(
            "data_plane.backend=mooncake_cpu needs the package mooncake-transfer-engine-non-cuda (extra 'mooncake'); "
            "install it, or set data_plane.backend=simple"
        )


def routable_address(address: str) -> str:
    if ipaddress.ip_address(address).is_link_local:
        raise ConfigError(
            f"Ray's node address {address} is link-local, which Mooncake cannot be reached at; start Ray with "
            "--node-ip-address set to a routable one"
        )
    return address


def prepare_process(address: str) -> None:
    """Set what Mooncake reads from the environment, for this process alone.

    Assigned, since a Ray actor inherits the driver's environment with the driver's address.
    """
    os.environ["MC_TCP_BIND_ADDRESS"] = routable_address(address)
    os.environ["MC_STORE_MEMCPY"] = "0"


class MooncakeMaster:
    """A mooncake_master process of this process."""

    def __init__(self, address: str, port: int | None, timeout_s: float) -> None:
        """Start it and wait until it listens."""
        port, metrics_port = port or _free_port(address), _free_port("127.0.0.1")
        if _is_listening(address, port):
            raise ConfigError(
                f"data_plane.mooncake_master_port={port} of {address} is taken; choose another, or leave it out"
            )
        self.address = f"{address}:{port}"
        command = [
            _executable(),
            f"--rpc_address={address}",
            f"--rpc_port={port}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={metrics_port}",
            "--http_metadata_server_host=127.0.0.1",
            "--enable_metric_reporting=false",
            "--client_ttl=30",
            # A lease of 0 lets a read expire on the way; drops are forced, so a lease holds nothing back.
            "--default_kv_lease_ttl=999999",
            "--allow_evict_soft_pinned_objects=false",
            "--eviction_high_watermark_ratio=1.0",
            "--eviction_ratio=0.0",
        ]
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "headrace-mooncake", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        with ExitStack() as undo:
            undo.callback(self.stop)
            self._wait_until_listening(address, port, timeout_s)
            undo.pop_all()

    def _wait_until_listening(self, address: str, port: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not _is_listening(address, port):
            if time.monotonic() > deadline:
                raise TransportError(
                    f"mooncake_master does not listen at {self.address} after {timeout_s:.3g} s; raise "
                    "data_plane.startup_timeout_s"
                )
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """End the process; may be called twice."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_STOP_TIMEOUT_S)


class MooncakeUnit:
    """A process that lends memory to the store; runs as a Ray actor."""

    def __init__(self, master: str, segment_bytes: int) -> None:
        self._master, self._bytes = master, segment_bytes
        self._store: Any = None

    def start(self) -> str:
        """Mount the memory and return this process's address."""
        address: str = ray.util.get_node_ip_address()
        prepare_process(address)
        self._store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        buffer_bytes = 16 * 1024 * 1024
        code = self._store.setup(address, "P2PHANDSHAKE", self._bytes, buffer_bytes, "tcp", "", self._master)
        if code:
            raise TransportError(
                f"Mooncake refused to mount {self._bytes} bytes (code {code}); lower data_plane.global_segment_size"
            )
        return address

    def stop(self) -> None:
        """Unmount the memory."""
        if self._store is not None:
            self._store.close()
            self._store = None


def client_settings(master: str, config: DataPlaneConfig) -> dict[str, Any]:
    """Return TransferQueue's settings of a client that lends no memory."""
    return {
        "auto_init": False,
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": master,
        "local_hostname": "",
        "protocol": "tcp",
        "global_segment_size": 0,
        "local_buffer_size": config.local_buffer_size,
        "device_name": "",
        "hard_pin": True,
    }


async def put_blocks(client: Any, partition: str, slots: list[int], packed: PackedColumns) -> None:
    """Store the blocks of a put through TransferQueue's client, in these slots: one flat row each, in one piece."""
    sizes, bounds, buffer = [block.flat_bytes for block in packed.blocks], packed.bounds, packed.buffer
    for first, last in call_bounds(sizes):
        offsets = torch.tensor(bounds[first : last + 1]) - bounds[first]
        rows = nested_from_ragged(buffer[bounds[first] : bounds[last]], offsets, 1)
        # `async_put` would add a request for tags, which are in the index.
        fields = TensorDict({FIELD: rows}, batch_size=[last - first])
        meta = batch_meta(partition, slots[first:last], sizes[first:last])
        await client.storage_manager.put_data(fields, meta)


async def get_blocks(client: Any, partition: str, blocks: Sequence[BlockInfo]) -> list[torch.Tensor]:
    """Return the bytes of blocks, in order.

    Raises:
        BlockError: TransferQueue does not have all of them.
    """
    got: list[torch.Tensor] = []
    for first, last in call_bounds([block.flat_bytes for block in blocks]):
        part = blocks[first:last]
        meta = batch_meta(partition, [block.slot for block in part], [block.flat_bytes for block in part])
        try:
            rows = as_rows((await client.async_get_data(meta)).get(FIELD))
        except KeyError as error:
            raise BlockError(f"blocks are not in TransferQueue (any more): {error}") from error
        if len(rows) != len(part):
            raise BlockError(f"TransferQueue gave {len(rows)} of {len(part)} blocks")
        got.extend(rows)
    return got


def as_rows(leaf: Any) -> list[torch.Tensor]:
    """Return the flat rows of what TransferQueue gives for a field."""
    if not isinstance(leaf, torch.Tensor):
        return [item for item in leaf if isinstance(item, torch.Tensor)] if leaf is not None else []
    if leaf.is_nested:
        values, offsets, _ = ragged_from_nested(leaf)
        return list(torch.split(values, offsets.diff().tolist()))
    return [row.contiguous() for row in leaf.unbind()]


def batch_meta(partition: str, slots: list[int], sizes: list[int]) -> BatchMeta:
    """Return what TransferQueue needs to find blocks, without asking its controller."""
    schema = {
        "dtype": torch.uint8,
        "shape": None,
        "is_nested": True,
        "is_non_tensor": False,
        "per_sample_shapes": [(size,) for size in sizes],
    }
    count = len(slots)
    return BatchMeta(
        global_indexes=slots,
        partition_ids=[partition] * count,
        field_schema={FIELD: schema},
        production_status=np.ones(count, dtype=np.int8),
        custom_meta=[{} for _ in slots],
        _custom_backend_meta=[{} for _ in slots],
    )


def _executable() -> str:
    spec = importlib.util.find_spec("mooncake")
    folder = spec.submodule_search_locations[0] if spec and spec.submodule_search_locations else "."
    path = Path(folder) / "mooncake_master"
    if not path.exists():
        raise ConfigError(f"the Mooncake wheel has no {path}; reinstall mooncake-transfer-engine-non-cuda")
    if not os.access(path, os.X_OK):
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def _free_port(address: str) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port


def _is_listening(address: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((address, port)) == 0

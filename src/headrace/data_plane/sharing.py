"""A leader's fetched rows on their way to the ranks of its replica: values and offsets as fetched, not padded."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from headrace.data_plane.wire import read_wire, wire_tensordict
from headrace.distributed.collectives import broadcast_columns
from headrace.distributed.offsets_reader import OffsetsReader
from headrace.distributed.ragged import is_nested, nested_from_ragged, place_among, take_apart

_LAYOUT = "\0layout"
"""Beside the columns; no column has such a name."""


def share_rows(read: Callable[[], TensorDict], *, src: int, group: dist.ProcessGroup) -> TensorDict:
    """Return on every rank of `group` the rows that `read`, which global rank `src` alone calls, returns there.

    On a sibling they arrive on the device of the group's backend.
    """
    received = broadcast_columns(lambda: flat_rows(read()), src=src, group=group)
    rows, places, held = received.pop(_LAYOUT)
    offsets = [torch.from_numpy(o) for o in held]
    for name, (place, ragged_dim) in places.items():
        received[name] = nested_from_ragged(received[name], offsets[place], ragged_dim)
    return wire_tensordict(received, rows)


def flat_rows(wire: TensorDict) -> dict[str, Any]:
    """Return dense columns, jagged ones as their values; offsets that several columns share stand there once."""
    columns: dict[str, Any] = {}
    offsets: list[torch.Tensor] = []
    places: dict[str, tuple[int, int]] = {}
    leaves = read_wire(wire)
    read = OffsetsReader(leaves.values())
    for name, leaf in leaves.items():
        columns[name] = leaf
        if isinstance(leaf, torch.Tensor) and is_nested(leaf):
            columns[name], mine, ragged_dim, _ = take_apart(leaf, read)
            places[name] = place_among(mine, offsets), ragged_dim
    columns[_LAYOUT] = wire.batch_size[0], places, [o.numpy() for o in offsets]
    return columns

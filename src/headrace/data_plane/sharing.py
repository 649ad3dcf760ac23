"""A leader's fetched rows on their way to the ranks of its replica: values and offsets as fetched, not padded."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict

from headrace.data_plane.leaves import Ragged, place_of, read_leaves, wire_tensordict
from headrace.distributed.collectives import broadcast_columns

_LAYOUT = "\0layout"
"""Beside the columns; no column has such a name."""


def share_rows(read: Callable[[], TensorDict], *, src: int, group: dist.ProcessGroup) -> TensorDict:
    """Return on every rank of `group` the rows that `read`, which global rank `src` alone calls, returns there.

    On a sibling they arrive on the device of the group's backend.

    Raises:
        TransportError: on the siblings of a leader that failed; see `broadcast_columns`.
    """
    return _nested(broadcast_columns(lambda: flat_rows(read()), src=src, group=group))


def flat_rows(wire: TensorDict) -> dict[str, Any]:
    """Return dense columns, jagged ones as their values; offsets that several columns share stand there once."""
    columns: dict[str, Any] = {}
    offsets: list[torch.Tensor] = []
    places: dict[str, tuple[int, int]] = {}
    for name, leaf in read_leaves(wire):
        if isinstance(leaf, Ragged):
            places[name] = place_of(leaf.offsets, offsets), leaf.ragged_dim
        columns[name] = leaf.values if isinstance(leaf, Ragged) else leaf
    columns[_LAYOUT] = wire.batch_size[0], places, [o.numpy() for o in offsets]
    return columns


def _nested(received: dict[str, Any]) -> TensorDict:
    places: dict[str, tuple[int, int]]
    offsets: list[np.ndarray[Any, np.dtype[np.int64]]]
    rows, places, offsets = received.pop(_LAYOUT)
    known = [torch.from_numpy(o) for o in offsets]
    for name, (place, ragged_dim) in places.items():
        received[name] = Ragged(received[name], known[place], ragged_dim).nested()
    return wire_tensordict(received, rows)

"""What a meta has of its rows, one value each: picked, joined, and ids cut into parts without a look at a text."""

from collections.abc import Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from headrace.distributed.ragged import gather_spans

Ints = NDArray[np.int64]

PACKED_IDS = "_packed_ids"
"""Where a meta has the msgpack list of its ids until somebody reads them."""


def pick(values: list[Any], rows: list[int]) -> list[Any]:
    # One call for all rows takes little more than half the time of a loop; of one row it gives no tuple.
    return list(itemgetter(*rows)(values)) if len(rows) > 1 else [values[i] for i in rows]


def join(parts: list[list[Any] | None]) -> list[Any] | None:
    joined: list[Any] = []
    for part in parts:
        if part is None:
            return None
        joined.extend(part)
    return joined


def union(parts: list[list[str] | None]) -> list[str] | None:
    known = [p for p in parts if p is not None]
    return list(dict.fromkeys(name for p in known for name in p)) if known else None


def packed_parts(ids: Sequence[str], order: Ints, bounds: Sequence[int]) -> list[bytes]:
    """Return, between each two neighbours of `bounds`, the msgpack list of the ids at these places of `order`."""
    data = msgspec.msgpack.encode(ids)
    lengths = _packed_lengths(np.fromiter(map(len, ids), np.int64, len(ids)))
    first = len(_list_head(len(ids)))
    if first + lengths.sum() != len(data):  # some letters take more than a byte
        lengths = _packed_lengths(np.fromiter((len(i.encode()) for i in ids), np.int64, len(ids)))
    starts, lengths = (first + np.cumsum(lengths) - lengths)[order], lengths[order]
    values = torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))
    picked = gather_spans(values, torch.from_numpy(starts), torch.from_numpy(lengths)).numpy()
    ends = np.append(0, np.cumsum(lengths))[list(bounds)].tolist()
    sizes = [stop - start for start, stop in pairwise(bounds)]
    return [
        _list_head(size) + picked[start:stop].tobytes() for size, (start, stop) in zip(sizes, pairwise(ends))
    ]


def _packed_lengths(letters: Ints) -> Ints:
    """Return how many bytes msgpack takes for texts of so many."""
    found: Ints = letters + 1 + (letters > 31) + (letters > 0xFF) + 2 * (letters > 0xFFFF)
    return found


def _list_head(items: int) -> bytes:
    if items < 16:
        return bytes([0x90 | items])
    return b"\xdc" + items.to_bytes(2) if items <= 0xFFFF else b"\xdd" + items.to_bytes(4)

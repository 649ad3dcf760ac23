"""One column of a wire TensorDict, told apart: dense tensor, ragged rows, objects, or media without rows.

A TensorDict holds an object array as NonTensorData around the array; `td[name]` returns that very array,
while `td[rows]` does not select from it. So a wire TensorDict is only a carrier: select rows through the store
or a BatchedDataDict.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from headrace.data_plane.object_codec import ObjectArray, object_array
from headrace.distributed.multimodal import PackedTensor
from headrace.distributed.offsets_reader import OffsetsReader
from headrace.distributed.ragged import is_nested, nested_from_ragged, take_apart
from headrace.errors import SchemaError


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths: `values` (tokens, ...), `offsets` (N + 1) int64 on the CPU.

    `device_offsets` are the same offsets where `values` are, if that is a device and they are there already.
    """

    values: torch.Tensor
    offsets: torch.Tensor
    ragged_dim: int = 1
    device_offsets: torch.Tensor | None = None

    def nested(self) -> torch.Tensor:
        offsets = self.offsets if self.device_offsets is None else self.device_offsets
        return nested_from_ragged(self.values, offsets, self.ragged_dim, self.offsets)


def place_of(offsets: torch.Tensor, known: list[torch.Tensor]) -> int:
    """Return the place of equal offsets in `known`, at whose end new ones are put: columns then share one object."""
    for place, held in enumerate(known):
        if held is offsets or torch.equal(held, offsets):
            return place
    known.append(offsets)
    return len(known) - 1


Leaf = torch.Tensor | Ragged | ObjectArray


def leaves(wire: TensorDict) -> Iterator[tuple[str, Leaf]]:
    """Yield each column's name and leaf: a dense tensor, Ragged, or an object array. A dict will do, too."""
    for name, leaf in read_leaves(wire):
        yield name, object_array([]) if isinstance(leaf, PackedTensor) else leaf


def read_leaves(wire: TensorDict) -> Iterator[tuple[str, Leaf | PackedTensor]]:
    """Yield what `leaves` does, but a PackedTensor for media without rows, where no row says what the column is.

    Offsets on a device are brought to the CPU in one copy for all columns.

    Raises:
        SchemaError: a nested TensorDict, or a value that is no column.
    """
    rows = wire.batch_size[0] if isinstance(wire, TensorDictBase) and wire.batch_size else None
    columns = {str(name): wire.get(name) for name in list(wire.keys())}
    read = OffsetsReader(columns.values())
    for name, column in columns.items():
        yield name, as_leaf(name, column, rows, read)


def as_leaf(
    name: str, value: object, rows: int | None = None, read: OffsetsReader | None = None
) -> Leaf | PackedTensor:
    """Tell one column apart; `rows` is how many a NonTensorData without batch dimensions stands for."""
    if isinstance(value, torch.Tensor):
        return Ragged(*take_apart(value, read or OffsetsReader())) if is_nested(value) else value
    if isinstance(value, NonTensorStack | LazyStackedTensorDict):
        return object_array([unwrap_wire_stripped_payload(item) for item in value.unbind(0)])
    if isinstance(value, NonTensorData):
        return _broadcast(value.data, value.batch_size[0] if value.batch_dims else rows or 0)
    if isinstance(value, np.ndarray):
        return value if value.dtype == object else object_array(value.tolist())
    if isinstance(value, TensorDictBase) and not value.keys() and value.batch_dims:
        return object_array([unwrap_wire_stripped_payload(item) for item in value.unbind(0)])
    if isinstance(value, list | tuple):
        return object_array([unwrap_wire_stripped_payload(item) for item in value])
    raise SchemaError(
        f"column '{name}' is a {type(value).__name__}; expected a tensor, a nested tensor or an object array"
    )


def wire_tensordict(
    columns: Mapping[str, torch.Tensor | ObjectArray | PackedTensor], rows: int
) -> TensorDict:
    """Return columns that are known to have `rows` rows as a TensorDict, batch_size [rows]."""
    if not all(isinstance(column, torch.Tensor) for column in columns.values()):
        return TensorDict(dict(columns), batch_size=[rows])
    # The public constructor asks every jagged tensor for its shape: 30 us each.
    wire: TensorDict = TensorDict._new_unsafe(dict(columns), batch_size=torch.Size([rows]))
    return wire


def unwrap_wire_stripped_payload(item: object) -> object:
    """Return what a transport left of one object: its payload, or None where the payload was lost.

    A NonTensorData gives its payload, also after it has been rebuilt as a plain TensorDict that still carries
    the payload's dict. The empty TensorDict without batch dimensions is what remains of a lost payload. Any
    other value, TensorDicts with data included, is returned unchanged.
    """
    if isinstance(item, NonTensorData):
        return item.data
    if not isinstance(item, TensorDictBase):
        return item
    payload = getattr(item, "_non_tensordict", None)
    if isinstance(payload, Mapping) and "data" in payload:
        return payload["data"]
    return None if not item.batch_dims and not item.keys() else item


def _broadcast(data: object, rows: int) -> ObjectArray | PackedTensor:
    if isinstance(data, PackedTensor) and not len(data) and not rows:
        return data
    if isinstance(data, np.ndarray) and data.ndim and rows in (0, len(data)):
        return data if data.dtype == object and data.ndim == 1 else object_array(data.tolist())
    return object_array([data] * rows)

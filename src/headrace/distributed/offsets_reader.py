"""Offsets of nested tensors on the CPU, brought there in one copy for all columns of a call."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch.nested._internal.nested_tensor import NestedTensor

from headrace.errors import SchemaError

INTEGERS = frozenset(
    {torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64}
)
_Read = dict[tuple[object, ...], tuple[torch.Tensor, torch.Tensor]]


@dataclass
class OffsetsReader:
    """Brings offsets of nested tensors to the CPU: those of all `columns` in one copy, when first asked for one."""

    columns: Iterable[object] = ()
    _read: _Read = field(default_factory=dict)
    whole: tuple[torch.Tensor | None, int] = None, 0
    """The last offsets of rows that lie back to back, and their tokens: columns share them."""

    def __call__(self, offsets: torch.Tensor) -> torch.Tensor:
        """Return integers (n,) as contiguous int64 on the CPU; of a device, the same object for the same memory."""
        if offsets.dtype not in INTEGERS:
            raise SchemaError(f"offsets or lengths of rows are of dtype {offsets.dtype}; expected integers")
        if offsets.is_cpu:
            return offsets.to(torch.int64).contiguous()
        key = _memory(offsets)
        if key not in self._read:
            self._fetch([offsets, *_index_tensors(self.columns)])
            self.columns = ()
        return self._read[key][1]

    def _fetch(self, wanted: Iterable[torch.Tensor]) -> None:
        by_device: dict[torch.device, dict[tuple[object, ...], torch.Tensor]] = defaultdict(dict)
        for part in wanted:
            by_device[part.device][_memory(part)] = part
        for parts in by_device.values():
            whole = [part.to(torch.int64) for part in parts.values()]
            joined = (torch.cat(whole) if len(whole) > 1 else whole[0]).cpu().contiguous()
            pieces = torch.split(joined, [len(part) for part in parts.values()])
            for (key, part), piece in zip(parts.items(), pieces):
                # The entry holds the tensor, so that its memory stays its own.
                self._read[key] = (part, piece.clone() if len(parts) > 1 else joined)


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _index_tensors(columns: Iterable[object]) -> Iterable[torch.Tensor]:
    for column in columns:
        if isinstance(column, NestedTensor):
            for part in (column._offsets, column._lengths):
                if part is not None and not part.is_cpu:
                    yield part

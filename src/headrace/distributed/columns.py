"""One column of a batch: the operations over rows that every kind of column has.

Kinds: dense tensors (N, ...), jagged nested tensors (N, j, ...), lists, numpy arrays (objects or numbers) and
PackedTensor. A result is a copy, except that `slice_rows` of a dense tensor or array is a view.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from headrace.distributed.multimodal import PackedTensor
from headrace.distributed.ragged import (
    gather_dense,
    gather_rows,
    nested_from_ragged,
    offsets_from_lengths,
    ragged_from_nested,
)
from headrace.distributed.ragged_cpu import pad_element
from headrace.errors import SchemaError

Column = torch.Tensor | list[object] | npt.NDArray[np.generic] | PackedTensor


def rows_of(name: str, column: object) -> int:
    if isinstance(column, torch.Tensor | np.ndarray):
        if column.ndim == 0:
            raise SchemaError(f"column '{name}' is a single number; expected one row per sample, (N, ...)")
        return int(column.shape[0])
    if isinstance(column, list | tuple | PackedTensor):
        return len(column)
    raise SchemaError(
        f"column '{name}' is a {type(column).__name__}; "
        "expected a tensor, a list, a numpy array or a PackedTensor"
    )


def select_rows(column: Column, rows: torch.Tensor) -> Column:
    """Return the rows at `rows` (int64 on the CPU, 0 <= row < N), in that order, repeats included."""
    if isinstance(column, torch.Tensor):
        if not column.is_nested:
            return gather_dense(column, rows)
        values, offsets, dim = ragged_from_nested(column)
        return nested_from_ragged(*gather_rows(values, offsets, rows), ragged_dim=dim)
    if isinstance(column, np.ndarray):
        taken: npt.NDArray[np.generic] = column[rows.numpy()]
        return taken
    if isinstance(column, PackedTensor):
        return column.slice(rows)
    return [column[row] for row in rows.tolist()]


def slice_rows(column: Column, start: int, stop: int) -> Column:
    """Return rows start .. stop - 1."""
    if isinstance(column, PackedTensor) or (isinstance(column, torch.Tensor) and column.is_nested):
        return select_rows(column, torch.arange(start, stop))
    return column[start:stop]


def object_array(rows: Sequence[object]) -> npt.NDArray[np.object_]:
    """Return a (N,) array of objects; numpy does not look into them."""
    array = np.empty(len(rows), dtype=object)
    for index, row in enumerate(rows):
        array[index] = row
    return array


def concat_columns(name: str, columns: Sequence[Column], pad_value: int | float | bool = 0) -> Column:
    """Return the rows of all parts, one after the other.

    Dense parts of two or more dimensions are padded to the widest along dimension 1.
    """
    first = columns[0]
    kinds = {_kind(column) for column in columns}
    if len(kinds) != 1:
        raise SchemaError(
            f"column '{name}' is {' and '.join(sorted(kinds))} in different parts; make it one kind"
        )
    if isinstance(first, PackedTensor):
        return type(first).concat([c for c in columns if isinstance(c, PackedTensor)])
    if isinstance(first, np.ndarray):
        return np.concatenate([c for c in columns if isinstance(c, np.ndarray)])
    if isinstance(first, torch.Tensor):
        tensors = [c for c in columns if isinstance(c, torch.Tensor)]
        return _concat_nested(name, tensors) if first.is_nested else _concat_dense(name, tensors, pad_value)
    return [row for column in columns if isinstance(column, list | tuple) for row in column]


def _kind(column: object) -> str:
    if isinstance(column, torch.Tensor):
        return "a jagged tensor" if column.is_nested else "a dense tensor"
    if isinstance(column, np.ndarray):
        return f"an array of {column.dtype}"
    return "a PackedTensor" if isinstance(column, PackedTensor) else "a list"


def _concat_nested(name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    ragged = [ragged_from_nested(part) for part in parts]
    dim = ragged[0][2]
    forms = {(values.dtype, tuple(values.shape[1:]), d) for values, _, d in ragged}
    if len(forms) != 1:
        raise SchemaError(f"column '{name}' has parts of different (dtype, row shape, ragged dim): {forms}")
    lengths = torch.cat([offsets.diff() for _, offsets, _ in ragged])
    return nested_from_ragged(
        torch.cat([values for values, _, _ in ragged]), offsets_from_lengths(lengths), ragged_dim=dim
    )


def _concat_dense(name: str, parts: Sequence[torch.Tensor], pad_value: int | float | bool) -> torch.Tensor:
    # A part without rows says nothing about width or dtype.
    parts = [part for part in parts if part.shape[0]] or parts[:1]
    forms = {(part.dtype, part.dim(), tuple(part.shape[2:])) for part in parts}
    if len(forms) != 1:
        shapes = ", ".join(f"{tuple(p.shape)} {p.dtype}" for p in parts)
        raise SchemaError(
            f"column '{name}' has parts {shapes}; expected one dtype, and shapes that differ in "
            "dimensions 0 and 1 only"
        )
    widths = [part.shape[1] for part in parts] if parts[0].dim() > 1 else [0]
    if len(set(widths)) == 1:
        return torch.cat(list(parts))
    try:
        pad_element(pad_value, parts[0].dtype)
    except SchemaError as error:
        raise SchemaError(f"column '{name}': {error}") from error
    rows = sum(part.shape[0] for part in parts)
    joined = parts[0].new_full((rows, max(widths), *parts[0].shape[2:]), pad_value)
    start = 0
    for part in parts:
        joined[start : start + part.shape[0], : part.shape[1]] = part
        start += part.shape[0]
    return joined


def move(column: Column, device: torch.device | str) -> Column:
    """Return a column on a device; lists and arrays stay as they are."""
    return column.to(device) if isinstance(column, torch.Tensor | PackedTensor) else column

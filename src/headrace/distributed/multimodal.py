"""Media columns: per row a tensor of its own size, or none, joined along one dimension only when used."""

from collections.abc import Sequence

import torch

from headrace.errors import SchemaError


class PackedTensor:
    """A column of N rows, each with one media tensor or None; `len` is N.

    Rows may differ in size along `dim_to_pack` only (patches, frames, tiles). Images and videos are separate
    columns; a row that has only the one holds None in the other. The rows are never changed in place.

    >>> images = PackedTensor([torch.zeros(2, 3), None, torch.ones(1, 3)], dim_to_pack=0)
    >>> len(images), images.as_tensor().shape
    (3, torch.Size([3, 3]))
    """

    def __init__(self, tensors: torch.Tensor | Sequence[torch.Tensor | None], dim_to_pack: int = 0) -> None:
        rows: list[torch.Tensor | None] = [tensors] if isinstance(tensors, torch.Tensor) else [*tensors]
        for index, row in enumerate(rows):
            if row is not None and not isinstance(row, torch.Tensor):
                raise SchemaError(f"row {index} is a {type(row).__name__}; expected a tensor or None")
        self.tensors: list[torch.Tensor | None] = rows
        self.dim_to_pack = dim_to_pack

    def __len__(self) -> int:
        return len(self.tensors)

    def __repr__(self) -> str:
        shapes = [None if t is None else tuple(t.shape) for t in self.tensors]
        return f"PackedTensor({shapes}, dim_to_pack={self.dim_to_pack})"

    def slice(self, indices: Sequence[int] | torch.Tensor) -> "PackedTensor":
        """Return the rows at `indices`, in that order, repeats included."""
        return PackedTensor([self.tensors[int(i)] for i in indices], self.dim_to_pack)

    @classmethod
    def concat(cls, columns: Sequence["PackedTensor"]) -> "PackedTensor":
        return cls([row for column in columns for row in column.tensors], _common_dim(columns))

    @classmethod
    def flattened_concat(cls, columns: Sequence["PackedTensor"]) -> "PackedTensor":
        """Return one row per column: all its media joined, or None where it has none."""
        return cls([column.as_tensor() for column in columns], _common_dim(columns))

    def to(self, device: torch.device | str) -> "PackedTensor":
        return PackedTensor([None if t is None else t.to(device) for t in self.tensors], self.dim_to_pack)

    def as_tensor(self, device: torch.device | str | None = None) -> torch.Tensor | None:
        """Return all rows joined along `dim_to_pack`, or None if no row has media."""
        rows = [(i, t) for i, t in enumerate(self.tensors) if t is not None]
        if not rows:
            return None
        wanted = self._other_sizes(rows[0][1])
        for index, row in rows:
            if self._other_sizes(row) != wanted:
                raise SchemaError(
                    f"row {index} (shape {tuple(row.shape)}, {row.dtype}) does not join row {rows[0][0]} "
                    f"(shape {tuple(rows[0][1].shape)}, {rows[0][1].dtype}) along dim_to_pack={self.dim_to_pack}"
                )
        tensors = [t if device is None else t.to(device) for _, t in rows]
        return torch.cat(tensors, dim=self.dim_to_pack)

    def _other_sizes(self, row: torch.Tensor) -> tuple[object, ...]:
        if not -row.dim() <= self.dim_to_pack < row.dim():
            raise SchemaError(
                f"a row of shape {tuple(row.shape)} has no dimension dim_to_pack={self.dim_to_pack}"
            )
        joined = self.dim_to_pack % row.dim()
        return (row.dtype, *(size for dim, size in enumerate(row.shape) if dim != joined))


def _common_dim(columns: Sequence[PackedTensor]) -> int:
    dims = sorted({column.dim_to_pack for column in columns})
    if len(dims) != 1:
        raise SchemaError(f"columns have dim_to_pack {dims}; expected at least one column, all with the same")
    return dims[0]

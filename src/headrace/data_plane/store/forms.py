"""What rows of a column have in common, and what the books of a store need to know of a block of them."""

from typing import NamedTuple, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray

Rows = NDArray[np.int64]


class Form(NamedTuple):
    """What all rows of a column have in common; kinds: dense, ragged, objects, media."""

    kind: str
    dtype: torch.dtype | None = None
    trailing: tuple[int, ...] = ()
    ragged_dim: int = 1
    """Of media: along which dimension they are packed."""

    def __str__(self) -> str:
        if self.dtype is None:
            return self.kind
        shape = [str(size) for size in self.trailing]
        if self.kind == "ragged":
            shape.insert(self.ragged_dim - 1, "L")
        return f"{self.kind} {self.dtype} rows of shape ({', '.join(shape)})"


class RowBlock(Protocol):
    """Rows of one form, here or elsewhere: what the bookkeeping of a store needs to know of them."""

    @property
    def form(self) -> Form: ...
    @property
    def rows(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

    def shrunk(self, rows: Rows) -> Self | None:
        """Return only `rows`, in memory of their own; None if the block can only go as a whole."""

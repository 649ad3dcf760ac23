"""PackedTensor with two more habits: rows may share media, and media of different shapes are padded to the largest."""

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from headrace.distributed import multimodal
from headrace.errors import SchemaError

Place = tuple[int, int]
"""A segment: the number of its column, and its place in that column's tensors."""


class PackedTensor(multimodal.PackedTensor):
    """A column of N rows of media; a row has any number of segments, each one of `tensors`.

    Without deduplication every entry of `tensors` is one row, as in headrace's own class. `enable_deduplication`
    gives each tensor an identity that copies and pickles keep; columns that are joined then hold a tensor once,
    however many rows show it. `as_tensor` joins the segments in the order of the rows. With `pad_to_max_shape` they
    are first padded with zeros to the largest size in every dimension but `dim_to_pack`.

    >>> image = PackedTensor(torch.ones(1, 2), dim_to_pack=0).enable_deduplication()
    >>> both = PackedTensor.concat([image, image])
    >>> len(both), len(both.tensors), both.as_tensor().shape
    (2, 1, torch.Size([2, 2]))
    """

    # Defaults of objects that were pickled without these.
    pad_to_max_shape: bool = False
    _row_offsets: list[int] | None = None
    _segment_indices: list[int] | None = None
    _segment_provenance: list[str] | None = None

    def __init__(
        self,
        tensors: torch.Tensor | Sequence[torch.Tensor | None],
        dim_to_pack: int = 0,
        *,
        pad_to_max_shape: bool = False,
        _row_offsets: Sequence[int] | None = None,
        _segment_indices: Sequence[int] | None = None,
        _segment_provenance: Sequence[str] | None = None,
    ) -> None:
        super().__init__(tensors, dim_to_pack)
        self.pad_to_max_shape = pad_to_max_shape
        if (_row_offsets is None) != (_segment_indices is None):
            raise SchemaError("give both _row_offsets and _segment_indices, or neither")
        if _segment_provenance is not None and len(_segment_provenance) != len(self.tensors):
            raise SchemaError(
                f"{len(_segment_provenance)} segment identities for {len(self.tensors)} tensors; expected one each"
            )
        self._row_offsets = None if _row_offsets is None else list(_row_offsets)
        self._segment_indices = None if _segment_indices is None else list(_segment_indices)
        self._segment_provenance = None if _segment_provenance is None else list(_segment_provenance)

    @classmethod
    def of(cls, column: multimodal.PackedTensor) -> "PackedTensor":
        """Return a column of headrace's own class as one of this; rows that do not fit together get padded."""
        if isinstance(column, PackedTensor):
            return column
        shapes = [list(t.shape) for t in column.tensors if t is not None]
        for shape in shapes:
            del shape[column.dim_to_pack]
        return cls(column.tensors, column.dim_to_pack, pad_to_max_shape=any(s != shapes[0] for s in shapes))

    def __len__(self) -> int:
        return len(self.tensors) if self._row_offsets is None else len(self._row_offsets) - 1

    @property
    def deduplication_enabled(self) -> bool:
        return self._segment_provenance is not None

    def enable_deduplication(self) -> "PackedTensor":
        """Give every tensor that has none an identity, in place, and return self."""
        if self._segment_provenance is None:
            rows, tensors = self._rows(), self.tensors
            kept = [place for place, tensor in enumerate(tensors) if tensor is not None]
            self.tensors = [tensors[place] for place in kept]
            self._set_rows([[kept.index(place) for place in row] for row in rows])
            self._segment_provenance = [uuid.uuid4().hex for _ in kept]
        return self

    # Rows.

    def _rows(self) -> list[list[int]]:
        """Return the places in `tensors` of each row's segments."""
        if self._row_offsets is None or self._segment_indices is None:
            return [[] if tensor is None else [place] for place, tensor in enumerate(self.tensors)]
        bounds = zip(self._row_offsets, self._row_offsets[1:])
        return [self._segment_indices[start:stop] for start, stop in bounds]

    def _set_rows(self, rows: Sequence[Sequence[int]]) -> None:
        self._row_offsets = [0]
        for row in rows:
            self._row_offsets.append(self._row_offsets[-1] + len(row))
        self._segment_indices = [place for row in rows for place in row]

    def logical_segment_counts_by_row(self) -> list[int]:
        return [len(row) for row in self._rows()]

    def iter_logical_segments(self) -> Iterator[torch.Tensor | None]:
        """Yield the segments row by row; None for a row without any."""
        for row in self._rows():
            yield from [self.tensors[place] for place in row] or [None]

    def slice(self, indices: Sequence[int] | torch.Tensor) -> "PackedTensor":
        rows = self._rows()
        chosen = [int(index) for index in indices]
        return self._gather([self], [[(0, place) for place in rows[index]] for index in chosen])

    def repeat(self, repeats: int) -> "PackedTensor":
        return self.slice([row for row in range(len(self)) for _ in range(repeats)])

    @classmethod
    def empty_like(cls, other: multimodal.PackedTensor) -> "PackedTensor":
        return cls.empty_rows_like(other, len(other))

    @classmethod
    def empty_rows_like(cls, other: multimodal.PackedTensor, num_rows: int) -> "PackedTensor":
        """Return a column of `num_rows` rows without media, which joins `other`."""
        return cls._gather([cls.of(other)], [[] for _ in range(num_rows)])

    @classmethod
    def concat(cls, from_packed_tensors: Sequence[multimodal.PackedTensor]) -> "PackedTensor":
        """Return the rows of all columns, one after the other."""
        columns = [cls.of(column) for column in from_packed_tensors]
        rows = [[(n, place) for place in row] for n, column in enumerate(columns) for row in column._rows()]
        return cls._gather(columns, rows)

    @classmethod
    def flattened_concat(cls, from_packed_tensors: Sequence[multimodal.PackedTensor]) -> "PackedTensor":
        """Return one row per column: all its segments in order."""
        columns = [cls.of(column) for column in from_packed_tensors]
        rows = [[(n, p) for row in column._rows() for p in row] for n, column in enumerate(columns)]
        return cls._gather(columns, rows)

    @classmethod
    def merge_segments(cls, from_packed_tensors: Sequence[multimodal.PackedTensor]) -> "PackedTensor":
        """Return one row that has the segments of all columns."""
        columns = [cls.of(column) for column in from_packed_tensors]
        row = [(n, p) for n, column in enumerate(columns) for own in column._rows() for p in own]
        return cls._gather(columns, [row])

    @classmethod
    def _gather(cls, columns: Sequence["PackedTensor"], rows: Sequence[Sequence[Place]]) -> "PackedTensor":
        """Return a column of `rows`; a segment that several of them have is held once where columns deduplicate."""
        made = cls([], _common_dim(columns), pad_to_max_shape=any(c.pad_to_max_shape for c in columns))
        shares = any(column.deduplication_enabled for column in columns)
        if not shares and all(len(row) < 2 for row in rows):
            made.tensors = [columns[row[0][0]].tensors[row[0][1]] if row else None for row in rows]
            return made
        names: dict[str | Place, int] = {}
        identities: list[str] = []
        placed: list[list[int]] = []
        for row in rows:
            placed.append([])
            for number, place in row:
                provenance = columns[number]._segment_provenance
                name = (number, place) if provenance is None else provenance[place]
                if name not in names:
                    names[name] = len(made.tensors)
                    made.tensors.append(columns[number].tensors[place])
                    identities.append(name if isinstance(name, str) else uuid.uuid4().hex)
                placed[-1].append(names[name])
        made._set_rows(placed)
        made._segment_provenance = identities if shares else None
        return made

    # Tensors.

    def _with_tensors(self, tensors: Sequence[torch.Tensor | None], identities: Any) -> "PackedTensor":
        return PackedTensor(
            tensors,
            self.dim_to_pack,
            pad_to_max_shape=self.pad_to_max_shape,
            _row_offsets=self._row_offsets,
            _segment_indices=self._segment_indices,
            _segment_provenance=identities,
        )

    def to(self, device: torch.device | str) -> "PackedTensor":
        moved = [None if t is None else t.to(device) for t in self.tensors]
        return self._with_tensors(moved, self._segment_provenance)

    def to_dtype(self, dtype: torch.dtype) -> "PackedTensor":
        """Return the column with its tensors cast; a tensor that is cast is another one than before."""
        cast = [None if t is None else t.to(dtype) for t in self.tensors]
        identities = self._segment_provenance
        if identities is not None:
            pairs = zip(identities, self.tensors, cast)
            identities = [name if new is old else f"{name}/{dtype}" for name, old, new in pairs]
        return self._with_tensors(cast, identities)

    def as_tensor(self, device: torch.device | str | None = None) -> torch.Tensor | None:
        segments = [tensor for tensor in self.iter_logical_segments() if tensor is not None]
        if self.pad_to_max_shape:
            segments = _padded(segments, self.dim_to_pack)
        return multimodal.PackedTensor(segments, self.dim_to_pack).as_tensor(device)

    def joined(self) -> multimodal.PackedTensor:
        """Return the column as headrace's own class has it: one tensor per row."""
        parts = [self.slice([row]).as_tensor() for row in range(len(self))]
        return multimodal.PackedTensor(parts, self.dim_to_pack)


def _common_dim(columns: Sequence[PackedTensor]) -> int:
    dims = sorted({column.dim_to_pack for column in columns})
    if len(dims) != 1:
        raise SchemaError(f"columns have dim_to_pack {dims}; expected at least one column, all with the same")
    return dims[0]


def _padded(segments: list[torch.Tensor], dim_to_pack: int) -> list[torch.Tensor]:
    """Pad with zeros, at the end of every dimension but `dim_to_pack`, to the largest size."""
    if not segments:
        return segments
    ranks = sorted({segment.dim() for segment in segments})
    if len(ranks) != 1:
        raise SchemaError(
            f"media of {ranks} dimensions cannot be padded to one shape; they need the same rank"
        )
    rank = ranks[0]
    if not -rank <= dim_to_pack < rank:
        raise IndexError(f"dim_to_pack={dim_to_pack} is invalid for media of {rank} dimensions")
    kept = dim_to_pack % rank
    largest = [max(sizes) for sizes in zip(*(segment.shape for segment in segments))]
    result = []
    for segment in segments:
        missing = [0 if d == kept else largest[d] - size for d, size in enumerate(segment.shape)]
        # `pad` takes the last dimension first, as (before, after).
        result.append(pad(segment, [amount for gap in reversed(missing) for amount in (0, gap)]))
    return result

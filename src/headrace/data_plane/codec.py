"""Padded to jagged and back: how columns look on the wire and in a batch. Pure functions, no I/O.

On the wire a per-token column is a jagged nested tensor whose rows have the declared lengths, a per-sample column
is dense (N,), an object column is a NumPy array of dtype object. Padding exists only where a reader asks for
it. Nested tensors that one call returns share their offsets if they share their lengths.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from tensordict import TensorDict

from headrace.data_plane.leaves import (
    Leaf,
    Ragged,
    read_leaves,
    unwrap_wire_stripped_payload,
    wire_tensordict,
)
from headrace.data_plane.object_codec import ObjectArray
from headrace.data_plane.schema import FIELDS, PER_TOKEN_FIELDS, FieldSpec, Kind, Layout
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.distributed.multimodal import PackedTensor
from headrace.distributed.offsets_reader import OffsetsReader
from headrace.distributed.ragged import (
    PadValue,
    RowLayout,
    gather_spans,
    is_nested,
    nested_from_ragged,
    offsets_from_lengths,
    row_lengths,
    shape_of,
    take_apart,
    wraps,
)
from headrace.errors import SchemaError

__all__ = [
    "RowPacker",
    "materialize",
    "maybe_pack_jagged",
    "pack_jagged_fields",
    "pack_per_token_field",
    "response_from_nested",
    "stack_or_nest",
    "to_nested_by_length",
    "unwrap_wire_stripped_payload",
]


def to_nested_by_length(padded: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Strip right padding: (N, S, ...) and lengths (N,) give jagged (N, j, ...), row i = padded[i, :lengths[i]].

    Lengths on a GPU cost one synchronisation. A row of length 0 stays, as an empty row.

    Raises:
        SchemaError: fewer than 2 dimensions, not one length per row, or a length below 0 or above S, with its row.
    """
    if padded.dim() < 2:
        raise SchemaError(f"padded tensor has shape {tuple(padded.shape)}; expected (N, S, ...)")
    checked = row_lengths(lengths)
    if len(checked) != padded.shape[0]:
        raise SchemaError(f"{len(checked)} lengths for {padded.shape[0]} rows; expected one per row")
    layout = RowLayout(checked, padded.shape[1])
    offsets = layout.offsets_on(padded.device)
    return nested_from_ragged(layout.strip(padded), offsets, host_offsets=layout.offsets)


def stack_or_nest(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack rows of equal shape to (N, ...); nest rows that differ in their first dimension to (N, j, ...).

    No rows give `torch.empty(0)`.

    Raises:
        SchemaError: rows that differ in dtype, device, number of dimensions or a later dimension.
    """
    if not tensors:
        return torch.empty(0)
    if all(row.shape == tensors[0].shape for row in tensors):
        _check_same_kind(tensors)
        return torch.stack(list(tensors))
    return nest(tensors)


def nest(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return rows (L_i, ...) as jagged (N, j, ...), also when their lengths are equal; at least one row.

    Raises:
        SchemaError: rows that differ in dtype, device or trailing dimensions, or have no dimension.
    """
    _check_same_kind(tensors)
    if not tensors[0].dim():
        raise SchemaError("rows are single numbers; expected rows of shape (L, ...)")
    lengths = torch.tensor([row.shape[0] for row in tensors], dtype=torch.int64)
    return nested_from_ragged(torch.cat(list(tensors)), offsets_from_lengths(lengths))


def _check_same_kind(tensors: Sequence[torch.Tensor]) -> None:
    # Attribute by attribute: a set of tuples takes three times as long.
    trailing = {row.shape[1:] for row in tensors} if tensors[0].dim() > 1 else set()
    kinds = {row.dtype for row in tensors}, {row.device for row in tensors}, {row.dim() for row in tensors}
    if all(len(kind) == 1 for kind in kinds) and len(trailing) <= 1:
        return
    first = tensors[0]
    for row, tensor in enumerate(tensors):
        same_form = tensor.dim() == first.dim() and tensor.shape[1:] == first.shape[1:]
        if not same_form or tensor.dtype != first.dtype or tensor.device != first.device:
            raise SchemaError(
                f"row {row} has shape {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}; row 0 has "
                f"{tuple(first.shape)}, {first.dtype} on {first.device}. "
                "Rows may differ in their first dimension only"
            )


def maybe_pack_jagged(val: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Pack `val` to jagged if its shape is (N, max(lengths), ...); otherwise return it as it is.

    A guess from the shape, for columns without a declaration.
    """
    checked = row_lengths(lengths)
    if val.is_nested or val.dim() < 2 or not len(checked):
        return val
    if tuple(val.shape[:2]) != (len(checked), int(checked.max())):
        return val
    return to_nested_by_length(val, checked)


def pack_per_token_field(val: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Pack `val` (N, S, ...), S >= max(lengths), to jagged; what lies beyond a row's length is cut.

    Falls back to `val` as it is when it has another N, fewer than 2 dimensions, or is too narrow. Code that
    writes to the store uses RowPacker, which refuses those.
    """
    checked = row_lengths(lengths)
    longest = int(checked.max()) if len(checked) else 0
    if val.is_nested or val.dim() < 2 or val.shape[0] != len(checked) or val.shape[1] < longest:
        return val
    return to_nested_by_length(val, checked)


def pack_jagged_fields(
    fields: Mapping[str, torch.Tensor | ObjectArray],
    *,
    lengths: torch.Tensor | None,
    token_aligned_fields: set[str] | None = None,
) -> TensorDict:
    """Pack columns for `put_samples`; the result has batch_size [N].

    Declared columns, and those in `token_aligned_fields`, go by their declaration (`RowPacker`); others by
    `maybe_pack_jagged`. Without `lengths` every tensor stays rectangular.

    Raises:
        TypeError: a value that is neither a tensor nor an object array, with its column.
        SchemaError: a declared column that does not fit its declaration or the lengths.
    """
    for name, value in fields.items():
        if not isinstance(value, torch.Tensor) and not (
            isinstance(value, np.ndarray) and value.dtype == object
        ):
            kind = f"array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
            raise TypeError(
                f"column '{name}' is of type {kind}; expected a tensor or an array of dtype object"
            )
    if lengths is None:
        return wire_dict(fields)
    packer = RowPacker(lengths, frozenset(token_aligned_fields or ()), fields.values())
    packed: dict[str, torch.Tensor | ObjectArray] = {}
    for name, value in fields.items():
        if isinstance(value, torch.Tensor) and not packer.is_declared(name):
            packed[name] = maybe_pack_jagged(value, packer.lengths)
        else:
            packed[name] = packer.pack(name, value)
    return wire_dict(packed, rows=packer.rows)


def wire_dict(columns: Mapping[str, torch.Tensor | ObjectArray], rows: int | None = None) -> TensorDict:
    """Return packed columns as one TensorDict, batch_size [N].

    Raises:
        SchemaError: columns that differ in their number of rows, with both numbers.
    """
    for name, column in columns.items():
        if column.ndim == 0:
            raise SchemaError(f"column '{name}' is a single number; expected one row per sample, (N, ...)")
        rows = column.shape[0] if rows is None else rows
        if column.shape[0] != rows:
            raise SchemaError(f"column '{name}' has {column.shape[0]} rows; expected {rows}, one per sample")
    return wire_tensordict(columns, rows or 0)


class RowPacker:
    """Packs the columns of one batch by their declarations; `lengths` are the tokens of each row.

    `per_token` names further columns to treat as per-token ones. The lengths are looked at once, and all
    per-token columns on one device share their offsets. Offsets of ragged `columns` on a device come to the CPU in
    one copy, with lengths that lie there; of columns not named here, in one each time they are others.
    """

    def __init__(
        self,
        lengths: torch.Tensor | Sequence[int],
        per_token: frozenset[str] = frozenset(),
        columns: Iterable[object] = (),
    ) -> None:
        self._read = OffsetsReader(columns)
        self._layout = RowLayout(lengths, read=self._read)
        self.lengths, self.rows = self._layout.lengths, self._layout.rows
        self._per_token = per_token

    def is_declared(self, name: str) -> bool:
        """Return whether `pack` holds a column to a declaration."""
        return name in FIELDS or name in self._per_token

    def pack(self, name: str, column: torch.Tensor | ObjectArray) -> torch.Tensor | ObjectArray:
        """Return a column in its wire form.

        Per token: padded (N, S, ...) with S >= every length is cut to jagged, jagged must have these lengths, and
        (N,) stays where the declaration allows one value per sample. Per sample: (N,) or (N, 1) gives (N,).
        Undeclared columns are returned as they are.

        Raises:
            SchemaError: naming the column, and the row and sizes where there is one.
        """
        shape = shape_of(column)
        if not shape or shape[0] != self.rows:
            got = f"{shape[0]} rows" if shape else "no rows"
            raise SchemaError(f"column '{name}' has {got}; expected {self.rows}, one per sample")
        spec = FIELDS.get(name)
        if name in self._per_token or (spec and spec.kind is Kind.PER_TOKEN):
            return self._pack_per_token(name, _as_tensor(name, column), spec)
        if spec is None:
            return column
        if spec.kind is Kind.PER_SAMPLE:
            return _pack_per_sample(name, _as_tensor(name, column))
        if isinstance(column, torch.Tensor):
            raise SchemaError(f"column '{name}' is declared as objects; got a tensor of {column.dtype}")
        return column

    def _pack_per_token(self, name: str, column: torch.Tensor, spec: FieldSpec | None) -> torch.Tensor:
        shape = shape_of(column)
        if spec and spec.broadcast and len(shape) == 1:
            return column
        check_trailing_dims(name, len(shape), spec)
        if is_nested(column):
            return self._pack_nested(name, column)
        width = shape[1]
        if width < self._layout.longest:
            row = int((self.lengths > width).nonzero()[0])
            raise SchemaError(
                f"column '{name}' is {width} tokens wide; row {row} has {int(self.lengths[row])} tokens. "
                "Give a per-token column one entry for every token of its row"
            )
        if width != self._layout.width:
            self._layout = self._layout.with_width(width)
        offsets = self._layout.offsets_on(column.device)
        return nested_from_ragged(self._layout.strip(column), offsets, host_offsets=self._layout.offsets)

    def _pack_nested(self, name: str, column: torch.Tensor) -> torch.Tensor:
        values, offsets, ragged_dim, device_offsets = take_apart(column, self._read)
        if ragged_dim != 1:
            raise SchemaError(f"column '{name}' is ragged in dimension {ragged_dim}; tokens are dimension 1")
        if not self._layout.has(offsets):
            got = offsets.diff()
            row = int((got != self.lengths).nonzero()[0])
            raise SchemaError(
                f"column '{name}' has {int(got[row])} tokens in row {row}; its sequence length is "
                f"{int(self.lengths[row])}"
            )
        self._layout.keep(offsets, device_offsets)
        shared = self._layout.offsets_on(values.device)
        if wraps(column, values, shared):
            return column
        return nested_from_ragged(values, shared, host_offsets=self._layout.offsets)


def check_trailing_dims(name: str, dims: int, spec: FieldSpec | None) -> None:
    """Hold a per-token column to its number of dimensions: rows, tokens, and the declared trailing ones."""
    wanted = 2 + spec.trailing_dims if spec else max(dims, 2)
    if dims != wanted:
        trailing = ", ..." if wanted > 2 else ""
        raise SchemaError(
            f"column '{name}' has {dims} dimensions; a per-token column of this name has {wanted}: (N, S{trailing})"
        )


def _as_tensor(name: str, column: torch.Tensor | ObjectArray) -> torch.Tensor:
    if not isinstance(column, torch.Tensor):
        raise SchemaError(f"column '{name}' is an array of objects; its declaration asks for a tensor")
    return column


def _pack_per_sample(name: str, column: torch.Tensor) -> torch.Tensor:
    if column.is_nested or column.dim() > 2 or (column.dim() == 2 and column.shape[1] != 1):
        raise SchemaError(
            f"column '{name}' has shape {tuple(column.shape)}; it is declared per sample: (N,) or (N, 1)"
        )
    return column.reshape(column.shape[0])


def response_from_nested(full: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Return the scores of each row's response: jagged (N, response_len), shifted left by one.

    `full` (N, prompt + response) holds in position i the score of token i + 1, so a response of the last R of
    L tokens has its scores in [L - R - 1, L - 1). `response_mask` (N, response_len) gives R by its row lengths.

    Example: a row [a, b, c, d] with a response of 2 tokens gives [b, c].

    Raises:
        SchemaError: another number of rows, or a response that leaves no token before it, with its row.
    """
    for name, column in (("full", full), ("response_mask", response_mask)):
        if not column.is_nested:
            raise SchemaError(
                f"{name} is dense, of shape {tuple(column.shape)}; expected jagged rows (to_nested_by_length)"
            )
    read = OffsetsReader((full, response_mask))
    values, offsets, *_ = take_apart(full, read)
    response_offsets = take_apart(response_mask, read).offsets
    lengths, responses = offsets.diff(), response_offsets.diff()
    if len(lengths) != len(responses):
        raise SchemaError(f"{len(responses)} response rows for {len(lengths)} rows; expected one per row")
    wrong = ((responses > 0) & (responses >= lengths)).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise SchemaError(
            f"row {row} has a response of {int(responses[row])} tokens in {int(lengths[row])}; a response needs "
            "at least one token before it, whose position scores its first token"
        )
    starts = torch.where(responses > 0, offsets[1:] - responses - 1, 0)
    return nested_from_ragged(gather_spans(values, starts, responses), response_offsets)


def materialize(
    td: TensorDict,
    layout: Layout = "padded",
    pad_value_dict: Mapping[str, PadValue] | None = None,
    pad_to_seqlen: int = 0,
) -> BatchedDataDict:
    """Turn a wire TensorDict into a batch.

    Padded: nested columns become (N, S, ...), S = max(longest row, `pad_to_seqlen`), filled with their entry in
    `pad_value_dict` or else 0; a dense declared per-token column is widened likewise; every other dense column
    keeps its shape. Jagged: nested columns stay nested. In both, declared per-sample columns are (N,), object
    columns arrays of dtype object, and media columns PackedTensors. Results may share memory with `td`.

    Raises:
        SchemaError: a pad value that the column's dtype cannot hold, an unknown layout, a column of no known form.
    """
    if layout not in ("padded", "jagged"):
        raise SchemaError(f"layout='{layout}'; expected 'padded' or 'jagged'")
    pad_values = pad_value_dict or {}
    padder = _Padder(pad_to_seqlen) if layout == "padded" else None
    return BatchedDataDict(
        {name: _materialize(name, leaf, padder, pad_values.get(name, 0)) for name, leaf in read_leaves(td)}
    )


def _materialize(
    name: str, leaf: Leaf | PackedTensor, padder: "_Padder | None", pad_value: PadValue
) -> torch.Tensor | ObjectArray | PackedTensor:
    if isinstance(leaf, PackedTensor):
        return leaf
    if isinstance(leaf, np.ndarray):
        media = len(leaf) > 0 and all(isinstance(value, PackedTensor) for value in leaf)
        return PackedTensor.concat(leaf.tolist()) if media else leaf
    spec = FIELDS.get(name)
    if spec and spec.kind is Kind.PER_SAMPLE:
        return _pack_per_sample(name, _rows_of_one(name, leaf) if isinstance(leaf, Ragged) else leaf)
    if padder is None:
        return leaf.nested() if isinstance(leaf, Ragged) else leaf
    try:
        if isinstance(leaf, Ragged):
            return padder.pad(leaf, pad_value)
        return padder.widen(leaf, pad_value) if name in PER_TOKEN_FIELDS and leaf.dim() > 1 else leaf
    except SchemaError as error:
        raise SchemaError(f"column '{name}': {error}") from error


def _rows_of_one(name: str, rows: Ragged) -> torch.Tensor:
    # Some backends carry (N,) as rows of length 1.
    wrong = (rows.offsets.diff() != 1).nonzero()
    if len(wrong):
        row = int(wrong[0])
        length = int(rows.offsets[row + 1] - rows.offsets[row])
        raise SchemaError(f"column '{name}' has {length} values in row {row}; it is declared per sample")
    return rows.values


class _Padder:
    """Pads columns to one target, looking at equal offsets once."""

    def __init__(self, pad_to_seqlen: int) -> None:
        self._target = pad_to_seqlen
        self._layouts: list[RowLayout] = []

    def pad(self, rows: Ragged, pad_value: PadValue) -> torch.Tensor:
        padded = self._layout(rows.offsets, rows.device_offsets).pad(rows.values, pad_value)
        return padded if rows.ragged_dim == 1 else padded.movedim(1, rows.ragged_dim)

    def widen(self, column: torch.Tensor, pad_value: PadValue) -> torch.Tensor:
        if column.shape[1] >= self._target:
            return column
        lengths = torch.full((column.shape[0],), column.shape[1], dtype=torch.int64)
        return self._layout(offsets_from_lengths(lengths)).pad(column.flatten(0, 1), pad_value)

    def _layout(self, offsets: torch.Tensor, device_offsets: torch.Tensor | None = None) -> RowLayout:
        layout = next((known for known in self._layouts if known.has(offsets)), None)
        if layout is None:
            tight = RowLayout(offsets.diff())
            layout = tight.with_width(max(tight.longest, self._target))
            self._layouts.append(layout)
        layout.keep(offsets, device_offsets)
        return layout

"""Columns on the wire: how they are told apart, held to their declarations, packed, and padded for a batch. No I/O.

A wire TensorDict holds an object array as NonTensorData around the array; `td[name]` returns that very array, while
`td[rows]` does not select from it. So it is only a carrier: select rows through the store or a BatchedDataDict.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch.nested._internal.nested_tensor import NestedTensor

from headrace.data_plane.object_codec import ObjectArray
from headrace.data_plane.schema import FIELDS, PER_TOKEN_FIELDS, Kind, Layout
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.distributed.columns import object_array
from headrace.distributed.multimodal import PackedTensor
from headrace.distributed.offsets_reader import OffsetsReader
from headrace.distributed.ragged import (
    RowLayout,
    nested_from_ragged,
    no_bytes,
    offsets_from_lengths,
    ragged_from_nested,
    take_apart,
)
from headrace.distributed.ragged_cpu import PadValue
from headrace.errors import SchemaError

Leaf = torch.Tensor | ObjectArray
"""One column told apart: dense (N, ...), jagged rows, or objects (N,)."""


_EXPECTED = "expected a dense or jagged tensor of plain numbers (to_dense() and dequantize() give one)"


def read_wire(wire: TensorDict) -> dict[str, Leaf | PackedTensor]:
    """Return each column of a wire TensorDict (a dict will do) as its leaf.

    Media without rows are a PackedTensor, since no row says what the column is.
    """
    rows = wire.batch_size[0] if isinstance(wire, TensorDictBase) and wire.batch_size else 0
    columns = {str(name): wire.get(name) for name in list(wire.keys())}
    return {
        name: column
        if isinstance(column, torch.Tensor) and (isinstance(column, NestedTensor) or not column.is_nested)
        else _read_other(name, column, rows)
        for name, column in columns.items()
    }


def _read_other(name: str, value: Any, rows: int) -> Leaf | PackedTensor:
    """Return a column of objects, or nested rows of torch's older layout as jagged ones.

    `rows` is how many a NonTensorData without batch dimensions stands for.
    """
    if isinstance(value, torch.Tensor):
        return nested_from_ragged(*ragged_from_nested(value))
    if isinstance(value, NonTensorData):
        rows = value.batch_size[0] if value.batch_dims else rows
        value = value.data
        if isinstance(value, PackedTensor) and not len(value) and not rows:
            return value
        if not isinstance(value, np.ndarray) or not value.ndim or rows not in (0, len(value)):
            return object_array([value] * rows)
    if isinstance(value, np.ndarray):
        return value if value.dtype == object and value.ndim == 1 else object_array(value.tolist())
    is_bare = isinstance(value, TensorDictBase) and not value.keys() and value.batch_dims
    if is_bare or isinstance(value, NonTensorStack | LazyStackedTensorDict):
        value = value.unbind(0)
    if isinstance(value, list | tuple):
        return object_array([unwrap_wire_stripped_payload(item) for item in value])
    raise SchemaError(
        f"column '{name}' is a {type(value).__name__}; expected a tensor, a nested tensor or an object array"
    )


def wire_tensordict(columns: Mapping[str, Leaf | PackedTensor], rows: int) -> TensorDict:
    """Return columns that are known to have `rows` rows as a TensorDict, batch_size [rows]."""
    wire: dict[str, Any] = dict(columns)
    if not all(isinstance(column, torch.Tensor) for column in wire.values()):
        return TensorDict(wire, batch_size=[rows])
    # The public constructor asks every jagged tensor for its shape: 30 us each.
    made: TensorDict = TensorDict._new_unsafe(wire, batch_size=torch.Size([rows]))
    return made


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


def leaf_rows(leaf: Leaf) -> int:
    """Return how many rows a column has, which may be a nested tensor; -1: it is a single number."""
    if isinstance(leaf, NestedTensor):
        return int(leaf._size[0])  # `shape` takes sixty times as long
    if isinstance(leaf, torch.Tensor) and leaf.is_nested:
        return leaf.size(0)
    return leaf.shape[0] if leaf.ndim else -1


def check_declared(name: str, leaf: Leaf, per_token: Collection[str] = ()) -> None:
    """Hold a column to its declaration; an undeclared one passes, but one named in `per_token` needs tokens."""
    spec = FIELDS.get(name)
    if isinstance(leaf, np.ndarray):
        if spec is None or spec.kind is Kind.OBJECT:
            return
        raise SchemaError(f"column '{name}' is an array of objects; it is declared as {spec.kind.value}")
    jagged: Any = leaf
    values, ragged_dim = (jagged._values, jagged._ragged_idx) if isinstance(leaf, NestedTensor) else (leaf, 0)
    if values.layout is not torch.strided or values.is_meta or values.is_quantized:
        raise SchemaError(f"column '{name}' is {no_bytes(values)}; {_EXPECTED}")
    if spec is None and name not in per_token:
        return
    dims = values.dim() + bool(ragged_dim)
    if spec is not None and values.dtype not in spec.accepts:
        raise spec.refusal(values.dtype)
    if spec is not None and spec.kind is Kind.PER_SAMPLE:
        if ragged_dim or dims > 2 or (dims == 2 and values.shape[1] != 1):
            shape = "ragged rows" if ragged_dim else f"shape {tuple(values.shape)}"
            raise SchemaError(f"column '{name}' has {shape}; it is declared per sample: (N,) or (N, 1)")
        return
    if spec is not None and spec.broadcast and dims == 1:
        return
    wanted = max(dims, 2) if spec is None else 2 + spec.trailing_dims
    if dims != wanted:
        raise SchemaError(
            f"column '{name}' has {dims} dimensions; a per-token column of this name has {wanted}: "
            f"(N, S{', ...' if wanted > 2 else ''})"
        )
    if ragged_dim > 1:
        raise SchemaError(f"column '{name}' is ragged in dimension {ragged_dim}; tokens are dimension 1")
    if spec is None or not spec.trailing_dims:
        return
    token = tuple(values.shape[-spec.trailing_dims :])
    if 0 in token and len(values):
        raise SchemaError(f"column '{name}' has {token} values per token; expected 1 or more along each axis")


def stack_or_nest(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack rows of equal shape to (N, ...); nest rows that differ in their first dimension to (N, j, ...).

    No rows give `torch.empty(0)`.

    Raises:
        SchemaError: rows that differ in dtype, device, number of dimensions or a later dimension.
    """
    if not tensors:
        return torch.empty(0)
    shape = tensors[0].shape
    if any(row.shape != shape for row in tensors):
        return nest(tensors)
    values, _ = joined_rows(tensors if shape else [row.reshape(1) for row in tensors])
    return values.view(len(tensors), *shape)


def nest(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return rows (L_i, ...) as jagged (N, j, ...), also when their lengths are equal; at least one row."""
    return nested_from_ragged(*joined_rows(tensors))


def joined_rows(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values and offsets of what `nest` gives."""
    first = tensors[0]
    if first.layout is not torch.strided or first.is_meta or first.is_quantized:
        raise SchemaError(f"a row is {no_bytes(first)}; {_EXPECTED}")
    # Attribute by attribute: a set of tuples takes three times as long.
    kinds = {row.dtype for row in tensors}, {row.device for row in tensors}, {row.dim() for row in tensors}
    is_one = all(len(kind) == 1 for kind in kinds)
    if not is_one or (first.dim() > 1 and len({row.shape[1:] for row in tensors}) > 1):
        form = first.shape[1:], first.dtype, first.device, first.dim()
        forms = ((row.shape[1:], row.dtype, row.device, row.dim()) for row in tensors)
        row = next(number for number, other in enumerate(forms) if other != form)
        odd = tensors[row]
        raise SchemaError(
            f"row {row} has shape {tuple(odd.shape)}, {odd.dtype} on {odd.device}; row 0 has {tuple(first.shape)}, "
            f"{first.dtype} on {first.device}. Rows may differ in their first dimension only"
        )
    if not first.dim():
        raise SchemaError("rows are single numbers; expected rows of shape (L, ...)")
    lengths = torch.tensor([row.shape[0] for row in tensors], dtype=torch.int64)
    try:
        return torch.cat(list(tensors)), offsets_from_lengths(lengths)
    except RuntimeError as error:
        # Asked only here: to ask every row its layout takes a tenth of the time.
        if (fault := next(filter(None, map(no_bytes, tensors)), None)) is None:
            raise
        raise SchemaError(f"a row is {fault}; {_EXPECTED}") from error


class RowPacker:
    """Packs the columns of one batch by their declarations; `lengths` are the tokens of each row.

    `per_token` names further columns to treat as per-token ones. The lengths are looked at once, and all
    per-token columns on one device share their offsets. Offsets of ragged `columns` on a device come to the CPU in
    one copy, with lengths that lie there; of columns not named here, in one each time they are others.
    """

    def __init__(
        self,
        lengths: torch.Tensor | Sequence[int],
        per_token: Iterable[str] = (),
        columns: Iterable[object] = (),
    ) -> None:
        self.read = OffsetsReader(columns)
        self._layout = RowLayout(lengths, read=self.read)
        self.lengths, self.rows = self._layout.lengths, self._layout.rows
        self._per_token = frozenset(per_token)

    def pack(self, name: str, column: Leaf) -> Leaf:
        """Return a column, which may be a nested tensor, as it goes on the wire.

        Per token: padded (N, S, ...) with S >= every length is cut to ragged, ragged must have these lengths, and
        (N,) stays where the declaration allows one value per sample. Per sample: (N,) or (N, 1) gives (N,).
        Undeclared columns are returned as they are.

        Raises:
            SchemaError: naming the column, and the row and sizes where there is one.
        """
        rows = leaf_rows(column)
        if rows != self.rows:
            got = "is a single number" if rows < 0 else f"has {rows} rows"
            raise SchemaError(f"column '{name}' {got}; expected {self.rows} rows, one per sample")
        if name not in FIELDS and name not in self._per_token:
            return column
        leaf = column
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, NestedTensor) and leaf.is_nested:
            leaf = nested_from_ragged(*ragged_from_nested(leaf))
        check_declared(name, leaf, self._per_token)
        if isinstance(leaf, np.ndarray):
            return leaf
        if name in PER_TOKEN_FIELDS or name in self._per_token:
            return self._pack_per_token(name, leaf)
        return leaf.reshape(self.rows)

    def _pack_per_token(self, name: str, leaf: torch.Tensor) -> torch.Tensor:
        layout = self._layout
        if isinstance(leaf, NestedTensor):
            values, offsets, _, on_device = take_apart(leaf, self.read)
            if not layout.fits(offsets, on_device):
                row = int((offsets.diff() != self.lengths).nonzero()[0])
                raise SchemaError(
                    f"column '{name}' has {int(offsets.diff()[row])} tokens in row {row}; its sequence length is "
                    f"{int(self.lengths[row])}"
                )
            # Another nested tensor around the same would take as long as all that is done here.
            if leaf._values is values and leaf._offsets is layout.offsets_on(values.device):
                return leaf
        elif leaf.dim() == 1:
            return leaf
        else:
            width = leaf.shape[1]
            if width < layout.longest:
                row = int((self.lengths > width).nonzero()[0])
                raise SchemaError(
                    f"column '{name}' is {width} tokens wide; row {row} has {int(self.lengths[row])} tokens. "
                    "Give a per-token column one entry for every token of its row"
                )
            if width != layout.width:
                layout = self._layout = layout.with_width(width)
            values = layout.strip(leaf)
            layout.fits(layout.offsets)  # they are in use: those of a later column do not take their place
        return nested_from_ragged(values, layout.offsets_on(values.device), host_offsets=layout.offsets)


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
    batch: dict[str, Any] = {}
    layouts: list[RowLayout] = []
    leaves = read_wire(td)
    read = OffsetsReader(leaves.values())
    for name, leaf in leaves.items():
        batch[name] = leaf
        if isinstance(leaf, np.ndarray):
            if len(leaf) and all(isinstance(value, PackedTensor) for value in leaf):
                batch[name] = PackedTensor.concat(leaf.tolist())
        elif isinstance(leaf, PackedTensor):
            continue
        elif name in FIELDS and FIELDS[name].kind is Kind.PER_SAMPLE:
            batch[name] = _one_per_sample(name, leaf, read)
        elif layout == "padded":
            pad_value = (pad_value_dict or {}).get(name, 0)
            try:
                batch[name] = _pad(name, leaf, pad_value, pad_to_seqlen, layouts, read)
            except SchemaError as error:
                raise SchemaError(f"column '{name}': {error}") from error
    return BatchedDataDict(batch)


def _one_per_sample(name: str, leaf: torch.Tensor, read: OffsetsReader) -> torch.Tensor:
    if not isinstance(leaf, NestedTensor):
        check_declared(name, leaf)
        return leaf.reshape(len(leaf))
    # Some backends carry (N,) as rows of length 1.
    values, offsets, *_ = take_apart(leaf, read)
    lengths = offsets.diff()
    wrong = (lengths != 1).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise SchemaError(
            f"column '{name}' has {int(lengths[row])} values in row {row}; it is declared per sample"
        )
    return values.reshape(len(lengths))


def _pad(
    name: str,
    leaf: torch.Tensor,
    pad_value: PadValue,
    target: int,
    layouts: list[RowLayout],
    read: OffsetsReader,
) -> torch.Tensor:
    """Pad a column to `target` at least; equal offsets are looked at once, in `layouts`."""
    on_device: torch.Tensor | None = None
    if isinstance(leaf, NestedTensor):
        values, offsets, ragged_dim, on_device = take_apart(leaf, read)
    elif name not in PER_TOKEN_FIELDS or leaf.dim() < 2 or leaf.shape[1] >= target:
        return leaf
    else:
        lengths = torch.full((leaf.shape[0],), leaf.shape[1], dtype=torch.int64)
        values, offsets, ragged_dim = leaf.flatten(0, 1), offsets_from_lengths(lengths), 1
    layout = next((known for known in layouts if known.fits(offsets, on_device)), None)
    if layout is None:
        lengths = offsets.diff()
        layout = RowLayout(lengths, max(int(lengths.numpy().max(initial=0)), target))
        layout.fits(offsets, on_device)
        layouts.append(layout)
    padded = layout.pad(values, pad_value)
    return padded if ragged_dim == 1 else padded.movedim(1, ragged_dim)

"""Padded to jagged and back, for whole columns. Pure functions, no I/O.

On the wire a per-token column is a jagged nested tensor whose rows have the declared lengths, a per-sample column
is dense (N,), an object column is a NumPy array of dtype object. Padding exists only where a reader asks for
it. Nested tensors that one call returns share their offsets if they share their lengths.
"""

from collections.abc import Mapping

import numpy as np
import torch
from tensordict import TensorDict

from headrace.data_plane.object_codec import ObjectArray
from headrace.data_plane.schema import FIELDS
from headrace.data_plane.wire import (
    Leaf,
    RowPacker,
    materialize,
    nest,
    stack_or_nest,
    unwrap_wire_stripped_payload,
    wire_tensordict,
)
from headrace.distributed.columns import rows_of
from headrace.distributed.offsets_reader import OffsetsReader
from headrace.distributed.ragged import RowLayout, gather_spans, nested_from_ragged, row_lengths, take_apart
from headrace.errors import SchemaError

__all__ = [
    "RowPacker",
    "materialize",
    "maybe_pack_jagged",
    "nest",
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


def maybe_pack_jagged(val: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Pack `val` to jagged if its shape is (N, max(lengths), ...); otherwise return it as it is.

    A guess from the shape, for columns without a declaration.
    """
    checked = row_lengths(lengths)
    if val.is_nested or val.dim() < 2 or not len(checked) or val.shape[1] != int(checked.max()):
        return val
    return pack_per_token_field(val, checked)


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
        SchemaError: a declared column that does not fit its declaration or the lengths, or columns that differ in
            their number of rows.
    """
    for name, value in fields.items():
        if isinstance(value, torch.Tensor) or (isinstance(value, np.ndarray) and value.dtype == object):
            continue
        kind = f"array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        raise TypeError(f"column '{name}' is of type {kind}; expected a tensor or an array of dtype object")
    aligned = token_aligned_fields or set()
    packer = None if lengths is None else RowPacker(lengths, aligned, fields.values())
    rows = next((rows_of(name, value) for name, value in fields.items()), 0)
    packed: dict[str, Leaf] = {}
    for name, value in fields.items():
        if packer is not None:
            packed[name] = packer.pack(name, value)
            if isinstance(value, torch.Tensor) and name not in FIELDS and name not in aligned:
                packed[name] = maybe_pack_jagged(value, packer.lengths)
        elif rows_of(name, value) == rows:
            packed[name] = value
        else:
            raise SchemaError(f"column '{name}' has {value.shape[0]} rows; expected {rows}, one per sample")
    return wire_tensordict(packed, rows if packer is None else packer.rows)


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
    _, response_offsets, *_ = take_apart(response_mask, read)
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

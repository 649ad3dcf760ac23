"""Columns in and out of the store, held to their declarations on the way."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from headrace.data_plane.interfaces import DataPlaneClient, KVBatchMeta
from headrace.data_plane.object_codec import checked_tags
from headrace.data_plane.routes_codec import RouteShape, check_routes, most_experts
from headrace.data_plane.schema import (
    CLAIM,
    FIELDS,
    GLOBAL_FORWARD_PAD_SEQLEN,
    INPUT_LENGTHS,
    PAD_TO_MULTIPLE,
    PER_TOKEN_FIELDS,
    ROUTED_EXPERTS_FIELD,
    Kind,
    Layout,
)
from headrace.data_plane.store.columns import RowFacts
from headrace.data_plane.wire import (
    Leaf,
    RowPacker,
    joined_rows,
    leaf_rows,
    materialize,
    stack_or_nest,
    wire_tensordict,
)
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.distributed.columns import object_array
from headrace.distributed.multimodal import PackedTensor
from headrace.distributed.ragged import is_nested, nested_from_ragged, ragged_from_nested, wants_grad
from headrace.distributed.ragged_cpu import PadValue
from headrace.errors import SchemaError
from headrace.utils.arguments import texts, whole_number
from headrace.utils.rounding import round_up

_NUMERIC = "biufc"
"""NumPy kinds that become tensors: bool, integers, floats, complex."""

__all__ = ["kv_first_write", "pack_columns", "read_columns", "round_up", "write_columns"]


def read_columns(
    dp_client: DataPlaneClient,
    meta: KVBatchMeta,
    select_fields: Sequence[str],
    *,
    layout: Layout = "padded",
    pad_value_dict: Mapping[str, PadValue] | None = None,
) -> BatchedDataDict:
    """Read columns of the rows of `meta`, in their order, repeats included.

    Padded columns are as wide as `meta.extra_info["global_forward_pad_seqlen"]`, if that is set, and at least
    as wide as the longest row; see `codec.materialize`.

    Raises:
        SampleNotFound: unknown ids, or columns that a row does not have.
    """
    wire = dp_client.get_samples(meta.sample_ids, meta.partition_id, select_fields)
    target = int(meta.extra_info.get(GLOBAL_FORWARD_PAD_SEQLEN, 0))
    return materialize(wire, layout=layout, pad_value_dict=pad_value_dict, pad_to_seqlen=target)


def write_columns(
    dp_client: DataPlaneClient,
    meta: KVBatchMeta,
    fields: Mapping[str, Any],
    *,
    route_shape: RouteShape | None = None,
) -> KVBatchMeta:
    """Write columns of the rows of `meta` in one put, add them to `meta.fields` (if known), and return the meta.

    What a column may be is said at `pack_columns`; `route_shape` at `kv_first_write`. Rows of a claim are written
    under it.

    Raises:
        ClaimExpired: the claim of `meta` is no longer in force.
        SchemaError: a column that does not fit its declaration or the meta's sequence lengths, or routes that no
            router can have chosen.
    """
    wire = pack_columns(fields, lengths=meta.sequence_lengths, rows=meta.size)
    if ROUTED_EXPERTS_FIELD in fields:
        _check_route_ids(wire, meta, route_shape)
    claim = meta.extra_info.get(CLAIM)
    dp_client.write_samples(meta.sample_ids, meta.partition_id, wire, claim=claim)
    meta.add_fields(list(wire.keys()))
    return meta


def kv_first_write(
    final_batch_cpu: Mapping[str, Any],
    *,
    sample_ids: Sequence[str],
    dp_client: DataPlaneClient,
    partition_id: str,
    extra_info: Mapping[str, Any] | None = None,
    task_name: str = "train",
    pad_to_multiple: int = 1,
    tags: Sequence[Mapping[str, Any]] | None = None,
    route_shape: RouteShape | None = None,
    routes_checked: bool = False,
    producer: str | None = None,
    once: bool = False,
) -> KVBatchMeta:
    """Write a rollout batch in one put and return the meta that names its rows.

    `final_batch_cpu` holds `input_lengths`, and per-token columns padded, jagged, or as lists of rows (see
    `pack_columns`). The meta has the lengths, all columns written, the tags, and a copy of `extra_info` to which a
    `pad_to_multiple` above 1 is added.

    `route_shape` is what the model's routes look like. Only with it are ids held to the number of experts, and a row
    refused that has 255 beside an id in uint8 (65535 in uint16), which is the last of 256 (65536) experts otherwise.
    `routes_checked`: `check_routes` has passed the routes, which takes longer than to write them. For `producer` and
    `once` see `DataPlaneClient.put_samples`; if the rows were put before, the meta has none.

    Raises:
        SchemaError: no `input_lengths`, one text in place of ids, a number of ids other than the rows, a column that
            does not fit, routes that no router can have chosen, or a `pad_to_multiple` below 1.
    """
    if INPUT_LENGTHS not in final_batch_cpu:
        raise SchemaError(f"the batch has no column '{INPUT_LENGTHS}'; it says how many tokens each row has")
    info = dict(extra_info or {})
    multiple = whole_number(PAD_TO_MULTIPLE, pad_to_multiple, 1)
    if multiple > 1:
        info[PAD_TO_MULTIPLE] = multiple
    lengths = _as_leaf(INPUT_LENGTHS, final_batch_cpu[INPUT_LENGTHS])
    if not isinstance(lengths, torch.Tensor):
        raise SchemaError(f"column '{INPUT_LENGTHS}' holds objects; expected one integer per row")
    ids = texts("sample_ids", sample_ids)
    wire = pack_columns(final_batch_cpu, lengths=lengths.reshape(-1), rows=len(ids))
    own_tags = None if tags is None else checked_tags(tags, len(ids))
    facts = RowFacts(ids, lengths.reshape(-1).tolist(), own_tags)
    meta = facts.meta(partition_id, task_name, list(wire.keys()), info)
    if ROUTED_EXPERTS_FIELD in final_batch_cpu and not routes_checked:
        _check_route_ids(wire, meta, route_shape)
    said: dict[str, Any] = {
        **({"producer": producer} if producer else {}),
        **({"once": True} if once else {}),
    }
    put = dp_client.put_samples(ids, partition_id, fields=wire, tags=own_tags, **said)
    return meta.subset([]) if once and not put.size else meta


def _check_route_ids(wire: TensorDict, meta: KVBatchMeta, shape: RouteShape | None) -> None:
    """Refuse routes among the columns packed for the rows of `meta` that no router can have chosen.

    Without `shape`, layers and k are those of the column, and there may be as many experts as its dtype has room for.
    Then a row that is partly missing passes in an unsigned dtype: [255, 3] in uint8 is a choice of 256 experts.
    """
    values, _, _ = ragged_from_nested(wire.get(ROUTED_EXPERTS_FIELD))
    if shape is None:
        layers, top_k = values.shape[1:]
        shape = RouteShape(layers, top_k, most_experts(values.dtype, top_k))
    check_routes(values, **asdict(shape), lengths=meta.sequence_lengths, sample_ids=meta.sample_ids)


def pack_columns(
    fields: Mapping[str, Any], *, lengths: torch.Tensor | Sequence[int] | None, rows: int | None = None
) -> TensorDict:
    """Turn columns into their wire form: what every write to the store goes through.

    A column is a tensor (dense or nested), a NumPy array, a list with one value per row, or a PackedTensor.
    Numeric arrays become tensors; a list of tensors or numeric arrays becomes jagged rows, also when their
    lengths happen to be equal; a list of numbers or of lists of numbers becomes a tensor where the column is
    declared as one. Other lists become object columns. Then declared columns are packed by their declaration
    (`codec.RowPacker`), undeclared ones stay as they are: no guess is made from a shape.

    Args:
        fields: Column name to column.
        lengths: Tokens per row; may be None if there is no declared per-token column.
        rows: Rows that every column must have; None: as many as there are lengths.

    Raises:
        SchemaError: a column that does not fit, with its name, and the row, sizes or dtype.
    """
    per_token = next((name for name in fields if name in PER_TOKEN_FIELDS), None)
    if lengths is None and per_token is not None:
        raise SchemaError(
            f"column '{per_token}' is per token, and the meta has no sequence_lengths to pack it by"
        )
    if lengths is not None and rows is not None and len(lengths) != rows:
        raise SchemaError(f"{len(lengths)} sequence lengths for {rows} sample ids; expected one per sample")
    columns = {name: _as_leaf(name, value) for name, value in fields.items()}
    if lengths is None and rows is None:
        rows = max(leaf_rows(next(iter(columns.values()))), 0) if columns else 0
    packer = RowPacker([0] * (rows or 0) if lengths is None else lengths, columns=columns.values())
    return wire_tensordict({name: packer.pack(name, leaf) for name, leaf in columns.items()}, packer.rows)


def _as_leaf(name: str, value: Any) -> Leaf:
    """Return a column as a tensor, which may be nested, as ragged rows or an object array.

    Raises:
        SchemaError: a value that is no column, or rows that do not fit together.
    """
    if isinstance(value, torch.Tensor):
        return value.detach() if wants_grad(value) else value
    if isinstance(value, PackedTensor):
        return object_array([value.slice([row]) for row in range(len(value))])
    if isinstance(value, np.ndarray):
        if value.dtype.kind in _NUMERIC:
            return _from_array(name, value)
        return value if value.dtype == object and value.ndim == 1 else object_array(value.tolist())
    if isinstance(value, list | tuple):
        return _from_rows(name, value)
    raise SchemaError(
        f"column '{name}' is a {type(value).__name__}; expected a tensor, a NumPy array, a list with one value "
        "per row, or a PackedTensor"
    )


def _from_array(name: str, array: np.ndarray[Any, Any]) -> torch.Tensor:
    if isinstance(array, np.ma.MaskedArray):
        raise SchemaError(
            f"column '{name}': a masked array; expected one without a mask, as array.filled(0) gives"
        )
    native = array.dtype.newbyteorder("=")
    try:
        return torch.from_numpy(np.require(array, dtype=native, requirements=("C", "W")))
    except TypeError as error:
        raise SchemaError(f"column '{name}': torch has no dtype for arrays of {array.dtype}") from error


def _from_rows(name: str, rows: Sequence[Any]) -> Leaf:
    spec = FIELDS.get(name)
    dtype = spec.dtype if spec else None
    # Asked of the types first, which is much faster than asking `_is_numeric` of each row.
    are_tensors = set(map(type, rows)) == {torch.Tensor} and not any(row.is_nested for row in rows)
    if are_tensors and (dtype is not None or spec is None):
        tensors = rows
    elif spec is not None and dtype is not None:
        if not rows:
            return torch.empty((0,) if spec.kind is Kind.PER_SAMPLE else (0, 0), dtype=dtype)
        tensors = [_declared_row(name, row, value, dtype) for row, value in enumerate(rows)]
    elif spec is None and rows and all(_is_numeric(value) for value in rows):
        tensors = [_as_row(name, value) for value in rows]
    else:
        return object_array(rows)
    try:
        if not any(row.dim() for row in tensors):
            return stack_or_nest(tensors).detach()
        values, offsets = joined_rows(tensors)
        return nested_from_ragged(values.detach(), offsets)
    except SchemaError as error:
        raise SchemaError(f"column '{name}': {error}") from error


def _is_numeric(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return not is_nested(value)
    return isinstance(value, np.ndarray) and value.dtype.kind in _NUMERIC


def _as_row(name: str, value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else _from_array(name, value)


def _declared_row(name: str, row: int, value: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return one row of a declared column; Python numbers take its dtype if that keeps their values.

    A dtype of floating point has the nearest values, for numbers up to its largest.
    """
    if _is_numeric(value):
        return _as_row(name, value)
    try:
        plain = torch.tensor(value, dtype=torch.float64 if dtype.is_floating_point else None)
        # By itself torch takes floats in single precision, which has other whole numbers near 2**24.
        exact = torch.tensor(value, dtype=torch.float64) if plain.dtype == torch.float32 else plain
    except (TypeError, ValueError, RuntimeError) as error:
        raise SchemaError(f"column '{name}', row {row}: {error}; expected numbers") from error
    cast = exact.to(dtype)
    if not _keeps(cast, exact):
        raise SchemaError(f"column '{name}', row {row}: values of {plain.dtype} that {dtype} cannot hold")
    return cast


def _keeps(cast: torch.Tensor, exact: torch.Tensor) -> bool:
    if not cast.is_floating_point():
        return bool((cast.to(exact.dtype) == exact).all())
    largest, count = torch.finfo(cast.dtype).max, exact.numel()
    # Mostly the ends say it, which is fast; with a NaN they do not.
    ends = (exact,) if count == 1 else (exact.max(), exact.min()) if count else ()
    if all(abs(end.item()) <= largest for end in ends):
        return True
    return not bool(((exact.abs() > largest) & exact.isfinite()).any())

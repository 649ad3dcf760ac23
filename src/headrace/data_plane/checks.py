"""What is checked before anything is written: by every adapter's put, and by those who write columns of a meta."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from headrace.data_plane.codec import check_trailing_dims
from headrace.data_plane.interfaces import KVBatchMeta
from headrace.data_plane.leaves import Leaf, Ragged, leaves
from headrace.data_plane.object_codec import copied_tag
from headrace.data_plane.routes_codec import RouteShape, check_routes, most_experts
from headrace.data_plane.schema import (
    FIELDS,
    INPUT_LENGTHS,
    ROUTED_EXPERTS_FIELD,
    FieldSpec,
    Kind,
    check_dtype,
)
from headrace.distributed.ragged import ragged_from_nested
from headrace.errors import SchemaError
from headrace.utils.arguments import names_list, texts

_SHOWN = 8
_LONGEST = 2**31 - 1


def shown(names: Sequence[str]) -> str:
    """Return names for a message, the first few of many: "'a', 'b' and 3 more"."""
    text = ", ".join(f"'{name}'" for name in names[:_SHOWN])
    return text if len(names) <= _SHOWN else f"{text} and {len(names) - _SHOWN} more"


def id_list(sample_ids: Sequence[str]) -> list[str]:
    """Return ids as a list of texts.

    Raises:
        SchemaError: one text in place of a list.
    """
    return texts("sample_ids", sample_ids)


def column_names(select_fields: Sequence[str]) -> list[str]:
    """Return the columns of a request as a list of texts, each once.

    Raises:
        SchemaError: one text in place of a list.
    """
    return list(dict.fromkeys(texts("select_fields", select_fields)))


def checked_ids(sample_ids: Sequence[str]) -> list[str]:
    """Return the ids of a put.

    Raises:
        SchemaError: an id that appears twice; all such are named.
    """
    ids = id_list(sample_ids)
    if len(set(ids)) != len(ids):
        repeated = [sample_id for sample_id, count in Counter(ids).items() if count > 1]
        raise SchemaError(f"a put needs every sample id once; repeated: {shown(repeated)}")
    return ids


def checked_tags(tags: Sequence[Mapping[str, Any]] | None, rows: int) -> list[dict[str, Any]] | None:
    """Return copies of the tags of a put.

    Raises:
        SchemaError: not one mapping per row, or a value that cannot be stored.
    """
    if tags is None:
        return None
    names_list("tags", tags)
    if len(tags) != rows:
        raise SchemaError(f"{len(tags)} tags for {rows} sample ids; give one per sample")
    other = next((tag for tag in tags if not isinstance(tag, Mapping)), None)
    if other is not None:
        raise SchemaError(
            f"tags hold a {type(other).__name__}; expected a mapping of names to values per sample"
        )
    return copied_tags(tags)


def copied_tags(tags: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [copied_tag(tag, row) for row, tag in enumerate(tags)]


def checked_leaves(fields: TensorDict | None, rows: int) -> dict[str, Leaf]:
    """Return the columns of a put by name.

    Raises:
        SchemaError: another number of rows, or a declared column of another kind, dtype or number of dimensions,
            or without values for its tokens, or whose rows do not have the lengths that the same put declares;
            lengths that no row can have.
    """
    columns = dict(leaves(fields)) if fields is not None else {}
    lengths = _declared_lengths(columns.get(INPUT_LENGTHS))
    for name, leaf in columns.items():
        count = (
            leaf.offsets.shape[0] - 1 if isinstance(leaf, Ragged) else (leaf.shape[0] if leaf.ndim else -1)
        )
        if count != rows:
            got = "is a single number" if count < 0 else f"has {count} rows"
            raise SchemaError(f"column '{name}' {got}; expected {rows} rows, one per sample id")
        _check_declared(name, leaf, lengths)
    return columns


def _declared_lengths(leaf: Leaf | None) -> torch.Tensor | None:
    """Return the lengths that a put declares, one per row; None if it has no such column."""
    if not isinstance(leaf, torch.Tensor):
        return None
    check_dtype(INPUT_LENGTHS, leaf.dtype)
    lengths = leaf.reshape(-1).cpu().long()
    wrong = (lengths < 0) | (lengths > _LONGEST)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise SchemaError(
            f"column '{INPUT_LENGTHS}' is {int(lengths[row])} in row {row}; expected tokens, 0 to {_LONGEST}"
        )
    return lengths


def _check_declared(name: str, leaf: Leaf, lengths: torch.Tensor | None) -> None:
    spec = FIELDS.get(name)
    if spec is None:
        return
    if isinstance(leaf, np.ndarray):
        if spec.kind is not Kind.OBJECT:
            raise SchemaError(f"column '{name}' is an array of objects; it is declared as {spec.kind.value}")
        return
    values = leaf.values if isinstance(leaf, Ragged) else leaf
    check_dtype(name, values.dtype)
    if spec.kind is Kind.PER_SAMPLE and (
        isinstance(leaf, Ragged) or values[:1].numel() != min(len(values), 1)
    ):
        raise SchemaError(f"column '{name}' is declared per sample; expected one number per row")
    if spec.kind is not Kind.PER_TOKEN or (spec.broadcast and values is leaf and values.dim() == 1):
        return
    _check_per_token(name, leaf, values, spec)
    if lengths is not None:
        _check_lengths(name, leaf, lengths)


def _check_per_token(name: str, leaf: Leaf, values: torch.Tensor, spec: FieldSpec) -> None:
    check_trailing_dims(name, values.dim() + (1 if isinstance(leaf, Ragged) else 0), spec)
    if isinstance(leaf, Ragged) and leaf.ragged_dim != 1:
        raise SchemaError(f"column '{name}' is ragged in dimension {leaf.ragged_dim}; tokens are dimension 1")
    token = tuple(values.shape[values.dim() - spec.trailing_dims :])
    if 0 in token and len(values):
        raise SchemaError(f"column '{name}' has {token} values per token; expected 1 or more along each axis")


def check_same_axes(
    name: str, got: Sequence[int], held: Sequence[int], ids: Sequence[str], where: str
) -> None:
    """Hold the axes after the tokens of a declared column to those of the samples that a partition holds.

    `got` and `held` are sizes of which the last are those axes.

    Raises:
        SchemaError: other sizes, with both, the samples `ids` and the partition's name, `where`.
    """
    spec = FIELDS.get(name)
    axes = spec.trailing_dims if spec else 0
    if not axes or tuple(got[-axes:]) == tuple(held[-axes:]):
        return
    raise SchemaError(
        f"column '{name}' of {shown(ids) or 'no samples'} has {tuple(got[-axes:])} values per token; the samples of "
        f"partition '{where}' have {tuple(held[-axes:])} (routes: MoE layers, experts per token). Write the rows of "
        "one model to one partition, or clear its samples first"
    )


def check_route_ids(fields: TensorDict, meta: KVBatchMeta, shape: RouteShape | None = None) -> None:
    """Refuse routes among the columns packed for the rows of `meta` that no router can have chosen.

    Without `shape`, layers and k are those of the column, and there may be as many experts as its dtype has room for.
    Then a row that is partly missing passes in an unsigned dtype: [255, 3] in uint8 is a choice of 256 experts.

    Raises:
        SchemaError: what `check_routes` refuses, with the sample, token and layer.
    """
    column = fields.get(ROUTED_EXPERTS_FIELD, None)
    if column is None:
        return
    values, _, _ = ragged_from_nested(column)
    if shape is None:
        layers, top_k = values.shape[1:]
        shape = RouteShape(layers, top_k, most_experts(values.dtype, top_k))
    check_routes(
        values,
        num_experts=shape.num_experts,
        num_layers=shape.num_layers,
        top_k=shape.top_k,
        lengths=meta.sequence_lengths,
        sample_ids=meta.sample_ids,
    )


def _check_lengths(name: str, leaf: Ragged | torch.Tensor, declared: torch.Tensor) -> None:
    got = leaf.offsets.diff() if isinstance(leaf, Ragged) else torch.full((len(leaf),), leaf.shape[1])
    if got.shape != declared.shape or torch.equal(got, declared):
        return
    row = int((got != declared).nonzero()[0])
    hint = "" if isinstance(leaf, Ragged) else "; pack padded rows with kv_first_write or write_columns"
    raise SchemaError(
        f"column '{name}' has {int(got[row])} tokens in row {row}; column '{INPUT_LENGTHS}' says "
        f"{int(declared[row])}{hint}"
    )

"""Expert routes as bytes: narrow dtypes, the mark of a missing row, validity checks and content digests.

Routes are the ids of the k experts that every MoE layer chose for every token: an integer tensor (T, L, k) of T
tokens and L layers. On the wire an id takes one byte up to 256 experts and two above. A (token, layer) row without
a record is *missing*: all its k entries hold the mark of its dtype (255 in uint8, 65535 in uint16, -1 in signed
dtypes). With k >= 2 no choice of k different experts looks like that, so no id is lost to the mark.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from headrace.distributed.ragged_kernel import load_kernel
from headrace.errors import SchemaError

_MARKS = {torch.uint8: 255, torch.uint16: 65535} | dict.fromkeys(
    (torch.int8, torch.int16, torch.int32, torch.int64), -1
)
_FEWEST_UNFILLED = 16
"""Rows of expert 0, and no other, in a sample of one expert per token that no router is taken to have chosen."""
_TOKENS_AT_ONCE = 4096
"""Tokens that are checked together: their routes stay in the cache."""
_UNSIGNED = (torch.uint8, torch.uint16)
_SHIFT = 2  # The smallest canonical id is -1; a digest term must not be 0.


@dataclass(frozen=True)
class RouteShape:
    """What a model's routes look like: (tokens, `num_layers`, `top_k`) of ids below `num_experts`."""

    num_layers: int
    top_k: int
    num_experts: int

    @property
    def dtype(self) -> torch.dtype:
        return wire_dtype(self.num_experts, self.top_k)


def missing_mark(dtype: torch.dtype) -> int:
    """Return the value that fills a missing row: 255 for uint8, 65535 for uint16, -1 for signed integers.

    Raises:
        SchemaError: not a dtype for routes.
    """
    if dtype not in _MARKS:
        raise SchemaError(f"routes of dtype {dtype}; expected one of {', '.join(map(str, _MARKS))}")
    return _MARKS[dtype]


def wire_dtype(num_experts: int, top_k: int) -> torch.dtype:
    """Return the dtype that carries the ids of `num_experts` experts and the missing mark.

    >>> wire_dtype(256, 8), wire_dtype(256, 1), wire_dtype(40_000, 8)
    (torch.uint8, torch.int16, torch.uint16)

    Raises:
        SchemaError: more experts than two bytes hold.
    """
    for dtype in (torch.uint8, torch.int16, torch.uint16):
        if holds_experts(dtype, num_experts, top_k):
            return dtype
    raise SchemaError(
        f"{num_experts} experts; the routes column holds at most {most_experts(torch.uint16, top_k)}"
    )


def most_experts(dtype: torch.dtype, top_k: int) -> int:
    """Return how many experts there may be for `dtype` to carry all their ids, and the missing mark beside them.

    >>> most_experts(torch.uint8, 8), most_experts(torch.uint8, 1), most_experts(torch.int16, 1)
    (256, 255, 32768)

    Raises:
        SchemaError: not a dtype for routes.
    """
    missing_mark(dtype)
    # With k = 1 an unsigned mark is one expert's id, so that expert must not exist.
    spare = 1 if top_k == 1 and dtype in _UNSIGNED else 0
    return torch.iinfo(dtype).max + 1 - spare


def holds_experts(dtype: torch.dtype, num_experts: int, top_k: int) -> bool:
    return num_experts <= most_experts(dtype, top_k)


def missing_rows(ids: torch.Tensor) -> torch.Tensor:
    """Return a bool tensor (...,) that is True where the row `ids[..., :]` is missing."""
    columns = _columns(ids)
    mark = missing_mark(ids.dtype)
    return ((columns.amin(0) == mark) & (columns.amax(0) == mark)).view(ids.shape[:-1])


def pack_routes(rows: Sequence[torch.Tensor], *, num_experts: int) -> torch.Tensor:
    """Join the routes of samples, (T_i, L, k) each of any integer dtype, into one wire tensor (sum T_i, L, k).

    Missing rows get the mark of the wire dtype. Rows that have the wire dtype already are copied once and not looked
    at (`check_routes` does that); the others are held to their range, so that no id wraps, and must not be partly
    missing, since the mark beside an id may be an id of the wire dtype: 255 is the last of 256 experts.

    Raises:
        SchemaError: no sample, shapes that differ after the token axis, or, where the dtype changes, an id out of
            range, or a row that is partly missing, with its sample, token and layer.
    """
    if not rows or any(r.dim() != 3 or r.shape[1:] != rows[0].shape[1:] for r in rows):
        shapes = sorted({tuple(r.shape[1:]) for r in rows})
        raise SchemaError(
            f"routes of {len(rows)} samples with (layers, k) in {shapes}; expected (tokens, layers, k) tensors with "
            "the same layers and k, and at least one of them"
        )
    dtype = wire_dtype(num_experts, rows[0].shape[-1])
    if all(r.dtype == dtype for r in rows):
        return torch.cat(list(rows))
    out = torch.empty(sum(map(len, rows)), *rows[0].shape[1:], dtype=dtype, device=rows[0].device)
    for i, (part, target) in enumerate(zip(rows, torch.split(out, [len(r) for r in rows]))):
        _narrow_into(target, part, num_experts, i)
    return out


def signed_routes(ids: torch.Tensor) -> torch.Tensor:
    """Return `ids` as int64 with -1 in missing rows, for reading; the result takes 8 bytes per id."""
    wide = ids.to(torch.int64)
    mark = missing_mark(ids.dtype)
    return wide if mark == -1 else wide.masked_fill(missing_rows(ids).unsqueeze(-1), -1)


def row_digests(ids: torch.Tensor) -> torch.Tensor:
    """Return a 64-bit content hash per token, int64 (T,), of routes (T, L, k).

    It depends on ids, their order and the layer, and neither on dtype nor device: the same routes have the same
    digest as recorded, on the wire, sliced and in a forward. A sum of ids times fixed odd random factors, mod 2^64.
    """
    tokens, layers, top_k = ids.shape
    factors = torch.tensor(_factors(layers * top_k), dtype=torch.int64, device=ids.device).view(layers, top_k)
    missing = missing_rows(ids) if ids.dtype in _UNSIGNED and ids.numel() else None
    digests = torch.zeros(tokens, layers, dtype=torch.int64, device=ids.device)
    for place in range(top_k):
        column = ids[..., place].to(torch.int64, copy=True)
        if missing is not None:
            column.masked_fill_(missing, -1)
        digests += column.add_(_SHIFT).mul_(factors[:, place])
    return digests.sum(-1)


def route_digest(ids: torch.Tensor) -> str:
    """Return 16 hexadecimal digits that name the routes (T, L, k), rows in order."""
    rows = row_digests(ids).cpu().numpy().astype("<i8")
    return hashlib.blake2b(rows.tobytes(), digest_size=8).hexdigest()


def check_routes(
    ids: torch.Tensor,
    *,
    num_experts: int,
    num_layers: int,
    top_k: int,
    lengths: Sequence[int] | None = None,
    sample_ids: Sequence[str] | None = None,
) -> None:
    """Refuse routes that no router can have chosen.

    Args:
        ids: (T, L, k), samples one after another, with L `num_layers` and k `top_k`.
        lengths: Tokens per sample, for the message; one sample if None.
        sample_ids: Names for the message, one per length.

    Raises:
        SchemaError: a wrong layer or k axis, an id out of range, an expert twice in a row (an all-zero row is one
            such; with k = 1, a sample of 16 rows or more that are all zeros), or a row that is partly missing. Names
            the first bad sample, token and layer.
    """
    _check_shape(ids, num_experts, num_layers, top_k)
    if ids.numel() == 0:
        return
    # On a device each part would be waited for.
    step = _TOKENS_AT_ONCE if ids.device.type == "cpu" else len(ids)
    for first in range(0, len(ids), step):
        bad = _impossible(ids[first : first + step], num_experts)
        if bool(bad.any()):
            flat = first * num_layers + int(bad.nonzero()[0])
            raise SchemaError(_describe(ids, flat, num_experts, lengths, sample_ids))
    if top_k == 1:
        _refuse_unfilled(ids, [len(ids)] if lengths is None else lengths, sample_ids)


def _refuse_unfilled(ids: torch.Tensor, lengths: Sequence[int], sample_ids: Sequence[str] | None) -> None:
    """Refuse samples of one expert per token that are all zeros, as a buffer is that nobody has filled."""
    for i, rows in enumerate(torch.split(ids, list(lengths))):
        recorded = rows[~missing_rows(rows)]
        if len(recorded) >= _FEWEST_UNFILLED and not bool(recorded.any()):
            name = repr(sample_ids[i]) if sample_ids is not None else str(i)
            raise SchemaError(
                f"routes of sample {name}: all {len(recorded)} rows (token x layer) are expert 0, as in a buffer that "
                "was never filled; the engine must record its routers' choices"
            )


def _impossible(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return (T * L,) bool: True where no router can have chosen the row, which is not missing either."""
    columns = _columns(ids)
    low, high = columns.amin(0), columns.amax(0)
    mark = missing_mark(ids.dtype)
    bad = high > min(num_experts - 1, torch.iinfo(high.dtype).max)
    if mark < 0:
        bad |= low < 0
    for place in range(len(columns)):
        for other in range(place):
            bad |= columns[place] == columns[other]
    return bad & ~((low == mark) & (high == mark))


def _check_shape(ids: torch.Tensor, num_experts: int, num_layers: int, top_k: int) -> None:
    mark = missing_mark(ids.dtype)
    if ids.dim() != 3 or ids.shape[1] != num_layers or ids.shape[2] != top_k:
        raise SchemaError(
            f"routes have shape {tuple(ids.shape)}; expected (tokens, {num_layers} layers, {top_k} experts per token). "
            "A payload over all layers of a model with dense ones goes through LayerMap.select first"
        )
    if not holds_experts(ids.dtype, num_experts, top_k):
        raise SchemaError(
            f"routes of dtype {ids.dtype} cannot hold {num_experts} experts and the missing mark {mark}; "
            f"expected {wire_dtype(num_experts, top_k)}"
        )


def _describe(
    ids: torch.Tensor,
    flat: int,
    num_experts: int,
    lengths: Sequence[int] | None,
    sample_ids: Sequence[str] | None,
) -> str:
    """Say what is wrong with the (token, layer) row at place `flat` of samples one after another."""
    row, sample = flat // ids.shape[1], 0
    for length in lengths or ():
        if row < length:
            break
        row, sample, flat, ids = row - length, sample + 1, flat - length * ids.shape[1], ids[length:]
    name = str(sample) if sample_ids is None else repr(sample_ids[sample])
    return _describe_row(ids, flat, num_experts, name)


def _describe_row(ids: torch.Tensor, flat: int, num_experts: int, sample: str) -> str:
    """Say what is wrong with the (token, layer) row at place `flat` of a sample's routes."""
    token, layer = divmod(flat, ids.shape[1])
    values = ids[token, layer].tolist()
    mark = missing_mark(ids.dtype)
    if any(v == mark for v in values) and not 0 <= mark < num_experts:
        reason = f"partly missing ({mark} marks a missing row, and then fills it)"
    elif any(not 0 <= v < num_experts for v in values):
        reason = f"outside 0..{num_experts - 1}"
    else:
        reason = "with an expert twice; a router chooses k different ones"
    return f"routes of sample {sample}, token {token}, layer {layer}: experts {values}, {reason}"


def _narrow_into(target: torch.Tensor, rows: torch.Tensor, num_experts: int, sample: int) -> None:
    """Copy `rows` into `target` of another dtype; -1 becomes the mark as the conversion wraps."""
    if not holds_experts(rows.dtype, num_experts, rows.shape[-1]):
        raise SchemaError(f"routes of sample {sample}: dtype {rows.dtype} cannot hold {num_experts} experts")
    if rows.numel() == 0 or _narrowed_at_once(target, rows, num_experts):
        return
    signed = signed_routes(rows) if rows.dtype in _UNSIGNED else rows
    low, high = (int(v) for v in signed.aminmax())
    if low < -1 or high >= num_experts:
        bad = low if low < -1 else high
        raise SchemaError(f"routes of sample {sample}: expert id {bad}; expected -1 or 0..{num_experts - 1}")
    if low < 0:
        columns = _columns(signed)
        partly = (columns.amin(0) < 0) & (columns.amax(0) >= 0)
        if bool(partly.any()):
            raise SchemaError(_describe_row(signed, int(partly.nonzero()[0]), num_experts, str(sample)))
    target.copy_(signed)


def _narrowed_at_once(target: torch.Tensor, rows: torch.Tensor, num_experts: int) -> bool:
    """Copy and check in one pass, where there is a kernel for it; false if not, or if a row is to be refused."""
    sizes, width, kernel = (rows.element_size(), target.element_size()), rows.shape[-1], load_kernel()
    on_host = rows.device.type == "cpu" and target.device.type == "cpu" and target.is_contiguous()
    if kernel is None or not on_host or rows.dtype in _UNSIGNED:
        return False
    given = rows.contiguous()
    source, out = (given.data_ptr(), sizes[0]), (target.data_ptr(), sizes[1])
    return bool(kernel.narrow(*source, given.numel() // width, width, num_experts, *out))


def _columns(ids: torch.Tensor) -> torch.Tensor:
    """Return (k, rows): torch reduces over a long first axis fast, and over a short last one slowly."""
    signed = ids.to(torch.int32) if ids.dtype == torch.uint16 else ids
    return torch.stack([signed[..., place].reshape(-1) for place in range(ids.shape[-1])])


@lru_cache(maxsize=64)
def _factors(count: int) -> tuple[int, ...]:
    """Return fixed odd numbers in [1, 2**63)."""
    words = (hashlib.blake2b(i.to_bytes(4, "little"), digest_size=8).digest() for i in range(count))
    return tuple(int.from_bytes(word, "little") >> 1 | 1 for word in words)

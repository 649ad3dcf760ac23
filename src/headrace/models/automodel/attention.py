"""Attention within the sequences of a packed row, and never between them.

One attention, registered with transformers under `PACKED_ATTENTION`, reads the boundaries that the model's
forward hands through (`cu_seq_lens_q`). In half precision on CUDA it is torch's `varlen_attn`; elsewhere, and
with attention sinks, sequences of similar length are padded together and go through SDPA, so that cost grows with
the square of a sequence, not of the row. No mask of T x T is made. Padded batches take transformers' own mask and SDPA.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from headrace.distributed.ragged import RowLayout
from headrace.errors import ConfigError, HeadraceError
from headrace.models.automodel.data import Packing, pack
from headrace.models.automodel.exchange import check_heads, swap_heads_and_tokens

PACKED_ATTENTION = "headrace_packed"

_HALF = (torch.bfloat16, torch.float16)
_MAX_FLASH_HEAD_DIM = 256
_KNOB = "policy.model.attn_implementation"
_UNSUPPORTED = {
    "softcap": "capped attention scores",
    "position_bias": "a position bias",
}


def choose_attention(device: torch.device, dtype: torch.dtype, packed: bool, wanted: str) -> str:
    """Return the name by which transformers knows the attention to use; `dtype` is the compute dtype.

    `wanted` is kept, but for "sdpa" on packed rows: that is flash-attention where it is installed and can
    run, else `PACKED_ATTENTION`.
    """
    flash_runs = device.type == "cuda" and dtype in _HALF and find_spec("flash_attn") is not None
    if wanted == "flash_attention_2" and not flash_runs:
        raise ConfigError(
            f"{_KNOB}=flash_attention_2 needs the package flash-attn, a CUDA device and bfloat16; got device "
            f"{device.type} and {dtype}; use sdpa"
        )
    if not packed or wanted != "sdpa":
        return wanted
    return "flash_attention_2" if flash_runs else PACKED_ATTENTION


def packed_mask(
    batch_size: int, q_length: int, kv_length: int, attention_mask: torch.Tensor | None = None, **kwargs: Any
) -> torch.Tensor | None:
    """Return transformers' mask for a padded batch (told by its 2-D mask), and None for a packed row."""
    if attention_mask is not None:
        kwargs["allow_is_causal_skip"] = False
        mask: torch.Tensor = sdpa_mask(
            batch_size, q_length, kv_length, attention_mask=attention_mask, **kwargs
        )
        return mask
    config = kwargs.get("config")
    # transformers expands a mask by vmap where the model adds a pattern of its own.
    if kwargs.get("use_vmap") or getattr(config, "attention_chunk_size", None) is not None:
        raise ConfigError(
            f"{type(config).__name__} attends by a pattern of its own; set {_KNOB}=eager to pack its sequences"
        )
    return None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it reads boundaries, by which a graph would be specialised
def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    context_group: dist.ProcessGroup | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend causally within each sequence of a packed row; the signature is transformers' for attention.

    `query` is (1, H, T, D), `key` and `value` (1, H_kv, T, D); returns (1, T, H, D). With `attention_mask`
    the batch is padded and goes to transformers' SDPA. With `context_group`, T is this rank's part of the row.
    `s_aux` (H,) are attention sinks: scores that take part in each head's softmax and have no value.

    Raises:
        ConfigError: the model wants what this attention does not do, does not hand the boundaries through, or has heads
            that the ranks of `context_group` cannot share out.
    """
    for name, meaning in _UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise ConfigError(f"{type(module).__name__} uses {meaning}; set {_KNOB}=eager for this model")
    if attention_mask is not None:
        if s_aux is not None:
            key, value, attention_mask = _with_sinks(key, value, attention_mask, s_aux)
        padded: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return padded
    if cu_seq_lens_q is None or max_length_q is None or not getattr(module, "is_causal", True):
        raise ConfigError(
            f"{type(module).__name__} got no sequence boundaries, or does not attend causally, so a packed row "
            f"would leak from one sequence to the next; set {_KNOB}=eager, or use dynamic_batching in place of "
            "sequence_packing"
        )
    query, key, value = (to_compute_dtype(x) for x in (query, key, value))
    if context_group is not None:
        ranks = dist.get_world_size(context_group)
        check_heads(query.shape[1], key.shape[1], ranks)
        if key.shape[1] < ranks:  # one head for each rank
            key, value = (x.repeat_interleave(ranks // x.shape[1], dim=1) for x in (key, value))
        query, key, value = (swap_heads_and_tokens(x, context_group) for x in (query, key, value))
        if s_aux is not None:
            s_aux = s_aux.chunk(ranks)[dist.get_rank(context_group)]
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    flash_runs = query.is_cuda and query.dtype in _HALF and query.shape[-1] <= _MAX_FLASH_HEAD_DIM
    if flash_runs and s_aux is None:
        out = _varlen(query, key, value, cu_seq_lens_q, max_length_q, scaling, sliding_window)
    else:
        out = _by_length(query, key, value, cu_seq_lens_q, scaling, sliding_window, s_aux)
    out = out.unsqueeze(0)
    return (out if context_group is None else swap_heads_and_tokens(out, context_group)), None


def to_compute_dtype(x: torch.Tensor) -> torch.Tensor:
    """Return `x` in the dtype of autocast, where that is on."""
    # Rotary embeddings leave query and key in float32 under autocast, which does not know this attention.
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: torch.Tensor,
    longest: int,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - not in every torch build

    head_dim, value_dim = query.shape[-1], value.shape[-1]
    if value_dim < head_dim:
        value = F.pad(value, (0, head_dim - value_dim))
    options: dict[str, Any] = {}
    group = query.shape[1] // key.shape[1]
    if group > 1 and varlen_knows_gqa():
        options["enable_gqa"] = True
    elif group > 1:
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    out = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        boundaries,
        boundaries,
        longest,
        longest,
        scale=scaling,
        # Inclusive distances: a window of w tokens reaches w - 1 back.
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        **options,
    )
    assert isinstance(out, torch.Tensor)
    return out[..., :value_dim]


@cache
def varlen_knows_gqa() -> bool:
    """Return whether this torch's `varlen_attn` takes fewer key-value heads than query heads."""
    try:
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - not in every torch build
    except ImportError:
        return False
    return "enable_gqa" in signature(varlen_attn).parameters


def _by_length(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: torch.Tensor,
    scaling: float | None,
    sliding_window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    plan = _plan(tuple(boundaries.tolist()), query.device)
    parts = []
    for bucket in plan.buckets:
        rows = (x.index_select(0, bucket.source) for x in (query, key, value))
        queries, keys, values = (x.view(-1, bucket.width, *x.shape[1:]).transpose(1, 2) for x in rows)
        window, mask = sliding_window or bucket.width, None
        if sinks is not None or window < bucket.width:
            at = torch.arange(bucket.width, device=query.device)
            distance = at[:, None] - at[None, :]
            mask = (distance >= 0) & (distance < window)
        if sinks is not None and mask is not None:
            keys, values, mask = _with_sinks(keys, values, mask[None, None], sinks)
        out = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        parts.append(out.transpose(1, 2).flatten(0, 1).index_select(0, bucket.filled))
    return torch.cat(parts).index_select(0, plan.inverse)


def _with_sinks(
    key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return keys and values (b, H_kv, S + 1, D), the last ones zeros, and scores to add, (b, H, S, S + 1).

    A key of zeros scores zero, so that what is added there, each head's sink, is its whole score. `mask`, bool, is
    True where a query attends.
    """
    hidden = torch.zeros_like(mask, dtype=key.dtype).masked_fill(~mask, -torch.inf)
    hidden = hidden.expand(-1, len(sinks), -1, -1)
    sink = sinks.to(key.dtype)[None, :, None, None].expand(*hidden.shape[:-1], 1)
    return F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1)), torch.cat([hidden, sink], dim=-1)


@dataclass(frozen=True)
class _Bucket:
    """Sequences that are padded together: where each of their (n x width) tokens lies in the packed row."""

    width: int
    source: torch.Tensor
    filled: torch.Tensor
    """Which of the n x width places hold a token."""


@dataclass(frozen=True)
class _Plan:
    buckets: Sequence[_Bucket]
    inverse: torch.Tensor
    """For each token of the packed row, its place in the concatenated results."""


@lru_cache(maxsize=4)
@torch.inference_mode(False)
def _plan(boundaries: tuple[int, ...], device: torch.device) -> _Plan:
    """Group sequences whose lengths round up to the same power of two, so that at most half of a group is padding.

    Every layer of a forward pass asks for the same plan.
    """
    groups: dict[int, list[tuple[int, int]]] = {}
    for start, stop in itertools.pairwise(boundaries):
        if stop > start:
            groups.setdefault((stop - start - 1).bit_length(), []).append((start, stop - start))
    buckets, order = [], []
    for members in groups.values():
        starts, lengths = (torch.tensor(column) for column in zip(*members))
        width = int(lengths.max())
        at = torch.arange(width)
        there = at < lengths[:, None]
        source = torch.where(there, starts[:, None] + at, starts[:, None])
        filled = torch.nonzero(there.flatten()).flatten()
        buckets.append(_Bucket(width, source.flatten().to(device), filled.to(device)))
        order.append(source.flatten()[filled])
    inverse = torch.argsort(torch.cat(order))
    return _Plan(buckets, inverse.to(device))


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, packed_mask)


@torch.no_grad()
def check_isolation(model: Any) -> None:
    """Run a short sequence alone and packed behind another, and hold both to the same result.

    Raises:
        ConfigError: they differ: one packed sequence sees another (a recurrent layer, or a mask that ignores
            position ids), or positions do not start anew; or the model needs a mask, which a packed row lacks.
    """
    sequence = [0, 1, 1, 0]
    # flash-attention has no float32; everything else is compared exactly as the weights are.
    half = model.config._attn_implementation == "flash_attention_2"
    with torch.autocast(model.device.type, torch.bfloat16, enabled=half):
        alone = _run_packed(model, [sequence])
        packed = _run_packed(model, [[1, 0, 1], sequence])[-len(sequence) :]
    gap = (packed - alone).abs().max() / alone.abs().max()
    if not gap <= (5e-2 if half else 1e-4):
        raise ConfigError(
            f"sequence_packing.enabled: {type(model).__name__} does not keep packed sequences apart (relative "
            f"change {float(gap):.1e}); use dynamic_batching for this model"
        )


def _run_packed(model: Any, sequences: list[list[int]]) -> torch.Tensor:
    """Return the last hidden states (T, H) in float32 of sequences in one row."""
    rows = RowLayout([len(s) for s in sequences])
    ids = rows.pad(torch.tensor([token for s in sequences for token in s], device=model.device))
    try:
        out = model.base_model(**pack(ids, rows, Packing()), use_cache=False)
    except HeadraceError:
        raise
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        raise ConfigError(
            f"{type(model).__name__} cannot run a packed row, which has no mask ({type(error).__name__}: {error}); use "
            "dynamic_batching in place of sequence_packing, and leave policy.parallel.tensor and context at 1"
        ) from error
    hidden: torch.Tensor = out.last_hidden_state[0].float()
    return hidden

"""What a forward pass reads of a microbatch, padded or packed, and what the loss of a global batch is divided by.

Every data-parallel rank runs the same number of microbatches: a rank with fewer runs dummy microbatches, which weigh
nothing. Tensors stay on the device that they come on.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from headrace.data_plane.schema import (
    INPUT_IDS,
    INPUT_LENGTHS,
    ROUTE_SALTS,
    ROUTED_EXPERTS_FIELD,
    SAMPLE_MASK,
    TOKEN_MASK,
)
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.distributed.ragged import RowLayout, offsets_from_lengths, ragged_indices
from headrace.errors import ConfigError, SchemaError
from headrace.models.interfaces import LossType
from headrace.utils.rounding import round_up

FORWARD_COLUMNS = (INPUT_IDS, INPUT_LENGTHS, ROUTED_EXPERTS_FIELD, ROUTE_SALTS)
"""What a forward pass reads beside media."""

COUNTED_COLUMNS = (SAMPLE_MASK, TOKEN_MASK, INPUT_IDS)
"""What `valid_counts` reads."""


@dataclass(frozen=True)
class Packing:
    """The rows of a microbatch go to the model as one, of a multiple of `multiple` tokens.

    What fills it up, `filling_id`, is a sequence of its own. The `ranks` of a replica divide the row.
    """

    multiple: int = 1
    filling_id: int = 0
    ranks: int = 1


def forward_kwargs(data: BatchedDataDict, packing: Packing | None) -> dict[str, Any]:
    """Return the keyword arguments of a transformers causal LM's `forward` for b rows padded to S.

    Padded: `input_ids` and `position_ids` (b, S); media come with an `attention_mask` (b, S) bool, and the model
    derives positions from where they stand. Packed: both (1, T), and the boundaries of the sequences.

    Raises:
        ConfigError: media in a packed row.
        SchemaError: no `input_lengths`, or a length that is greater than the width, with its row.
    """
    input_ids = data[INPUT_IDS]
    if INPUT_LENGTHS not in data:
        raise SchemaError(f"a microbatch needs the column '{INPUT_LENGTHS}'; got {sorted(data)}")
    rows = RowLayout(data[INPUT_LENGTHS], input_ids.shape[1])
    media = dict(data.get_multimodal_dict(as_tensors=True, device=input_ids.device))
    if packing is not None:
        _check_media(media, packing)
        return pack(input_ids, rows, packing)
    # Padding is on the right: under causal attention no token sees it, with a mask or without, and without one SDPA
    # takes its fastest kernels.
    if media:
        return {
            "input_ids": input_ids,
            "attention_mask": visible(input_ids, rows),
            "position_ids": None,
            **media,
        }
    positions = torch.arange(rows.width, device=input_ids.device).expand(input_ids.shape)
    return {"input_ids": input_ids, "attention_mask": None, "position_ids": positions}


def visible(input_ids: torch.Tensor, rows: RowLayout) -> torch.Tensor:
    """Return which places of (b, S) attention sees, bool.

    A row of length 0 sees its first pad token: softmax over nothing is NaN, in the gradients too.
    """
    columns = torch.arange(rows.width, device=input_ids.device)
    return columns < rows.lengths.to(input_ids.device, non_blocking=True).clamp(min=1)[:, None]


def pack(input_ids: torch.Tensor, rows: RowLayout, packing: Packing) -> dict[str, Any]:
    """Return the rows laid end to end, by the names of `forward`, with where each sequence begins, (B + 1,) int32.

    Source: transformers, FlashAttentionKwargs (cu_seq_lens_q, max_length_q), and find_packed_sequence_indices in
    masking_utils (a position id that does not follow the one before begins a new sequence).
    """
    width = round_up(max(rows.total, 1), packing.multiple)
    fill = width - rows.total
    packed = torch.nn.functional.pad(rows.strip(input_ids), (0, fill), value=packing.filling_id)  # (T,)
    lengths = [*rows.lengths.tolist(), *([fill] if fill else [])]
    offsets = offsets_from_lengths(torch.tensor(lengths)).to(torch.int32)
    starts = offsets.to(input_ids.device, non_blocking=True)
    _, positions = ragged_indices(starts, width)
    return {
        "input_ids": packed[None],
        "attention_mask": None,
        "position_ids": positions[None],
        "cu_seq_lens_q": starts,
        "cu_seq_lens_k": starts,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def _check_media(media: Mapping[str, Any], packing: Packing) -> None:
    if not media:
        return
    found = f"the batch has media ({', '.join(sorted(media))}) and"
    if packing.ranks > 1:
        raise ConfigError(
            f"{found} the {packing.ranks} ranks of a replica split its tokens; "
            "set policy.parallel.tensor=1 and policy.parallel.context=1 for multimodal batches"
        )
    raise ConfigError(
        f"{found} sequence_packing.enabled is on: the positions of media are set per padded row; switch it off for "
        "multimodal batches"
    )


def valid_counts(
    columns: Mapping[str, Any], loss_type: LossType, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the valid sequences and tokens of a global batch of which this rank has `COUNTED_COLUMNS`.

    They are the sum of `sample_mask` and that of `token_mask[:, 1:] * sample_mask`, 0-D float32, over all ranks of
    `group` (None: this process alone).

    Raises:
        SchemaError: no `sample_mask`, or no `token_mask` for a token-level loss.
    """
    if SAMPLE_MASK not in columns:
        raise SchemaError(f"a training batch needs the column '{SAMPLE_MASK}'")
    sample_mask = columns[SAMPLE_MASK].double()
    if TOKEN_MASK in columns:
        tokens = (columns[TOKEN_MASK][:, 1:].double() * sample_mask[:, None]).sum()
    elif loss_type == LossType.TOKEN_LEVEL:
        raise SchemaError(f"a token-level loss needs the column '{TOKEN_MASK}'")
    else:
        tokens = sample_mask.sum() * columns[INPUT_IDS].shape[1]
    counts = torch.stack([sample_mask.sum(), tokens])
    if group is not None:
        counts = _all_reduce(counts, dist.ReduceOp.SUM, group)
    sequences, tokens = counts.float()
    return sequences, tokens


def most_of_ranks(group: dist.ProcessGroup | None, count: int) -> int:
    """Return the greatest count that a rank of `group` has (None: this process alone)."""
    return count if group is None else int(_all_reduce(torch.tensor([count]), dist.ReduceOp.MAX, group))


def _all_reduce(values: torch.Tensor, op: Any, group: dist.ProcessGroup) -> torch.Tensor:
    """Reduce a copy, on the device that the group's backend works on; return it on the device of `values`."""
    on_cuda = "nccl" in str(dist.get_backend(group))
    reduced = values.to("cuda" if on_cuda else "cpu", copy=True)
    dist.all_reduce(reduced, op=op, group=group)
    return reduced.to(values.device)

"""From a batch on one rank to what a model's forward takes: microbatches, packed or padded, and global counts.

What callers of NeMo-RL use of it. A policy's own worker hands padded rows to `TokenScorer`, which packs them itself.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from headrace.compat.packing import FlashAttentionKwargs
from headrace.config import PolicyConfig
from headrace.data_plane.schema import INPUT_IDS, INPUT_LENGTHS
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.distributed.ragged import RowLayout, row_lengths
from headrace.errors import ConfigError, SchemaError
from headrace.models.automodel.data import (
    COUNTED_COLUMNS,
    Packing,
    most_of_ranks,
    pack,
    valid_counts,
    visible,
)
from headrace.models.interfaces import LossFn

Batch = BatchedDataDict
Config = Mapping[str, Any] | PolicyConfig


@dataclass
class ProcessedInputs:
    """Inputs of one forward pass.

    Padded: `input_ids` (b, S), `attention_mask` (b, S) bool, `position_ids` (b, S). Packed: `input_ids` and
    `position_ids` (1, T), no mask, and `flash_attn_kwargs` with the boundaries of the sequences. With context
    parallelism, `cp_buffers` are the tensors to split along the sequence, `seq_index` (1, S) the positions in it.
    """

    input_ids: torch.Tensor
    seq_len: int
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    flash_attn_kwargs: FlashAttentionKwargs | dict[str, Any] = field(default_factory=dict)
    vlm_kwargs: dict[str, Any] = field(default_factory=dict)
    cp_buffers: list[torch.Tensor] = field(default_factory=list)
    seq_index: torch.Tensor | None = None

    @property
    def has_context_parallel(self) -> bool:
        return len(self.cp_buffers) > 0

    @property
    def has_flash_attention(self) -> bool:
        """Whether sequence boundaries are there: a dataclass, or a dict that is not empty."""
        return bool(self.flash_attn_kwargs)

    @property
    def is_multimodal(self) -> bool:
        return len(self.vlm_kwargs) > 0

    def forward_kwargs(self) -> dict[str, Any]:
        """Return the keyword arguments of a transformers causal LM's `forward`."""
        boundaries = self.flash_attn_kwargs
        extra = boundaries if isinstance(boundaries, dict) else boundaries.as_forward_kwargs()
        return {
            "input_ids": self.input_ids,
            # Padding is on the right: under causal attention no token sees it, with a mask or without, and
            # without one SDPA takes its fastest kernels.
            "attention_mask": self.attention_mask if self.is_multimodal else None,
            "position_ids": self.position_ids,
            **extra,
            **self.vlm_kwargs,
        }


@dataclass
class ProcessedMicrobatch:
    """A microbatch: its columns (b rows padded to S, as the loss sees them) and the inputs made of them.

    `original_batch_size` is b and `original_seq_len` S, before any packing. `lengths` are the rows' lengths on the
    CPU, (b,) int64, where they are known there.
    """

    data_dict: Batch
    processed_inputs: ProcessedInputs
    original_batch_size: int
    original_seq_len: int
    lengths: torch.Tensor | None = None


def get_microbatch_iterator(
    data: Batch, cfg: Config, mbs: int, dp_mesh: Any, tokenizer: Any, cp_size: int = 1
) -> tuple[Iterator[ProcessedMicrobatch], int]:
    """Cut one global batch's rows on this rank into processed microbatches, and say how many there are.

    The number is equal on all ranks of `dp_mesh` (a one-axis device mesh, a process group, or None for one
    process); every rank must call this together. `mbs` counts for fixed-size microbatches only.

    Raises:
        ConfigError: fixed size, and the rows are no multiple of `mbs`.
    """
    lengths = data.get(INPUT_LENGTHS)
    if isinstance(lengths, torch.Tensor) and lengths.device.type != "cpu":
        # One device sync, in place of several per microbatch.
        data = copy.copy(data)
        data[INPUT_LENGTHS] = lengths.cpu()
    packed = setting(cfg, "sequence_packing.enabled", False)
    dynamic = setting(cfg, "dynamic_batching.enabled", False)
    group = dp_mesh.get_group() if hasattr(dp_mesh, "get_group") else dp_mesh
    total = 0

    def agree(count: int) -> int:
        nonlocal total
        total = most_of_ranks(group if dist.is_initialized() else None, count)
        return total

    raw = data.microbatches("dynamic" if dynamic else "packed" if packed else "fixed", mbs, agree)
    return make_processed_microbatch_iterator(raw, tokenizer, cfg, cp_size), total


def make_processed_microbatch_iterator(
    raw_iterator: Iterator[Batch], tokenizer: Any, cfg: Config, cp_size: int
) -> Iterator[ProcessedMicrobatch]:
    """Process each microbatch as it is asked for; packed if `cfg` has `sequence_packing.enabled`."""
    packing = bool(setting(cfg, "sequence_packing.enabled", False))
    for microbatch in raw_iterator:
        inputs = process_microbatch(microbatch, tokenizer, packing, cfg, cp_size)
        lengths = row_lengths(microbatch[INPUT_LENGTHS])
        # Losses find every column on the device of the logprobs.
        microbatch[INPUT_LENGTHS] = microbatch[INPUT_LENGTHS].to(inputs.input_ids.device, non_blocking=True)
        rows, width = microbatch[INPUT_IDS].shape[:2]
        yield ProcessedMicrobatch(microbatch, inputs, rows, width, lengths)


def process_microbatch(
    mb: Batch, tokenizer: Any, enable_seq_packing: bool, cfg: Config, cp_size: int
) -> ProcessedInputs:
    """Make the forward pass's inputs of one microbatch.

    A packed row is filled up to a multiple of `make_sequence_length_divisible_by`; the filling is a sequence
    of its own.

    Raises:
        ConfigError: media with packing, context or sequence parallelism; packing with context parallelism.
        SchemaError: no `input_lengths`, or a length that is greater than the width, with its row.
    """
    input_ids = mb[INPUT_IDS]
    if INPUT_LENGTHS not in mb:
        raise SchemaError(f"a microbatch needs the column '{INPUT_LENGTHS}'; got {sorted(mb)}")
    media = dict(mb.get_multimodal_dict(as_tensors=True, device=input_ids.device))
    _check_combination(media, enable_seq_packing, cfg, cp_size)
    rows = RowLayout(mb[INPUT_LENGTHS], input_ids.shape[1])
    if enable_seq_packing:
        ids = (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
        filling_id = next((value for value in ids if isinstance(value, int)), 0)
        multiple = int(setting(cfg, "make_sequence_length_divisible_by", 1))
        packed = pack(input_ids, rows, Packing(multiple, filling_id))
        starts, longest = packed["cu_seq_lens_q"], packed["max_length_q"]
        return ProcessedInputs(
            packed["input_ids"],
            packed["input_ids"].shape[1],
            position_ids=packed["position_ids"],
            flash_attn_kwargs=FlashAttentionKwargs(starts, starts, longest, longest),
        )
    positions = torch.arange(rows.width, device=input_ids.device).expand(input_ids.shape)
    inputs = ProcessedInputs(input_ids, rows.width, visible(input_ids, rows), positions)
    if media:
        # The model derives positions from where the media stand.
        inputs.position_ids, inputs.vlm_kwargs = None, media
    if cp_size > 1:
        assert inputs.position_ids is not None
        inputs.seq_index = torch.arange(inputs.seq_len, device=input_ids.device).unsqueeze(0)
        inputs.cp_buffers = [inputs.input_ids, inputs.position_ids, inputs.seq_index]
    return inputs


def process_global_batch(
    data: Batch,
    loss_fn: LossFn,
    dp_group: dist.ProcessGroup | None,
    *,
    batch_idx: int,
    batch_size: int,
) -> dict[str, Any]:
    """Take rows `batch_idx * batch_size` onwards of this rank, and count what the loss is normalised by.

    Returns:
        `batch`: the rows; `global_valid_seqs`: sum of `sample_mask`; `global_valid_toks`: sum of
        `token_mask[:, 1:] * sample_mask`; the sums are 0-D float32, over all ranks of `dp_group` (None: this
        process alone).

    Raises:
        SchemaError: no `sample_mask`, or no `token_mask` for a token-level loss.
    """
    batch = data.get_batch(batch_idx=batch_idx, batch_size=batch_size)
    sequences, tokens = valid_counts(batch.select_columns(COUNTED_COLUMNS), loss_fn.loss_type, dp_group)
    return {"batch": batch, "global_valid_seqs": sequences, "global_valid_toks": tokens}


def setting(cfg: Config, key: str, default: Any) -> Any:
    """Return a dotted key of a mapping or of the config model, or `default` where it is not set."""
    value: Any = cfg
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
        if value is None:
            return default
    return value


def _check_combination(media: Mapping[str, Any], packing: bool, cfg: Config, cp_size: int) -> None:
    if packing and cp_size > 1:
        raise ConfigError(
            f"sequence_packing.enabled with context parallel size {cp_size}: a packed row cannot be split over "
            "ranks; use dynamic_batching"
        )
    rivals = {
        "sequence_packing.enabled": packing,
        f"context parallel size {cp_size}": cp_size > 1,
        "dtensor_cfg.sequence_parallel": bool(setting(cfg, "dtensor_cfg.sequence_parallel", False)),
    }
    if media and (active := [name for name, is_on in rivals.items() if is_on]):
        raise ConfigError(
            f"the batch has media ({', '.join(sorted(media))}) and {active[0]} is on: the positions of media are "
            "set per padded row; switch it off for multimodal batches"
        )

"""BatchedDataDict with the habits of code written against NeMo-RL: unequal columns join, repeated rows share media."""

import copy
import itertools
from abc import ABCMeta
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist

from headrace.compat.media_inputs import MULTIMODAL_CONTENT_TYPES, NATIVE_MULTIMODAL_KEYS
from headrace.compat.packed_tensor import PackedTensor
from headrace.distributed import batched_data_dict, multimodal
from headrace.distributed.batched_data_dict import DynamicBatchingArgs, SequencePackingArgs
from headrace.distributed.collectives import broadcast_columns
from headrace.distributed.columns import object_array, rows_of, select_rows
from headrace.distributed.ragged import nested_from_ragged, offsets_from_lengths, ragged_from_nested
from headrace.distributed.ragged_cpu import pad_element
from headrace.errors import ConfigError, SchemaError
from headrace.utils.arguments import whole_number

__all__ = ["BatchedDataDict", "DynamicBatchingArgs", "SequencePackingArgs", "SlicedDataDict"]

MICROBATCH_ORDERS = {"packer": "planned", "largest_first": "longest_first"}
"""Orders of microbatches by the names that callers have for them, and headrace's."""

_COUPLED_MULTIMODAL_KEYS = (
    ("pixel_values", "image_grid_thw"),
    ("pixel_values", "imgs_sizes"),
    ("pixel_values", "num_frames"),
    ("pixel_values_videos", "video_grid_thw"),
)
"""Media and the column that describes them, segment by segment."""

_PLAN = ("micro_batch_indices", "micro_batch_lengths", "elem_counts_per_gb")
_PIXELS = "pixel_values"


class _AnyBatch(ABCMeta):
    """Lets a batch that headrace made pass as one of this class."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, batched_data_dict.BatchedDataDict) and (
            cls.__module__ == __name__ or super().__instancecheck__(instance)
        )


class BatchedDataDict(batched_data_dict.BatchedDataDict, metaclass=_AnyBatch):
    """Named columns of N rows each, as headrace's own, that also takes what callers of NeMo-RL give."""

    @classmethod
    def of(cls, batch: batched_data_dict.BatchedDataDict) -> Self:
        """Return a batch that headrace made, with its columns, as one of this class."""
        made = cls({n: PackedTensor.of(c) if _is_media(c) else c for n, c in batch.data.items()})
        made._adopt_facts(batch)
        for name in _PLAN:
            setattr(made, name, getattr(batch, name))
        return made

    @classmethod
    def from_batches(
        cls,
        batches: Sequence[Mapping[str, Any]],
        pad_value_dict: Mapping[str, int | float] | None = None,
        *,
        allow_missing_packed_tensors: bool = False,
    ) -> Self:
        """Concatenate batches; a column that some of them lack stays, and their rows of it are empty.

        An empty row is all padding in a tensor, of length 0 in a jagged one, None in lists and media.
        `allow_missing_packed_tensors` is taken and changes nothing: no column may be missing only for others.

        Raises:
            SchemaError: no batches, or parts that do not fit together.
        """
        examples: dict[str, Any] = {}
        for batch in batches:
            for name, column in batch.items():
                if name not in examples or (not rows_of(name, examples[name]) and rows_of(name, column)):
                    examples[name] = column
        pads = pad_value_dict or {}
        filled = []
        for batch in batches:
            rows = batched_data_dict.BatchedDataDict(batch).size
            columns = {
                name: batch[name] if name in batch else _empty_rows(name, column, rows, pads.get(name, 0))
                for name, column in examples.items()
            }
            filled.append(cls({n: PackedTensor.of(c) if _is_media(c) else c for n, c in columns.items()}))
        if filled and isinstance(batches[0], batched_data_dict.BatchedDataDict):
            filled[0]._adopt_facts(batches[0])
        return super().from_batches(filled, pads)

    def get_multimodal_dict(
        self,
        as_tensors: bool = False,
        device: torch.device | str | None = None,
        pixel_dtype: torch.dtype | None = None,
    ) -> dict[str, Any]:
        """Return the media columns, and the dense ones that belong to them; pixels as `pixel_dtype`, if given.

        Raises:
            SchemaError: shared media with another number of segments in a row than the column that describes them.
        """
        _check_coupled(self.data)
        if pixel_dtype is None:
            return super().get_multimodal_dict(as_tensors, device)
        cast = dict(self.data)
        for name, column in cast.items():
            if name.startswith(_PIXELS) and _is_media(column):
                cast[name] = PackedTensor.of(column).to_dtype(pixel_dtype)
        return type(self)(cast).get_multimodal_dict(as_tensors, device)

    def repeat_interleave(self, num_repeats: int, *, share_immutable_media: bool = False) -> Self:
        """Return every row `num_repeats` times, the copies beside each other; objects are copied deeply.

        With `share_immutable_media` the copies share the tensors of media, and what engines are given as media.
        """
        if num_repeats < 0:
            raise ConfigError(f"num_repeats={num_repeats}; expected 0 or more")
        _ = self.size

        def copies(row: Any, name: str) -> Iterator[Any]:
            for _ in range(num_repeats):
                is_native = name in NATIVE_MULTIMODAL_KEYS
                yield copy.deepcopy(row, _shared_media(row, is_native) if share_immutable_media else {})

        columns: dict[str, Any] = {}
        for name, column in self.data.items():
            if isinstance(column, list | tuple) or _holds_objects(column):
                rows = [row for given in column for row in copies(given, name)]
                columns[name] = object_array(rows) if _holds_objects(column) else rows
            elif isinstance(column, multimodal.PackedTensor):
                columns[name] = PackedTensor.of(column).repeat(num_repeats)
            else:
                columns[name] = select_rows(column, torch.arange(len(column)).repeat_interleave(num_repeats))
        return self._with_columns(columns)

    def chunk(self, rank: int, chunks: int) -> Self:
        """Return a copy of part `rank` of `chunks` equal, contiguous parts.

        Raises:
            ConfigError: rows that do not divide, or a rank outside [0, chunks).
        """
        size = self.size
        if chunks < 1 or size % chunks:
            raise ConfigError(
                f"batch size ({size}) is not a multiple of chunks ({chunks}); change one of them"
            )
        if not 0 <= rank < chunks:
            raise ConfigError(f"rank {rank} of {chunks} chunks; expected 0 to {chunks - 1}")
        rows = torch.arange(rank * (size // chunks), (rank + 1) * (size // chunks))
        return self._with_columns(self._selected(rows))

    def truncate_tensors(self, dim: int, truncated_len: int) -> None:
        """Cut every dense tensor that has dimension `dim` and is longer there, in place."""
        for name, column in self.data.items():
            if isinstance(column, torch.Tensor) and not column.is_nested and column.dim() > dim:
                self.data[name] = column.narrow(dim, 0, min(truncated_len, column.shape[dim]))

    def get_dict(self) -> dict[str, Any]:
        return self.data

    def make_microbatch_iterator(self, microbatch_size: int) -> Iterator[Self]:
        return self.microbatches("fixed", microbatch_size)

    def make_microbatch_iterator_with_dynamic_shapes(self, sequence_dim: int = 1) -> Iterator[Self]:
        return self.microbatches("dynamic", 1, token_dim=sequence_dim)

    def make_microbatch_iterator_for_packable_sequences(self) -> Iterator[Self]:
        return self.microbatches("packed", 1)

    def get_microbatch_iterator_dynamic_shapes_len(self) -> int:
        return len(self._single_plan()[0])

    def get_microbatch_iterator_for_packable_sequences_len(self) -> tuple[int, int]:
        pairs, lengths = self._single_plan()
        return len(pairs), max(lengths, default=0)

    def reorder_data(self, reorded_indices: Sequence[int] | torch.Tensor) -> None:
        super().reorder_data(reorded_indices)

    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: DynamicBatchingArgs | None = None,
        sequence_packing_args: SequencePackingArgs | None = None,
    ) -> list[Self] | tuple[list[Self], list[int]]:
        """Split the rows over `shards` ranks; microbatch orders may be named `packer` and `largest_first`, too."""
        if allow_uneven_shards:
            if batch_size is not None:
                raise ConfigError(
                    "allow_uneven_shards needs batch_size=None: uneven shards are cut from one batch"
                )
            if dynamic_batching_args is None and sequence_packing_args is None:
                shards = whole_number("shards", shards, 1, ConfigError)
                rows = -(-self.size // shards)
                stops = [min(rank * rows, self.size) for rank in range(shards + 1)]
                return [self.slice(start, stop) for start, stop in itertools.pairwise(stops)]
        return super().shard_by_batch_size(
            shards,
            batch_size,
            dynamic_batching_args=dynamic_batching_args,
            sequence_packing_args=headrace_packing_args(sequence_packing_args),
        )

    def all_gather(self, group: dist.ProcessGroup | None) -> Self:
        """Return the rows of all ranks of `group` (None: of all there are), rank after rank; every rank calls this."""
        members = group or dist.group.WORLD
        if members is None:
            return self._with_columns(dict(self.data))
        ranks = dist.get_process_group_ranks(members)
        parts = [broadcast_columns(lambda: self.data, src=rank, group=members) for rank in ranks]
        return type(self).from_batches([self._with_columns(part) for part in parts])


SlicedDataDict = BatchedDataDict


def headrace_packing_args(args: SequencePackingArgs | None) -> SequencePackingArgs | None:
    """Return packing arguments with the microbatch order by headrace's name.

    >>> headrace_packing_args({"microbatch_order": "largest_first"})
    {'microbatch_order': 'longest_first'}
    """
    if args is None or "microbatch_order" not in args:
        return args
    order = args["microbatch_order"]
    return {**args, "microbatch_order": MICROBATCH_ORDERS.get(order, order)}


def _is_media(column: object) -> bool:
    return isinstance(column, multimodal.PackedTensor)


def _holds_objects(column: object) -> bool:
    return isinstance(column, np.ndarray) and column.dtype == object


def _empty_rows(name: str, column: Any, rows: int, pad_value: float) -> Any:
    """Return `rows` rows without content that join a column."""
    if isinstance(column, multimodal.PackedTensor):
        return PackedTensor.empty_rows_like(column, rows)
    if isinstance(column, torch.Tensor) and column.is_nested:
        values, _, dim = ragged_from_nested(column)
        return nested_from_ragged(values[:0], offsets_from_lengths(torch.zeros(rows, dtype=torch.int64)), dim)
    if isinstance(column, torch.Tensor):
        # Without width, so that the join pads it.
        shape = (rows,) if column.dim() == 1 else (rows, 0, *column.shape[2:])
        try:
            return pad_element(pad_value, column.dtype).to(column.device).expand(shape).clone()
        except SchemaError as error:
            raise SchemaError(f"column '{name}': {error}") from error
    if isinstance(column, np.ndarray) and not _holds_objects(column):
        return np.full((rows, *column.shape[1:]), pad_value, dtype=column.dtype)
    return [None] * rows if isinstance(column, list | tuple) else object_array([None] * rows)


def _check_coupled(columns: Mapping[str, Any]) -> None:
    for media_name, facts_name in _COUPLED_MULTIMODAL_KEYS:
        media, facts = columns.get(media_name), columns.get(facts_name)
        both = [c for c in (media, facts) if isinstance(c, PackedTensor)]
        if len(both) < 2 or not any(column.deduplication_enabled for column in both):
            continue
        counts = [column.logical_segment_counts_by_row() for column in both]
        if counts[0] != counts[1]:
            raise SchemaError(
                f"columns '{media_name}' and '{facts_name}' have other ordered per-row segment counts: "
                f"{counts[0]} and {counts[1]}; expected one fact per segment"
            )


def _shared_media(value: Any, is_native: bool) -> dict[int, Any]:
    """Return a memo of `copy.deepcopy` in which the tensors of media stand for themselves."""
    memo: dict[int, Any] = {}
    if isinstance(value, PackedTensor):
        memo.update({id(tensor): tensor for tensor in value.enable_deduplication().tensors})
    elif isinstance(value, multimodal.PackedTensor):
        memo.update({id(tensor): tensor for tensor in value.tensors if tensor is not None})
    elif isinstance(value, Mapping):
        is_part = is_native or value.get("type") in MULTIMODAL_CONTENT_TYPES
        for key, item in value.items():
            memo |= _shared_media(item, is_part or key in NATIVE_MULTIMODAL_KEYS)
    elif isinstance(value, list | tuple):
        for item in value:
            memo |= _shared_media(item, is_native)
    elif is_native:
        memo[id(value)] = value
    return memo

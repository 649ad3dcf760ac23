"""A batch: columns with one shared batch dimension, cut into shards and microbatches.

Columns are dense or jagged tensors, lists, numpy arrays or PackedTensors. Every operation over rows keeps the
columns aligned and refuses a column of another length by name. How rows fall to ranks and microbatches is
decided by `headrace.distributed.planner`; this module only moves rows.
"""

from collections import UserDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch

from headrace.distributed.columns import concat_columns, move, rows_of, select_rows, slice_rows
from headrace.distributed.dummy_microbatch import dummy_column
from headrace.distributed.multimodal import PackedTensor
from headrace.distributed.planner import (
    DynamicBatchingArgs,
    MicrobatchPlan,
    SequencePackingArgs,
    plan_microbatches,
)
from headrace.errors import ConfigError, SchemaError

__all__ = ["BatchedDataDict", "DynamicBatchingArgs", "SequencePackingArgs", "SlicedDataDict"]

Cut = Literal["fixed", "packed", "dynamic"]
"""How rows become microbatches: so many rows each, or as the plan says, which was made for one of the other two."""

# What a batch knows about its columns, and hands on to every batch made from it.
_COLUMN_FACTS = ("input_key", "input_lengths_key", "token_columns", "ragged_columns")


class BatchedDataDict(UserDict[str, Any]):
    """Named columns of N rows each.

    >>> batch = BatchedDataDict({"input_ids": torch.zeros(4, 7), "input_lengths": torch.tensor([7, 2, 3, 5])})
    >>> [shard["input_lengths"].tolist() for shard in batch.shard_by_batch_size(shards=2)]
    [[7, 2], [3, 5]]

    Attributes:
        micro_batch_indices: Per global batch, [start, stop) row pairs relative to its first row; an empty
            pair is a dummy of weight zero. None: no plan. Operations that change rows drop the plan.
        micro_batch_lengths: Same nesting; packed total, or padded row length, of each microbatch.
        elem_counts_per_gb: Rows per global batch.
        input_key, input_lengths_key: The token column and the column of its lengths.
        token_columns: Columns whose dimension 1 is the token dimension. None: every dense column of two or
            more dimensions that is as wide as the token column; a column that is that wide by chance (class
            scores, an image row) is then cut with them, so name the columns where that can happen.
        ragged_columns: Columns that were ragged before they were padded, and whose dimension 1 nobody has
            declared to be tokens: dynamic shapes do not know how wide they are to be.
    """

    ADDITIONAL_OPTIONAL_KEY_TENSORS: ClassVar[tuple[str, ...]] = ("token_type_ids", "mm_token_type_ids")
    """Dense columns that go to the model together with media."""

    micro_batch_indices: list[list[list[int]]] | None = None
    micro_batch_lengths: list[list[int]] | None = None
    elem_counts_per_gb: list[int] | None = None
    input_key: str = "input_ids"
    input_lengths_key: str = "input_lengths"
    token_columns: Collection[str] | None = None
    ragged_columns: Collection[str] = ()

    # Columns.

    @property
    def size(self) -> int:
        """Number of rows; 0 without columns.

        Raises:
            SchemaError: columns of different lengths, or a value that is no column.
        """
        rows = {name: rows_of(name, column) for name, column in self.data.items()}
        if not rows:
            return 0
        first, size = next(iter(rows.items()))
        for name, count in rows.items():
            if count != size:
                raise SchemaError(
                    f"column '{name}' has {count} rows and column '{first}' has {size}; "
                    "all columns of a batch need one row per sample"
                )
        return size

    def get_multimodal_dict(
        self, as_tensors: bool = False, device: torch.device | str | None = None
    ) -> dict[str, Any]:
        """Return the media columns and the dense columns that belong to them.

        With `as_tensors`, each PackedTensor is joined into one tensor, and one without media is left out.
        """
        found: dict[str, Any] = {}
        for name, column in self.data.items():
            if isinstance(column, PackedTensor):
                value = column.as_tensor(device) if as_tensors else column
                if value is not None:
                    found[name] = value
            elif name in self.ADDITIONAL_OPTIONAL_KEY_TENSORS:
                found[name] = column if device is None else move(column, device)
        return found

    def select_columns(self, names: Collection[str], *, with_media: bool = False) -> Self:
        """Return a batch of the columns of these names that there are, and of the media; without a plan."""
        media = self.get_multimodal_dict() if with_media else {}
        return self._with_columns({n: c for n, c in self.data.items() if n in names or n in media})

    def to(self, device: torch.device | str, *, on_host: Collection[str] = ()) -> Self:
        """Move tensors and media to a device, the columns `on_host` to the CPU, in place, and return self."""
        for name, column in self.data.items():
            self.data[name] = move(column, "cpu" if name in on_host else device)
        return self

    # Rows.

    @classmethod
    def from_batches(
        cls, batches: Sequence[Mapping[str, Any]], pad_value_dict: Mapping[str, int | float] | None = None
    ) -> Self:
        """Concatenate batches; dense columns of two or more dimensions are padded to the widest along
        dimension 1.

        `pad_value_dict` gives a column's pad value; 0 otherwise.

        Raises:
            SchemaError: no batches, a column that one batch lacks, or parts that do not fit together.
        """
        if not batches:
            raise SchemaError("from_batches got no batches; give at least one")
        names = list(batches[0])
        for index, batch in enumerate(batches):
            if set(batch) != set(names):
                odd = sorted(set(batch) ^ set(names))
                raise SchemaError(f"batch {index} and batch 0 do not have the same columns: {', '.join(odd)}")
        pads = pad_value_dict or {}
        joined = cls({n: concat_columns(n, [b[n] for b in batches], pads.get(n, 0)) for n in names})
        if isinstance(batches[0], BatchedDataDict):
            joined._adopt_facts(batches[0])
        return joined

    def select_indices(self, indices: Sequence[int] | torch.Tensor | np.ndarray[Any, Any]) -> Self:
        """Return the rows at `indices`, in that order; repeats and negative indices are allowed.

        Raises:
            IndexError: an index outside [-N, N).
        """
        return self._with_columns(self._selected(_as_rows(indices, self.size)))

    def slice(self, start: int, end: int) -> Self:
        """Return rows start .. end - 1; dense columns share memory with this batch.

        Raises:
            IndexError: bounds that are not 0 <= start <= end <= N.
        """
        size = self.size
        if not 0 <= start <= end <= size:
            raise IndexError(f"slice [{start}, {end}) of a batch of {size} rows")
        return self._with_columns(
            {name: slice_rows(column, start, end) for name, column in self.data.items()}
        )

    def reorder_data(self, reordered_indices: Sequence[int] | torch.Tensor) -> None:
        """Put row i at place `reordered_indices[i]`, in place; drops a microbatch plan.

        So the order in which rows were taken restores the order they were taken from: rows [c, a, b], which
        were taken from places [2, 0, 1], become [a, b, c].

        Raises:
            SchemaError: not every place 0 .. N - 1 exactly once.
        """
        places = np.asarray(reordered_indices)
        if not np.array_equal(np.sort(places), np.arange(self.size)):
            raise SchemaError(
                f"reorder_data got {len(places)} places for {self.size} rows; "
                f"expected each of 0 to {self.size - 1} once"
            )
        self.data.update(self._selected(torch.from_numpy(np.argsort(places))))
        self.micro_batch_indices = self.micro_batch_lengths = self.elem_counts_per_gb = None

    # Shards.

    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        *,
        dynamic_batching_args: DynamicBatchingArgs | None = None,
        sequence_packing_args: SequencePackingArgs | None = None,
    ) -> list[Self] | tuple[list[Self], list[int]]:
        """Split the rows over `shards` ranks.

        Global batches of `batch_size` rows follow one another; None makes all rows one. Without arguments for
        packing or dynamic batching, shard k gets the contiguous slice k of every global batch. With them,
        rows are laid out microbatch by microbatch, shards carry the plan, all have the same number of
        microbatches per global batch, and `(shards, inverse)` is returned: rows concatenated in rank order
        return to this batch's order by `reorder_data(inverse)`.

        Rows [A A B B C C D D] with batch_size=2 and shards=2 give [A B C D] twice.

        Raises:
            ConfigError: sizes that do not divide, a row over the token budget, or bad arguments.
            SchemaError: columns of different lengths, or no column of lengths.
        """
        args = dynamic_batching_args if sequence_packing_args is None else sequence_packing_args
        plan = plan_microbatches(
            np.zeros(self.size, dtype=np.int64) if args is None else self._lengths(args),
            shards=shards,
            batch_size=batch_size,
            sequence_packing_args=sequence_packing_args,
            dynamic_batching_args=dynamic_batching_args,
        )
        result = [self._shard(plan, rank) for rank in range(shards)]
        if args is None:
            return result
        for shard in result:
            shard.input_key = args.get("input_key", self.input_key)
            shard.input_lengths_key = args["input_lengths_key"]
        return result, plan.inverse

    def get_batch(self, batch_idx: int, batch_size: int | None = None) -> Self:
        """Return global batch `batch_idx` with its part of the microbatch plan.

        `batch_size` (rows of this batch per global batch) counts only where `elem_counts_per_gb` is not set.

        Raises:
            ConfigError: neither of the two is known.
            IndexError: no such global batch.
        """
        counts = self.elem_counts_per_gb
        if counts is None:
            if batch_size is None:
                raise ConfigError("get_batch needs batch_size: the batch has no elem_counts_per_gb")
            start, stop = batch_idx * batch_size, (batch_idx + 1) * batch_size
        else:
            if not 0 <= batch_idx < len(counts):
                raise IndexError(f"global batch {batch_idx} of {len(counts)}")
            start, stop = sum(counts[:batch_idx]), sum(counts[: batch_idx + 1])
        batch = self.slice(start, stop)
        if self.micro_batch_indices is not None:
            batch.micro_batch_indices = [self.micro_batch_indices[batch_idx]]
        if self.micro_batch_lengths is not None:
            batch.micro_batch_lengths = [self.micro_batch_lengths[batch_idx]]
        if counts is not None:
            batch.elem_counts_per_gb = [counts[batch_idx]]
        return batch

    # Microbatches.

    def microbatches(
        self, cut: Cut, size: int, agree: Callable[[int], int] = lambda count: count, *, token_dim: int = 1
    ) -> Iterator[Self]:
        """Return the planned microbatches, or, where `cut` is fixed, those of `size` rows, and dummies behind them.

        Dynamic ones have token columns cut to each one's padded length, packed ones fit one packed row. `agree` says
        how many there are to be in all, from how many there are of the rows.

        Raises:
            ConfigError: fixed size, and the rows are no multiple of `size`.
            SchemaError: no plan, or one of several global batches (take one by `get_batch` first).
        """
        if cut == "fixed":
            rows = self.size
            if size < 1 or rows % size:
                raise ConfigError(
                    f"{rows} rows are not a multiple of the microbatch size ({size}); change it "
                    "(train_micro_batch_size, logprob_batch_size), or switch on sequence_packing or dynamic_batching"
                )
            missing = agree(rows // size) - rows // size
            made = (self.slice(start, start + size) for start in range(0, rows, size))
        else:
            pairs, lengths = self._single_plan()
            names = self._tokens_to_cut(token_dim) if cut == "dynamic" else []
            missing = agree(len(pairs)) - len(pairs)
            planned = zip(pairs, lengths)
            made = (self._planned(start, stop, n, names, token_dim) for (start, stop), n in planned)
        return chain(made, (self.make_dummy() for _ in range(missing)))

    def _tokens_to_cut(self, token_dim: int) -> list[str]:
        if undeclared := sorted(name for name in self.ragged_columns if name in self.data):
            raise SchemaError(
                f"column '{undeclared[0]}' has rows of different lengths and no declaration, so dynamic batching does "
                f"not know whether to cut it with the tokens: declare(FieldSpec('{undeclared[0]}', Kind.PER_TOKEN, "
                "dtype)) before the policy is built, or switch policy.dynamic_batching off"
            )
        return self._token_columns(token_dim)

    def _planned(self, start: int, stop: int, length: int, names: Sequence[str], token_dim: int) -> Self:
        if start == stop:
            return self.make_dummy(length)
        microbatch = self.slice(start, stop)
        for name in names:
            column = microbatch.data[name]
            microbatch.data[name] = column.narrow(token_dim, 0, min(length, column.shape[token_dim]))
        return microbatch

    def make_dummy(self, width: int = 1) -> Self:
        """Return a microbatch that weighs nothing: one row of one token, all masks 0.

        Token columns are `width` wide at most. Other values come from this batch's first row, so that shapes
        and dtypes are right; in an empty batch, zeros and None stand for them. Media are None.
        """
        rows = self.size
        template = self.slice(0, min(rows, 1))
        knows_tokens = self.token_columns is not None or self.input_key in self.data
        names = self._token_columns(1) if knows_tokens else []
        columns = {
            name: dummy_column(
                name, column, max(width, 1) if name in names else None, name == self.input_lengths_key
            )
            for name, column in template.data.items()
        }
        return self._with_columns(columns)

    # Helpers.

    def _adopt_facts(self, other: "BatchedDataDict") -> None:
        for fact in _COLUMN_FACTS:
            setattr(self, fact, getattr(other, fact))

    def _with_columns(self, columns: dict[str, Any]) -> Self:
        made = type(self)(columns)
        made._adopt_facts(self)
        return made

    def _selected(self, rows: torch.Tensor) -> dict[str, Any]:
        return {name: select_rows(column, rows) for name, column in self.data.items()}

    def _lengths(self, args: Mapping[str, Any]) -> np.ndarray[Any, Any]:
        """Return the column of lengths that planner arguments name, held to the token column's width."""
        key = args.get("input_lengths_key")
        if key not in self.data:
            raise SchemaError(
                f"input_lengths_key='{key}' names no column of the batch; "
                f"it has {', '.join(sorted(self.data))}"
            )
        column, tokens = self.data[key], self.data.get(args.get("input_key", self.input_key))
        lengths = column.cpu().numpy() if isinstance(column, torch.Tensor) else np.asarray(column)
        if isinstance(tokens, torch.Tensor) and not tokens.is_nested and self.size:
            row = int(lengths.argmax())
            if lengths[row] > tokens.shape[1]:
                raise SchemaError(
                    f"row {row} has length {lengths[row]} in column '{key}', more than the {tokens.shape[1]} tokens "
                    f"of column '{args.get('input_key', self.input_key)}'"
                )
        return lengths

    def _shard(self, plan: MicrobatchPlan, rank: int) -> Self:
        shard = self._with_columns(self._selected(torch.from_numpy(plan.rank_rows(rank))))
        for name, part in plan.rank_plan(rank).items():
            setattr(shard, name, part)
        return shard

    def _single_plan(self) -> tuple[list[list[int]], list[int]]:
        indices, lengths = self.micro_batch_indices, self.micro_batch_lengths
        if indices is None or lengths is None:
            raise SchemaError(
                "the batch has no microbatch plan (micro_batch_indices, micro_batch_lengths); shard it with "
                "sequence_packing_args or dynamic_batching_args"
            )
        if len(indices) != 1 or len(lengths) != 1:
            raise SchemaError(
                f"the plan spans {len(indices)} global batches; take one with get_batch(batch_idx) first"
            )
        return indices[0], lengths[0]

    def _token_columns(self, sequence_dim: int) -> list[str]:
        dense = {
            name: column
            for name, column in self.data.items()
            if isinstance(column, torch.Tensor) and not column.is_nested and column.dim() > sequence_dim
        }
        if self.token_columns is not None:
            return [name for name in dense if name in self.token_columns]
        if self.input_key not in dense:
            raise SchemaError(
                f"the token column '{self.input_key}' is missing, so the token columns are unknown; "
                "set input_key or token_columns on the batch"
            )
        width = dense[self.input_key].shape[sequence_dim]
        return [name for name, column in dense.items() if column.shape[sequence_dim] == width]


SlicedDataDict = BatchedDataDict
"""What a shard, slice or microbatch of a larger batch is, by its documented name."""


def _as_rows(indices: Sequence[int] | torch.Tensor | np.ndarray[Any, Any], size: int) -> torch.Tensor:
    """Return indices as int64 on the CPU, counted from the front."""
    rows = indices if isinstance(indices, torch.Tensor) else torch.from_numpy(np.asarray(indices))
    if rows.dtype == torch.bool:
        if tuple(rows.shape) != (size,):
            raise IndexError(f"a mask of shape {tuple(rows.shape)} for a batch of {size} rows")
        rows = rows.nonzero().flatten()
    if rows.is_floating_point() and len(rows):
        raise IndexError(f"indices have dtype {rows.dtype}; expected integers or a mask")
    rows = rows.to("cpu", torch.int64)
    if len(rows) and not (-size <= int(rows.min()) and int(rows.max()) < size):
        bad = int(rows.max()) if int(rows.max()) >= size else int(rows.min())
        raise IndexError(f"row {bad} of a batch of {size} rows")
    return torch.where(rows < 0, rows + size, rows)

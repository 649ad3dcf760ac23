"""A step's rows in the driver's memory: samples as they are, padded once when all of a step are there."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from headrace.algorithms.grpo import Traffic
from headrace.data_plane.route_binding import sample_salts
from headrace.data_plane.schema import (
    ROUTE_SALTS,
    ROUTED_EXPERTS_FIELD,
    SAMPLE_ID,
    pad_values,
)
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.distributed.columns import object_array
from headrace.distributed.ragged import RowLayout
from headrace.experience.flatten import flatten
from headrace.experience.sync_rollout_actor import SyncRolloutActor
from headrace.experience.types import Rollout
from headrace.utils.rounding import round_up


class InMemoryRows:
    """Rows as samples, and as padded columns once the policy needs them."""

    rollout_call: tuple[str, dict[str, Any]] = ("rollout_in_memory", {})

    def __init__(self, rollouts: SyncRolloutActor) -> None:
        self._rollouts = rollouts

    @contextmanager
    def opened(self, num_samples: int, group_size: int) -> Iterator[None]:
        """Do nothing: memory needs no opening."""
        yield

    def keep(self, rows: list[Rollout], indices: Sequence[int]) -> list[Rollout]:
        return [rows[i] for i in indices]

    def join(self, parts: Sequence[list[Rollout]]) -> list[Rollout]:
        return list(chain.from_iterable(parts))

    def batch(self, rows: list[Rollout]) -> BatchedDataDict:
        """Return the columns, per-token ones padded on the right to the width that the data plane pads to."""
        side = self._rollouts
        columns = flatten(rows, route_shape=side.generator.route_shape)
        lengths = [len(rollout.token_ids) for rollout in rows]
        layout = RowLayout(lengths, round_up(max(lengths), side.settings.pad_to_multiple))
        assert side.tokenizer.pad_token_id is not None
        pads = pad_values(side.tokenizer.pad_token_id)
        ids = [rollout.sample_id for rollout in rows]
        batch = BatchedDataDict({SAMPLE_ID: object_array(ids)})
        for name, column in columns.items():
            if isinstance(column, torch.Tensor) and column.is_nested:
                column = layout.pad(column.values(), pads[name])  # (sum of lengths, ...) -> (N, S, ...)
            batch[name] = column
        if ROUTED_EXPERTS_FIELD in columns:
            batch[ROUTE_SALTS] = sample_salts(ids)
        return batch

    def reduce(
        self,
        batch: BatchedDataDict,
        reduce_fn: Callable[..., Mapping[str, torch.Tensor]],
        fields: Sequence[str],
    ) -> Mapping[str, torch.Tensor]:
        return reduce_fn(BatchedDataDict({name: batch[name] for name in fields if name in batch}))

    def write(self, batch: BatchedDataDict, columns: Mapping[str, torch.Tensor]) -> None:
        batch.update(columns)

    def derive(
        self,
        batch: BatchedDataDict,
        make: Callable[..., Mapping[str, torch.Tensor]],
        fields: Sequence[str],
    ) -> None:
        batch.update(self.reduce(batch, make, fields))

    def read(
        self, batch: BatchedDataDict, names: Sequence[str], count: int | None = None
    ) -> Mapping[str, Any]:
        return {name: batch[name][:count] for name in names}

    def finish(self, batch: BatchedDataDict) -> None:
        """Do nothing: the rows go with the batch."""

    def traffic(self) -> Traffic:
        return Traffic()

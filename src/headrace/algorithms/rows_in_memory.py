"""GRPO with rows in memory: the driver holds every tensor. The plain counterpart of `rows_in_store.py`.

Rows are padded once, when all rollouts of a step are there, to the width that the data plane pads to.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from headrace.algorithms.grpo import Traffic
from headrace.algorithms.sample_table import SampleTable
from headrace.data_plane.schema import PREV_UNFILTERED_LOGPROBS, SAMPLE_ID, UNFILTERED_LOGPROBS, pad_values
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.distributed.columns import object_array
from headrace.environments.interfaces import Environment
from headrace.experience.flatten import flatten, per_sample_values, to_padded_batch
from headrace.experience.rollouts import RolloutSettings, run_rollouts
from headrace.experience.types import Prompt, Rollout
from headrace.models.interfaces import Generator, LossFn
from headrace.models.policy.lm_policy import Policy
from headrace.models.router_replay.stats import ReplayStats
from headrace.utils.rounding import round_up


@dataclass
class MemoryBatch:
    """Rollouts, and their padded columns once a stage needs them."""

    rollouts: list[Rollout]
    columns: BatchedDataDict | None = None


class InMemoryRows:
    """Rows as padded tensors in the driver's memory."""

    def __init__(
        self,
        policy: Policy,
        generator: Generator,
        tokenizer: Any,
        environment: Environment,
        settings: RolloutSettings,
    ) -> None:
        self._policy = policy
        self._generator = generator
        self._tokenizer = tokenizer
        self._environment = environment
        self._settings = settings
        self._group_size = 1

    @contextmanager
    def opened(self, num_samples: int, group_size: int) -> Iterator[None]:
        """Remember the group size; memory needs no opening."""
        self._group_size = group_size
        yield

    def rollout(
        self, prompts: Sequence[Prompt], *, tag: str, seed: int
    ) -> tuple[MemoryBatch, SampleTable, dict[str, float]]:
        """Roll out and keep the samples as they are."""
        try:
            batch = run_rollouts(
                prompts,
                generator=self._generator,
                tokenizer=self._tokenizer,
                environment=self._environment,
                settings=self._settings,
                group_size=self._group_size,
                seed=seed,
                tag=tag,
            )
        finally:
            self._generator.release()
        table = SampleTable.from_values(per_sample_values(batch.rollouts))
        return MemoryBatch(batch.rollouts), table, batch.generation_metrics

    def keep(self, rows: MemoryBatch, indices: Sequence[int]) -> MemoryBatch:
        """Return the samples at `indices`."""
        return MemoryBatch([rows.rollouts[i] for i in indices])

    def join(self, parts: Sequence[MemoryBatch]) -> MemoryBatch:
        return MemoryBatch([r for part in parts for r in part.rollouts])

    def prev_logprobs(self, rows: MemoryBatch, *, unfiltered: bool) -> None:
        """Score the rows with the policy."""
        columns = self._columns(rows)
        scored = self._policy.get_logprobs(columns, unfiltered=unfiltered)
        columns["prev_logprobs"] = scored["logprobs"]
        if unfiltered:
            columns[PREV_UNFILTERED_LOGPROBS] = scored[UNFILTERED_LOGPROBS]

    def reference_logprobs(self, rows: MemoryBatch) -> None:
        """Score the rows with the reference."""
        columns = self._columns(rows)
        scored = self._policy.get_reference_policy_logprobs(columns)
        columns["reference_policy_logprobs"] = scored["reference_logprobs"]

    def reduce(
        self,
        rows: MemoryBatch,
        reduce_fn: Callable[..., Mapping[str, torch.Tensor]],
        fields: Sequence[str],
    ) -> dict[str, torch.Tensor]:
        columns = self._columns(rows)
        return dict(reduce_fn(BatchedDataDict({f: columns[f] for f in fields if f in columns})))

    def write(self, rows: MemoryBatch, columns: Mapping[str, torch.Tensor]) -> None:
        self._columns(rows).update(columns)

    def derive(
        self,
        rows: MemoryBatch,
        make: Callable[..., Mapping[str, torch.Tensor]],
        fields: Sequence[str],
    ) -> None:
        """Add what `make` gives."""
        self.write(rows, self.reduce(rows, make, fields))

    def train(self, rows: MemoryBatch, loss_fn: LossFn) -> dict[str, Any]:
        return self._policy.train(self._columns(rows), loss_fn)

    def conversations(self, rows: MemoryBatch, count: int) -> list[list[dict[str, str]]]:
        return list(self._columns(rows)["message_log"][:count])

    def finish(self, rows: MemoryBatch) -> None:
        rows.columns = None

    def replay_stats(self) -> dict[str, ReplayStats]:
        return self._policy.take_replay_stats()

    def columns(self, rows: MemoryBatch, names: Sequence[str]) -> Mapping[str, torch.Tensor]:
        columns = self._columns(rows)
        return {name: columns[name] for name in names}

    def traffic(self) -> Traffic:
        return Traffic()

    def _columns(self, rows: MemoryBatch) -> BatchedDataDict:
        if rows.columns is None:
            flat = flatten(rows.rollouts, route_shape=self._generator.route_shape)
            width = round_up(int(flat.lengths.max()), self._settings.pad_to_multiple)
            rows.columns = to_padded_batch(flat, pad_values(int(self._tokenizer.pad_token_id)), width)
            rows.columns[SAMPLE_ID] = object_array(flat.sample_ids)
        return rows.columns

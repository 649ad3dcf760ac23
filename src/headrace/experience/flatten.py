"""From rollouts to columns: one flat tensor per column, and the row offsets that all of them share.

Nothing is padded here but by `to_padded_batch`, which a loop with its rows in memory calls.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch

from headrace.data_plane.route_binding import sample_salts
from headrace.data_plane.routes_codec import RouteShape
from headrace.data_plane.schema import (
    INPUT_IDS,
    INPUT_LENGTHS,
    ROUTE_SALTS,
    ROUTED_EXPERTS_FIELD,
    SAMPLE_MASK,
)
from headrace.distributed.batched_data_dict import BatchedDataDict
from headrace.distributed.ragged import RowLayout, nested_from_ragged, offsets_from_lengths
from headrace.errors import SchemaError
from headrace.experience.rollout_routes import route_facts, routes_column
from headrace.experience.rollouts import group_uid
from headrace.experience.types import Rollout

Column = torch.Tensor | np.ndarray

PER_SAMPLE_KEYS = (
    "sample_id",
    "uid",
    "prompt_uid",
    "correct",
    "reward",
    "truncated",
    "group",
    "group_index",
    "prompt_tokens",
    "response_tokens",
    "longest_turn_tokens",
    "total_tokens",
    "turns",
    "weight_version",
    "routes_missing",
    "routes_digest",
    "metrics",
)
"""What `per_sample_values` returns."""


@dataclass(frozen=True)
class FlatBatch:
    """N samples as columns on the CPU.

    `per_token` columns are flat, (sum of lengths,); row i of each is `[offsets[i], offsets[i + 1])`.
    `per_sample` columns are (N,) tensors, and object arrays of N.
    """

    sample_ids: list[str]
    offsets: torch.Tensor
    per_token: dict[str, torch.Tensor]
    per_sample: dict[str, Column]

    @property
    def lengths(self) -> torch.Tensor:
        """(N,) int64."""
        return self.offsets.diff()

    def columns(self) -> dict[str, Column]:
        """Return all columns, the per-token ones as jagged (N, j) views of the flat tensors."""
        nested: dict[str, Column] = {
            name: nested_from_ragged(values, self.offsets) for name, values in self.per_token.items()
        }
        return {**nested, **self.per_sample}


def flatten(rollouts: Sequence[Rollout], *, route_shape: RouteShape | None = None) -> FlatBatch:
    """Return the columns that a rollout's first put carries.

    `input_ids` int64, `token_mask` uint8 and `generation_logprobs` float32 per token; `input_lengths` int64,
    `sample_mask` float32 (ones) and the objects `message_log` (a list of `{"role", "content"}`) per sample. A
    sample without response tokens is legal. With `route_shape`, also `routed_experts` (tokens, layers, k) per token.

    Example: token lists of 2 and 3 give `input_ids` of 5 values and offsets `[0, 2, 5]`.

    Raises:
        SchemaError: no samples, a repeated sample id, lists of one sample that differ in length, a logprob that is
            not finite, or a sample whose routes are absent or impossible.
    """
    _check_rows(rollouts)
    lengths = _int64(len(r.token_ids) for r in rollouts)
    offsets = offsets_from_lengths(lengths)
    total = int(offsets[-1])
    logprobs = _concatenate((r.logprobs for r in rollouts), np.float32, total)
    _check_finite(logprobs, offsets, rollouts)
    per_token = {
        INPUT_IDS: _concatenate((r.token_ids for r in rollouts), np.int64, total),
        "token_mask": _concatenate((r.token_mask for r in rollouts), np.uint8, total),
        "generation_logprobs": logprobs,
    }
    if route_shape is not None:
        per_token[ROUTED_EXPERTS_FIELD] = routes_column(rollouts, route_shape)
    per_sample: dict[str, Column] = {
        INPUT_LENGTHS: lengths,
        SAMPLE_MASK: torch.ones(len(rollouts)),
        "message_log": _message_logs(rollouts),
    }
    return FlatBatch([r.sample_id for r in rollouts], offsets, per_token, per_sample)


def to_padded_batch(
    flat: FlatBatch, pad_values: Mapping[str, int | float], pad_to: int | None = None
) -> BatchedDataDict:
    """Return the columns with per-token ones padded on the right to (N, `pad_to`).

    `pad_values` is keyed by column, as `schema.pad_values` returns it; without `pad_to`, the longest row
    sets the width. Beside routes there are their samples' salts (`sample_salts`).

    Raises:
        SchemaError: a row is longer than `pad_to`.
    """
    layout = RowLayout(flat.lengths, pad_to)
    padded = {name: layout.pad(values, pad_values[name]) for name, values in flat.per_token.items()}
    salts = {ROUTE_SALTS: sample_salts(flat.sample_ids)} if ROUTED_EXPERTS_FIELD in padded else {}
    return BatchedDataDict({**padded, **flat.per_sample, **salts})


def per_sample_values(rollouts: Sequence[Rollout]) -> dict[str, torch.Tensor | list[Any]]:
    """Return what a driver decides by: a few values per sample, each an (N,) tensor or a list of N.

    The keys are `PER_SAMPLE_KEYS`. `uid` names the sample's group in this step, `prompt_uid` its prompt in
    the dataset; `group` numbers the groups from 0 by first appearance. `prompt_tokens` counts the tokens
    before the first generated one, `response_tokens` the generated ones of all turns,
    `longest_turn_tokens` those of the longest, `total_tokens` the whole row. `correct` is None where there is no
    verdict; `metrics` are the environment's own, by name. `routes_missing` and `routes_digest` are those of
    `rollout_routes.route_facts`.
    """
    uids = [group_uid(r) for r in rollouts]
    numbers = {uid: number for number, uid in enumerate(dict.fromkeys(uids))}
    missing, digests = route_facts(rollouts)
    return {
        "sample_id": [r.sample_id for r in rollouts],
        "uid": uids,
        "prompt_uid": [r.prompt.uid for r in rollouts],
        "correct": [r.correct for r in rollouts],
        "reward": torch.tensor([r.reward for r in rollouts], dtype=torch.float32),
        "truncated": torch.tensor([r.truncated for r in rollouts], dtype=torch.bool),
        "group": _int64(numbers[uid] for uid in uids),
        "group_index": _int64(r.group_index for r in rollouts),
        "prompt_tokens": _int64(_prompt_tokens(r) for r in rollouts),
        "response_tokens": _int64(r.response_tokens for r in rollouts),
        "longest_turn_tokens": _int64(r.longest_turn_tokens for r in rollouts),
        "total_tokens": _int64(len(r.token_ids) for r in rollouts),
        "turns": _int64(r.turns for r in rollouts),
        "weight_version": _int64(r.weight_version for r in rollouts),
        "routes_missing": missing,
        "routes_digest": digests,
        "metrics": [r.metrics for r in rollouts],
    }


def _int64(values: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def _prompt_tokens(rollout: Rollout) -> int:
    return rollout.token_mask.index(1) if 1 in rollout.token_mask else len(rollout.token_mask)


def _concatenate(rows: Iterable[Sequence[float]], dtype: type[np.generic], total: int) -> torch.Tensor:
    # One pass over all lists into one buffer: less time than an array per row and a concatenation. A number
    # too large for its dtype becomes infinite, which the caller refuses.
    with np.errstate(over="ignore"):
        return torch.from_numpy(np.fromiter(chain.from_iterable(rows), dtype=dtype, count=total))


def _message_logs(rollouts: Sequence[Rollout]) -> np.ndarray:
    logs = np.empty(len(rollouts), dtype=object)
    for i, rollout in enumerate(rollouts):
        logs[i] = [{"role": m.role, "content": m.content} for m in rollout.messages]
    return logs


def _check_rows(rollouts: Sequence[Rollout]) -> None:
    if not rollouts:
        raise SchemaError("no rollouts to flatten; expected at least one sample")
    seen: set[str] = set()
    for rollout in rollouts:
        if rollout.sample_id in seen:
            raise SchemaError(
                f"sample id '{rollout.sample_id}' appears twice in one batch; ids must be unique"
            )
        seen.add(rollout.sample_id)
        sizes = {
            "token_ids": len(rollout.token_ids),
            "token_mask": len(rollout.token_mask),
            "logprobs": len(rollout.logprobs),
        }
        if len(set(sizes.values())) > 1:
            found = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise SchemaError(
                f"sample '{rollout.sample_id}' has lists of different lengths ({found}); align them"
            )


def _check_finite(logprobs: torch.Tensor, offsets: torch.Tensor, rollouts: Sequence[Rollout]) -> None:
    bad = torch.nonzero(~torch.isfinite(logprobs)).flatten().tolist()
    if bad:
        row = int(torch.searchsorted(offsets, bad[0], right=True)) - 1
        raise SchemaError(
            f"column 'generation_logprobs' of sample '{rollouts[row].sample_id}' is {float(logprobs[bad[0]])} "
            f"at position {bad[0] - int(offsets[row])} ({len(bad)} such values in all); expected finite numbers"
        )

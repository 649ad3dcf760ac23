"""From samples to the columns of their first put: per-token ones jagged over one set of offsets, nothing padded."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from headrace.data_plane.routes_codec import RouteShape
from headrace.data_plane.schema import (
    INPUT_IDS,
    INPUT_LENGTHS,
    ROUTED_EXPERTS_FIELD,
    SAMPLE_MASK,
    TOKEN_WEIGHT_VERSION,
)
from headrace.distributed.columns import object_array
from headrace.distributed.ragged import nested_from_ragged, offsets_from_lengths
from headrace.errors import SchemaError
from headrace.experience.own_columns import own_columns
from headrace.experience.rollout_routes import route_facts, routes_column
from headrace.experience.types import Rollout

Column = torch.Tensor | np.ndarray

_FACTS: dict[str, tuple[torch.dtype | None, Callable[[Rollout], Any]]] = {
    "sample_id": (None, attrgetter("sample_id")),
    "uid": (None, attrgetter("uid")),
    "prompt_uid": (None, attrgetter("prompt.uid")),
    "correct": (None, attrgetter("correct")),
    "metrics": (None, attrgetter("metrics")),
    "reward": (torch.float32, attrgetter("reward")),
    "truncated": (torch.bool, attrgetter("truncated")),
    "group_index": (torch.int64, attrgetter("group_index")),
    "prompt_tokens": (torch.int64, attrgetter("prompt_tokens")),
    "response_tokens": (torch.int64, attrgetter("response_tokens")),
    "longest_turn_tokens": (torch.int64, attrgetter("longest_turn_tokens")),
    "total_tokens": (torch.int64, lambda rollout: len(rollout.token_ids)),
    "turns": (torch.int64, attrgetter("turns")),
    "weight_version": (torch.int64, attrgetter("weight_version")),
    "weight_version_min": (torch.int64, attrgetter("weight_version_min")),
}
"""What the driver is told of a sample: the dtype of its (N,) tensor (None: a list of N), and the value."""

PER_SAMPLE_KEYS = (*_FACTS, "group", "routes_missing", "routes_digest")
"""What `per_sample_values` returns."""


def flatten(
    rollouts: Sequence[Rollout], *, route_shape: RouteShape | None = None, asked: Sequence[str] = ()
) -> dict[str, Column]:
    """Return the columns that a rollout's first put carries.

    `input_ids` int64, `token_mask` uint8 and `generation_logprobs` float32 per token, jagged (N, j); `input_lengths`
    int64, `sample_mask` float32 (ones) and the objects `message_log` (a list of `{"role", "content"}`) per sample. A
    sample without response tokens is legal. Where weights may change inside a sample, also `token_weight_version` int32
    per token. With `route_shape`, also `routed_experts` (tokens, layers, k) per token;
    with `asked` the columns that a loss of the user's own asks for (`own_columns`).

    Raises:
        SchemaError: no samples, a repeated sample id, lists of one sample that differ in length, a logprob that is
            not finite, or a sample whose routes are absent or impossible.
    """
    _check_rows(rollouts)
    lengths = torch.tensor([len(r.token_ids) for r in rollouts])
    offsets = offsets_from_lengths(lengths)
    total = int(offsets[-1])
    per_token = {
        INPUT_IDS: _concatenate((r.token_ids for r in rollouts), np.int64, total),
        "token_mask": _concatenate((r.token_mask for r in rollouts), np.uint8, total),
        "generation_logprobs": _concatenate((r.logprobs for r in rollouts), np.float32, total),
    }
    _check_finite(per_token["generation_logprobs"], offsets, rollouts)
    if any(r.token_versions for r in rollouts):
        versions = ([*r.token_versions, *[-1] * (len(r.token_ids) - len(r.token_versions))] for r in rollouts)
        per_token[TOKEN_WEIGHT_VERSION] = _concatenate(versions, np.int32, total)
    if route_shape is not None:
        per_token[ROUTED_EXPERTS_FIELD] = routes_column(rollouts, route_shape)
    return {
        **{name: nested_from_ragged(values, offsets) for name, values in per_token.items()},
        INPUT_LENGTHS: lengths,
        SAMPLE_MASK: torch.ones(len(rollouts)),
        "message_log": object_array(
            [[{"role": m.role, "content": m.content} for m in r.messages] for r in rollouts]
        ),
        **own_columns(rollouts, asked),
    }


def per_sample_values(rollouts: Sequence[Rollout]) -> dict[str, torch.Tensor | list[Any]]:
    """Return what a driver decides by: a few values per sample, each an (N,) tensor or a list of N.

    The keys are `PER_SAMPLE_KEYS`. `uid` names the sample's group in this step, `prompt_uid` its prompt in
    the dataset; `group` numbers the groups from 0 by first appearance. `total_tokens` counts the whole row.
    `routes_missing` and `routes_digest` are those of `rollout_routes.route_facts`.
    """
    values: dict[str, Any] = {}
    for name, (dtype, fact) in _FACTS.items():
        facts = [fact(rollout) for rollout in rollouts]
        values[name] = facts if dtype is None else torch.tensor(facts, dtype=dtype)
    numbers = {uid: number for number, uid in enumerate(dict.fromkeys(values["uid"]))}
    values["group"] = torch.tensor([numbers[uid] for uid in values["uid"]])
    values["routes_missing"], values["routes_digest"] = route_facts(rollouts)
    return values


def _concatenate(rows: Iterable[Sequence[int | float]], dtype: type[np.generic], total: int) -> torch.Tensor:
    # A float64 value beyond float32 becomes infinite, which the caller refuses.
    with np.errstate(over="ignore"):
        return torch.from_numpy(np.fromiter(chain.from_iterable(rows), dtype=dtype, count=total))


def _check_rows(rollouts: Sequence[Rollout]) -> None:
    if not rollouts:
        raise SchemaError("no rollouts to flatten; expected at least one sample")
    repeated, count = Counter(rollout.sample_id for rollout in rollouts).most_common(1)[0]
    if count > 1:
        raise SchemaError(f"sample id '{repeated}' appears twice in one batch; ids must be unique")
    for rollout in rollouts:
        sizes = {name: len(getattr(rollout, name)) for name in ("token_ids", "token_mask", "logprobs")}
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

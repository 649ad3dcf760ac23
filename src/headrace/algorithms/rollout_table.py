"""What the driver knows of a step's samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any

import torch

from headrace.data_plane.schema import SAMPLE_ID
from headrace.experience.metrics import rollout_metrics

_DTYPES = {
    "reward": torch.float32,
    "truncated": torch.bool,
    "routes_missing": torch.float32,
    **dict.fromkeys(
        ("response_tokens", "longest_turn_tokens", "total_tokens", "routes_digest", "turns"), torch.int64
    ),
}


@dataclass
class RolloutTable:
    """What the driver knows of N samples: a few values per sample, no tensor per token.

    `source`: the value's name in `experience.flatten.per_sample_values`, where it is another one.
    """

    sample_ids: list[str] = field(metadata={"source": "sample_id"})
    uids: list[str] = field(metadata={"source": "uid"})
    rewards: torch.Tensor = field(metadata={"source": "reward"})  # (N,) float32, as the environment gave them
    truncated: torch.Tensor  # (N,) bool; True where the token limit cut the completion
    response_tokens: torch.Tensor  # (N,) int64, of all turns
    longest_turn_tokens: torch.Tensor  # (N,) int64
    total_tokens: torch.Tensor  # (N,) int64, prompt included
    routes_missing: torch.Tensor  # (N,) float32: fraction of rows without a recorded route
    routes_digest: torch.Tensor  # (N,) int64 content hashes of the recorded routes; 0 without
    turns: torch.Tensor  # (N,) int64
    correct: list[bool | None]  # the environment's verdicts; None where it gives none
    metrics: list[dict[str, float]]  # the environment's own, by name

    def __len__(self) -> int:
        return len(self.sample_ids)

    @property
    def group_ids(self) -> torch.Tensor:
        """(N,) int64: equal for samples of the same prompt, numbered by first appearance."""
        numbers: dict[str, int] = {}
        return torch.tensor([numbers.setdefault(uid, len(numbers)) for uid in self.uids], dtype=torch.int64)

    @staticmethod
    def sources() -> list[str]:
        """Return the names, in `experience.flatten.per_sample_values`, of the values that make a table."""
        return [column.metadata.get("source", column.name) for column in fields(RolloutTable)]

    @staticmethod
    def tag_keys() -> list[str]:
        """Return those that rows have as tags, for `from_tags`."""
        return [name for name in RolloutTable.sources() if name != SAMPLE_ID]

    @staticmethod
    def from_values(values: Mapping[str, Any]) -> "RolloutTable":
        return RolloutTable(*[values[name] for name in RolloutTable.sources()])

    @staticmethod
    def from_tags(sample_ids: Sequence[str], tags: Sequence[Mapping[str, Any]]) -> "RolloutTable":
        """Return the table of rows whose tags have all `sources` but their ids."""
        values: dict[str, Any] = {name: [tag[name] for tag in tags] for name in RolloutTable.tag_keys()}
        for name, dtype in _DTYPES.items():
            values[name] = torch.tensor(values[name], dtype=dtype)
        return RolloutTable.from_values({**values, SAMPLE_ID: list(sample_ids)})

    def select(self, indices: Sequence[int]) -> "RolloutTable":
        """Return the samples at `indices`, in that order."""
        at = torch.as_tensor(list(indices), dtype=torch.int64)
        chosen: list[Any] = [
            column[at] if isinstance(column, torch.Tensor) else [column[i] for i in indices]
            for column in vars(self).values()
        ]
        return RolloutTable(*chosen)

    @staticmethod
    def join(parts: Sequence["RolloutTable"]) -> "RolloutTable":
        """Return the samples of all parts, in order."""
        joined: list[Any] = [
            torch.cat(same) if isinstance(same[0], torch.Tensor) else list(chain.from_iterable(same))
            for same in zip(*[vars(part).values() for part in parts])
        ]
        return RolloutTable(*joined)

    def drawn_metrics(self) -> dict[str, float]:
        """Return what is worth plotting of the samples, whether they train or not."""
        facts = {name: c.tolist() if isinstance(c, torch.Tensor) else c for name, c in vars(self).items()}
        return {
            "reward/mean": float(self.rewards.mean()),
            "reward/std": float(self.rewards.std(unbiased=False)),
            **rollout_metrics({"reward": facts["rewards"], **facts}),
        }

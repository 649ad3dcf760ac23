"""Small batches for the contract tests."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDict

from headrace.data_plane import DataPlaneClient, KVBatchMeta
from headrace.data_plane.codec import nest

Start = Callable[..., DataPlaneClient]


def wire(rows: int, **columns: object) -> TensorDict:
    return TensorDict(columns, batch_size=[rows])


def tokens(*rows: Sequence[int]) -> torch.Tensor:
    return nest([torch.tensor(list(row), dtype=torch.int64) for row in rows])


def put_numbers(
    client: DataPlaneClient, ids: Sequence[str], partition: str = "p", **columns: float
) -> KVBatchMeta:
    """Put dense float columns, `name=first value`, counting up by row."""
    values = {name: torch.arange(len(ids), dtype=torch.float32) + first for name, first in columns.items()}
    return client.put_samples(ids, partition, fields=wire(len(ids), **values))


def numbers(client: DataPlaneClient, ids: Sequence[str], name: str, partition: str = "p") -> list[float]:
    return client.get_samples(ids, partition, [name])[name].tolist()


def register(client: DataPlaneClient, *tasks: str, rows: int = 8, **options: Any) -> None:
    client.register_partition("p", ["x", "y"], rows, list(tasks), **options)


def claim(
    client: DataPlaneClient, count: int, task: str = "train", *fields: str, **options: Any
) -> list[str] | None:
    """Claim without waiting; the ids."""
    options = {"blocking": False, **options}
    meta = client.claim_meta("p", task, list(fields) or ["x"], count, **options)
    return None if meta is None else meta.sample_ids

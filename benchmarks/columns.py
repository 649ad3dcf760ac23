"""Batches that the benchmarks move: five per-token columns of a rollout, and routes where asked."""

from dataclasses import dataclass

import torch

PER_TOKEN = {
    "input_ids": torch.int64,
    "token_mask": torch.uint8,
    "generation_logprobs": torch.float32,
    "prev_logprobs": torch.float32,
    "advantages": torch.float32,
}
ROUTES = "routed_experts"
ROUTE_LAYERS, ROUTE_TOP_K = 16, 8


@dataclass(frozen=True)
class Batch:
    """Padded columns (N, S, ...), and how long each row is, (N,) int64."""

    lengths: torch.Tensor
    padded: dict[str, torch.Tensor]

    @property
    def ids(self) -> list[str]:
        """One id per row."""
        return [f"s{row}" for row in range(len(self.lengths))]

    def ragged(self) -> dict[str, list[torch.Tensor]]:
        """The rows of each column, without padding, as tensors of their own."""
        lengths = self.lengths.tolist()
        return {
            name: [row[:length].clone() for row, length in zip(column, lengths)]
            for name, column in self.padded.items()
        }


def lognormal(rows: int, median: int, longest: int, *, shortest: int = 1) -> torch.Tensor:
    """Lengths (rows,), the longest of them `longest`."""
    generator = torch.Generator().manual_seed(rows)
    lengths = torch.empty(rows).log_normal_(0.0, 0.6, generator=generator).mul_(median)
    lengths = lengths.clamp_(shortest, longest).long()
    lengths[0] = longest
    return lengths


def uniform(rows: int, shortest: int, longest: int) -> torch.Tensor:
    """Lengths (rows,), the longest of them `longest`."""
    lengths = torch.randint(shortest, longest + 1, (rows,), generator=torch.Generator().manual_seed(rows))
    lengths[0] = longest
    return lengths


def make_batch(lengths: torch.Tensor, *, routes: bool = False, columns: int = len(PER_TOKEN)) -> Batch:
    """Return a batch of random values, with zeros where a row has ended."""
    width = int(lengths.max())
    inside = torch.arange(width)[None, :] < lengths[:, None]
    names = dict(list(PER_TOKEN.items())[:columns])
    names |= {f"extra_{i}": torch.float32 for i in range(columns - len(names))}
    padded = {name: (torch.randint(1, 100, inside.shape) * inside).to(dtype) for name, dtype in names.items()}
    if routes:
        shape = (*inside.shape, ROUTE_LAYERS, ROUTE_TOP_K)
        ids = torch.randint(0, 128, shape, dtype=torch.uint8)
        padded[ROUTES] = ids.mul_(inside[:, :, None, None].to(torch.uint8))
    return Batch(lengths, padded)

"""One replica over several ranks: every rank holds the same packed row and works on its part of the tokens.

Context ranks run the model on consecutive parts of the row; attention exchanges them for parts of the heads.
Tensor ranks run it on the same tokens with parts of the matrices. All ranks then score disjoint tokens with the
whole output head, and one sum gives every rank the scores of all.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from headrace.distributed.topology import Topology
from headrace.models.automodel.exchange import scatter_tokens, sum_of_ranks


@dataclass(frozen=True)
class Replica:
    """The part of a replica's tokens that is this rank's; a packed row is a multiple of the ranks long."""

    topology: Topology
    sequence_parallel: bool = False

    def own_kwargs(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of the model's forward on this rank: its context part of the row."""
        size = self.topology.layout.context
        if size == 1:
            return kwargs
        rank = dist.get_rank(self.topology.context)
        part = {name: kwargs[name].chunk(size, dim=1)[rank] for name in ("input_ids", "position_ids")}
        return {**kwargs, **part, "context_group": self.topology.context}

    def own_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states (1, T / ranks, H) of the tokens that this rank scores, of what its model gave."""
        if self.sequence_parallel or self.topology.layout.tensor == 1:
            return hidden
        return scatter_tokens(hidden, self.topology.tensor)

    def own_tokens(self, total: int) -> tuple[int, int]:
        """Return [start, stop) of the tokens that this rank scores in a packed row of `total`."""
        part = total // self.topology.layout.replica_size
        start = dist.get_rank(self.topology.replica) * part
        return start, start + part

    def join(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of what the ranks hold; every rank's gradient goes back to its own part alone."""
        return sum_of_ranks(values, self.topology.replica)

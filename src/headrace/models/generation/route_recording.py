"""The routes of one decoded batch: of its distinct prompts' prefill, and of the rows that each decode step fed."""

from dataclasses import dataclass, field

import torch

from headrace.data_plane.routes_codec import RouteShape, missing_mark


@dataclass
class RouteRecording:
    """Collects the routes of a batch of B rows, forward by forward.

    `lengths` (U) are the tokens of the distinct prompts, padded on the left to a common width; `source` (B) says which
    of them each row has.
    """

    shape: RouteShape
    lengths: torch.Tensor
    source: torch.Tensor
    _prefill: torch.Tensor | None = None
    _steps: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def add_prefill(self, routes: torch.Tensor | None) -> None:
        """Take the routes of the prefill, (U x width, layers, k), padding included."""
        assert routes is not None
        self._prefill = routes.view(len(self.lengths), -1, self.shape.num_layers, self.shape.top_k)

    def add_step(self, live: torch.Tensor, routes: torch.Tensor | None) -> None:
        """Take the routes, (b, layers, k), of a decode step that fed one token to each of the rows `live` (b)."""
        assert routes is not None
        self._steps.append((live, routes))

    def rows(self, counts: torch.Tensor) -> list[torch.Tensor]:
        """Return each row's routes on the CPU, (prompt + count - 1, layers, k), after `counts` (B) new tokens."""
        assert self._prefill is not None
        prefill, width = self._prefill.cpu(), self._prefill.shape[1]
        decoded = self._decoded().cpu()
        lengths = self.lengths.tolist()
        return [
            torch.cat([prefill[prompt, width - lengths[prompt] :], decoded[row, : count - 1]])
            for row, (prompt, count) in enumerate(zip(self.source.tolist(), counts.tolist()))
        ]

    def _decoded(self) -> torch.Tensor:
        """Return (B, steps, layers, k): the token that step s fed, missing where a row had ended."""
        dtype = self.shape.dtype
        size = (len(self.source), len(self._steps), self.shape.num_layers, self.shape.top_k)
        out = torch.full(size, missing_mark(dtype), dtype=dtype, device=self.source.device)
        for step, (live, ids) in enumerate(self._steps):
            out[live, step] = ids
        return out

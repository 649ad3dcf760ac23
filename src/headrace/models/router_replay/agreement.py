"""How far two sets of routes of the same tokens agree."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from headrace.data_plane.routes_codec import missing_rows
from headrace.errors import ReplayError


@dataclass(frozen=True)
class Agreement:
    """Sums over compared rows, on the CPU, so that agreements of microbatches and of ranks add up.

    `rows`, `exact` and `iou` are (layers,): rows that both sides have, those with the same set of experts, and the sum
    of their intersection over union. `tokens` were compared in at least one layer, `tokens_differing` differ in one.
    """

    rows: torch.Tensor
    exact: torch.Tensor
    iou: torch.Tensor
    tokens: int
    tokens_differing: int

    def __add__(self, other: "Agreement") -> "Agreement":
        return Agreement(
            self.rows + other.rows,
            self.exact + other.exact,
            self.iou + other.iou,
            self.tokens + other.tokens,
            self.tokens_differing + other.tokens_differing,
        )

    def metrics(self) -> dict[str, float]:
        """Return shares over all layers: `route_exact`, `route_iou`, `route_tokens_differing`; empty without rows."""
        rows = int(self.rows.sum())
        if rows == 0:
            return {}
        return {
            "route_exact": float(self.exact.sum()) / rows,
            "route_iou": float(self.iou.sum()) / rows,
            "route_tokens_differing": self.tokens_differing / self.tokens,
        }

    def per_layer(self) -> dict[str, list[float]]:
        """Return `exact` and `iou` as shares per layer; nan for a layer without rows."""
        return {"exact": (self.exact / self.rows).tolist(), "iou": (self.iou / self.rows).tolist()}


def add_agreements(parts: Iterable[Agreement | None]) -> Agreement | None:
    """Return the sum of the parts that there are, None if there are none."""
    found = [part for part in parts if part is not None]
    return sum(found[1:], found[0]) if found else None


def route_agreement(left: torch.Tensor, right: torch.Tensor, mask: torch.Tensor | None = None) -> Agreement:
    """Compare routes (T, layers, k) as sets of experts, where neither is missing and `mask` (T,) is not 0.

    Example: experts [1, 2] against [2, 3] have intersection over union 1/3, and [1, 2] against [2, 1] agree exactly.

    Raises:
        ReplayError: different shapes.
    """
    if left.shape != right.shape or left.dim() != 3:
        raise ReplayError(
            f"routes of shape {tuple(left.shape)} against {tuple(right.shape)}; expected (T, layers, k)"
        )
    top_k = left.shape[-1]
    compared = ~(missing_rows(left) | missing_rows(right))
    if mask is not None:
        compared &= mask.bool().unsqueeze(1)
    common = torch.stack([_common(left[:, i], right[:, i]) for i in range(left.shape[1])], dim=1)
    exact = (common == top_k) & compared
    iou = (common / (2 * top_k - common)) * compared
    return Agreement(
        compared.sum(0).cpu(),
        exact.sum(0).cpu(),
        iou.double().sum(0).cpu(),
        int(compared.any(1).sum()),
        int((compared & ~exact).any(1).sum()),
    )


def _common(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return how many experts two (T, k) choices share."""
    wide, other = left.to(torch.int32), right.to(torch.int32)
    return (wide.unsqueeze(2) == other.unsqueeze(1)).any(2).sum(1)

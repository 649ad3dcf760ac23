"""Why two traces of the same routes differ: a shift, renamed experts, rows of another call, or single rows."""

from dataclasses import dataclass
from typing import Literal

import torch

from headrace.data_plane.routes_codec import missing_rows, signed_routes

DifferenceKind = Literal["shape", "token_shift", "layer_shift", "renamed_experts", "stale", "rows"]

_LONGEST_SHIFT = 4


@dataclass(frozen=True)
class RouteDifference:
    """The first difference between expected and actual routes, and the simplest cause that explains all of it.

    `token` and `layer` are those of the first differing row, -1 where shapes differ; `rows` counts differing rows.
    """

    kind: DifferenceKind
    token: int
    layer: int
    rows: int
    detail: str


def find_difference(
    expected: torch.Tensor, actual: torch.Tensor, *, previous: torch.Tensor | None = None
) -> RouteDifference | None:
    """Compare routes (T, layers, k), order of experts included; None if they are equal.

    A token or layer shift, or one renaming of experts per layer (physical for logical ids, say), is named if it
    explains every row. `previous` are the routes of an earlier call: differing rows that all equal its rows are
    stale. Rows that are missing on the actual side do not count as different.
    """
    if expected.shape != actual.shape:
        return RouteDifference(
            "shape", -1, -1, 0, f"{tuple(expected.shape)} expected, {tuple(actual.shape)} found"
        )
    expected, actual = signed_routes(expected), signed_routes(actual)
    differs = (expected != actual).any(-1) & ~missing_rows(actual)
    if not bool(differs.any()):
        return None
    token, layer = (int(i) for i in differs.nonzero()[0])
    kind, detail = _explain(expected, actual, differs, previous)
    if kind == "rows":
        detail = f"experts {expected[token, layer].tolist()} expected, {actual[token, layer].tolist()} found"
    return RouteDifference(kind, token, layer, int(differs.sum()), detail)


def _explain(
    expected: torch.Tensor, actual: torch.Tensor, differs: torch.Tensor, previous: torch.Tensor | None
) -> tuple[DifferenceKind, str]:
    if (by := _shift(expected, actual, dim=0)) is not None:
        return "token_shift", f"every row is that of the token {abs(by)} {'before' if by > 0 else 'after'} it"
    if (by := _shift(expected, actual, dim=1)) is not None:
        return "layer_shift", f"every row is that of the layer {abs(by)} {'below' if by > 0 else 'above'} it"
    if previous is not None and _same_rows(previous, actual, differs):
        return "stale", "every differing row is that of the earlier call"
    if all(_is_renaming(expected[:, i], actual[:, i]) for i in range(expected.shape[1])):
        return "renamed_experts", "in every layer one renaming of experts maps expected to found ids"
    return "rows", ""


def _shift(expected: torch.Tensor, actual: torch.Tensor, dim: int) -> int | None:
    """Return s if actual[i + s] is expected[i] all along `dim`, for a small s that leaves half of it to compare."""
    size = expected.shape[dim]
    for by in range(1, min(_LONGEST_SHIFT, size // 2) + 1):
        for sign, left, right in ((1, expected, actual), (-1, actual, expected)):
            if torch.equal(left.narrow(dim, 0, size - by), right.narrow(dim, by, size - by)):
                return sign * by
    return None


def _same_rows(previous: torch.Tensor, actual: torch.Tensor, where: torch.Tensor) -> bool:
    return previous.shape == actual.shape and torch.equal(signed_routes(previous)[where], actual[where])


def _is_renaming(expected: torch.Tensor, actual: torch.Tensor) -> bool:
    """Return whether one injective map of ids turns expected (T, k) into actual, more often tested than it has ids."""
    present = ~(missing_rows(expected) | missing_rows(actual))
    old, new = expected[present].flatten(), actual[present].flatten()
    renamings = torch.unique(torch.stack([old, new]), dim=1).shape[1]
    counts = {len(torch.unique(old)), len(torch.unique(new)), renamings}
    return len(counts) == 1 and renamings < len(old)

"""Why routes are not those that they should be: shifts, other layers, other rows, constant rows, renamed experts.

`find_difference` explains all of a copy of recorded routes that is not equal to them. `find_cause` explains recorded
experts that routers seldom choose by themselves: every cause is tried on the same samples, and is named if it explains
at least half of the rows that are not exact.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from headrace.data_plane.routes_codec import missing_rows, signed_routes
from headrace.errors import ReplayError
from headrace.models.router_replay.stats import ReplayStats, TracedRows

DifferenceKind = Literal["shape", "token_shift", "layer_shift", "renamed_experts", "stale", "rows"]

Pair = tuple[torch.Tensor, torch.Tensor]
"""The routes of a sample, (tokens, layers, k) each: those found, and those that they should be."""

_LONGEST_SHIFT = 4
_MOST_SAMPLES, _MOST_TOKENS, _PAIR_TOKENS = 32, 2048, 64


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


@dataclass(frozen=True)
class Cause:
    """A cause, in words, and the fraction of rows that are exact if it is so."""

    fraction: float
    text: str


def find_difference(
    expected: torch.Tensor, actual: torch.Tensor, *, previous: torch.Tensor | None = None
) -> RouteDifference | None:
    """Compare routes (T, layers, k), order of experts included; None if they are equal.

    A token or layer shift, or one renaming of experts per layer (physical for logical ids, say), is named if it
    explains every row. `previous` are the routes of an earlier call: differing rows that all equal its rows are
    stale. Rows that are missing on the actual side do not count as different.
    """
    if expected.shape != actual.shape:
        shapes = f"{tuple(expected.shape)} expected, {tuple(actual.shape)} found"
        return RouteDifference("shape", -1, -1, 0, shapes)
    expected, actual = signed_routes(expected), signed_routes(actual)
    differs = (expected != actual).any(-1) & ~missing_rows(actual)
    if not bool(differs.any()):
        return None
    token, layer = (int(i) for i in differs.nonzero()[0])
    causes: list[tuple[DifferenceKind, Cause]] = [
        *(("token_shift", cause) for cause in _shifts([(actual, expected)], "token")),
        *(("layer_shift", cause) for cause in _shifts([(actual, expected)], "layer")),
    ]
    if previous is not None and previous.shape == actual.shape:
        stale = torch.equal(signed_routes(previous)[differs], actual[differs])
        causes.append(("stale", Cause(float(stale), "every differing row is that of the earlier call")))
    causes.append(("renamed_experts", _renaming(actual, expected, in_order=True)))
    found = f"experts {expected[token, layer].tolist()} expected, {actual[token, layer].tolist()} found"
    causes.append(("rows", Cause(1.0, found)))
    kind, text = next((kind, cause.text) for kind, cause in causes if cause.fraction == 1)
    return RouteDifference(kind, token, layer, int(differs.sum()), text)


def check_choices(stage: str, stats: ReplayStats, floor: float) -> None:
    """Refuse a stage whose recorded experts are too seldom those that its routers choose by themselves."""
    misfit = explain_misfit(stats, floor)
    if misfit is not None:
        raise ReplayError(
            f"stage '{stage}': {misfit}. No weight has changed by it. Mend the engine's capture, or lower the fraction "
            "if the engine computes that far from the trainer"
        )


def explain_misfit(stats: ReplayStats, floor: float) -> str | None:
    """Return what is below the floor and the cause that fits the kept rows best, or None."""
    misfit = stats.misfit(floor)
    if misfit is None:
        return None
    earlier = [given for given, _ in _pairs(stats.earlier)]
    cause = find_cause(list(_pairs([rows for rows in stats.rows if rows.native is not None])), earlier)
    why = (
        "no lag, other layer, other row at hand or renaming fits better: rows of another step, or of another model"
        if cause is None
        else f"the rows are not those of their tokens: {cause.text} (so {cause.fraction:.1%} would fit)"
    )
    return f"{misfit}, policy.router_replay.min_exact_fraction={floor:.1%}; {why}"


def _pairs(parts: Sequence[TracedRows]) -> Iterator[Pair]:
    """Yield the samples of microbatches, each without its last token."""
    for rows in parts:
        lengths = rows.lengths.tolist()
        native = rows.given if rows.native is None else rows.native
        for given, own in zip(torch.split(rows.given, lengths), torch.split(native, lengths)):
            yield given[:-1], own[:-1]


def find_cause(samples: Sequence[Pair], earlier: Sequence[torch.Tensor] = ()) -> Cause | None:
    """Return what explains most of the rows that are not exact, or None.

    `samples` are (recorded, chosen by the routers themselves) and `earlier` recorded experts of samples of the step
    before. A few thousand tokens are looked at.
    """
    sets = [(_sets(given), _sets(native)) for given, native in _first(samples)]
    if not sets:
        return None
    given, native = (torch.cat(part) for part in zip(*sets))
    before = [_sets(rows) for rows in earlier[:_MOST_SAMPLES]]
    causes = [
        *_shifts(sets, "token"),
        _constant(given),
        *_other_layers(given, native),
        Cause(_best_rows(sets, before, own=False), "rows of the step before"),
        Cause(_best_rows(sets, [native for _, native in sets], own=True), "rows of other samples"),
        _renaming(given, native),
    ]
    base, best = _exact(sets), max(causes, key=lambda cause: cause.fraction)
    return best if best.fraction - base >= max(0.5 * (1 - base), 1e-9) else None


def _first(samples: Sequence[Pair]) -> Iterator[Pair]:
    """Yield samples of two tokens or more, as many as are looked at."""
    left = _MOST_TOKENS
    for given, native in samples[:_MOST_SAMPLES]:
        size = min(len(given), left)
        if size > 1:
            left -= size
            yield given[:size], native[:size]


def _sets(ids: torch.Tensor) -> torch.Tensor:
    """Return rows whose experts are in order, so that equal sets are equal rows; -1 where a row is missing."""
    return signed_routes(ids).sort(-1).values


def _exact(pairs: Sequence[Pair]) -> float:
    """Return the fraction of equal rows, of those that neither side lacks."""
    rows = exact = 0
    for left, right in pairs:
        both = (left[..., 0] >= 0) & (right[..., 0] >= 0)
        rows += int(both.sum())
        exact += int(((left == right).all(-1) & both).sum())
    return exact / max(rows, 1)


def _shifts(pairs: Sequence[Pair], unit: Literal["token", "layer"]) -> Iterator[Cause]:
    """Yield small shifts along tokens or layers that leave half of a sample to compare."""
    dim, below, above = (0, "before", "after") if unit == "token" else (1, "below", "above")
    for by in range(1, _LONGEST_SHIFT + 1):
        sizes = [left.shape[dim] - by for left, _ in pairs]
        long = [(left, right, size) for (left, right), size in zip(pairs, sizes) if size >= by]
        if not long:
            return
        what = f"{by} {unit}{'s' * (by > 1)}"
        late = [(left.narrow(dim, by, size), right.narrow(dim, 0, size)) for left, right, size in long]
        early = [(left.narrow(dim, 0, size), right.narrow(dim, by, size)) for left, right, size in long]
        yield Cause(_exact(late), f"a lag of {what}: every row is that of the {unit} {by} {below} it")
        yield Cause(_exact(early), f"a lead of {what}: every row is that of the {unit} {by} {above} it")


def _constant(given: torch.Tensor) -> Cause:
    """Take the most frequent row of each layer for all of them."""
    often = []
    for layer in given.unbind(1):
        rows, counts = torch.unique(layer, dim=0, return_counts=True)
        often.append(rows[counts.argmax()])
    constant = torch.stack(often)
    fraction = _exact([(given, constant.expand_as(given))])
    return Cause(fraction, f"constant rows: almost all are experts {constant[0].tolist()} in layer 0")


def _other_layers(given: torch.Tensor, native: torch.Tensor) -> Iterator[Cause]:
    """Yield the layers whose native rows fit the recorded ones best, if one layer has another's."""
    given, native = given[: 8 * _PAIR_TOKENS], native[: 8 * _PAIR_TOKENS]
    fits = [[_exact([(left, right)]) for right in native.unbind(1)] for left in given.unbind(1)]
    best = [row.index(max(row)) for row in fits]
    moved = [(left, right) for left, right in enumerate(best) if left != right]
    if moved:
        shown = ", ".join(f"layer {left} has those of layer {right}" for left, right in moved[:4])
        fraction = sum(max(row) for row in fits) / len(fits)
        yield Cause(fraction, f"rows of other layers: {shown}{', ...' if len(moved) > 4 else ''}")


def _best_rows(sets: Sequence[Pair], others: Sequence[torch.Tensor], *, own: bool) -> float:
    """Return the fraction of recorded rows that equal those of the best fitting of `others`, at the same positions.

    Samples of one prompt begin alike, so the last tokens that both have are compared. `own`: the sample at the same
    place is the sample itself.
    """
    pairs = []
    for i, (given, native) in enumerate(sets):
        fits = [(given, native)] if own else []
        for j, rows in enumerate(others):
            size = min(len(rows), len(given))
            if not (own and i == j) and 2 * size >= len(given) and size > 1:
                tail = slice(max(size - _PAIR_TOKENS, 0), size)
                fits.append((given[tail], rows[tail]))
        if fits:
            pairs.append(max(fits, key=lambda pair: _exact([pair])))
    return _exact(pairs)


def _renaming(given: torch.Tensor, native: torch.Tensor, *, in_order: bool = False) -> Cause:
    """Rename each native expert to the one that it meets most often, layer by layer; different ones stay different.

    `in_order`: an expert meets only the one at its own place in the row.
    """
    renamed = []
    for left, right in zip(given.unbind(1), native.unbind(1)):
        both = (left[:, 0] >= 0) & (right[:, 0] >= 0)
        size = max(int(left.max()), int(right.max()), 0) + 1
        meetings = right[both].unsqueeze(2) * size + left[both].unsqueeze(1)  # (rows, k, k)
        if in_order:
            meetings = meetings.diagonal(dim1=1, dim2=2)
        counts = torch.bincount(meetings.flatten(), minlength=size * size).view(size, size)
        names, seen = counts.argmax(1), counts.sum(1) > 0
        # A map that is tested no more often than it has experts explains nothing.
        if len(torch.unique(names[seen])) < int(seen.sum()) or 0 < right[both].numel() <= int(seen.sum()):
            return Cause(0.0, "")
        renamed.append(torch.where(right >= 0, names[right.clamp(min=0)], right))
    result = torch.stack(renamed, dim=1)
    fraction = _exact([(given, result if in_order else result.sort(-1).values)])
    return Cause(fraction, "renamed experts (physical in place of logical ids): one renaming per layer fits")

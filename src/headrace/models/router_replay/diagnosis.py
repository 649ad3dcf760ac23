"""Why recorded experts are not those that routers choose: a lag, other layers, other rows, constant rows, other names.

Every cause is tried on the same samples: the share of rows that would be exact if it were so. It is named if it
explains at least half of the rows that are not exact.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from headrace.data_plane.routes_codec import signed_routes

_LONGEST_LAG = 4
_MOST_SAMPLES, _MOST_TOKENS, _PAIR_TOKENS = 32, 2048, 64


@dataclass(frozen=True)
class Choices:
    """One sample's recorded experts, and what its routers chose by themselves: (tokens, layers, k) each."""

    given: torch.Tensor
    native: torch.Tensor


@dataclass(frozen=True)
class Cause:
    """A cause, in words, and the share of rows that are exact if it is so."""

    share: float
    text: str


def find_cause(samples: Sequence[Choices], earlier: Sequence[torch.Tensor] = ()) -> Cause | None:
    """Return what explains most of the rows that are not exact, or None.

    `earlier` are recorded experts of samples of the step before. A few thousand tokens are looked at.
    """
    sets = [Choices(_sets(s.given), _sets(s.native)) for s in _first(samples)]
    if not sets:
        return None
    base = _fraction([(s.given, s.native) for s in sets])
    given, native = (torch.cat(part) for part in zip(*((s.given, s.native) for s in sets)))
    causes = [
        *_lags(sets),
        _constant(given),
        *_layers(given, native),
        _earlier(sets, [_sets(rows) for rows in earlier[:_MOST_SAMPLES]]),
        _other_samples(sets),
        _renaming(given, native),
    ]
    best = max(causes, key=lambda cause: cause.share)
    return best if best.share - base >= max(0.5 * (1 - base), 1e-9) else None


def _first(samples: Sequence[Choices]) -> Iterator[Choices]:
    """Yield samples of two tokens or more, as many as are looked at."""
    left = _MOST_TOKENS
    for sample in samples[:_MOST_SAMPLES]:
        size = min(len(sample.given), left)
        if size > 1:
            left -= size
            yield Choices(sample.given[:size], sample.native[:size])


def _sets(ids: torch.Tensor) -> torch.Tensor:
    """Return rows whose experts are in order, so that equal sets are equal rows; -1 where a row is missing."""
    return signed_routes(ids).sort(-1).values


def _exact(left: torch.Tensor, right: torch.Tensor) -> tuple[int, int]:
    both = (left[..., 0] >= 0) & (right[..., 0] >= 0)
    return int(((left == right).all(-1) & both).sum()), int(both.sum())


def _fraction(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    counts = [_exact(left, right) for left, right in pairs]
    return float(sum(exact for exact, _ in counts) / max(sum(rows for _, rows in counts), 1))


def _lags(sets: Sequence[Choices]) -> list[Cause]:
    causes = []
    for by in range(1, _LONGEST_LAG + 1):
        long = [s for s in sets if len(s.given) > by]
        if not long:
            break
        tokens = f"{by} token{'s' * (by > 1)}"
        late = _fraction([(s.given[by:], s.native[:-by]) for s in long])
        early = _fraction([(s.given[:-by], s.native[by:]) for s in long])
        causes.append(Cause(late, f"a lag of {tokens}: every row is that of the token {by} before it"))
        causes.append(Cause(early, f"a lead of {tokens}: every row is that of the token {by} after it"))
    return causes


def _constant(given: torch.Tensor) -> Cause:
    """Take the most frequent row of each layer for all of them."""
    often = []
    for layer in given.unbind(1):
        rows, counts = torch.unique(layer, dim=0, return_counts=True)
        often.append(rows[counts.argmax()])
    constant = torch.stack(often)
    share = _fraction([(given, constant.expand_as(given))])
    return Cause(share, f"constant rows: almost all are experts {constant[0].tolist()} in layer 0")


def _layers(given: torch.Tensor, native: torch.Tensor) -> list[Cause]:
    """Return the layer whose native rows fit best, for each layer of the recorded ones, if one has another's."""
    given, native = given[: 8 * _PAIR_TOKENS], native[: 8 * _PAIR_TOKENS]
    layers = range(given.shape[1])
    fits = [[_fraction([(given[:, left], native[:, right])]) for right in layers] for left in layers]
    found = [row.index(max(row)) for row in fits]
    moved = [(left, right) for left, right in enumerate(found) if left != right]
    if not moved:
        return []
    shown = ", ".join(f"layer {left} has those of layer {right}" for left, right in moved[:4])
    share = sum(fits[left][right] for left, right in enumerate(found)) / len(found)
    return [Cause(share, f"rows of other layers: {shown}{', ...' if len(moved) > 4 else ''}")]


def _earlier(sets: Sequence[Choices], earlier: Sequence[torch.Tensor]) -> Cause:
    return Cause(_best_rows(sets, earlier, own=False), "rows of the step before")


def _other_samples(sets: Sequence[Choices]) -> Cause:
    return Cause(_best_rows(sets, [s.native for s in sets], own=True), "rows of other samples")


def _best_rows(sets: Sequence[Choices], others: Sequence[torch.Tensor], *, own: bool) -> float:
    """Return the share of recorded rows that equal those of the best fitting of `others`, at the same positions.

    Samples of one prompt begin alike, so the last tokens that both have are compared. `own`: the sample at the same
    place is the sample itself.
    """
    pairs = []
    for i, sample in enumerate(sets):
        fits = [(sample.given, sample.native)] if own else []
        for j, rows in enumerate(others):
            size = min(len(rows), len(sample.given))
            if not (own and i == j) and 2 * size >= len(sample.given) and size > 1:
                tail = slice(max(size - _PAIR_TOKENS, 0), size)
                fits.append((sample.given[tail], rows[tail]))
        if fits:
            pairs.append(max(fits, key=lambda pair: _fraction([pair])))
    return _fraction(pairs) if pairs else 0.0


def _renaming(given: torch.Tensor, native: torch.Tensor) -> Cause:
    """Rename each native expert to the one that it meets most often, layer by layer; different ones stay different."""
    renamed = []
    for left, right in zip(given.unbind(1), native.unbind(1)):
        both = (left[:, 0] >= 0) & (right[:, 0] >= 0)
        size = int(max(left.max(), right.max())) + 1
        met = torch.zeros(max(size, 1) ** 2, dtype=torch.int64)
        places = right[both].unsqueeze(2) * size + left[both].unsqueeze(1)
        met.index_add_(0, places.flatten(), torch.ones(places.numel(), dtype=torch.int64))
        counts = met.view(size, size)
        names, seen = counts.argmax(1), counts.sum(1) > 0
        if len(set(names[seen].tolist())) < int(seen.sum()):
            return Cause(0.0, "")
        renamed.append(torch.where(right >= 0, names[right.clamp(min=0)], right).sort(-1).values)
    share = _fraction([(given, torch.stack(renamed, dim=1))])
    return Cause(share, "renamed experts (physical in place of logical ids): one renaming per layer fits")

"""Which engine gets which prompts: by the lengths that are expected, with equal prompts side by side."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

_REMEMBERED = 100_000


class LengthBook:
    """Expects of a prompt's completions what was seen of its last ones, or else of all prompts'."""

    def __init__(self) -> None:
        self._seen: dict[int, float] = {}
        self._mean: float | None = None

    def expected(self, prompt: Sequence[int], limit: int) -> float:
        """Return the new tokens that are expected of a prompt; `limit` before anything has been seen."""
        seen = self._seen.get(hash(tuple(prompt)), self._mean)
        return float(limit) if seen is None else min(seen, float(limit))

    def note(self, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        """Remember how long completions became."""
        if not prompts:
            return
        found: dict[int, list[int]] = defaultdict(list)
        for prompt, length in zip(prompts, lengths, strict=True):
            found[hash(tuple(prompt))].append(length)
        self._mean = sum(lengths) / len(lengths)
        for key, group in found.items():
            self._seen.pop(key, None)  # the newest come last
            self._seen[key] = sum(group) / len(group)
        while len(self._seen) > _REMEMBERED:
            del self._seen[next(iter(self._seen))]


def deal(
    prompts: Mapping[int, Sequence[int]], new_tokens: Mapping[int, float], engines: int
) -> list[list[int]]:
    """Return the places that each of `engines` gets, so that they end together if the expectations hold.

    `prompts` and `new_tokens` (expected) are by place. The longest go first, each to the engine that has least. Equal
    prompts stay together, since an engine computes them once, but for groups that are more than an engine's fair share.

    >>> deal({0: [1, 2], 1: [1, 2], 2: [3]}, {0: 5.0, 1: 5.0, 2: 14.0}, engines=2)
    [[2], [0, 1]]
    """
    cost = {place: len(prompt) + new_tokens[place] for place, prompt in prompts.items()}
    share = sum(cost.values()) / engines
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for place, prompt in prompts.items():
        groups[tuple(prompt)].append(place)
    pieces = [piece for group in groups.values() for piece in _pieces(group, cost, share)]
    dealt: list[list[int]] = [[] for _ in range(engines)]
    loads = [0.0] * engines
    for piece in sorted(pieces, key=lambda piece: -sum(cost[place] for place in piece)):
        engine = loads.index(min(loads))
        dealt[engine] += piece
        loads[engine] += sum(cost[place] for place in piece)
    return dealt


def _pieces(group: list[int], cost: Mapping[int, float], share: float) -> list[list[int]]:
    """Cut a group of equal prompts into as few equal pieces as have at most an engine's share each."""
    parts = min(len(group), max(1, -int(-sum(cost[place] for place in group) // max(share, 1e-9))))
    return [group[part::parts] for part in range(parts)]

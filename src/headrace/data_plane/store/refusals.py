"""Which samples are of groups that rules on tags have refused, so that no claim judges them again."""

from collections.abc import Callable, Sequence

import numpy as np

from headrace.data_plane.claim_terms import TagRule
from headrace.data_plane.store.columns import grown
from headrace.data_plane.store.forms import Rows
from headrace.data_plane.store.places import Mask

_RULES = 8
"""Lists of rules for which refusals are remembered."""


class Refusals:
    """What the latest lists of rules refused, by slot, until the tags of a sample of the group change.

    A rule whose bounds are at least as strict refuses that, too: so a claim that asks for rows of an age, by a bound
    that rises with time, judges those once that were too old before.
    """

    def __init__(self) -> None:
        # The latest is the last. A group is refused if all its slots are.
        self.known: list[tuple[list[TagRule], Mask]] = []

    def passing(self, rules: Sequence[TagRule], units: Rows, judge: Callable[[Rows], Mask]) -> Mask:
        """Return which of some groups, a row of slots each, pass; `judge` tells it of those that are not known."""
        refused = self._of(list(rules), int(units.max(initial=-1)) + 1)
        passes: Mask = ~np.logical_and.reduce(refused[units], axis=1)
        at = np.flatnonzero(passes)
        passes[at] = judge(units[at])
        refused[units[at[~passes[at]]]] = True
        return passes

    def _of(self, rules: list[TagRule], slots: int) -> Mask:
        """Return by slot what rules refuse."""
        known = [n for n, (others, _) in enumerate(self.known) if _are_as_strict(rules, others)]
        same = next((n for n in known if self.known[n][0] == rules), None)
        if same is not None:
            _, refused = self.known.pop(same)
        else:
            refused = self.known[known[-1]][1].copy() if known else np.empty(0, bool)
        refused = grown(refused, slots, False)
        self.known = [*self.known[1 - _RULES :], (rules, refused)]
        return refused

    def forget(self, slots: Rows) -> None:
        """Let groups be judged again, the tags of whose samples have changed."""
        for _, refused in self.known:
            refused[slots[slots < len(refused)]] = False

    def renumber(self, slots: Rows) -> None:
        """Let what is slot `slots[i]` now be slot i; all other slots are free."""
        size = int(slots.max(initial=-1)) + 1
        self.known = [(rules, grown(refused, size, False)[slots]) for rules, refused in self.known]


def _are_as_strict(rules: Sequence[TagRule], others: Sequence[TagRule]) -> bool:
    """Return whether rules refuse all that others refuse, which ask the same of other bounds."""
    return len(rules) == len(others) and all(map(TagRule.is_as_strict_as, rules, others))

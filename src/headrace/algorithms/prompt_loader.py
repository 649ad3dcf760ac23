"""The order in which prompts are used: shuffled anew each epoch, resumable by position."""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import count, islice

import numpy as np

from headrace.errors import ConfigError
from headrace.experience.types import Prompt
from headrace.utils.seeding import derive_seed


class PromptLoader:
    """An endless stream over a list of prompts, or of their uids; the position alone decides what comes next.

    Example: with 3 prompts, `take(4)` gives one epoch of 3 and the first prompt of the next. `order` gives the places
    of an epoch's prompts, as many as there are prompts; without it they are in the order given, or shuffled.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt | str],
        *,
        seed: int,
        shuffle: bool = True,
        order: Callable[[int], Sequence[int]] | None = None,
    ) -> None:
        if not prompts:
            raise ConfigError("the training split has no prompts; check env and data.train_size")
        self._prompts = list(prompts)
        self._seed, self._shuffle = seed, shuffle
        self._order_of = order or self._usual_order
        self.position = 0
        self.used: Collection[int] = ()
        """Positions whose prompts were used out of turn, and are passed over."""
        self._epoch = -1
        self._order: Sequence[int] = range(len(prompts))

    def take(self, number: int) -> list[Prompt | str]:
        """Return the next `number` prompts and move on."""
        positions = list(islice((at for at in count(self.position) if at not in self.used), number))
        if positions:
            self.position = positions[-1] + 1
        return self.at(positions)

    def at(self, positions: Iterable[int]) -> list[Prompt | str]:
        return [self._at(position) for position in positions]

    def _at(self, position: int) -> Prompt | str:
        epoch, index = divmod(position, len(self._prompts))
        if self._epoch != epoch:
            self._epoch, self._order = epoch, self._order_of(epoch)
        return self._prompts[self._order[index]]

    def _usual_order(self, epoch: int) -> Sequence[int]:
        if not self._shuffle:
            return range(len(self._prompts))
        rng = np.random.default_rng(derive_seed(self._seed, "prompt-order", epoch))
        return rng.permutation(len(self._prompts)).tolist()  # type: ignore[no-any-return]

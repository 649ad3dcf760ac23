"""The order in which prompts are used: shuffled anew each epoch, resumable by position."""

from collections.abc import Sequence

import numpy as np

from headrace.errors import ConfigError
from headrace.experience.types import Prompt
from headrace.utils.seeding import derive_seed


class PromptLoader:
    """An endless stream over a list of prompts; the position alone decides what comes next.

    Example: with 3 prompts, `take(4)` gives one epoch of 3 and the first prompt of the next.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool = True) -> None:
        if not prompts:
            raise ConfigError("the training split has no prompts; check env and data.train_size")
        self._prompts = list(prompts)
        self._seed = seed
        self._shuffle = shuffle
        self.position = 0
        self._epoch = -1
        self._permutation: list[int] = []

    def take(self, count: int) -> list[Prompt]:
        """Return the next `count` prompts and move on."""
        taken = [self._at(self.position + i) for i in range(count)]
        self.position += count
        return taken

    def _at(self, position: int) -> Prompt:
        epoch, index = divmod(position, len(self._prompts))
        return self._prompts[self._order(epoch)[index]]

    def _order(self, epoch: int) -> Sequence[int]:
        if not self._shuffle:
            return range(len(self._prompts))
        if self._epoch != epoch:
            rng = np.random.default_rng(derive_seed(self._seed, "prompt-order", epoch))
            self._epoch, self._permutation = epoch, rng.permutation(len(self._prompts)).tolist()
        return self._permutation

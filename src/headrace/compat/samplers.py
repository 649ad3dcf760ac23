"""Which groups of a buffer a step trains on, and when the next may be begun, by the age of the weights.

A sampler reads the lists of `TQReplayBuffer` by place: a group was begun with weights of `start_weight_list`, and is
meant for the step in `target_step_list`, if for any. Weights of version v train step v.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from headrace.data_plane.interfaces import KVBatchMeta
from headrace.errors import ConfigError

_GATE_POLL_SECONDS = 0.01

Selection = tuple[KVBatchMeta | None, int]
"""The rows of the groups that were taken, and how many groups they are; (None, 0): too few are ready."""


@runtime_checkable
class PromptGroupSampler(Protocol):
    """Decides which groups a step trains on."""

    async def admit(self, *, trainer_version_fn: Callable[[], int]) -> int | None: ...

    async def select(
        self, *, current_train_weight: int, min_prompt_groups: int, max_prompt_groups: int
    ) -> Selection: ...

    async def evict(self, *, current_train_weight: int) -> int: ...

    def should_abort_inflight(self, *, start_weight_version: int, current_train_weight: int) -> bool: ...

    def is_on_policy(self) -> bool: ...

    def required_buffer_capacity(self, groups_per_step: int) -> int | None: ...

    def set_dispatch_index(self, resume_from_step: int) -> None: ...


class BaseSampler(ABC):
    """What samplers share: the count of batches that were begun, and how groups are taken and dropped.

    `window` is how many versions a group may lag; None: any.
    """

    window: int | None = None

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer
        self._dispatch_index = -1

    def set_dispatch_index(self, resume_from_step: int) -> None:
        """Go on with the batch of this step as the next to begin."""
        self._dispatch_index = resume_from_step - 1

    @abstractmethod
    async def admit(self, *, trainer_version_fn: Callable[[], int]) -> int | None:
        """Wait until the next batch may be begun; returns the step that its groups are meant for, None: none."""

    @abstractmethod
    async def select(
        self, *, current_train_weight: int, min_prompt_groups: int, max_prompt_groups: int
    ) -> Selection:
        """Take groups out of the buffer for the step of these weights; their rows stay in the store."""

    async def evict(self, *, current_train_weight: int) -> int:
        """Drop ready groups that lag too much, and their rows; returns how many."""
        if self.window is None:
            return 0
        oldest = current_train_weight - self.window
        return await self._drop([i for i, w in enumerate(self._buffer.start_weight_list) if w < oldest])

    def should_abort_inflight(self, *, start_weight_version: int, current_train_weight: int) -> bool:
        """Return whether a group that is being made would come too late."""
        return False

    def is_on_policy(self) -> bool:
        """Return whether every step trains on what its own weights have made."""
        return self.window == 0

    def required_buffer_capacity(self, groups_per_step: int) -> int | None:
        """Return how many groups the buffer has to hold; None: the sampler does not say."""
        return None

    async def _drop(self, places: Sequence[int]) -> int:
        ready = [place for place in places if self._buffer.ready_list[place]]
        return int(await self._buffer.remove(ready, remove_in_dp=True)) if ready else 0

    async def _take(self, places: Sequence[int], least: int, most: int) -> Selection:
        """Take up to `most` of the ready groups among `places`, in this order, if they are `least` or more."""
        if least < 1 or most < least:
            raise ConfigError(
                f"min_prompt_groups={least}, max_prompt_groups={most}; expected 1 <= min <= max"
            )
        ready = [place for place in places if self._buffer.ready_list[place]]
        if len(ready) < least:
            return None, 0
        metas = [self._buffer.meta_list[place] for place in ready[:most]]
        await self._buffer.remove(ready[:most], remove_in_dp=False)
        return metas[0].concat(*metas[1:]), len(metas)

    def _within(self, oldest: int | None, newest: int) -> list[int]:
        """Return the places of groups begun with weights from `oldest` to `newest`, in the buffer's order."""
        weights = enumerate(self._buffer.start_weight_list)
        return [i for i, weight in weights if weight <= newest and (oldest is None or weight >= oldest)]


class WindowedSampler(BaseSampler):
    """Takes whatever is ready and lags by `max_staleness_versions` at most; never waits to begin a batch."""

    def __init__(
        self, buffer: Any, *, max_staleness_versions: int, sample_freshest_first: bool = False
    ) -> None:
        super().__init__(buffer)
        self.max_staleness_versions = self.window = _window("max_staleness_versions", max_staleness_versions)
        self.sample_freshest_first = sample_freshest_first

    def should_abort_inflight(self, *, start_weight_version: int, current_train_weight: int) -> bool:
        return start_weight_version < current_train_weight - self.max_staleness_versions

    async def admit(self, *, trainer_version_fn: Callable[[], int]) -> int | None:
        self._dispatch_index += 1
        return None

    async def select(
        self, *, current_train_weight: int, min_prompt_groups: int, max_prompt_groups: int
    ) -> Selection:
        places = self._within(current_train_weight - self.max_staleness_versions, current_train_weight)
        if self.sample_freshest_first:
            places.sort(key=lambda place: -self._buffer.start_weight_list[place])
        return await self._take(places, min_prompt_groups, max_prompt_groups)


class _GatedSampler(BaseSampler):
    """Begins a batch only while it is at most `gate` batches ahead of the trainer."""

    def __init__(self, buffer: Any, gate: int) -> None:
        super().__init__(buffer)
        self._gate = gate

    async def admit(self, *, trainer_version_fn: Callable[[], int]) -> int | None:
        while self._dispatch_index >= trainer_version_fn() + self._gate:
            await asyncio.sleep(_GATE_POLL_SECONDS)
        self._dispatch_index += 1
        return self._stamp()

    def _stamp(self) -> int | None:
        return None

    def is_on_policy(self) -> bool:
        return self._gate == 0

    def required_buffer_capacity(self, groups_per_step: int) -> int | None:
        return groups_per_step * (self._gate + 1)


class ReadyFirstSampler(_GatedSampler):
    """Takes whatever is ready, in the order in which it was begun, however old; drops nothing."""

    def __init__(self, buffer: Any, *, max_staleness_versions: int) -> None:
        super().__init__(buffer, _window("max_staleness_versions", max_staleness_versions))
        self.max_staleness_versions = max_staleness_versions

    async def select(
        self, *, current_train_weight: int, min_prompt_groups: int, max_prompt_groups: int
    ) -> Selection:
        return await self._take(
            self._within(None, current_train_weight), min_prompt_groups, max_prompt_groups
        )

    async def evict(self, *, current_train_weight: int) -> int:
        return 0


class WeightFifoSampler(_GatedSampler):
    """Takes groups of the oldest weights that are not too old, and waits for those before it goes on to newer ones."""

    def __init__(self, buffer: Any, *, max_staleness_versions: int) -> None:
        super().__init__(buffer, _window("max_staleness_versions", max_staleness_versions))
        self.max_staleness_versions = self.window = max_staleness_versions

    async def select(
        self, *, current_train_weight: int, min_prompt_groups: int, max_prompt_groups: int
    ) -> Selection:
        places = self._within(current_train_weight - self.max_staleness_versions, current_train_weight)
        weights = self._buffer.start_weight_list
        oldest = min((weights[place] for place in places), default=None)
        of_oldest = [place for place in places if weights[place] == oldest]
        return await self._take(of_oldest, min_prompt_groups, max_prompt_groups)


class InOrderSampler(_GatedSampler):
    """Takes the groups that are meant for the step, whichever weights made them."""

    def __init__(self, buffer: Any, *, max_lookahead_versions: int) -> None:
        super().__init__(buffer, _window("max_lookahead_versions", max_lookahead_versions))
        self.max_lookahead_versions = max_lookahead_versions

    def _stamp(self) -> int | None:
        return self._dispatch_index

    async def select(
        self, *, current_train_weight: int, min_prompt_groups: int, max_prompt_groups: int
    ) -> Selection:
        meant = [i for i, step in enumerate(self._buffer.target_step_list) if step == current_train_weight]
        return await self._take(meant, min_prompt_groups, max_prompt_groups)

    async def evict(self, *, current_train_weight: int) -> int:
        """Drop ready groups of steps that are past."""
        steps = enumerate(self._buffer.target_step_list)
        return await self._drop([i for i, step in steps if step is not None and step < current_train_weight])


def _window(name: str, versions: int) -> int:
    if versions < 0:
        raise ConfigError(f"{name}={versions}; expected 0 or more")
    return versions

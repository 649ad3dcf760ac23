"""A rollout actor of an asynchronous run."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import Any

import torch

from headrace.data_plane.interfaces import KVBatchMeta
from headrace.distributed.worker_groups.interfaces import Reader
from headrace.errors import HeadraceError
from headrace.experience.live_generator import LiveGenerator
from headrace.experience.probe import Probe
from headrace.experience.sync_rollout_actor import SyncRolloutActor
from headrace.experience.types import Rollout

_NONE = -1
"""The version of weights that are older than any."""
Tags = Sequence[Mapping[str, Any]]
"""Those of a call's rows, whole groups."""


class CollectingActor(SyncRolloutActor):
    """Takes the newest weights by itself, once it follows some, and can stamp further tags on rows."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._newer_than: Reader = _nothing
        self._version = _NONE
        self._stream: torch.cuda.Stream | None = None
        self.judge: Callable[[Sequence[str], Tags], Tags] = lambda sample_ids, tags: tags
        """Returns the tags of rows with further ones."""

    def follow(self, newer_than: Reader) -> None:
        """Take weights from now on where `newer_than` gives them, as `PublishedWeights` has it."""
        self._newer_than = newer_than
        if isinstance(self.generator, LiveGenerator):
            self.generator.refresh = self.take_weights

    def take_weights(self) -> int:
        """Give the generator the newest weights, if it has older ones or has lost them, and return their version."""
        live = self.generator if isinstance(self.generator, LiveGenerator) else None
        known = self._version if live is None or live.has_weights else _NONE
        with closing(self._newer_than(known)) as items:
            if (version := next(items, None)) is not None:
                with self._doubted(), self._beside_training():
                    self.update_weights(items, version)
                self._version = version
        return self._version

    def rollout_to_tq(self, *args: Any, **kwargs: Any) -> Any:
        with self._doubted():
            return super().rollout_to_tq(*args, **kwargs)

    def validate(self, seed: int) -> dict[str, float]:
        with self._doubted(), self._held():
            return super().validate(seed)

    def probe(self, *args: Any, **kwargs: Any) -> Probe:
        with self._doubted(), self._held():
            return super().probe(*args, **kwargs)

    @contextmanager
    def _beside_training(self) -> Iterator[None]:
        """Return a context whose work on a GPU does not queue behind the trainer's, and is done when it ends."""
        if self._stream is None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            yield
        if self._stream is not None:
            self._stream.synchronize()

    @contextmanager
    def _doubted(self) -> Iterator[None]:
        """Return a context whose failures may have cost the generator its weights, which are then taken anew."""
        try:
            yield
        except HeadraceError:
            self._version = _NONE
            raise

    def _held(self) -> AbstractContextManager[None]:
        """Return a context in which no new weights are taken between two pieces of an answer."""
        return self.generator.held() if isinstance(self.generator, LiveGenerator) else nullcontext()

    def _put(self, rollouts: Sequence[Rollout], tags: Tags, *args: Any) -> KVBatchMeta:
        return super()._put(rollouts, self.judge([r.sample_id for r in rollouts], tags), *args)


def _nothing(version: int) -> Generator[Any, None, None]:
    yield from ()

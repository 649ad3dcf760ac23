"""The policy's weights on their way to the rollout actors of an asynchronous run."""

import logging
from collections.abc import Callable
from threading import Lock

from headrace.distributed.worker_groups import WorkerGroup
from headrace.errors import HeadraceError

_log = logging.getLogger(__name__)


class Weights:
    """A copy of what `policy` has, kept by a group of one `PublishedWeights`; on Ray that is an actor, and may die."""

    def __init__(self, policy: WorkerGroup, keeper: WorkerGroup) -> None:
        self._policy, self._keeper = policy, keeper
        self._asking = Lock()
        self._loss = HeadraceError("")

    def are_there(self) -> bool:
        """Return whether their keeper lives and has some; may be called from any thread."""
        with self._asking:
            try:
                return bool(self._keeper.run_all("has_weights")[0])
            except HeadraceError as error:
                self._loss = error
                return not self._keeper.has_ended

    def publish(self, version: int, on_loss: Callable[[HeadraceError], None]) -> None:
        """Copy the policy's weights, bucket by bucket; between Ray actors not through this process.

        A keeper that has died is started again, which `on_loss` is told and may refuse.
        """
        self.are_there()
        if not self._keeper.has_ended:
            try:
                self._send(version)
                return
            except HeadraceError:
                if self.are_there() or not self._keeper.has_ended:
                    raise
        on_loss(self._loss)
        _log.warning("%s; it is started again, and the weights are published again", self._loss)
        with self._asking:
            self._keeper.restart()
        self._send(version)

    def _send(self, version: int) -> None:
        self._policy.stream_to(self._keeper, "weight_stream", "keep", version)

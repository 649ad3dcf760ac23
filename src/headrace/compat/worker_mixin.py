"""A policy worker's entry points from metadata, with the training step in pieces under the names of NeMo-RL."""

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.compat.batched_data_dict import BatchedDataDict
from headrace.compat.factory import build_data_plane_client
from headrace.data_plane import worker_mixin
from headrace.data_plane.interfaces import KVBatchMeta
from headrace.data_plane.schema import FieldSpec, declare
from headrace.errors import DataPlaneError

__all__ = ["TQWorkerMixin"]


class TQWorkerMixin(worker_mixin.TQWorkerMixin):
    """Metadata-driven entry points of a policy worker, and `begin`, `microbatch`, `finish` and `abort` of a step.

    A worker that has `train_microbatch(data)` is called for each piece, with `begin_train_step(loss_fn, gbs, mbs)`,
    `finish_train_step()` and `abort_train_step()` around. Any other needs `train` alone: the rows of the pieces are
    fetched and trained on when the step is finished, so the result is that of one call.
    """

    # Names that a worker of a caller's own is not likely to have.
    _nemo_step: tuple[Any, int | None, int | None] | None = None
    _nemo_pieces: tuple[KVBatchMeta, ...] = ()

    def setup_data_plane(self, cfg: Mapping[str, Any] | Any, columns: Sequence[FieldSpec] = ()) -> None:
        declare(*columns)
        self._dp_client = build_data_plane_client(cfg, bootstrap=False)

    def _fetch(self, meta: KVBatchMeta, **options: Any) -> BatchedDataDict:
        return BatchedDataDict.of(super()._fetch(meta, **options))

    @property
    def _nemo_in_pieces(self) -> bool:
        return hasattr(self, "train_microbatch")

    def begin_train_step_presharded(
        self, loss_fn: Any, gbs: int | None = None, mbs: int | None = None
    ) -> None:
        """Open a step.

        Raises:
            DataPlaneError: one is open already.
        """
        if self._nemo_step is not None:
            raise DataPlaneError("a train step is open already; finish or abort it first")
        self._nemo_step, self._nemo_pieces = (loss_fn, gbs, mbs), ()
        if self._nemo_in_pieces:
            self.begin_train_step(loss_fn=loss_fn, gbs=gbs, mbs=mbs)  # type: ignore[attr-defined]

    def train_microbatch_presharded(self, meta: KVBatchMeta) -> Any:
        """Add this rank's rows to the open step; returns what the worker's `train_microbatch` returns."""
        self._nemo_opened()
        if self._nemo_in_pieces:
            return self.train_microbatch(self._fetch(meta))  # type: ignore[attr-defined]
        self._nemo_pieces = (*self._nemo_pieces, meta)
        return None

    def finish_train_step_presharded(self) -> dict[str, Any]:
        """Update the weights, and close the step.

        Returns:
            What the worker's `finish_train_step` returns, or its `train`.

        Raises:
            DataPlaneError: no step is open, or it has no rows.
        """
        loss_fn, gbs, mbs = self._nemo_opened()
        pieces = self._nemo_pieces
        try:
            if self._nemo_in_pieces:
                return dict(self.finish_train_step())  # type: ignore[attr-defined]
            if not pieces:
                raise DataPlaneError(
                    "the train step has no rows; call train_microbatch_presharded(meta) first"
                )
            rows = pieces[0].concat(*pieces[1:])
            every = gbs or rows.size * getattr(self, "dp_size", 1)
            return self.train_presharded(rows, loss_fn, gbs=every, mbs=mbs)
        finally:
            self._nemo_step, self._nemo_pieces = None, ()

    def abort_train_step_presharded(self) -> None:
        """Drop the open step; without one, do nothing."""
        if self._nemo_step is not None and self._nemo_in_pieces:
            self.abort_train_step()  # type: ignore[attr-defined]
        self._nemo_step, self._nemo_pieces = None, ()

    def _nemo_opened(self) -> tuple[Any, int | None, int | None]:
        if self._nemo_step is None:
            raise DataPlaneError("no train step is open; call begin_train_step_presharded first")
        return self._nemo_step

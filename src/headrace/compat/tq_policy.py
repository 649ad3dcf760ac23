"""TQPolicy with the training step in pieces as NeMo-RL has it: the loss comes first, then the rows."""

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.compat.batched_data_dict import BatchedDataDict, headrace_packing_args
from headrace.compat.column_io import plain_media
from headrace.compat.factory import headrace_config
from headrace.compat.observability import MetricsDataPlaneClient
from headrace.data_plane.interfaces import KVBatchMeta
from headrace.errors import DataPlaneError
from headrace.models.policy import tq_policy
from headrace.models.policy.lm_policy import timed
from headrace.utils.timer import Timer

__all__ = ["TQPolicy"]


class TQPolicy(tq_policy.TQPolicy):
    """The policy that works from metadata. Other arguments are those of `headrace.models.policy.lm_policy.Policy`.

    A step in pieces is `begin_train_step(loss_fn)`, `train_microbatches_from_meta(meta)` for each part, and
    `finish_train_step()`. Losses are divided by the valid tokens of the whole step, which are known when it is
    finished: that is when the workers train, part after part.
    """

    def __init__(
        self, *args: Any, dp_cfg: Mapping[str, Any], tq_partition_id: str = "train", **kwargs: Any
    ) -> None:
        plain, observe = headrace_config(dp_cfg)
        self._step: tuple[Any, int | None, int | None] | None = None
        self._pieces: list[KVBatchMeta] = []
        sections = [_with_headraces_orders(section) for section in args]
        super().__init__(*sections, dp_cfg=plain, tq_partition_id=tq_partition_id, **kwargs)
        if observe is not None:
            self.dp_client = MetricsDataPlaneClient(self.dp_client, observe)

    def finish_step(self, meta: KVBatchMeta) -> None:
        super().finish_step(meta)

    def read_from_dataplane(
        self,
        meta: KVBatchMeta,
        *,
        select_fields: Sequence[str],
        pad_value_dict: Mapping[str, int | float] | None = None,
    ) -> BatchedDataDict:
        batch = super().read_from_dataplane(meta, select_fields=select_fields, pad_value_dict=pad_value_dict)
        return BatchedDataDict.of(batch)

    def write_to_dataplane(self, meta: KVBatchMeta, fields: Mapping[str, Any]) -> None:
        super().write_to_dataplane(meta, plain_media(fields))

    def begin_train_step(  # type: ignore[override]
        self, loss_fn: Any, gbs: int | None = None, mbs: int | None = None
    ) -> None:
        """Open a step of one update; `gbs`, where given, is the number of rows that it must come to.

        Raises:
            DataPlaneError: a step is open already.
        """
        if self._step is not None:
            raise DataPlaneError("a train step is open already; finish or abort it first")
        self._step, self._pieces = (loss_fn, gbs, mbs), []

    def train_microbatches_from_meta(  # type: ignore[override]
        self, meta: KVBatchMeta, timer: Timer | None = None
    ) -> None:
        """Add rows to the open step.

        Raises:
            DataPlaneError: no step is open, or rows that are in it already.
        """
        self._opened()
        with timed(timer, "policy_training/collect"):
            known = {sample_id for piece in self._pieces for sample_id in piece.sample_ids}
            if twice := known & set(meta.sample_ids):
                raise DataPlaneError(f"sample '{min(twice)}' is in the open train step already")
            self._pieces.append(meta)

    def finish_train_step(self) -> dict[str, Any]:  # type: ignore[override]
        """Train on the rows of the step in one update; returns what `train_from_meta` returns.

        Raises:
            DataPlaneError: no step is open, it has no rows, or not `gbs` of them.
        """
        loss_fn, gbs, mbs = self._opened()
        pieces = self._pieces
        self._step, self._pieces = None, []
        rows = sum(piece.size for piece in pieces)
        if not rows or gbs not in (None, rows):
            raise DataPlaneError(
                f"the train step has {rows} rows; expected {gbs or 'some'} "
                "(begin_train_step's gbs, train_microbatches_from_meta)"
            )
        super().begin_train_step(pieces[0].concat(*pieces[1:]))
        try:
            for piece in pieces:
                super().train_microbatches_from_meta(piece, loss_fn, mbs)
            return super().finish_train_step()
        finally:
            super().abort_train_step()

    def abort_train_step(self) -> None:
        """Drop the open step; without one, do nothing."""
        self._step, self._pieces = None, []
        super().abort_train_step()

    def _opened(self) -> tuple[Any, int | None, int | None]:
        if self._step is None:
            raise DataPlaneError("no train step is open; call begin_train_step(loss_fn) first")
        return self._step


def _with_headraces_orders(section: Any) -> Any:
    """Return a policy section, if it is a mapping, with its microbatch order by headrace's name."""
    if not isinstance(section, Mapping) or "sequence_packing" not in section:
        return section
    return {**section, "sequence_packing": headrace_packing_args(section["sequence_packing"])}

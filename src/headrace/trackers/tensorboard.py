"""Runs as TensorBoard events: scalars, samples as text, the recipe as hparams."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.algorithms.observer import GREEDY_ACCURACY, GREEDY_REWARD, REWARD
from headrace.trackers.base import Tracker

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_RESULTS = (REWARD, GREEDY_ACCURACY, GREEDY_REWARD)


class TensorBoardTracker(Tracker):
    """Writes event files to `directory`; steps of a phase, which count from 1 too, to a folder of its own there."""

    def __init__(self, directory: str | Path, *, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(settings=settings)
        self._directory = Path(directory)
        self._first = 1
        self._writers: dict[str, SummaryWriter] = {}

    def begin(self, settings: Mapping[str, Any], first_step: int) -> None:
        from torch.utils.tensorboard.summary import hparams  # noqa: PLC0415  (slow to load)

        self._first = first_step
        # Not `add_hparams`, which makes a run of its own for them.
        for part in hparams(dict(settings), dict.fromkeys(_RESULTS, 0.0)):
            self._writer("")._get_file_writer().add_summary(part)

    def log(self, values: Mapping[str, float], step: int, phase: str = "") -> None:
        writer = self._writer(phase)
        for key, value in values.items():
            writer.add_scalar(key, value, step)

    def log_samples(self, rows: list[dict[str, Any]], step: int, split: str) -> None:
        for number, row in enumerate(rows):
            text = "\n".join(f"- **{key}**: {_code(value)}" for key, value in row.items())
            self._writer("").add_text(f"samples/{split}/{number}", text, step)

    def _writer(self, folder: str) -> "SummaryWriter":
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  (slow to load)

        if folder not in self._writers:
            # Hides the events of earlier files from this step on.
            purge_step = self._first if not folder and self._first > 1 else None
            self._writers[folder] = SummaryWriter(str(self._directory / folder), purge_step=purge_step)
        return self._writers[folder]

    def end(self, summary: Mapping[str, Any] | None) -> None:
        while self._writers:
            self._writers.popitem()[1].close()


def _code(value: Any) -> str:
    return "\n\n" + "\n".join(f"      {line}" for line in str(value).split("\n")) + "\n"

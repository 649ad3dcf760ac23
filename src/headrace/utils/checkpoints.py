"""Which checkpoints a run keeps: whole ones only, the best few and the newest.

A checkpoint is a directory `step_000080`. What is inside is the caller's business, but for `checkpoint.json`,
which holds the step, the metrics it is ranked by, and a small JSON state.
"""

import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from headrace.config import CheckpointingConfig
from headrace.errors import ConfigError
from headrace.utils import atomic
from headrace.utils.json_text import read_json

META_FILE = "checkpoint.json"
_NAME = re.compile(r"step_(\d+)")


@dataclass(frozen=True)
class CheckpointInfo:
    """One whole checkpoint on disk."""

    step: int
    path: Path
    metrics: dict[str, float]
    state: dict[str, Any]


class Saved(BaseModel):
    """Base of what a checkpoint's JSON is read into."""

    model_config = ConfigDict(extra="forbid", strict=True)


class _Meta(Saved):
    step: NonNegativeInt
    metrics: dict[str, float]
    state: dict[str, Any]


class CheckpointManager:
    """Writes, ranks and prunes the checkpoints in one directory.

    >>> with manager.writing(80) as draft:
    ...     policy.save(draft)
    >>> manager.commit(80, metrics={"validation/accuracy": 0.94}, state={"position": 2560})
    CheckpointInfo(step=80, ...)

    `keep_top_k` checkpoints with the best `metric` stay, and always the newest; None keeps all. Of several metrics,
    the first that some checkpoint has ranks all of them. A checkpoint without the metric (or with one that is not a
    number) ranks last; of equals the newer is better.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep_top_k: int | None,
        metric: str | Sequence[str],
        higher_is_better: bool = True,
    ) -> None:
        self._directory = directory
        self._keep_top_k = keep_top_k
        self._metrics = (metric,) if isinstance(metric, str) else tuple(metric)
        self._sign = 1.0 if higher_is_better else -1.0
        self._drafts: dict[int, Path] = {}

    @classmethod
    def configured(cls, directory: Path, cfg: CheckpointingConfig, best_by: Sequence[str]) -> Self:
        """Return what a recipe asks for; `best_by` are the metrics where it names none."""
        return cls(
            directory,
            keep_top_k=cfg.keep_top_k,
            metric=cfg.metric or best_by,
            higher_is_better=cfg.higher_is_better,
        )

    @contextmanager
    def writing(self, step: int) -> Iterator[Path]:
        """Yield an empty directory for the files of `step`; it is removed if the block raises."""
        draft = atomic.partial_path(self._path(step))
        with ExitStack() as on_error, atomic.naming(self._path(step), draft):
            draft.mkdir(parents=True)
            on_error.callback(shutil.rmtree, draft, ignore_errors=True)
            yield draft
            on_error.pop_all()
        self._drafts[step] = draft

    def commit(self, step: int, metrics: Mapping[str, float], state: Mapping[str, Any]) -> CheckpointInfo:
        """Make the files written for `step` a checkpoint, in place of one of the same step, and prune."""
        draft = self._drafts.pop(step, None)
        if draft is None:
            raise ValueError(
                f"commit({step}) without files; write them first in a `with writing({step})` block"
            )
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        info = CheckpointInfo(step, self._path(step), finite, dict(state))
        with atomic.naming(info.path):
            meta = {"step": step, "metrics": info.metrics, "state": info.state}
            text = json.dumps(meta, indent=1, allow_nan=False)
            (draft / META_FILE).write_text(text, encoding="utf-8")
            atomic.publish_directory(draft, info.path)
        self._prune()
        return info

    def latest(self) -> CheckpointInfo | None:
        return next(reversed(self.list()), None)

    def best(self) -> CheckpointInfo | None:
        return next(iter(self._ranked(self.list())), None)

    def list(self) -> Sequence[CheckpointInfo]:
        return list_checkpoints(self._directory)

    def _path(self, step: int) -> Path:
        return self._directory / f"step_{step:06d}"

    def _ranked(self, found: Sequence[CheckpointInfo]) -> Sequence[CheckpointInfo]:
        measured = {name for info in found for name in info.metrics}
        metric = next((name for name in self._metrics if name in measured), None)

        def rank(info: CheckpointInfo) -> tuple[float, int]:
            value = info.metrics.get(metric or "", math.nan)
            return -math.inf if math.isnan(value) else self._sign * value, info.step

        return sorted(found, key=rank, reverse=True)

    def _prune(self) -> None:
        if self._keep_top_k is None:
            return
        found = self.list()
        for info in self._ranked(found)[self._keep_top_k :]:
            if info != found[-1]:
                atomic.remove(info.path)


def list_checkpoints(directory: Path) -> Sequence[CheckpointInfo]:
    """Return the whole checkpoints in `directory`, by step; unfinished ones and other folders are ignored."""
    if not directory.is_dir():
        return []
    found = [read_checkpoint(path) for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    return sorted((info for info in found if info is not None), key=lambda info: info.step)


def read_checkpoint(path: Path) -> CheckpointInfo | None:
    """Return what a checkpoint says about itself; None if the directory is not one."""
    remedy = f"remove the directory {path}"
    try:
        meta = _Meta.model_validate(read_json(path / META_FILE, remedy=remedy))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValidationError as error:
        raise damaged(path / META_FILE, error, remedy) from error
    named = _NAME.fullmatch(path.name)
    if named and int(named[1]) != meta.step:
        raise ConfigError(f"{path / META_FILE}: is of step {meta.step}, not of {path.name}; {remedy}")
    return CheckpointInfo(meta.step, path, meta.metrics, meta.state)


def damaged(file: Path, error: ValidationError, remedy: str, *section: str) -> ConfigError:
    fault = error.errors()[0]
    key = ".".join(map(str, (*section, *fault["loc"]))) or "all of it"
    return ConfigError(f"{file}: damaged, {key}: {fault['msg']}; {remedy}")

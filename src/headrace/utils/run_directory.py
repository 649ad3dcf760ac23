"""The directory of one run: what is in it, who may write there, and what a resume cuts away.

    config.yaml     the resolved recipe           checkpoints/    step_000080/ ...
    metrics.jsonl   a line per step               tensorboard/    event files
    samples.jsonl   prompts, answers, rewards     summary.json    of a run that has finished
    timings.txt     time per stage, bytes       reference/      weights of the reference policy
    report.png, reward.png                        router_trace/   routes of every step

A marker file says that headrace made these; without it nothing is ever overwritten or removed.
"""

import fcntl
import json
import os
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from headrace.errors import ConfigError
from headrace.utils import atomic
from headrace.utils.checkpoints import CheckpointInfo, list_checkpoints
from headrace.utils.recipe import changed_keys

_MARKER = ".headrace-run"
_LOCK = ".headrace-lock"

# A checkpoint is of no use to a run that differs in one of these.
_FIXED_BY_CHECKPOINT = (
    "seed",
    "policy.model.path",
    "policy.model.gguf_package",
    "policy.model.config",
    "policy.tokenizer",
    "env",
    "data",
)
_MAY_DIFFER = ("run_dir", "overwrite", "resume", "logging")


class RunDirectory:
    """The paths of a run directory; one that `open` returns is locked against a second process until `close`.

    `resume_from` is the newest checkpoint of the run that is continued, None for a fresh one. `changed` names
    the recipe's keys that differ from the continued run's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_path = path / "config.yaml"
        self.metrics_path = path / "metrics.jsonl"
        self.samples_path = path / "samples.jsonl"
        self.summary_path = path / "summary.json"
        self.timings_path = path / "timings.txt"
        self.report_path = path / "report.png"
        self.reward_plot_path = path / "reward.png"
        self.tensorboard_dir = path / "tensorboard"
        self.checkpoints_dir = path / "checkpoints"
        self.reference_dir = path / "reference"
        self.traces_dir = path / "router_trace"
        self.resume_from: CheckpointInfo | None = None
        self.changed: tuple[str, ...] = ()
        self._lock: int | None = None

    @classmethod
    def open(
        cls, path: str | Path, *, recipe_text: str, overwrite: bool = False, resume: bool = True
    ) -> "RunDirectory":
        """Create the directory, or continue or replace the run in it.

        `overwrite` removes what headrace wrote there, and only that. Otherwise a run that has a checkpoint is
        continued if `resume`: lines of metrics and samples after that checkpoint's step are cut.

        Raises:
            ConfigError: not writable, in use by another process, or it holds files that must not be replaced.
        """
        if not str(path).strip():
            raise ConfigError("run_dir is empty; set it to a directory of its own")
        run = cls(Path(path).expanduser())
        with ExitStack() as on_error:
            on_error.callback(run.close)
            run._lock = run._take_lock()
            run._make_room(recipe_text, overwrite, resume)
            atomic.write_text(run.path / _MARKER, "headrace wrote this directory; see config.yaml.\n")
            atomic.write_text(run.config_path, recipe_text)
            run.checkpoints_dir.mkdir(exist_ok=True)
            on_error.pop_all()
        return run

    def _take_lock(self) -> int:
        try:
            self._refuse_foreign()
            self.path.mkdir(parents=True, exist_ok=True)
            return _lock(self.path / _LOCK)
        except OSError as error:
            raise ConfigError(
                f"run_dir={self.path}: cannot write there ({error.strerror}); set run_dir to a writable directory"
            ) from error

    def _make_room(self, recipe_text: str, overwrite: bool, resume: bool) -> None:
        """Refuse, empty or continue what is there."""
        if not (self.path / _MARKER).exists():
            return
        for folder in (self.path, self.checkpoints_dir):
            atomic.remove_partials(folder)
        checkpoints = list_checkpoints(self.checkpoints_dir)
        if overwrite or not (checkpoints or self._has_content()):
            self._remove_run()
            return
        if not (resume and checkpoints):
            why = "it has no checkpoint to resume from" if resume else "resume=false"
            raise ConfigError(
                f"run_dir={self.path}: holds another run, and {why}; set overwrite=true to replace it, or "
                "another run_dir"
            )
        self.changed = _changes_since(self.config_path, recipe_text)
        self.resume_from = checkpoints[-1]
        for log in (self.metrics_path, self.samples_path):
            _cut_after(log, self.resume_from.step)

    def _files(self) -> tuple[Path, ...]:
        logs = (self.config_path, self.metrics_path, self.samples_path, self.summary_path)
        return (*logs, self.timings_path, self.report_path, self.reward_plot_path)

    def _refuse_foreign(self) -> None:
        if (self.path / _MARKER).exists():
            return
        folders = (self.tensorboard_dir, self.checkpoints_dir, self.reference_dir, self.traces_dir)
        for path in (*self._files(), *folders):
            if path.exists():
                raise ConfigError(
                    f"run_dir={self.path}: holds {path.name} that headrace did not write; set another run_dir"
                )

    def _has_content(self) -> bool:
        """Whether there is anything to lose; a run that failed before its first step left only its config."""
        logs = (self.metrics_path, self.samples_path, self.summary_path)
        return any(log.exists() and log.stat().st_size > 0 for log in logs)

    def _remove_run(self) -> None:
        for entry in (
            *self.tensorboard_dir.rglob("events.out.tfevents.*"),
            *self.checkpoints_dir.glob("step_*"),
            *self.reference_dir.glob("*"),
            *self.traces_dir.glob("step_*.safetensors"),
        ):
            if entry.is_dir() and not entry.is_symlink():
                atomic.remove_directory(entry)
            else:
                entry.unlink()
        for path in self._files():
            path.unlink(missing_ok=True)

    def append_metrics(self, record: dict[str, Any]) -> None:
        """Add one line to metrics.jsonl."""
        atomic.append_line(self.metrics_path, json.dumps(record, allow_nan=False))

    def append_sample(self, record: dict[str, Any]) -> None:
        """Add one line to samples.jsonl."""
        atomic.append_line(self.samples_path, json.dumps(record, ensure_ascii=False, default=str))

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json, the sign of a finished run."""
        atomic.write_text(self.summary_path, json.dumps(summary, indent=2, default=str) + "\n")

    def close(self) -> None:
        """Let go of the lock; may be called twice."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _lock(path: Path) -> int:
    """Take the lock; it goes with the process, however that ends."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.read(lock, 32).decode().strip()
        os.close(lock)
        raise ConfigError(
            f"run_dir={path.parent}: process {owner} is writing there; wait for it to end, or set another run_dir"
        ) from error
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _changes_since(config: Path, recipe_text: str) -> tuple[str, ...]:
    changed = changed_keys(config.read_text(encoding="utf-8"), recipe_text) if config.exists() else ()
    for key in changed:
        if _within(key, _FIXED_BY_CHECKPOINT):
            raise ConfigError(
                f"{key} differs from that of the run in run_dir={config.parent}, so its checkpoint cannot be "
                "resumed; put the old value back, or set overwrite=true or another run_dir"
            )
    return tuple(key for key in changed if not _within(key, _MAY_DIFFER))


def _within(key: str, sections: tuple[str, ...]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def _cut_after(log: Path, step: int) -> None:
    """Drop the lines of later steps, and a last line that a crash cut short; phases before step 1 stay."""
    if not log.exists():
        return
    kept = []
    for line in log.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record.get("kind") == "phase" or record["step"] <= step:
            kept.append(line)
    atomic.write_text(log, "".join(kept))

"""The directory of one run: what is in it, who may write there, and what a resume cuts away.

    config.yaml     the resolved recipe           checkpoints/    step_000080/ ...
    metrics.jsonl   a line per step               tensorboard/    event files
    samples.jsonl   prompts, answers, rewards     summary.json    of a run that has finished
    timings.txt     time per stage, bytes       reference/      weights of the reference policy
    report.html, report.png, reward.png, compare.html     router_trace/   routes of every step
    detail.jsonl    the last steps from inside; detail.1.jsonl: those before them
    events.jsonl, wandb/  of these trackers       wandb.id, mlflow.id   the run's ids there
    libraries.log   what libraries have warned of
    journal/        what went into the store

A marker file says that headrace made these; without it nothing is ever overwritten or removed.
"""

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

from headrace.errors import ConfigError
from headrace.utils import atomic
from headrace.utils.checkpoints import CheckpointInfo, list_checkpoints
from headrace.utils.file_lock import is_held, take_lock
from headrace.utils.json_text import JsonLine, read_json_lines
from headrace.utils.paths import user_path
from headrace.utils.recipe import read_resolved
from headrace.utils.run_state import Change, Progress, read_state, recipe_changes

_MARKER = ".headrace-run"
_LOCK = ".headrace-lock"
# What a model, an adapter and a tokenizer are saved as.
_MODEL_FILES = (
    r"(adapter_)?(model|config)(-\d+-of-\d+)?\.(safetensors|safetensors\.index\.json|json)"
    r"|(generation|processor|preprocessor)_config\.json|(special_tokens_map|added_tokens)\.json"
    r"|(tokenizer|vocab|merges|chat_template)\b.*|tokenizer_config\.json|additional_chat_templates"
    r"|[\w.-]+\.(model|spm|tiktoken)|tekken\.json|(configuration|modeling|tokenization)_\w+\.py"
)


class RunDirectory:
    """The paths of a run directory; one that `open` returns is locked against a second process until `close`.

    `resume_from` is the newest checkpoint of the run that is continued, None for a fresh one. `changes` are those
    of the recipe since that checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_path = path / "config.yaml"
        self.metrics_path = path / "metrics.jsonl"
        self.samples_path = path / "samples.jsonl"
        self.detail_path = path / "detail.jsonl"
        self.older_detail_path = path / "detail.1.jsonl"
        self.summary_path = path / "summary.json"
        self.timings_path = path / "timings.txt"
        self.report_path = path / "report.png"
        self.html_path = path / "report.html"
        self.compare_path = path / "compare.html"
        self.reward_plot_path = path / "reward.png"
        self.tensorboard_dir = path / "tensorboard"
        self.checkpoints_dir = path / "checkpoints"
        self.reference_dir = path / "reference"
        self.traces_dir = path / "router_trace"
        self.lock_path = path / _LOCK
        self.library_log_path = path / "libraries.log"
        self.journal_dir = path / "journal"
        self._logs = (self.metrics_path, self.samples_path)
        self._details = (self.detail_path, self.older_detail_path)
        pictures = (self.report_path, self.html_path, self.compare_path, self.reward_plot_path)
        self._results = (self.summary_path, self.timings_path, *pictures)
        # Under which ids trackers know the run, and their own log of it.
        of_trackers = tuple(path / name for name in ("wandb.id", "mlflow.id", "events.jsonl"))
        self._files = (
            self.config_path,
            self.library_log_path,
            *self._logs,
            *self._details,
            *self._results,
            *of_trackers,
        )
        # Folders, and the form of the names that headrace writes in each.
        self._folders = {
            self.tensorboard_dir: r"(.*/)?events\.out\.tfevents\.[^/]*",
            self.checkpoints_dir: r"step_\d+",
            self.reference_dir: _MODEL_FILES,
            self.traces_dir: r"step_\d+\.safetensors",
            self.journal_dir: r"[^/]+/\d+\.journal|(keep|clock)\.json|lock",
        }
        self.resume_from: CheckpointInfo | None = None
        self.changes: Sequence[Change] = ()
        self._progress: Progress | None = None
        self._recipe_text = ""
        self._lock: int | None = None

    @property
    def name(self) -> str:
        return self.path.absolute().name

    @property
    def is_marked(self) -> bool:
        """Whether headrace made the directory."""
        return (self.path / _MARKER).is_file()

    @property
    def is_held(self) -> bool:
        """Whether a process writes there; where there are no locks, whether one of its number lives on this machine."""
        return is_held(self.lock_path)

    def require_mark(self) -> None:
        """Refuse to write results into a directory that headrace did not make."""
        if not self.is_marked:
            raise ConfigError(
                f"{self.path}: headrace did not make this directory, for it has no {_MARKER}, and writes nothing "
                "there; give a run directory, or, of one that was copied, copy that file too"
            )

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        recipe_text: str,
        overwrite: bool = False,
        resume: bool = True,
        allow_changes: bool = False,
    ) -> "RunDirectory":
        """Create the directory, or take over the run in it, to be continued or replaced.

        `overwrite` removes what headrace wrote there, and only that. Otherwise a run that has a checkpoint is
        continued if `resume`; its files are left as they are until `begin`.

        Raises:
            ConfigError: not writable, in use by another process, it holds files that must not be replaced, or a
                checkpoint that cannot be continued by this recipe (see `recipe_changes`).
        """
        if not str(path).strip():
            raise ConfigError("run_dir is empty; set it to a directory of its own")
        run = cls(user_path(path, "run_dir"))
        run._recipe_text = recipe_text
        with ExitStack() as on_error:
            on_error.callback(run.close)
            run._take_lock()
            run._make_room(overwrite, resume, allow_changes)
            on_error.pop_all()
        return run

    def begin(self) -> None:
        """Write config.yaml and, to go on, cut the lines of metrics and samples after the checkpoint."""
        if self._progress is not None:
            kept = {log: _lines_until(log, self._progress) for log in self._logs if log.exists()}
            for log, lines in kept.items():
                atomic.write_text(log, lines)
        atomic.write_text(self.config_path, self._recipe_text)

    def _take_lock(self) -> None:
        """Make the directory headrace's own, and keep other processes out until `close`."""
        try:
            self._refuse_foreign()
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = take_lock(self.lock_path, "run_dir")
        except OSError as error:
            raise ConfigError(
                f"run_dir={self.path}: cannot write there ({error.strerror}); set run_dir to a writable directory"
            ) from error
        with atomic.naming(self.path):
            if not self.is_marked:
                atomic.write_text(self.path / _MARKER, "headrace wrote this directory; see config.yaml.\n")
            self.checkpoints_dir.mkdir(exist_ok=True)

    def _make_room(self, overwrite: bool, resume: bool, allow_changes: bool) -> None:
        for folder in (self.path, self.checkpoints_dir, self.journal_dir):
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
        saved = read_state(checkpoints[-1])
        self.changes = recipe_changes(saved.recipe, read_resolved(self._recipe_text), allowed=allow_changes)
        self.resume_from, self._progress = checkpoints[-1], saved.progress

    def _refuse_foreign(self) -> None:
        if self.is_marked:
            # Headrace writes no folder of such a name.
            foreign = (path for path in self._files if path.is_dir() and not path.is_symlink())
        else:
            foreign = (path for path in (*self._files, *self._folders) if path.exists())
        for path in foreign:
            raise ConfigError(
                f"run_dir={self.path}: holds {path.name} that headrace did not write; set another run_dir"
            )

    def _has_content(self) -> bool:
        """Whether there is anything to lose; a run that failed before its first step left only its config."""
        logs = (*self._logs, self.summary_path)
        return any(log.exists() and log.stat().st_size > 0 for log in logs)

    def _remove_run(self) -> None:
        # A run replaces this folder as a whole, so that nothing else may be in it.
        for entry in self.reference_dir.glob("*"):
            if not re.fullmatch(_MODEL_FILES, entry.name):
                raise ConfigError(
                    f"run_dir={self.path}: holds reference/{entry.name} that headrace did not write; move it "
                    "elsewhere, or set another run_dir"
                )
        for folder, form in self._folders.items():
            for entry in list(folder.glob("**/*")):
                if re.fullmatch(form, entry.relative_to(folder).as_posix()):
                    atomic.remove(entry)
        for writer in self.journal_dir.glob("*/"):
            with suppress(OSError):  # one that is not empty
                writer.rmdir()
        for path in self._files:
            path.unlink(missing_ok=True)

    def append_metrics(self, record: dict[str, Any]) -> None:
        atomic.append_line(self.metrics_path, json.dumps(record, allow_nan=False))

    def append_sample(self, record: dict[str, Any]) -> None:
        """Append a line; half a surrogate pair, which is no text, becomes a question mark."""
        line = json.dumps(record, ensure_ascii=False, allow_nan=False, default=str)
        atomic.append_line(self.samples_path, line.encode(errors="replace").decode())

    def append_detail(self, record: dict[str, Any], most_bytes: int) -> None:
        """Append a line; the file moves aside when it has half of `most_bytes`, in place of the one moved before."""
        line = json.dumps(record, allow_nan=False)
        try:
            grown = os.stat(self.detail_path).st_size + len(line) > most_bytes // 2
        except FileNotFoundError:
            grown = False
        if grown:
            os.replace(self.detail_path, self.older_detail_path)
        atomic.append_line(self.detail_path, line)

    def write_summary(self, summary: dict[str, Any]) -> None:
        atomic.write_text(self.summary_path, json.dumps(summary, indent=2, default=str) + "\n")

    def close(self) -> None:
        """Let go of the lock; may be called twice."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_log(log: Path, *, remedy: str = "mend or remove the line") -> Iterator[JsonLine]:
    """Yield the lines of metrics.jsonl or samples.jsonl, without a last one that a crash cut short."""
    for line in read_json_lines(log, remedy=remedy, may_end_cut=True):
        if not isinstance(line.value.get("step"), int):
            raise ConfigError(f"{log}, line {line.number}: has no step; {remedy}")
        yield line


def _lines_until(log: Path, progress: Progress) -> str:
    """Return the lines of what had happened by then; what comes after is written anew."""
    lines = read_log(log, remedy="mend or remove the line, or set overwrite=true")
    validated = progress.step > 0 or progress.first_validation is not None
    ends = {"phase": math.inf if progress.step else progress.warm_start_steps}
    last = progress.step if validated else -1
    return "".join(
        f"{line.text}\n"
        for line in lines
        if line.value["step"] <= ends.get(str(line.value.get("kind")), last)
    )

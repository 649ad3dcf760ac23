"""Runs in Weights & Biases, online or offline."""

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from headrace.errors import ConfigError
from headrace.trackers.base import Tracker, not_installed
from headrace.utils.targets import load_optional


class WandbTracker(Tracker):
    """A W&B run, whose files lie in `directory`; offline, `wandb sync` sends them later.

    Every number has the step that it belongs to beside it, as W&B's own steps may not go back.

    Raises:
        ConfigError: wandb is not installed, or it is online and nobody is logged in.
    """

    def __init__(
        self,
        *,
        project: str = "headrace",
        name: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: Literal["online", "offline"] | None = None,
        directory: str | Path = ".",
        settings: Mapping[str, Any] | None = None,
        id_file: Path | None = None,
    ) -> None:
        super().__init__(settings=settings, id_file=id_file)
        self._wandb = load_optional("wandb", not_installed("wandb", "wandb", "trackers"))
        mode = mode or ("online" if os.environ.get("WANDB_MODE", "online") == "online" else "offline")
        if mode == "online" and not self._wandb.login(prompt=False):
            raise ConfigError(
                "logging.wandb.mode=online: nobody is logged in to W&B; run wandb login, set WANDB_API_KEY, or set "
                "logging.wandb.mode=offline"
            )
        self._options: dict[str, Any] = {"project": project, "name": name, "entity": entity, "group": group}
        # Its service may run in another directory.
        self._options |= {"tags": list(tags), "mode": mode, "dir": str(Path(directory).absolute())}
        self._run: Any = None

    def begin(self, settings: Mapping[str, Any], first_step: int) -> None:
        id = self.known_id() or secrets.token_hex(4)
        quiet = self._wandb.Settings(silent=True, console="off")
        config = self.settings or dict(settings)
        self._run = self._wandb.init(
            **self._options, id=id, resume="allow", config=config, settings=quiet, allow_val_change=True
        )
        self.keep_id(id)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, values: Mapping[str, float], step: int, phase: str = "") -> None:
        self._run.log({**values, "step": step})

    def log_samples(self, rows: list[dict[str, Any]], step: int, split: str) -> None:
        columns = list(dict.fromkeys(key for row in rows for key in row))
        table = self._wandb.Table(
            columns=columns, data=[[row.get(key) for key in columns] for row in rows], allow_mixed_types=True
        )
        self._run.log({f"samples/{split}": table, "step": step})

    def end(self, summary: Mapping[str, Any] | None) -> None:
        self._run.summary.update({f"summary/{key}": value for key, value in (summary or {}).items()})
        self._run.finish(exit_code=0 if summary is not None else 1)

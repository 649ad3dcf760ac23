"""A run from a recipe, as the command line and `headrace.train` make it: directory, displays, files, results."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console, RenderableType

from headrace.algorithms.observer import RunObserver, StepRecord
from headrace.config import RecipeConfig
from headrace.errors import ConfigError, HeadraceError
from headrace.library_logs import LibraryLogs
from headrace.progress import CompositeObserver, ConsoleObserver, FileObserver, make_console, print_line, tell
from headrace.report import draw_reward_plot, read_metrics, run_totals, write_report
from headrace.run_tables import final_tables, render_text
from headrace.trackers import RunTrackers
from headrace.utils import atomic
from headrace.utils.checkpoints import list_checkpoints
from headrace.utils.config_errors import validated
from headrace.utils.idle_keys import idle_lines
from headrace.utils.interrupt import InterruptFlag
from headrace.utils.paths import user_path
from headrace.utils.recipe import dump_recipe, load_recipe
from headrace.utils.run_directory import RunDirectory
from headrace.utils.section import plain
from headrace.utils.targets import extend_import_path, name_of

_log = logging.getLogger(__name__)
# Files, damaged lines, and what rich and matplotlib fail by.
_RESULT_FAULTS = (HeadraceError, OSError, ValueError, RuntimeError, AssertionError, ImportError)


@dataclass(frozen=True)
class RunResult:
    """What a run has come to.

    completed: False if the user stopped it; the same call goes on from its checkpoint.
    metrics: those of the last step that this call made, and of the last validation.
    checkpoint: the newest one; None without any.
    model: the trained model in it, a Hugging Face directory.
    summary: what summary.json holds.
    """

    completed: bool
    steps: int
    metrics: dict[str, float]
    run_dir: Path
    checkpoint: Path | None
    model: Path | None
    summary: dict[str, Any] = field(repr=False)


def train(
    recipe: str | Path | Mapping[str, Any] | RecipeConfig,
    *,
    environment: Any = None,
    reward: Any = None,
    loss: Any = None,
    observers: Sequence[RunObserver] = (),
    overrides: Sequence[str] = (),
) -> RunResult:
    """Train by a recipe, or go on with the run that its run_dir holds.

    What another process can import goes into the recipe by its name, as `env.target`, `env.rewards` and `loss.target`.
    Anything else (an object, a function of a notebook or of the script itself) works in this process alone: not with a
    rollout actor, and a loss not with several workers; and a reward has no time limit.

    Args:
        recipe: A file, the name of one that ships, a mapping with its sections, or a config.
        environment: A class, function or object, or `module:name`, in place of the recipe's `env`.
        reward: A reward function, or a list of such; `env.kind` is then `dataset`.
        loss: A loss function.
        observers: Are told what the run does, beside the display and the files.
        overrides: `key=value`, as on the command line, of a recipe that is a file.

    Raises:
        ConfigError: whatever the recipe gets wrong.
    """
    if environment is not None and reward is not None:
        raise ConfigError(
            "headrace.train got environment and reward; an environment gives its own rewards: leave out one"
        )
    _check_kinds(recipe, observers, overrides)
    if not isinstance(recipe, str | Path):
        code_path = plain(recipe).get("code_path") or ()
        extend_import_path(code_path if isinstance(code_path, list | tuple) else ())
        if overrides:
            raise ConfigError("overrides are for a recipe that is a file; change the mapping")
    else:
        extend_import_path([str(Path(recipe).parent.absolute())])
    changes = _own_code(environment, reward, loss)
    return run_recipe(_with_changes(recipe, changes, overrides), observers)[1]


def _check_kinds(recipe: Any, observers: Any, overrides: Any) -> None:
    """Refuse what is of another kind than `train` takes, which would only show later."""
    if not isinstance(recipe, str | Path | Mapping | RecipeConfig):
        raise ConfigError(
            f"headrace.train got recipe={recipe!r:.60}; expected a file, the name of a recipe, a mapping, or a config"
        )
    are_texts = isinstance(overrides, Sequence) and all(isinstance(text, str) for text in overrides)
    if isinstance(overrides, str) or not are_texts:
        raise ConfigError(f"headrace.train got overrides={overrides!r:.60}; expected a list of 'key=value'")
    if not isinstance(observers, Sequence) or not all(isinstance(found, RunObserver) for found in observers):
        raise ConfigError(
            f"headrace.train got observers={observers!r:.60}; expected a list of objects whose classes derive from "
            "headrace.RunObserver"
        )


def _own_code(environment: Any, reward: Any, loss: Any) -> dict[str, Any]:
    """Return the keys of a recipe that name what was given."""
    changes: dict[str, Any] = {}
    if environment is not None:
        changes |= {"env.kind": "python", "env.target": name_of(environment, "environment")}
    if reward is not None:
        functions = reward if isinstance(reward, list | tuple) else [reward]
        changes |= {
            "env.kind": "dataset",
            "env.rewards": [name_of(function, "reward") for function in functions],
        }
    if loss is not None:
        changes["loss.target"] = name_of(loss, "loss")
    return changes


def _with_changes(
    recipe: str | Path | Mapping[str, Any] | RecipeConfig,
    changes: Mapping[str, Any],
    overrides: Sequence[str],
) -> RecipeConfig:
    if isinstance(recipe, str | Path):
        given = [f"{k}={'[' + ', '.join(v) + ']' if isinstance(v, list) else v}" for k, v in changes.items()]
        return load_recipe(recipe, [*overrides, *given])
    values = plain(recipe)
    env = values.get("env")
    if "env.kind" in changes and (not isinstance(env, dict) or env.get("kind") != changes["env.kind"]):
        values["env"] = {}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        values.setdefault(section, {})[name] = value
    made: RecipeConfig = validated(RecipeConfig, values, "recipe")
    return made


def run_recipe(recipe: RecipeConfig, observers: Sequence[RunObserver] = ()) -> tuple[int, RunResult]:
    """Run a recipe in its run directory; return the exit code of an interrupted run, and the result."""
    _refuse_fewer_steps(recipe)
    console = make_console(recipe.logging.progress)
    opened = RunDirectory.open(
        recipe.run_dir,
        recipe_text=dump_recipe(recipe),
        overwrite=recipe.overwrite,
        resume=recipe.resume,
        allow_changes=recipe.allow_changes,
    )
    last = _LastMetrics()
    with opened as run:
        for line in idle_lines(recipe):
            tell(console, line)
        _say_where_it_starts(recipe, run, console)
        code, summary = _run_loop(recipe, run, console, [*observers, last])
        if summary["steps"]:
            try_results(run, console)
    checkpoint = max(list_checkpoints(run.checkpoints_dir), key=lambda found: found.step, default=None)
    path = None if checkpoint is None else checkpoint.path
    model = None if path is None or not (path / "policy" / "model").is_dir() else path / "policy" / "model"
    made = RunResult(summary["completed"], summary["steps"], last.metrics, run.path, path, model, summary)
    return code, made


class _LastMetrics(RunObserver):
    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    def on_step(self, record: StepRecord) -> None:
        held_out = {name: value for name, value in self.metrics.items() if name.startswith("validation/")}
        self.metrics = {**held_out, **record.metrics}

    def on_validation(self, step: int, metrics: dict[str, float]) -> None:
        self.metrics = {**self.metrics, **metrics}


def _run_loop(
    recipe: RecipeConfig, run: RunDirectory, console: Console, observers: Sequence[RunObserver]
) -> tuple[int, dict[str, Any]]:
    """Return the exit code of an interrupted run, and the loop's summary."""
    loop = load_loop()
    with (
        LibraryLogs(run.library_log_path),
        ConsoleObserver(console, title=str(run.path), mode=recipe.logging.progress) as display,
        RunTrackers(recipe, run, observers) as others,
        InterruptFlag(display.notice, display.show_cursor) as interrupt,
    ):
        summary = loop.train(
            recipe,
            run.path,
            CompositeObserver([display, FileObserver(run, detail_mb=recipe.logging.detail_mb), others]),
            interrupt,
        )
        return interrupt.exit_code, summary


def _refuse_fewer_steps(recipe: RecipeConfig) -> None:
    """Refuse to go on with a run that has made more steps than the recipe wants; nothing of it is touched."""
    run, wanted = RunDirectory(user_path(recipe.run_dir, "run_dir")), recipe.grpo.max_num_steps
    made = 0 if recipe.overwrite else max((c.step for c in list_checkpoints(run.checkpoints_dir)), default=0)
    if made > wanted:
        raise ConfigError(
            f"grpo.max_num_steps={wanted}: the run in {run.path} has made {made} steps; set {made} or more to go on "
            "with it, overwrite=true to replace it, or another run_dir"
        )


def _say_where_it_starts(recipe: RecipeConfig, run: RunDirectory, console: Console) -> None:
    if run.resume_from is None:
        return
    tell(console, f"going on after step {run.resume_from.step} of the run in {run.path}")
    for matters, label in ((True, "for the steps to come"), (False, "with no effect on training")):
        changes = ", ".join(str(change) for change in run.changes if change.matters == matters)
        if changes:
            tell(console, f"changed since, {label}: {changes}")
    if run.resume_from.step == recipe.grpo.max_num_steps:
        tell(console, "all its steps are made; raise grpo.max_num_steps to go on")


def try_results(run: RunDirectory, console: Console) -> None:
    """Show and write what a run has come to; all of its steps are made, and it does not fail by its tables."""
    try:
        tables = final_tables(run_totals(read_metrics(run.path)))
        with suppress(OSError):
            console.print(tables)
        tell(console, _write_files(run, tables))
    except _RESULT_FAULTS as error:
        reason = str(error) or repr(error)
        _log.warning("%s: no tables or plots of the run (%s); headrace report makes them", run.path, reason)


def write_results(run: RunDirectory, console: Console) -> None:
    """Show and write what a run has come to; raises what keeps it from that."""
    tables = final_tables(run_totals(read_metrics(run.path)))
    console.print(tables)
    print_line(console, _write_files(run, tables))


def _write_files(run: RunDirectory, tables: RenderableType) -> str:
    run.require_mark()
    atomic.write_text(run.timings_path, render_text(tables))
    draw_reward_plot(run.path, run.reward_plot_path)
    return f"plots: {write_report(run.path)}, {run.reward_plot_path}"


def load_loop() -> ModuleType:
    from headrace.algorithms import run  # noqa: PLC0415  (imports transformers: seconds)

    return run

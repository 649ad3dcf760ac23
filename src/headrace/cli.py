"""The command line.

What is slow to load (torch, transformers, matplotlib) is loaded by the command that needs it. A mistake ends
with one line on standard error: exit code 2 for a bad config or command line, 1 for another failure, 130 for
Ctrl-C.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, NoReturn

try:
    import typer
except ModuleNotFoundError as error:
    raise SystemExit("headrace: error: no typer; pip install 'headrace[train]'") from error
from typer.core import TyperGroup

import headrace
from headrace.config import RecipeConfig
from headrace.config_commands import Overrides, Recipe, RunOrRecipe, config_app
from headrace.dashboard_commands import dashboard, report
from headrace.data_commands import data_app
from headrace.doctor import doctor_table, run_checks
from headrace.errors import ConfigError, HeadraceError
from headrace.init_commands import init
from headrace.model_commands import export, find_checkpoint, plan
from headrace.progress import forgive_encoding, make_console, print_line, tell
from headrace.run_tables import metrics_table
from headrace.step_commands import record_step, replay_step
from headrace.store_commands import store_app
from headrace.training import load_loop, run_recipe
from headrace.utils.paths import user_path
from headrace.utils.recipe import load_recipe
from headrace.utils.run_directory import RunDirectory
from headrace.utils.shipped import shipped_recipes

_DEBUG = "--debug"
_HELP = "--help"
_UsageError: Any = typer.BadParameter.__base__
"""What typer raises for a command line that it cannot take; it exports only this subclass."""
_RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.", show_default=False)]


class _Commands(TyperGroup):
    """Ends a command that fails with one line, unless `--debug` stands anywhere on the command line.

    A command line that cannot be read is one line in any case. `help COMMAND` is `COMMAND --help`.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest = [arg for arg in args if arg != _DEBUG]
        if rest[:1] == ["help"]:
            rest = [*rest[1:], _HELP]
        if not args:
            return super().parse_args(ctx, args)  # shows the help
        try:
            return super().parse_args(ctx, [_DEBUG, *rest] if len(rest) < len(args) else rest)
        except _UsageError as error:
            _fail_usage(error)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            _fail_usage(error)
        except (KeyboardInterrupt, HeadraceError) as error:
            if ctx.params["debug"]:
                raise
            if isinstance(error, KeyboardInterrupt):
                _fail("interrupted", code=130)
            _fail(f"error: {error}", code=2 if isinstance(error, ConfigError) else 1)


app = typer.Typer(
    name="headrace",
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", _HELP]},
)
app.command()(init)
app.add_typer(config_app, name="config")
app.add_typer(store_app, name="store")
app.add_typer(data_app, name="data")
app.command()(plan)
app.command()(export)
app.command("record-step")(record_step)
app.command("replay-step")(replay_step)
app.command()(dashboard)
app.command()(report)


def main() -> NoReturn:
    if _DEBUG not in sys.argv:
        sys.excepthook = _report_unexpected
    forgive_encoding()
    if os.environ.get("COLUMNS") == "0":  # of a terminal that does not know; rich would print nothing
        del os.environ["COLUMNS"]
    sys.exit(typer.main.get_command(app)(prog_name="headrace"))


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"headrace: {' '.join(message.split())}", err=True)
    raise typer.Exit(code)


def _fail_usage(error: Any) -> NoReturn:
    message = error.format_message().rstrip(".") or "missing command"
    if "." in getattr(error, "option_name", ""):
        message += ": keys of a recipe have no dashes"
    if error.ctx:
        see = f"see {error.ctx.command_path} {_HELP}"
        message += f" {see.capitalize()}" if message.endswith("?") else f"; {see}"
    _fail(f"error: {message[0].lower()}{message[1:]}", code=error.exit_code)


def _report_unexpected(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    text = " ".join(f"unexpected {kind.__name__}: {error}".split())
    typer.echo(f"headrace: {text}; add {_DEBUG} to see where", err=True)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headrace {headrace.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    debug: Annotated[bool, typer.Option(_DEBUG, help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Train language models with GRPO over a data plane.

    \b
    Examples:
      headrace train demo_moe
      headrace train demo_moe seed=1 policy.optimizer.lr=1e-4
      headrace eval runs/demo_moe/seed0
      headrace train --help
    """


@app.command()
def train(
    config: Recipe,
    overrides: Overrides = None,
) -> None:
    """Train by a recipe, or continue the run that its run_dir holds.

    Ctrl-C stops after the step in progress and leaves a checkpoint; the same command goes on from there.

    \b
    Examples:
      headrace train demo_moe
      headrace train demo_moe seed=1 run_dir=/tmp/demo overwrite=true
      headrace train my.yaml policy.optimizer.lr=1e-5 'generation.stop_strings=["</answer>"]'
      headrace train my.yaml grpo.max_num_steps=200 logging.progress=off
    """
    recipe = load_recipe(config, overrides or ())
    code, result = run_recipe(recipe)
    if not result.completed:
        tell(
            make_console(recipe.logging.progress),
            _how_to_go_on(recipe, config, overrides or (), result.steps),
        )
        raise typer.Exit(code)


def _how_to_go_on(recipe: RecipeConfig, config: Path, overrides: Sequence[str], steps: int) -> str:
    stopped = f"stopped after step {steps}"
    if not recipe.checkpointing.enabled:
        return f"{stopped}; without checkpoints (checkpointing.enabled=false) the run cannot be continued"
    keep = ["overwrite=false"] if recipe.overwrite else []
    return f"{stopped}; to go on: {shlex.join(['headrace', 'train', str(config), *overrides, *keep])}"


@app.command("eval")
def evaluate(
    target: RunOrRecipe,
    overrides: Overrides = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            help="best, latest, or the path of a checkpoint. Without it a run is evaluated at its best one, "
            "and a recipe with its own weights."
        ),
    ] = None,
) -> None:
    """Measure accuracy and mean reward on the held-out prompts, greedy and sampled.

    \b
    Examples:
      headrace eval runs/demo_moe/seed0
      headrace eval runs/demo_moe/seed0 --checkpoint latest data.validation_size=1000
      headrace eval smollm2_135m
    """
    is_run = user_path(target, "RUN_OR_CONFIG").is_dir()
    path = RunDirectory(target).config_path if is_run else target
    recipe = load_recipe(path, overrides or (), of_a_run=is_run)
    run = RunDirectory(target if is_run else user_path(recipe.run_dir, "run_dir"))
    wanted = "best" if checkpoint is None and is_run else checkpoint
    found = None if wanted is None else find_checkpoint(recipe, run, wanted)
    metrics = load_loop().evaluate(recipe, None if found is None else found.path)
    console = make_console()
    print_line(console, f"step {found.step}, {found.path}" if found else f"the weights of {target}")
    console.print(metrics_table(metrics))


@app.command()
def recipes() -> None:
    """List the recipes that ship; each can be trained by its name, or named by `defaults` in a recipe of yours.

    \b
    Example:
      headrace recipes
    """
    for name, about in shipped_recipes().items():
        typer.echo(f"{name:20} {about}")


@app.command()
def doctor() -> None:
    """Show versions, devices, and what can be used on this machine.

    \b
    Example:
      headrace doctor
    """
    make_console().print(doctor_table(run_checks()))


@app.command("trace-check")
def trace_check(run_dir: _RunDir) -> None:
    """Check a run's trace of expert routes, and explain the first difference; exit code 1 if there is one.

    The run must have had policy.router_replay.enabled=true and policy.router_replay.trace=true.

    \b
    Example:
      headrace trace-check runs/demo_moe_r3
    """
    run = RunDirectory(run_dir)
    if not (run.config_path.is_file() or run.traces_dir.is_dir()):
        raise ConfigError(f"{run_dir}: no run there; give the directory of a run")
    from headrace.models.router_replay.trace import check_run  # noqa: PLC0415  (imports transformers: seconds)

    for line in check_run(run_dir):
        typer.echo(line)


@app.command(
    add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
)
def bench(ctx: typer.Context) -> None:
    """Measure this machine against the targets; exit code 1 if a figure misses its own. Needs a checkout.

    \b
    Examples:
      headrace bench
      headrace bench codec local_store --json
      headrace bench planner --target planner.seconds.1048576x1024=1
    """
    runner = find_benchmarks() / "runner.py"
    raise typer.Exit(subprocess.run([sys.executable, str(runner), *ctx.args], check=False).returncode)


def find_benchmarks() -> Path:
    """Return the folder of benchmarks: of the checkout that this package lies in, or below the working directory."""
    places = (Path(headrace.__file__).parents[2] / "benchmarks", Path.cwd() / "benchmarks")
    for place in places:
        if (place / "runner.py").is_file():
            return place
    raise ConfigError(
        f"no benchmarks in {' or '.join(map(str, places))}; they are not part of an installed package: run "
        "headrace bench in a checkout"
    )


if __name__ == "__main__":
    main()

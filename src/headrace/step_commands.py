"""`headrace record-step` and `headrace replay-step`: one step of a run in a folder, to look at, send and compare."""

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from headrace.config_commands import Overrides, RunOrRecipe
from headrace.errors import ConfigError
from headrace.progress import make_console, print_line
from headrace.run_tables import format_bytes, plain_table
from headrace.utils.paths import user_path
from headrace.utils.recipe import load_recipe
from headrace.utils.run_directory import RunDirectory

_Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A recorded step.", show_default=False)]
_FIRST = ("train/loss", "train/grad_norm")


def record_step(
    target: RunOrRecipe,
    overrides: Overrides = None,
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="FOLDER", help="Where to write; step_000012 here unless set."),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(min=1, help="Which step; the one after the newest checkpoint unless set."),
    ] = None,
    weights: Annotated[
        bool, typer.Option(help="Copy the weights that the step starts from; or only say where they are.")
    ] = True,
) -> None:
    """Save one step of a run: its samples, metadata, plan, recipe, results, and the weights that it starts from.

    Steps since the newest checkpoint before it are made again. The run's own files stay as they are.

    \b
    Examples:
      headrace record-step runs/mine --step 12 --to step12
      headrace record-step demo_moe run_dir=/tmp/none --no-weights
    """
    is_run = user_path(target, "RUN_OR_CONFIG").is_dir()
    run = RunDirectory(target) if is_run else None
    if run is not None and not run.config_path.is_file():
        raise ConfigError(
            f"{target}: no run there (no config.yaml); give the directory of a run, or a recipe"
        )
    recipe = load_recipe(target if run is None else run.config_path, overrides or (), of_a_run=is_run)
    from headrace.algorithms import step_recorder  # noqa: PLC0415  (imports transformers: seconds)

    say = partial(print_line, make_console())
    folder = step_recorder.record_step(
        recipe,
        None if to is None else user_path(to, "--to"),
        run=run,
        step=step,
        with_weights=weights,
        say=say,
    )
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    say(f"{folder}: {format_bytes(size)}; to run it again: headrace replay-step {folder}")


def replay_step(
    folder: _Folder,
    overrides: Overrides = None,
    compare: Annotated[
        Path | None,
        typer.Option(
            metavar="OTHER",
            help="What to compare with: a replay that --save wrote, or a recorded step. What was recorded unless set.",
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write the results there, for another's --compare."),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="Exit code 1 if a gap in a column, or in loss or gradient norm, is larger."
        ),
    ] = None,
) -> None:
    """Score and train a recorded step again, without an engine, and compare with what was recorded.

    KEY=VALUE changes keys of policy (other layouts, precisions, batches) and of loss.

    \b
    Examples:
      headrace replay-step step12
      headrace replay-step step12 policy.workers=2 policy.parallel.tensor=2 --tolerance 1e-4
      headrace replay-step step12 --save old; pip install -U headrace; headrace replay-step step12 --compare old
    """
    from headrace.algorithms import step_record, step_replay  # noqa: PLC0415  (imports transformers: seconds)

    source, console = user_path(folder, "FOLDER"), make_console()
    other = source if compare is None else user_path(compare, "--compare")
    if save is not None and user_path(save, "--save").exists():
        raise ConfigError(f"--save {save}: is there already; remove it, or give another folder")
    facts = step_record.read_facts(source)
    earlier = None if compare is None and facts.error else step_record.Results.read(other)
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    print_line(console, f"step {facts.step} of {facts.recorded_from}, recorded with {versions}")
    if facts.error:
        print_line(console, f"it ended with an error: {facts.error}")
    results = step_replay.replay_step(source, overrides or ())
    if save is not None:
        user_path(save, "--save").mkdir(parents=True)
        results.write(user_path(save, "--save"))
    if earlier is None:
        for name in sorted(results.metrics):
            print_line(console, f"{name} {results.metrics[name]:.9g}")
        return
    label = "recorded" if compare is None else str(compare)
    worst = _show(console, label, earlier, results)
    if tolerance is not None and not worst <= tolerance:
        print_line(console, f"the largest gap is {worst:.3g}, above --tolerance {tolerance:g}")
        raise typer.Exit(1)


def _show(console: Console, label: str, earlier: Any, results: Any) -> float:
    """Print how results differ from earlier ones; return the largest gap in a column, in loss or gradient norm."""
    from headrace.algorithms import step_replay  # noqa: PLC0415  (imports transformers: seconds)

    gaps = list(step_replay.compare_columns(earlier.samples, results.samples))
    differing = step_replay.metric_gaps(earlier.metrics, results.metrics)
    console.print(_metrics_table(label, earlier.metrics, results.metrics, differing))
    console.print(_columns_table(gaps, len(results.samples.sample_ids)))
    if not differing and not any(gap.samples for gap in gaps):
        print_line(console, "the same, bit for bit")
    totals = [abs(differing[name][0] - differing[name][1]) for name in _FIRST if name in differing]
    return max([gap.largest for gap in gaps] + totals, default=0.0)


def _metrics_table(
    label: str, one: dict[str, float], other: dict[str, float], differing: Collection[str]
) -> Table:
    """Loss and gradient norm, then every metric that differs."""
    table = plain_table("metric", label, "replayed", "gap")
    first = [name for name in _FIRST if name in one and name in other]
    for name in [*first, *sorted({*differing} - {*first})]:
        gap = f"{abs(one[name] - other[name]):.3g}" if name in differing else "0"
        table.add_row(name, f"{one[name]:.9g}", f"{other[name]:.9g}", gap)
    return table


def _columns_table(gaps: Sequence[Any], total: int) -> Table:
    table = plain_table("column", "samples that differ", "largest gap", "first")
    for gap in gaps:
        first = "" if gap.sample_id is None else gap.sample_id
        where = first if gap.token is None else f"{first}, token {gap.token}"
        table.add_row(gap.name, f"{gap.samples} of {total}", f"{gap.largest:.3g}", where)
    return table

"""`headrace plan` and `headrace export`: what a run's batches and its GPU hold, and its model for others."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from headrace.algorithms.observer import BEST_BY
from headrace.config import RecipeConfig, SequencePackingConfig
from headrace.config_commands import Overrides
from headrace.distributed.bin_packing import as_lengths, check_fits
from headrace.distributed.plan_report import describe_plan
from headrace.distributed.planner import plan_microbatches
from headrace.errors import ConfigError
from headrace.length_spec import parse_lengths
from headrace.progress import make_console, print_line
from headrace.run_tables import plain_table
from headrace.utils.checkpoints import CheckpointInfo, CheckpointManager, read_checkpoint
from headrace.utils.paths import user_path
from headrace.utils.recipe import load_recipe
from headrace.utils.run_directory import RunDirectory

_PACKING = get_args(SequencePackingConfig.model_fields["algorithm"].annotation)
_UsageError: Any = typer.BadParameter.__base__
_GIB = 2**30
_CONTEXT_GIB, _FRAGMENTS = 0.6, 1.05
"""What CUDA itself takes of a GPU, and what the allocator cannot use of the rest."""
_SMALLER: tuple[tuple[str, ...], ...] = (
    ("policy.activation_checkpointing=true",),
    ("policy.activation_checkpointing=true", "policy.parallel.cpu_offload=true"),
    ("policy.activation_checkpointing=true", "policy.optimizer.kind=adamw_8bit"),
    ("policy.activation_checkpointing=true", "policy.lora.rank=16"),
    ("policy.activation_checkpointing=true", "policy.lora.rank=16", "policy.lora.base=nf4"),
)
"""Changes of a recipe that take less memory, tried in this order."""


def _whole(least: int, most: int, help: str, metavar: str = "TOKENS") -> Any:

    def read(text: str | int) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise typer.BadParameter(f"{text} is not a whole number from {least} to {most:,}")
        return number

    return typer.Option(parser=read, metavar=metavar, help=help)


def plan(
    ctx: typer.Context,
    lengths: Annotated[
        str,
        typer.Argument(
            metavar="LENGTHS",
            help="Tokens per row: numbers with commas, a file of numbers, lognormal:COUNT:MEDIAN:MAX or "
            "uniform:COUNT:MIN:MAX. With --memory, a recipe.",
            show_default=False,
        ),
    ],
    overrides: Overrides = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="What one GPU holds in a run of a recipe.")
    ] = False,
    gpu_gib: Annotated[
        float | None,
        typer.Option(min=1.0, help="With --memory: a GPU's GiB; exit code 1 if the run does not fit."),
    ] = None,
    budget: Annotated[
        int, _whole(1, 10**12, "Tokens that fit into one microbatch (max_tokens_per_microbatch).")
    ] = 4096,
    ranks: Annotated[int, _whole(1, 1_000_000, "Data-parallel ranks.", metavar="COUNT")] = 1,
    algorithm: Annotated[
        str, typer.Option(help=f"{', '.join(_PACKING)}; or dynamic: rows of like length, padded.")
    ] = "modified_first_fit_decreasing",
    pad_multiple: Annotated[int, _whole(1, 10**12, "Round every row up to a multiple of this.")] = 1,
    seed: Annotated[int, _whole(0, 10**12, "Seed of lengths that are drawn.", metavar="SEED")] = 0,
) -> None:
    """Explain how rows of these lengths are cut into microbatches, or what one GPU holds in a run.

    \b
    Examples:
      headrace plan 512,80,300,1024 --budget 1024
      headrace plan lognormal:512:200:1500 --ranks 4 --budget 8192
      headrace plan lengths.txt --algorithm dynamic --pad-multiple 64
      headrace plan --memory my.yaml --gpu-gib 80 policy.lora.rank=16
    """
    others = ("budget", "ranks", "algorithm", "pad_multiple", "seed") if memory else ("gpu_gib",)
    for name in others:
        if (source := ctx.get_parameter_source(name)) is not None and source.name == "COMMANDLINE":
            option, how = name.replace("_", "-"), "with" if memory else "without"
            raise _UsageError(f"--{option} has no effect {how} --memory", ctx=ctx)
    if memory:
        _plan_memory(lengths, overrides or (), gpu_gib)
        return
    if overrides:
        raise _UsageError(f"got unexpected extra argument(s) ({' '.join(overrides)})", ctx=ctx)
    typer.echo(_plan_rows(lengths, budget, ranks, algorithm, pad_multiple, seed))


def _plan_rows(lengths: str, budget: int, ranks: int, algorithm: str, pad_multiple: int, seed: int) -> str:
    if algorithm not in (*_PACKING, "dynamic"):
        raise ConfigError(f"--algorithm {algorithm}: expected one of {', '.join(_PACKING)}, dynamic")
    rows = parse_lengths(lengths, seed=seed)
    costs = as_lengths(rows)
    check_fits(costs, -(-costs // pad_multiple) * pad_multiple, budget, knob="--budget")
    args: dict[str, Any] = {
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
        "max_tokens_per_microbatch": budget,
    }
    if algorithm == "dynamic":
        args |= {"sequence_length_round": pad_multiple}
        result = plan_microbatches(rows, shards=ranks, dynamic_batching_args=args)
    else:
        args |= {"algorithm": algorithm, "sequence_length_pad_multiple": pad_multiple}
        result = plan_microbatches(rows, shards=ranks, sequence_packing_args=args)
    return describe_plan(result)


def _plan_memory(config: str, overrides: Sequence[str], gpu_gib: float | None) -> None:
    from headrace.models.memory_plan import PARTS, STAGES, plan_memory  # noqa: PLC0415  (imports transformers: seconds)

    plan = plan_memory(load_recipe(config, overrides))
    table = plain_table("GiB on one GPU at the peak of", *STAGES)
    for part in PARTS:
        sizes = [plan.parts[stage].get(part, 0) for stage in STAGES]
        if any(sizes):
            table.add_row(part, *(f"{size / _GIB:.2f}" for size in sizes))
    table.add_section()
    table.add_row("total", *(f"{plan.total(stage) / _GIB:.2f}" for stage in STAGES))
    console = make_console()
    console.print(table)
    for note in plan.notes:
        print_line(console, note)
    if gpu_gib is None:
        return
    needed = _needed_gib(plan.peak)
    verdict = "fits" if needed <= gpu_gib else "does not fit"
    print_line(console, f"{verdict} a GPU of {gpu_gib:g} GiB: it takes {needed:.1f}, with CUDA's own share")
    if needed <= gpu_gib:
        return
    for changes in _SMALLER:
        with suppress(ConfigError):  # such a change is not for this recipe
            size = _needed_gib(plan_memory(load_recipe(config, [*overrides, *changes])).peak)
            if size <= gpu_gib:
                print_line(console, f"fits with {' '.join(changes)}: {size:.1f}")
    raise typer.Exit(1)


def _needed_gib(peak_bytes: int) -> float:
    return peak_bytes / _GIB * _FRAGMENTS + _CONTEXT_GIB


def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.", show_default=False)],
    target: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to write.", show_default=False)],
    checkpoint: Annotated[str, typer.Option(help="best, latest, or the path of a checkpoint.")] = "best",
) -> None:
    """Write the policy of a checkpoint as a Hugging Face model directory; an adapter is merged into its model.

    \b
    Examples:
      headrace export runs/mine exported
      headrace export runs/mine exported --checkpoint latest
    """
    run = RunDirectory(run_dir)
    recipe = load_recipe(run.config_path, of_a_run=True)
    found = find_checkpoint(recipe, run, checkpoint)
    from headrace.models.automodel.export import export_model  # noqa: PLC0415  (imports transformers: seconds)

    export_model(recipe, found.path / "policy", user_path(target, "DIR"))
    print_line(make_console(), f"{target}: the policy after step {found.step}")
    if recipe.policy.lora.rank is not None and recipe.policy.lora.base != "plain":
        print_line(
            make_console(),
            f"policy.lora.base={recipe.policy.lora.base}: the adapter is merged into the rounded matrices that it was "
            "trained on, in float32",
        )


def find_checkpoint(recipe: RecipeConfig, run: RunDirectory, wanted: str) -> CheckpointInfo:
    """Return a run's checkpoint: best, latest, or one by its path.

    Raises:
        ConfigError: there is none.
    """
    if wanted not in ("best", "latest"):
        found = read_checkpoint(Path(wanted))
        if found is None:
            raise ConfigError(
                f"--checkpoint {wanted}: no checkpoint.json there; give best, latest or its path"
            )
        return found
    manager = CheckpointManager.configured(run.checkpoints_dir, recipe.checkpointing, BEST_BY)
    found = manager.best() if wanted == "best" else manager.latest()
    if found is None:
        raise ConfigError(f"{run.path}: holds no checkpoint; train first, or give the path of one")
    return found

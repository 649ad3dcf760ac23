"""`headrace bench`: runs the benchmarks in this folder and compares their figures with their targets.

Each runs in a process of its own and leaves a report; `run.py` says what is in it.
"""

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from headrace.errors import ConfigError
from headrace.progress import print_line

Report = dict[str, Any]

FOLDER = Path(__file__).parent
_SHARED = ("run", "runner", "cells", "columns", "plot", "scale_model", "tables")
"""Files in the folder that are no benchmarks."""
_ON_RAY = ("ray", "transfer_queue")
_NEEDS = {
    "indexes": _ON_RAY,
    "scale": _ON_RAY,
    "store_mooncake": (*_ON_RAY, "mooncake"),
    "store_scale": _ON_RAY,
    "store_transfer_queue": _ON_RAY,
}
_NEED_GPU = ("codec_gpu", "scaling", "train")


def benchmark_names(folder: Path) -> list[str]:
    return sorted(file.stem for file in folder.glob("*.py") if file.stem not in _SHARED)


def choose(folder: Path, names: Sequence[str]) -> list[str]:
    """Return the benchmarks to run: those named, or all that can run here.

    Raises:
        ConfigError: a name that is no benchmark, or one whose packages or device are missing.
    """
    known = benchmark_names(folder)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"no benchmark {', '.join(unknown)}; there are: {', '.join(known)}")
    for name in names:
        if missing := _missing(name):
            raise ConfigError(f"benchmark {name} needs {missing}")
    if names:
        return list(names)
    absent = left_out(folder)
    return [name for name in known if name not in absent]


def left_out(folder: Path) -> dict[str, str]:
    needs = {name: _missing(name) for name in benchmark_names(folder)}
    return {name: need for name, need in needs.items() if need}


def _missing(name: str) -> str | None:
    """Return what a benchmark lacks here."""
    packages = [package for package in _NEEDS.get(name, ()) if importlib.util.find_spec(package) is None]
    if packages:
        return f"{', '.join(packages)}; pip install 'headrace[ray,mooncake]'"
    if name in _NEED_GPU:
        from torch.cuda import is_available  # noqa: PLC0415 - the command line is quick without torch

        return None if is_available() else "a CUDA device"
    return None


def split_targets(texts: Sequence[str], names: Sequence[str]) -> dict[str, list[str]]:
    """Return each benchmark's targets; `codec.pad.8192x256=1.5` is `pad.8192x256=1.5` for `codec`.

    Raises:
        ConfigError: a target that is not BENCHMARK.FIGURE=NUMBER of a benchmark that runs.
    """
    targets: dict[str, list[str]] = {name: [] for name in names}
    for text in texts:
        name, _, rest = text.partition(".")
        figure, _, value = rest.rpartition("=")
        if name not in targets or not figure or not _is_number(value):
            raise ConfigError(
                f"--target {text}: expected BENCHMARK.FIGURE=NUMBER, with one of {', '.join(names)}"
            )
        targets[name].append(rest)
    return targets


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def run_benchmark(folder: Path, name: str, *, quick: bool = False, targets: Sequence[str] = ()) -> Report:
    """Run one benchmark and return its report; one that ends without has no figures, and why in `notes.failed`."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "report.json"
        command = [sys.executable, str(folder / f"{name}.py"), "--out", str(out)]
        command += ["--quick"] if quick else []
        for target in targets:
            command += ["--target", target]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not out.is_file():
            last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
            return _failure(name, f"{last}. See all of it with: python {command[1]}")
        report: Report = json.loads(out.read_text())
    # The file for the report was a scratch file: what a reader repeats is this.
    shown = ["headrace", "bench", name, *(["--quick"] if quick else [])]
    report["where"]["command"] = " ".join([*shown, *(f"--target {name}.{target}" for target in targets)])
    return report


def _failure(name: str, why: str) -> Report:
    return {
        "benchmark": name,
        "ok": False,
        "figures": [],
        "measurements": {},
        "notes": {"failed": {name: why}},
    }


def save_report(report: Mapping[str, Any], folder: Path) -> Path:
    """Write a report into the folder's `results` and return its path; an older one stays if there are no figures.

    `runs` in the file counts, for each figure with a target, the saved runs on this kind of processor, and those that
    missed it.
    """
    path = folder / "results" / f"{report['benchmark']}.json"
    path.parent.mkdir(exist_ok=True)
    if report["figures"]:
        runs = _runs(report, json.loads(path.read_text())) if path.is_file() else {}
        path.write_text(json.dumps({**report, **({"runs": runs} if runs else {})}, indent=1) + "\n")
    return path


def _runs(report: Mapping[str, Any], older: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Return how many runs there are of each figure that both reports hold to a target, and how many missed."""
    if any(key not in older for key in ("figures", "where")):
        return {}
    if report["where"]["processor"] != older["where"]["processor"]:
        return {}
    counted: Mapping[str, Mapping[str, int]] = older.get("runs", {})
    before = {
        figure["name"]: counted.get(figure["name"], {"runs": 1, "missed": int(not figure["ok"])})
        for figure in older["figures"]
        if figure["target"] is not None
    }
    return {
        name: {"runs": before[name]["runs"] + 1, "missed": before[name]["missed"] + int(not figure["ok"])}
        for figure in report["figures"]
        if figure["target"] is not None and (name := figure["name"]) in before
    }


def missed(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the figures that miss their targets, as BENCHMARK.FIGURE, and what failed, with the reason."""
    found = []
    for report in reports:
        name = report["benchmark"]
        found += [f"{name}.{figure['name']}" for figure in report["figures"] if not figure["ok"]]
        found += [f"{name}: {text}" for text in _failures(report)]
    return found


def _failures(report: Mapping[str, Any]) -> list[str]:
    """Return what a benchmark could not measure: itself, or one of the ways that it compares."""
    failed: Mapping[str, str] = report.get("notes", {}).get("failed", {})
    return [f"{way} failed: {why}" for way, why in failed.items()]


def bench_table(reports: Sequence[Mapping[str, Any]]) -> Table:
    """Return the figures of all reports beside their targets; names and notes fold where the terminal is narrow."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column("figure", overflow="fold")
    for heading in ("measured", "target"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, min_width=6)
    for report in reports:
        table.add_row(Text(report["benchmark"], style="bold"))
        for figure in report["figures"]:
            note = f"\n{figure['note']}" if figure["note"] else ""
            name = Text(figure["name"]).append(note, style="dim")
            table.add_row(Padding(name, _INDENT), *_cells(figure))
        for text in _failures(report):
            table.add_row(Padding(Text(text), _INDENT), "", "", _MISSED)
    return table


_INDENT = (0, 0, 0, 2)
_MISSED = Text("missed", style="bold red")


def _cells(figure: Mapping[str, Any]) -> tuple[str, str, Text]:
    value, target = figure["figure"], figure["target"]
    measured = f"{_number(value, digits_that_tell(value, target, 3))} {figure['unit']}"
    if target is None:
        return measured, "", Text("")
    sign = "≥" if figure["relation"] == "at least" else "≤"
    verdict = Text("ok", style="green") if figure["ok"] else _MISSED
    if not figure.get("judged", True):
        verdict = Text("")
    return measured, f"{sign} {_number(target)}", verdict


def digits_that_tell(value: float, target: float | None, least: int) -> int:
    """Return how many digits a figure needs to lie on its own side of its target: 1.033 against 1.03 needs 4."""
    if target is not None:
        for digits in range(least, 8):
            rounded = float(f"{value:.{digits}g}")
            if (rounded > target) == (value > target) and (rounded < target) == (value < target):
                return digits
    return least


def _number(value: float, digits: int = 3) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Benchmarks to run; none: all.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the reports as JSON.")] = False,
    quick: Annotated[
        bool, typer.Option(help="Small inputs, few rounds, to see that all runs; held to --target only.")
    ] = False,
    save: Annotated[bool, typer.Option(help="Write the reports into the folder of results.")] = False,
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME.FIGURE=NUMBER", help="Hold a figure to another target.", show_default=False
        ),
    ] = None,
) -> None:
    """Measure this machine against the targets; exit code 1 if a figure misses its own. Needs a checkout.

    \b
    Examples:
      headrace bench
      headrace bench codec local_store --json
      headrace bench planner --target planner.seconds.1048576x1024=1
    """
    if quick and save:
        raise ConfigError(
            "--quick and --save: quick figures are no results to keep; leave out one of the two"
        )
    folder = FOLDER
    chosen = choose(folder, names or ())
    targets = split_targets(target or (), chosen)
    progress = Console(stderr=True)
    reports = []
    for name, need in ({} if names else left_out(folder)).items():
        print_line(progress, f"left out: {name} needs {need}")
    if quick:
        print_line(progress, "quick figures are not held to the targets, which are for larger inputs")
    for name in chosen:
        print_line(progress, f"running {name}")
        reports.append(run_benchmark(folder, name, quick=quick, targets=targets[name]))
        if save:
            save_report(reports[-1], folder)
    if as_json:
        typer.echo(json.dumps(reports, indent=1))
    else:
        Console().print(bench_table(reports))
    if misses := missed(reports):
        _fail(f"not met: {'; '.join(misses)}", code=1)


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"headrace: error: {' '.join(message.split())}", err=True)
    raise typer.Exit(code)


def main() -> None:
    """Run the command line, and end with one line if it is wrong."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(bench)
    command = typer.main.get_command(app)
    try:
        sys.exit(command(prog_name="headrace bench", standalone_mode=False))
    except ConfigError as error:
        message, code = str(error), 2
    except typer.BadParameter.__base__ as error:
        message, code = error.format_message().rstrip("."), 2
        message = f"{message[0].lower()}{message[1:]}; see headrace bench --help"
    except typer.Abort:
        message, code = "interrupted", 130
    typer.echo(f"headrace: error: {' '.join(message.split())}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()

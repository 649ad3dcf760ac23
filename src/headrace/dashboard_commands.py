"""`headrace dashboard`, the live page of runs, and `headrace report`, what they came to."""

import os
import secrets
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from headrace.dashboard.html_report import html_report
from headrace.dashboard.runs import find_runs
from headrace.errors import ConfigError
from headrace.progress import make_console, print_line
from headrace.training import write_results
from headrace.utils import atomic
from headrace.utils.addresses import is_of_the_host
from headrace.utils.run_directory import RunDirectory

TOKEN_VARIABLE = "HEADRACE_DASHBOARD_TOKEN"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_DEFAULT_RUNS = Path("runs")
_NOTHING_TO_COMPARE = "--compare needs the directories of other runs after it"


def dashboard(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUN ...]",
            help="Run directories, or folders that hold some. Without any: the folder runs, or the working directory.",
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: one that is free.")] = 8765,
    host: Annotated[
        str, typer.Option(help="Address to listen at; another than this machine's own needs a token.")
    ] = "127.0.0.1",
    token: Annotated[
        str | None,
        typer.Option(
            envvar=TOKEN_VARIABLE,
            help="What a browser has to bring. With another --host one is made up, unless you give it.",
        ),
    ] = None,
) -> None:
    """Show runs in a browser, finished ones and those that train; several are compared. Ctrl-C ends it.

    It reads the files of run directories and writes none; a run knows nothing of it.

    \\b
    Examples:
      headrace dashboard
      headrace dashboard runs/a runs/b --port 9000
      ssh -L 8765:localhost:8765 trainer headrace dashboard /data/runs
    """
    found = find_runs(runs or [_DEFAULT_RUNS if _DEFAULT_RUNS.is_dir() else Path()])
    console, server = make_console(), _server()
    if token is None and host not in _LOOPBACK:
        token = secrets.token_urlsafe(16)

    def tell(port: int) -> None:
        shown = f"[{host}]" if ":" in host else host
        query = "" if token is None else f"?token={token}"
        print_line(
            console, f"{len(found)} run{'s' if len(found) > 1 else ''} at http://{shown}:{port}/{query}"
        )

    try:
        server.serve(server.make_app(found, token=token), host, port, tell)
    except OSError as error:
        reason = error.strerror or os.strerror(error.errno or 0)
        remedy = (
            "an address of this machine as --host"
            if is_of_the_host(error)
            else "another --port, or 0 for a free one"
        )
        raise ConfigError(f"--host {host} --port {port}: {reason}; give {remedy}") from error


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="A run directory, and others.", show_default=False),
    ],
    compare: Annotated[
        bool, typer.Option("--compare", help="Set the first run beside those that follow.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where the page goes; else into the first run directory."),
    ] = None,
) -> None:
    """Write what a run came to: a page with its pictures in one file, plots as PNG, tables; works while it trains.

    With --compare, a page with several runs: what differs in their recipes and results.

    \b
    Examples:
      headrace report runs/demo_moe/seed0
      headrace report runs/a --compare runs/b runs/c --output comparison.html
    """
    first, console = RunDirectory(runs[0]), make_console()
    if compare != (len(runs) > 1):
        raise ConfigError(
            _NOTHING_TO_COMPARE
            if compare
            else f"{len(runs)} runs; set the first beside the others with --compare, or report each by itself"
        )
    if not compare:
        write_results(first, console)
    found = find_runs(runs)
    if compare and len(found) < 2:  # one run, given twice
        raise ConfigError(_NOTHING_TO_COMPARE)
    if output is None:
        first.require_mark()
    path = output or (first.compare_path if compare else first.html_path)
    atomic.write_text(path, html_report(found))
    print_line(console, f"page: {path}")


def _server() -> ModuleType:
    try:
        from headrace.dashboard import server  # noqa: PLC0415  (starlette and uvicorn are optional)
    except ModuleNotFoundError as error:
        raise ConfigError(f"no {error.name}; pip install 'headrace[dashboard]'") from error
    return server

"""`headrace store`: which stores runs have opened on a Ray cluster, and ending one that a run has left."""

from typing import Annotated

import typer
from rich import box
from rich.table import Table

from headrace.config import DataPlaneConfig
from headrace.progress import make_console
from headrace.run_tables import format_bytes

_Address = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT", help="The Ray cluster. Without it RAY_ADDRESS, or the cluster on this machine."
    ),
]

store_app = typer.Typer(no_args_is_help=True, help="Look at the stores of a Ray cluster, and drop one.")


@store_app.command("list")
def list_stores(ray_address: _Address = None) -> None:
    """List the stores that are open, what they hold, and whether the process that opened them is alive.

    \b
    Example:
      headrace store list --ray-address 10.0.0.1:6379
    """
    from headrace.data_plane import factory  # noqa: PLC0415  (imports torch: a second)

    by_backend = factory.transfer_queue().list_stores(DataPlaneConfig(ray_address=ray_address))
    stores = [(backend, store) for backend, found in by_backend.items() for store in found]
    if not stores:
        typer.echo("no store is open")
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("store", "backend", "rows", "bytes", "opened by", ""):
        table.add_column(title, justify="right" if title in ("rows", "bytes") else "left")
    for backend, store in stores:
        state = "alive" if store.is_alive else "gone"
        table.add_row(store.name, backend, str(store.rows), format_bytes(store.nbytes), store.holder, state)
    make_console().print(table)


@store_app.command("drop")
def drop_store(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Its data_plane.store_name.", show_default=False)
    ],
    force: Annotated[
        bool, typer.Option("--force", help="Also if the process that opened it is alive; its run then fails.")
    ] = False,
    ray_address: _Address = None,
) -> None:
    """End a store whose process is gone, and free what it holds.

    \b
    Example:
      headrace store drop headrace
    """
    from headrace.data_plane import factory  # noqa: PLC0415  (imports torch: a second)

    factory.transfer_queue().drop_store(DataPlaneConfig(ray_address=ray_address), name, force)
    typer.echo(f"store '{name}' is dropped")

"""Where `python -m sglang.launch_server` finds the server of tests/sglang_server."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SERVER = Path(__file__).parent / "sglang_server"


@contextmanager
def sglang_on_path() -> Iterator[None]:
    """Let processes that are started meanwhile import it, and headrace from where it is imported here."""
    import headrace

    before = os.environ.get("PYTHONPATH")
    ours = [str(SERVER), str(Path(headrace.__file__).parents[1])]
    os.environ["PYTHONPATH"] = os.pathsep.join([*ours, *([before] if before else [])])
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before

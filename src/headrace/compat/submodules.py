"""Modules below a translated package, as attributes: `from nemo_rl.data_plane import codec`."""

import importlib
from types import ModuleType


def submodule(package: str, name: str) -> ModuleType:
    """Return the module `name` of a package, by its path under `nemo_rl`.

    Raises:
        AttributeError: there is none.
    """
    path = f"nemo_rl.{package}.{name}"
    try:
        if not name.startswith("__"):
            return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not path.startswith(error.name):
            raise
    raise AttributeError(f"module 'nemo_rl.{package}' has no attribute '{name}'")

"""Paths as a person writes them."""

import os
from contextlib import suppress
from pathlib import Path

from headrace.errors import ConfigError
from headrace.utils.section import shortened

_LONGEST_SHOWN = 100


def user_path(text: str | Path, key: str) -> Path:
    """Return the path that `text` names, `~` and `~user` resolved; `key` is the recipe's key that holds it.

    Nothing has to be there, but whether there is something can be told.
    """
    try:
        path = Path(text).expanduser()
        with suppress(FileNotFoundError, NotADirectoryError):
            os.stat(path)
        return path
    except OSError as error:
        raise ConfigError(
            f"{key}={shortened(str(text), _LONGEST_SHOWN)}: {error.strerror}; give another path"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{key}={str(text)!r}: {error}; give another path") from error
    except RuntimeError as error:
        who = str(text).partition("/")[0]
        raise ConfigError(
            f"{key}={text}: no home directory is known for '{who}'; write the path in full"
        ) from error

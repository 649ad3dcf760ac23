"""Paths as a person writes them."""

from pathlib import Path

from headrace.errors import ConfigError


def user_path(text: str | Path, key: str) -> Path:
    """Return the path that `text` names, `~` and `~user` resolved; `key` is the recipe's key that holds it.

    Raises:
        ConfigError: a user that is not known here, a home directory that is not known, or a null character.
    """
    if "\0" in str(text):
        raise ConfigError(f"{key}={str(text)!r}: a path cannot hold a null character; remove it")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        who = str(text).partition("/")[0]
        raise ConfigError(
            f"{key}={text}: no home directory is known for '{who}'; write the path in full"
        ) from error

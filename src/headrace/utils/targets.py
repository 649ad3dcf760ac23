"""Code of a user's own, named in a recipe as `package.module:name`.

Modules are found beside the recipe, in the working directory, and among what is installed. An object that no other
process can import (a function of a notebook) has a name of this process alone, `local:NAME`.
"""

import difflib
import importlib
import inspect
import itertools
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from headrace.errors import ConfigError, HeadraceError

LOCAL = "local:"
TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_SHOWN = 8
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_local: dict[str, Any] = {}


def extend_import_path(folders: Sequence[str]) -> None:
    """Let modules in `folders` and in the working directory be imported, after what is installed.

    Processes that are started later get the same path.
    """
    for folder in (*folders, os.getcwd()):
        if folder not in sys.path:
            sys.path.append(folder)


def load_target(text: str, key: str) -> Any:
    """Return the object that `text` names; `key` is the recipe's key that holds it.

    Raises:
        ConfigError: not of the form `module:name`, no such module or name, or a module that fails when it is imported.
    """
    if text.startswith(LOCAL):
        return _local_object(text, key)
    if not TARGET.fullmatch(text):
        raise ConfigError(f"{key}={text}: expected module:name, for example my_code:{key.split('.')[-1]}")
    module_name, _, names = text.partition(":")
    found = _import(module_name, f"{key}={text}")
    for name in names.split("."):
        if not hasattr(found, name):
            raise ConfigError(f"{key}={text}: {_lacks(found, name)}")
        found = getattr(found, name)
    return found


def load_callable(text: str, key: str) -> Callable[..., Any]:
    """Return the function, class or other callable object that `text` names; raises as `load_target`."""
    found = load_target(text, key)
    if not callable(found):
        raise ConfigError(f"{key}={text} is a {type(found).__name__}; expected a function or a class")
    return found  # type: ignore[no-any-return]


def load_optional(module: str, refusal: str) -> Any:
    """Return a module that may not be installed; the ConfigError then is `refusal`, with why for its `{error}`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(refusal.format(error=error)) from error


def name_of(value: Any, key: str) -> str:
    """Return the text that names a function, class or object: of any process where there is one, else of this one."""
    if isinstance(value, str):
        load_target(value, key)
        return value
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module and name and module != "__main__" and "<" not in name:
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is value:
            return f"{module}:{name}"
    shown = re.sub(r"\W", "_", str(name or type(value).__name__))
    names = (f"{LOCAL}{shown}{f'_{number}' if number > 1 else ''}" for number in itertools.count(1))
    text = next(name for name in names if _local.get(name, value) is value)
    _local[text] = value
    return text


def is_local(text: str) -> bool:
    return text.startswith(LOCAL)


def check_parameters(
    function: Callable[..., Any], allowed: Collection[str], who: str, *, example: str
) -> set[str] | None:
    """Return which of the `allowed` names a function takes, to be given by name; None: all, by `**kwargs`.

    Raises:
        ConfigError: a parameter of another name without a default, or one that takes no names.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return set(allowed)  # of a builtin, which says nothing of its parameters
    taken = {p.name for p in parameters if p.name in allowed and p.kind is not p.POSITIONAL_ONLY}
    for p in parameters:
        required = p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        if required and p.name not in taken:
            raise ConfigError(
                f"{who} has a parameter '{p.name}', which nothing fills; write it as {example} (it may leave out some)"
            )
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters) else taken


@contextmanager
def user_code(who: str) -> Iterator[None]:
    """Turn what code of a user's own raises in the block into a ConfigError that names it."""
    try:
        yield
    except HeadraceError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{who} raised {failure(error)}; mend it") from error


def failure(error: BaseException) -> str:
    """Return what an error says in one line: its type, its text, and the line of user code that raised it."""
    text = " ".join(str(error).split())[:200]
    place, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "site-packages" not in file and not file.startswith((_PACKAGE, "<")):
            place = f" ({os.path.basename(file)}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return f"{type(error).__name__}{f': {text}' if text else ''}{place}"


def _local_object(text: str, key: str) -> Any:
    if text not in _local:
        raise ConfigError(
            f"{key}={text}: an object of another process, which cannot be imported; put it into a module, and name it "
            "as module:name"
        )
    return _local[text]


def _import(name: str, who: str) -> Any:
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"{who}: there is no module '{error.name}' in {os.getcwd()}, beside the recipe, or installed; check "
                "the name, or add its folder to code_path"
            ) from error
        raise ConfigError(
            f"{who}: {name} imports '{error.name}', which is not installed; install it, or remove the import"
        ) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{who}: importing {name} fails: {failure(error)}; mend it") from error


def _lacks(found: Any, name: str) -> str:
    names = [n for n in vars(found) if not n.startswith("_")] if hasattr(found, "__dict__") else []
    close = difflib.get_close_matches(name, names, n=1)
    where = getattr(found, "__file__", None) or getattr(found, "__name__", repr(found))
    hint = f"did you mean '{close[0]}'?" if close else f"it has {', '.join(names[:_SHOWN]) or 'nothing'}"
    return f"there is no '{name}' in {where}; {hint}"

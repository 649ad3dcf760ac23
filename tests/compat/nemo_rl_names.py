"""The list of names in nemo_rl_names.txt, read; and which of them tests have called."""

import ast
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

T = TypeVar("T", bound=Callable[..., Any])


@dataclass(frozen=True)
class Name:
    """One line of the list; `path` is the full name below `nemo_rl`, `parameters` (name, default or None) in order."""

    module: str
    name: str
    kind: Literal["constant", "class", "function", "method"]
    parameters: tuple[tuple[str, str | None], ...] = ()
    keyword_only: frozenset[str] = frozenset()
    fields: tuple[str, ...] = ()
    is_async: bool = False

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def owner(self) -> str:
        return self.name.partition(".")[0]


@cache
def names() -> tuple[Name, ...]:
    return tuple(_read((Path(__file__).parent / "nemo_rl_names.txt").read_text()))


def found(name: Name) -> Any:
    """Return the object that the name stands for, through `nemo_rl`."""
    target: Any = importlib.import_module(f"nemo_rl.{name.module}")
    for part in name.name.split("."):
        target = getattr(target, part)
    return target


CALLED: set[str] = set()


def calls(module: str, *called: str) -> Callable[[T], T]:
    """Note that the test below calls these names of a module; a class stands for its constructor."""
    CALLED.update(f"{module}.{name}" for name in called)
    return lambda test: test


def _read(text: str) -> Iterator[Name]:
    module = ""
    for line in text.splitlines():
        if line.startswith("["):
            module = line.strip("[]")
        elif line.startswith("constant "):
            yield Name(module, line.split()[1], "constant")
        elif line.startswith("class "):
            name, _, fields = line.removeprefix("class ").partition(": ")
            yield Name(module, name, "class", fields=tuple(f for f in fields.split(", ") if f))
        elif line and not line.startswith("#"):
            yield _callable(module, line.removeprefix("async "), line.startswith("async "))


def _callable(module: str, text: str, is_async: bool) -> Name:
    name, _, signature = text.partition("(")
    parsed = ast.parse(f"def f({signature.rstrip(')')}): ...").body[0]
    assert isinstance(parsed, ast.FunctionDef)
    args = parsed.args
    positional = [a.arg for a in args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + [ast.unparse(d) for d in args.defaults]
    keywords = [
        (a.arg, None if d is None else ast.unparse(d)) for a, d in zip(args.kwonlyargs, args.kw_defaults)
    ]
    return Name(
        module,
        name,
        "method" if "." in name else "function",
        (*zip(positional, defaults), *keywords),
        frozenset(a.arg for a in args.kwonlyargs),
        is_async=is_async,
    )

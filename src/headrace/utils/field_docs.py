"""What the docstring below a field of a recipe's section says; pydantic can read it too, at a second per start."""

import ast
import inspect
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel


def field_docs(section: type[BaseModel]) -> dict[str, str]:
    """Return the fields of a section that a docstring follows, with it in one line; inherited ones too."""
    found: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            found |= _docs_of(base)
    return found


def _docs_of(section: type[BaseModel]) -> Iterator[tuple[str, str]]:
    (class_,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(class_, ast.ClassDef)
    for node, after in zip(class_.body, class_.body[1:]):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            yield node.target.id, " ".join(str(after.value.value).split())


def sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the sections that a field's type holds: itself, one of several kinds, or the items of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from sections_in(inner)

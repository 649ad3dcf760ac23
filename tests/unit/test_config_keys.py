"""Every key of a recipe stands with its meaning beside it."""

import ast
import inspect
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel

from headrace.config import RecipeConfig


def sections(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield every section below a model, each kind of environment too, by the dotted key that it stands under."""
    yield prefix, model
    for name, field in model.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from sections(kind, f"{prefix}{name}.")


def documented(model: type[BaseModel]) -> set[str]:
    """Return the fields that a docstring follows."""
    (class_,) = ast.parse(inspect.getsource(model)).body
    assert isinstance(class_, ast.ClassDef)
    found = set()
    for node, after in zip(class_.body, class_.body[1:]):
        says = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and after.value.value
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and says:
            found.add(node.target.id)
    return found


def is_section(annotation: Any) -> bool:
    kinds = (annotation, *get_args(annotation))
    return any(isinstance(kind, type) and issubclass(kind, BaseModel) for kind in kinds)


def test_every_key_has_a_docstring_and_so_has_every_section() -> None:
    found = list(sections(RecipeConfig))
    bare = []
    for prefix, model in found:
        said = documented(model)
        fields = model.model_fields.items()
        bare += [f"{prefix}{key}" for key, f in fields if not is_section(f.annotation) and key not in said]
    assert bare == []
    assert [model.__name__ for _, model in found if not model.__dict__.get("__doc__")] == []
    assert len(found) > 20

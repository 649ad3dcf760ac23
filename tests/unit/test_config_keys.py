"""Every key of a recipe stands with its meaning beside it."""

from collections.abc import Iterator

from pydantic import BaseModel

from headrace.config import RecipeConfig
from headrace.utils.field_docs import field_docs, sections_in


def sections(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield every section below a model, each kind of environment too, by the dotted key that it stands under."""
    yield prefix, model
    for name, field in model.model_fields.items():
        for kind in sections_in(field.annotation):
            yield from sections(kind, f"{prefix}{name}.")


def test_every_key_has_a_docstring_and_so_has_every_section() -> None:
    found = list(sections(RecipeConfig))
    bare = []
    for prefix, model in found:
        said = field_docs(model)
        fields = model.model_fields.items()
        bare += [
            f"{prefix}{key}" for key, f in fields if not list(sections_in(f.annotation)) and key not in said
        ]
    assert bare == []
    assert [model.__name__ for _, model in found if not model.__dict__.get("__doc__")] == []
    assert len(found) > 20

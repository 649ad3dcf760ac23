"""What can stand in a recipe, for editors (JSON Schema) and for people (docs/reference_keys.md)."""

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from headrace.config import RecipeConfig
from headrace.metric_names import METRICS
from headrace.utils.field_docs import field_docs, sections_in
from headrace.utils.section import written

_LONGEST_VALUE = 60
_KEYS_HEAD = """\
# Recipe keys

Made by `headrace config keys`; the meanings stand in `config.py` and the files that it imports. A key without a
default has to be set. `NAME` is a name of your own, `[]` an item of a list.
"""
_METRICS_HEAD = """\
# Metrics

Made by `headrace config metrics`. A run has those that its recipe measures. `*` stands for a name.

| metric | meaning |
| --- | --- |
"""


def recipe_schema() -> dict[str, Any]:
    """Return the JSON Schema of a recipe file; no key is required, since `defaults` may set it."""
    schema = RecipeConfig.model_json_schema()
    sections = {section.__name__: section for _, section in _sections(RecipeConfig)}
    for name, part in {**schema["$defs"], "RecipeConfig": schema}.items():
        docs = field_docs(sections[name])
        part.pop("required", None)
        for key, values in part["properties"].items():
            if key in docs:
                values["description"] = docs[key]
    files = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    about = "Recipes to start from, relative to this file or by the name of one that ships."
    schema["properties"]["defaults"] = {**files, "description": about}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "headrace recipe"}


def keys_reference() -> str:
    """Return the Markdown of all keys, a table for each section."""
    parts = [_KEYS_HEAD]
    for prefix, section in _sections(RecipeConfig):
        docs = field_docs(section)
        rows = [_row(f"{prefix}{key}", field, docs[key]) for key, field in _values(section)]
        if rows:
            title = f"`{prefix.rstrip('.')}`{_kind(section)}" if prefix else "The recipe itself"
            head = f"## {title}\n\n{' '.join((section.__doc__ or '').split())}\n\n"
            parts.append(head + "| key | default | meaning |\n| --- | --- | --- |\n" + "".join(rows))
    return "\n".join(parts)


def metrics_reference() -> str:
    return _METRICS_HEAD + "".join(f"| `{name}` | {about} |\n" for name, about in METRICS.items())


def _kind(section: type[BaseModel]) -> str:
    """Return which of several sections of one name it is, as its `kind` says."""
    kind = section.model_fields.get("kind")
    names = () if kind is None else get_args(kind.annotation)
    return f" of kind `{names[0]}`" if len(names) == 1 else ""


def _row(key: str, field: FieldInfo, meaning: str) -> str:
    cells = (f"`{key}`", _default(field), meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is PydanticUndefined:
        return ""
    return f"`{written(TypeAdapter(Any).dump_python(default, mode='json'), _LONGEST_VALUE)}`"


def _values(section: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """Yield the keys that hold a value of their own; those of a section inside have a table."""
    for key, field in section.model_fields.items():
        if key in field_docs(section) or not list(sections_in(field.annotation)):
            yield key, field


def _sections(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    yield prefix, section
    for key, field in section.model_fields.items():
        for inner in sections_in(field.annotation):
            text = str(field.annotation)
            step = ".NAME" if text.startswith("dict[") else "[]" if "tuple[" in text else ""
            yield from _sections(inner, f"{prefix}{key}{step}.")

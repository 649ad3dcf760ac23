"""pydantic's errors as one line for the person who wrote the values."""

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from headrace.errors import ConfigError
from headrace.utils.renamed import RECIPE_KEYS
from headrace.utils.section import plain, shortened

_LONGEST_VALUE = 57
_MOST_OTHERS = 5
_YAML_WORDS = {None: "null", True: "true", False: "false"}
Section = TypeVar("Section", bound=BaseModel)


def validated(section: type[Section], value: Section | Mapping[str, Any], name: str) -> Section:
    """Return a section, made of a mapping where it is none yet; `name` stands in the message of the ConfigError."""
    if isinstance(value, section):
        return value
    try:
        return section.model_validate(plain(value))
    except ValidationError as error:
        raise ConfigError(f"{name}: {describe(error, section)[1]}") from error


def describe(error: ValidationError, model: type[BaseModel]) -> tuple[str, str]:
    """Return the first fault's dotted key (empty: of the whole model), and a line that tells of it and the others.

    An unknown key comes before a missing one, since the one is often the other mistyped.
    """
    faults = sorted(error.errors(), key=lambda fault: fault["type"] != "extra_forbidden")
    key, *others = [".".join(_locate(fault["loc"], model)[0]) for fault in faults]
    text = _describe_one(faults[0], model)
    if others:
        named = list(dict.fromkeys(others))
        shown = ", ".join(named[:_MOST_OTHERS]) + (", ..." if len(named) > _MOST_OTHERS else "")
        text += f" (and {len(others)} more: {shown})"
    return key, text


def kinds_of_sections(model: type[BaseModel]) -> list[tuple[str, str]]:
    """Return the sections that are of one of several kinds, each with the key that says of which: env, kind."""
    return [(k, f.discriminator) for k, f in _all_fields(model) if isinstance(f.discriminator, str)]


def text_kind(model: type[BaseModel], key: str) -> Literal["text", "optional"] | None:
    """Return whether a dotted key takes text, or text or nothing; None for any other type and an unknown key.

    Where sections of several kinds have the key, one that takes text is enough.
    """
    for field in [field for name, field in _all_fields(model) if name == key]:
        is_union = get_origin(field.annotation) in (Union, UnionType)
        choices = get_args(field.annotation) if is_union else (field.annotation,)
        words = [word for choice in choices if get_origin(choice) is Literal for word in get_args(choice)]
        rest = {choice for choice in choices if get_origin(choice) is not Literal}
        if rest <= {str, type(None)} and all(isinstance(word, str) for word in words):
            return "optional" if type(None) in rest else "text"
    return None


def default_values(model: type[BaseModel]) -> dict[str, Any]:
    """Return the dotted keys that have a default of one value (no section), with it as JSON has it."""
    fields = [(k, f) for k, f in _all_fields(model) if not f.is_required() and _as_model(f) is None]
    as_json = TypeAdapter(Any)
    return {k: as_json.dump_python(f.get_default(call_default_factory=True), mode="json") for k, f in fields}


def _describe_one(fault: Any, model: type[BaseModel]) -> str:
    parts, section, field = _locate(fault["loc"], model)
    key = ".".join(parts)
    kind, value, context = fault["type"], _short(fault["input"]), fault.get("ctx", {})
    if kind == "invalid_key" or parts[-1:] == ["[key]"]:
        return f"unknown key '{key.removesuffix('.[key]')}'; expected a name"
    if kind == "extra_forbidden":
        new = RECIPE_KEYS.get(key)
        return f"unknown key '{key}'" + (
            f"; it is called '{new}'" if new else _suggestion(parts, section, model)
        )
    if kind == "missing" and isinstance(fault["loc"][-1], int):
        return f"{'.'.join(parts[:-1])}={value}: too few items, there is none at {parts[-1]}"
    if kind == "missing":
        return f"missing key '{key}'; set it in the recipe or with {key}=..."
    if kind == "value_error":
        text = str(context["error"])
        inner, begins = field and _as_model(field), re.match(r"\w+", text)
        names_a_key = inner is not None and begins is not None and begins[0] in inner.model_fields
        return (f"{key}.{text}" if names_a_key else f"{key}: {text}") if key else text
    if kind == "union_tag_not_found":
        tag = context["discriminator"].strip("'")
        return f"missing key '{key}.{tag}'; expected one of {', '.join(_members(field))}"
    if kind == "union_tag_invalid":
        tag = context["discriminator"].strip("'")
        given = _short(fault["input"][tag]) if isinstance(fault["input"], Mapping) else f"'{context['tag']}'"
        return f"{key}.{tag}={given}: expected one of {context['expected_tags']}"
    if kind in ("model_type", "model_attributes_type"):
        return f"{key or 'recipe'}={value}: expected a section, that is a mapping of keys"
    if kind in ("tuple_type", "list_type"):
        default = field.default if field is not None else None
        example = f", for example {list(default)}" if isinstance(default, tuple) and default else ""
        return f"{key}={value}: expected a list{example}"
    if kind == "dict_type":
        return f"{key}={value}: expected a mapping of keys to values"
    message = fault["msg"].replace("Input should be ", "expected ")
    quoted = kind in ("int_type", "float_type") and _is_finite_number(fault["input"])
    hint = "; it is text: leave out the quotes" if quoted else ""
    return f"{key}={value}: {message[0].lower()}{message[1:]}{hint}"


def _is_finite_number(value: object) -> bool:
    try:
        return isinstance(value, str) and value.isascii() and math.isfinite(float(value))
    except ValueError:
        return False


def _short(value: object) -> str:
    text = _YAML_WORDS.get(value, repr(value)) if value is None or isinstance(value, bool) else repr(value)
    return shortened(text, _LONGEST_VALUE)


def _locate(
    location: Sequence[int | str], model: type[BaseModel]
) -> tuple[list[str], type[BaseModel] | None, FieldInfo | None]:
    """Return the key's parts, the section that its last part stands in, and its field (None: no such).

    pydantic's location also names the chosen member of a tagged union, which is no part of the key.
    """
    parts: list[str] = []
    section: type[BaseModel] | None = model
    field: FieldInfo | None = None
    here: Any = model
    for step in location:
        if isinstance(here, FieldInfo) and (members := _members(here)):
            here = members[str(step)]
            continue
        section = _as_model(here)
        parts.append(str(step))
        here = field = section.model_fields.get(str(step)) if section is not None else _entry(here)
    return parts, section, field


def _entry(here: Any) -> FieldInfo | None:
    """Return what stands under each name of a mapping, or at each place of a list."""
    kind = get_origin(here.annotation) if isinstance(here, FieldInfo) else None
    return (
        FieldInfo.from_annotation(get_args(here.annotation)[kind is dict]) if kind in (dict, tuple) else None
    )


def _as_model(here: Any) -> type[BaseModel] | None:
    kind = here.annotation if isinstance(here, FieldInfo) else here
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _members(field: FieldInfo | None) -> dict[str, type[BaseModel]]:
    if field is None or not isinstance(field.discriminator, str):
        return {}
    members = get_args(field.annotation)
    return {member.model_fields[field.discriminator].default: member for member in members}


def _suggestion(parts: Sequence[str], section: type[BaseModel] | None, root: type[BaseModel]) -> str:
    """Return the key that was probably meant: a similar one in this section, or one of this name elsewhere."""
    if "." in parts[-1]:
        path = ".".join(parts).split(".")
        return f"; keys nest in YAML: {': {'.join(path)}: ...{'}' * (len(path) - 1)}"
    here = list(section.model_fields) if section is not None else []
    close = difflib.get_close_matches(parts[-1].lower(), here, n=1)
    if close:
        return f"; did you mean '{'.'.join([*parts[:-1], close[0]])}'?"
    same = [repr(k) for k, _ in _all_fields(root) if k.split(".")[-1] == parts[-1] and k != ".".join(parts)]
    if same:
        return f"; did you mean {' or '.join(same)}?"
    return f"; known keys here: {', '.join(here)}" if here else ""


def _all_fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every dotted key of a model with its field; one of several kinds of a section may repeat a key."""
    for name, field in model.model_fields.items():
        yield prefix + name, field
        for inner in (_as_model(field), *_members(field).values()):
            if inner is not None:
                yield from _all_fields(inner, f"{prefix}{name}.")

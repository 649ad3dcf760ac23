"""Recipes on disk: YAML with inheritance (`defaults: other.yaml`) and dotted overrides (`policy.workers=2`).

Every mistake becomes a ConfigError of one line that names the key, the value and the remedy.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf import errors as faults
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import MarkedYAMLError, YAMLError

from headrace.config import RecipeConfig
from headrace.errors import ConfigError
from headrace.utils.arguments import is_utf8
from headrace.utils.config_errors import describe, kinds_of_sections, text_kind
from headrace.utils.misread import misread_number
from headrace.utils.renamed import with_new_keys
from headrace.utils.section import shortened
from headrace.utils.shipped import FOLDER, find_recipe, shipped_hint

_OPEN = "???"
_LONGEST_OVERRIDE = 100
_YAML_MARKS = "'\"|>!&*"
_NO_MAPPING = "expected a mapping of sections at the top level; got a list or a scalar"
_TOO_LONG = "a whole number of thousands of digits, which is more than can be read"
_NO_TEXT = "no text in UTF-8, which the files of a run are in; use other characters"
_LONGEST_KEY = 60
_SETTINGS = {"env.task": "env.config", "env.target": "env.args", "env.id": "env.args"}
"""Keys that name what runs, each with the key of its own settings, which mean nothing to another."""
_INTERPOLATION = re.compile(r"(\\*)\$\{")


def load_recipe(path: str | Path, overrides: Sequence[str] = (), *, of_a_run: bool = False) -> RecipeConfig:
    """Read a recipe, apply `key=value` overrides in order, and validate.

    `path` is a file, or the name of a recipe that ships. `defaults` names recipes to start from, relative to the file
    or by such a name; later ones win, and the file itself wins over all. Sections merge key by key, lists are
    replaced. Where the key that says of which kind a section is changes (`env.kind`), nothing of the section is
    inherited; where what it runs changes (`env.task`), the settings of that are not (`env.config`).

    An override's value is YAML, but for a key whose type is text: that takes what was typed, `#`, quotes and spaces
    included (and `null` as no value, where the key may have none).

    With `of_a_run`, the file is a run directory's config.yaml, and may have keys of an earlier version.

    Raises:
        ConfigError: a missing or malformed file, an unknown key, a wrong type, or sections that contradict; the
            message begins with the override that brought it about, if one did, else with the file.
    """
    path = find_recipe(path)
    merged, folders = _merged(path)
    if of_a_run:
        merged = OmegaConf.create(with_new_keys(_plain(merged)))
    parsed = [_parse_override(text) for text in overrides]
    if parsed:
        changes = [override.values for override in parsed]
        merged = _merge(_without_other_kinds(merged, _merge(*changes)), *changes)
    if (left_open := _left_open(_plain(merged))) is not None:
        raise ConfigError(f"{path}: {left_open} is left open (???); set it with {left_open}=...")
    try:
        values = OmegaConf.to_container(merged, resolve=True)
        if isinstance(values, dict):
            values.setdefault("code_path", folders)
            if not all(is_utf8(str(folder)) for folder in values["code_path"] or ()):
                raise ConfigError(f"{path}: code_path={values['code_path']}: {_NO_TEXT}")
        return RecipeConfig.model_validate(values)
    except OmegaConfBaseException as error:
        culprit = _culprit(parsed, str(getattr(error, "full_key", "")), "")
        raise ConfigError(f"{culprit or path}: {_in_one_line(error)}") from error
    except ValidationError as error:
        key, text = describe(error, RecipeConfig)
        culprit = _culprit(parsed, key, text)
        raise ConfigError(f"{culprit or path}: {text}") from error


def merged_values(path: str | Path) -> dict[str, Any]:
    """Return what a recipe and its defaults say, as they write it and without what they leave to defaults of keys."""
    return _plain(_merged(find_recipe(path))[0], resolve=True)


def _merged(path: Path) -> tuple[DictConfig, list[str]]:
    """Return a recipe merged with its defaults, and the folders of their files, its own first."""
    merged, folders = OmegaConf.create({}), [path.parent]
    for file, part in _parts(path, children=()):
        merged = _merge(_without_other_kinds(merged, part), part)
        if file.parent != FOLDER:
            folders.insert(1, file.parent)
    return merged, list(dict.fromkeys(str(folder.absolute()) for folder in folders))


def _left_open(value: Any, key: str = "") -> str | None:
    """Return the first key that is left open; in a list, the text `???` is one like any other."""
    if isinstance(value, dict):
        found = (_left_open(inner, f"{key}.{name}" if key else str(name)) for name, inner in value.items())
    elif isinstance(value, list):
        found = (_left_open(inner, f"{key}[{i}]") for i, inner in enumerate(value) if inner != _OPEN)
    else:
        return key if value == _OPEN else None
    return next((inner for inner in found if inner is not None), None)


def dump_recipe(recipe: RecipeConfig) -> str:
    """Return the resolved recipe as YAML that `load_recipe` reads back to an equal object."""
    return dump_values(recipe.model_dump(mode="json"))


def dump_values(values: Mapping[str, Any]) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(values)))


def read_resolved(text: str) -> dict[str, Any]:
    return _plain(OmegaConf.create(text), resolve=True)


def _plain(config: DictConfig | ListConfig, resolve: bool = False) -> dict[str, Any]:
    values = OmegaConf.to_container(config, resolve=resolve)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return the dotted keys in which two recipes differ, sorted, each with both values (None: not there)."""
    before, after = dict(leaves(dict(old))), dict(leaves(dict(new)))
    pairs = [(key, before.get(key), after.get(key)) for key in sorted(before.keys() | after.keys())]
    return [(key, one, other) for key, one, other in pairs if one != other]


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield prefix, value
        return
    for key, inner in value.items():
        yield from leaves(inner, f"{prefix}.{key}" if prefix else str(key))


def _escaped(value: Any) -> Any:
    """Protect text that looks like an interpolation from being resolved when it is read back."""
    if isinstance(value, Mapping):
        return {key: _escaped(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_escaped(inner) for inner in value]
    if isinstance(value, str):
        return _INTERPOLATION.sub(lambda match: match[1] * 2 + r"\${", value)
    return value


def key_origins(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, str]:
    """Return, of each dotted key that a recipe sets, what set it last: the name of a file, or `override`."""
    layers = [(file.name, _plain(part)) for file, part in _parts(find_recipe(path), children=())]
    if overrides:
        layers.append(("override", _plain(_merge(*(_parse_override(text).values for text in overrides)))))
    found: dict[str, str] = {}
    seen: dict[str, Any] = {}
    for name, values in layers:
        set_here = dict(leaves(values))
        for decides, dropped in _not_inherited():
            if decides in set_here and set_here[decides] != seen.setdefault(decides, set_here[decides]):
                seen[decides] = set_here[decides]
                found = {k: origin for k, origin in found.items() if not f"{k}.".startswith(f"{dropped}.")}
        found |= dict.fromkeys(set_here, name)
    return found


def _parts(path: Path, children: tuple[Path, ...]) -> Iterator[tuple[Path, DictConfig]]:
    """Yield the files of a recipe, each after its defaults; `children` are the files whose `defaults` led here."""
    chain = (*children, path)
    if path.resolve() in (child.resolve() for child in children):
        circle = " -> ".join(p.name for p in chain)
        raise ConfigError(f"{path}: defaults form a circle ({circle}); remove one `defaults:` line")
    loaded = _read_yaml(path, children)
    try:
        defaults = loaded.pop("defaults", None)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {_in_one_line(error)}") from error
    names = [] if defaults is None else list(defaults) if isinstance(defaults, ListConfig) else [defaults]
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{path}: defaults={defaults}: expected a file name or a list of them")
    for name in names:
        beside = path.parent / name
        yield from _parts(beside if beside.is_file() else find_recipe(name), chain)
    yield path, loaded


def _read_yaml(path: Path, children: tuple[Path, ...]) -> DictConfig:
    try:
        loaded = OmegaConf.load(path)
        misread = misread_number(path.read_text(encoding="utf-8"))
    except OSError as error:
        if error.errno is None:  # OmegaConf's, of a file that holds one number or truth value
            raise ConfigError(f"{path}: {_NO_MAPPING}") from error
        named_by = f", named by `defaults` in {children[-1]}" if children else ""
        hint = shipped_hint(path) or _similar_file(path) or "check the path"
        raise ConfigError(
            f"{path}: cannot read the recipe ({error.strerror or error}){named_by}; {hint}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file; expected YAML in UTF-8") from error
    except (YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: not valid YAML: {_in_one_line(error)}{_tab_hint(path, error)}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not valid YAML: {_TOO_LONG}") from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path}: {_NO_MAPPING}")
    if misread is not None:
        raise ConfigError(f"{path}: {misread}")
    return loaded


def _tab_hint(path: Path, error: Exception) -> str:
    """Return what to do if a tab stands where YAML's parser stopped; its message does not name it."""
    if not isinstance(error, MarkedYAMLError) or error.problem_mark is None:
        return ""
    mark, lines = error.problem_mark, path.read_text(encoding="utf-8").split("\n")
    before = "".join(lines[mark.line : mark.line + 1])[: mark.column + 1]
    return "; there is a tab: indent with spaces" if "\t" in before else ""


def _similar_file(path: Path) -> str | None:
    names = [p.name for p in path.parent.glob("*") if p.is_file() and p != path]
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean {path.with_name(close[0])}?" if close else None


@dataclass(frozen=True)
class _Override:
    key: str
    text: str
    values: DictConfig

    def __str__(self) -> str:
        return f"override '{shortened(self.text, _LONGEST_OVERRIDE)}'"


def _parse_override(text: str) -> _Override:
    key, sign, value = text.partition("=")
    key = key.strip()
    if not is_utf8(text):
        raise ConfigError(f"override '{text}': {_NO_TEXT}")
    if not sign or not all(key.split(".")):
        raise ConfigError(f"override '{text}': expected key=value, for example policy.optimizer.lr=1e-5")
    if value.strip() == _OPEN:
        raise ConfigError(f"override '{text}': ??? leaves the key open; give it a value")
    try:
        kind = text_kind(RecipeConfig, key)
        values = OmegaConf.from_dotlist([f"{key}={value}" if kind is None else f"{key}="])
        if kind is None and (misread := misread_number(value, key)) is not None:
            raise ConfigError(f"override '{text}': {misread}")
        if kind is not None:
            OmegaConf.update(values, key, None if kind == "optional" and value == "null" else value)
        elif isinstance(OmegaConf.select(values, key), str) and value.strip()[0] not in _YAML_MARKS:
            # Of plain text YAML would take what looks like a comment for one.
            OmegaConf.update(values, key, value)
        return _Override(key, text, values)
    except ConfigError:
        raise
    except YAMLError as error:
        raise ConfigError(
            f"override '{text}': {_in_one_line(error)}; put the value in quotes: {key}='\"...\"'"
        ) from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"override '{text}': {_in_one_line(error)}") from error
    except ValueError as error:
        raise ConfigError(f"override '{text[:_LONGEST_KEY]}...': {_TOO_LONG}") from error


def _culprit(overrides: Sequence[_Override], key: str, message: str) -> _Override | None:
    """Return the last override that set the faulty key, its section or its kind, or a key that the message names."""
    kinds = {f"{section}.{tag}": section for section, tag in kinds_of_sections(RecipeConfig)}
    for override in reversed(overrides):
        section = kinds.get(override.key, override.key)
        if key and (key in (override.key, section) or key.startswith(f"{section}.")):
            return override
        if override.key.startswith((f"{key}.", f"{key}[")) and message.startswith(
            (f"unknown key '{key}'", f"{key}=")
        ):
            return override
        named = override.key.removeprefix(f"{key}.") if key else override.key
        mention = rf"(?<![\w.])({re.escape(key)}\.)?{re.escape(named)}(?!\w)"
        if (not key or named != override.key) and re.search(mention, message):
            return override
    return None


def _without_other_kinds(base: DictConfig, extra: DictConfig) -> DictConfig:
    """Return `base` without what `extra` makes of another kind: a section, or the settings of what it runs."""
    for decides, dropped in _not_inherited():
        old, new = (
            OmegaConf.select(config, decides, throw_on_resolution_failure=False) for config in (base, extra)
        )
        if old is not None and new is not None and old != new:
            base = _merge(base)
            OmegaConf.update(base, dropped, {}, merge=False)
    return base


def _not_inherited() -> list[tuple[str, str]]:
    """Return keys, each with the key of what is inherited only where their value stays."""
    kinds = [(f"{section}.{tag}", section) for section, tag in kinds_of_sections(RecipeConfig)]
    return [*kinds, *_SETTINGS.items()]


def _merge(base: DictConfig, *extra: DictConfig) -> DictConfig:
    for part in extra:
        if clash := _clash(OmegaConf.to_container(base), OmegaConf.to_container(part)):
            raise ConfigError(
                f"{clash} is a list in one place and a mapping of keys in another, which do not merge; write it as "
                "one of the two"
            )
    merged = OmegaConf.merge(base, *extra)
    assert isinstance(merged, DictConfig)
    return merged


def _clash(base: Any, extra: Any, key: str = "") -> str | None:
    if isinstance(base, dict) and isinstance(extra, dict):
        shared = (name for name in extra if name in base)
        found = (_clash(base[name], extra[name], f"{key}.{name}" if key else str(name)) for name in shared)
        return next((clash for clash in found if clash), None)
    return key if {type(base), type(extra)} == {dict, list} else None


def _in_one_line(error: Exception) -> str:
    """Return what a YAML or OmegaConf error says, and where: a line of the file or a key."""
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        mark, problem = error.problem_mark, str(error.problem).partition(" See http")[0]
        if problem.startswith("but ") and error.context:
            problem = f"{error.context} {problem}"
        return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
    text = str(error).partition("\n")[0]
    if isinstance(error, faults.GrammarParseError | faults.InterpolationResolutionError):
        text += r"; write \${ where the text is meant"
    key = getattr(error, "full_key", None)
    return f"{key}: {text}" if key else text

"""Recipes on disk: YAML with inheritance (`defaults: other.yaml`) and dotted overrides (`policy.workers=2`).

Every mistake becomes a ConfigError of one line that names the key, the value and the remedy.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from pydantic import ValidationError
from yaml import MarkedYAMLError, YAMLError

from headrace.config import RecipeConfig
from headrace.errors import ConfigError
from headrace.utils.config_errors import describe

_INTERPOLATION = re.compile(r"(\\*)\$\{")


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> RecipeConfig:
    """Read a recipe, apply `key=value` overrides in order, and validate.

    `defaults` names recipes to start from, relative to the file; later ones win, and the file itself wins over
    all. Sections merge key by key, lists are replaced.

    Raises:
        ConfigError: a missing or malformed file, an unknown key, a wrong type, or sections that contradict.
    """
    merged = _load_yaml(Path(path), children=())
    for text in overrides:
        merged = _apply_override(merged, text)
    try:
        values = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
        return RecipeConfig.model_validate(values)
    except MissingMandatoryValue as error:
        key = getattr(error, "full_key", None)
        raise ConfigError(f"{path}: {key} is left open (???); set it with {key}=...") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {_in_one_line(error)}") from error
    except ValidationError as error:
        raise ConfigError(f"{path}: {describe(error, RecipeConfig)}") from error


def dump_recipe(recipe: RecipeConfig) -> str:
    """Return the resolved recipe as YAML that `load_recipe` reads back to an equal object."""
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(recipe.model_dump(mode="json"))))


def changed_keys(old_text: str, new_text: str) -> tuple[str, ...]:
    """Return the dotted keys in which two recipes in YAML differ, sorted; a key that only one has counts.

    >>> changed_keys("seed: 0\\ngrpo: {max_num_steps: 80}", "seed: 0\\ngrpo: {max_num_steps: 120}")
    ('grpo.max_num_steps',)
    """
    old, new = (
        dict(_leaves(OmegaConf.to_container(OmegaConf.create(text)))) for text in (old_text, new_text)
    )
    absent = object()
    return tuple(
        sorted(key for key in old.keys() | new.keys() if old.get(key, absent) != new.get(key, absent))
    )


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield prefix, value
        return
    for key, inner in value.items():
        yield from _leaves(inner, f"{prefix}.{key}" if prefix else str(key))


def _escaped(value: Any) -> Any:
    """Protect text that looks like an interpolation from being resolved when it is read back."""
    if isinstance(value, Mapping):
        return {key: _escaped(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_escaped(inner) for inner in value]
    if isinstance(value, str):
        return _INTERPOLATION.sub(lambda match: match[1] * 2 + r"\${", value)
    return value


def _load_yaml(path: Path, children: tuple[Path, ...]) -> DictConfig:
    """Read a recipe over its defaults; `children` are the files whose `defaults` led here."""
    chain = (*children, path)
    if path.resolve() in (child.resolve() for child in children):
        names = " -> ".join(p.name for p in chain)
        raise ConfigError(f"{path}: defaults form a circle ({names}); remove one `defaults:` line")
    loaded = _read_yaml(path, children)
    merged = OmegaConf.create({})
    for name in _default_names(path, loaded.pop("defaults", None)):
        merged = _merge(merged, _load_yaml(path.parent / name, chain))
    return _merge(merged, loaded)


def _read_yaml(path: Path, children: tuple[Path, ...]) -> DictConfig:
    try:
        loaded = OmegaConf.load(path)
    except OSError as error:
        named_by = f", named by `defaults` in {children[-1]}" if children else ""
        hint = _similar_file(path) or "check the path"
        raise ConfigError(
            f"{path}: cannot read the recipe ({error.strerror or error}){named_by}; {hint}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file; expected YAML in UTF-8") from error
    except (YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: not valid YAML: {_in_one_line(error)}") from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path}: expected a mapping of sections at the top level; got a list or a scalar")
    return loaded


def _default_names(path: Path, defaults: Any) -> list[str]:
    names = [] if defaults is None else [defaults] if isinstance(defaults, str) else list(defaults)
    if isinstance(defaults, DictConfig) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{path}: defaults={defaults}: expected a file name or a list of them")
    return names


def _similar_file(path: Path) -> str | None:
    if not path.parent.is_dir():
        return None
    names = [p.name for p in path.parent.iterdir() if p.is_file()]
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean {path.with_name(close[0])}?" if close else None


def _apply_override(base: DictConfig, text: str) -> DictConfig:
    key, sign, value = text.partition("=")
    if not sign or not all(key.strip().split(".")):
        raise ConfigError(f"override '{text}': expected key=value, for example policy.optimizer.lr=1e-5")
    try:
        return _merge(base, OmegaConf.from_dotlist([f"{key.strip()}={value}"]))
    except YAMLError as error:
        raise ConfigError(
            f"override '{text}': {_in_one_line(error)}; put the value in quotes: {key}='\"...\"'"
        ) from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"override '{text}': {_in_one_line(error)}") from error


def _merge(base: DictConfig, extra: DictConfig) -> DictConfig:
    merged = OmegaConf.merge(base, extra)
    assert isinstance(merged, DictConfig)
    return merged


def _in_one_line(error: Exception) -> str:
    """Return what a YAML or OmegaConf error says, and where: a line of the file or a key."""
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    text = str(error).partition("\n")[0]
    key = getattr(error, "full_key", None)
    return f"{key}: {text}" if key else text

"""`headrace config`: look at recipes without running them."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from headrace.config import RecipeConfig
from headrace.recipe_reference import keys_reference, metrics_reference, recipe_schema
from headrace.utils.config_errors import default_values
from headrace.utils.idle_keys import idle_lines
from headrace.utils.recipe import changed_keys, dump_recipe, key_origins, leaves, load_recipe
from headrace.utils.section import written
from headrace.utils.shipped import shipped_recipes

_DEFAULT = "default"
_LONGEST_VALUE = 60
_SET_BY_ALGORITHMS = ("grpo.", "loss.")


def complete_recipe(incomplete: str) -> list[str]:
    """Return the recipes that ship, and the files and folders here, that begin so."""
    here = sorted(Path().glob(f"{incomplete}*"))
    files = [f"{path}/" if path.is_dir() else str(path) for path in here if not path.name.startswith(".")]
    return [*(name for name in shipped_recipes() if name.startswith(incomplete)), *files]


def complete_key(incomplete: str) -> list[str]:
    """Return the keys of recipes that begin so, ready for a value."""
    return [f"{key}=" for key in default_values(RecipeConfig) if key.startswith(incomplete)]


def _recipe(metavar: str, help: str) -> Any:
    return typer.Argument(metavar=metavar, help=help, show_default=False, autocompletion=complete_recipe)


Recipe = Annotated[
    Path, _recipe("CONFIG", "A recipe: a file in YAML, or a name that `headrace recipes` lists.")
]
RunOrRecipe = Annotated[Path, _recipe("RUN_OR_CONFIG", "A run directory or a recipe.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Keys of the recipe to change.", autocompletion=complete_key),
]

config_app = typer.Typer(no_args_is_help=True, help="Show, check and compare recipes, without running them.")


@config_app.command()
def show(
    config: Recipe,
    overrides: Overrides = None,
    changed: Annotated[
        bool, typer.Option("--changed", help="Only keys that are not at their default.")
    ] = False,
) -> None:
    """Print a recipe with all its values, and beside each value where it comes from.

    What is printed is a recipe again.

    \b
    Examples:
      headrace config show demo_moe
      headrace config show my.yaml algorithm=dapo --changed
    """
    recipe = load_recipe(config, overrides or ())
    values = yaml.safe_load(dump_recipe(recipe))
    origins = key_origins(config, overrides or ())
    preset = f"algorithm={recipe.algorithm}"
    defaults = default_values(RecipeConfig)

    def origin(key: str, value: Any) -> str:
        if (set_by := _set_by(key, origins)) is not None:
            return set_by
        is_preset = key.startswith(_SET_BY_ALGORITHMS) and key in defaults and defaults[key] != value
        return preset if is_preset else _DEFAULT

    found = {key: origin(key, value) for key, value in leaves(values)}
    for line in _lines(values, found, changed):
        typer.echo(line)


def _set_by(key: str, origins: dict[str, str]) -> str | None:
    """Return what set a key, or the short form that stands for its section: `data.train: FILE`."""
    while key not in origins and "." in key:
        key = key.rpartition(".")[0]
    return origins.get(key)


def _lines(
    values: dict[str, Any], origins: dict[str, str], changed: bool, prefix: str = "", indent: str = ""
) -> list[str]:
    lines = []
    for name, value in values.items():
        key, shown = f"{prefix}{name}", _flow(name)
        if isinstance(value, dict) and value:
            inner = _lines(value, origins, changed, f"{key}.", f"{indent}  ")
            lines += [f"{indent}{shown}:", *inner] if inner else []
            continue
        origin = origins.get(key, _DEFAULT)
        if not (changed and origin == _DEFAULT):
            lines.append(f"{indent}{shown}: {_flow(value)}  # {origin}")
    return lines


class _OneLine(yaml.SafeDumper):
    """Writes text of several lines in one, with escapes."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = '"' if len(text.splitlines()) > 1 or text.endswith("\n") else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    def ignore_aliases(self, data: object) -> bool:
        return True


_OneLine.add_representer(str, _OneLine.represent_text)


def _flow(value: Any) -> str:
    text = yaml.dump(value, Dumper=_OneLine, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...").strip()


@config_app.command()
def validate(config: Recipe, overrides: Overrides = None) -> None:
    """Check a recipe; exit code 2 and one line if something in it is wrong.

    The model, the data and your own code are not loaded.

    \b
    Example:
      headrace config validate my.yaml policy.workers=2
    """
    recipe = load_recipe(config, overrides or ())
    for line in idle_lines(recipe):
        typer.echo(line)
    typer.echo(f"{config}: valid")


@config_app.command()
def diff(config: Recipe, other: Annotated[Path, _recipe("OTHER", "Another recipe.")]) -> None:
    """Print the keys in which two recipes differ, defaults and all.

    \b
    Examples:
      headrace config diff demo_moe demo_moe_r3
      headrace config diff my.yaml runs/mine/config.yaml
    """
    before, after = (load_recipe(path).model_dump(mode="json") for path in (config, other))
    changes = changed_keys(before, after)
    for key, one, two in changes:
        typer.echo(f"{key}: {written(one, _LONGEST_VALUE)} -> {written(two, _LONGEST_VALUE)}")
    if not changes:
        typer.echo("no difference")


@config_app.command()
def schema() -> None:
    """Print the JSON Schema of recipes, for editors.

    With the first line `# yaml-language-server: $schema=recipe.schema.json` in a recipe, editors complete its keys,
    show their meaning, and mark what is wrong.

    \b
    Example:
      headrace config schema > recipe.schema.json
    """
    typer.echo(json.dumps(recipe_schema(), indent=1))


@config_app.command()
def keys() -> None:
    """Print every key of a recipe with default and meaning, in Markdown.

    \b
    Example:
      headrace config keys | less
    """
    typer.echo(keys_reference(), nl=False)


@config_app.command()
def metrics() -> None:
    """Print every metric of a run with its meaning, in Markdown.

    \b
    Example:
      headrace config metrics | less
    """
    typer.echo(metrics_reference(), nl=False)

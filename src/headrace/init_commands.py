"""`headrace init`: a folder to start from."""

import json
import re
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.config_commands import complete_recipe
from headrace.errors import ConfigError
from headrace.recipe_reference import recipe_schema
from headrace.utils.paths import user_path
from headrace.utils.recipe import dump_values, load_recipe, merged_values
from headrace.utils.shipped import FOLDER, find_recipe, shipped_recipes

_SCHEMA = "recipe.schema.json"
# Keys of paths; a set may be its path alone, under its name.
_SETS = re.compile(r"data\.(train|validation)\.(?!path$)[^.]+")
_PATHS = re.compile(
    r"env(\.environments\.[^.]+)?\.path|data\.(train|validation)(\.[^.]+)?(\.path)?|policy\.(model|tokenizer)\.path"
)
_FROM = """\
# yaml-language-server: $schema=recipe.schema.json
# headrace train recipe.yaml            (from this folder; any key can be overridden: seed=1)
# headrace config show recipe.yaml      (all keys, and where each value comes from)
defaults: {source}  # the keys below win over its own
run_dir: run
# grpo: {{max_num_steps: 20}}
"""


def init(
    name: Annotated[Path, typer.Argument(metavar="NAME", help="The folder to make.", show_default=False)],
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="CONFIG",
            help="Start from this recipe, by its name or file. Without it: a small model, data and a reward.",
            autocompletion=complete_recipe,
        ),
    ] = None,
) -> None:
    """Make a folder with a commented recipe that trains at once on a CPU, its data, and a reward to change.

    \b
    Examples:
      headrace init mine
      headrace init mine --from demo_moe
    """
    folder = user_path(name, "NAME")
    files = _from_recipe(source) if source is not None else _start()
    files[_SCHEMA] = json.dumps(recipe_schema(), indent=1) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if taken := [file for file in files if (folder / file).exists()]:
            raise ConfigError(f"{name}: holds {', '.join(taken)} already; give another name, or remove them")
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{name}: cannot write there ({error.strerror}); give another name") from error
    typer.echo(
        f"{folder}: {', '.join(files)}\nnext: cd {shlex.quote(str(folder))} && headrace train recipe.yaml"
    )


def _start() -> dict[str, str]:
    # Code that is to be copied ends in .txt, since it is no module of headrace.
    files = sorted((FOLDER / "start").iterdir(), reverse=True)
    return {file.name.removesuffix(".txt"): file.read_text(encoding="utf-8") for file in files}


def _from_recipe(source: str) -> dict[str, str]:
    load_recipe(source)  # says what is wrong with it
    named = source if source in shipped_recipes() else str(Path(source).absolute())
    text = _FROM.format(source=json.dumps(named))
    if found := _absolute(merged_values(source), find_recipe(source).parent):
        text += f"# From this folder these would not be found.\n{dump_values(found)}"
    return {"recipe.yaml": text}


def _absolute(values: dict[str, Any], folder: Path, key: str = "") -> dict[str, Any]:
    """Return the relative paths of a recipe that lead from here, or from its folder, to something; in full."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        place = f"{key}.{name}" if key else str(name)
        if isinstance(value, dict):
            found[name] = _absolute(value, folder, place)
        elif place == "code_path":
            found[name] = [_in_full(text, folder) or text for text in value or ()]
        elif _PATHS.fullmatch(place) and not (_SETS.fullmatch(place) and "path" in values):
            found[name] = _in_full(value, folder)
    return {name: value for name, value in found.items() if value}


def _in_full(text: object, folder: Path) -> str | None:
    if not isinstance(text, str) or not text or Path(text).is_absolute():
        return None
    return next((str(path.absolute()) for path in (Path(text), folder / text) if path.exists()), None)

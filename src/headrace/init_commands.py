"""`headrace init`: a folder to start from."""

import json
from pathlib import Path
from typing import Annotated

import typer

from headrace.config_commands import complete_recipe
from headrace.errors import ConfigError
from headrace.recipe_reference import recipe_schema
from headrace.utils.paths import user_path
from headrace.utils.recipe import load_recipe
from headrace.utils.shipped import FOLDER, shipped_recipes

_SCHEMA = "recipe.schema.json"
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
    typer.echo(f"{folder}: {', '.join(files)}\nnext: cd {folder} && headrace train recipe.yaml")


def _start() -> dict[str, str]:
    # Code that is to be copied ends in .txt, since it is no module of headrace.
    files = sorted((FOLDER / "start").iterdir(), reverse=True)
    return {file.name.removesuffix(".txt"): file.read_text(encoding="utf-8") for file in files}


def _from_recipe(source: str) -> dict[str, str]:
    load_recipe(source)  # says what is wrong with it
    named = source if source in shipped_recipes() else str(Path(source).absolute())
    return {"recipe.yaml": _FROM.format(source=json.dumps(named))}

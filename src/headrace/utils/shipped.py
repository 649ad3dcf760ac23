"""The recipes that come with headrace, by name; they lie in the package's folder `recipes`."""

import difflib
from pathlib import Path

from omegaconf import OmegaConf

FOLDER = Path(__file__).parents[1] / "recipes"

# In a recipe, `${shipped:sums.jsonl}` is the path of a file beside those that ship.
_register = getattr(OmegaConf, "register_resolver", None) or OmegaConf.register_new_resolver  # by version
_register("shipped", lambda name: str(FOLDER / name), replace=True)


def shipped_recipes() -> dict[str, str]:
    """Return the name of each recipe that ships, with the first sentence of its first comment."""
    files = sorted(FOLDER.glob("*.yaml"))
    return {file.stem: _first_sentence(file.read_text(encoding="utf-8")) for file in files}


def find_recipe(path: str | Path) -> Path:
    """Return the file that a person means: theirs if there is one, else the recipe that ships under the name."""
    file, shipped = Path(path), FOLDER / f"{path}.yaml"
    return shipped if "/" not in str(path) and shipped.is_file() and not file.is_file() else file


def shipped_hint(path: Path) -> str | None:
    """Return how to name the recipe that ships and that a path to nothing probably meant."""
    close = difflib.get_close_matches(path.name.removesuffix(".yaml"), shipped_recipes(), n=1)
    return f"{close[0]} ships with headrace: give this name alone" if close else None


def _first_sentence(text: str) -> str:
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# "))
    return " ".join(lines).partition(". ")[0].rstrip(".")

"""Rows of a data set as they stand in a file: JSONL, or a Hugging Face dataset saved to disk."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.utils.json_text import read_json_lines
from headrace.utils.paths import user_path


@dataclass(frozen=True)
class Record:
    """One row; `place` is `line 3` of a text file or `row 2` of a dataset, and `number` the number in it."""

    source: str
    place: str
    number: int
    values: dict[str, Any]

    def text(self, key: str, knob: str) -> str:
        """Return the text under `key`, which the recipe's `env.<knob>` names; a number counts as text.

        Raises:
            ConfigError: no such key, or a value that is no text, no finite number, or empty.
        """
        place = f"{self.source}, {self.place}"
        if key not in self.values:
            there = ", ".join(map(str, self.values)) or "none"
            raise ConfigError(
                f"{place}: missing key '{key}' (keys there: {there}); set env.{knob}, or mend the row"
            )
        value = self.values[key]
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ConfigError(
                f"{place}: key '{key}' is {value!r:.60}; expected text or a number (env.{knob})"
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(
                f"{place}: key '{key}' is {value}, which no answer equals; mend or remove the row (env.{knob})"
            )
        text = str(value)
        if not text.strip():
            raise ConfigError(f"{place}: key '{key}' is empty; mend or remove the row (env.{knob})")
        return text


def read_records(path_text: str) -> Iterator[Record]:
    """Yield the rows of `env.path`, a JSONL file or a folder that `save_to_disk` made.

    Raises:
        ConfigError: a path that cannot be read, or a row that is no JSON object; names the line.
    """
    path = user_path(path_text, "env.path")
    source = f"env.path={path}"
    if path.is_dir():
        for number, values in enumerate(_load_from_disk(path)):
            yield Record(source, f"row {number}", number, values)
        return
    for line in read_json_lines(path, name=source):
        yield Record(source, f"line {line.number}", line.number, line.value)


def _load_from_disk(path: Path) -> Any:
    try:
        from datasets import load_from_disk  # noqa: PLC0415 - optional, and slow to import
    except ImportError as error:
        raise ConfigError(
            f"env.path={path} is a folder, and reading a saved Hugging Face dataset needs the package "
            "'datasets'; install headrace[train], or give a JSONL file"
        ) from error
    try:
        dataset = load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"env.path={path}: not a Hugging Face dataset made by save_to_disk ({reason}); check the path"
        ) from error
    if hasattr(dataset, "keys"):
        names = ", ".join(dataset.keys())
        raise ConfigError(
            f"env.path={path} holds several splits ({names}); add one to the path, as in {path}/train"
        )
    return dataset

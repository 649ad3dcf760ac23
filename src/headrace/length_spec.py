"""Row lengths as a person types them: a list, a file, or a distribution to draw from."""

import os
import random
import re
from pathlib import Path

from headrace.distributed.bin_packing import LONGEST_ROW
from headrace.errors import ConfigError
from headrace.utils.section import shortened

_FORMS = (
    "expected numbers separated by commas (512,80,300), a file of numbers, lognormal:COUNT:MEDIAN:MAX or "
    "uniform:COUNT:MIN:MAX"
)
_LONGEST_SHOWN = 60
_MOST_DIGITS = 12
_MOST_ROWS = 10_000_000
_SPREAD = 0.7
"""Standard deviation of the logarithm: about that of the answers of a reasoning model."""


def parse_lengths(text: str, *, seed: int = 0) -> list[int]:
    """Return the row lengths in tokens that `text` describes.

    >>> parse_lengths("512,80,300")
    [512, 80, 300]
    >>> parse_lengths("lognormal:4:200:1500")  # 4 rows with median 200, none above 1500
    [176, 205, 326, 187]

    Raises:
        ConfigError: text of another form, an unreadable file, or a length below 1 or above `LONGEST_ROW`.
    """
    shown = shortened(text, _LONGEST_SHOWN)
    kind, *numbers = text.split(":")
    if kind in ("lognormal", "uniform"):
        lengths = _draw(shown, kind, _integers(shown, numbers), random.Random(seed))
    else:
        lengths = _listed(shown, text)
    if max(lengths) > LONGEST_ROW:
        raise ConfigError(
            f"LENGTHS '{shown}' has a row of {max(lengths)} tokens; expected {LONGEST_ROW} at most"
        )
    return lengths


def _listed(shown: str, text: str) -> list[int]:
    # Unlike Path.exists, this takes a long list for what it is, and not for a name that is too long.
    content = _read(Path(text)) if os.path.exists(text) else text
    parts = [part for part in re.split(r"[\s,]+", content) if part]
    lengths = _integers(shown, parts)
    if not lengths:
        raise ConfigError(f"LENGTHS '{shown}' has no numbers; {_FORMS}")
    if min(lengths) < 1:
        raise ConfigError(f"LENGTHS '{shown}' has a row of {min(lengths)} tokens; expected 1 or more")
    return lengths


def _draw(text: str, kind: str, numbers: list[int], rng: random.Random) -> list[int]:
    if len(numbers) != 3 or min(numbers) < 1 or numbers[1] > numbers[2]:
        raise ConfigError(f"LENGTHS '{text}': {_FORMS}, all at least 1 and the last two in order")
    count, low, high = numbers
    if count > _MOST_ROWS:
        raise ConfigError(f"LENGTHS '{text}' are {count:,} rows; expected {_MOST_ROWS:,} at most")
    if kind == "uniform":
        return [rng.randint(low, high) for _ in range(count)]
    return [min(high, max(1, round(low * rng.lognormvariate(0, _SPREAD)))) for _ in range(count)]


def _integers(text: str, parts: list[str]) -> list[int]:
    for part in parts:
        digits = part.removeprefix("-")
        is_whole = digits.isascii() and digits.isdecimal()
        if not is_whole or len(digits) > _MOST_DIGITS:
            bound = f" of at most {_MOST_DIGITS} digits" if is_whole else ""
            raise ConfigError(
                f"LENGTHS '{text}': '{part[:_LONGEST_SHOWN]}' is not a whole number{bound}; {_FORMS}. The memory of a "
                "recipe: headrace plan --memory RECIPE"
            )
    return [int(part) for part in parts]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"LENGTHS '{path}': cannot read the file ({error}); {_FORMS}") from error

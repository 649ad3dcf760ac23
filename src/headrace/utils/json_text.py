"""JSON as the standard has it, from files: what only Python takes for JSON is refused, with the file and the line.

Only a line feed ends a line of JSON Lines: U+2028, U+2029 and U+0085 may stand in a JSON string as they are.
"""

import codecs
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from headrace.errors import ConfigError

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class JsonFault(ValueError):
    """What is wrong with a text, and the line of it."""

    def __init__(self, reason: str, line: int = 1) -> None:
        super().__init__(reason)
        self.line = line


class JsonLine(NamedTuple):
    """An object of a JSON Lines file; `text` is the line without its end."""

    number: int
    text: str
    value: dict[str, Any]


def parse_json(data: bytes) -> Any:
    """Return the value that a UTF-8 text holds.

    Raises:
        JsonFault: not JSON, which NaN, Infinity and half a surrogate pair are not; or a number that Python cannot
            hold: 1e999, or an integer of more than 4,300 digits.
    """
    try:
        text = data.decode()
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise JsonFault("not UTF-8 text", data.count(b"\n", 0, error.start) + 1) from error
    except json.JSONDecodeError as error:
        raise JsonFault(f"not valid JSON ({error.msg})", error.lineno) from error
    except RecursionError as error:
        raise JsonFault("not valid JSON (nested too deeply)") from error
    except ValueError as error:
        raise JsonFault(f"not valid JSON ({str(error).partition(';')[0]})") from error
    if _SURROGATE.search(text):
        _refuse_surrogates(value)
    return value


def read_json(path: Path, *, name: str = "", remedy: str) -> Any:
    """Return the value of a file that holds one; `name` stands for the path in a message, which `remedy` ends.

    Raises:
        FileNotFoundError, NotADirectoryError: there is none.
        ConfigError: it cannot be read, or holds no JSON.
    """
    try:
        return parse_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise ConfigError(f"{name or path}: cannot read it ({error.strerror or error}); {remedy}") from error
    except JsonFault as error:
        raise ConfigError(f"{name or path}, line {error.line}: damaged, {error}; {remedy}") from error


def read_json_lines(
    path: Path,
    *,
    name: str = "",
    remedy: str = "write one JSON object per line, in UTF-8",
    may_end_cut: bool = False,
) -> Iterator[JsonLine]:
    """Yield the objects of a JSON Lines file in UTF-8; lines of whitespace are passed over.

    `name` stands for the path in messages. With `may_end_cut`, a last line without its end is that of a writer that
    died, and is left out.
    """
    name = name or str(path)
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(file, start=1):
                if number == 1:
                    raw = raw.removeprefix(codecs.BOM_UTF8)
                if may_end_cut and not raw.endswith(b"\n"):
                    return
                if raw.strip():
                    yield _parse_line(number, raw, f"{name}, line {number}", remedy)
    except OSError as error:
        raise ConfigError(f"{name}: cannot read it ({error.strerror or error}); check the path") from error


def _parse_line(number: int, raw: bytes, place: str, remedy: str) -> JsonLine:
    try:
        value = parse_json(raw)
    except JsonFault as error:
        raise ConfigError(f"{place}: {error}; {remedy}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: expected a JSON object; got {type(value).__name__}; {remedy}")
    return JsonLine(number, raw.decode().removesuffix("\n"), value)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is too large a number")
    return value


def _refuse_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise JsonFault(f"not valid text (\\u{ord(half):04x} is half a surrogate pair)") from error

"""Rows of a file, of a saved dataset, of the hub, or of a function: mappings, with the place of each in words."""

import codecs
import csv
import io
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from headrace.config import SourceConfig
from headrace.errors import ConfigError
from headrace.utils.json_text import read_json, read_json_lines
from headrace.utils.paths import user_path
from headrace.utils.targets import TARGET, check_parameters, load_callable, user_code

logger = logging.getLogger(__name__)

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_LONGEST_REASON = 200
_LONGEST_CELL = 2**31 - 1
Row = tuple[int, str, Mapping[str, Any]]
"""The number of a row, its place (`line 3` of a text file, `row 2` of a dataset), and its values."""


@dataclass(frozen=True)
class Source:
    """A set of prompts under its name; `key` is the recipe's key of its path, `settings` those of its columns."""

    name: str
    cfg: SourceConfig
    key: str
    settings: Mapping[str, str]

    def setting(self, column: str) -> str:
        return self.settings.get(column, f"{self.key.removesuffix('.path')}.columns.{column}")

    def __str__(self) -> str:
        return f"{self.key}={self.cfg.path}"


def read_rows(source: Source) -> Iterator[Row]:
    """Yield the rows of a source, in order.

    Raises:
        ConfigError: nothing is there, it cannot be read, or the hub cannot be reached.
    """
    text = source.cfg.path
    if TARGET.fullmatch(text) and not Path(text).exists():
        _tell_unread(source, "a function", "subset", "revision")
        return _of_function(source)
    path = user_path(text, source.key)
    if path.is_dir():
        _tell_unread(source, "a saved dataset", "subset", "revision")
        return _numbered(_saved_dataset(path, source))
    reader = _READERS.get(path.suffix.lower())
    if path.is_file() and reader is None:
        raise ConfigError(
            f"{source}: expected a file that ends in {', '.join(_READERS)}; rename or convert it"
        )
    if reader is not None:
        if not path.is_file():
            place = "" if path.is_absolute() else f", which counts from the working directory {Path.cwd()}"
            raise ConfigError(f"{source}: cannot read it (No such file or directory); check the path{place}")
        _tell_unread(source, "a file", "split", "subset", "revision")
        return reader(path, source)
    if not _HUB_NAME.fullmatch(text):
        raise ConfigError(
            f"{source}: no such file or folder, and no name of a hub's dataset (org/name) or of a function "
            "(package.module:function); check the path"
        )
    return _numbered(_hub_dataset(source))


def _tell_unread(source: Source, what: str, *names: str) -> None:
    for name in names:
        if (value := getattr(source.cfg, name)) is not None:
            logger.warning(
                "no effect: %s%s=%s (%s has none)", source.key.removesuffix("path"), name, value, what
            )


def _json_lines(path: Path, source: Source) -> Iterator[Row]:
    for line in read_json_lines(path, name=str(source)):
        yield line.number, f"line {line.number}", line.value


def _json(path: Path, source: Source) -> Iterator[Row]:
    rows = read_json(path, name=str(source), remedy="write a list of objects")
    if not isinstance(rows, list):
        raise ConfigError(f"{source}: expected a list of objects; got {type(rows).__name__}")
    return _numbered(_mappings(rows, source), start=1)


def _csv(path: Path, source: Source) -> Iterator[Row]:
    csv.field_size_limit(_LONGEST_CELL)
    line = 0  # the last that a whole row has
    try:
        reader = csv.reader(io.StringIO(_text(path, source), newline=""), strict=True)
        rows = (cells for cells in reader if cells)
        header = next(rows, [])
        line = reader.line_num
        if twice := [name for name, count in Counter(header).items() if name and count > 1]:
            raise ConfigError(
                f"{source}, line {line}: two columns are called '{twice[0]}'; rename one of them"
            )
        for cells in rows:
            line = reader.line_num
            if len(cells) != len(header):
                raise ConfigError(
                    f"{source}, line {line}: {'more' if len(cells) > len(header) else 'fewer'} cells than the header's "
                    f"{len(header)}; put text with commas into double quotes"
                )
            yield line, f"line {line}", dict(zip(header, map(cell_value, cells)))
    except csv.Error as error:
        raise ConfigError(
            f"{source}, line {line + 1}: not valid CSV ({error}); mend the row that begins there"
        ) from error


def _text(path: Path, source: Source) -> str:
    try:
        data = path.read_bytes().removeprefix(codecs.BOM_UTF8)
        return data.decode()
    except OSError as error:
        raise ConfigError(f"{source}: cannot read it ({error.strerror or error}); check the path") from error
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{source}, line {line}: not UTF-8 text; save the file as UTF-8") from error


def cell_value(text: str) -> str | int | float:
    """Return a number where Python writes it as the cell does, else the text: `007` and `1.50` stay as they are.

    >>> cell_value("7"), cell_value("1.5"), cell_value("007"), cell_value("1e3")
    (7, 1.5, '007', '1e3')
    """
    for kind in (int, float):
        try:
            if str(value := kind(text)) == text and text not in ("nan", "inf", "-inf"):
                return value
        except ValueError:
            continue
    return text


def _parquet(path: Path, source: Source) -> Iterator[Row]:
    with _needed("pyarrow", source):
        from pyarrow import ArrowException, parquet  # noqa: PLC0415 - optional
    try:
        return _numbered(parquet.read_table(path).to_pylist())
    except (ArrowException, OSError) as error:
        raise ConfigError(f"{source}: cannot read it as Parquet ({_reason(error)})") from error


_READERS: dict[str, Callable[[Path, Source], Iterator[Row]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}


def _saved_dataset(path: Path, source: Source) -> Iterable[Mapping[str, Any]]:
    with _needed("datasets", source):
        from datasets import load_from_disk  # noqa: PLC0415 - optional, and slow to import
    try:
        found = load_from_disk(str(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{source}: not a Hugging Face dataset made by save_to_disk ({_reason(error)}); check the path"
        ) from error
    return _one_split(found, source)


def _hub_dataset(source: Source) -> Iterable[Mapping[str, Any]]:
    """Return a dataset of the hub: from there, or, without a network, what an earlier download has left."""
    cfg = source.cfg
    with _needed("datasets", source):
        import datasets  # noqa: PLC0415 - optional, and slow to import
    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        found = datasets.load_dataset(cfg.path, cfg.subset, revision=cfg.revision)
    except ConnectionError:
        found = datasets.load_dataset(_downloaded(source), cfg.subset)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{source}: no such file or folder, and the hub has no such dataset ({_reason(error)}); check the name, "
            f"or the subset and revision beside it"
        ) from error
    finally:
        if shown:
            datasets.enable_progress_bars()
    return _one_split(found, source)


def _downloaded(source: Source) -> str:
    try:
        return snapshot_download(
            source.cfg.path, repo_type="dataset", revision=source.cfg.revision, local_files_only=True
        )
    except (OSError, ValueError) as missing:
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
        revision = f" --revision {source.cfg.revision}" if source.cfg.revision else ""
        raise ConfigError(
            f"{source}: no such file or folder, and the hub cannot be reached{offline}; where it can, run "
            f"`hf download {source.cfg.path} --repo-type dataset{revision}`, or give the path of a file"
        ) from missing


def _one_split(dataset: Any, source: Source) -> Iterable[Mapping[str, Any]]:
    wanted = source.cfg.split
    if not hasattr(dataset, "keys"):
        if wanted is not None and str(getattr(dataset, "split", None) or wanted) != wanted:
            raise ConfigError(
                f"{source} is the split {dataset.split}; remove split={wanted}, or change the path"
            )
        return dataset  # type: ignore[no-any-return]
    name = wanted or ("train" if "train" in dataset or len(dataset) > 1 else next(iter(dataset)))
    if name not in dataset:
        own = source.key != "env.path"
        remedy = f"set {source.key.removesuffix('path')}split to one" if own else "add one to the path"
        raise ConfigError(f"{source} has no split '{name}' (it has {', '.join(dataset)}); {remedy}")
    return dataset[name]  # type: ignore[no-any-return]


def _of_function(source: Source) -> Iterator[Row]:
    """Call a function of the user's for its rows; `split` goes to one that takes it."""
    function = load_callable(source.cfg.path, source.key)
    taken = check_parameters(
        function, {"split"}, str(source), example="a function without parameters, or (split)"
    )
    given = {"split": source.cfg.split or "train"} if taken is None or taken else {}
    with user_code(str(source)):
        rows = function(**given)
        if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
            raise ConfigError(
                f"{source}: expected a list of rows, each a dict; it returned a {type(rows).__name__}"
            )
        found = list(rows)
    return _numbered(_mappings(found, source))


def _mappings(rows: list[Any], source: Source) -> Iterator[Mapping[str, Any]]:
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ConfigError(
                f"{source}, row {number}: expected a mapping of columns; got {type(row).__name__}"
            )
        yield row


def _numbered(rows: Iterable[Mapping[str, Any]], start: int = 0) -> Iterator[Row]:
    for number, row in enumerate(rows, start):
        yield number, f"row {number}", row


@contextmanager
def _needed(package: str, source: Source) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"{source}: reading it needs the package '{package}'; install headrace[train], or give a JSONL file"
        ) from error


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:_LONGEST_REASON]

"""Examples in docstrings, `>>> ...` and what they print, as code on the pages of the API."""

from itertools import groupby
from typing import Any

from griffe import Extension


class FencedExamples(Extension):
    """Puts a fence around each example: the lines from `>>>` to the next empty one."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None and ">>>" in obj.docstring.value:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    parts = []
    for has_text, group in groupby(text.splitlines(), key=lambda line: bool(line.strip())):
        lines = list(group)
        start = (
            next((i for i, line in enumerate(lines) if line.lstrip().startswith(">>>")), None)
            if has_text
            else None
        )
        if start is None:
            parts += lines
            continue
        indent = lines[start][: len(lines[start]) - len(lines[start].lstrip())]
        parts += [
            *lines[:start],
            *([""] if start else []),
            f"{indent}```pycon",
            *lines[start:],
            f"{indent}```",
        ]
    return "\n".join(parts)

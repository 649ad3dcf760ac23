"""A report of runs as one HTML file, with the pictures of the live page; it needs no network and no server."""

import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.dashboard.palette import about
from headrace.dashboard.runs import Run
from headrace.dashboard.samples import Query

STATIC = Path(__file__).parent / "static"
# Each after those that it imports.
_MODULES = ("format", "dom", "lines", "time", "plane", "samples", "page", "report")
_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:class|function|const) (\w+))", re.MULTILINE)
_MOST_VALUES = 150_000
_FEWEST_POINTS, _MOST_POINTS = 100, 1000
_MOST_SAMPLES = 400
_MOST_SAMPLE_BYTES = 1_000_000
_RULES = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_HEAD = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_RULES}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
"""


def html_report(runs: Sequence[Run]) -> str:
    """Return the document: all of each run's metrics, thinned, its recipe, and the newest samples that fit in 1 MB."""
    for run in runs:
        run.poll()
    payloads = [run.payload(_points(run, len(runs))) for run in runs]
    samples = [list(_newest(run, _MOST_SAMPLE_BYTES // len(runs))) for run in runs]
    thinned = any("every" in payload["steps"] for payload in payloads)
    left_out = [
        _kept(some, payload["samples"]["count"]) + (f" of {run.name}" if len(runs) > 1 else "")
        for run, some, payload in zip(runs, samples, payloads)
        if len(some) < payload["samples"]["count"]
    ]
    notes = [*(["curves as means of neighbouring steps"] if thinned else []), *left_out]
    given = {
        "about": about([run.name for run in runs]),
        "runs": payloads,
        "samples": samples,
        "note": f"This file holds {', '.join(notes)}." if notes else "",
    }
    title = " and ".join(run.name for run in runs)
    return "".join(
        [
            _HEAD,
            f"<title>{html.escape(title)} · headrace</title>\n<style>\n{_static('style.css')}</style>\n",
            "</head>\n<body>\n<noscript>This report needs JavaScript.</noscript>\n",
            f'<script type="application/json" id="given">{_inert(given)}</script>\n',
            f"<script>\n{_bundle()}</script>\n</body>\n</html>\n",
        ]
    )


def _points(run: Run, runs: int) -> int:
    return max(_FEWEST_POINTS, min(_MOST_POINTS, _MOST_VALUES // runs // max(1, run.series_count)))


def _newest(run: Run, most_bytes: int) -> Iterator[dict[str, Any]]:
    left = most_bytes
    for sample in run.find(Query(limit=_MOST_SAMPLES))["rows"]:
        size = len(json.dumps(sample, ensure_ascii=False).encode())
        if size <= left:
            left -= size
            yield sample


def _kept(samples: Sequence[Mapping[str, Any]], count: int) -> str:
    """Say which samples of so many are in the report."""
    has_gap = bool(samples) and samples[-1]["row"] != count - len(samples)
    return f"the newest {'that fit, ' if has_gap else ''}{len(samples):,} of {count:,} samples"


def _static(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _bundle() -> str:
    """Return the modules as one script: each is a function that returns what it exports."""
    parts = []
    for name in _MODULES:
        source = _static(f"{name}.js")
        exports = ", ".join(_EXPORT.findall(source))
        body = _IMPORT.sub(r"const {\1} = \2_js;", _EXPORT.sub("", source))
        parts.append(f"const {name}_js = (() => {{\n{body}return {{ {exports} }};\n}})();\n")
    return "".join(parts) + "report_js.start();\n"


def _inert(value: Any) -> str:
    """Return JSON in which nothing ends the element that holds it."""
    return msgspec.json.encode(value).decode().replace("<", "\\u003c")

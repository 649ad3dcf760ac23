"""`docs/performance.md` says what the results files say: its tables and numbers are written from them."""

import importlib
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from headrace.cli import find_benchmarks

_MARKED = re.compile(r"<!-- (?:table|figure) .*?<!-- end -->", re.DOTALL)
Report = dict[str, Any]


@pytest.fixture(scope="module")
def tables() -> Iterator[ModuleType]:
    """The benchmarks' module, which is no part of the package."""
    folder = str(find_benchmarks())
    sys.path.insert(0, folder)
    try:
        yield importlib.import_module("tables")
    finally:
        sys.path.remove(folder)
        for name in ("tables", "cells"):
            sys.modules.pop(name, None)


def figure(name: str, value: float, target: float | None = None, *, ok: bool = True) -> Report:
    relation = {"unit": "copies", "relation": "at most", "note": ""}
    return {"name": name, "figure": value, "target": target, "ok": ok, **relation}


def test_the_page_holds_what_the_committed_results_say(tables: ModuleType) -> None:
    page = tables.PAGE.read_text()
    assert tables.fill(page, tables.load()) == page, "run: python benchmarks/plot.py"


def test_every_table_is_on_the_page_and_every_plot_of_the_page_is_there(tables: ModuleType) -> None:
    page: str = tables.PAGE.read_text()
    assert sorted(re.findall(r"<!-- table (.+?) -->", page)) == sorted(tables.TABLES)
    plots = re.findall(r"\]\((\w+\.png)\)", page)
    assert plots
    assert all((tables.PAGE.parent / plot).is_file() for plot in plots)


def test_no_figure_with_a_unit_of_measurement_is_typed_by_hand(tables: ModuleType) -> None:
    # Sizes of the batches and knobs are facts of the benchmarks; what was measured has one of these units.
    prose = _MARKED.sub("", tables.PAGE.read_text())
    assert re.findall(r"\d (?:us|tokens/s|copies|times|GiB|x faster)\b", prose) == []


def test_a_page_without_results_names_the_commands_that_measure(tables: ModuleType) -> None:
    page = tables.fill("<!-- table planner --><!-- end -->\n<!-- table summary --><!-- end -->", {})
    assert "Not measured yet: `headrace bench planner --save`" in page
    assert "`headrace bench train --save`" in page
    assert tables.fill("<!-- figure step demo_slower --><!-- end -->", {}) == (
        "<!-- figure step demo_slower -->(not measured)<!-- end -->"
    )


def test_a_changed_result_changes_the_sentence_and_nothing_outside_the_markers(tables: ModuleType) -> None:
    text = "Packing takes <!-- figure codec pack.* -->old<!-- end --> of time, as 0.5 says."
    reports = {"codec": {"figures": [figure("pack.long", 1.25), figure("pack.short", 21.4)]}}
    assert tables.fill(text, reports) == (
        "Packing takes <!-- figure codec pack.* -->1.2 to 21 copies<!-- end --> of time, as 0.5 says."
    )


def test_a_figure_near_its_target_is_rounded_to_its_own_side(tables: ModuleType) -> None:
    met, missed = figure("a", 1.0296, 1.03), figure("a", 1.0331, 1.03, ok=False)
    assert float(tables.shown(met)) <= 1.03 < float(tables.shown(missed))
    assert tables.judged([met])[2] == "met"
    assert tables.judged([figure("pad.x", 1.0, 2.0), figure("pad.y", 2.1, 2.0, ok=False)]) == (
        "1 to 2.1 copies",
        "≤ 2",
        "**missed** at y",
    )


def test_a_target_that_some_saved_runs_missed_is_said_beside_the_verdict_of_the_last(
    tables: ModuleType,
) -> None:
    held = [figure("eighth.512", 4.0, 6.0), figure("eighth.4096", 14.0, 16.0)]
    runs = {"eighth.512": {"runs": 6, "missed": 0}, "eighth.4096": {"runs": 6, "missed": 4}}
    assert tables.judged(held, runs)[2] == "met; 4096 **missed** in 4 of 6 runs"
    assert "**missed** in 4 of 6 runs" in tables.PAGE.read_text()


def test_a_marker_for_nothing_is_refused_by_name(tables: ModuleType) -> None:
    with pytest.raises(SystemExit, match="no table nothing; there are: summary"):
        tables.fill("<!-- table nothing --><!-- end -->", {})
    with pytest.raises(SystemExit, match="codec has no figure speed"):
        tables.fill("<!-- figure codec speed --><!-- end -->", {"codec": {"figures": []}})

"""The picture and the table of docs/step.md are those of a real step."""

import json
from itertools import chain

import pytest

from step_trace import DATA, PAGE, PICTURE, draw, structure, trace_step, with_table

SAVED = json.loads(DATA.read_text())


def test_the_picture_and_the_table_are_drawn_from_the_saved_trace() -> None:
    made_by = "python tests/step_trace.py"
    assert draw(SAVED) == PICTURE.read_text(), made_by
    assert with_table(PAGE.read_text(), SAVED) == PAGE.read_text(), made_by


def test_a_new_trace_has_the_same_stages_operations_rows_and_columns() -> None:
    fresh = trace_step()
    assert structure(fresh) == structure(SAVED), "python tests/step_trace.py"
    for plans in (fresh["plans"], SAVED["plans"]):
        for stage in ("prev_logprobs", "train"):
            assert sorted(chain.from_iterable(plans[stage])) == sorted(fresh["rows"])


def test_the_saved_trace_adds_up() -> None:
    rows = SAVED["rows"]
    for stage, budget in SAVED["budget"].items():
        bins = [sum(rows[sample]["tokens"] for sample in samples) for samples in SAVED["plans"][stage]]
        assert sum(bins) == sum(row["tokens"] for row in rows.values())
        assert max(bins) <= budget
    groups: dict[str, list[float]] = {}
    for sample, row in rows.items():
        groups.setdefault(sample.rpartition("_g")[0], []).append(row["advantage"])
    assert len(groups) == 4
    assert all(sum(group) == pytest.approx(0, abs=0.05) for group in groups.values())

"""`headrace bench`: real benchmarks in their own processes, small."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.cli import find_benchmarks
from headrace.errors import ConfigError
from headrace.run_tables import render_text

sys.path.insert(0, str(find_benchmarks()))
from runner import (
    bench_table,
    benchmark_names,
    choose,
    left_out,
    missed,
    run_benchmark,
    save_report,
    split_targets,
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace.cli", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def reports(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    done = run(*arguments, "--quick", "--json")
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_report_has_figures_with_targets_and_says_where_it_was_measured() -> None:
    code, (report,) = reports("planner")
    assert code == 0
    assert report["benchmark"] == "planner"
    assert report["ok"] is True
    figures = {figure["name"]: figure for figure in report["figures"]}
    seconds = figures["seconds.4096x8"]
    assert seconds["target"] == 2.0
    assert seconds["relation"] == "at most"
    assert 0 < seconds["figure"] <= 2.0
    assert seconds["ok"] is True
    assert figures["fill.4096x8"]["target"] is None
    timing = report["measurements"]["4096x8"]["plan"]
    assert timing["min_ms"] <= timing["p10_ms"] <= timing["median_ms"] <= timing["p90_ms"]
    where = report["where"]
    assert where["versions"]["headrace"] == headrace.__version__
    assert where["threads"] == 1
    assert where["command"] == "headrace bench planner --quick"


def test_a_missed_target_is_named_and_the_exit_code_is_1() -> None:
    done = run("planner", "--quick", "--target", "planner.seconds.4096x8=0")
    assert done.returncode == 1
    assert "missed" in done.stdout
    assert "planner.seconds.4096x8" in done.stderr.splitlines()[-1]


def test_every_way_of_packing_agrees_before_it_is_timed() -> None:
    # A target out of reach of noise: what is tested is that all ways ran and gave equal rows.
    code, (report,) = reports("codec", "--target", "codec.pad.64x200=1e9")
    judged = {figure["name"] for figure in report["figures"] if figure["judged"]}
    assert (code, judged) == (0, {"pad.64x200"}), (
        "a quick run is held to the targets of its command line only"
    )
    ways = report["measurements"]["64x200: pack"]
    assert {"one copy", "from ragged", "from padded", "as_nested_tensor of slices", "NumPy loop"} <= set(ways)
    assert ways["one copy"]["ratio"] == 1.0
    assert next(f for f in report["figures"] if f["name"] == "pad.64x200")["target"] == 1e9


def test_a_target_for_no_figure_is_an_error() -> None:
    done = run("planner", "--quick", "--target", "planner.speed=1")
    assert done.returncode == 1
    assert "speed: no such figure; there are: imbalance.4096x8" in done.stderr


@pytest.mark.parametrize("text", ["seconds=1", "codec.pad=1", "planner.seconds=fast", "planner.seconds"])
def test_a_target_is_benchmark_figure_and_number(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected BENCHMARK\.FIGURE=NUMBER, with one of planner"):
        split_targets([text], ["planner"])


def test_a_figure_may_have_dots_in_its_name() -> None:
    assert split_targets(["planner.a.b=2"], ["planner"]) == {"planner": ["a.b=2"]}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--target"], "option '--target' requires an argument; see headrace bench --help"),
        (["speed"], "no benchmark speed; there are: async_overlap, codec, "),
        (["planner", "--target", "x"], "--target x: expected BENCHMARK.FIGURE=NUMBER, with one of planner"),
        (["planner", "--quick", "--save"], "--quick and --save: quick figures are no results to keep; leave"),
    ],
)
def test_a_command_line_that_cannot_be_right_is_one_line(arguments: list[str], expected: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"headrace: error: {expected}")
    assert done.stderr.count("\n") == 1


def test_without_a_checkout_one_line_says_where_to_run(tmp_path: Path) -> None:
    # A copy of the package, as pip installs it: no benchmarks beside it, none below the working directory.
    packages = tmp_path / "lib" / "site-packages"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(headrace.__file__).parent, packages / "headrace", ignore=ignored)
    done = subprocess.run(
        [sys.executable, "-m", "headrace.cli", "bench"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={"PYTHONPATH": str(packages)},
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "no benchmarks in" in line
    assert "run headrace bench in a checkout" in line


def test_all_benchmarks_are_found_and_what_they_share_is_none() -> None:
    names = benchmark_names(find_benchmarks())
    assert {"codec", "imports", "local_store", "planner", "routes", "step"} <= set(names)
    assert not {"run", "cells", "columns", "tables"} & set(names)
    assert set(choose(find_benchmarks(), [])) <= set(names)


def toy(*figures: dict[str, Any], **others: Any) -> dict[str, Any]:
    usual = {"unit": "x", "relation": "at least", "target": 2.0, "note": ""}
    return {"benchmark": "toy", "figures": [{**usual, **figure} for figure in figures], **others}


def test_a_report_is_saved_under_its_name_and_the_table_shows_both_numbers(tmp_path: Path) -> None:
    report = toy(
        {"name": "fast", "figure": 3.0, "ok": True},
        {"name": "slow", "figure": 1.5, "ok": False},
        {"name": "plain", "figure": 12345.6, "target": None, "ok": True},
    )
    assert json.loads(save_report(report, tmp_path).read_text()) == report
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["toy.json"]
    lines = render_text(bench_table([report]), width=100).splitlines()
    assert any("fast" in line and "3 x" in line and "≥ 2" in line and "ok" in line for line in lines)
    assert any("slow" in line and "1.5 x" in line and "≥ 2" in line and "missed" in line for line in lines)
    assert any("plain" in line and "12,346 x" in line and "≥" not in line for line in lines)


def test_a_figure_that_is_not_judged_has_a_target_and_no_verdict() -> None:
    figure = {"name": "slow", "figure": 1.5, "ok": True, "judged": False}
    (line,) = (
        text for text in render_text(bench_table([toy(figure)]), width=80).splitlines() if "slow" in text
    )
    assert "≥ 2" in line
    assert "ok" not in line
    assert missed([toy(figure)]) == []


def test_saved_runs_of_one_processor_are_counted_with_those_that_missed(tmp_path: Path) -> None:
    def save(value: float, processor: str = "a") -> Any:
        figures = (
            {"name": "speed", "figure": value, "ok": value >= 2},
            {"name": "plain", "figure": 1, "target": None, "ok": True},
        )
        path = save_report(toy(*figures, where={"processor": processor}), tmp_path)
        return json.loads(path.read_text()).get("runs")

    assert save(1.0) is None
    assert save(3.0) == {"speed": {"runs": 2, "missed": 1}}
    assert save(1.5) == {"speed": {"runs": 3, "missed": 2}}
    assert save(1.5, processor="b") is None


def test_a_narrow_terminal_folds_names_and_notes_and_keeps_targets_and_verdicts() -> None:
    name, note = (
        "step.packed_faster_than.transformers with bfloat16 weights",
        "what a long note has to say " * 4,
    )
    report = toy({"name": name, "figure": 1.5, "ok": False, "unit": "of the time of eight", "note": note})
    text = render_text(bench_table([report]), width=80)
    assert "1.5 of the time of eight" in text
    assert "≥ 2" in text
    assert "missed" in text
    assert "…" not in text


def test_a_figure_just_beyond_its_target_is_not_shown_as_equal_to_it() -> None:
    figure = {"name": "slower", "figure": 1.0331, "target": 1.03, "relation": "at most", "ok": False}
    text = render_text(bench_table([toy(figure)]), width=100)
    assert "1.033 x" in text
    assert "≤ 1.03 " in text


def test_a_benchmark_that_breaks_is_told_among_the_others_and_keeps_its_older_results(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise SystemExit('no disk')\n")
    report = run_benchmark(tmp_path, "broken")
    assert missed([toy({"name": "slow", "figure": 1.5, "ok": False}), report])[0] == "toy.slow"
    assert "broken: broken failed: no disk. See all of it with: python" in missed([report])[0]
    assert "no disk" in render_text(bench_table([report]), width=100)
    older = tmp_path / "results" / "broken.json"
    older.parent.mkdir()
    older.write_text("{}")
    save_report(report, tmp_path)
    assert older.read_text() == "{}"


def test_one_way_that_fails_among_others_is_missed() -> None:
    report = toy({"name": "fast", "figure": 3.0, "ok": True}, notes={"failed": {"TRL": "OutOfMemoryError"}})
    assert missed([report]) == ["toy: TRL failed: OutOfMemoryError"]


def test_what_cannot_run_here_is_left_out_with_its_need() -> None:
    folder = find_benchmarks()
    absent = left_out(folder)
    assert set(choose(folder, [])) == set(benchmark_names(folder)) - set(absent)
    assert all(absent.values())

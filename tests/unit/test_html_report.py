"""A report in one file: what is in it, how large it gets, and the command that writes it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.dashboard.html_report import STATIC, html_report
from headrace.dashboard.palette import colour
from headrace.dashboard.runs import find_runs
from headrace.report import draw_report, read_metrics
from page_runs import write_long_run


def given(document: str) -> Any:
    (text,) = re.findall(r'<script type="application/json" id="given">(.*?)</script>', document, re.DOTALL)
    return json.loads(text)


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_long_run(tmp_path_factory.mktemp("runs") / "long", 2500, 4)


def test_a_report_of_a_long_run_is_small_and_says_what_it_leaves_out(long_run: Path) -> None:
    document = html_report(find_runs([long_run]))
    assert len(document.encode()) < 3_000_000
    data = given(document)
    assert len(data["runs"][0]["steps"]["steps"]) <= 1000
    assert data["runs"][0]["steps"]["steps"][-1] == 2500
    assert data["note"] == (
        "This file holds curves as means of neighbouring steps, the newest 400 of 10,000 samples."
    )
    assert [len(some) for some in data["samples"]] == [400]
    assert data["samples"][0][0]["step"] == 2500


def test_several_long_runs_share_the_room(long_run: Path) -> None:
    assert len(html_report(find_runs([long_run]) * 4).encode()) < 3_000_000


def test_a_sample_that_has_no_room_hides_none_that_has(tmp_path: Path) -> None:
    run = write_long_run(tmp_path / "run", 3, 1)
    with (run / "samples.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "prompt": "x" * 600_000, "reward": 0.0}) + "\n")
    for runs, steps in ((1, [4, 3, 2, 1]), (2, [3, 2, 1])):
        data = given(html_report(find_runs([run]) * runs))
        assert [[one["step"] for one in some] for some in data["samples"]] == [steps] * runs
    assert data["note"] == (
        "This file holds the newest that fit, 3 of 4 samples of run, the newest that fit, 3 of 4 samples of run."
    )


def test_a_report_names_no_address_and_forbids_itself_any(long_run: Path) -> None:
    document = html_report(find_runs([long_run]))
    assert "default-src 'none'" in document
    assert re.findall(r"(?:src|href)=|url\(|https?:", document.replace("http-equiv", "")) == []
    assert "import " not in document.replace("important", "")


def test_every_module_of_the_page_but_the_live_ones_is_in_the_report(long_run: Path) -> None:
    document = html_report(find_runs([long_run]))
    modules = {path.stem for path in STATIC.glob("*.js")} - {"app"}
    assert set(re.findall(r"^const (\w+)_js = ", document, re.MULTILINE)) == modules


def test_a_text_cannot_end_the_element_that_holds_it(tmp_path: Path) -> None:
    run = write_long_run(tmp_path / "<b>&run", 1, 0)
    line = {"step": 1, "split": "train", "prompt": "</script><script>alert(1)</script>", "reward": 0.0}
    (run / "samples.jsonl").write_text(json.dumps(line) + "\n")
    document = html_report(find_runs([run]))
    assert "<script>alert" not in document
    assert "<title>&lt;b&gt;&amp;run" in document
    assert given(document)["samples"][0][0]["prompt"] == line["prompt"]


def cli(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_the_command_writes_page_pictures_and_tables_and_compares_into_a_page_of_its_own(
    tmp_path: Path,
) -> None:
    first, second = (write_long_run(tmp_path / name, 5, 1) for name in ("a", "b"))
    result = cli(first)
    assert result.exit_code == 0
    assert result.stdout.endswith(f"page: {first}/report.html\n")
    assert (first / "report.png").exists()
    result = cli(first, "--compare", second)
    assert result.stdout == f"page: {first}/compare.html\n"
    assert [run["name"] for run in given((first / "compare.html").read_text())["runs"]] == ["a", "b"]
    assert cli(first, "--output", tmp_path / "x.html").exit_code == 0
    assert (tmp_path / "x.html").exists()


def test_the_page_is_written_where_the_system_writes_ascii(tmp_path: Path) -> None:
    run = write_long_run(tmp_path / "run", 2, 1)
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "headrace", "report", str(run), "--output", str(tmp_path / "page.html")]
    done = subprocess.run(command, env=env, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == html_report(find_runs([run]))


def test_runs_that_are_compared_have_names_that_tell_them_apart(tmp_path: Path) -> None:
    first, second = (write_long_run(tmp_path / name / "seed0", 2, 0) for name in ("a", "b"))
    assert cli(first, "--compare", second).exit_code == 0
    document = (first / "compare.html").read_text(encoding="utf-8")
    assert [run["name"] for run in given(document)["runs"]] == ["a/seed0", "b/seed0"]
    assert "<title>a/seed0 and b/seed0 · headrace</title>" in document


def test_a_report_replaces_nothing_in_a_directory_that_headrace_did_not_make(tmp_path: Path) -> None:
    run, other = (write_long_run(tmp_path / name, 2, 0) for name in ("a", "b"))
    (run / ".headrace-run").unlink()
    for name in ("report.html", "compare.html", "timings.txt", "report.png", "reward.png"):
        (run / name).write_text("mine")
    for arguments in ([run], [run, "--output", tmp_path / "x.html"], [run, "--compare", other]):
        result = cli(*arguments)
        assert result.exit_code == 2
        assert f"{run}: headrace did not make this directory, for it has no .headrace-run" in result.stderr
        assert result.stderr.count("\n") == 1
    assert {path.read_text() for path in run.glob("re*.*")} == {"mine"}
    assert (run / "timings.txt").read_text() == (run / "compare.html").read_text() == "mine"
    assert cli(run, "--compare", other, "--output", tmp_path / "x.html").exit_code == 0


def test_runs_that_are_not_compared_and_none_to_compare_with_are_one_line(tmp_path: Path) -> None:
    first, second = (write_long_run(tmp_path / name, 2, 0) for name in ("a", "b"))
    assert cli(first, second).stderr == (
        "headrace: error: 2 runs; set the first beside the others with --compare, or report each by itself\n"
    )
    assert "--compare needs the directories of other runs" in cli(first, "--compare").stderr
    assert "--compare needs the directories of other runs" in cli(first, "--compare", f"{first}/").stderr
    assert "no such directory" in cli(first, "--compare", tmp_path / "c").stderr
    assert "cannot write it" in cli(first, "--compare", second, "--output", tmp_path / "no" / "x.html").stderr


def test_a_column_has_one_colour_in_every_picture(long_run: Path) -> None:
    axes = draw_report(read_metrics(long_run), "run").get_axes()
    bars = {bar.get_label(): bar[0] for axis in axes for bar in axis.containers}
    drawn = {
        name: "#" + "".join(f"{round(255 * part):02x}" for part in bar.get_facecolor()[:3])
        for name, bar in bars.items()
    }
    assert {"rollout", "train", "input_ids", "advantages"} <= set(drawn)
    assert drawn == {name: colour(name) for name in drawn}
    assert given(html_report(find_runs([long_run])))["runs"][0]["colours"].items() >= drawn.items()

"""A run as pictures read it: columns of its metrics, what is new, and its samples by text and numbers."""

import json
import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.dashboard.html_report import html_report
from headrace.dashboard.palette import CHARTS, MAIN_METRICS, colour
from headrace.dashboard.runs import Cursor, Run, find_runs
from headrace.dashboard.samples import Query
from headrace.dashboard.series import MOST_POINTS, Table
from headrace.errors import ConfigError
from headrace.metric_names import meaning_of
from headrace.utils.run_directory import RunDirectory
from page_runs import LAYERS, sample_of, write_long_run


def open_run(path: Path) -> Run:
    (run,) = find_runs([path])
    run.poll()
    return run


def as_json(value: Any) -> Any:
    """Return what a browser sends back of it."""
    result = json.loads(msgspec.json.encode(value))
    if "cursor" in result:
        result["cursor"] = msgspec.convert(result["cursor"], Cursor)
    return result


def append(path: Path, *records: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(f"{json.dumps(record)}\n" for record in records)


def test_metrics_become_columns_with_holes_where_a_step_has_no_value(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, {"kind": "step", "step": 1, "a": 1.25}, {"kind": "validation", "step": 1, "v": 0.5})
    append(
        path,
        {"kind": "step", "step": 2, "b": 2, "note": "x"},
        {"kind": "step", "step": 3, "a": None, "b": 1e-9},
    )
    payload = open_run(tmp_path).payload()
    assert payload["steps"] == {"steps": [1, 2, 3], "values": {"a": [1.25, None, None], "b": [None, 2, 1e-9]}}
    assert payload["validations"] == {"steps": [1], "values": {"v": [0.5]}}
    assert payload["phases"]["steps"] == []


def test_a_long_series_is_thinned_to_means_with_the_least_and_the_most_of_each_part() -> None:
    rng, table = random.Random(0), Table()
    values = [None if rng.random() < 0.2 else round(rng.random(), 4) for _ in range(1003)]
    for step, value in enumerate(values, start=1):
        table.add(step, {"x": value, "y": float(step)})
    thin = table.payload(["x"], most=100)
    assert thin["every"] == 11
    parts = [values[start : start + 11] for start in range(0, 1003, 11)]
    assert thin["steps"] == [min(start + 11, 1003) for start in range(0, 1003, 11)]
    for place, part in enumerate(parts):
        present = [v for v in part if v is not None]
        assert thin["values"]["x"][place] == pytest.approx(sum(present) / len(present), rel=1e-5)
        assert (thin["low"]["x"][place], thin["high"]["x"][place]) == (min(present), max(present))
    assert list(thin["low"]) == ["x"]
    assert table.payload(most=2000)["values"]["y"] == [float(step) for step in range(1, 1004)]


def grown(data: dict[str, Any], news: dict[str, Any]) -> dict[str, Any]:
    """Return what the page holds once it has heard the news."""
    result = {
        **data,
        **{key: value for key, value in news.items() if key not in ("steps", "validations", "phases")},
    }
    for name in ("steps", "validations", "phases"):
        old, new = data[name], news[name]
        counts = len(old["steps"]), len(new["steps"])
        result[name] = {"steps": old["steps"] + new["steps"], "values": {}}
        for key in {**old["values"], **new["values"]}:
            before, after = ([None] * count for count in counts)
            joined = old["values"].get(key, before) + new["values"].get(key, after)
            result[name]["values"][key] = joined
    return result


def test_what_is_new_since_any_moment_makes_of_that_state_the_present_one(tmp_path: Path) -> None:
    source = write_long_run(tmp_path / "source", 30, 2)
    lines = {name: (source / name).read_bytes() for name in ("metrics.jsonl", "samples.jsonl")}
    target = tmp_path / "run"
    target.mkdir()
    (target / "metrics.jsonl").touch()
    run = open_run(target)
    states = [as_json(run.payload())]
    rng = random.Random(1)
    at = dict.fromkeys(lines, 0)
    while any(at[name] < len(lines[name]) for name in lines):
        for name, text in lines.items():  # cut anywhere, in the middle of a line too
            stop = at[name] + rng.randrange(9000)
            with (target / name).open("ab") as file:
                file.write(text[at[name] : stop])
            at[name] = min(stop, len(text))
        run.poll()
        states.append(as_json(run.payload()))
    assert states[-1]["step"] == 30
    assert states[-1]["samples"]["count"] == 60
    assert run.news(states[-1]["cursor"]) is None
    for state in states[:-1]:
        news = run.news(state["cursor"])
        if news is not None:
            merged = grown(state, as_json(news))
            assert {**merged, "colours": None} == {**states[-1], "colours": None}


@pytest.mark.parametrize("start", [-2_000_000, -1, 0, 2, 3, 4, 10**30])
def test_rows_from_a_number_that_no_row_has_are_those_that_there_are(start: int) -> None:
    table = Table()
    for step in (1, 2, 3):
        table.add(step, {"x": step})
    expected = [step for step in (1, 2, 3) if step > start]
    values = {"x": expected} if expected else {}
    assert table.rows_from(start) == {"steps": expected, "values": values}


def test_who_is_more_rows_behind_than_are_given_whole_reads_the_run_anew(tmp_path: Path) -> None:
    rows = MOST_POINTS + 2
    append(tmp_path / "metrics.jsonl", *({"kind": "step", "step": step, "x": 1.0} for step in range(rows)))
    run = open_run(tmp_path)
    cursor: Cursor = run.payload()["cursor"]
    far, near = run.news({**cursor, "rows": (1, 0, 0)}), run.news({**cursor, "rows": (2, 0, 0)})
    assert far == {"name": run.name, "cursor": cursor, "reload": True}
    assert near is not None
    assert len(near["steps"]["steps"]) == MOST_POINTS


def test_a_run_that_is_continued_from_an_earlier_step_is_read_anew(tmp_path: Path) -> None:
    run = open_run(write_long_run(tmp_path, 20, 1))
    cursor = as_json(run.payload())["cursor"]
    kept = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)[:10]
    fresh = tmp_path / "fresh"
    fresh.write_text("".join(kept))
    os.replace(fresh, tmp_path / "metrics.jsonl")
    run.poll()
    news = run.news(cursor)
    assert news is not None
    assert news["reload"]
    assert run.payload()["steps"]["steps"] == list(range(1, 11))


def test_lines_that_cannot_be_read_are_counted_and_left_out(tmp_path: Path) -> None:
    write_long_run(tmp_path, 3, 1)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind": "step"\n[1]\n\xff\xfe\n{"kind": "step", "step": 4}\n{"kind": "step", "step": 5')
    with (tmp_path / "samples.jsonl").open("ab") as file:
        file.write(b'{"step": "x"}\n')
    payload = open_run(tmp_path).payload()
    assert payload["damaged"] == 4
    assert payload["steps"]["steps"] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("samples.jsonl", b'{"step": 1, "prompt": "\xff"}'),
        ("samples.jsonl", b'{"step": 1, "prompt": "\\ud800"}'),
        ("samples.jsonl", b'{"step": 1' + b"0" * 40 + b"}"),
        ("samples.jsonl", b'{"step": 1, "x": ' + b"[" * 5000 + b"]" * 5000 + b"}"),
        ("samples.jsonl", b'{"step": 1, "x": 1e999}'),
        ("samples.jsonl", b'{"step": 1, "x": ' + b"1" * 5000 + b"}"),
        ("metrics.jsonl", b'{"kind": "step", "step": 1, "x": ' + b"[" * 5000 + b"]" * 5000 + b"}"),
        ("metrics.jsonl", b'{"kind": "step", "step": 1, "x": "\xff"}'),
        ("detail.jsonl", b'{"kind": "store", "step": 3}'),
        ("detail.jsonl", b'{"kind": "store", "step": 3, "partitions": [7]}'),
        (
            "detail.jsonl",
            b'{"kind": "store", "step": 3, "partitions": [{"id": 1, "rows": 1, "columns": [2]}]}',
        ),
        ("detail.jsonl", b'{"kind": "span", "step": 3}'),
        ("detail.jsonl", b'{"kind": "packing", "step": 3, "ranks": 2}'),
        ("detail.jsonl", b'{"kind": "begin", "step": "3"}'),
        ("detail.jsonl", b'{"kind": ["store"], "step": 3}'),
        ("detail.jsonl", b"[3]"),
    ],
    ids=lambda given: given[:48] if isinstance(given, bytes) else given,
)
def test_a_line_that_no_page_can_show_is_counted_and_the_rest_is_shown(
    tmp_path: Path, name: str, line: bytes
) -> None:
    write_long_run(tmp_path, 3, 1)
    with (tmp_path / name).open("ab") as file:
        file.write(line + b"\n")
    append(tmp_path / name, {"kind": "step", "step": 4})
    run = open_run(tmp_path)
    found = run.find(Query(limit=1000))["rows"]
    assert len(found) == 3 + (name == "samples.jsonl")
    document = html_report([run])
    payload = as_json(run.payload())
    assert payload["damaged"] == 1
    assert payload["steps"]["steps"] == [1, 2, 3, *([4] if name == "metrics.jsonl" else [])]
    assert document.encode()


def test_a_number_that_no_page_can_hold_is_left_out(tmp_path: Path) -> None:
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.writelines(
            f'{{"kind": "step", "step": {step}, "x": {"9" * 400}, "y": 1}}\n' for step in range(12)
        )
    assert as_json(open_run(tmp_path).payload(most=4))["steps"]["values"]["y"] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    "text", ['{"note": "\\ud800"}', '{"note": ' + "[" * 5000, '{"n": ' + "1" * 5000 + "}", "\xff"]
)
def test_a_summary_or_recipe_that_cannot_be_read_is_as_one_that_is_not_there(
    tmp_path: Path, text: str
) -> None:
    write_long_run(tmp_path, 2, 0)
    for name in ("summary.json", "config.yaml"):
        (tmp_path / name).write_bytes(text.encode("latin-1"))
    payload = as_json(open_run(tmp_path).payload())
    assert (payload["summary"], payload["steps"]["steps"]) == (None, [1, 2])


def test_a_folder_whose_name_is_no_text_is_shown_with_a_mark(tmp_path: Path) -> None:
    (run,) = find_runs([write_long_run(tmp_path / os.fsdecode(b"gr\xf6sse"), 2, 1)])
    assert run.name == "gr\ufffdsse"
    assert as_json(run.payload())["path"].endswith("/gr\ufffdsse")
    assert html_report([run]).encode()


def test_samples_of_a_file_that_is_gone_since_it_was_read_are_none(tmp_path: Path) -> None:
    run = open_run(write_long_run(tmp_path, 2, 1))
    (tmp_path / "samples.jsonl").write_text("")
    assert run.find(Query())["rows"] == []
    (tmp_path / "samples.jsonl").unlink()
    assert run.find(Query())["rows"] == []


@contextmanager
def without_rights() -> Iterator[Path]:
    """Give a folder to write in, and be somebody for whom modes count: root is nobody within it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        os.chmod(name, 0o777)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            yield Path(name)
        finally:
            os.seteuid(user)


def test_a_folder_and_a_file_that_may_not_be_read_hide_nothing_else() -> None:
    with without_rights() as folder:
        seen = write_long_run(folder / "seen", 2, 1)
        closed = [write_long_run(folder / name, 2, 1) for name in ("no_entry", "no_list", "none")]
        (folder / "link").symlink_to(closed[0] / "x")
        modes = (0o600, 0o300, 0o000)
        try:
            for path, mode in zip(closed, modes):
                path.chmod(mode)
            (seen / "samples.jsonl").chmod(0)
            found = find_runs([folder])
            assert [run.name for run in found] == ["no_list", "seen"]
            for run in found:
                run.poll()
                assert run.payload()["steps"]["steps"] == [1, 2]
            assert found[1].find(Query())["rows"] == []
            with pytest.raises(ConfigError, match="no run there"):
                find_runs([closed[2]])
        finally:
            for path in closed:
                path.chmod(0o700)


def naive(samples: list[dict[str, Any]], query: Query) -> list[str]:
    def texts(one: dict[str, Any]) -> list[str]:
        return [one["sample_id"], one["expected"], *(message["content"] for message in one["messages"])]

    verdicts = {
        "any": lambda one: True,
        "right": lambda one: one["correct"],
        "wrong": lambda one: not one["correct"],
    }
    verdicts["cut"] = lambda one: one["truncated"]
    found = [
        one
        for one in samples
        if any(query.text.lower() in text.lower() for text in texts(one))
        and verdicts[query.verdict](one)
        and query.min_reward <= one["reward"] <= query.max_reward
        and query.first_step <= one["step"] <= query.last_step
    ]
    orders = {"newest": -1, "oldest": 1}
    if query.sort in orders:
        return [one["sample_id"] for one in found][:: orders[query.sort]]
    return [
        one["sample_id"]
        for one in sorted(found, key=lambda one: one["reward"] * (1 if query.sort == "lowest" else -1))
    ]


QUERIES = [
    Query(),
    Query(text="turbine"),
    Query(text="TURBINE Stone"),
    Query(text="größe"),
    Query(text="GRÖßE"),
    Query(text="naïve stone"),
    Query(text='"water'),
    Query(text="\nbackward"),
    Query(text="12"),
    Query(text="reward"),
    Query(text="content"),
    Query(text="train"),
    Query(text="user"),
    Query(text="e"),
    Query(text="水車"),
    Query(text="%_\\"),
    Query(verdict="right", min_reward=1.1),
    Query(verdict="wrong", max_reward=0.1, sort="lowest"),
    Query(verdict="cut", first_step=5, last_step=9, sort="highest"),
    Query(text="mill", sort="oldest", verdict="wrong"),
]


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[dict[str, Any]]]:
    path = write_long_run(tmp_path_factory.mktemp("searched"), 15, 20)
    rng = random.Random(2)
    strange = {**sample_of(16, 0, rng), "expected": "水車 %_\\ reward"}
    with (path / "samples.jsonl").open("a") as file:
        file.write(json.dumps(strange, ensure_ascii=False) + "\n")
    samples = [json.loads(line) for line in (path / "samples.jsonl").read_text().splitlines()]
    return open_run(path), samples


@pytest.mark.parametrize("query", QUERIES, ids=repr)
def test_samples_are_found_as_by_looking_at_each(
    searched: tuple[Run, list[dict[str, Any]]], query: Query
) -> None:
    run, samples = searched
    found = run.find(replace(query, limit=1000))
    assert [one["sample_id"] for one in found["rows"]] == naive(samples, query)
    assert found["matching"] == len(found["rows"])
    assert found["total"] == len(samples)


def test_samples_come_in_parts(searched: tuple[Run, list[dict[str, Any]]]) -> None:
    run, _ = searched
    whole = run.find(Query(text="mill", limit=1000))["rows"]
    parts = [run.find(Query(text="mill", offset=start, limit=7))["rows"] for start in range(0, len(whole), 7)]
    assert [one for part in parts for one in part] == whole


def test_samples_of_a_writer_of_ones_own_are_shown_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    append(
        tmp_path / "samples.jsonl",
        {"step": 1, "split": "mine", "prompt": "spell abc", "answer": "cba", "reward": 1.0},
    )
    run = open_run(tmp_path)
    assert run.find(Query(text="CBA", split="mine"))["matching"] == 1
    assert run.find(Query(split="other"))["matching"] == 0


def test_runs_are_found_below_a_folder_and_named_by_what_tells_them_apart(tmp_path: Path) -> None:
    for name in ("a/seed0", "b/seed0", "b/seed1"):
        write_long_run(tmp_path / name, 1, 0)
    assert [run.name for run in find_runs([tmp_path])] == ["a/seed0", "b/seed0", "b/seed1"]
    assert [run.name for run in find_runs([tmp_path / "b", tmp_path / "b" / "seed0"])] == ["seed0", "seed1"]


def test_a_folder_without_runs_and_one_that_is_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path}: no run there; give the directory of a run"):
        find_runs([tmp_path])
    with pytest.raises(ConfigError, match=f"{tmp_path}/x: no such directory"):
        find_runs([tmp_path / "x"])


def long_ago(path: Path) -> None:
    for file in path.glob("*.jsonl"):
        os.utime(file, (1_000_000_000, 1_000_000_000))


def test_a_run_is_finished_by_its_summary_and_running_while_its_process_has_the_directory(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run"
    with RunDirectory.open(path, recipe_text=""):
        run = open_run(write_long_run(path, 2, 0))
        assert run.payload()["state"] == "running"
        long_ago(path)
        assert run.payload()["state"] == "running"
    assert run.payload()["state"] == "stopped"
    RunDirectory.open(path, recipe_text="", overwrite=True).close()  # who asked has let go of the lock
    (path / "summary.json").write_text('{"completed": true}')
    assert run.payload()["state"] == "finished"


def test_a_run_whose_process_is_dead_has_stopped_although_its_number_lives_on(tmp_path: Path) -> None:
    run = open_run(write_long_run(tmp_path, 2, 0))
    long_ago(tmp_path)
    for process in (os.getpid(), 1):
        (tmp_path / ".headrace-lock").write_text(f"{process}\n")
        assert run.payload()["state"] == "stopped"


def test_where_there_are_no_locks_a_run_goes_on_while_a_process_of_its_number_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.utils.file_lock.fcntl", None)
    run = open_run(write_long_run(tmp_path, 2, 0))
    long_ago(tmp_path)
    for text, state in (
        (f"{os.getpid()}\n", "running"),
        ("0\n", "stopped"),
        ("9" * 30, "stopped"),
        ("", "stopped"),
    ):
        (tmp_path / ".headrace-lock").write_text(text)
        assert run.payload()["state"] == state


def test_the_first_charts_are_of_metrics_that_are_documented_and_every_name_has_a_colour() -> None:
    assert all(meaning_of(name) != name for name in MAIN_METRICS)
    assert all(len(chart.names) == len(chart.labels) for chart in CHARTS)
    assert len({colour(f"router_replay/exact_layer_{i}") for i in range(LAYERS)}) == LAYERS
    assert colour("rollout") == "#4477aa"

"""The live page's server as a browser sees it: what it answers, to whom, and what it tells while a run grows."""

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.dashboard.runs import find_runs
from headrace.dashboard.server import make_app, read_query, serve
from headrace.errors import ConfigError
from page_runs import write_long_run

TOKEN = "a-token~of_some.length"


def listening(*args: Any, **kwargs: Any) -> int:
    """Serve in a thread that ends with the process; return the port."""
    ports: list[int] = []
    ready = threading.Event()

    def started(port: int) -> None:
        ports.append(port)
        ready.set()

    threading.Thread(
        target=serve, args=(make_app(*args, **kwargs), "127.0.0.1", 0, started), daemon=True
    ).start()
    assert ready.wait(20)
    return ports[0]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_long_run(tmp_path_factory.mktemp("runs") / "run", 12, 4)


@pytest.fixture(scope="module")
def port(run_dir: Path) -> int:
    return listening(find_runs([run_dir]))


@pytest.fixture(scope="module")
def guarded_port(run_dir: Path) -> int:
    return listening(find_runs([run_dir]), token=TOKEN)


def ask(port: int, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(
        "GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )
    answer = connection.getresponse()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


def status_of(port: int, path: str, **headers: str) -> int:
    """Return the status alone: news of runs have no end."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    with closing(connection):
        connection.request(
            "GET", path, headers={name.replace("_", "-"): text for name, text in headers.items()}
        )
        return connection.getresponse().status


def ask_json(port: int, path: str) -> Any:
    status, _, body = ask(port, path)
    assert status == 200, body
    return json.loads(body)


def events_path(rows: list[int]) -> str:
    cursor = {"version": 1, "rows": rows, "samples": 0, "detail": 0, "state": ""}
    return f"/api/events?cursors={quote(json.dumps({0: cursor}))}"


def test_the_page_and_its_parts_are_served_under_rules_that_run_no_other_code(port: int) -> None:
    status, headers, body = ask(port, "/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert b"app.js" in body
    assert "default-src 'self'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    for name, kind in (
        ("app.js", "text/javascript"),
        ("style.css", "text/css"),
        ("icon.svg", "image/svg+xml"),
    ):
        status, headers, _ = ask(port, f"/{name}")
        assert (status, headers["content-type"].partition(";")[0]) == (200, kind)


def test_a_run_and_its_samples_are_json(port: int) -> None:
    assert ask_json(port, "/api/about")["runs"] == ["run"]
    run = ask_json(port, "/api/runs/0")
    assert run["steps"]["steps"] == list(range(1, 13))
    assert run["samples"] == {"count": 48, "splits": ["train"]}
    found = ask_json(port, "/api/runs/0/samples?text=g3&sort=oldest&limit=2")
    assert (found["matching"], [one["sample_id"] for one in found["rows"]]) == (
        12,
        ["p1@1.0_g3", "p2@2.0_g3"],
    )


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/api/runs/1", 404, b"there is no run 1"),
        ("/api/runs/0/samples?limit=x", 400, b"int"),
        ("/api/runs/0/samples?sort=best", 400, b"best"),
        ("/api/runs/0/samples?offset=-1", 400, b"at least 0"),
        ("/api/runs/0/samples?min_reward=nan", 400, b"numbers"),
        ("/api/events?cursors=[", 400, b"cursors"),
        ("/api/events?cursors=%7B%220%22%3A1%7D", 400, b"cursors"),
        (events_path(rows=[-2_000_000, 0, 0]), 400, b"cursors"),
        (events_path(rows=[0, 0, -1]), 400, b"cursors"),
        (events_path(rows=[0, 0]), 400, b"cursors"),
        (f"/api/runs/0/samples?limit={'9' * 5000}", 400, b"out of range"),
        (f"/api/runs/{'9' * 5000}", 404, b"there is no run 999"),
        ("/api/runs/-1", 404, b"there is no run -1"),
        ("/api/nothing", 404, b"Not Found"),
        ("/../pyproject.toml", 404, b"Not Found"),
    ],
)
def test_a_request_that_makes_no_sense_gets_its_reason(
    port: int, path: str, status: int, said: bytes
) -> None:
    got, _, body = ask(port, path)
    assert got == status
    assert said in body


def test_a_request_asks_for_two_hundred_samples_at_most() -> None:
    assert read_query({"limit": "100000", "min_reward": "0.5"}).limit == 200


def test_without_a_token_it_answers_under_this_machines_names_only(port: int) -> None:
    for host in (f"localhost:{port}", "127.0.0.1", "[::1]:99"):
        assert ask(port, "/", Host=host)[0] == 200
    for host in ("evil.example", f"evil.example:{port}", "localhost.evil.example"):
        status, _, body = ask(port, "/api/about", Host=host)
        assert status == 403
        assert b"--token" in body


def test_numbers_of_any_size_in_a_question_about_samples_are_answered(port: int) -> None:
    huge = "9" * 30
    for query in (
        f"offset={huge}",
        f"first_step={huge}",
        f"last_step=-{huge}",
        "min_reward=1e308&max_reward=-1e308",
    ):
        assert ask_json(port, f"/api/runs/0/samples?{query}")["rows"] == []
    assert (
        ask_json(port, f"/api/runs/0/samples?last_step={huge}&first_step=-{huge}&limit={huge}")["matching"]
        == 48
    )


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site", "Sec_Fetch_Mode": "cors"},
        {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors"},
        {"Origin": "http://elsewhere.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:1"},
    ],
    ids=str,
)
def test_another_page_of_the_browser_may_link_to_this_one_and_asks_for_nothing(
    port: int, guarded_port: int, headers: dict[str, str]
) -> None:
    for number, given in ((port, ""), (guarded_port, f"?token={TOKEN}")):
        for path in (
            "/",
            "/app.js",
            "/api/about",
            "/api/runs/0",
            "/api/runs/0/samples",
            "/api/events",
            "/%61pi/about",
        ):
            assert status_of(number, path + given, **headers) == 403
        for path in ("/api/about", "/api/events", "/%61pi/events"):  # as in a frame
            assert status_of(number, path + given, **{**headers, "Sec_Fetch_Mode": "navigate"}) == 403
        assert status_of(number, f"/{given}", **{**headers, "Sec_Fetch_Mode": "navigate"}) in (200, 303)


def test_the_page_itself_may_ask_for_everything(port: int) -> None:
    for own in (
        {"Sec_Fetch_Site": "same-origin", "Sec_Fetch_Mode": "cors"},
        {"Sec_Fetch_Site": "none", "Sec_Fetch_Mode": "navigate"},
        {"Origin": f"http://127.0.0.1:{port}"},
    ):
        assert ask(port, "/api/about", **own)[0] == 200


def test_with_a_token_nothing_is_told_to_who_has_none(guarded_port: int) -> None:
    for path in (
        "/",
        "/api/about",
        "/api/runs/0",
        "/api/events",
        "/app.js",
        "/?token=wrong",
        "/?token=%C3%A9",
    ):
        status, _, body = ask(guarded_port, path)
        assert status == 401
        assert body == b"a token is needed: open the address that headrace dashboard has printed\n"


def test_a_token_in_the_address_becomes_a_cookie_and_leaves_the_address(guarded_port: int) -> None:
    status, headers, _ = ask(guarded_port, f"/?token={TOKEN}", Host="elsewhere.example")
    assert (status, headers["location"]) == (303, "/")
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert (
        ask(guarded_port, "/api/about", Cookie=cookie.partition(";")[0], Host="elsewhere.example")[0] == 200
    )


@pytest.mark.parametrize(
    ("path", "address"),
    [
        ("//elsewhere.example/?token={}", "/elsewhere.example/"),
        ("///elsewhere.example?token={}", "/elsewhere.example"),
        ("/%2F/elsewhere.example?token={}", "/elsewhere.example"),
        ("/\\elsewhere.example?token={}", "/%5Celsewhere.example"),
        ("/?run=a%2Fseed0&token={}&run=b%26c%0D%0Ax", "/?run=a%2Fseed0&run=b%26c%0D%0Ax"),
    ],
)
def test_the_token_alone_leaves_the_address_and_no_other_host_is_gone_to(
    guarded_port: int, path: str, address: str
) -> None:
    status, headers, _ = ask(guarded_port, path.format(TOKEN))
    assert (status, headers["location"]) == (303, address)


def test_dashboards_of_one_host_have_a_cookie_each(guarded_port: int) -> None:
    hosts = (f"localhost:{guarded_port}", "localhost:1", "[::1]:2", "localhost")
    cookies = [
        ask(guarded_port, f"/?token={TOKEN}", Host=host)[1]["set-cookie"].partition(";")[0] for host in hosts
    ]
    assert len(set(cookies)) == len(hosts)
    for host, cookie in zip(hosts, cookies):
        assert ask(guarded_port, "/api/about", Host=host, Cookie="; ".join(cookies))[0] == 200
        assert ask(guarded_port, "/api/about", Host=host, Cookie=cookie)[0] == 200
        assert ask(guarded_port, "/api/about", Host="localhost:3", Cookie=cookie)[0] == 401


def events(port: int, cursors: dict[int, Any]) -> Iterator[dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", f"/api/events?cursors={quote(json.dumps(cursors))}")
    answer = connection.getresponse()
    assert answer.getheader("content-type", "").startswith("text/event-stream")
    while line := answer.readline():
        if line.startswith(b"data: "):
            yield json.loads(line.removeprefix(b"data: "))
    connection.close()


def test_a_listener_hears_what_a_growing_run_appends(tmp_path: Path) -> None:
    run = write_long_run(tmp_path / "run", 3, 1)
    port = listening(find_runs([run]))
    heard = events(port, {0: ask_json(port, "/api/runs/0")["cursor"]})
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 4, "reward/mean": 0.75}\n')
    news = next(heard)
    assert (news["run"], news["step"], news["steps"]) == (
        0,
        4,
        {"steps": [4], "values": {"reward/mean": [0.75]}},
    )
    (run / "summary.json").write_text('{"completed": true}')
    later = next(heard)
    assert (later["state"], later["steps"]["steps"]) == ("finished", [])


def test_an_idle_listener_costs_under_two_seconds_of_processor_time_a_minute(tmp_path: Path) -> None:
    write_long_run(tmp_path / "run", 2000, 1)
    code = (
        "import sys, time, threading; from pathlib import Path\n"
        "from headrace.dashboard.runs import find_runs; from headrace.dashboard.server import make_app, serve\n"
        "def tell():\n"
        "    for _ in sys.stdin: print(time.process_time(), flush=True)\n"
        "threading.Thread(target=tell, daemon=True).start()\n"
        f"serve(make_app(find_runs([Path({str(tmp_path)!r})])), '127.0.0.1', 0, lambda port: print(port, flush=True))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def used_s() -> float:
            assert process.stdin is not None
            assert process.stdout is not None
            print(file=process.stdin, flush=True)
            return float(process.stdout.readline())

        try:
            port = int(process.stdout.readline())
            heard = events(port, {0: ask_json(port, "/api/runs/0")["cursor"]})
            threading.Thread(target=next, args=(heard, None), daemon=True).start()
            before = used_s()
            threading.Event().wait(3)
            assert (used_s() - before) * 60 / 3 < 2
        finally:
            process.terminate()


def test_listeners_beyond_the_most_are_refused_until_others_go(run_dir: Path) -> None:
    port = listening(find_runs([run_dir]))
    connections = [http.client.HTTPConnection("127.0.0.1", port, timeout=20) for _ in range(210)]
    answers = []
    for connection in connections:
        connection.request("GET", "/api/events")
        answers.append(connection.getresponse().status)
    assert answers == [200] * answers.count(200) + [503] * answers.count(503)
    assert 100 < answers.count(200) < 210
    for connection in connections:
        connection.close()
    for _ in range(100):
        if ask(port, "/api/about")[0] == 200:
            return
        time.sleep(0.1)
    pytest.fail("the server still refuses")


def cli(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_a_port_that_is_taken_and_a_run_that_is_not_there_are_one_line(run_dir: Path, port: int) -> None:
    result = cli("dashboard", run_dir, "--port", port)
    assert result.exit_code == 2
    assert result.stderr == (
        f"headrace: error: --host 127.0.0.1 --port {port}: Address already in use; give another --port, or 0 for a "
        "free one\n"
    )
    assert "no such directory" in cli("dashboard", run_dir / "nowhere").stderr


@pytest.mark.parametrize("host", ["203.0.113.77", "nowhere.invalid"])
def test_a_host_that_is_not_this_machine_s_is_told_as_such(run_dir: Path, host: str) -> None:
    line = cli("dashboard", run_dir, "--host", host, "--port", 0).stderr
    assert line.startswith(f"headrace: error: --host {host} --port 0: ")
    assert line.endswith("; give an address of this machine as --host\n")


@pytest.mark.parametrize("token", ["", " ", "ключ", "a&b#c é", "a b", "a\n", "a;b", "a%20b"])
def test_a_token_that_lets_everybody_in_or_that_no_address_carries_is_refused_before_the_page_is_served(
    run_dir: Path, port: int, token: str
) -> None:
    with pytest.raises(ConfigError, match="--token"):
        make_app(find_runs([run_dir]), token=token)
    # The port is taken: nothing is served even where the token passes.
    result = cli("dashboard", run_dir, "--port", port, "--host", "127.0.0.1", "--token", token)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith(f"headrace: error: --token {token!r}: expected letters of ASCII")


def test_the_command_prints_an_address_with_a_token_where_others_reach_it_and_ends_by_ctrl_c(
    run_dir: Path,
) -> None:
    env = {name: value for name, value in os.environ.items() if name != "HEADRACE_DASHBOARD_TOKEN"}
    command = [
        sys.executable,
        "-m",
        "headrace",
        "dashboard",
        str(run_dir),
        "--port",
        "0",
        "--host",
        "127.0.0.2",
    ]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=env) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("1 run at http://127.0.0.2:")
        assert "/?token=" in line
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        assert (out, err, process.returncode) == ("", "", 0)

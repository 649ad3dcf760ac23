"""What clients of a transfer_queue store see when one of its processes dies."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs headrace[ray]")

TESTS = Path(__file__).parent.parent
TIMEOUT_S = 4.0
# On a machine with more work than cores, answers come late, but not this late.
SLACK_S = 6.0


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """What happened after each death; a process that died, and so on, in one run of the script."""
    done = subprocess.run(
        [sys.executable, str(TESTS / "transfer_queue_faults.py")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("REPORT")]
    assert lines, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("REPORT"))
    return result


@pytest.mark.parametrize(
    ("victim", "operation"),
    [
        ("storage", "put"),
        ("storage", "get"),
        ("controller", "put"),
        ("index", "put"),
        ("index", "get"),
        ("index", "claim"),
        ("index", "clear"),
    ],
)
def test_a_call_that_needs_a_dead_process_is_a_transport_error_in_time(
    report: dict[str, Any], victim: str, operation: str
) -> None:
    seen = report[victim]["seen"][operation]
    assert seen["outcome"] == "TransportError", seen
    assert seen["seconds"] < TIMEOUT_S + SLACK_S


def test_the_error_names_the_operation_and_the_knob(report: dict[str, Any]) -> None:
    assert "putting 1 blocks" in report["storage"]["seen"]["put"]["message"]
    assert "fetching 1 blocks" in report["storage"]["seen"]["get"]["message"]
    assert "data_plane.timeout_s" in report["storage"]["seen"]["get"]["message"]
    assert "operation 'claim'" in report["index"]["seen"]["claim"]["message"]


def test_reads_go_on_without_the_controller(report: dict[str, Any]) -> None:
    assert report["controller"]["seen"]["get"]["outcome"] == "ok"


def test_nothing_hangs_at_the_end(report: dict[str, Any]) -> None:
    for death in report.values():
        assert all(seen["seconds"] < 30 for seen in death["seen"].values())
        assert death["seen"]["close"]["outcome"] == "ok"


def test_no_process_is_left(report: dict[str, Any]) -> None:
    left = [pid for death in report.values() for pid in death["pids"] if Path(f"/proc/{pid}").exists()]
    assert left == []

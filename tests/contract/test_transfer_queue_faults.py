"""What clients of a transfer_queue store see when one of its processes dies."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs headrace[ray]")

# The script starts several stores: half a minute on two idle cores, minutes on busy ones.
SCRIPT_S = 540.0
pytestmark = pytest.mark.timeout(SCRIPT_S + 60)

TESTS = Path(__file__).parent.parent
# Of the script's config. A death is noticed by asking Ray, long before an operation times out.
TIMEOUT_S = 30.0
NOTICED_S = 10.0


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """What happened after each death; a process that died, and so on, in one run of the script."""
    done = subprocess.run(
        [sys.executable, str(TESTS / "transfer_queue_faults.py")],
        capture_output=True,
        text=True,
        timeout=SCRIPT_S,
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
        ("second index", "put"),
        ("second index", "get"),
        ("second index", "claim"),
        ("second index", "clear"),
    ],
)
def test_a_call_that_needs_a_dead_process_is_a_transport_error_in_time(
    report: dict[str, Any], victim: str, operation: str
) -> None:
    seen = report[victim]["seen"][operation]
    assert seen["outcome"] == "TransportError", seen
    assert seen["seconds"] < NOTICED_S < TIMEOUT_S


@pytest.mark.parametrize("victim", ["index", "second index"])
def test_a_claim_that_waits_when_an_index_dies_is_a_transport_error(
    report: dict[str, Any], victim: str
) -> None:
    (seen,) = report[victim]["waited"]
    assert seen["outcome"] == "TransportError", seen
    assert seen["seconds"] < TIMEOUT_S
    assert "the index" in seen["message"] if victim == "index" else "index 1 of 2" in seen["message"]


def test_the_error_names_the_operation_and_the_process(report: dict[str, Any]) -> None:
    storage = report["storage"]["seen"]
    assert re.match(r"putting 2 blocks .*: storage unit 1 of 2 at [\d.]+ has died", storage["put"]["message"])
    assert re.match(
        r"fetching 2 blocks .*: storage unit 1 of 2 at [\d.]+ has died", storage["get"]["message"]
    )
    controller = report["controller"]["seen"]["put"]["message"]
    assert re.match(r"putting 2 blocks .*: TransferQueue's controller has died", controller)
    assert "operation 'claim'" in report["index"]["seen"]["claim"]["message"]


@pytest.mark.parametrize(("operation", "doing"), [("put", "putting"), ("get", "fetching")])
def test_a_client_of_another_ray_job_notices_the_death_of_a_storage_unit_in_time(
    report: dict[str, Any], operation: str, doing: str
) -> None:
    seen = report["storage"]["seen by another job"][operation]
    assert seen["outcome"] == "TransportError", seen
    assert re.match(rf"{doing} 2 blocks .*: storage unit 1 of 2 at [\d.]+ has died", seen["message"])
    assert seen["seconds"] < NOTICED_S < TIMEOUT_S


@pytest.mark.parametrize("victim", ["storage", "controller"])
def test_a_loss_that_was_told_is_remembered_and_adds_no_wait_and_no_error_to_a_clear(
    report: dict[str, Any], victim: str
) -> None:
    seen = report[victim]["seen"]
    assert seen["clear"]["outcome"] == "ok"
    assert seen["clear"]["seconds"] < 1.0
    assert seen["close"]["seconds"] < NOTICED_S
    if victim == "storage":
        assert seen["get"]["seconds"] < 1.0, "the put has found out"


def test_reads_go_on_without_the_controller(report: dict[str, Any]) -> None:
    assert report["controller"]["seen"]["get"]["outcome"] == "ok"


def test_a_start_that_takes_too_long_names_the_knob_that_governs_it_and_leaves_nothing(
    report: dict[str, Any],
) -> None:
    seen = report["slow start"]["seen"]["start"]
    assert seen["outcome"] == "TransportError"
    assert "no answer within 0.5 s" in seen["message"]
    assert seen["message"].endswith("raise data_plane.startup_timeout_s")
    assert seen["seconds"] < NOTICED_S


def test_nothing_hangs_at_the_end(report: dict[str, Any]) -> None:
    for death in (report[victim] for victim in ("storage", "controller", "index", "second index")):
        assert all(seen["seconds"] < 30 for seen in death["seen"].values())
        assert death["seen"]["close"]["outcome"] == "ok"


def test_no_process_is_left(report: dict[str, Any]) -> None:
    left = [pid for death in report.values() for pid in death["pids"] if Path(f"/proc/{pid}").exists()]
    assert left == []

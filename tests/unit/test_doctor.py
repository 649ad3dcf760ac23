"""What the doctor finds on the machine that runs the tests."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

import headrace
from headrace.doctor import Check, doctor_table, run_checks
from headrace.run_tables import render_text


def checks_by_name() -> dict[str, Check]:
    return {check.name: check for check in run_checks()}


def test_versions_are_those_of_the_installed_packages() -> None:
    checks = checks_by_name()
    assert checks["headrace"].detail.startswith(headrace.__version__)
    for name in ("torch", "tensordict", "msgspec", "transformers"):
        assert checks[name].state == "ok"
        assert checks[name].detail.startswith(metadata.version(name))


def test_a_package_that_is_not_installed_is_missing_with_a_remedy() -> None:
    checks = checks_by_name()
    for name in ("flash-attn",):
        installed = any(d.metadata["Name"] == name for d in metadata.distributions())
        assert (checks[name].state == "ok") == installed
        assert checks[name].remedy == ("" if installed else f"pip install {name}")


def test_what_this_headrace_has_no_code_for_is_unused() -> None:
    source = Path(headrace.__file__).parent
    state = checks_by_name()["sglang"].state
    assert (state == "unused") == (not (source / "models/generation/sglang.py").exists())


def test_devices_are_those_of_torch() -> None:
    checks = checks_by_name()
    gpus = [name for name in checks if name.startswith("cuda:")]
    assert len(gpus) == torch.cuda.device_count()
    assert ("cuda" in checks) == (not gpus)
    assert checks["packed attention"].state == "ok"


def test_every_state_that_is_not_ok_says_what_to_do() -> None:
    for check in run_checks():
        assert check.state in ("ok", "unused") or check.remedy, check


def test_the_table_fits_a_terminal_and_has_every_check() -> None:
    checks = run_checks()
    text = render_text(doctor_table(checks), width=100)
    assert max(map(len, text.splitlines())) <= 100
    assert all(check.name in text for check in checks)


CACHE_OF_TWO_HOMES = """
import os, sys
from headrace.doctor import run_checks
for home in sys.argv[1:]:
    os.environ["HOME"] = home
    print(*[(c.state, c.detail, c.remedy) for c in run_checks() if c.name == "model cache"])
"""


def test_a_cache_that_can_be_made_is_ok_and_one_that_cannot_a_warning(tmp_path: Path) -> None:
    home = tmp_path / "home"
    command = [sys.executable, "-c", CACHE_OF_TWO_HOMES, str(home), "/proc"]
    made, refused = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert made.startswith("('ok'")
    assert not home.exists()
    assert refused.startswith("('warning', '/proc/.cache/headrace")
    assert "set policy.model.cache_dir" in refused

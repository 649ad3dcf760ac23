"""The package as a user has it: a wheel, built once per test session, installed in a folder of its own."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
from filelock import FileLock

_CHECKOUT = Path(__file__).parents[1]
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


# Of one process, which imports once what takes seconds; each command's streams are kept apart.
_EACH = """
import contextlib, io, json, runpy, sys
from headrace.cli import main

done = []
for command in json.loads(sys.argv[1]):
    out, err, code = io.StringIO(), io.StringIO(), 0
    sys.argv = command
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main() if command[0] == "headrace" else runpy.run_path(command[0], run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
    done.append([code, out.getvalue(), err.getvalue()])
with open(RESULTS, "w") as file:
    json.dump(done, file)
"""


class Done(NamedTuple):
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class InstalledWheel:
    """The wheel, and the folder that it is installed in; nothing of the checkout is on the path of its processes."""

    path: Path
    site: Path

    @property
    def env(self) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": str(self.site),
            "PATH": f"{self.site / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        }

    def python(
        self, *arguments: str | Path, cwd: Path, env: Mapping[str, str] | None = None, timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run Python in the folder `cwd`; the caller looks at the exit code."""
        return self._run([sys.executable, *map(str, arguments)], cwd, env, timeout_s)

    def headrace(
        self, *arguments: str | Path, cwd: Path, env: Mapping[str, str] | None = None, timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run the script `headrace` in the folder `cwd`; the caller looks at the exit code."""
        return self._run([str(self.site / "bin" / "headrace"), *map(str, arguments)], cwd, env, timeout_s)

    def each(
        self,
        *commands: Sequence[str],
        cwd: Path,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 280,
    ) -> list[Done]:
        """Run commands (`headrace` and arguments, or a Python file) in the folder `cwd`, all in one process."""
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder) / "results.json"
            code = _EACH.replace("RESULTS", repr(str(results)))
            done = self.python("-c", code, json.dumps(commands), cwd=cwd, env=env, timeout_s=timeout_s)
            assert done.returncode == 0, done.stderr
            return [Done(*one) for one in json.loads(results.read_text())]

    def _run(
        self, command: list[str], cwd: Path, env: Mapping[str, str] | None, timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=cwd,
            env={**self.env, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )


@pytest.fixture(scope="session")
def installed_wheel(tmp_path_factory: pytest.TempPathFactory) -> InstalledWheel:
    """The wheel of this checkout; the first of the processes that run the tests builds it, which takes seconds."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "wheel"
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            _build(folder)
            (folder / "done").touch()
    (path,) = folder.glob("*.whl")
    return InstalledWheel(path, folder / "site")


def _build(folder: Path) -> None:
    # From a copy: what a build leaves behind stays out of the checkout, and what lies there out of the wheel.
    source = folder / "source"
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
    shutil.copytree(_CHECKOUT / "src", source / "src", ignore=skip)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(_CHECKOUT / name, source)
    alone = ("--no-deps", "--no-index")
    build = [*_PIP, "wheel", *alone, "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(build, env=env, check=True)
    (path,) = folder.glob("*.whl")
    subprocess.run(
        [*_PIP, "install", *alone, "--target", str(folder / "site"), str(path)], env=env, check=True
    )

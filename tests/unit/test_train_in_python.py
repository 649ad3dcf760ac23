"""`headrace.train` and worker processes, called by a script of the user's own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.errors import ConfigError

UNGUARDED = """
from group_worker import GroupWorker
from headrace.distributed.topology import lay_out_ranks
from headrace.distributed.worker_groups import RankSettings, SpawnWorkerGroup, WorkerSpec

print("the script runs", flush=True)
settings = RankSettings(threads=1, timeout_s=60.0)
SpawnWorkerGroup(WorkerSpec(GroupWorker), lay_out_ranks(2), settings=settings).shutdown()
"""
OWN_WORKER = UNGUARDED.replace(
    "print(", "class Own(GroupWorker): pass\nif __name__ == '__main__': print("
).replace(
    "SpawnWorkerGroup(WorkerSpec(GroupWorker)", "if __name__ == '__main__': SpawnWorkerGroup(WorkerSpec(Own)"
)


@pytest.mark.parametrize(
    "script", [UNGUARDED, OWN_WORKER], ids=["without a guard", "with workers of its own"]
)
def test_worker_processes_do_not_run_the_script_that_starts_them(tmp_path: Path, script: str) -> None:
    (tmp_path / "train.py").write_text(script)
    places = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, **places},
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "the script runs\n"), done.stderr


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"recipe": None}, "recipe=None; expected a file, the name of a recipe, a mapping"),
        ({"recipe": ["a.yaml"]}, "recipe=.'a.yaml'.; expected a file"),
        ({"overrides": "seed=1"}, "overrides='seed=1'; expected a list of 'key=value'"),
        ({"overrides": {"seed": 1}}, "expected a list of 'key=value'"),
        (
            {"observers": headrace.RunObserver()},
            "expected a list of objects whose classes derive from headrace.Run",
        ),
        (
            {"observers": [headrace.RunObserver]},
            "expected a list of objects whose classes derive from headrace.Run",
        ),
    ],
)
def test_an_argument_of_another_kind_is_told_at_once(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=f"headrace.train got .*{expected}"):
        headrace.train(**{"recipe": "demo_moe", **given})

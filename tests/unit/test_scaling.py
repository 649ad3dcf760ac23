"""The benchmark of several GPUs: its rows, its reading of a trace, and, over gloo, every line of it."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headrace.cli import find_benchmarks


@pytest.fixture
def layouts() -> Iterator[dict[str, ModuleType]]:
    """The benchmark's modules, which are no part of the package."""
    folder = str(find_benchmarks())
    sys.path.insert(0, folder)
    try:
        yield {name: importlib.import_module(f"layouts.{name}") for name in ("cases", "spread", "trace")}
    finally:
        sys.path.remove(folder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "layouts"]:
            del sys.modules[name]


def test_only_collectives_that_no_kernel_overlaps_are_exposed(layouts: dict[str, ModuleType]) -> None:
    trace = layouts["trace"]
    second = 10**9
    communication = [(0, 4 * second), (3 * second, 5 * second), (8 * second, 9 * second)]
    computation = [(1 * second, 2 * second), (8 * second, 10 * second)]
    assert trace.length(communication) == 6
    assert trace.exposed(communication, computation) == 4


def test_a_trace_of_a_gpu_is_split_into_collectives_and_other_kernels(layouts: dict[str, ModuleType]) -> None:
    names = ("ncclDevKernel_AllGather_RING_LL", "gemm", "nccl:all_gather", "FSDP::pre_forward", "Memcpy HtoD")
    named = [(name, (at, at + 5)) for at, name in enumerate(names)]
    communication, computation = layouts["trace"].split(named, cuda=True)
    assert (communication, computation) == ([(0, 5)], [(1, 6), (4, 9)])


def test_every_gpu_adds_rows_of_the_same_mean_length(layouts: dict[str, ModuleType]) -> None:
    cases = layouts["cases"]
    means = [cases.even_lengths(count, cases.LARGE).mean() for count in (32, 64, 256)]
    assert max(means) < 1.03 * min(means)
    lengths = cases.even_lengths(256, cases.LARGE)
    assert (lengths.min(), lengths.max()) == (200, 8000)


def test_rows_planned_by_cost_are_nearer_together_than_rows_dealt_round(
    layouts: dict[str, ModuleType],
) -> None:
    found = layouts["spread"].modelled("0.6b", 4, layouts["cases"].TINY)
    assert 1 <= found["planned"]["max_to_mean"] < found["dealt"]["max_to_mean"]
    assert all(way["lockstep"] >= way["max_to_mean"] for way in found.values())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_case_of_one_and_two_ranks_runs_over_gloo(tmp_path: Path) -> None:
    out = tmp_path / "scaling.json"
    command = [sys.executable, str(find_benchmarks() / "scaling.py"), "--tiny", "--repeats", "1"]
    done = subprocess.run(
        [*command, "--gpus", "1", "2", "--out", str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(out.read_text())
    assert report["notes"]["not_run"] == []
    figures = {figure["name"]: figure["figure"] for figure in report["figures"]}
    apart = {name: value for name, value in figures.items() if name.startswith(("loss_apart", "norm_apart"))}
    assert len(apart) == 2 * 11  # of each case of data parallel ranks that has a plain one beside it
    assert max(apart.values()) < 1e-4
    assert figures["spread.planned.0.6b.2"] >= 1
    assert figures["step.efficiency_by_layers.8b-36.2"] > 0
    assert figures["exposed.0.6b.2.data.headrace"] > 0

"""Measure the tests: change the code at random places and count the changes that a test notices.

    python tests/mutation.py codec --sample 100 --seed 0 [--children 2] [--out FILE]

A unit is some source files with the tests that belong to them. Mutants come from mutmut; a sample of them, drawn with
the seed, is run in a copy of the tree, each against the tests that reach the changed function. The result file
holds the counts and the diff of every mutant that no test noticed. `docs/mutation.md` says why the survivors of the
last runs change nothing.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mutmut.mutation.file_mutation import mutate_file_contents
from mutmut.utils.format_utils import get_mutant_name

# Exit statuses of pytest in a mutant's process: a failed or broken test, and time that ran out.
KILLED = {1, 3, 36, -24, 24, 152, 255}
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Unit:
    """Source files below src/headrace, and the tests below tests/ that belong to them (globs)."""

    sources: tuple[str, ...]
    tests: tuple[str, ...]


UNITS = {
    "router_replay": Unit(
        ("models/router_replay/*.py",),
        # Without the tests that compile models (mutmut's switch between versions cannot be) or start processes.
        (
            "unit/test_router_replay.py",
            "unit/test_router_replay_families.py",
            "unit/test_router_replay_pipeline.py",
            "unit/test_router_replay_rows.py",
            "unit/test_route_recording.py",
            "parity/test_router_replay_capture.py",
        ),
    ),
    "loss": Unit(
        ("algorithms/loss.py",),
        (
            "unit/test_loss*.py",
            "unit/test_paper_vectors.py",
            "unit/test_filtered_kl.py",
            "unit/test_train_mismatch.py",
            "unit/test_sample_stats.py",
        ),
    ),
    "advantages": Unit(
        ("algorithms/advantages.py",), ("unit/test_advantages*.py", "unit/test_paper_vectors.py")
    ),
    "packing": Unit(
        ("distributed/planner.py", "distributed/bin_packing.py", "distributed/balance.py"),
        ("unit/test_packing*.py", "unit/test_preshard.py", "unit/test_automodel_data.py"),
    ),
    "codec": Unit(
        ("data_plane/codec.py", "data_plane/wire.py"),
        (
            "unit/test_codec*.py",
            "unit/test_api_edge_rules.py",
            "unit/test_column_io.py",
            "contract/test_columns.py",
        ),
    ),
    "column_io": Unit(
        ("data_plane/column_io.py",),
        (
            "unit/test_column_io.py",
            "unit/test_api_edge_rules.py",
            "contract/test_columns.py",
            "contract/test_routes_at_put.py",
        ),
    ),
    "books": Unit(
        (
            "data_plane/store/sample_store.py",
            "data_plane/store/partition.py",
            "data_plane/store/columns.py",
            "data_plane/store/claims.py",
            "data_plane/store/groups.py",
        ),
        (
            "unit/test_local*.py",
            "unit/test_partition*.py",
            "contract/test_by_key.py",
            "unit/test_claim_schedules.py",
            "contract/test_claims.py",
            "contract/test_leases.py",
            "contract/test_columns.py",
            "contract/test_groups.py",
            "contract/test_lengths.py",
            "contract/test_partitions.py",
        ),
    ),
}


def main() -> int:
    """Run a sample of a unit's mutants; the exit status says whether the share killed reaches `--floor`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("unit", choices=sorted(UNITS))
    parser.add_argument("--sample", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--children", type=int, default=2)
    parser.add_argument("--floor", type=float, default=0.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    unit = UNITS[args.unit]
    names = sample(unit, args.sample, args.seed)
    with tempfile.TemporaryDirectory(prefix="headrace-mutants-") as folder:
        copy_tree(Path(folder), unit)
        mutmut(Path(folder), "run", "--max-children", str(args.children), *names)
        status = read_status(Path(folder))
        alive = [name for name in names if status.get(name) not in KILLED]
        diffs = {name: mutmut(Path(folder), "show", name) for name in alive}
    survivors = {name: diff for name, diff in diffs.items() if not only_wording(diff)}
    killed, counted = len(names) - len(alive), len(names) - len(alive) + len(survivors)
    report = f"{args.unit}, seed {args.seed}: {killed} of {counted} killed ({killed / counted:.1%}); "
    report += f"{len(names) - counted} more only word a message otherwise"
    out = args.out or ROOT / f"runs/mutation/{args.unit}.txt"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n\n".join([report, *survivors.values()]))
    print(report)
    print("\n".join(survivors))
    return int(killed < args.floor * counted)


def only_wording(diff: str) -> bool:
    """Whether a diff changes nothing but prose: texts with a blank in them."""
    changed: dict[str, list[str]] = {"-": [], "+": []}
    for line in diff.split("\n"):
        if line[:1] in changed and not line.startswith(("---", "+++")):
            changed[line[0]].append(re.sub(r'"[^"]* [^"]*"', "TEXT", line[1:]))
    return bool(changed["-"]) and changed["-"] == changed["+"]


def sources(unit: Unit) -> list[Path]:
    """Return the unit's files, relative to the root."""
    return sorted(p.relative_to(ROOT) for glob in unit.sources for p in ROOT.glob(f"src/headrace/{glob}"))


def sample(unit: Unit, count: int, seed: int) -> list[str]:
    """Return the names of `count` mutants, drawn from all of the unit's."""
    names = [
        get_mutant_name(path, name)
        for path in sources(unit)
        for name in mutate_file_contents(str(path), (ROOT / path).read_text(), None).mutant_names
    ]
    return sorted(random.Random(seed).sample(names, min(count, len(names))))


def copy_tree(folder: Path, unit: Unit) -> None:
    """Copy what git knows to `folder`, with mutmut's settings for the unit."""
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    for name in filter(None, listed.split("\n")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    tests = sorted(str(p.relative_to(ROOT)) for glob in unit.tests for p in ROOT.glob(f"tests/{glob}"))
    settings = {
        "source_paths": ["src"],
        "only_mutate": [str(p) for p in sources(unit)],
        "also_copy": ["docs", "benchmarks", "examples", "README.md", "Makefile"],
        "pytest_add_cli_args_test_selection": tests,
        "pytest_add_cli_args": ["-p", "no:cacheprovider", "-k", "not transfer_queue and not mooncake"],
        "timeout_constant": 20.0,
        "timeout_multiplier": 5.0,
        "track_dependencies": False,
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    with (folder / "pyproject.toml").open("a") as out:
        out.write("\n[tool.mutmut]\n" + "\n".join(lines) + "\n")


def mutmut(folder: Path, *words: str) -> str:
    """Run mutmut in the copy and return what it printed."""
    threads = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    env = {**os.environ, **threads, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "mutmut", *words]
    ran = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(
            f"{' '.join(command[:4])} ended with {ran.returncode}:\n{ran.stdout[-6000:]}\n{ran.stderr[-3000:]}"
        )
    return ran.stdout


def read_status(folder: Path) -> dict[str, int | None]:
    """Return the exit status of pytest by mutant: 1 where a test failed, 0 where none did."""
    found: dict[str, int | None] = {}
    for meta in (folder / "mutants").rglob("*.meta"):
        found |= json.loads(meta.read_text())["exit_code_by_key"]
    return found


if __name__ == "__main__":
    raise SystemExit(main())
